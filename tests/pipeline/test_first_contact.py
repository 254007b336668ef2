"""A server that nobody has reached yet is given up soon: its URL is more likely wrong than it is down. One that has answered is waited for."""

import errno
import logging
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from treadle.pipeline import http_source
from treadle.pipeline.retry import Contacts, RetryPolicy, unreachable
from treadle.pipeline.storage import RemoteStream, StorageError, open_stream
from treadle.pipeline.stream import ShardStream

# Attempts alone would take minutes.
SHORT = RetryPolicy(attempts=10_000, budget=10_000, base_delay_s=0.01, max_delay_s=0.01, first_contact_s=0.1)


@pytest.fixture(autouse=True)
def nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(http_source, "contacts", Contacts())


@pytest.fixture(name="unused")
def unused_fixture() -> Iterator[int]:
    """A port that refuses connections: taken, and not listened to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def error_of(url: str, policy: RetryPolicy = SHORT) -> tuple[StorageError, int]:
    """How reading ends, and after how many faults."""
    with open_stream(url, policy=policy) as stream, pytest.raises(StorageError) as raised:
        stream.read(1)
    assert isinstance(stream, RemoteStream)
    return raised.value, stream.faults


def test_a_refused_connection_names_the_url_and_the_cause(unused: int, caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://user:hunter2@127.0.0.1:{unused}/a.tar?token=s3cr3t"
    with caplog.at_level(logging.WARNING):
        error, faults = error_of(url)
    assert error.kind == "unreadable"
    assert f"127.0.0.1:{unused} cannot be reached: ConnectionRefusedError" in error.detail
    assert "RetryPolicy.first_contact_s is 0.1" in error.detail
    # The waits are of 5 to 10 ms, and there is one after each fault but the last.
    assert 2 <= faults <= 22
    assert f"http://127.0.0.1:{unused}/a.tar, byte 0: 127.0.0.1:{unused} cannot be reached" in caplog.text
    assert not [secret for secret in ("hunter2", "s3cr3t") if secret in caplog.text + repr(error)]


def test_the_next_object_there_is_tried_twice(unused: int) -> None:
    assert error_of(f"http://127.0.0.1:{unused}/a.tar")[1] >= 2
    assert error_of(f"http://127.0.0.1:{unused}/b.tar")[1] == 2


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError("timed out"),
    ],
)
def test_other_ways_of_not_being_there(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    found, _ = error_of("http://nowhere.invalid/a.tar")
    assert f"nowhere.invalid:80 cannot be reached: {type(error).__name__}: {error}" in found.detail
    assert "first_contact_s" in found.detail


def test_the_proxy_is_named(unused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:hunter2@127.0.0.1:{unused}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    error, _ = error_of("http://elsewhere.invalid/a.tar")
    assert f"the proxy 127.0.0.1:{unused} cannot be reached" in error.detail
    assert "hunter2" not in repr(error)


@pytest.mark.parametrize("other", [False, True])
def test_a_server_that_has_answered_is_waited_for(serving: Any, other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes down in mid-run, for much longer than a first contact may take; whoever reads on, or begins another object, waits."""
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 1000)
    policy = RetryPolicy(attempts=50, base_delay_s=0.001, max_delay_s=0.002, first_contact_s=0.0)
    with serving() as server:
        url, body, port = server.url, server.body, server.port
        stream = open_stream(url, policy=policy)
        assert isinstance(stream, RemoteStream)
        assert stream.read(1000) == body[:1000]
        if other:
            stream.close()
            stream = open_stream(url.replace("shard", "other"), 1000, policy=policy)
            assert isinstance(stream, RemoteStream)
        # Connections that are kept are let go of with no answer.
        server.always = lambda handler: setattr(handler, "close_connection", True)
    again: list[Any] = []

    def come_back(wait_s: float) -> None:
        if stream.faults == 30:
            again.append(serving(port=port))
            again[0].__enter__()

    stream._sleep = come_back
    try:
        assert stream.read(1 << 20) == body[1000:]
        assert stream.faults == 30
    finally:
        stream.close()
        again[0].__exit__(None, None, None)


def test_a_server_that_answers_with_an_error_is_there(server: Any) -> None:
    server.faults = [lambda handler: handler.answer(503)] * 5
    policy = RetryPolicy(attempts=8, base_delay_s=0.001, max_delay_s=0.002, first_contact_s=0.0)
    with open_stream(server.url, policy=policy) as stream:
        assert stream.read(1 << 20) == server.body


def test_a_stream_of_shards_at_a_wrong_port_ends(unused: int, tars: Any) -> None:
    urls = f"http://127.0.0.1:{unused}/{{00..19}}.tar"
    with ShardStream(urls, tars.text_shape, epochs=1, retry=SHORT) as stream:
        assert list(stream) == []
        assert stream.quarantine.counts == {"unreadable": 20}


def test_the_clock_is_of_a_server_that_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    found = Contacts()
    assert found.tried_s("a") == 0.0
    now_s = 107.5
    assert (found.tried_s("a"), found.tried_s("b")) == (7.5, 0.0)
    found.answered("a")
    assert (found.tried_s("a"), found.tried_s("b")) == (None, 0.0)
    # Whoever tries again after a pause gives it the same time again.
    now_s = 150.0
    assert found.tried_s("b") == 42.5
    now_s = 3000.0
    assert found.tried_s("b") == 0.0


def test_a_server_that_has_answered_may_be_away_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.Random, "uniform", lambda _self, least, _most: least)
    policy = RetryPolicy()
    assert sum(policy.delay_s(failures) for failures in range(1, policy.attempts)) > 45.0


def test_what_led_to_an_error_is_looked_at() -> None:
    outer = RuntimeError("no connection")
    outer.__cause__ = OSError(errno.ECONNREFUSED, "refused")
    circle = RuntimeError("round")
    circle.__context__ = RuntimeError("and round")
    circle.__context__.__context__ = circle
    assert unreachable(outer) and unreachable(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    assert not any(map(unreachable, (circle, None, ConnectionResetError(errno.ECONNRESET, "reset"), ValueError("no"))))
