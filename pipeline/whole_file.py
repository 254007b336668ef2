"""Files that are whole or not there: written beside their place, synced, and renamed into it.

Killed at any moment, or out of disk, a writer leaves the old file. What a killed writer leaves beside it, the next one removes: a living
writer holds a lock on its file.
"""

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A binary file that takes its name only when the block ends without an error; a link is followed.

    Raises:
        OSError: `path` names no file, or the folder or the disk refused it; what was there is untouched.
    """
    target = _named_file(path)
    _remove_abandoned(target)
    beside, descriptor = _locked(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, target)
        sync_folder(target.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _named_file(path: str | os.PathLike[str]) -> Path:
    """Where a file of that name goes, links followed; told before anything is written, as the rename would tell it too late or not at all."""
    name = os.fspath(path)
    if not name or "\0" in name:
        raise OSError(errno.EINVAL, f"the name {'holds a zero byte' if name else 'is empty'}: name a file", name)
    target = Path(os.path.realpath(name))
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode) or name.endswith(os.sep):
        raise IsADirectoryError(errno.EISDIR, "is a folder: name a file in it", name)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is a device, a pipe or a socket, which a rename would replace: name a file", name)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {target.parent}", name)
    return target


def start_write_back(file: BinaryIO, begin: int) -> int:
    """Has the system bring a file's bytes from `begin` on to the disk while more are written; answers where they end.

    The sync at the end then has little left to wait for. Where a system offers no such hint, that sync does it all.
    """
    file.flush()
    end = file.tell()
    if hasattr(os, "posix_fadvise"):
        # Pages under way to the disk stay in the cache: this advice drops clean ones alone, and there are none.
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
    return end


def _locked(target: Path) -> tuple[Path, int]:
    """A new file beside `target`, under our lock."""
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Between the two calls another writer may have taken it for an abandoned one.
            if os.fstat(descriptor).st_nlink:
                return beside, descriptor
        except BaseException:
            os.close(descriptor)
            beside.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, replacing what had it: a link where the file system has them, else a copy. One process at a time.

    Raises:
        OSError: the folder or the disk refused it.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    for leftover in target.parent.glob(f".{target.name.replace('[', '[[]')}.*.part"):
        leftover.unlink(missing_ok=True)
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name.replace('[', '[[]')}.*.tmp"):
        try:
            with open(leftover, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink(missing_ok=True)
        except OSError:
            continue
