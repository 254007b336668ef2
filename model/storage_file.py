"""One safetensors file, written whole or not at all, and read back with every size checked before it is used.

The file is the published safetensors format, so that any reader of it opens ours; entries are ordered by element size and name,
so that the same content gives the same bytes. A checksum of the whole file rides in its metadata, because safetensors has none and a
flipped bit in a weight would otherwise train on unseen.

Guarantee: `write_tensors` writes beside the target, fsyncs and renames. Killed at any moment, or out of disk, it leaves the old file.

The safetensors package does neither half: its writer takes all tensors on the host at once and has no place for a checksum, progress or
a stop; its reader maps the file, so that one that shrinks kills the process, and tells a cut file and a damaged one by the same message.
"""

import os
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from treadle.model.storage_errors import DamagedFileError, MissingFileError, StorageFileError, TruncatedFileError, UnwritableFileError
from treadle.model.storage_header import DTYPES, Entry, checksum_field, make_header, parse_header, place_tensors, read_header
from treadle.pipeline.whole_file import whole_file

OnTensor = Callable[[int, int], None]
"""`on_tensor(done, total)` follows the tensors; what it raises ends the call, and a write leaves the old file."""


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
    entries = place_tensors(tensors)
    header = make_header(entries, metadata)
    if os.path.isdir(path):
        raise UnwritableFileError(path, "is a folder: name a file in it")
    try:
        with whole_file(path) as file:
            _write_body(file, header, entries, tensors, on_tensor)
    except OSError as error:
        raise _unwritable(path, error) from error


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
            header = read_header(path, file, size)
            entries, metadata, checksum = parse_header(path, header, size - 8 - len(header))
            zeroed = header if checksum is None else header.replace(checksum_field(checksum), checksum_field("0" * 8))
            crc = zlib.crc32(zeroed)
            tensors: dict[str, Tensor] = {}
            for entry in entries:
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
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


def _opened(path: str | Path) -> BinaryIO:
    # A pipe would wait for a writer that may never come.
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise StorageFileError(path, "is a pipe: a file is needed, whose size is known")
    return open(path, "rb")


def _write_body(
    file: BinaryIO,
    header: bytes,
    entries: list[Entry],
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
    field = checksum_field("0" * 8)
    file.seek(8 + header.index(field))
    file.write(checksum_field(f"{crc:08x}"))


def _bytes_of(tensor: Tensor | np.ndarray) -> memoryview:
    if isinstance(tensor, np.ndarray):
        little = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        return little.reshape(-1).view(np.uint8).data
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _fill(path: str | Path, file: BinaryIO, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        count = file.readinto(buffer[at:])  # type: ignore[attr-defined]  # BinaryIO does not declare readinto; every binary file has it
        if not count:
            raise TruncatedFileError(path, "shrank while it was read; use another copy")
        at += count


def _unwritable(path: str | Path, error: OSError) -> UnwritableFileError:
    folder = Path(path).parent
    why = (
        f"there is no folder {folder}"
        if isinstance(error, FileNotFoundError) and not folder.is_dir()
        else (error.strerror or str(error)).lower()
    )
    return UnwritableFileError(path, f"cannot be written: {why}; what was there before is untouched. Free space or choose another folder")
