"""An object behind http or https, read in ranges over one kept-alive connection.

Redirects are followed to http and https alone, and take no credentials along to another host. A server that ignores ranges is
read from its start. Only the standard library is used: faults must be seen as they happen, not through somebody's retries.
"""

import base64
import netrc
import ssl
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from treadle.pipeline.storage import Fault, public_url, range_stop, retry_after_s

MAX_REDIRECTS = 8
READ_THROUGH_BYTES = 256 << 10
"""A gap up to this long is read and thrown away rather than asked for anew."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 421, 423, 425, 429})
"""Client errors that may pass; every 5xx may."""

_HTML_STARTS = (b"<!doctype html", b"<html", b"<!--", b"<head")


class HttpSource:
    """One object behind HTTP.

    Args:
        url: http or https; user and password in it, or netrc, become Basic authorization.
        timeout_s: silence after which a connection is a fault, s.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        self.size: int | None = None
        self.stop: int | None = None
        self._url = url
        self._timeout_s = timeout_s
        self._etag: str | None = None
        self._connection: HTTPConnection | None = None
        self._peer = ("", "", "")
        self._response: HTTPResponse | None = None
        self._at = 0
        self._left: int | None = None
        self._head = b""
        self._ranged = False
        self._place: SplitResult | None = None

    def fetch(self, position: int, most: int) -> bytes:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        if self.size is not None and position == self.size:
            return b""
        try:
            gap = position - self._at
            fresh = self._response is None or not 0 <= gap <= READ_THROUGH_BYTES or (self._left is not None and gap >= self._left)
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
        except (OSError, HTTPException) as error:
            raise Fault(f"{type(error).__name__}: {error}") from None
        if not data and (self._ranged or self.size is not None) and position != self.size:
            # What was asked for has ended, the object has not.
            if fresh:
                raise Fault(f"an answer without the bytes at {position}")
            return self.fetch(position, most)
        return data

    def reset(self) -> None:
        """Forgets the connection, and where redirects led."""
        self._place = None
        self._drop_response()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _drop_response(self) -> None:
        response, self._response, self._head = self._response, None, b""
        if response is None:
            return
        if self._left == 0:
            response.read()
        whole = response.isclosed()
        response.close()
        if not whole and self._connection is not None:
            # What is left of the body would be taken for the next answer.
            self._connection.close()
            self._connection = None

    def _piece(self, most: int) -> bytes:
        """The next bytes of the open response; none at its end.

        Raises:
            Fault: the body ended before its length.
        """
        response = self._response
        if response is None:
            return b""
        if self._head:
            data, self._head = self._head[:most], self._head[most:]
        else:
            data = response.read1(min(most, 1 << 20) if self._left is None else min(most, 1 << 20, self._left)) if self._left != 0 else b""
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left:
                raise Fault(f"the body ended {self._left} bytes early")
        self._at += len(data)
        if not data:
            if self._left is None and self.size is None and not self._ranged:
                self.size = self._at
            self._drop_response()
        return data

    def _request(self, position: int) -> bool:
        """Opens a response that holds `position`; False where the object ends there."""
        stop = range_stop(position, self.stop, None)
        response = self._answer({"Range": f"bytes={position}-{stop - 1}", "Accept-Encoding": "identity"})
        status = response.status
        total = _total(response.getheader("Content-Range"))
        if status == 416:
            response.read()
            self._same(total, None)
            if (total is not None and position > total) or (total is None and self.size not in (None, position)):
                raise Fault(f"the object has {total} bytes, byte {position} was to be read", kind="changed", permanent=True)
            return False
        if status not in (200, 206):
            raise self._refusal(response)
        length = response.getheader("Content-Length")
        held = int(length) if length is not None and length.isdigit() else None
        start = 0
        if status == 206:
            start = _first(response.getheader("Content-Range"))
            if start != position:
                raise Fault(f"bytes from {position} were asked for, bytes from {start} came")
        else:
            total = held
        self._response, self._at, self._left, self._ranged = response, start, held, status == 206
        if start == 0:
            self._look_at_start(response)
        self._same(total, response.getheader("ETag"))
        return True

    def _look_at_start(self, response: HTTPResponse) -> None:
        """Refuses an HTML page in the object's place: error pages and sign-in pages come with status 200."""
        head = response.read1(512)
        if head.lstrip()[:16].lower().startswith(_HTML_STARTS):
            raise Fault(f"an HTML page came in the object's place; it begins {head[:64]!r}", kind="not_a_tar")
        self._head = head
        if not head and self._left:
            raise Fault(f"the body ended {self._left} bytes early")

    def _same(self, total: int | None, etag: str | None) -> None:
        """Checks that the object is the one it was."""
        if total is not None:
            if self.size is not None and total != self.size:
                raise Fault(f"the object changed while it was read: {self.size} bytes became {total}", kind="changed", permanent=True)
            self.size = total
        if etag is not None:
            if self._etag is not None and etag != self._etag:
                raise Fault(f"the object changed while it was read: ETag {self._etag} became {etag}", kind="changed", permanent=True)
            self._etag = etag

    def _refusal(self, response: HTTPResponse) -> Fault:
        status = response.status
        detail = f"HTTP {status} {response.reason}"
        if status >= 500 or status in _PASSING:
            return Fault(detail, wait_s=retry_after_s(response.getheader("Retry-After")))
        kinds = {401: "forbidden", 403: "forbidden", 404: "not_found", 410: "not_found"}
        return Fault(detail, kind=kinds.get(status, "unreadable"), permanent=True)

    def _answer(self, headers: dict[str, str]) -> HTTPResponse:
        """The answer to a GET, redirects followed; where they led is asked directly from then on."""
        origin = urlsplit(self._url)
        place, authorization = self._place or origin, _authorization(origin)
        for _ in range(MAX_REDIRECTS + 1):
            own = place.hostname == origin.hostname and place.scheme == origin.scheme and place.port == origin.port
            response = self._get(place, {**headers, "Authorization": authorization} if authorization and own else headers)
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
            moved = urlsplit(urljoin(place.geturl(), target))
            if moved.scheme not in ("http", "https") or not moved.hostname or (place.scheme == "https" and moved.scheme == "http"):
                shown = public_url(moved.geturl())
                raise Fault(
                    f"it redirects to {shown!r}; only http and https are followed, never from https to http", kind="refused", permanent=True
                )
            place = moved
        raise Fault(f"more than {MAX_REDIRECTS} redirects")

    def _get(self, place: SplitResult, headers: dict[str, str]) -> HTTPResponse:
        host = place.hostname or ""
        port = place.port or (443 if place.scheme == "https" else 80)
        target = quote(place.path or "/", safe="/%:=&?~#+!$,;'@()*[]") + (
            f"?{quote(place.query, safe='/%:=&?~+!$,;@()*[]')}" if place.query else ""
        )
        proxy = None if proxy_bypass(host) else getproxies().get(place.scheme)
        peer = (place.scheme, f"{host}:{port}", proxy or "")
        if self._connection is not None and self._peer == peer:
            try:
                return self._send(self._connection, target, headers)
            except (ConnectionError, HTTPException):
                # A kept connection that the server has let go of is no fault: the request was not answered at all.
                self._connection.close()
        elif self._connection is not None:
            self._connection.close()
        self._connection, target = self._connect(place, host, port, proxy, target)
        self._peer = peer if not proxy or place.scheme == "https" else ("", "", "")
        return self._send(self._connection, target, headers)

    def _connect(self, place: SplitResult, host: str, port: int, proxy: str | None, target: str) -> tuple[HTTPConnection, str]:
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
        if via is not None and via.hostname:
            basic = _authorization(via)
            if place.scheme == "https":
                tunnel = HTTPSConnection(via.hostname, via.port or 80, timeout=self._timeout_s, context=ssl.create_default_context())
                tunnel.set_tunnel(host, port, {"Proxy-Authorization": basic} if basic else {})
                return tunnel, target
            return HTTPConnection(
                via.hostname, via.port or 80, timeout=self._timeout_s
            ), f"http://{place.netloc.rpartition('@')[2]}{target}"
        if place.scheme == "https":
            return HTTPSConnection(host, port, timeout=self._timeout_s, context=ssl.create_default_context()), target
        return HTTPConnection(host, port, timeout=self._timeout_s), target

    @staticmethod
    def _send(connection: HTTPConnection, target: str, headers: dict[str, str]) -> HTTPResponse:
        connection.request("GET", target, headers={"User-Agent": "treadle", "Accept": "*/*", **headers})
        return connection.getresponse()


def _total(content_range: str | None) -> int | None:
    """The object's size in a Content-Range, None where it does not say."""
    digits = (content_range or "").rpartition("/")[2].strip()
    return int(digits) if digits.isdigit() else None


def _first(content_range: str | None) -> int:
    """The first byte of a Content-Range, -1 where it does not say."""
    digits = (content_range or "").strip().removeprefix("bytes").strip(" =:").partition("-")[0]
    return int(digits) if digits.isdigit() else -1


def _authorization(place: SplitResult) -> str | None:
    """Basic authorization from the URL, else from the user's netrc file."""
    user, password = place.username, place.password
    if user is None:
        try:
            found = netrc.netrc().authenticators(place.hostname or "")
        except (OSError, netrc.NetrcParseError):
            return None
        if not found or not found[0]:
            return None
        user, password = found[0], found[2]
    joined = f"{unquote(user)}:{unquote(password or '')}".encode()
    return f"Basic {base64.b64encode(joined).decode()}"
