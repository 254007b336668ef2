"""Byte streams under faults: what arrives equals the fault-free bytes, or the error says why not."""

import io
import logging
import os
import tarfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from treadle.pipeline.http_source import HttpSource
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import (
    LocalStream,
    RemoteStream,
    RetryPolicy,
    StorageError,
    local_path,
    open_stream,
    public_text,
    public_url,
    retry_after_s,
    scheme_of,
)

BODY = bytes(range(256)) * 1000
QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, budget=12, timeout_s=5.0, max_retry_after_s=0.01)


class Server(ThreadingHTTPServer):
    """Serves `body`; each request is first offered to `faults`, which pops what it wants to happen instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = BODY
        self.etag: str | None = '"one"'
        self.ranges = True
        self.faults: list[Callable[[Handler], None]] = []
        self.always: Callable[[Handler], None] | None = None
        self.asked: list[tuple[str, str | None]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave in mid-answer here; that is the point."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/shard.tar"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.owner.asked.append((self.path, self.headers.get("Range")))
        if self.owner.always is not None:
            self.owner.always(self)
        elif self.owner.faults:
            self.owner.faults.pop(0)(self)
        else:
            self.serve()

    def serve(self, *, cut: int | None = None, lie: int = 0, etag: str | None = None) -> None:
        """Answers the range asked for; `cut` bytes of it only, with a length that is `lie` bytes too long."""
        body = self.owner.body
        start, stop = 0, len(body)
        asked = self.headers.get("Range")
        if asked and self.owner.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(body), int(last) + 1)
            if start >= len(body):
                self.answer(416, {"Content-Range": f"bytes */{len(body)}"})
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start + lie))
        found = etag or self.owner.etag
        if found:
            self.send_header("ETag", found)
        self.end_headers()
        self.wfile.write(body[start:stop][:cut])
        if cut is not None or lie:
            self.wfile.flush()
            self.close_connection = True

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def status(code: int, headers: dict[str, str] | None = None) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, headers)


def reset(handler: Handler) -> None:
    """Closes the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


def cut(count: int) -> Callable[[Handler], None]:
    return lambda handler: handler.serve(cut=count)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@contextmanager
def serving() -> Generator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def read_all(url: str, offset: int = 0, n: int = 50_000, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, offset, policy=policy) as stream:
        return b"".join(iter(lambda: stream.read(n), b""))


@pytest.mark.parametrize("offset", [0, 1, 100_000, len(BODY) - 1, len(BODY)])
def test_http_from_any_offset(server: Server, offset: int) -> None:
    assert read_all(server.url, offset) == BODY[offset:]


def test_http_asks_range_by_range_on_one_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.storage.RANGE_BYTES", 100_000)
    assert read_all(server.url) == BODY
    assert [asked for _, asked in server.asked] == ["bytes=0-99999", "bytes=100000-199999", "bytes=200000-299999"]


def test_http_asks_for_no_more_than_is_wanted(server: Server) -> None:
    with open_stream(server.url, 1000, policy=QUICK, length=24) as stream:
        assert stream.read(24) == BODY[1000:1024]
        assert stream.size == len(BODY)
    assert server.asked == [("/shard.tar", "bytes=1000-1023")]


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(502),
        status(503, {"Retry-After": "0"}),
        status(429, {"Retry-After": "60"}),
        status(408),
        reset,
        cut(0),
        cut(1),
        cut(100_001),
    ],
)
def test_http_goes_on_after_a_fault(server: Server, fault: Callable[[Handler], None]) -> None:
    server.faults = [fault, fault]
    assert read_all(server.url) == BODY


def test_http_faults_at_every_request(server: Server) -> None:
    # Each answer gives 40,000 bytes and breaks: progress, so the attempts in a row start anew each time.
    server.always = cut(40_000)
    assert read_all(server.url) == BODY
    assert [asked for _, asked in server.asked][:3] == ["bytes=0-8388607", "bytes=40000-8428607", "bytes=80000-8468607"]


def test_http_a_length_that_promises_too_much(server: Server) -> None:
    server.ranges, server.etag = False, None
    server.faults = [lambda handler: handler.serve(cut=1000)]
    assert read_all(server.url) == BODY


@pytest.mark.parametrize("offset", [0, 70_000])
def test_http_without_ranges(server: Server, offset: int) -> None:
    server.ranges = False
    server.faults = [cut(100_000), cut(200_000)]
    assert read_all(server.url, offset) == BODY[offset:]


def test_http_chunked_without_a_length(server: Server) -> None:
    def chunked(handler: Handler, upto: int = len(BODY), end: bytes = b"0\r\n\r\n") -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, upto, 50_000):
            piece = BODY[start : min(upto, start + 50_000)]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(end)
        handler.close_connection = not end

    server.faults = [lambda handler: chunked(handler, 100_000, b""), chunked]
    assert read_all(server.url) == BODY


def test_http_gives_up_when_the_attempts_are_spent(server: Server) -> None:
    server.always = status(500)
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert (raised.value.kind, raised.value.offset) == ("unreadable", 0)
    assert "HTTP 500" in raised.value.detail
    assert len(server.asked) == QUICK.attempts


def test_http_gives_up_when_the_budget_is_spent(server: Server) -> None:
    server.always = cut(100)
    with open_stream(server.url, policy=QUICK) as stream:
        # 12 faults are the budget; each answer before the last gave 100 bytes, and the last one's were given too
        assert stream.read(len(BODY)) == BODY[: 12 * 100]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("unreadable", 1200)


@pytest.mark.parametrize(
    ("code", "kind"), [(404, "not_found"), (410, "not_found"), (403, "forbidden"), (401, "forbidden"), (400, "unreadable")]
)
def test_http_some_answers_are_final(server: Server, code: int, kind: str) -> None:
    server.always = status(code)
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert raised.value.kind == kind
    assert len(server.asked) == 1


def test_http_a_changed_etag_ends_it(server: Server) -> None:
    server.faults = [cut(100_000), lambda handler: handler.serve(etag='"two"')]
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(len(BODY)) == BODY[:100_000]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 100_000)


def test_http_a_changed_length_ends_it(server: Server) -> None:
    def shrunk(handler: Handler) -> None:
        server.body = BODY[:150_000]
        handler.serve()

    server.etag = None
    server.faults = [cut(100_000), shrunk]
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(len(BODY)) == BODY[:100_000]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert raised.value.kind == "changed"


@pytest.mark.parametrize("ranges", [True, False])
def test_http_an_offset_past_the_end(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    with pytest.raises(StorageError) as raised:
        read_all(server.url, len(BODY) + 1)
    assert raised.value.kind == "changed"


def test_http_html_pages_are_tried_again_then_told(server: Server) -> None:
    def page(handler: Handler) -> None:
        handler.answer(200, {"Content-Type": "text/html"}, b"\n<!DOCTYPE html><title>Sign in</title>")

    server.faults = [page, page]
    assert read_all(server.url) == BODY
    server.always = page
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert raised.value.kind == "not_a_tar"
    assert "Sign in" in raised.value.detail


def test_http_redirects(server: Server) -> None:
    with serving() as other:
        server.always = status(302, {"Location": other.url})
        other.faults = [cut(1000)]
        assert read_all(server.url) == BODY
        # the first range and the one after the fault ask where it is; ranges in between would go straight there
        assert (len(server.asked), len(other.asked)) == (2, 2)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x", "//", "data:text/plain,x"])
def test_http_redirects_elsewhere_are_refused(server: Server, target: str) -> None:
    server.always = status(301, {"Location": target})
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert raised.value.kind in ("refused", "unreadable")
    assert b"root:" not in str(raised.value).encode()


def test_http_redirect_loops_end(server: Server) -> None:
    server.always = lambda handler: handler.answer(302, {"Location": handler.path + "x"})
    with pytest.raises(StorageError, match="more than 8 redirects"):
        read_all(server.url, policy=RetryPolicy(attempts=1))


def test_http_credentials_go_to_their_own_host_alone(server: Server) -> None:
    sent: list[str | None] = []

    def note(handler: Handler) -> None:
        sent.append(handler.headers.get("Authorization"))
        handler.answer(302, {"Location": f"http://localhost:{other.server_address[1]}/x"})

    def note_too(handler: Handler) -> None:
        sent.append(handler.headers.get("Authorization"))
        handler.serve()

    with serving() as other:
        server.always, other.always = note, note_too
        assert read_all(server.url.replace("//", "//me:p%40ss@")) == BODY
    # base64 of me:p@ss
    assert sent == ["Basic bWU6cEBzcw==", None]


def test_http_an_idle_connection_closed_by_the_server_is_no_fault(server: Server) -> None:
    def then_close(handler: Handler) -> None:
        handler.serve()
        handler.close_connection = True

    server.always = then_close
    with open_stream(server.url, policy=RetryPolicy(attempts=1), length=10) as stream:
        assert isinstance(stream, RemoteStream)
        for position in (0, 50_000, 20_000):
            stream.aim(position, 10)
            assert stream.read(10) == BODY[position : position + 10]
        assert stream.faults == 0


def test_http_skips_what_is_not_wanted(server: Server) -> None:
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(10) == BODY[:10]
        assert stream.skip(5) == 5
        assert stream.read(5) == BODY[15:20]
        assert stream.skip(10**9) == len(BODY) - 20
        assert stream.read(10) == b""


def test_http_silence_is_a_fault(server: Server) -> None:
    release = threading.Event()

    def silent(handler: Handler) -> None:
        release.wait(10)
        handler.close_connection = True

    server.faults = [silent]
    try:
        assert read_all(server.url, policy=RetryPolicy(base_delay_s=0.001, timeout_s=0.2)) == BODY
    finally:
        release.set()


def test_http_says_nothing_of_credentials(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.always = status(500)
    url = server.url.replace("//", "//user:hunter2@") + "?X-Amz-Signature=s3cr3t&versionId=7"
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError) as raised:
        read_all(url)
    told = caplog.text + repr(raised.value) + str(raised.value.__cause__)
    assert "hunter2" not in told and "s3cr3t" not in told
    assert "versionId=7" in caplog.text


def test_the_source_reads_in_small_pieces(server: Server) -> None:
    source = HttpSource(server.url)
    assert source.fetch(0, 3) == BODY[:3]
    assert source.fetch(3, 3) == BODY[3:6]
    assert source.size == len(BODY)
    source.reset()


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files: MemoryFileSystem = fsspec.filesystem("memory")
    files.pipe_file("/shards/a.tar", BODY)
    yield files
    files.rm("/shards", recursive=True)


def test_fsspec_reads_in_ranges(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.storage.RANGE_BYTES", 100_000)
    assert read_all("memory://shards/a.tar") == BODY
    assert read_all("memory://shards/a.tar", 123_456, n=7_000) == BODY[123_456:]
    with open_stream("memory://shards/a.tar", len(BODY) + 1, policy=QUICK) as stream, pytest.raises(StorageError, match="changed"):
        stream.read(1)


def test_fsspec_goes_on_after_faults_and_short_reads(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.cat_file
    calls: list[tuple[int, int]] = []

    def every_other_call_fails(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        calls.append((start, end))
        if len(calls) % 2:
            raise TimeoutError("https://key:hunter2@host/x?sig=abc did not answer")
        return bytes(whole(self, path, start=start, end=end)[:90_000])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", every_other_call_fails)
    assert read_all("memory://shards/a.tar") == BODY
    assert [start for start, _ in calls] == [0, 0, 90_000, 90_000, 180_000, 180_000]


def test_fsspec_an_object_that_changes_ends_it(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.cat_file

    def changing(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        if start:
            self.pipe_file(path, BODY[:-1])
            raise ConnectionResetError("gone")
        return bytes(whole(self, path, start=start, end=end)[:1000])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", changing)
    with open_stream("memory://shards/a.tar", policy=QUICK) as stream:
        assert stream.read(2000) == BODY[:1000]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 1000)


def test_fsspec_missing_and_unknown() -> None:
    with pytest.raises(StorageError) as raised:
        read_all("memory://shards/none.tar")
    assert raised.value.kind == "not_found"
    with pytest.raises(ValueError, match="nosuch"):
        open_stream("nosuch://bucket/a.tar")


def test_local_files(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    assert read_all(str(path), 10) == BODY[10:]
    assert read_all(path.as_uri()) == BODY
    with open_stream(str(path)) as stream:
        assert isinstance(stream, LocalStream)
        assert stream.read(10) == BODY[:10]
        assert stream.back(4)
        assert stream.read(4) == BODY[6:10]
        assert stream.skip(10**12) == len(BODY) - 10
        assert stream.read(1) == b""


def test_a_local_file_that_shrinks_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    with open_stream(str(path)) as stream:
        assert stream.read(1000) == BODY[:1000]
        os.truncate(path, 5000)
        assert stream.read(len(BODY)) == BODY[1000:5000]
        assert stream.read(1) == b""


def test_local_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, kind in (("fifo", "refused"), ("none", "not_found"), (".", "refused")):
        with pytest.raises(StorageError) as raised:
            open_stream(str(tmp_path / name))
        assert raised.value.kind == kind


@pytest.mark.parametrize(
    "url", ["pipe:cat x.tar", "pipe://cat", "PIPE:curl x", "simplecache::pipe:cat x", "exec:ls", "sh:ls", "reference://x.json"]
)
def test_nothing_is_ever_run(url: str) -> None:
    with pytest.raises(ValueError, match="is refused"):
        open_stream(url)


def test_schemes_and_paths() -> None:
    assert scheme_of("/data/a:b.tar") == ""
    assert scheme_of("S3://bucket/a.tar") == "s3"
    assert local_path("file:///data/a%20b.tar") == "/data/a b.tar"
    assert local_path("data/{0}.tar") == "data/{0}.tar"
    assert local_path("s3://bucket/a.tar") is None
    with pytest.raises(ValueError, match="names a path on this machine"):
        local_path("file://server/data/a.tar")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/data/a.tar?x", "/data/a.tar?x"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("https://u:p@host:8/a.tar", "https://host:8/a.tar"),
        ("https://host/a.tar?file=a.tar&part=3", "https://host/a.tar?file=a.tar&part=3"),
        ("https://host/a.tar?X-Amz-Credential=k&X-Amz-Signature=s&v=1", "https://host/a.tar?v=1"),
        ("https://acct.blob/a.tar?sv=2020&se=1&sp=r&sig=abc", "https://acct.blob/a.tar"),
        ("https://host/a.tar?access_token=abc#frag", "https://host/a.tar"),
        ("simplecache::https://u:p@host/a.tar", "simplecache::https://host/a.tar"),
    ],
)
def test_credentials_do_not_show(url: str, shown: str) -> None:
    assert public_url(url) == shown
    assert public_text(f"GET {url}: failed") == f"GET {shown}: failed"


def test_retry_after() -> None:
    assert retry_after_s("7") == 7
    assert retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now_s=40.0) == 60
    assert retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT") == 0
    assert retry_after_s(None) == retry_after_s("soon") == 0


def test_waits_grow_within_their_bounds() -> None:
    policy = RetryPolicy(base_delay_s=1.0, max_delay_s=5.0, max_retry_after_s=20.0)
    for failures, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (100, 5.0)):
        assert most / 2 <= policy.delay_s(failures) <= most
    assert policy.delay_s(1, asked_s=7.0) == 7.0
    assert policy.delay_s(1, asked_s=1000.0) == 20.0


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"budget": 0}, {"base_delay_s": -1.0}, {"timeout_s": 0.0}, {"max_delay_s": float("nan")}])
def test_a_policy_is_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)  # type: ignore[arg-type]


def test_the_wait_is_slept(server: Server) -> None:
    waits: list[float] = []
    server.faults = [status(503, {"Retry-After": "9"}), status(500)]
    with open_stream(server.url, policy=RetryPolicy(base_delay_s=1.0)) as stream:
        assert isinstance(stream, RemoteStream)
        stream._sleep = waits.append
        assert stream.read(10) == BODY[:10]
    assert waits[0] == 9.0
    assert 1.0 <= waits[1] <= 2.0


def shard_bytes(count: int) -> bytes:
    """A tar of `count` samples of one 5,000-byte file: 5,632 bytes each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:03d}.bin")
            info.size = 5000
            tar.addfile(info, io.BytesIO(bytes([number]) * 5000))
    return out.getvalue()


def test_a_shard_over_faults_equals_the_shard(server: Server) -> None:
    server.body = shard_bytes(50)
    clean = list(Shard(server.url, policy=QUICK).samples())
    server.always = cut(33_333)
    assert list(Shard(server.url, policy=QUICK).samples()) == clean
    server.always = None
    server.faults = [status(500), cut(10), reset]
    assert Shard(server.url, policy=QUICK).sample_at(7, clean[7].offset, clean[7].size) == clean[7]
    Shard(server.url).close()


def test_a_shard_that_stays_broken_gives_what_was_whole(server: Server) -> None:
    server.body = shard_bytes(50)
    server.faults = [cut(100_000), status(404)]
    found: list[str] = []
    with pytest.raises(ShardError) as raised:
        found.extend(sample.key for sample in Shard(server.url, policy=QUICK).samples())
    # 17 samples of 5,632 bytes take 95,744; the 18th is cut
    assert found == [f"{number:03d}" for number in range(17)]
    assert (raised.value.kind, raised.value.offset) == ("not_found", 17 * 5632)


def test_single_samples_share_a_connection_and_ask_for_their_bytes_alone(server: Server) -> None:
    server.body = shard_bytes(5)
    clean = list(Shard(server.url, policy=QUICK).samples())
    server.asked.clear()
    assert [Shard(server.url).sample_at(sample.index, sample.offset, sample.size) for sample in reversed(clean)] == clean[::-1]
    # the last sample's size is known; its range ends with it, not with the shard
    assert [asked for _, asked in server.asked] == [f"bytes={sample.offset}-{sample.end - 1}" for sample in reversed(clean)]
    Shard(server.url).close()
