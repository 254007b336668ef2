"""One safetensors file, written whole or not at all, and read back with every size checked before it is used.

The file is the published safetensors format, so that any reader of it opens ours; entries are ordered by element size and name,
so that the same content gives the same bytes. A checksum of the whole file rides in its metadata, because safetensors has none and a
flipped bit in a weight would otherwise train on unseen.

Guarantee: `write_tensors` writes beside the target, fsyncs and renames. Killed at any moment, or out of disk, it leaves the old file.
"""

import fcntl
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

CHECKSUM_KEY = "treadle.crc32"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the published format."""
MAX_DIMENSIONS = 64

_DTYPES: dict[str, torch.dtype] = {
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

OnTensor = Callable[[int, int], None]
"""`on_tensor(done, total)` follows the tensors; what it raises ends the call, and a write leaves the old file."""


class StorageFileError(ValueError):
    """A file that cannot be read or written; the message names the path, what is wrong and what to do."""

    def __init__(self, path: str | Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = str(path)
        self.detail = detail


class MissingFileError(StorageFileError):
    """There is no such file."""


class TruncatedFileError(StorageFileError):
    """The file ends before its content does."""


class DamagedFileError(StorageFileError):
    """The file is no safetensors file, or was changed after it was written."""


class NewerFormatError(StorageFileError):
    """A later version of Treadle wrote the file."""


class WrongFormatError(StorageFileError):
    """A whole file, but of another kind."""


class UnwritableFileError(StorageFileError):
    """The folder or the disk refused the file; what was there before is untouched."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor | np.ndarray],
    metadata: Mapping[str, str],
    *,
    on_tensor: OnTensor | None = None,
) -> None:
    """Writes `tensors` and `metadata` as one safetensors file at `path`, whole: beside it first, then fsync and rename.

    Tensors may share storage and lie on any device; they are brought to the host one at a time.

    Raises:
        UnwritableFileError: the folder is missing or read-only, or the disk is full. The file that was there is untouched.
        ValueError: a tensor's type has no safetensors name, or the metadata passes the format's header limit.
    """
    entries = _place(tensors)
    header = _header(entries, metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: names and metadata take {len(header)} bytes: the format allows {MAX_HEADER_BYTES}")
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise UnwritableFileError(path, "is a folder: name a file in it")
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
        _remove_abandoned(target)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _write_body(file, header, entries, tensors, on_tensor)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        _sync_folder(target.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


def read_tensors(path: str | Path, *, on_tensor: OnTensor | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (on the host, in their own memory) and the metadata of a safetensors file.

    A file without our checksum is read as any other safetensors file.

    Raises:
        MissingFileError: there is no file at `path`.
        TruncatedFileError: it ends before its content does.
        DamagedFileError: it is no safetensors file, or what it holds does not match its checksum.
        StorageFileError: it cannot be opened or read.
    """
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(path, file, size)
            entries, metadata, checksum = _parse(path, header, size - 8 - len(header))
            zeroed = header if checksum is None else header.replace(_checksum_field(checksum), _checksum_field("0" * 8))
            crc = zlib.crc32(zeroed)
            tensors: dict[str, Tensor] = {}
            for entry in entries:
                tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
                buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
                if entry.end > entry.begin:
                    _fill(path, file, buffer)
                    crc = zlib.crc32(buffer, crc)
                tensors[entry.name] = tensor
                if on_tensor is not None:
                    on_tensor(len(tensors), len(entries))
    except FileNotFoundError as error:
        raise MissingFileError(path, "there is no such file; check the path") from error
    except IsADirectoryError as error:
        raise StorageFileError(path, "is a folder: name the file in it") from error
    except OSError as error:
        raise StorageFileError(path, f"cannot be read: {error.strerror or error}") from error
    if checksum is not None and checksum != f"{crc:08x}":
        raise DamagedFileError(path, f"its content has checksum {crc:08x}, written with {checksum}: the file was changed; use another copy")
    return tensors, metadata


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata alone, at the cost of reading the header; the content's checksum is not verified.

    Raises:
        StorageFileError: as `read_tensors`.
    """
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(path, file, size)
    except FileNotFoundError as error:
        raise MissingFileError(path, "there is no such file; check the path") from error
    except OSError as error:
        raise StorageFileError(path, f"cannot be read: {error.strerror or error}") from error
    return _parse(path, header, size - 8 - len(header))[1]


def _opened(path: str | Path) -> BinaryIO:
    # A pipe would wait for a writer that may never come.
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise StorageFileError(path, "is a pipe: a file is needed, whose size is known")
    return open(path, "rb")


def require_format(path: str | Path, metadata: Mapping[str, str], kind: str, version: int) -> int:
    """The format version of a file whose metadata must carry `format=kind` and `format_version` up to `version`.

    Raises:
        WrongFormatError: the file is of another kind.
        NewerFormatError: its version is above `version`.
        DamagedFileError: its version is no number.
    """
    found = metadata.get("format")
    if found != kind:
        raise WrongFormatError(path, f"holds {found or 'tensors of no named kind'}: a {kind} is needed")
    text = metadata.get("format_version", "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DamagedFileError(path, f"its format version is {text[:40]!r}: it must be a whole number")
    if int(text) > version:
        raise NewerFormatError(path, f"is a {kind} of format {text}, this version reads up to {version}: update treadle")
    return int(text)


def _place(tensors: Mapping[str, Tensor | np.ndarray]) -> list[_Entry]:
    sized: list[tuple[int, str, str, tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        dtype = _dtype_of(name, tensor)
        sized.append((_DTYPES[dtype].itemsize, name, dtype, tuple(tensor.shape)))
    entries: list[_Entry] = []
    begin = 0
    # The widest elements come first, so that every entry starts aligned without padding between them, which the format forbids.
    for item_bytes, name, dtype, shape in sorted(sized, key=lambda s: (-s[0], s[1])):
        end = begin + item_bytes * math.prod(shape)
        entries.append(_Entry(name, dtype, shape, begin, end))
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
    if dtype not in _DTYPES or name == "__metadata__":
        raise ValueError(f"tensor {name!r} of type {tensor.dtype}: a safetensors file cannot hold it")
    return dtype


def _checksum_field(checksum: str) -> bytes:
    return f'"{CHECKSUM_KEY}":"{checksum}"'.encode()


def _header(entries: list[_Entry], metadata: Mapping[str, str]) -> bytes:
    if CHECKSUM_KEY in metadata:
        raise ValueError(f"metadata {CHECKSUM_KEY!r} is reserved for the file's checksum")
    table: dict[str, object] = {"__metadata__": {CHECKSUM_KEY: "0" * 8, **dict(sorted(metadata.items()))}}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _write_body(
    file: BinaryIO,
    header: bytes,
    entries: list[_Entry],
    tensors: Mapping[str, Tensor | np.ndarray],
    on_tensor: OnTensor | None,
) -> None:
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    crc = zlib.crc32(header)
    for done, entry in enumerate(entries, 1):
        if entry.end > entry.begin:
            buffer = _bytes_of(tensors[entry.name])
            file.write(buffer)
            crc = zlib.crc32(buffer, crc)
        if on_tensor is not None:
            on_tensor(done, len(entries))
    field = _checksum_field("0" * 8)
    file.seek(8 + header.index(field))
    file.write(_checksum_field(f"{crc:08x}"))


def _bytes_of(tensor: Tensor | np.ndarray) -> memoryview:
    if isinstance(tensor, np.ndarray):
        little = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        return little.reshape(-1).view(np.uint8).data
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_header(path: str | Path, file: BinaryIO, size: int) -> bytes:
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


def _parse(path: str | Path, header: bytes, data_bytes: int) -> tuple[list[_Entry], dict[str, str], str | None]:
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


def _parse_entry(path: str | Path, name: str, value: object) -> _Entry:
    fields = _object(path, name, value)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DamagedFileError(path, f"tensor {name[:80]!r} has the unknown type {str(dtype)[:40]!r}")
    sizes, places = _sizes(shape), _sizes(offsets)
    if sizes is None or len(sizes) > MAX_DIMENSIONS or places is None or len(places) != 2:
        raise DamagedFileError(path, f"tensor {name[:80]!r} has a broken shape or place")
    needed = math.prod(sizes) * _DTYPES[dtype].itemsize
    if places[1] - places[0] != needed:
        raise DamagedFileError(path, f"tensor {name[:80]!r} of shape {sizes} takes {needed} bytes, its place {places[1] - places[0]}")
    return _Entry(name, dtype, sizes, places[0], places[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = tuple(v for v in value if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**62)
    return sizes if len(sizes) == len(value) else None


def _fill(path: str | Path, file: BinaryIO, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        count = file.readinto(buffer[at:])  # type: ignore[attr-defined]  # BinaryIO does not declare readinto; every binary file has it
        if not count:
            raise TruncatedFileError(path, "shrank while it was read; use another copy")
        at += count


def _remove_abandoned(target: Path) -> None:
    """Unlinks what a killed writer left: a living one holds its lock."""
    for leftover in target.parent.glob(f".{target.name.replace('[', '[[]')}.*.tmp"):
        try:
            with open(leftover, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink(missing_ok=True)
        except OSError:
            continue


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: str | Path, error: OSError) -> UnwritableFileError:
    folder = Path(path).parent
    why = (
        f"there is no folder {folder}"
        if isinstance(error, FileNotFoundError) and not folder.is_dir()
        else (error.strerror or str(error)).lower()
    )
    return UnwritableFileError(path, f"cannot be written: {why}; what was there before is untouched. Free space or choose another folder")
