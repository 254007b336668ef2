"""`treadle doctor`: what this machine can do, line by line, with what to install where something is missing."""

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from treadle.launch.flags import CONTEXT

Standing = Literal["ok", "missing", "failed"]

LIBRARIES = (
    "torch",
    "torchaudio",
    "triton",
    "numpy",
    "av",
    "pillow",
    "simplejpeg",
    "soxr",
    "webdataset",
    "fsspec",
    "safetensors",
    "zstandard",
)
OPTIONAL = {
    "triton": "comes with torch on Linux",
    "s3fs": "pip install 'treadle[s3]'",
    "gcsfs": "pip install 'treadle[gcs]'",
    "huggingface-hub": "pip install 'treadle[hf]'",
}
VIDEO_DECODERS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
AUDIO_DECODERS = ("pcm_s16le", "flac", "mp3", "opus", "vorbis", "aac")
WRITTEN_MIB = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    standing: Standing
    detail: str


@click.command("doctor", context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("."), help="Folder whose disk is looked at.")
def doctor_command(as_json: bool, folder: Path) -> None:
    """Tell what this machine can do: Python, libraries, GPUs, codecs, threads, memory, disk.

    Exits 1 when something that every run needs is missing.
    """
    findings = examine(folder)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    if any(finding.standing == "failed" for finding in findings):
        raise click.exceptions.Exit(1)


def examine(folder: Path) -> list[Finding]:
    """All findings, in the order they are shown."""
    findings = [Finding("python", "ok", f"{platform.python_version()} ({sys.executable})"), Finding("machine", "ok", _machine())]
    findings += [_library(name) for name in (*LIBRARIES, "s3fs", "gcsfs", "huggingface-hub")]
    checks: tuple[tuple[str, Callable[[], tuple[Standing, str]]], ...] = (
        ("gpu", _gpus),
        ("nccl", _nccl),
        ("cpu matrix product", _matrix_product),
        ("video decoders", lambda: _codecs(VIDEO_DECODERS)),
        ("audio decoders", lambda: _codecs(AUDIO_DECODERS)),
        ("image decoders", _images),
        ("memory", _memory),
        ("disk", lambda: _disk(folder)),
    )
    for what, check in checks:
        try:
            findings.append(Finding(what, *check()))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            findings.append(Finding(what, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return findings


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"


def _library(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if name in OPTIONAL:
            return Finding(name, "missing", OPTIONAL[name])
        return Finding(name, "failed", f"not installed: pip install {name}")


def _gpus() -> tuple[Standing, str]:
    import torch

    if not torch.cuda.is_available():
        return "missing", "none that PyTorch can use: everything runs on the CPU"
    shown: list[str] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        shown.append(f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB")
    return "ok", f"{'; '.join(shown)} (CUDA {torch.version.cuda})"


def _nccl() -> tuple[Standing, str]:
    import torch

    if not torch.distributed.is_available():
        return "missing", "this PyTorch has no torch.distributed: one process only"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return "ok", ".".join(map(str, version))
    return "missing", "ranks meet by gloo"


def _matrix_product() -> tuple[Standing, str]:
    import torch

    side, rounds = 512, 8
    a, b = torch.randn(side, side), torch.randn(side, side)
    torch.mm(a, b)
    began_s = time.perf_counter()
    for _ in range(rounds):
        torch.mm(a, b)
    elapsed_s = max(time.perf_counter() - began_s, 1e-9)
    return "ok", f"{2 * side**3 * rounds / elapsed_s / 1e9:.0f} GFLOP/s in fp32 on {torch.get_num_threads()} threads"


def _codecs(wanted: tuple[str, ...]) -> tuple[Standing, str]:
    import av

    have = [name for name in wanted if name in av.codecs_available]
    lacking = [name for name in wanted if name not in have]
    if lacking:
        return "failed", f"PyAV lacks {', '.join(lacking)}: install the `av` wheel from PyPI"
    return "ok", ", ".join(have)


def _images() -> tuple[Standing, str]:
    from PIL import features

    names = {"jpg": "JPEG", "zlib": "PNG", "webp": "WebP"}
    lacking = [shown for name, shown in names.items() if not features.check(name)]
    if lacking:
        return "failed", f"Pillow lacks {', '.join(lacking)}: install the `pillow` wheel from PyPI"
    importlib.import_module("simplejpeg")
    return "ok", ", ".join(names.values()) + ", simplejpeg for JPEG"


def _memory() -> tuple[Standing, str]:
    from treadle.pipeline.memory import gib, host_bytes

    return "ok", f"{gib(host_bytes())} for this process"


def _disk(folder: Path) -> tuple[Standing, str]:
    usage = shutil.disk_usage(folder)
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began_s = time.perf_counter()
        for _ in range(WRITTEN_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        elapsed_s = max(time.perf_counter() - began_s, 1e-9)
    return "ok", f"{usage.free / 2**30:.1f} GiB free at {folder.resolve()}, writes {WRITTEN_MIB / elapsed_s:.0f} MiB/s"


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from treadle.launch.report import console

    table = Table(title="What this machine can do", title_justify="left")
    table.add_column("what")
    table.add_column("")
    table.add_column("detail")
    colours = {"ok": "green", "missing": "yellow", "failed": "red"}
    for finding in findings:
        table.add_row(finding.what, f"[{colours[finding.standing]}]{finding.standing}[/]", escape(finding.detail))
    console().print(table)
