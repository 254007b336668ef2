"""The folder that packed shards are written to: on this machine, or in an object store."""

import fcntl
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol

from treadle.pipeline.batch_file import write_whole
from treadle.pipeline.storage import local_path, public_url, scheme_of
from treadle.pipeline.whole_file import sync_folder


class ShardFolder(Protocol):
    """Files that appear whole or not at all."""

    def read(self, name: str) -> bytes | None:
        """A small file, None where there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file."""
        ...

    def begin(self, part: int) -> "tuple[IO[bytes], str]":
        """A file to fill for one part, and its path on this machine. What a killed writer of that part left is removed."""
        ...

    def publish(self, temporary: str, name: str) -> None:
        """Gives a filled and synced file its name, for good."""
        ...

    def claim(self, part: int) -> "IO[bytes] | None":
        """A lock on one part, held until it is closed; None where the place has no locks.

        Raises:
            ValueError: a living writer holds it.
        """
        ...


def open_folder(folder: str | os.PathLike[str]) -> ShardFolder:
    """The folder of a path or a URL, made where it is a path.

    Raises:
        ValueError: the URL's scheme is refused, unknown, or cannot be written to; or the folder cannot be made.
    """
    url = os.fspath(folder)
    path = local_path(url)
    if path is not None:
        return LocalFolder(Path(path))
    if scheme_of(url) in ("http", "https"):
        raise ValueError(f"{public_url(url)!r}: shards cannot be written over HTTP; give a path or an object store's URL")
    return RemoteFolder(url)


class LocalFolder:
    """A folder of this machine's file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder {str(path)!r} cannot be made ({error.strerror}): name another") from error

    def read(self, name: str) -> bytes | None:
        """A small file, None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file."""
        write_whole(self.path / name, [data])

    def begin(self, part: int) -> tuple[IO[bytes], str]:
        """A hidden file of the folder itself, so that publishing it is one rename."""
        return _locked_file(self.path, f".batches-{part:03d}-")

    def publish(self, temporary: str, name: str) -> None:
        """Gives a filled and synced file its name, for good."""
        os.chmod(temporary, 0o644)
        os.replace(temporary, self.path / name)
        # The index that names it is written next: it must not survive a power cut that its shard does not.
        sync_folder(self.path)

    def claim(self, part: int) -> IO[bytes] | None:
        """A lock on one part."""
        path = self.path / f".writer-{part:03d}.lock"
        file = open(path, "ab")
        # The holder removes the file when it lets go: a lock on a file that is gone is none.
        if not (_try_lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
            file.close()
            raise ValueError(f"{self.path}: another process is writing into it (it holds {path.name}): wait for it, or stop it")
        return file


class RemoteFolder:
    """A prefix in an object store that fsspec opens: objects there appear when their upload ends."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            opened: tuple[Any, str] = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ValueError(f"{public_url(url)!r} cannot be written to: {error}") from error
        self._files, self._prefix = opened
        self._temporary = f"treadle-batches-{blake2b(url.encode(), digest_size=6).hexdigest()}-"

    def _at(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def read(self, name: str) -> bytes | None:
        """A small file, None where there is none."""
        try:
            return bytes(self._files.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file."""
        self._files.pipe_file(self._at(name), data)

    def begin(self, part: int) -> tuple[IO[bytes], str]:
        """A file on this machine, uploaded when it is whole."""
        return _locked_file(Path(tempfile.gettempdir()), f"{self._temporary}{part:03d}-")

    def publish(self, temporary: str, name: str) -> None:
        """Uploads a filled file under its name."""
        self._files.put_file(temporary, self._at(name))
        os.unlink(temporary)

    def claim(self, part: int) -> IO[bytes] | None:
        """Object stores have no locks."""
        return None


def release(lock: IO[bytes] | None) -> None:
    """Gives a part's lock back, and removes its file."""
    if lock is not None and not lock.closed:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def _locked_file(folder: Path, prefix: str) -> tuple[IO[bytes], str]:
    """A new temporary file that is locked while it is open; those of killed writers, which nobody locks, are removed."""
    for abandoned in folder.glob(f"{prefix}*.tmp"):
        try:
            with open(abandoned, "rb") as found:
                if _try_lock(found):
                    abandoned.unlink(missing_ok=True)
        except OSError:
            continue
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=folder)
    file = os.fdopen(descriptor, "wb")
    _try_lock(file)
    return file, temporary


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
