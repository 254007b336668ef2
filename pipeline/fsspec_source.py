"""An object that fsspec opens (s3, gs, hf, ...), read in ranges. Its own retries are of its own; ours come after them."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, Final, TypeVar

from treadle.pipeline.ranges import range_stop
from treadle.pipeline.retry import RetryPolicy, contacts, unreachable
from treadle.pipeline.storage import Fault, StorageError, Wait, public_text, public_url

T = TypeVar("T")

TURN_S: Final = 0.1
"""How often a wait looks whether to go on."""

PATIENT_BYTES_PER_S: Final = 65_536
"""A range comes whole or not at all: at this rate it is given its time, before silence begins to count."""


def in_turns(coming: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, wait: Wait, patience_s: float = 0.0) -> T:
    """What a coroutine that runs in `loop`, of another thread, answers; `wait` is told of every turn of waiting for it.

    Raises:
        Fault: the reader was told to stop, or silence had lasted for too long, beginning after `patience_s`.
    """
    future = asyncio.run_coroutine_threadsafe(coming, loop)
    begun = time.monotonic() + patience_s
    try:
        while True:
            try:
                return future.result(TURN_S)
            except NotYetError:
                if future.done():
                    raise  # the library's own
                wait.turn(time.monotonic() - begun)
    finally:
        future.cancel()


class FsspecSource:
    """One object behind fsspec.

    Args:
        url: any URL whose scheme fsspec knows; credentials come from where its library looks for them.
        policy: the silence after which a call is a fault.
        closing: once set, waits end.

    Raises:
        StorageError: the library for the scheme is not installed.
        ValueError: the URL makes no sense to it.
    """

    def __init__(self, url: str, policy: RetryPolicy | None = None, closing: threading.Event | None = None) -> None:
        self.size: int | None = None
        self.stop: int | None = None
        self.version: str | None = None
        self._server = tuple(public_url(url).split("/")[:3])
        self._held = b""
        self._held_at = 0
        self._stale = True
        self._ranges = 0
        """Ranges read since the object was first looked at."""
        self._wait = Wait(policy or RetryPolicy(), closing)
        # fsspec costs 80 ms to import, and local shards do without.
        from fsspec import AbstractFileSystem
        from fsspec.core import url_to_fs

        try:
            self._fs, self._path = url_to_fs(url)
        except ImportError as error:
            raise StorageError(
                "unreadable",
                0,
                f"{public_text(str(error))} (treadle[s3], treadle[gcs] and treadle[hf] install the usual ones, treadle[obstore] a faster reader for s3:// and gs://)",
            ) from None
        except OSError as error:
            # Some, such as ftp, connect here.
            raise StorageError("unreadable", 0, f"nobody answers: {public_text(str(error))}") from None
        except (TypeError, ValueError) as error:
            # Some need more than a URL to be made.
            raise ValueError(f"{public_url(url)!r}: {public_text(str(error))}") from None
        # Where a range is read through a file object, that would read megabytes ahead.
        through_file = not self._fs.async_impl and type(self._fs).cat_file is AbstractFileSystem.cat_file
        self._exactly = {"cache_type": "none"} if through_file else {}

    def fetch(self, position: int, most: int) -> bytes:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        self._look()
        if self.size is not None and position >= self.size:
            if position > self.size:
                raise Fault(f"the object has {self.size} bytes, byte {position} was to be read", kind="changed", permanent=True)
            return b""
        inside = position - self._held_at
        if not 0 <= inside < len(self._held):
            stop = range_stop(position, self.stop, self.size)
            self._held = bytes(self._call("cat_file", start=position, end=stop, **self._exactly))
            self._held_at, inside = position, 0
            if self._ranges:
                # A range does not say which object it is of; asked afterwards, it was this one.
                self._stale = True
                self._look()
            self._ranges += 1
            if not self._held and self.size is not None:
                raise Fault(f"no bytes at {position} of {self.size}")
        data = self._held[inside : inside + most]
        if inside + most >= len(self._held):
            self._held = b""
        return data

    def reset(self) -> None:
        """Forgets what was read ahead; the object is looked at again before the next byte."""
        self._held = b""
        self._stale = True

    def close(self) -> None:
        """Forgets what was read ahead; connections are the library's own."""
        self.reset()

    def _look(self) -> None:
        if not self._stale:
            return
        self._guarded(lambda: self._fs.invalidate_cache(self._path))
        info = self._call("info")
        if info.get("type") == "directory":
            raise Fault("it is a directory, not a tar", kind="not_found", permanent=True)
        size = info.get("size")
        told = next((info[name] for name in ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified") if info.get(name)), None)
        version = None if told is None else str(told)
        if self.size is not None and (size != self.size or version != self.version):
            raise Fault(
                f"the object changed while it was read: {self.size} bytes, {self.version} became {size} bytes, {version}",
                kind="changed",
                permanent=True,
            )
        contacts.answered(self._server)
        self.size, self.version, self._stale = size, version, False

    def _call(self, name: str, **given: Any) -> Any:
        """What the file system answers; where it works in a loop of its own, it is waited for in turns."""
        asynchronous = getattr(self._fs, f"_{name}", None)
        loop = getattr(self._fs, "loop", None)
        if not self._fs.async_impl or self._fs.asynchronous or loop is None or not inspect.iscoroutinefunction(asynchronous):
            return self._guarded(lambda: getattr(self._fs, name)(self._path, **given))
        coming: Coroutine[Any, Any, Any] = asynchronous(self._path, **given)
        length = given["end"] - given["start"] if given else 0
        return self._guarded(lambda: in_turns(coming, loop, self._wait, length / PATIENT_BYTES_PER_S))

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except Fault:
            raise
        except FileNotFoundError:
            raise Fault("there is no such object", kind="not_found", permanent=True) from None
        except PermissionError as error:
            raise Fault(str(error), kind="forbidden", permanent=True) from None
        except (Exception, CancelledError) as error:  # every backend has its own; what is not above may pass
            tried_s = contacts.tried_s(self._server) if unreachable(error) else None
            raise Fault(f"{type(error).__name__}: {error}", tried_s=tried_s) from None
