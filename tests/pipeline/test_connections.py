"""pipeline/connections.py: one connection serves what many objects ask in turn; one that is broken, or has bytes left in it, serves nobody."""

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from treadle.pipeline import connections
from treadle.pipeline.connections import Connections, Peer
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.storage import open_stream

QUICK = RetryPolicy(attempts=4, base_delay_s=0.001, max_delay_s=0.002, timeout_s=10.0)


@pytest.fixture(name="kept")
def kept_fixture() -> Iterator[Connections]:
    kept = Connections()
    yield kept
    kept.close()


@pytest.fixture(name="made")
def made_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Peer]:
    """The peers of connections that are made."""
    made: list[Peer] = []
    connect = Peer.connect

    def counted(peer: Peer, timeout_s: float) -> HTTPConnection:
        made.append(peer)
        return connect(peer, timeout_s)

    monkeypatch.setattr(Peer, "connect", counted)
    return made


def read(url: str, kept: Connections, offset: int, length: int) -> bytes:
    with open_stream(url, offset, policy=QUICK, length=length, connections=kept) as stream:
        return stream.read(length)


def test_objects_of_one_server_share_a_connection(server: Any, kept: Connections, made: list[Peer]) -> None:
    server.files = {f"/{name}": bytes([number]) * 1000 for number, name in enumerate("abc")}
    for number, name in enumerate("abc"):
        assert read(server.url.replace("shard.tar", name), kept, 100, 50) == bytes([number]) * 50
    assert len(made) == 1


def test_readers_at_once_have_one_each_and_the_next_ones_share_them(server: Any, kept: Connections, made: list[Peer]) -> None:
    with (
        open_stream(server.url, 0, policy=QUICK, length=100, connections=kept) as one,
        open_stream(server.url, 0, policy=QUICK, length=100, connections=kept) as other,
    ):
        assert one.read(10) == other.read(10) == server.body[:10]
        assert one.read(90) == other.read(90) == server.body[10:100]
    for offset in (7, 300, 9):
        assert read(server.url, kept, offset, 20) == server.body[offset : offset + 20]
    assert len(made) == 2


def test_a_connection_with_bytes_left_in_it_is_not_kept(server: Any, kept: Connections, made: list[Peer]) -> None:
    with open_stream(server.url, 0, policy=QUICK, connections=kept) as stream:
        assert stream.read(10) == server.body[:10]
    assert read(server.url, kept, 500, 20) == server.body[500:520]
    assert len(made) == 2


def test_connections_that_the_server_has_closed_are_replaced_at_once(server: Any, kept: Connections, made: list[Peer]) -> None:
    streams = [open_stream(server.url, 0, policy=QUICK, length=10, connections=kept) for _ in range(3)]
    assert [stream.read(10) for stream in streams] == [server.body[:10]] * 3
    for stream in streams:
        stream.close()
    place = urlsplit(server.url)
    for _, connection in kept._idle.values():
        connection.sock.shutdown(2)
    assert read(server.url, kept, 5, 10) == server.body[5:15]
    # One was tried, and found closed; the others were not.
    assert len(made) == 4 and not any(fault for fault in server.faults)
    kept.drop(Peer.of(place))
    assert kept.take(Peer.of(place)) is None


def test_a_fault_closes_its_connection_alone(server: Any, kept: Connections, made: list[Peer]) -> None:
    assert read(server.url, kept, 0, 10) == server.body[:10]
    server.faults.append(lambda handler: handler.serve(cut=3))
    assert read(server.url, kept, 0, 10) == server.body[:10]
    assert read(server.url, kept, 0, 10) == server.body[:10]
    assert len(made) == 2


def test_credentials_are_of_a_request_not_of_a_connection(server: Any, kept: Connections, made: list[Peer]) -> None:
    assert read(server.url.replace("://", "://me:secret@"), kept, 0, 10) == server.body[:10]
    assert read(server.url, kept, 0, 10) == server.body[:10]
    assert ["Authorization" in headers for headers in server.headers] == [True, False]
    assert len(made) == 1


def test_no_more_than_a_bound_are_kept_and_none_after_closing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE", 2)
    kept, peer = Connections(), Peer.of(urlsplit(server.url))
    made = [peer.connect(10.0) for _ in range(4)]
    for connection in made:
        kept.put(peer, connection)
    # The oldest ones are gone, the latest is taken first.
    assert [connection.sock is None for connection in made] == [True, True, False, False]
    assert kept.take(peer) is made[3]
    kept.close()
    kept.put(peer, made[3])
    assert all(connection.sock is None for connection in made) and kept.take(peer) is None


def test_many_threads_use_few_connections(server: Any, kept: Connections, made: list[Peer]) -> None:
    found: list[bytes] = []

    def work() -> None:
        for number in range(10):
            found.append(read(server.url, kept, number, 3))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(server.body[number : number + 3] for number in range(10) for _ in range(8))
    assert len(made) <= 8
