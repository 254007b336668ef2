"""Byte streams over storage: local files, HTTP, S3 and Google Cloud Storage by obstore where it is installed, and whatever fsspec opens.

A remote stream is read in ranges. On a fault it is opened again at the byte where it broke, after a growing, jittered wait, as
often as its retry policy allows; the object must still be the one it was (size and ETag). Nothing is ever run to get at bytes,
and no credential shows in a message.
"""

import email.utils
import errno
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from stat import S_ISREG
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from treadle.pipeline.retry import RetryPolicy

if TYPE_CHECKING:
    from treadle.pipeline.connections import Connections

logger = logging.getLogger(__name__)

REFUSED_SCHEMES = frozenset(
    {"pipe", "exec", "cmd", "command", "shell", "sh", "bash", "system", "subprocess", "popen", "fork", "reference", "dask"}
)
"""Schemes that run a program, or that let a file say what is read. None is ever opened."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(//)?")
_CHAIN = re.compile(r"::(?![0-9A-Fa-f:.]*(?:%\w+)?\])")
_SECRET = re.compile(
    r"sig|token|key|secret|pass|auth|cred|policy|expires|^x-(amz|goog|oss|cos)-|^(se|sp|spr|sv|sr|st|sip|ss|srt|skoid|sktid|skt|ske|sks|skv)$",
    re.IGNORECASE,
)
# Schemes are short; without a bound a long word would be searched again from each of its letters.
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s'\"<>|\\]+")


SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What a machine or a process runs out of: no shard's fault, so that none is left out for it."""

SHORTAGE: Final = "shortage"
"""The kind of a fault that is one; `StorageError`s are of other kinds."""


_SHORTAGE_HELP: Final = "raise the limit (of files: ulimit -n), or read fewer shards at a time (ShardStream.lanes)"


def raise_shortage(error: OSError) -> None:
    """Raises an OSError that says what helps, where `error` is a shortage."""
    if error.errno in SHORTAGES:
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: {_SHORTAGE_HELP}") from error


class StorageError(Exception):
    """A URL that cannot be read on from `offset`.

    Kinds: `not_found`, `forbidden`, `refused` (a place that is not gone to, or a server that is not trusted), `changed` (the object is not the one it was),
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

    def __init__(
        self, detail: str, *, kind: str = "unreadable", permanent: bool = False, wait_s: float = 0.0, tried_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.kind = kind
        self.permanent = permanent
        self.wait_s = wait_s
        """What the server asked us to wait, s."""
        self.tried_s = tried_s
        """For how long a server that has never answered has been tried, s; None where that is not what is wrong."""


def links_of(url: str) -> list[str]:
    """The links of a chained URL (`simplecache::s3://...`), one for any other; the `::` of an IPv6 address chains nothing."""
    return _CHAIN.split(url)


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case, empty for a local path.

    Raises:
        ValueError: it would run a program.
    """
    for link in links_of(url):
        match = _SCHEME.match(link)
        if match and match[1].lower() in REFUSED_SCHEMES:
            raise ValueError(f"{public_url(url)!r}: {match[1].lower()}: is refused: nothing is run to read a shard; give a path or a URL")
    match = _SCHEME.match(url)
    return match[1].lower() if match and (match[2] or len(links_of(url)) > 1) else ""


def local_path(url: str) -> str | None:
    """The file a URL names on this machine, None where it is not local."""
    scheme = scheme_of(url)
    if not scheme:
        return url
    if scheme in ("file", "local") and len(links_of(url)) == 1:
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
    *links, tail = links_of(url)
    head = "::".join(links)
    if "://" in tail and not ((match := _SCHEME.match(tail)) and match[2]):
        # A command, say, with a URL in it; it is refused, but has to be named.
        return f"{public_url(head)}::{public_urls(tail)}" if head else public_urls(tail)
    try:
        parts = urlsplit(tail)
        host = parts.netloc.rpartition("@")[2]
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return tail.partition("?")[0].rpartition("@")[2]
    if host != parts.netloc or any(_SECRET.search(name) for name, _ in pairs):
        kept = "&".join(f"{quote(name)}={quote(value, safe='/')}" for name, value in pairs if not _SECRET.search(name))
        tail = urlunsplit((parts.scheme, host, parts.path, kept, ""))
    if tail.count("://") > 1 and len(tail.split()) > 1:
        tail = public_urls(tail)
    return f"{public_url(head)}::{tail}" if head else tail


def public_text(text: str) -> str:
    """A message with every URL in it made public, at most 500 characters of it."""
    return public_urls(text[:10_000])[:500]


def public_urls(text: str) -> str:
    """A text with every URL in it made public."""

    def public(match: re.Match[str]) -> str:
        url = match[0].rstrip(".,:;)]}")
        return public_url(url) + match[0][len(url) :]

    return _URL_IN_TEXT.sub(public, text)


class ByteStream(ABC):
    """Bytes of one object, forward. `read` gives fewer bytes than asked for only at the end."""

    chunk_bytes: ClassVar[int] = 1 << 20
    """What is best read at a time by who reads all of it."""

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

    chunk_bytes = 2 << 20

    def __init__(self, url: str, path: str, offset: int = 0) -> None:
        super().__init__(url, offset)
        self._file = -1
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
            raise_shortage(error)
            raise StorageError("unreadable", offset, str(error)) from None
        if not S_ISREG(found.st_mode):
            self.close()
            raise StorageError("refused", offset, "it is no regular file")

    @property
    def size(self) -> int | None:
        return self._size

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file

    def read(self, n: int) -> bytes:
        try:
            data = os.pread(self._file, min(n, max(0, self._size - self.position)), self.position)
            while 0 < len(data) < n:
                piece = os.pread(self._file, min(n - len(data), max(0, self._size - self.position - len(data))), self.position + len(data))
                if not piece:
                    break
                data += piece
        except OSError as error:
            raise_shortage(error)
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
        file, self._file = self._file, -1  # first: an interrupt between the two must not have another's file closed later
        if file >= 0:
            os.close(file)

    __del__ = close  # one that a table of samples holds is nobody's to close


class RangeSource(Protocol):
    """One remote object: bytes from any position."""

    size: int | None
    """Bytes of the object, once known."""
    stop: int | None
    """Byte before which reading will end, where that is known: no more is asked for."""
    version: str | None
    """What tells this object from others of its name (ETag, or when it was changed), once known and where the store says."""

    def fetch(self, position: int, most: int) -> bytes | memoryview:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        ...

    def reset(self) -> None:
        """Forgets connections and whatever else a fault may have spoilt."""
        ...

    def close(self) -> None:
        """Lets go of connections; those that others may use are left to them."""
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

    @property
    def version(self) -> str | None:
        """What tells this object from others of its name, once known and where the store says."""
        return self._source.version

    def read(self, n: int) -> bytes:
        pieces: list[bytes | memoryview] = []
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
        only = pieces[0] if len(pieces) == 1 else None
        return only if isinstance(only, bytes) else b"".join(pieces)

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

    def _some(self, n: int) -> bytes | memoryview:
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
                policy = self._policy
                left_s = None if fault.tried_s is None else policy.first_contact_s - fault.tried_s
                if fault.permanent:
                    self._broken = StorageError(fault.kind, self.position, detail)
                elif self._failures >= policy.attempts or self.faults >= policy.budget:
                    if fault.kind == SHORTAGE:
                        raise OSError(f"{public_url(self.url)}: {detail}; given up after {self.faults} faults: {_SHORTAGE_HELP}") from fault
                    self._broken = StorageError(fault.kind, self.position, f"{detail}; given up after {self.faults} faults")
                elif left_s is not None and left_s <= 0 and self._failures > 1:
                    why = f"nothing there has ever answered, and RetryPolicy.first_contact_s is {policy.first_contact_s:g}"
                    self._broken = StorageError(fault.kind, self.position, f"{detail}; given up after {self.faults} faults: {why}")
                else:
                    wait_s = policy.delay_s(self._failures, fault.wait_s)
                    wait_s = wait_s if left_s is None else min(wait_s, max(left_s, policy.base_delay_s))
                    logger.warning("%s, byte %d: %s; trying again in %.1f s", public_url(self.url), self.position, detail, wait_s)
                    self._sleep(wait_s)
                continue
            if data:
                self._failures = 0
            self.position += len(data)
            return data
        raise self._broken

    def close(self) -> None:
        self._source.close()


class Wait:
    """How long a server is waited for, in short turns: a reader that is told to stop stops, and silence and drips are faults.

    Only time spent within a read counts: a consumer that is busy elsewhere says nothing of the server.
    """

    def __init__(self, policy: RetryPolicy, closing: threading.Event | None = None) -> None:
        self._policy = policy
        self._closing = closing or threading.Event()
        self._waited_s = 0.0
        self._bytes = 0

    def turn(self, silent_s: float) -> None:
        """Between two turns of one wait, `silent_s` after it began.

        Raises:
            Fault: the reader was told to stop, or the server has been silent for too long.
        """
        if self._closing.is_set():
            raise Fault("reading was told to stop", kind="closed", permanent=True)
        if silent_s >= self._policy.timeout_s:
            raise Fault(f"nothing came for {self._policy.timeout_s:g} s")

    def got(self, size: int, waited_s: float) -> None:
        """`size` bytes came after `waited_s`.

        Raises:
            Fault: over the time after which silence is a fault, they have been too few.
        """
        self._waited_s += waited_s
        self._bytes += size
        if self._waited_s >= self._policy.timeout_s:
            rate, self._waited_s, self._bytes = self._bytes / self._waited_s, 0.0, 0
            if rate < self._policy.min_bytes_per_s:
                raise Fault(f"only {rate:.0f} bytes/s came; fewer than {self._policy.min_bytes_per_s} are a fault")

    def anew(self) -> None:
        """A new request has been made: what an earlier one gave says nothing of it."""
        self._waited_s, self._bytes = 0.0, 0


def retry_after_s(value: str | None, now_s: float | None = None) -> float:
    """The wait that a Retry-After header asks for: seconds, or a date."""
    if not value:
        return 0.0
    if re.fullmatch("[0-9]+", value.strip()):
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
    connections: "Connections | None" = None,
) -> ByteStream:
    """The bytes of `url` from `offset` on.

    Args:
        url: a path, or a URL.
        offset: byte at which reading starts.
        policy: how a broken read is tried again.
        length: how many bytes will be wanted, where that is known; a store is then asked for no more.
        closing: once set, waits end and a remote stream reads no more.
        connections: where connections to HTTP servers wait between requests.

    Raises:
        ValueError: the scheme is refused or unknown.
        StorageError: a local file cannot be opened. Remote objects are opened by the first read.
    """
    path = local_path(url)
    if path is not None:
        return LocalStream(url, path, offset)
    policy = policy or RetryPolicy()
    if scheme_of(url) in ("http", "https") and len(links_of(url)) == 1:
        from treadle.pipeline.http_source import HttpSource

        stream = RemoteStream(url, HttpSource(url, policy, closing, connections), offset, policy, closing)
    else:
        stream = RemoteStream(url, _source(url, policy, closing), offset, policy, closing)
    stream.aim(offset, length)
    return stream


def _source(url: str, policy: RetryPolicy, closing: threading.Event | None) -> RangeSource:
    """What reads an object behind neither HTTP nor a path: obstore, where it is installed and can, else fsspec."""
    from treadle.pipeline.fsspec_source import FsspecSource
    from treadle.pipeline.object_store import object_store

    return object_store(url, scheme_of(url), policy, closing) or FsspecSource(url, policy, closing)
