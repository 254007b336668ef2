"""Numpy arrays in the safetensors format, written without copies and read without trust.

    8 bytes           length of the header, little endian
    header            JSON: name -> {"dtype", "shape", "data_offsets"}, and "__metadata__": strings by string
    data              the arrays back to back, without gaps

The packer works where numpy is all there is, hence our own two functions; any safetensors library reads these files.
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES = 1 << 20
"""Longest header that is read; a batch's is about 3 KiB."""

_DTYPES = {"U8": np.uint8, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F32": np.float32}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class PackedError(Exception):
    """A packed batch, shard or index that cannot be used.

    `kind` is stable: "truncated", "corrupt", "version" (another format), "mismatch" (another shape) or "too_large".
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def tensor_parts(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The file's bytes in parts: its header, then the arrays' own memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts: list[bytes | memoryview] = []
    offset = 0
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + flat.nbytes]}
        parts.append(flat.data)
        offset += flat.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def header_bytes(start: bytes | memoryview) -> int:
    """Bytes of the header that the first 8 bytes announce.

    Raises:
        PackedError: there are no 8 bytes, or the header would be longer than `MAX_HEADER_BYTES`.
    """
    if len(start) < 8:
        raise PackedError("truncated", f"the file ends after {len(start)} bytes, before its header")
    size = int.from_bytes(start[:8], "little")
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise PackedError("corrupt", f"the header claims {size} bytes: it must have 2 to {MAX_HEADER_BYTES}")
    return size


def read_tensors(data: bytes | memoryview) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays, as views of `data`, and the metadata.

    Raises:
        PackedError: the file is truncated, its header is malformed, or its sizes do not agree.
    """
    view = memoryview(data).cast("B")
    size = header_bytes(view)
    if len(view) < 8 + size:
        raise PackedError("truncated", f"the file ends after {len(view)} bytes, inside its header of {size}")
    header = _parsed(bytes(view[8 : 8 + size]))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PackedError("corrupt", "__metadata__ is not a table of strings")
    body = view[8 + size :]
    arrays: dict[str, NDArray[Any]] = {}
    end = 0
    for name, entry in header.items():
        dtype, shape, begin, stop = _entry(name, entry)
        if begin != end or stop - begin != prod(shape) * dtype.itemsize:
            raise PackedError("corrupt", f"{name}: bytes {begin} to {stop} do not hold {dtype} of shape {list(shape)} after byte {end}")
        if stop > len(body):
            raise PackedError("truncated", f"{name} ends at byte {stop} of {len(body)}")
        arrays[name] = np.frombuffer(body[begin:stop], np.uint8).view(dtype).reshape(shape)
        end = stop
    if end != len(body):
        raise PackedError("corrupt", f"{len(body) - end} bytes follow the last array")
    return arrays, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise PackedError("corrupt", "the header names something twice")
    return table


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise PackedError("corrupt", f"the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise PackedError("corrupt", "the header is no JSON table")
    return header


def _entry(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise PackedError("corrupt", f"{name}: the header entry is no table")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise PackedError("corrupt", f"{name}: dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    begin, stop = _sizes(name, "data_offsets", offsets, 2, 2)
    return np.dtype(_DTYPES[dtype]), _sizes(name, "shape", shape, 0, 8), begin, stop


def _sizes(name: str, what: str, values: Any, least: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not least <= len(values) <= most or not all(type(v) is int and 0 <= v < 2**53 for v in values):
        raise PackedError("corrupt", f"{name}: {what} {values!r} is no list of {least} to {most} sizes")
    if prod(value or 1 for value in values) >= 2**62:
        raise PackedError("corrupt", f"{name}: {what} {values!r} is larger than any file")
    return tuple(values)
