"""Where each tensor of a safetensors file of ours goes, and the checksums that ride in its metadata.

Entries are ordered by element size and name, so that the same content gives the same bytes. `treadle.crc32` holds CRC-32 in hexadecimal:
8 digits of the header, taken with all digits of it as zeros, then 8 digits of each tensor's bytes in the order of the file. The format has
no checksum of its own, and a flipped bit in a weight would train on unseen; one a tensor says which was changed, and costs 8 bytes.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from treadle.model.storage_errors import DamagedFileError, TruncatedFileError
from treadle.pipeline.tensor_header import Entry, TensorHeaderError, header_length, header_text, parse_header

CHECKSUM_KEY = "treadle.crc32"
_DIGITS = 8

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
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_NUMPY_KINDS = {"b": "BOOL", "u": "U", "i": "I", "f": "F"}


def is_held(dtype: torch.dtype) -> bool:
    """Whether the format has a name for a type."""
    return dtype in _NAMES


def place_tensors(tensors: Mapping[str, Tensor | np.ndarray]) -> list[Entry]:
    """Where each tensor goes, in the order of the file.

    Raises:
        ValueError: a tensor's type has no name in the format, or its own name is reserved.
    """
    sized: list[tuple[int, str, str, tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        dtype = _dtype_of(name, tensor)
        sized.append((_ITEM_BYTES[dtype], name, dtype, tuple(tensor.shape)))
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
        kind = _NUMPY_KINDS.get(tensor.dtype.kind, "")
        dtype = kind if kind == "BOOL" else f"{kind}{8 * tensor.dtype.itemsize}"
    else:
        dtype = _NAMES.get(tensor.dtype, "")
    if dtype not in DTYPES or name == "__metadata__":
        raise ValueError(f"tensor {name!r} of type {tensor.dtype}: a safetensors file cannot hold it")
    return dtype


def make_header(entries: list[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header, its checksums still zeros.

    Raises:
        ValueError: the metadata uses the checksums' key, or the header passes the format's limit.
    """
    if CHECKSUM_KEY in metadata:
        raise ValueError(f"metadata {CHECKSUM_KEY!r} is reserved for the file's checksums")
    return header_text(entries, {CHECKSUM_KEY: "0" * _DIGITS * (1 + len(entries)), **dict(sorted(metadata.items()))})


def checksummed(header: bytes, tensors: Sequence[int]) -> bytes:
    """A header of `make_header` with its own checksum and those of the tensors."""
    digits = "".join(f"{crc:08x}" for crc in (zlib.crc32(header), *tensors))
    return header.replace(_field("0" * len(digits)), _field(digits), 1)


def _field(digits: str) -> bytes:
    return f'"{CHECKSUM_KEY}":"{digits}"'.encode()


def read_header(path: str | Path, file: BinaryIO, size: int) -> tuple[bytes, list[Entry], dict[str, str]]:
    """The header of a file of `size` bytes: its text, the tensors in the order of the file, and the metadata, checksums included.

    Raises:
        TruncatedFileError: the file ends inside the header, or tensors end past the file's end.
        DamagedFileError: the file does not begin as a safetensors file does.
    """
    try:
        length = header_length(file.read(8))
        header = file.read(min(length, size - 8))
        if header and not header.startswith(b"{"):
            raise TensorHeaderError("corrupt", "the header is no JSON table")
        if len(header) < length:
            raise TensorHeaderError("truncated", f"it ends inside its header, at {size} of at least {8 + length} bytes")
        return header, *parse_header(header, size - 8 - length, _ITEM_BYTES)
    except TensorHeaderError as error:
        if error.kind == "truncated":
            raise TruncatedFileError(path, f"was cut: {error.detail}; use another copy") from error
        raise DamagedFileError(path, f"is no safetensors file: {error.detail}") from error


def take_checksums(path: str | Path, header: bytes, metadata: dict[str, str], count: int) -> list[str] | None:
    """Removes the checksums from the metadata and answers those of the `count` tensors; None where another writer left none.

    Raises:
        DamagedFileError: there are none for each tensor, or the header does not match its own.
    """
    digits = metadata.pop(CHECKSUM_KEY, None)
    if digits is None:
        return None
    found = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
    if len(found) != 1 + count:
        raise DamagedFileError(path, f"holds {count} tensors and {len(found)} checksums: it was changed; use another copy")
    crc = zlib.crc32(header.replace(_field(digits), _field("0" * len(digits)), 1))
    if found[0] != f"{crc:08x}":
        raise DamagedFileError(path, f"its header has checksum {crc:08x}, written with {found[0]}: it was changed; use another copy")
    return found[1:]
