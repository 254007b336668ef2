"""One safetensors file, written whole or not at all, and read back with every size checked before it is used.

The file is the published safetensors format, so that any reader of it opens ours; checksums ride in its metadata (`storage_header`).

Guarantee: `write_tensors` writes beside the target, fsyncs and renames. Killed at any moment, or out of disk, it leaves the old file.

The safetensors package does neither half: its writer takes all tensors on the host at once and has no place for checksums, progress or
a stop; its reader maps the file, so that one that shrinks kills the process, and tells a cut file and a damaged one by the same message.
"""

import errno
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from treadle.model.storage_errors import (
    DamagedFileError,
    MissingFileError,
    StorageFileError,
    TruncatedFileError,
    UnwritableFileError,
    require_format,
)
from treadle.model.storage_header import DTYPES, checksummed, make_header, place_tensors, read_header, take_checksums
from treadle.pipeline.tensor_header import Entry
from treadle.pipeline.whole_file import start_write_back, whole_file

BEST_NAME = "best.safetensors"
MAX_LISTED = 8
"""Names that a message lists."""
MAX_THREADS = 4
THREADED_BYTES = 2**23
WRITE_BACK_BYTES = 2**24
"""Written bytes that are sent on to the disk together, beside the writing of more."""

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
        UnwritableFileError: `path` names no file, its folder is missing or read-only, or the disk is full. What was there is untouched.
        ValueError: a tensor's type has no safetensors name, or the metadata passes the format's header limit.
    """
    entries = place_tensors(tensors)
    header = make_header(entries, metadata)
    try:
        with whole_file(path) as file:
            _write_body(file, header, entries, tensors, on_tensor)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno not in (errno.EISDIR, errno.EINVAL, errno.ENOENT):  # those say what to do
            why = f"{why.lower()}; what was there before is untouched. Free space or choose another folder"
        raise UnwritableFileError(path, f"cannot be written: {why}") from error


def tensors_to_bytes(tensors: Mapping[str, Tensor | np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """What `write_tensors` would write, for another process."""
    entries = place_tensors(tensors)
    file = io.BytesIO()
    _write_body(file, make_header(entries, metadata), entries, tensors, None)
    return file.getvalue()


def read_tensors(
    path: str | Path, *, kind: str | None = None, version: int = 0, on_tensor: OnTensor | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (on the host, in their own memory) and the metadata of a safetensors file.

    A file without our checksums is read as any other safetensors file, where no kind is asked for.

    Args:
        kind: what the file must hold, up to which format `version`; told before its tensors are read.

    Raises:
        MissingFileError: there is no file at `path`.
        TruncatedFileError: it ends before its content does.
        DamagedFileError: it is no safetensors file, or what it holds does not match its checksums; the message names the tensors.
        WrongFormatError, NewerFormatError: it is of another kind, or newer.
        StorageFileError: it cannot be opened or read.
    """
    try:
        with _opened(path) as file:
            return _read(path, file, os.fstat(file.fileno()).st_size, kind, version, on_tensor)
    except FileNotFoundError as error:
        there = f"a link to {os.readlink(path)}, which is not there" if os.path.islink(path) else "no such file"
        raise MissingFileError(path, f"there is {there}; {_what_there_is(Path(path))}") from error
    except OSError as error:
        raise StorageFileError(path, f"cannot be read: {error.strerror or error}") from error


def tensors_from_bytes(name: str, data: bytes, *, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `tensors_to_bytes` was given; `name` stands for the path in errors, which are those of `read_tensors`."""
    return _read(name, io.BytesIO(data), len(data), kind, version, None)


def _read(
    path: str | Path, file: BinaryIO, size: int, kind: str | None, version: int, on_tensor: OnTensor | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    header, entries, metadata = read_header(path, file, size)
    if kind is not None:
        require_format(path, metadata, kind, version)
    checksums = take_checksums(path, header, metadata, len(entries))
    if kind is not None and checksums is None:
        raise DamagedFileError(path, "lacks its checksums: another program rewrote it; use the file as it was written")
    begin = 8 + len(header)
    tensors = {entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu") for entry in entries}
    changed: list[str] = []

    def read(entry: Entry) -> int:
        return _fill(path, file, begin + entry.begin, tensors[entry.name].reshape(-1).view(torch.uint8).numpy().data)

    with _Threads(size) as threads:
        for at, (entry, crc) in enumerate(zip(entries, threads.map(read, entries), strict=True)):
            if checksums is not None and checksums[at] != f"{crc:08x}":
                changed.append(entry.name)
            if on_tensor is not None:
                on_tensor(at + 1, len(entries))
    if changed:
        more = f" and {len(changed) - MAX_LISTED} more" if len(changed) > MAX_LISTED else ""
        raise DamagedFileError(path, f"content does not match its checksum in {', '.join(changed[:MAX_LISTED])}{more}; use another copy")
    return tensors, metadata


def _what_there_is(path: Path) -> str:
    """What a path that is missing might have meant."""
    try:
        beside = sorted(p.name for p in path.parent.glob("*.safetensors"))
    except OSError:
        beside = []
    if not beside:
        return "check the path"
    why = "a run keeps a best only where held-out samples score it; " if path.name == BEST_NAME else ""
    return f"{why}its folder holds {', '.join(beside[-MAX_LISTED:])}"


def _opened(path: str | Path) -> BinaryIO:
    if "\0" in os.fspath(path):
        raise StorageFileError(path, "the name holds a zero byte: name a file")
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise StorageFileError(path, "is a folder: name the file in it")
    if not stat.S_ISREG(mode):
        # A pipe would wait for a writer that may never come.
        raise StorageFileError(path, "is a pipe, a device or a socket: a file is needed, whose size is known")
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
    checksums: list[int] = []
    sent, keeps = 0, not isinstance(file, io.BytesIO)
    with _Threads(entries[-1].end if entries else 0) as threads:
        for done, entry in enumerate(entries, 1):
            buffer = _bytes_of(tensors[entry.name])
            # The checksum is taken while the same bytes go to the file; no more than one tensor is brought to the host ahead of it.
            crc = threads.start(zlib.crc32, buffer)
            file.write(buffer)
            checksums.append(crc())
            if keeps and file.tell() - sent >= WRITE_BACK_BYTES:
                sent = start_write_back(file, sent)
            if on_tensor is not None:
                on_tensor(done, len(entries))
    file.seek(8)
    file.write(checksummed(header, checksums))


class _Threads:
    """Reads and checksums beside the calling thread, where there are enough bytes to pay for threads: both let go of the interpreter."""

    def __init__(self, size: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._count = min(MAX_THREADS, cores) if size >= THREADED_BYTES else 1

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._count, "treadle-storage") if self._count > 1 else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, call: Callable[[Entry], int], entries: list[Entry]) -> Iterable[int]:
        """The answers in order."""
        return map(call, entries) if self._pool is None else self._pool.map(call, entries)

    def start(self, call: Callable[[memoryview], int], buffer: memoryview) -> Callable[[], int]:
        """Starts a call; the answer waits for its value."""
        return partial(call, buffer) if self._pool is None else self._pool.submit(call, buffer).result


def _bytes_of(tensor: Tensor | np.ndarray) -> memoryview:
    if isinstance(tensor, np.ndarray):
        little = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        return little.reshape(-1).view(np.uint8).data
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _fill(path: str | Path, file: BinaryIO, offset: int, buffer: memoryview) -> int:
    """Fills `buffer` from a byte of the file on; answers its CRC-32."""
    at = 0
    while at < len(buffer):
        if isinstance(file, io.BytesIO):
            file.seek(offset + at)
            count = file.readinto(buffer[at:])
        else:
            count = os.preadv(file.fileno(), [buffer[at:]], offset + at)
        if not count:
            raise TruncatedFileError(path, "shrank while it was read; use another copy")
        at += count
    return zlib.crc32(buffer)
