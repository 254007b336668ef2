"""`treadle encode`: the vectors of files, of texts, or of everything in shards."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.launch.config import ConfigError
from treadle.launch.flags import CONTEXT, Suggesting, check_device, configuration, flags, take_flags
from treadle.launch.settings import SourceSettings
from treadle.pipeline import Schema
from treadle.pipeline.samples import modality_of
from treadle.shape import Modality

if TYPE_CHECKING:
    from treadle.model import Encoder

CHUNK_ITEMS = 512
"""Items read before they are encoded: what is in memory at a time."""

CHUNK_BYTES = 2**28
"""Likewise, their bytes."""

MAX_FILE_BYTES = 2**30
"""A larger file is no one item."""


@dataclass(frozen=True, slots=True)
class Content:
    """One thing to encode."""

    key: str
    field: str
    modality: Modality
    data: bytes
    origin: str


@click.command("encode", cls=Suggesting, context_settings=CONTEXT)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1)
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="A text to encode, besides the inputs; repeat for more.")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="File of vectors: .npy (also when it has no ending), or .safetensors."
)
@click.option("--dimensions", type=click.IntRange(min=1), help="Leading values to keep; all of them when not given.")
@click.option("--modality", type=click.Choice([str(m) for m in Modality]), help="What the files hold, where their names do not say.")
@click.option("--device", help="Device to run on; CUDA where there is one when not given.")
@flags(Schema)
def encode_command(
    checkpoint: Path,
    inputs: tuple[str, ...],
    texts: tuple[str, ...],
    out: Path,
    dimensions: int | None,
    modality: str | None,
    device: str | None,
    **parameters: Any,
) -> None:
    """Write the unit vectors of INPUTS (files, or tar shards by URL, glob or brace range) for a CHECKPOINT (a file, or a run's folder).

    Vectors go to --out, one a row; beside it, with the ending .jsonl, one line per row says what it is: key, field, modality. What cannot
    be decoded is told and left out.
    """
    from treadle.launch.files import make_folder
    from treadle.model import Encoder
    from treadle.model.checkpoint_folder import find_checkpoint

    schema = configuration(Schema, None, take_flags(Schema, parameters))
    if not out.suffix:
        out = out.with_suffix(".npy")
    if out.suffix not in (".npy", ".safetensors"):
        raise ConfigError(f"--out is {out}: it must end in .npy or .safetensors")
    if not inputs and not texts:
        raise ConfigError("there is nothing to encode: name files or shards, or give --text")
    check_device("--device", device)
    path = find_checkpoint(checkpoint)
    make_folder(out.parent)
    encoder = Encoder.load(path, device)
    if dimensions is not None and dimensions > encoder.hidden:
        raise ConfigError(f"--dimensions is {dimensions}: the vectors of {path} have {encoder.hidden} values")
    kind = Modality.parse(modality) if modality else None
    rows, failed = _encode(encoder, _contents(encoder, inputs, texts, schema, kind), out, dimensions)
    if not rows:
        raise ValueError(f"none of the {failed} inputs could be encoded: see the lines above")
    click.echo(f"wrote {rows} vectors of {dimensions or encoder.hidden} values to {out}, and what they are to {out.with_suffix('.jsonl')}")
    if failed:
        click.echo(f"{failed} inputs could not be encoded and are left out: see the lines above", err=True)


def _contents(
    encoder: "Encoder", inputs: tuple[str, ...], texts: tuple[str, ...], schema: Schema, kind: Modality | None
) -> Iterator[Content]:
    from treadle.launch.samples import read_samples

    for number, text in enumerate(texts):
        yield Content(f"text-{number}", "", Modality.TEXT, text.encode(), "--text")
    for pattern in inputs:
        if (single := _single(pattern, kind)) is not None:
            yield single
            continue
        for sample in read_samples((SourceSettings(urls=(pattern,)),), encoder.config.batch, schema):
            for place, field in enumerate(sample.fields):
                yield Content(
                    sample.key, field, Modality(int(sample.items.modalities[place])), bytes(sample.items.content(place)), sample.url
                )


def _single(name: str, kind: Modality | None) -> Content | None:
    """A file that is one item, told by its name; None for a shard or a pattern."""
    path = Path(name)
    found = kind if kind is not None else modality_of(path.name.lower())
    if "://" in name or not path.is_file() or found is None:
        return None
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {size} bytes are more than the {MAX_FILE_BYTES} that one item may have")
    return Content(path.stem, path.suffix.lstrip("."), found, path.read_bytes(), name)


def _encode(encoder: "Encoder", contents: Iterator[Content], out: Path, dimensions: int | None) -> tuple[int, int]:
    """Encodes chunk by chunk; both files appear whole, or not at all."""
    import numpy as np

    from treadle.launch.files import write_text
    from treadle.launch.report import Bar
    from treadle.pipeline.whole_file import whole_file

    vectors: list[np.ndarray] = []
    lines: list[str] = []
    failed = 0
    with Bar("encoding", None) as bar:
        for chunk in _chunks(contents):
            for kind in Modality:
                listed = [content for content in chunk if content.modality is kind]
                if not listed:
                    continue
                if kind not in encoder.modalities:
                    failed += len(listed)
                    sys.stderr.write(
                        f"{listed[0].origin}: {kind} is not encoded here: the run trained {', '.join(map(str, encoder.modalities))}\n"
                    )
                    continue
                found_NM = encoder.encode(kind, [content.data for content in listed], dimensions, on_error="nan").cpu().numpy()
                for content, vector in zip(listed, found_NM, strict=True):
                    if np.isfinite(vector).all():
                        vectors.append(vector)
                        lines.append(
                            json.dumps({"key": content.key, "field": content.field, "modality": str(kind), "source": content.origin})
                        )
                    else:
                        failed += 1
                        sys.stderr.write(f"{content.origin}: {content.key} {content.field}: {_why(encoder, content)}\n")
            bar.at(len(vectors))
    if not vectors:
        return 0, failed
    table = np.stack(vectors).astype(np.float32)
    with whole_file(out) as file:
        if out.suffix == ".npy":
            np.save(file, table, allow_pickle=False)
        else:
            from safetensors.numpy import save

            file.write(save({"vectors": table}))
    write_text(out.with_suffix(".jsonl"), "".join(f"{line}\n" for line in lines))
    return len(vectors), failed


def _why(encoder: "Encoder", content: Content) -> str:
    """Why one content has no vector: its decode error, asked for again."""
    from treadle.decoders import DecodeError, decode

    try:
        decode(content.modality, content.data, encoder.config.batch)
    except DecodeError as error:
        return str(error)
    return "its vector is not finite"


def _chunks(contents: Iterator[Content]) -> Iterator[list[Content]]:
    chunk: list[Content] = []
    size = 0
    for content in contents:
        chunk.append(content)
        size += len(content.data)
        if len(chunk) >= CHUNK_ITEMS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
