"""Byte streams over storage: local files, HTTP, and whatever fsspec opens.

A remote stream is read in ranges. On a fault it is opened again at the byte where it broke, after a growing, jittered wait, as
often as its retry policy allows; the object must still be the one it was (size and ETag). Nothing is ever run to get at bytes,
and no credential shows in a message.
"""

import email.utils
import logging
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from stat import S_ISREG
from types import TracebackType
from typing import Protocol, Self, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from treadle.shape import require_count

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JITTER = random.Random()
"""Of our own, so that a retry never moves the random numbers of a user."""

RANGE_BYTES = 8 << 20
"""Bytes asked of a remote store at a time: one request's latency is spread over this."""

REFUSED_SCHEMES = frozenset(
    {"pipe", "exec", "cmd", "command", "shell", "sh", "bash", "system", "subprocess", "popen", "fork", "reference", "dask"}
)
"""Schemes that run a program, or that let a file say what is read. None is ever opened."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(//)?")
_SECRET = re.compile(
    r"sig|token|key|secret|pass|auth|cred|policy|expires|^x-(amz|goog|oss|cos)-|^(se|sp|spr|sv|sr|st|sip|ss|srt|skoid|sktid|skt|ske|sks|skv)$",
    re.IGNORECASE,
)
# Schemes are short; without a bound a long word would be searched again from each of its letters.
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s'\"<>|\\]+")


class StorageError(Exception):
    """A URL that cannot be read on from `offset`.

    Kinds: `not_found`, `forbidden`, `refused` (a redirect to where we do not go), `changed` (the object is not the one it was),
    `not_a_tar` (an HTML page instead), `closed` (whoever reads was told to stop), `unreadable` (everything else, after all retries).
    """

    def __init__(self, kind: str, offset: int, detail: str) -> None:
        super().__init__(kind, offset, detail)
        self.kind = kind
        self.offset = offset
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.offset}: {self.detail}"


class Fault(Exception):
    """One failed attempt to read. A permanent one is not tried again."""

    def __init__(self, detail: str, *, kind: str = "unreadable", permanent: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.detail = detail
        self.kind = kind
        self.permanent = permanent
        self.wait_s = wait_s
        """What the server asked us to wait, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, and how patiently, a broken read is tried again."""

    attempts: int = 8
    """Faults in a row, without a byte between them, after which a stream is given up."""
    budget: int = 64
    """Faults of one stream in all after which it is given up."""
    base_delay_s: float = 0.25
    """Wait after the first fault, s; doubled after each one in a row."""
    max_delay_s: float = 30.0
    """Longest such wait, s."""
    max_retry_after_s: float = 120.0
    """Longest wait that a server's Retry-After may ask for, s."""
    timeout_s: float = 60.0
    """A connection that gives nothing for so long is a fault, s."""

    def __post_init__(self) -> None:
        for name in ("attempts", "budget"):
            require_count("RetryPolicy", name, getattr(self, name), 1)
        for name in ("base_delay_s", "max_delay_s", "max_retry_after_s", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"RetryPolicy.{name} is {value!r}: it must be a number of seconds, not negative")
        if self.timeout_s == 0:
            raise ValueError("RetryPolicy.timeout_s is 0: it must be positive")

    def delay_s(self, failures: int, asked_s: float = 0.0) -> float:
        """The wait before the next attempt: between half and all of the doubled delay, and never less than what was asked."""
        doubled = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(failures - 1, 60))
        return max(doubled * _JITTER.uniform(0.5, 1.0), min(asked_s, self.max_retry_after_s))


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case, empty for a local path.

    Raises:
        ValueError: it would run a program.
    """
    for link in url.split("::"):
        match = _SCHEME.match(link)
        if match and match[1].lower() in REFUSED_SCHEMES:
            raise ValueError(f"{public_url(url)!r}: {match[1].lower()}: is refused: nothing is run to read a shard; give a path or a URL")
    match = _SCHEME.match(url)
    return match[1].lower() if match and (match[2] or "::" in url) else ""


def local_path(url: str) -> str | None:
    """The file a URL names on this machine, None where it is not local."""
    scheme = scheme_of(url)
    if not scheme:
        return url
    if scheme in ("file", "local") and "::" not in url:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{url!r}: a file URL names a path on this machine, as in file:///data/0.tar; host {parts.netloc!r} is not it")
        return unquote(url.split("://", 1)[1].removeprefix("localhost"))
    return None


def public_url(url: str) -> str:
    """The URL without what may be a credential: user and password, and signatures in the query.

    It is what messages show, and what identifies a shard: two signed URLs of one object are one identity.
    """
    if "://" not in url:
        return url
    head, _, tail = url.rpartition("::")
    try:
        parts = urlsplit(tail)
        host = parts.netloc.rpartition("@")[2]
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return tail.partition("?")[0].rpartition("@")[2]
    if host != parts.netloc or any(_SECRET.search(name) for name, _ in pairs):
        kept = "&".join(f"{quote(name)}={quote(value, safe='/')}" for name, value in pairs if not _SECRET.search(name))
        tail = urlunsplit((parts.scheme, host, parts.path, kept, ""))
    return f"{public_url(head)}::{tail}" if head else tail


def public_text(text: str) -> str:
    """A message with every URL in it made public, at most 500 characters of it."""

    def public(match: re.Match[str]) -> str:
        url = match[0].rstrip(".,:;)]}")
        return public_url(url) + match[0][len(url) :]

    return _URL_IN_TEXT.sub(public, text[:10_000])[:500]


class ByteStream(ABC):
    """Bytes of one object, forward. `read` gives fewer bytes than asked for only at the end."""

    def __init__(self, url: str, offset: int) -> None:
        self.url = url
        self.position = offset
        """Byte of the object that is read next."""

    @property
    def size(self) -> int | None:
        """Bytes of the whole object, where known."""
        return None

    @abstractmethod
    def read(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end.

        Raises:
            StorageError: they cannot be read; what could be was given by the calls before.
        """

    def skip(self, n: int) -> int:
        """Moves forward by `n` bytes; answers how many there were."""
        moved = 0
        while moved < n:
            piece = self.read(min(n - moved, 1 << 20))
            if not piece:
                break
            moved += len(piece)
        return moved

    def back(self, n: int) -> bool:
        """Moves back by `n` bytes where that costs nothing; answers whether it did."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Lets go of files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LocalStream(ByteStream):
    """A file on this machine. It is read, not mapped: a mapped file that shrinks kills the process."""

    def __init__(self, url: str, path: str, offset: int = 0) -> None:
        super().__init__(url, offset)
        try:
            # Without O_NONBLOCK, opening a fifo waits for a writer for ever.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._file)
            self._size = found.st_size
        except FileNotFoundError:
            raise StorageError("not_found", offset, "there is no such file") from None
        except PermissionError as error:
            raise StorageError("forbidden", offset, str(error)) from None
        except OSError as error:
            raise StorageError("unreadable", offset, str(error)) from None
        if not S_ISREG(found.st_mode):
            self.close()
            raise StorageError("refused", offset, "it is no regular file")

    @property
    def size(self) -> int | None:
        return self._size

    def read(self, n: int) -> bytes:
        try:
            data = os.pread(self._file, min(n, max(0, self._size - self.position)), self.position)
            while 0 < len(data) < n:
                piece = os.pread(self._file, min(n - len(data), max(0, self._size - self.position - len(data))), self.position + len(data))
                if not piece:
                    break
                data += piece
        except OSError as error:
            raise StorageError("unreadable", self.position, str(error)) from None
        self.position += len(data)
        return data

    def skip(self, n: int) -> int:
        moved = max(0, min(n, self._size - self.position))
        self.position += moved
        return moved

    def back(self, n: int) -> bool:
        self.position -= n
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class RangeSource(Protocol):
    """One remote object: bytes from any position."""

    size: int | None
    """Bytes of the object, once known."""
    stop: int | None
    """Byte before which reading will end, where that is known: no more is asked for."""

    def fetch(self, position: int, most: int) -> bytes:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        ...

    def reset(self) -> None:
        """Forgets connections and whatever else a fault may have spoilt."""
        ...


class RemoteStream(ByteStream):
    """A remote object, read again from where it broke."""

    def __init__(
        self,
        url: str,
        source: RangeSource,
        offset: int = 0,
        policy: RetryPolicy | None = None,
        closing: threading.Event | None = None,
    ) -> None:
        super().__init__(url, offset)
        self.faults = 0
        """Faults met so far."""
        self._source = source
        self._policy = policy or RetryPolicy()
        self._failures = 0
        self._broken: StorageError | None = None
        self._closing = closing or threading.Event()
        self._sleep: Callable[[float], object] = self._closing.wait

    @property
    def size(self) -> int | None:
        return self._source.size

    def read(self, n: int) -> bytes:
        pieces: list[bytes] = []
        have = 0
        while have < n:
            try:
                piece = self._some(n - have)
            except StorageError:
                if pieces:
                    break  # the next call meets the same fault with nothing in hand
                raise
            if not piece:
                break
            pieces.append(piece)
            have += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, n: int) -> int:
        total = self.size
        if total is None:
            return super().skip(n)
        moved = max(0, min(n, total - self.position))
        self.position += moved
        return moved

    def aim(self, position: int, length: int | None = None) -> None:
        """Reads on from `position`; `length` is how many bytes will be wanted there, where that is known."""
        self.position = position
        self._source.stop = None if length is None else position + length

    def _some(self, n: int) -> bytes:
        while self._broken is None:
            if self._closing.is_set():
                self._broken = StorageError("closed", self.position, "reading was told to stop")
                continue
            try:
                data = self._source.fetch(self.position, n)
            except Fault as fault:
                self._source.reset()
                self.faults += 1
                self._failures += 1
                detail = public_text(fault.detail)
                if fault.permanent:
                    self._broken = StorageError(fault.kind, self.position, detail)
                elif self._failures >= self._policy.attempts or self.faults >= self._policy.budget:
                    self._broken = StorageError(fault.kind, self.position, f"{detail}; given up after {self.faults} faults")
                else:
                    wait_s = self._policy.delay_s(self._failures, fault.wait_s)
                    logger.warning("%s, byte %d: %s; trying again in %.1f s", public_url(self.url), self.position, detail, wait_s)
                    self._sleep(wait_s)
                continue
            if data:
                self._failures = 0
            self.position += len(data)
            return data
        raise self._broken

    def close(self) -> None:
        self._source.reset()


def range_stop(position: int, stop: int | None, size: int | None) -> int:
    """Where a request that starts at `position` ends: a range further, but not past what is wanted or there."""
    most = position + RANGE_BYTES if size is None else min(size, position + RANGE_BYTES)
    return most if stop is None or stop <= position else min(most, stop)


class FsspecSource:
    """An object that fsspec opens, read in ranges."""

    def __init__(self, url: str) -> None:
        self.size: int | None = None
        self.stop: int | None = None
        self._etag: object = None
        self._held = b""
        self._held_at = 0
        self._stale = True
        # fsspec costs 80 ms to import, and local shards do without.
        from fsspec.core import url_to_fs

        try:
            self._fs, self._path = url_to_fs(url)
        except ImportError as error:
            raise StorageError(
                "unreadable", 0, f"{public_text(str(error))} (treadle[s3], treadle[gcs] and treadle[hf] install the usual ones)"
            ) from None
        except ValueError as error:
            raise ValueError(f"{public_url(url)!r}: {public_text(str(error))}") from None

    def fetch(self, position: int, most: int) -> bytes:
        self._look()
        if self.size is not None and position >= self.size:
            if position > self.size:
                raise Fault(f"the object has {self.size} bytes, byte {position} was to be read", kind="changed", permanent=True)
            return b""
        inside = position - self._held_at
        if not 0 <= inside < len(self._held):
            stop = range_stop(position, self.stop, self.size)
            self._held = self._call(lambda: bytes(self._fs.cat_file(self._path, start=position, end=stop)))
            self._held_at, inside = position, 0
            if not self._held and self.size is not None:
                raise Fault(f"no bytes at {position} of {self.size}")
        data = self._held[inside : inside + most]
        if inside + most >= len(self._held):
            self._held = b""
        return data

    def reset(self) -> None:
        self._held = b""
        self._stale = True

    def _look(self) -> None:
        if not self._stale:
            return
        self._call(lambda: self._fs.invalidate_cache(self._path))
        info = self._call(lambda: self._fs.info(self._path))
        if info.get("type") == "directory":
            raise Fault("it is a directory, not a tar", kind="not_found", permanent=True)
        size, etag = info.get("size"), info.get("ETag") or info.get("etag") or info.get("mtime")
        if self.size is not None and (size != self.size or etag != self._etag):
            raise Fault(
                f"the object changed while it was read: {self.size} bytes, {self._etag} became {size} bytes, {etag}",
                kind="changed",
                permanent=True,
            )
        self.size, self._etag, self._stale = size, etag, False

    def _call(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except FileNotFoundError:
            raise Fault("there is no such object", kind="not_found", permanent=True) from None
        except PermissionError as error:
            raise Fault(str(error), kind="forbidden", permanent=True) from None
        except Exception as error:  # every backend has its own; what is not above may pass
            raise Fault(f"{type(error).__name__}: {error}") from None


def retry_after_s(value: str | None, now_s: float | None = None) -> float:
    """The wait that a Retry-After header asks for: seconds, or a date."""
    if not value:
        return 0.0
    if value.strip().isdigit():
        return float(value.strip()[:9])
    try:
        due_s = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, due_s - (time.time() if now_s is None else now_s))


def open_stream(
    url: str,
    offset: int = 0,
    *,
    policy: RetryPolicy | None = None,
    length: int | None = None,
    closing: threading.Event | None = None,
) -> ByteStream:
    """The bytes of `url` from `offset` on.

    Args:
        url: a path, or a URL.
        offset: byte at which reading starts.
        policy: how a broken read is tried again.
        length: how many bytes will be wanted, where that is known; a store is then asked for no more.
        closing: once set, waits end and a remote stream reads no more.

    Raises:
        ValueError: the scheme is refused or unknown.
        StorageError: a local file cannot be opened. Remote objects are opened by the first read.
    """
    path = local_path(url)
    if path is not None:
        return LocalStream(url, path, offset)
    policy = policy or RetryPolicy()
    if scheme_of(url) in ("http", "https") and "::" not in url:
        from treadle.pipeline.http_source import HttpSource

        stream = RemoteStream(url, HttpSource(url, timeout_s=policy.timeout_s), offset, policy, closing)
    else:
        stream = RemoteStream(url, FsspecSource(url), offset, policy, closing)
    stream.aim(offset, length)
    return stream
