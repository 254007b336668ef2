"""Objects behind HTTP under faults: what arrives equals the fault-free bytes, or the error says why not."""

import io
import logging
import socket
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.http_source import HttpSource
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.sources import expand_urls
from treadle.pipeline.storage import RemoteStream, StorageError, open_stream

BODY = bytes(range(256)) * 1000
QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, budget=12, timeout_s=5.0, max_retry_after_s=0.01)

Fault = Callable[[Any], None]
"""What is done with a request instead of serving it; it gets the server's handler."""


def status(code: int, headers: dict[str, str] | None = None) -> Fault:
    return lambda handler: handler.answer(code, headers)


def reset(handler: Any) -> None:
    """Closes the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


def cut(count: int) -> Fault:
    return lambda handler: handler.serve(cut=count)


def read_all(url: str, offset: int = 0, n: int = 50_000, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, offset, policy=policy) as stream:
        return b"".join(iter(lambda: stream.read(n), b""))


@pytest.mark.parametrize("offset", [0, 1, 100_000, len(BODY) - 1, len(BODY)])
def test_http_from_any_offset(server: Any, offset: int) -> None:
    assert read_all(server.url, offset) == BODY[offset:]


@pytest.mark.parametrize("faults", [1, 99])
def test_http_416_for_the_first_bytes_is_no_empty_object(server: Any, faults: int) -> None:
    server.faults = [lambda handler: handler.answer(416)] * faults
    if faults == 1:
        assert read_all(server.url) == BODY
    else:
        with pytest.raises(StorageError, match="416 for the first bytes"):
            read_all(server.url)


def test_http_416_with_a_length_of_zero_is_an_empty_object(server: Any) -> None:
    server.always = lambda handler: handler.answer(416, {"Content-Range": "bytes */0"})
    assert read_all(server.url) == b""


def test_http_from_an_ipv6_address(serving: Any) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6 loopback")
    with serving(host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        server.body = shard_bytes(5)
        assert [sample.key for sample in Shard(server.url, policy=QUICK).samples()] == [f"{number:03d}" for number in range(5)]
        assert expand_urls(server.url) == [server.url]


def test_http_asks_range_by_range_on_one_connection(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 100_000)
    assert read_all(server.url) == BODY
    assert [asked for _, asked in server.asked] == ["bytes=0-99999", "bytes=100000-499999"]


def test_http_asks_further_only_while_it_is_read_quickly(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 10_000)
    monkeypatch.setattr("treadle.pipeline.ranges.MAX_RANGES", 4)
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(90_000) == BODY[:90_000]
        monkeypatch.setattr("treadle.pipeline.ranges.QUICK_S", 0.0)
        assert stream.read(20_000) == BODY[90_000:110_000]
    spans = [[int(number) for number in asked.removeprefix("bytes=").split("-")] for _, asked in server.asked]
    assert [stop - start + 1 for start, stop in spans] == [10_000, 40_000, 40_000, 10_000, 10_000]
    assert [start for start, _ in spans] == [0, *(stop + 1 for _, stop in spans[:-1])]


def test_http_asks_for_no_more_than_is_wanted(server: Any) -> None:
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
def test_http_goes_on_after_a_fault(server: Any, fault: Fault) -> None:
    server.faults = [fault, fault]
    assert read_all(server.url) == BODY


def test_http_faults_at_every_request(server: Any) -> None:
    # Each answer gives 40,000 bytes and breaks: progress, so the attempts in a row start anew each time.
    server.always = cut(40_000)
    assert read_all(server.url) == BODY
    assert [asked for _, asked in server.asked][:3] == ["bytes=0-8388607", "bytes=40000-8428607", "bytes=80000-8468607"]


def test_http_a_length_that_promises_too_much(server: Any) -> None:
    server.ranges, server.etag = False, None
    server.faults = [lambda handler: handler.serve(cut=1000)]
    assert read_all(server.url) == BODY


@pytest.mark.parametrize("offset", [0, 70_000])
def test_http_without_ranges(server: Any, offset: int) -> None:
    server.ranges = False
    server.faults = [cut(100_000), cut(200_000)]
    assert read_all(server.url, offset) == BODY[offset:]


def test_http_chunked_without_a_length(server: Any) -> None:
    def chunked(handler: Any, upto: int = len(BODY), end: bytes = b"0\r\n\r\n") -> None:
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


@pytest.mark.parametrize(
    ("content_range", "extra"),
    [
        ("bytes 0-{last}/{size}", b"more" * 5000),  # a body that goes on behind the object's end
        ("bytes 0-{size}/{size}", b"!"),
        ("bytes 0-99/{size}", b""),
    ],
)
def test_http_an_answer_that_contradicts_itself_is_a_fault(server: Any, content_range: str, extra: bytes) -> None:
    """Nothing of it is taken for content, and what comes after it is whole."""

    def contradicts(handler: Any) -> None:
        headers = {"Content-Range": content_range.format(last=len(BODY) - 1, size=len(BODY))}
        handler.answer(206, headers, BODY + extra)

    server.faults = [contradicts] * 2
    assert read_all(server.url) == BODY
    server.always = contradicts
    with pytest.raises(StorageError) as caught:
        read_all(server.url)
    assert (caught.value.kind, caught.value.offset) == ("unreadable", 0)


def test_http_gives_up_when_the_attempts_are_spent(server: Any) -> None:
    server.always = status(500)
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert (raised.value.kind, raised.value.offset) == ("unreadable", 0)
    assert "HTTP 500" in raised.value.detail
    assert len(server.asked) == QUICK.attempts


def test_http_gives_up_when_the_budget_is_spent(server: Any) -> None:
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
def test_http_some_answers_are_final(server: Any, code: int, kind: str) -> None:
    server.always = status(code)
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert raised.value.kind == kind
    assert len(server.asked) == 1


def test_http_a_changed_etag_ends_it(server: Any) -> None:
    server.faults = [cut(100_000), lambda handler: handler.serve(etag='"two"')]
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(len(BODY)) == BODY[:100_000]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 100_000)


def test_http_a_changed_length_ends_it(server: Any) -> None:
    def shrunk(handler: Any) -> None:
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
def test_http_an_offset_past_the_end(server: Any, ranges: bool) -> None:
    server.ranges = ranges
    with pytest.raises(StorageError) as raised:
        read_all(server.url, len(BODY) + 1)
    assert raised.value.kind == "changed"


def test_http_html_pages_are_tried_again_then_told(server: Any) -> None:
    def page(handler: Any) -> None:
        handler.answer(200, {"Content-Type": "text/html"}, b"\n<!DOCTYPE html><title>Sign in</title>")

    server.faults = [page, page]
    assert read_all(server.url) == BODY
    server.always = page
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert raised.value.kind == "not_a_tar"
    assert "Sign in" in raised.value.detail


def test_http_redirects(server: Any, serving: Any) -> None:
    with serving() as other:
        server.always = status(302, {"Location": other.url})
        other.faults = [cut(1000)]
        assert read_all(server.url) == BODY
        # the first range and the one after the fault ask where it is; ranges in between would go straight there
        assert (len(server.asked), len(other.asked)) == (2, 2)


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "file://127.0.0.1/etc/passwd",
        "FILE://localhost/x",
        "ftp://127.0.0.1/x",
        "gopher://x",
        "s3://x/y",
        "data:text/plain,x",
    ],
)
def test_http_redirects_elsewhere_are_refused(server: Any, target: str) -> None:
    server.always = status(301, {"Location": target})
    with pytest.raises(StorageError, match="only http and https are followed") as raised:
        read_all(server.url)
    assert raised.value.kind == "refused"
    assert len(server.asked) == 1


def test_http_redirect_loops_end(server: Any) -> None:
    server.always = lambda handler: handler.answer(302, {"Location": handler.path + "x"})
    with pytest.raises(StorageError, match="more than 8 redirects"):
        read_all(server.url, policy=RetryPolicy(attempts=1))
    assert len(server.asked) == 9


def test_http_credentials_go_to_their_own_host_alone(server: Any, serving: Any) -> None:
    sent: list[str | None] = []

    def note(handler: Any) -> None:
        sent.append(handler.headers.get("Authorization"))
        handler.answer(302, {"Location": f"http://localhost:{other.port}/x"})

    def note_too(handler: Any) -> None:
        sent.append(handler.headers.get("Authorization"))
        handler.serve()

    with serving() as other:
        server.always, other.always = note, note_too
        assert read_all(server.url.replace("//", "//me:p%40ss@")) == BODY
    # base64 of me:p@ss
    assert sent == ["Basic bWU6cEBzcw==", None]


def test_http_an_idle_connection_closed_by_the_server_is_no_fault(server: Any) -> None:
    def then_close(handler: Any) -> None:
        handler.serve()
        handler.close_connection = True

    server.always = then_close
    with open_stream(server.url, policy=RetryPolicy(attempts=1), length=10) as stream:
        assert isinstance(stream, RemoteStream)
        for position in (0, 50_000, 20_000):
            stream.aim(position, 10)
            assert stream.read(10) == BODY[position : position + 10]
        assert stream.faults == 0


def test_http_skips_what_is_not_wanted(server: Any) -> None:
    with open_stream(server.url, policy=QUICK) as stream:
        assert stream.read(10) == BODY[:10]
        assert stream.skip(5) == 5
        assert stream.read(5) == BODY[15:20]
        assert stream.skip(10**9) == len(BODY) - 20
        assert stream.read(10) == b""


def test_http_silence_is_a_fault(server: Any) -> None:
    release = threading.Event()

    def silent(handler: Any) -> None:
        release.wait(10)
        handler.close_connection = True

    server.faults = [silent]
    try:
        assert read_all(server.url, policy=RetryPolicy(base_delay_s=0.001, timeout_s=0.2)) == BODY
    finally:
        release.set()


def test_http_says_nothing_of_credentials(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.always = status(500)
    url = server.url.replace("//", "//user:hunter2@") + "?X-Amz-Signature=s3cr3t&versionId=7"
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError) as raised:
        read_all(url)
    told = caplog.text + repr(raised.value) + str(raised.value.__cause__)
    assert "hunter2" not in told and "s3cr3t" not in told
    assert "versionId=7" in caplog.text


def test_the_source_reads_in_small_pieces(server: Any) -> None:
    source = HttpSource(server.url, QUICK)
    assert source.fetch(0, 3) == BODY[:3]
    assert source.fetch(3, 3) == BODY[3:6]
    assert source.size == len(BODY)
    source.reset()


def test_the_wait_is_slept(server: Any) -> None:
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


def test_a_shard_over_faults_equals_the_shard(server: Any) -> None:
    server.body = shard_bytes(50)
    clean = list(Shard(server.url, policy=QUICK).samples())
    server.always = cut(33_333)
    assert list(Shard(server.url, policy=QUICK).samples()) == clean
    server.always = None
    server.faults = [status(500), cut(10), reset]
    assert Shard(server.url, policy=QUICK).sample_at(7, clean[7].offset, clean[7].size) == clean[7]
    Shard(server.url).close()


def test_a_shard_that_stays_broken_gives_what_was_whole(server: Any) -> None:
    server.body = shard_bytes(50)
    server.faults = [cut(100_000), status(404)]
    found: list[str] = []
    with pytest.raises(ShardError) as raised:
        found.extend(sample.key for sample in Shard(server.url, policy=QUICK).samples())
    # 17 samples of 5,632 bytes take 95,744; the 18th is cut
    assert found == [f"{number:03d}" for number in range(17)]
    assert (raised.value.kind, raised.value.offset) == ("not_found", 17 * 5632)


def test_single_samples_share_a_connection_and_ask_for_their_bytes_alone(server: Any) -> None:
    server.body = shard_bytes(5)
    clean = list(Shard(server.url, policy=QUICK).samples())
    server.asked.clear()
    assert [Shard(server.url).sample_at(sample.index, sample.offset, sample.size) for sample in reversed(clean)] == clean[::-1]
    # the last sample's size is known; its range ends with it, not with the shard
    assert [asked for _, asked in server.asked] == [f"bytes={sample.offset}-{sample.end - 1}" for sample in reversed(clean)]
    Shard(server.url).close()
