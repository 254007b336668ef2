"""Connections to HTTP servers: made through whatever proxy the environment names, read in short turns, kept for the next request.

All shards of a stream share one store of them: a resume asks for hundreds of short ranges, and each handshake costs round trips.

    take(peer) --> request, answer, whole body --> put(peer)      anything else: closed
"""

import base64
import netrc
import os
import socket
import ssl
import threading
import time
from collections import OrderedDict
from functools import lru_cache, partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import Any, Final, NamedTuple, cast
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from treadle.pipeline.storage import Wait

CONNECT_S: Final = 10.0
"""Longest wait for a connection, s; it cannot be interrupted."""
TURN_S: Final = 0.1
"""How often a read looks whether to go on."""
MAX_IDLE: Final = 64
"""Connections kept between requests."""


class Peer(NamedTuple):
    """Where a connection leads."""

    scheme: str
    host: str
    port: int
    proxy: str
    """The proxy's URL; empty for none."""

    @classmethod
    def of(cls, place: SplitResult) -> "Peer":
        """Whom to ask for what lies at `place`."""
        host = place.hostname or ""
        port = place.port or (443 if place.scheme == "https" else 80)
        return cls(place.scheme, host, port, "" if proxy_bypass(host) else getproxies().get(place.scheme) or "")

    @property
    def _via(self) -> SplitResult | None:
        if not self.proxy:
            return None
        via = urlsplit(self.proxy if "://" in self.proxy else f"http://{self.proxy}")
        return via if via.hostname else None

    @property
    def place(self) -> str:
        """Host and port that a connection is made to."""
        via = self._via
        return f"{self.host}:{self.port}" if via is None else f"the proxy {via.hostname}:{via.port or 80}"

    @property
    def relayed(self) -> dict[str, str] | None:
        """Headers for a proxy that reads the requests themselves and is asked for whole URLs; None where nobody does."""
        via = self._via
        return None if via is None or self.scheme == "https" else _proxy_login(via)

    def connect(self, timeout_s: float) -> HTTPConnection:
        """A new connection.

        Raises:
            OSError: nobody answers there, or not as who they should be.
        """
        via = self._via
        timeout_s = min(timeout_s, CONNECT_S)
        host, port = (self.host, self.port) if via is None else (via.hostname or "", via.port or 80)
        connection: HTTPConnection
        if self.scheme == "https":
            connection = HTTPSConnection(host, port, timeout=timeout_s, context=_trusted())
            if via is not None:
                connection.set_tunnel(self.host, self.port, _proxy_login(via))
        else:
            connection = HTTPConnection(host, port, timeout=timeout_s)
        connection.connect()
        connection.sock.settimeout(TURN_S)
        return connection


class Connections:
    """Connections that wait for their next request."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, tuple[Peer, HTTPConnection]] = OrderedDict()
        self._peers: dict[tuple[str, str], Peer] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def peer(self, place: SplitResult) -> Peer:
        """Whom to ask for what lies at `place`. The environment is searched for proxies once: it takes as long as the rest of a request."""
        found = self._peers.get(place[:2])
        if found is None:
            found = self._peers[place[:2]] = Peer.of(place)
        return found

    def take(self, peer: Peer) -> HTTPConnection | None:
        """The connection to `peer` that was put last; its server may have let go of it."""
        with self._lock:
            number = next((number for number in reversed(self._idle) if self._idle[number][0] == peer), None)
            return None if number is None else self._idle.pop(number)[1]

    def put(self, peer: Peer, connection: HTTPConnection) -> None:
        """Keeps a connection whose last answer has been read whole."""
        with self._lock:
            if not self._closed:
                self._count += 1
                self._idle[self._count] = peer, connection
                if len(self._idle) <= MAX_IDLE:
                    return
                connection = self._idle.popitem(last=False)[1][1]
        connection.close()

    def drop(self, peer: Peer) -> None:
        """Closes what leads to `peer`: one was found closed by its server, and the others are older."""
        with self._lock:
            gone = [self._idle.pop(number)[1] for number in [number for number in self._idle if self._idle[number][0] == peer]]
        for connection in gone:
            connection.close()

    def close(self) -> None:
        """Closes all of them, and whatever is put later."""
        with self._lock:
            self._closed = True
            gone = [connection for _, connection in self._idle.values()]
            self._idle.clear()
        for connection in gone:
            connection.close()


def ask(connection: HTTPConnection, wait: Wait, target: str, headers: dict[str, str]) -> HTTPResponse:
    """The answer to a GET, header read; `wait` is told of every turn of its reads."""
    connection.response_class = cast("type[HTTPResponse]", partial(_Answer, wait))
    connection.request("GET", target, headers={"User-Agent": "treadle", "Accept": "*/*", **headers})
    return connection.getresponse()


class _Patient(RawIOBase):
    """A socket read in short turns."""

    def __init__(self, connected: socket.socket, wait: Wait) -> None:
        self._socket = connected
        # Keeps the socket open when the connection lets go of it before the answer has been read.
        self._kept = connected.makefile("rb", buffering=0)
        self._wait = wait

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        begun = time.monotonic()
        while True:
            try:
                size = self._socket.recv_into(buffer)
            except TimeoutError:
                self._wait.turn(time.monotonic() - begun)
                continue
            self._wait.got(size, time.monotonic() - begun)
            return size

    def close(self) -> None:
        if not self.closed:
            self._kept.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer that is waited for in turns, its header included."""

    def __init__(
        self, wait: Wait, connected: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None
    ) -> None:
        super().__init__(connected, debuglevel, method, url)
        self.fp.close()
        self.fp = BufferedReader(_Patient(connected, wait), 1 << 16)


@lru_cache(maxsize=8)
def _context(bundles: tuple[str | None, ...]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for bundle in bundles[2:]:
        if bundle and os.path.exists(bundle):
            context.load_verify_locations(**{"capath" if os.path.isdir(bundle) else "cafile": bundle})
    return context


def _trusted() -> ssl.SSLContext:
    """Whom to trust: the system's authorities, or those that the usual environment variables name."""
    return _context(tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")))


def _proxy_login(via: SplitResult) -> dict[str, str]:
    login = authorization(via)
    return {"Proxy-Authorization": login} if login else {}


def authorization(place: SplitResult) -> str | None:
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
