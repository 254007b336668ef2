"""`make gpu`: everything that needs a GPU, in one command of at most eight minutes on one H200.

1. Tests of `tests/kernels/triton` and `tests/gpu` on the device: kernels against references, repeats to the last bit, graph against eager,
   a training run against the CPU's, no synchronisation in the step.
2. compute-sanitizer on the smallest of them, where it is installed.
3. The table: attention, patch embedding, pair loss, MaxSim, and steps at the reference shape, each against what it claims to beat.

Writes gpu.json and gpu.md. Exits 2 with one line where there is no GPU, 1 where a test failed or a target was missed.
"""

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case, cases

from treadle.kernels.registry import Workload
from treadle.kernels.roofline import CHIPS, Chip, model_operations
from treadle.model.config import Schedule, TrainerConfig
from treadle.model.device_step import VARIABLE
from treadle.model.trainer import Trainer
from treadle.pipeline import PackedBatch, Packer, StepItems
from treadle.shape import BatchShape, Modality

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 480.0
TEST_S, SANITIZER_S = 170.0, 60.0
TESTS_AT_A_TIME = 8
"""Files of tests that run beside each other: most of their time is the compiler's."""
SANITIZED = (
    "test_attention and 63 or test_patch_embed and tubes and 5 or test_chunk_embed and 7-lengths or test_pair_loss and anchor"
    " or test_maxsim and 24 or test_row_loss and size0 or test_byte_embed and 63 or test_rms_norm and 1023 or test_rotary and 33"
    " or test_cover_spans and 3.0 or test_swiglu and 17 or test_mean_pool and mixed or test_byte_cross_entropy and 12-5 or test_patches_and_tubes and 2-4-1"
)
"""Small tests, one of every op, in the form of pytest's `-k`."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table."""

    name: str
    value: float
    unit: str
    target: str
    met: bool | None
    """None where nothing was promised."""
    detail: str = ""


def time_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of `work` by events of the device, after a few runs that do not count."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    taken: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def bound_ms(case: Case, chip: Chip) -> float:
    """The larger of matrix time and bandwidth time at the peaks."""
    return 1e3 * max(case.operations / chip.flops, case.bytes / chip.bytes_per_s)


def chip_of(name: str) -> Chip:
    """The peaks of a device by its name; the H100's for one that the table does not know."""
    return next((chip for chip in CHIPS if chip.name in name), CHIPS[0])


def measure(case: Case, chip: Chip) -> list[Figure]:
    """Times of both sides, their ratio, and what else the case promises."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.ours()
    peak = torch.cuda.max_memory_allocated() - before
    ours = time_ms(case.ours)
    assert case.baseline is not None
    baseline = time_ms(case.baseline, repeats=10)
    figures = judge(case, chip, ours, baseline, peak)
    figures.append(
        Figure(
            name=f"{case.name}: answers apart",
            value=case.difference(),
            unit="relative",
            target=f"at most {case.tolerance}",
            met=case.difference() <= case.tolerance,
        )
    )
    return figures


def judge(case: Case, chip: Chip, ours_ms: float, baseline_ms: float, peak_bytes: int) -> list[Figure]:
    """What a case's times say about its targets."""
    ratio, share = baseline_ms / ours_ms, bound_ms(case, chip) / ours_ms
    detail = f"{ours_ms:.3f} ms, {case.baseline_name} {baseline_ms:.3f} ms, bound {bound_ms(case, chip):.3f} ms; {case.sizes}"
    needed = {"attention forward": 0.8, "attention backward": 0.7, "patch embedding": 1.0, "pair loss": 1.0, "MaxSim": 5.0}[case.name]
    figures = [
        Figure(
            name=f"{case.name}: speed over {case.baseline_name}",
            value=ratio,
            unit="x",
            target=f"at least {needed}",
            met=ratio >= needed,
            detail=detail,
        )
    ]
    figures.append(
        Figure(
            name=f"{case.name}: share of its bound",
            value=100 * share,
            unit="%",
            target="at least 70" if case.name == "patch embedding" else "",
            met=share >= 0.7 if case.name == "patch embedding" else None,
        )
    )
    if case.name == "pair loss":
        figures.append(Figure(name="pair loss: memory", value=peak_bytes / GIB, unit="GiB", target="below 1", met=peak_bytes < GIB))
    return figures


def text_batch(shape: BatchShape, length: int, items: int) -> PackedBatch:
    """Texts of one length, packed."""
    texts = [bytes((7 * i + j) % 251 for j in range(length - 1)) for i in range(items)]
    return Packer(shape).pack(StepItems([Modality.TEXT] * items, texts))


def run_steps(config: TrainerConfig, batch: PackedBatch, mode: str, steps: int) -> float:
    """Median milliseconds of a step in one mode, over `steps` after those that load and capture."""
    os.environ[VARIABLE] = mode
    # The trainer before, and its graph's memory, must be gone: each takes half of the device.
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with Trainer(config) as trainer:
            for _ in range(6):
                last = trainer.submit(batch)
            last.result().stats  # noqa: B018  # waits for the device
            taken: list[float] = []
            for _ in range(max(1, steps // 5)):
                begin = time.perf_counter()
                for _ in range(5):
                    last = trainer.submit(batch)
                last.result().stats  # noqa: B018
                taken.append((time.perf_counter() - begin) / 5)
    finally:
        del os.environ[VARIABLE]
    return 1e3 * statistics.median(taken)


def steps_figures(
    chip: Chip, *, rows: int = 64, columns: int = 1024, hidden: int = 1024, depth: int = 24, steps: int = 10, device: str = "cuda"
) -> list[Figure]:
    """MFU at the reference shape on texts of 256 positions, graph against eager against free sizes, packed against one item a row."""
    length, per_row = columns // 4, 4
    shape = BatchShape(max_rows_per_device=rows, max_segments_per_device=per_row * rows, max_columns_per_row=columns)
    config = TrainerConfig(depth=depth, hidden=hidden, batch=shape, schedule=Schedule(steps=10_000), device=device)
    packed = text_batch(shape, length, per_row * rows)
    graph, eager, free = (run_steps(config, packed, mode, steps) for mode in ("graph", "eager", "free"))
    work = Workload(
        positions=rows * columns, hidden=hidden, depth=depth, segment_length=length, text_positions=rows * columns,
        image_patches=0, video_tubes=0, audio_chunks=0,
    )  # fmt: skip
    mfu = model_operations(work) / (graph / 1e3 * chip.flops)
    # A padded batch: one item a row, so that the rows' other three quarters are padding that is computed.
    padded = text_batch(shape, length, rows)
    ratio = (per_row * rows / graph) / (rows / run_steps(config, padded, "graph", steps))
    return [
        Figure(
            name="MFU at the reference shape",
            value=100 * mfu,
            unit="%",
            target="at least 50",
            met=mfu >= 0.5,
            detail=f"{graph:.1f} ms a step",
        ),
        Figure(name="step: graph over eager", value=eager / graph, unit="x", target="", met=None, detail=f"eager {eager:.1f} ms"),
        Figure(name="step: fixed sizes over free sizes", value=free / graph, unit="x", target="", met=None, detail=f"free {free:.1f} ms"),
        Figure(name="items a second, packed over padded", value=ratio, unit="x", target="at least 3", met=ratio >= 3),
    ]


def run_tests(arguments: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One run of pytest or of what wraps it, with `environment` beside this process's own: status, last line, seconds."""
    begin, whole = time.perf_counter(), os.environ | (environment or {})
    try:
        done = subprocess.run([*arguments], cwd=ROOT, env=whole, capture_output=True, text=True, timeout=limit_s, check=False)
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, text = 124, f"{error.stdout or ''}\nran past {limit_s:.0f} s"
    lines = [line for line in text.splitlines() if line.strip()]
    return {
        "command": " ".join(arguments[-4:]),
        "status": status,
        "last": lines[-1] if lines else "",
        "failures": [line for line in lines if line.startswith(("FAILED", "ERROR", "========= ERROR"))][:20],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def sanitizer() -> list[str]:
    """The command in front of a small test, or nothing where it is not installed."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    return [found, "--tool", "memcheck", "--error-exitcode", "9"] if found else []


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# Treadle on {report['device']}", "", f"torch {report['torch']}, triton {report['triton']}, commit {report['commit']}", ""]
    lines += ["| figure | value | target | met |", "|---|---|---|---|"]
    for row in report["figures"]:
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        lines.append(f"| {row['name']} | {row['value']:.3g} {row['unit']} | {row['target']} | {met} |")
    lines += ["", "| checks | status | seconds | |", "|---|---|---|---|"]
    lines += [
        f"| `{c['command']}` | {'passed' if c['status'] == 0 else c['status']} | {c['seconds']} | {c['last']} |" for c in report["checks"]
    ]
    lines += ["", *(f"- {row['name']}: {row['detail']}" for row in report["figures"] if row["detail"])]
    lines += ["", *(f"- {failure}" for check in report["checks"] for failure in check["failures"])]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, report: dict[str, Any]) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(report))


def passed(report: dict[str, Any]) -> bool:
    """Whether every check passed and every target was met."""
    return all(c["status"] == 0 for c in report["checks"]) and all(row["met"] is not False for row in report["figures"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything within the budget and writes the report after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_report", help="folder of gpu.json and gpu.md [gpu_report]")
    parser.add_argument("--no-tests", action="store_true", help="the table alone")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("make gpu needs a CUDA device, and torch sees none here\n")
        return 2
    begin = time.perf_counter()
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    chip = chip_of(name)
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "triton": triton.__version__, "commit": commit, "figures": [], "checks": [],
    }  # fmt: skip
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not options.no_tests:
        files = sorted(
            str(file.relative_to(ROOT)) for folder in ("kernels/triton", "gpu") for file in (ROOT / "tests" / folder).glob("test_*.py")
        )
        with ThreadPoolExecutor(TESTS_AT_A_TIME) as pool:
            report["checks"] += pool.map(lambda file: run_tests([*pytest, "-m", "not thorough", file], TEST_S), files)
        write(options.out, report)
        if sanitizer():
            small = [*sanitizer(), *pytest, "-m", "not thorough", "-k", SANITIZED, "tests/kernels/triton"]
            # Every tensor in an allocation of its own, or what is read past one lies in another.
            report["checks"].append(run_tests(small, SANITIZER_S, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    parts: list[Callable[[], list[Figure]]] = [lambda make=make: measure(make(), chip) for make in cases(device)]
    for part in [*parts, lambda: steps_figures(chip)]:
        if time.perf_counter() - begin > BUDGET_S - 60:
            report["checks"].append({"command": "table", "status": 124, "last": "out of time", "failures": [], "seconds": 0})
            break
        try:
            report["figures"] += [asdict(figure) for figure in part()]
        except Exception as error:  # a part that fails must not take the others' numbers with it
            report["checks"].append(
                {
                    "command": "table",
                    "status": 1,
                    "last": f"{type(error).__name__}: {error}".splitlines()[0][:200],
                    "failures": [],
                    "seconds": 0,
                }
            )
        write(options.out, report)
    report["seconds"] = math.ceil(time.perf_counter() - begin)
    write(options.out, report)
    sys.stdout.write(markdown(report))
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
