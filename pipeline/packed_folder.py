"""The folder that packed shards are written to: on this machine, or in an object store."""

import os
import tempfile
from pathlib import Path
from typing import IO, Any, Protocol

from treadle.pipeline.batch_file import write_whole
from treadle.pipeline.storage import local_path, public_url, scheme_of


class ShardFolder(Protocol):
    """Files that appear whole or not at all."""

    def read(self, name: str) -> bytes | None:
        """A small file, None where there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file."""
        ...

    def begin(self) -> "tuple[IO[bytes], str]":
        """A file to fill, and its path on this machine."""
        ...

    def publish(self, temporary: str, name: str) -> None:
        """Gives a filled, synced and closed file its name."""
        ...


def open_folder(folder: str | os.PathLike[str]) -> ShardFolder:
    """The folder of a path or a URL, made where it is a path.

    Raises:
        ValueError: the URL's scheme is refused, unknown, or cannot be written to.
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
        path.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """A small file, None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file."""
        write_whole(self.path / name, [data])

    def begin(self) -> tuple[IO[bytes], str]:
        """A hidden file of the folder itself, so that publishing it is one rename."""
        descriptor, temporary = tempfile.mkstemp(prefix=".batches-", suffix=".tmp", dir=self.path)
        return os.fdopen(descriptor, "wb"), temporary

    def publish(self, temporary: str, name: str) -> None:
        """Gives a filled, synced and closed file its name."""
        os.chmod(temporary, 0o644)
        os.replace(temporary, self.path / name)


class RemoteFolder:
    """A prefix in an object store that fsspec opens: objects there appear when their upload ends."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            opened: tuple[Any, str] = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ValueError(f"{public_url(url)!r} cannot be written to: {error}") from error
        self._files, self._prefix = opened

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

    def begin(self) -> tuple[IO[bytes], str]:
        """A file on this machine, uploaded when it is whole."""
        descriptor, temporary = tempfile.mkstemp(prefix="treadle-batches-", suffix=".tmp")
        return os.fdopen(descriptor, "wb"), temporary

    def publish(self, temporary: str, name: str) -> None:
        """Uploads a filled and closed file under its name."""
        self._files.put_file(temporary, self._at(name))
        os.unlink(temporary)
