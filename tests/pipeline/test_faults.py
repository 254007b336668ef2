"""Every fault of a server that we can think of: what a shard gives over it equals the shard, or the reason is told."""

import gzip
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import ByteStream, RemoteStream, StorageError, open_stream

QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, budget=200, timeout_s=5.0, max_retry_after_s=0.01)
BODY = bytes(range(256)) * 1000

Fault = Callable[[Any], None]
"""What is done with a request instead of serving it; it gets the server's handler."""


def read_all(url: str, offset: int = 0, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, offset, policy=policy) as stream:
        return b"".join(iter(lambda: stream.read(50_000), b""))


@pytest.mark.parametrize("code", [500, 503, 429])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_server_that_asks_for_time_is_given_it(server: Any, code: int, form: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=90)
    asked = "90" if form == "seconds" else format_datetime(due, usegmt=True)
    server.faults = [lambda handler: handler.answer(code, {"Retry-After": asked})]
    waits: list[float] = []
    with open_stream(server.url, policy=RetryPolicy(base_delay_s=1.0)) as stream:
        assert isinstance(stream, RemoteStream)
        stream._sleep = waits.append
        assert stream.read(10) == BODY[:10]
    # A date has whole seconds, and some of the 90 have gone by when it is read.
    assert len(waits) == 1 and (waits[0] == 90.0 if form == "seconds" else 30.0 < waits[0] <= 90.0)


def torn(rng: random.Random) -> Fault:
    """Resets the connection after a random number of bytes of the body."""

    def tear(handler: Any) -> None:
        count = rng.randrange(0, 60_000)
        handler.serve(cut=count)
        # A socket that lingers for no time sends a reset rather than an end.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return tear


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_resets_at_random_bytes(server: Any, seed: int, ranges: bool) -> None:
    rng = random.Random(seed)
    server.ranges = ranges
    server.faults = [torn(rng) for _ in range(3 if not ranges else 40)]
    # Without ranges each fault begins anew, and four in a row without a byte past the last are the end.
    policy = RetryPolicy(base_delay_s=0.0, attempts=60, budget=200)
    assert read_all(server.url, policy=policy) == BODY


def dripping(count: int, start: int = 0) -> Fault:
    """Gives the range asked for `count` bytes at a time, twenty times a second."""

    def drip(handler: Any) -> None:
        first = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {first}-{len(BODY) - 1}/{len(BODY)}")
        handler.send_header("Content-Length", str(len(BODY) - first))
        handler.end_headers()
        for place in range(first, len(BODY), count):
            handler.wfile.write(BODY[place : place + count])
            handler.wfile.flush()
            time.sleep(0.05)

    return drip


def test_a_slow_drip_is_a_fault(server: Any) -> None:
    server.faults = [dripping(10), dripping(10)]
    policy = RetryPolicy(base_delay_s=0.0, timeout_s=0.4, min_bytes_per_s=10_000)
    with open_stream(server.url, policy=policy) as stream:
        assert isinstance(stream, RemoteStream)
        # It breaks after 0.4 s of waiting, at some 200 bytes a second, and goes on from there.
        assert b"".join(iter(lambda: stream.read(50_000), b"")) == BODY
        assert stream.faults == 2


def test_a_slow_drip_may_be_allowed(server: Any) -> None:
    server.body = BODY[:2000]

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "2000")
        handler.end_headers()
        for place in range(0, 2000, 100):
            handler.wfile.write(BODY[place : place + 100])
            handler.wfile.flush()
            time.sleep(0.01)

    server.faults = [drip]
    with open_stream(server.url, policy=RetryPolicy(timeout_s=0.1, min_bytes_per_s=0, attempts=1)) as stream:
        assert stream.read(2000) == BODY[:2000]


def test_a_header_that_drips_is_a_fault(server: Any) -> None:
    def drip(handler: Any) -> None:
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(200):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.02)

    server.faults = [drip]
    assert read_all(server.url, policy=RetryPolicy(base_delay_s=0.0, timeout_s=0.3, min_bytes_per_s=10_000)) == BODY


def lying(length: str | None, *, status: int = 200, body: bytes = BODY) -> Fault:
    """Serves the body with whatever is said of its length."""

    def lie(handler: Any) -> None:
        handler.send_response(status)
        if status == 206:
            handler.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(BODY)}")
        if length is not None:
            handler.send_header("Content-Length", length)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return lie


@pytest.mark.parametrize("length", [None, "abc", "-5", "²", "9" * 30, ""])
def test_a_length_that_makes_no_sense_is_as_none(server: Any, length: str | None) -> None:
    server.etag = None
    server.faults = [lying(length)]
    assert read_all(server.url) == BODY


def test_a_length_that_is_too_long(server: Any) -> None:
    server.etag = None
    server.faults = [lying(str(len(BODY) + 10)), lying(str(len(BODY) + 10))]
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    # The server said another length before: what it has now is not what was begun.
    assert raised.value.kind == "changed"


@pytest.mark.parametrize("short", [1, 1000, len(BODY)])
def test_a_length_of_a_range_that_is_too_short(server: Any, short: int) -> None:
    server.faults = [lying(str(len(BODY) - short), status=206)]
    assert read_all(server.url) == BODY


def test_a_body_that_always_ends_before_its_length_is_told(server: Any, tars: Any, tmp_path: Any) -> None:
    """Two samples of 1,024 bytes come of five: without the length it would be an archive that lacks its end alone."""
    tars.write_texts(tmp_path, [5])
    server.body = (tmp_path / "000.tar").read_bytes()

    def short(handler: Any) -> None:
        first = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        handler.serve(cut=max(0, 2048 - first))

    server.always = short
    found: list[Any] = []
    with pytest.raises(ShardError) as raised:
        found.extend(Shard(server.url, policy=QUICK).samples())
    assert found == list(Shard(str(tmp_path / "000.tar")).samples())[:2]
    assert (raised.value.kind, raised.value.offset) == ("unreadable", 2048)
    assert "early" in raised.value.detail


@pytest.mark.parametrize("total", ["*", "²", "x", "bytes", "0-99", ""])
def test_ranges_that_make_no_sense(server: Any, total: str) -> None:
    def odd(handler: Any) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{len(BODY) - 1}/{total}" if total in "*²x" else total)
        handler.send_header("Content-Length", str(len(BODY)))
        handler.end_headers()
        handler.wfile.write(BODY)

    server.faults = [odd]
    assert read_all(server.url) == BODY


def test_another_range_than_was_asked_for(server: Any) -> None:
    server.faults = [lambda handler: handler.serve(cut=1000), lying(str(len(BODY)), status=206)]
    assert read_all(server.url) == BODY


def zipped(*, layers: int = 1, chunked: bool = False, cut: int | None = None, name: str = "gzip") -> Fault:
    """Serves the body with a Content-Encoding that nobody asked for, ranges of it included."""

    def serve(handler: Any) -> None:
        whole = body = handler.owner.body
        for _ in range(layers):
            whole = body = gzip.compress(body[: len(body) // 2], mtime=0) + gzip.compress(body[len(body) // 2 :], mtime=0)
        asked = handler.headers.get("Range")
        first = 0
        if asked and not chunked:
            first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
            body = whole[first : last + 1]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(whole)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Encoding", name)
        handler.send_header("ETag", '"zipped"')
        if chunked:
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            return
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:cut])
        handler.close_connection = cut is not None

    return serve


@pytest.mark.parametrize("offset", [0, 1, 100_000, len(BODY)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_gzip_encoding_is_undone(server: Any, offset: int, chunked: bool) -> None:
    server.always = zipped(chunked=chunked)
    assert read_all(server.url, offset) == BODY[offset:]


def test_a_gzip_encoding_that_breaks_begins_anew(server: Any) -> None:
    server.body = random.Random(0).randbytes(300_000)
    server.faults = [zipped(), zipped(cut=100_000), zipped(cut=250_000), zipped()]
    assert read_all(server.url) == server.body
    # The range, which is no use, then the whole from the start, three times.
    assert [asked for _, asked in server.asked] == ["bytes=0-8388607", None, None, None]


def test_a_gzip_encoding_is_skipped_through_not_begun_anew(server: Any) -> None:
    server.body = random.Random(0).randbytes(900_000)
    server.always = zipped()
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(10) == server.body[:10]
        assert stream.skip(700_000) == 700_000
        assert stream.read(10) == server.body[700_010:700_020]
        assert stream.read(1_000_000) == server.body[700_020:]
        assert stream.read(1) == b""
    assert len(server.asked) == 2


def test_other_encodings_are_told(server: Any) -> None:
    server.always = zipped(name="br")
    with pytest.raises(StorageError, match="Content-Encoding 'br'"):
        read_all(server.url)
    assert len(server.asked) == 1


def test_what_is_named_gz_is_the_gzip_file_itself(server: Any, tars: Any, tmp_path: Any) -> None:
    tars.write_texts(tmp_path, [20])
    plain = (tmp_path / "000.tar").read_bytes()
    server.body = gzip.compress(plain)
    # As web servers label .tar.gz files that they send as they are.
    server.always = lambda handler: (
        handler.send_response(200),
        handler.send_header("Content-Encoding", "gzip"),
        handler.send_header("Content-Length", str(len(server.body))),
        handler.end_headers(),
        handler.wfile.write(server.body),
    )
    url = server.url + ".gz"
    expected = list(Shard(str(tmp_path / "000.tar")).samples())
    assert list(Shard(url, policy=QUICK).samples()) == expected
    assert Shard(url, policy=QUICK).sample_at(7, expected[7].offset, expected[7].size) == expected[7]
    Shard(url).close()


@pytest.mark.parametrize("location", ["http://[", "http://host:99999999/", "https://host:x/", "http://", "\\\\host", "javascript:x"])
def test_redirects_that_make_no_sense(server: Any, location: str) -> None:
    server.always = lambda handler: handler.answer(302, {"Location": location})
    with pytest.raises(StorageError):
        read_all(server.url)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\0" * 100,
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/9.9 999 x\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_noise_is_a_fault(server: Any, noise: bytes) -> None:
    def loud(handler: Any) -> None:
        handler.wfile.write(noise)
        handler.wfile.flush()
        handler.close_connection = True

    server.faults = [loud, loud]
    assert read_all(server.url) == BODY
    server.always = loud
    with pytest.raises(StorageError, match="unreadable"):
        read_all(server.url)


@pytest.fixture(name="silent")
def silent_fixture(server: Any) -> Iterator[Any]:
    """Answers half of the body and then nothing, for as long as the test lasts."""
    over = threading.Event()

    def half(handler: Any) -> None:
        handler.serve(cut=100_000)
        handler.wfile.flush()
        over.wait(60)

    server.always = half
    yield server
    over.set()


def test_a_blocked_read_ends_when_told_to(silent: Any) -> None:
    closing = threading.Event()
    found: list[bytes | str] = []
    begun = threading.Event()

    def work(stream: ByteStream) -> None:
        found.append(stream.read(100_000))
        begun.set()
        try:
            stream.read(1)
        except StorageError as error:
            found.append(error.kind)

    with open_stream(silent.url, policy=RetryPolicy(timeout_s=3600.0), closing=closing) as stream:
        reading = threading.Thread(target=work, args=(stream,))
        reading.start()
        assert begun.wait(30)
        closing.set()
        reading.join(30)
        assert not reading.is_alive()
    assert found == [BODY[:100_000], "closed"]


def test_a_stream_closes_while_its_reads_are_blocked(silent: Any, tars: Any) -> None:
    from treadle.pipeline.stream import ShardStream

    stream = ShardStream([silent.url], tars.text_shape, retry=RetryPolicy(timeout_s=3600.0), threads=1)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            next(stream)
        except BaseException as error:
            failed.append(error)

    # The body is no tar, but the reader asks for a whole MiB before it looks: it is blocked.
    consumer = threading.Thread(target=work)
    consumer.start()
    while not silent.asked:
        time.sleep(0.01)
    feed = stream._feed
    assert feed is not None
    feed._units.close()
    consumer.join(30)
    assert not consumer.is_alive()
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle-read")]


def test_a_shard_that_changes_gives_what_was_read_of_it(server: Any, tars: Any, tmp_path: Any) -> None:
    tars.write_texts(tmp_path, [200])
    server.body = (tmp_path / "000.tar").read_bytes()
    expected = list(Shard(str(tmp_path / "000.tar")).samples())

    def replaced(handler: Any) -> None:
        server.body = server.body[::-1]
        handler.serve(etag='"two"')

    # A sample of a text takes 1,024 bytes; the one that the cut goes through is not there.
    server.faults = [lambda handler: handler.serve(cut=97 * 1024 + 515), replaced]
    found: list[Any] = []
    with pytest.raises(ShardError) as raised:
        found.extend(Shard(server.url, policy=QUICK).samples())
    assert found == expected[:97]
    assert (raised.value.kind, raised.value.offset) == ("changed", 97 * 1024)
