"""The table at the head of a safetensors file: where each tensor lies, made and read back with every size checked before it is used.

    8 bytes           length of the header, little endian
    header            JSON: name -> {"dtype", "shape", "data_offsets"}, and "__metadata__": strings by string
    data              the tensors back to back, without gaps

Both readers of the format stand on it: the one of packed batches, where numpy is all there is, and the one of checkpoints and records.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The limit of the published format."""
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 2**60
"""Bounds sizes beside a zero, too, which take no bytes but overflow strides."""


class TensorHeaderError(ValueError):
    """A header that cannot be used; `kind` is "truncated" or "corrupt"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place."""

    name: str
    dtype: str
    """Its type's name in the format."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


def header_text(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header of these entries, padded to a multiple of 8 bytes, its length not before it.

    Raises:
        ValueError: it passes the format's limit.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"names and metadata take {len(text)} bytes: a safetensors file holds {MAX_HEADER_BYTES}")
    return text


def header_length(start: bytes | memoryview, most: int = MAX_HEADER_BYTES) -> int:
    """Bytes of the header that the file's first 8 bytes announce.

    Raises:
        TensorHeaderError: there are no 8 bytes, or the header would be longer than `most`.
    """
    if len(start) < 8:
        raise TensorHeaderError("truncated", f"the file ends after {len(start)} bytes, before its header")
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= most:
        raise TensorHeaderError("corrupt", f"the header claims {length} bytes: it must have 2 to {most}")
    return length


def parse_header(
    text: bytes, data_bytes: int, item_bytes: Mapping[str, int], max_dimensions: int = MAX_DIMENSIONS
) -> tuple[list[Entry], dict[str, str]]:
    """The tensors in the order of the data, and the metadata.

    Args:
        data_bytes: bytes that the file holds past the header.
        item_bytes: bytes an element, by the name of each type that the caller takes.

    Raises:
        TensorHeaderError: the header is no table of tensors that lie back to back up to the file's end.
    """
    table = _parsed(text)
    if not isinstance(table, dict):
        raise TensorHeaderError("corrupt", "the header is no JSON table")
    metadata: dict[str, str] = {}
    for key, value in _object("__metadata__", table.pop("__metadata__", {})).items():
        if not isinstance(value, str):
            raise TensorHeaderError("corrupt", f"__metadata__ is not a table of strings: {key[:80]!r} is none")
        metadata[key] = value
    entries = sorted((_entry(name, value, item_bytes, max_dimensions) for name, value in table.items()), key=lambda e: (e.begin, e.end))
    at, start = 0, 8 + len(text)
    for entry in entries:
        if entry.begin != at:
            raise TensorHeaderError("corrupt", f"{entry.name[:80]} starts at byte {start + entry.begin} of the file, not at {start + at}")
        at = entry.end
        if at > data_bytes:
            raise TensorHeaderError("truncated", f"{entry.name[:80]} ends at byte {start + at}, the file at {start + data_bytes}")
    if at < data_bytes:
        raise TensorHeaderError("corrupt", f"{data_bytes - at} bytes follow the last tensor")
    return entries, metadata


def _parsed(text: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise TensorHeaderError("corrupt", "the header names something twice")
        return table

    try:
        return json.loads(text, object_pairs_hook=once)
    except TensorHeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise TensorHeaderError("corrupt", f"the header is no JSON: {error}") from error


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TensorHeaderError("corrupt", f"{name} is no table")
    return value


def _entry(name: str, value: Any, item_bytes: Mapping[str, int], max_dimensions: int) -> Entry:
    fields = _object(f"{name[:80]}: the header entry", value)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in item_bytes:
        raise TensorHeaderError("corrupt", f"{name[:80]}: dtype {str(dtype)[:40]!r} is not one of {', '.join(item_bytes)}")
    shape = _sizes(name, "shape", fields.get("shape"), 0, max_dimensions)
    begin, end = _sizes(name, "data_offsets", fields.get("data_offsets"), 2, 2)
    if prod(max(1, n) for n in shape) * item_bytes[dtype] > MAX_TENSOR_BYTES:
        raise TensorHeaderError("corrupt", f"{name[:80]}: shape {list(shape)} is larger than any file")
    needed = prod(shape) * item_bytes[dtype]
    if end - begin != needed:
        raise TensorHeaderError("corrupt", f"{name[:80]}: data_offsets {begin} to {end} do not hold {dtype} of shape {list(shape)}")
    return Entry(name, dtype, shape, begin, end)


def _sizes(name: str, what: str, values: Any, least: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not least <= len(values) <= most or not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise TensorHeaderError("corrupt", f"{name[:80]}: {what} {str(values)[:80]} is no list of {least} to {most} sizes")
    return tuple(values)
