"""An object behind http or https, read in ranges over kept-alive connections (`connections.py`).

Redirects are followed to http and https alone, and take no credentials along to another host. A server that ignores ranges is
read from its start. Only the standard library is used: faults must be seen as they happen, not through somebody's retries.
"""

import ssl
import threading
import zlib
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from treadle.pipeline.connections import Connections, Peer, ask, authorization
from treadle.pipeline.ranges import Reach
from treadle.pipeline.retry import RetryPolicy, contacts, unreachable
from treadle.pipeline.storage import SHORTAGE, SHORTAGES, Fault, Wait, public_url, retry_after_s

MAX_REDIRECTS = 8
READ_THROUGH_BYTES = 256 << 10
"""A gap up to this long is read and thrown away rather than asked for anew."""

TLS_PIECE_BYTES = 128 << 10
"""TLS gives 16 KiB at a time: so much is gathered, for a tenth less CPU time. After a fault it is taken as it comes, since what has been
gathered of a piece is lost with the connection."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 421, 423, 425, 429})
"""Client errors that may pass; every 5xx may."""

_NOBODY: Final = Peer("", "", 0, "")
_HTML_STARTS = (b"<!doctype html", b"<html", b"<!--", b"<head")


class HttpSource:
    """One object behind HTTP.

    Args:
        url: http or https; user and password in it, or netrc, become Basic authorization.
        policy: what counts as silence.
        closing: once set, waits end.
        connections: where connections wait between requests, for whoever asks next; its own by default.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy | None = None,
        closing: threading.Event | None = None,
        connections: Connections | None = None,
    ) -> None:
        self.size: int | None = None
        self.stop: int | None = None
        self.version: str | None = None
        self._url = url
        self._timeout_s = (policy or RetryPolicy()).timeout_s
        self._wait = Wait(policy or RetryPolicy(), closing)
        self._reach = Reach()
        self._shared = connections is not None
        self._connections = connections or Connections()
        self._connection: HTTPConnection | None = None
        self._peer = _NOBODY
        self._response: HTTPResponse | None = None
        self._at = 0
        self._left: int | None = None
        self._head = b""
        self._ranged = False
        self._broke = False
        self._gathers = False
        self._unzip: _Unzip | None = None
        self._encoded = False
        self._place: SplitResult | None = None
        self._origin: tuple[SplitResult, str | None] | None = None

    def fetch(self, position: int, most: int) -> bytes:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        if self.size is not None and position == self.size:
            return b""
        try:
            gap = position - self._at
            # A body that is no range began at the start, and would again: whatever lies ahead in it is read through.
            far = self._ranged and (gap > READ_THROUGH_BYTES or (self._left is not None and gap >= self._left))
            fresh = self._response is None or gap < 0 or far
            if fresh:
                self._drop_response()
                if not self._request(position):
                    if self.size is not None and position < self.size:
                        raise Fault(f"no bytes at {position} of {self.size}")
                    return b""
            while self._at < position:
                if not self._piece(position - self._at):
                    raise Fault(f"the object ends at byte {self._at}, byte {position} was to be read", kind="changed", permanent=True)
            data = self._piece(most)
        except ssl.SSLCertVerificationError as error:
            raise Fault(
                f"its certificate is not trusted: {error.verify_message}; SSL_CERT_FILE may name a bundle of authorities that are",
                kind="refused",
                permanent=True,
            ) from None
        except (OSError, HTTPException) as error:
            short = isinstance(error, OSError) and error.errno in SHORTAGES
            raise Fault(f"{type(error).__name__}: {error}", kind=SHORTAGE if short else "unreadable") from None
        except ValueError:
            # The message of the library may show a part of a password.
            raise Fault("the URL, or what the server answered, cannot be made sense of") from None
        if not data and (self._ranged or self.size is not None) and position != self.size:
            # What was asked for has ended, the object has not.
            if fresh:
                raise Fault(f"an answer without the bytes at {position}")
            return self.fetch(position, most)
        return data

    def reset(self) -> None:
        """Forgets the connection, where redirects led, and what netrc said: there was a fault."""
        self._broke = True
        self._place = self._origin = None
        self._drop_response()
        self._let_go()

    def close(self) -> None:
        """Lets go of the connection; a shared one that can be used again waits for whoever asks next."""
        self._drop_response()
        self._let_go()
        if not self._shared:
            self._connections.close()
            self._connections = Connections()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _drop_response(self) -> None:
        response, self._response, self._head = self._response, None, b""
        if response is None:
            return
        if self._left == 0:
            response.read()
        whole = response.isclosed() and not response.will_close
        response.close()
        if whole and self._connection is not None:
            self._connections.put(self._peer, self._connection)
            self._connection = None
        else:
            # What is left of the body would be taken for the next answer.
            self._let_go()

    def _piece(self, most: int) -> bytes:
        """The next bytes of the open response; none at its end.

        Raises:
            Fault: the body ended before its length.
        """
        response = self._response
        if response is None:
            return b""
        if self._unzip is not None:
            data = self._unzip.read(most, lambda: self._raw(response, 1 << 18))
        else:
            data = self._raw(response, min(most, 1 << 20))
        self._at += len(data)
        if not data:
            if self.size is None and not self._ranged and (self._left is None or self._unzip is not None):
                self.size = self._at
            self._drop_response()
        return data

    def _raw(self, response: HTTPResponse, most: int) -> bytes:
        """The next bytes of the body as they are sent.

        Raises:
            Fault: the body ended before its length.
        """
        if self._head:
            data, self._head = self._head[:most], self._head[most:]
        elif self._left == 0:
            data = b""
        else:
            most = most if self._left is None else min(most, self._left)
            data = response.read(min(most, TLS_PIECE_BYTES)) if self._gathers else response.read1(most)
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left:
                raise Fault(f"the body ended {self._left} bytes early")
        return data

    def _request(self, position: int) -> bool:
        """Opens a response that holds `position`; False where the object ends there."""
        stop = self._reach.stop(position, self.stop, None)
        asked = {} if self._encoded else {"Range": f"bytes={position}-{stop - 1}"}
        response = self._answer({**asked, "Accept-Encoding": "identity"})
        status = response.status
        if status in (200, 206) and self._is_encoded(response) and status == 206:
            # A range of the encoded bytes is of no use without those before it.
            response.close()
            self.reset()
            if not asked:
                raise Fault("a part of a gzip body came where the whole was asked for")
            return self._request(position)
        total = _total(response.getheader("Content-Range"))
        if status == 416:
            response.read()
            self._same(total, None)
            if total is None and self.size is None and not position:
                raise Fault("HTTP 416 for the first bytes, and no word of how many there are")
            if (total is not None and position > total) or (total is None and self.size not in (None, position)):
                raise Fault(f"the object has {total} bytes, byte {position} was to be read", kind="changed", permanent=True)
            return False
        if status not in (200, 206):
            raise self._refusal(response)
        held = _number(response.getheader("Content-Length"))
        start = 0
        if status == 206:
            start, last = _span(response.getheader("Content-Range"))
            if start != position:
                raise Fault(f"bytes from {position} were asked for, bytes from {start} came")
            if last is not None:
                span = last - start + 1
                if span < 1 or held not in (None, span) or (total is not None and last >= total):
                    length = "unknown length" if held is None else f"{held} bytes"
                    raise Fault(f"an answer of {length} that says it holds bytes {start} to {last} of {total}")
                held = span
        else:
            total = None if self._encoded else held
        self._unzip = _Unzip() if self._encoded else None
        self._response, self._at, self._left, self._ranged = response, start, held, status == 206
        self._gathers, self._broke = self._peer.scheme == "https" and not self._broke, False
        if start == 0:
            self._look_at_start(response)
        self._same(total, response.getheader("ETag") or response.getheader("Last-Modified"))
        return True

    def _is_encoded(self, response: HTTPResponse) -> bool:
        """Whether the body is a gzip of the object. What is named a gzip file is taken to be one, not to be made into one on its way.

        Raises:
            Fault: it is encoded in another way.
        """
        coding = (response.getheader("Content-Encoding") or "identity").strip().lower()
        if coding in ("identity", "gzip", "x-gzip"):
            self._encoded = coding != "identity" and not urlsplit(self._url).path.lower().endswith((".gz", ".tgz"))
            return self._encoded
        raise Fault(f"the body comes in Content-Encoding {coding[:40]!r}, of which only gzip is undone", permanent=True)

    def _look_at_start(self, response: HTTPResponse) -> None:
        """Refuses an HTML page in the object's place: error pages and sign-in pages come with status 200."""
        head = response.read1(512)
        if head.lstrip()[:16].lower().startswith(_HTML_STARTS):
            raise Fault(f"an HTML page came in the object's place; it begins {head[:64]!r}", kind="not_a_tar")
        self._head = head
        if not head and self._left:
            raise Fault(f"the body ended {self._left} bytes early")

    def _same(self, total: int | None, version: str | None) -> None:
        """Checks that the object is the one it was."""
        if total is not None:
            if self.size is not None and total != self.size:
                raise Fault(f"the object changed while it was read: {self.size} bytes became {total}", kind="changed", permanent=True)
            self.size = total
        if version is not None:
            if self.version is not None and version != self.version:
                raise Fault(
                    f"the object changed while it was read: version {self.version} became {version}", kind="changed", permanent=True
                )
            self.version = version

    def _refusal(self, response: HTTPResponse) -> Fault:
        status = response.status
        detail = f"HTTP {status} {response.reason}"
        if status >= 500 or status in _PASSING:
            return Fault(detail, wait_s=retry_after_s(response.getheader("Retry-After")))
        kinds = {401: "forbidden", 403: "forbidden", 404: "not_found", 410: "not_found"}
        return Fault(detail, kind=kinds.get(status, "unreadable"), permanent=True)

    def _answer(self, headers: dict[str, str]) -> HTTPResponse:
        """The answer to a GET, redirects followed; where they led is asked directly from then on."""
        if self._origin is None:
            parts = urlsplit(self._url)
            self._origin = parts, authorization(parts)
        origin, login = self._origin
        place = self._place or origin
        for _ in range(MAX_REDIRECTS + 1):
            own = place.hostname == origin.hostname and place.scheme == origin.scheme and place.port == origin.port
            response = self._get(place, {**headers, "Authorization": login} if login and own else headers)
            if response.status in (401, 403, 404, 410) and self._place is not None:
                # A signed place that redirects led to has expired: ask again where it is now.
                response.close()
                self.reset()
                place = origin
                continue
            target = response.getheader("Location")
            if response.status not in _REDIRECTS or not target:
                self._place = place if place != origin else None
                return response
            response.close()
            self.reset()
            place = _moved(place, target)
        raise Fault(f"more than {MAX_REDIRECTS} redirects")

    def _get(self, place: SplitResult, headers: dict[str, str]) -> HTTPResponse:
        peer = self._connections.peer(place)
        target = quote(place.path or "/", safe="/%:=&?~#+!$,;'@()*[]") + (
            f"?{quote(place.query, safe='/%:=&?~+!$,;@()*[]')}" if place.query else ""
        )
        relayed = peer.relayed
        if relayed is not None:
            target, headers = f"http://{place.netloc.rpartition('@')[2]}{target}", {**headers, **relayed}
        self._let_go()
        kept = self._connections.take(peer)
        if kept is not None:
            self._connection, self._peer = kept, peer
            try:
                return ask(kept, self._wait, target, headers)
            except (ConnectionError, HTTPException):
                # A kept connection that the server has let go of is no fault: the request was not answered at all.
                self._let_go()
                self._connections.drop(peer)
        self._wait.anew()
        try:
            self._connection, self._peer = peer.connect(self._timeout_s), peer
        except OSError as error:
            if not isinstance(error, TimeoutError) and not unreachable(error):
                raise
            raise Fault(f"{peer.place} cannot be reached: {type(error).__name__}: {error}", tried_s=contacts.tried_s(peer)) from None
        contacts.answered(peer)
        return ask(self._connection, self._wait, target, headers)


class _Unzip:
    """A gzip body undone, however many gzip members it has."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(31)
        self._held = b""

    def read(self, most: int, more: Callable[[], bytes]) -> bytes:
        """The next bytes, at most `most`; none at the end. `more` gives bytes of the body.

        Raises:
            Fault: the body is no gzip, or ends within it.
        """
        while True:
            if not self._held:
                self._held = more()
                if not self._held:
                    if self._inflater.eof:
                        return b""
                    raise Fault("the gzip body ended early")
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(31)
            try:
                data = self._inflater.decompress(self._held, most)
            except zlib.error as error:
                raise Fault(f"the body is no gzip: {error}") from None
            self._held = self._inflater.unused_data or self._inflater.unconsumed_tail
            if data:
                return data


def _moved(place: SplitResult, target: str) -> SplitResult:
    """Where a redirect leads.

    Raises:
        Fault: not to http or https, or from https to http.
    """
    try:
        moved = urlsplit(urljoin(place.geturl(), target))
        known = bool(moved.hostname) and moved.port != 0
    except ValueError:
        moved, known = urlsplit(""), False
    if moved.scheme not in ("http", "https") or not known or (place.scheme == "https" and moved.scheme == "http"):
        shown = public_url(moved.geturl())
        raise Fault(
            f"it redirects to {shown!r}; only http and https are followed, never from https to http", kind="refused", permanent=True
        )
    return moved


def _number(text: str | None) -> int | None:
    """A header's number, None where it has none."""
    digits = (text or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def _total(content_range: str | None) -> int | None:
    """The object's size in a Content-Range, None where it does not say."""
    return _number((content_range or "").rpartition("/")[2])


def _span(content_range: str | None) -> tuple[int, int | None]:
    """The first and the last byte of a Content-Range, -1 and None where it does not say."""
    first, _, last = (content_range or "").strip().removeprefix("bytes").strip(" =:").partition("/")[0].partition("-")
    found = _number(first)
    return -1 if found is None else found, _number(last)
