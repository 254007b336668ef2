"""An object in S3 or Google Cloud Storage, read by obstore (the extra `treadle[obstore]`): a body is taken as it comes, and an answer says
which object it is of, so that one request does what takes two by fsspec, for half the CPU time or less (`benchmarks/bench_storage.py`).

It is taken where it reads what fsspec would read, with the same credentials: see `object_store`. Retries are ours alone.
"""

import asyncio
import importlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from treadle.pipeline.fsspec_source import PATIENT_BYTES_PER_S, in_turns
from treadle.pipeline.ranges import Reach
from treadle.pipeline.retry import RetryPolicy, contacts
from treadle.pipeline.storage import Fault, Wait, public_url

logger = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_BYTES: Final = 1 << 20
"""What is taken of a body at a time, at least. After a fault it is taken as it comes: what has come of a piece is lost with its end."""
CONNECT_S: Final = 10
"""Longest wait for a connection, s."""
READ_THROUGH_BYTES: Final = 256 << 10
"""A gap up to this long is read and thrown away rather than asked for anew."""
FRESH_S: Final = 300
"""Credentials are asked for again after so long, s: botocore renews what is about to expire."""

_STORES: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_PASSING: Final = frozenset({408, 423, 425, 429})
_BUNDLES: Final = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# obstore's threads do not live on in a forked process, where its calls wait for them for ever.
_first_pid = 0


class ObjectStoreSource:
    """One object behind obstore.

    Args:
        store: what `object_store` made.
        key: the object in its bucket.
        version: which of its versions, empty for the newest.
        policy: the silence after which a call is a fault.
        closing: once set, waits end.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        version: str = "",
        policy: RetryPolicy | None = None,
        closing: threading.Event | None = None,
    ) -> None:
        from fsspec.asyn import get_loop

        self.size: int | None = None
        self.stop: int | None = None
        self.version: str | None = None
        self._obstore: Any = importlib.import_module("obstore")
        self._loop: asyncio.AbstractEventLoop = get_loop()
        self._store = store
        self._server = "obstore", id(store)
        self._key = key
        self._wanted = {"version": version} if version else {}
        self._wait = Wait(policy or RetryPolicy(), closing)
        self._reach = Reach()
        self._piece_bytes = PIECE_BYTES
        self._body: AsyncIterator[bytes] | None = None
        self._held = memoryview(b"")
        self._at = 0
        self._end = 0
        """Where the body ends, `_at` being the byte behind `_held`."""

    def fetch(self, position: int, most: int) -> bytes | memoryview:
        """Some bytes from `position` on, at most `most`; none only at the object's end.

        Raises:
            Fault: this attempt failed.
        """
        if self.size is not None and position >= self.size:
            return self._past_end(position)
        begin = self._at - len(self._held)
        if self._body is None or not begin <= position <= min(self._end - 1, self._at + READ_THROUGH_BYTES):
            if not self._ask(position):
                return self._past_end(position)
        while self._at <= position:
            body = self._body
            assert body is not None

            async def piece(body: AsyncIterator[bytes] = body) -> bytes:
                return await anext(body, b"")

            self._take(self._called(piece(), min(self._end - self._at, PIECE_BYTES)))
        start = len(self._held) - (self._at - position)
        data, self._held = self._held[start : start + most], self._held[start + most :]
        return data

    def reset(self) -> None:
        """Forgets the answer that was being read, after a fault."""
        self.close()
        self._piece_bytes = 1

    def close(self) -> None:
        """Forgets the answer that was being read; connections are obstore's own, and shared."""
        self._body, self._held = None, memoryview(b"")

    def _ask(self, position: int) -> bool:
        """Opens an answer that begins at `position`; False where the object ends there."""
        self.close()
        stop = self._reach.stop(position, self.stop, self.size)
        options = {"range": (position, stop), **self._wanted}

        async def ask() -> tuple[Any, AsyncIterator[bytes], bytes]:
            answer = await self._obstore.get_async(self._store, self._key, options=options)
            body = aiter(answer.stream(self._piece_bytes))
            # At once: each way into the loop and back costs 0.2 ms.
            return answer, body, await anext(body, b"")

        try:
            answer, body, first = self._called(ask(), min(stop - position, self._piece_bytes))
        except _PastEndError:
            self._same(self._called(self._head()))
            return False
        self._same(answer.meta)
        start, self._end = answer.range
        if start != position or self._end <= start:
            raise Fault(f"bytes from {position} were asked for, bytes {start} to {self._end} came")
        self._body, self._at = body, start
        self._take(first)
        self._piece_bytes = PIECE_BYTES
        return True

    async def _head(self) -> Any:
        return await self._obstore.head_async(self._store, self._key)

    def _take(self, piece: bytes) -> None:
        """The next piece of the body."""
        left = self._end - self._at
        if not 0 < len(piece) <= left:
            raise Fault(f"the body ended {left} bytes early" if not piece else f"{len(piece)} bytes came of a body of {left}")
        self._held, self._at = memoryview(piece), self._at + len(piece)

    def _same(self, meta: Any) -> None:
        """Checks that the object is the one it was."""
        size, version = meta["size"], meta["e_tag"] or str(meta["last_modified"])
        if self.size is not None and (size, version) != (self.size, self.version):
            raise Fault(
                f"the object changed while it was read: {self.size} bytes, {self.version} became {size} bytes, {version}",
                kind="changed",
                permanent=True,
            )
        contacts.answered(self._server)
        self.size, self.version = size, version

    def _past_end(self, position: int) -> bytes:
        if self.size is not None and position > self.size:
            raise Fault(f"the object has {self.size} bytes, byte {position} was to be read", kind="changed", permanent=True)
        if self.size is not None and position < self.size:
            raise Fault(f"no bytes at {position} of {self.size}")
        return b""

    def _called(self, coming: Coroutine[Any, Any, T], size: int = 0) -> T:
        """What comes, `size` bytes with it: at a slow rate they are given their time, before silence begins to count."""
        try:
            return in_turns(coming, self._loop, self._wait, size / PATIENT_BYTES_PER_S)
        except Fault:
            raise
        except FileNotFoundError:
            raise Fault("there is no such object", kind="not_found", permanent=True) from None
        except Exception as error:  # a class of obstore's for each of its stores' kinds of errors
            fault = _fault(type(error).__name__, str(error))
            if "error sending request" in fault.detail and re.search("ConnectionRefused|[Dd]ns error|Unreachable", str(error)):
                fault.tried_s = contacts.tried_s(self._server)
            raise fault from None


class _PastEndError(Fault):
    """A range that begins where the object has ended."""


def _fault(name: str, text: str) -> Fault:
    """What an error of obstore's says: its first line, and the cause that it leaves to the dump behind it."""
    line, _, dump = text.partition("\n\nDebug source")
    found = re.search(r"status code: (\d{3})", line)
    status = int(found[1]) if found else 0
    if status == 416 or "Wanted range starting at" in line:
        return _PastEndError(line)
    causes = re.findall(r'(?:message|error|kind): (?:"([^"\n]{1,200})"|(InvalidCertificate\([^\n]{1,100}))', dump)
    cause = next((f" ({message or certificate})" for message, certificate in reversed(causes) if (message or certificate) not in line), "")
    detail = f"{line}{cause}"
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Fault(detail, kind="forbidden", permanent=True)
    if "configured region" in line:
        return Fault(f"{detail}; AWS_REGION names the bucket's region", permanent=True)
    if "InvalidCertificate" in dump:
        bundles = " or ".join(_BUNDLES[:2])
        return Fault(f"{detail}; {bundles} may name a bundle of authorities that are trusted", kind="refused", permanent=True)
    return Fault(detail, permanent=400 <= status < 500 and status not in _PASSING)


def object_store(
    url: str, scheme: str, policy: RetryPolicy | None = None, closing: threading.Event | None = None
) -> ObjectStoreSource | None:
    """The object that `url` names, where obstore is there to read it; None where that is left to fsspec.

    It is where obstore is not installed; where fsspec has been configured for the scheme (`fsspec.config`, `FSSPEC_S3...`), or S3 in
    the AWS configuration file beyond an endpoint; where the key is none that obstore sends as it is written; and in a process that
    was forked from one that had used obstore.
    """
    kind = _STORES.get(scheme)
    bucket, _, key = url.partition("://")[2].partition("/")
    key, _, version = key.partition("?versionId=") if kind == "s3" else (key, "", "")
    plain = key and not any(part in ("", ".", "..") for part in key.split("/")) and key.isprintable()
    if kind is None or "::" in url or not bucket or "@" in bucket or not plain or importlib.util.find_spec("obstore") is None:
        return None
    from fsspec.config import conf

    named = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(("AWS_", "GOOGLE_")) or name in _BUNDLES))
    if any(name in conf for name, of in _STORES.items() if of == kind) or (kind == "gs" and "STORAGE_EMULATOR_HOST" in os.environ):
        return None
    global _first_pid
    if _first_pid not in (0, os.getpid()):
        logger.info("%s is read by fsspec: obstore does not work in a forked process", public_url(url))
        return None
    store = _store(kind, bucket, named)
    if store is None:
        return None
    _first_pid = os.getpid()
    return ObjectStoreSource(store, key, version, policy, closing)


@lru_cache(maxsize=256)
def _store(kind: str, bucket: str, environment: tuple[tuple[str, str], ...]) -> Any:
    """A bucket, with its connections; None where it is configured in a way that obstore does not know.

    Raises:
        ValueError: it makes no sense to obstore.
    """
    stores: Any = importlib.import_module("obstore.store")
    named = dict(environment)
    # A body takes as long as whoever reads it: silence is told by `Wait`.
    client: dict[str, Any] = {"timeout": timedelta(days=365), "connect_timeout": timedelta(seconds=CONNECT_S), "user_agent": "treadle"}
    bundles = [name for name in dict.fromkeys(named.get(name, "") for name in _BUNDLES) if os.path.isfile(name)]
    if bundles:
        client["root_certificate"] = b"\n".join(_content(name) for name in bundles)
    retry = {"max_retries": 0}
    try:
        if kind == "gs":
            client["allow_http"] = named.get("GOOGLE_BASE_URL", "").startswith("http://")
            return stores.GCSStore(bucket, client_options=client, retry_config=retry)
        found = _aws(named)
        if found is None:
            return None
        client["allow_http"] = found.get("endpoint", "").startswith("http://")
        return stores.S3Store(bucket, client_options=client, retry_config=retry, **found)
    except Exception as error:
        raise ValueError(f"{kind}://{bucket}: {str(error).partition(chr(10))[0]}") from None


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _aws(named: dict[str, str]) -> dict[str, Any] | None:
    """Endpoint, region and credentials as botocore finds them, where it is installed; else obstore looks itself, at the environment
    and what the machine is given. None where S3 is configured further."""
    found: dict[str, Any] = {}
    endpoint = named.get("AWS_ENDPOINT_URL_S3") or named.get("AWS_ENDPOINT_URL")
    region = named.get("AWS_REGION") or named.get("AWS_DEFAULT_REGION")
    if importlib.util.find_spec("botocore") is not None:
        session: Any = importlib.import_module("botocore.session").get_session()
        scoped: dict[str, Any] = session.get_scoped_config()
        if "services" in scoped or "s3" in scoped or named.get("AWS_USE_FIPS_ENDPOINT") or named.get("AWS_USE_DUALSTACK_ENDPOINT"):
            return None
        endpoint = endpoint or scoped.get("endpoint_url")
        region = region or scoped.get("region")
        credentials = session.get_credentials()
        if credentials is not None:
            found["credential_provider"] = _Credentials(credentials)
    return found | ({"endpoint": endpoint} if endpoint else {}) | ({"region": region} if region else {})


class _Credentials:
    """What botocore found: environment, profiles, single sign-on, roles. It renews them."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __call__(self) -> Any:
        now = self._found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=FRESH_S),
        }
