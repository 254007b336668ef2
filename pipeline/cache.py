"""A local cache of whole shards, shared by every process that names its folder.

    <url>.<version>.<bytes>.shard             a shard as the store has it, whole
    <url>.<version>.<bytes>.<random>.part     one being fetched: as long as the shard will be, its missing bytes holes

A shard is kept while it is read from its start to its end, and takes its name only when every byte of it is on disk: so a reader
that stops, fails or is killed leaves a `.part`, which the next one to need room removes. Living writers and readers hold a lock
on their file, by which everyone else tells it from what may be removed. Whatever does not work out, because a shard is larger
than the limit, all others are in use, the disk is full or another process is at it, is read from the store as without a cache:
nobody ever waits for room.
"""

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from treadle.pipeline.storage import ByteStream, LocalStream, RemoteStream, StorageError, public_url
from treadle.pipeline.whole_file import sync_folder
from treadle.shape import require_count, settle_numbers

logger = logging.getLogger(__name__)

LOCK_WAIT_S: Final = 2.0
"""Longest wait for the folder, s: it is held for as long as files are listed and removed."""

Opener = Callable[[int, int | None], RemoteStream]
"""Opens the shard in its store at a byte, for so many bytes or to its end."""

_checked: dict[tuple[str, str], str] = {}
"""By folder and shard, the file that this process has found to be what the store has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCache:
    """Where whole remote shards are kept, and how many bytes of them.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    folder: Path
    """Folder on a local disk; made when it is not there. Several processes may share it, with one limit."""
    max_bytes: int = 2**36
    """Most bytes of shards in the folder; those not used for longest give way. A larger shard is not kept."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ValueError(f"ShardCache.folder is {self.folder!r}: it must be a folder's path")
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        require_count("ShardCache", "max_bytes", self.max_bytes, 1, 2**62)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _probe(self.folder)
        except OSError as error:
            raise ValueError(
                f"ShardCache.folder {str(self.folder)!r} cannot be written to ({error.strerror}): name another, or no cache"
            ) from None

    def open(self, url: str, opener: Opener, offset: int = 0, length: int | None = None) -> ByteStream:
        """The bytes of a remote shard from `offset` on: from the cache, or from the store.

        Read from its start, with no `length` that says that only a part is wanted, it is kept on the way.
        """
        kept = self._kept(url, opener)
        if kept is not None:
            kept.position = offset
            return kept
        stream = opener(offset, length)
        return stream if offset or length is not None else KeepingStream(stream, self)

    def _kept(self, url: str, opener: Opener) -> LocalStream | None:
        """The shard as it is kept. Once per process the store is asked whether that is still what it has."""
        name = shard_name(url)
        known = _checked.pop((str(self.folder), name), None)
        if known is not None and (kept := _in_use(url, self.folder / known)) is not None:
            self.note(known)
            return kept
        found = sorted(self.folder.glob(f"{name}.*.shard"))
        if not found:
            return None
        now: str | None = None
        with opener(0, 1) as store:
            try:
                store.read(1)
                now = _file_name(store)
            except StorageError as error:
                if error.kind != "unreadable":
                    return None  # reading it tells why
                logger.warning("%s cannot be reached (%s): it is read as the cache has it", public_url(url), error.detail)
        for path in found:
            if now is None or path.name == now:
                self.note(path.name)
                return _in_use(url, path)
            _remove(path)
        return None

    def note(self, name: str) -> None:
        """Remembers that a file is what the store has."""
        _checked[str(self.folder), name.partition(".")[0]] = name

    def reserve(self, store: RemoteStream) -> "Part | None":
        """A place for the shard that `store` reads, whose size and version are known by now; None where there is no room for it."""
        target, size = _file_name(store), store.size
        if target is None or size is None:
            return None
        if size > self.max_bytes:
            logger.info("%s has %d bytes: more than the %d of the cache, it is not kept", public_url(store.url), size, self.max_bytes)
            return None
        try:
            with _folder_locked(self.folder) as locked:
                if not locked or not self._make_room(target, size):
                    return None
                return Part(self.folder, target, size)
        except OSError as error:
            logger.warning("the cache in %s cannot take a shard: %s", self.folder, error)
            return None

    def _make_room(self, target: str, size: int) -> bool:
        """Whether `size` bytes fit, after those not used for longest are removed; called with the folder locked."""
        shards: list[tuple[float, int, Path]] = []
        used = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                found = path.stat()
                if path.suffix == ".part":
                    if _remove(path):
                        continue
                    if path.name.startswith(f"{target.removesuffix('.shard')}."):
                        return False
                elif path.suffix == ".shard":
                    if path.name == target:
                        return False
                    shards.append((found.st_mtime, found.st_size, path))
                else:
                    continue
                used += found.st_size
        for _, freed, path in sorted(shards):
            if used + size <= self.max_bytes:
                break
            if _remove(path):
                used -= freed
        return used + size <= self.max_bytes


class Part:
    """A shard on its way into the cache."""

    def __init__(self, folder: Path, target: str, size: int) -> None:
        self.name = target
        self._target = folder / target
        self._path = folder / f"{target.removesuffix('.shard')}.{secrets.token_hex(6)}.part"
        self._size = size
        self._at = 0
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Everyone else counts it at its full size from now on.
            os.ftruncate(self._file, size)
        except OSError:
            self.drop()
            raise

    def write(self, data: bytes) -> bool:
        """Takes the next bytes; False where the disk does not, and nothing is left of it then."""
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._file, view, self._at)
                view, self._at = view[written:], self._at + written
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            logger.warning("a shard is not kept in the cache: %s", "the disk is full" if full else error)
            self.drop()
            return False
        return True

    def finish(self) -> bool:
        """Gives the shard its name, if it is whole and safe on disk."""
        try:
            if self._at != self._size:
                return False
            os.fsync(self._file)
            os.replace(self._path, self._target)
            sync_folder(self._target.parent)
        except OSError as error:
            logger.warning("a shard is not kept in the cache: %s", error)
            return False
        finally:
            self.drop()
        return True

    def drop(self) -> None:
        """Removes what has no name yet, and lets go. Safe to call again."""
        file, self._file = self._file, -1
        if file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(file)


class KeepingStream(ByteStream):
    """A remote shard, read from its start, that is kept in a cache on the way."""

    def __init__(self, store: RemoteStream, cache: ShardCache) -> None:
        super().__init__(store.url, 0)
        self._store = store
        self._cache = cache
        self._part: Part | None = None
        self._begun = False

    @property
    def size(self) -> int | None:
        return self._store.size

    def read(self, n: int) -> bytes:
        try:
            data = self._store.read(n)
        except StorageError:
            self._let_go()
            raise
        if data and not self._begun:
            self._begun = True
            self._part = self._cache.reserve(self._store)
        if self._part is not None and not self._part.write(data):
            self._part = None
        self.position = self._store.position
        if self._part is not None and self.position == self.size:
            part, self._part = self._part, None
            if part.finish():
                self._cache.note(part.name)
        return data

    def skip(self, n: int) -> int:
        if self._part is not None or not self._begun:
            return super().skip(n)
        moved = self._store.skip(n)
        self.position = self._store.position
        return moved

    def _let_go(self) -> None:
        self._begun = True
        part, self._part = self._part, None
        if part is not None:
            part.drop()

    def close(self) -> None:
        self._let_go()
        self._store.close()


def shard_name(url: str) -> str:
    """What a shard is filed under: two signed URLs of one object are one."""
    return blake2b(public_url(url).encode("utf-8", "surrogateescape"), digest_size=12, person=b"treadle cache").hexdigest()


def _file_name(store: RemoteStream) -> str | None:
    """The name of the object that `store` reads, None where the store does not say how long it is."""
    if store.size is None:
        return None
    version = blake2b((store.version or "").encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return f"{shard_name(store.url)}.{version}.{store.size}.shard"


def _in_use(url: str, path: Path) -> LocalStream | None:
    """The shard in `path`, locked so that it stays; None where it has gone or is not as long as it was."""
    try:
        stream = LocalStream(url, str(path))
    except StorageError:
        return None
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        found = os.fstat(stream.fileno())
        if found.st_nlink and found.st_size == int(path.name.split(".")[2]):
            os.utime(path)
            return stream
    except OSError:
        pass
    stream.close()
    return None


def _remove(path: Path) -> bool:
    """Removes a file that nobody writes or reads; answers whether it is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


@contextmanager
def _folder_locked(folder: Path) -> Generator[bool]:
    """Whether nobody else lists and removes files now: a process that was stopped while it did is not waited for."""
    due_s = time.monotonic() + LOCK_WAIT_S
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        locked = False
        while not locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if time.monotonic() >= due_s:
                    break
                time.sleep(0.01)
        yield locked
    finally:
        os.close(file)


def _probe(folder: Path) -> None:
    """Raises OSError where files cannot be made in `folder`."""
    os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
