"""Numpy arrays in the safetensors format, written without copies and read without trust.

The packer works where numpy is all there is, hence our own two functions; any safetensors library reads these files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.tensor_header import Entry, TensorHeaderError, header_length, header_text, parse_header

MAX_HEADER_BYTES = 1 << 20
"""Longest header that is read; a batch's is about 3 KiB."""
MAX_DIMENSIONS = 8

_DTYPES = {"U8": np.uint8, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F32": np.float32}
_ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in _DTYPES.items()}
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
    entries: list[Entry] = []
    parts: list[bytes | memoryview] = []
    offset = 0
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        entries.append(Entry(name, _NAMES[array.dtype], array.shape, offset, offset + flat.nbytes))
        parts.append(flat.data)
        offset += flat.nbytes
    text = header_text(entries, metadata)
    return [len(text).to_bytes(8, "little") + text, *parts]


def header_bytes(start: bytes | memoryview) -> int:
    """Bytes of the header that the first 8 bytes announce.

    Raises:
        PackedError: there are no 8 bytes, or the header would be longer than `MAX_HEADER_BYTES`.
    """
    try:
        return header_length(start, MAX_HEADER_BYTES)
    except TensorHeaderError as error:
        raise PackedError(error.kind, error.detail) from error


def read_tensors(data: bytes | memoryview) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The arrays, as views of `data`, and the metadata.

    Raises:
        PackedError: the file is truncated, its header is malformed, or its sizes do not agree.
    """
    view = memoryview(data).cast("B")
    size = header_bytes(view)
    if len(view) < 8 + size:
        raise PackedError("truncated", f"the file ends after {len(view)} bytes, inside its header of {size}")
    body = view[8 + size :]
    try:
        entries, metadata = parse_header(bytes(view[8 : 8 + size]), len(body), _ITEM_BYTES, MAX_DIMENSIONS)
    except TensorHeaderError as error:
        raise PackedError(error.kind, error.detail) from error
    arrays: dict[str, NDArray[Any]] = {
        e.name: np.frombuffer(body[e.begin : e.end], np.uint8).view(_DTYPES[e.dtype]).reshape(e.shape) for e in entries
    }
    return arrays, metadata
