"""The header of a safetensors file: where each tensor lies, made and read back with every size checked before it is used.

8 bytes           length of the header, little endian
header            JSON: name -> {"dtype", "shape", "data_offsets"}, and "__metadata__": strings by string
data              the tensors back to back, without gaps
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from treadle.model.storage_errors import DamagedFileError, TruncatedFileError

CHECKSUM_KEY = "treadle.crc32"
"""Metadata that holds CRC-32 of the file past its first 8 bytes, taken with the checksum itself as zeros."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the published format."""
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 2**60
"""Bounds sizes beside a zero, too, which take no bytes but overflow strides."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def place_tensors(tensors: Mapping[str, Tensor | np.ndarray]) -> list[Entry]:
    """Where each tensor goes, in the order of the file.

    Raises:
        ValueError: a tensor's type has no name in the format, or its own name is reserved.
    """
    sized: list[tuple[int, str, str, tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        dtype = _dtype_of(name, tensor)
        sized.append((DTYPES[dtype].itemsize, name, dtype, tuple(tensor.shape)))
    entries: list[Entry] = []
    begin = 0
    # The widest elements come first, so that every entry starts aligned without padding between them, which the format forbids.
    for item_bytes, name, dtype, shape in sorted(sized, key=lambda s: (-s[0], s[1])):
        end = begin + item_bytes * math.prod(shape)
        entries.append(Entry(name, dtype, shape, begin, end))
        begin = end
    return entries


def _dtype_of(name: str, tensor: Tensor | np.ndarray) -> str:
    if isinstance(tensor, np.ndarray):
        kinds = {
            "b": "BOOL",
            "u": f"U{8 * tensor.dtype.itemsize}",
            "i": f"I{8 * tensor.dtype.itemsize}",
            "f": f"F{8 * tensor.dtype.itemsize}",
        }
        dtype = "C64" if tensor.dtype == np.complex64 else kinds.get(tensor.dtype.kind, "")
    else:
        dtype = _NAMES.get(tensor.dtype, "")
    if dtype not in DTYPES or name == "__metadata__":
        raise ValueError(f"tensor {name!r} of type {tensor.dtype}: a safetensors file cannot hold it")
    return dtype


def checksum_field(checksum: str) -> bytes:
    """The checksum as it stands in the header."""
    return f'"{CHECKSUM_KEY}":"{checksum}"'.encode()


def make_header(entries: list[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header, its checksum still zeros.

    Raises:
        ValueError: the metadata uses the checksum's key, or the header passes the format's limit.
    """
    if CHECKSUM_KEY in metadata:
        raise ValueError(f"metadata {CHECKSUM_KEY!r} is reserved for the file's checksum")
    table: dict[str, object] = {"__metadata__": {CHECKSUM_KEY: "0" * 8, **dict(sorted(metadata.items()))}}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"names and metadata take {len(header)} bytes: a safetensors file holds {MAX_HEADER_BYTES}")
    return header


def read_header(path: str | Path, file: BinaryIO, size: int) -> bytes:
    """The header of a file of `size` bytes.

    Raises:
        TruncatedFileError: the file ends inside it.
        DamagedFileError: the file does not begin as a safetensors file does.
    """
    if size < 8:
        raise TruncatedFileError(path, f"is {size} bytes long: a safetensors file starts with 8 bytes of header length; use another copy")
    length = int.from_bytes(file.read(8), "little")
    if length < 2 or length > MAX_HEADER_BYTES:
        raise DamagedFileError(path, f"is no safetensors file: its header would be {length} bytes (2 to {MAX_HEADER_BYTES} allowed)")
    header = file.read(min(length, size - 8))
    if header and not header.startswith(b"{"):
        raise DamagedFileError(path, "is no safetensors file: its header is no JSON object")
    if len(header) < length:
        raise TruncatedFileError(path, f"ends inside its header, at {size} of at least {8 + length} bytes; use another copy")
    return header


def parse_header(path: str | Path, header: bytes, data_bytes: int) -> tuple[list[Entry], dict[str, str], str | None]:
    """The tensors in the order of the file, the metadata, and the checksum, None where another writer left none.

    Args:
        data_bytes: bytes that the file holds past the header.

    Raises:
        TruncatedFileError: tensors end past the file's end.
        DamagedFileError: the header is no table of tensors that lie back to back up to the file's end.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name comes twice")
        return table

    try:
        table = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"is no safetensors file: its header is no JSON ({error})") from error
    metadata: dict[str, str] = {}
    for key, value in _object(path, "__metadata__", table.pop("__metadata__", {})).items():
        if not isinstance(value, str):
            raise DamagedFileError(path, f"metadata {key[:80]!r} is no string")
        metadata[key] = value
    entries = sorted((_parse_entry(path, name, value) for name, value in table.items()), key=lambda e: (e.begin, e.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise DamagedFileError(path, f"tensor {entry.name!r} starts at byte {entry.begin} of the data, not at {at}")
        at = entry.end
    if at > data_bytes:
        raise TruncatedFileError(path, f"holds {data_bytes} of {at} bytes of tensors; use another copy")
    if at < data_bytes:
        raise DamagedFileError(path, f"{data_bytes - at} bytes follow its last tensor")
    return entries, metadata, metadata.pop(CHECKSUM_KEY, None)


def _object(path: str | Path, name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DamagedFileError(path, f"{name[:80]!r} is no JSON object")
    return value


def _parse_entry(path: str | Path, name: str, value: object) -> Entry:
    fields = _object(path, name, value)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedFileError(path, f"tensor {name[:80]!r} has the unknown type {str(dtype)[:40]!r}")
    sizes, places = _sizes(shape), _sizes(offsets)
    item_bytes = DTYPES[dtype].itemsize
    if sizes is None or len(sizes) > MAX_DIMENSIONS or places is None or len(places) != 2:
        raise DamagedFileError(path, f"tensor {name[:80]!r} has a broken shape or place")
    if math.prod(max(1, n) for n in sizes) * item_bytes > MAX_TENSOR_BYTES:
        raise DamagedFileError(path, f"tensor {name[:80]!r} has shape {list(sizes)}: no tensor is that large")
    needed = math.prod(sizes) * item_bytes
    if places[1] - places[0] != needed:
        raise DamagedFileError(path, f"tensor {name[:80]!r} of shape {sizes} takes {needed} bytes, its place {places[1] - places[0]}")
    return Entry(name, dtype, sizes, places[0], places[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = tuple(v for v in value if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**62)
    return sizes if len(sizes) == len(value) else None
