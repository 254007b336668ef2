"""pipeline/readahead.py: in order whatever the timing, bounded in bytes, errors at their place, and no worker left behind."""

import math
import os
import threading

import pytest

from treadle.pipeline.readahead import AWAY_CHUNK_BYTES, CHUNK_BYTES, CHUNK_TASKS, Readahead


def square(number: int) -> int:
    if number == 13:
        raise ArithmeticError("thirteen")
    return number * number


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_whatever_finishes_first(threads: int) -> None:
    # Task 0 cannot end before task 1 has, unless it has a thread of its own.
    second_done = threading.Event()

    def work(number: int) -> int:
        if number == 0 and threads > 1:
            assert second_done.wait(timeout=30)
        if number == 1:
            second_done.set()
        return number * 10

    with Readahead[str, int, int](work, threads=threads) as ahead:
        for number in range(20):
            ahead.submit(str(number), number, charge_bytes=1)
        assert [ahead.pop() for _ in range(20)] == [(str(number), number * 10) for number in range(20)]


def test_small_tasks_share_futures_and_inline_results_keep_their_place() -> None:
    chunks: list[int] = []

    def work(number: int) -> int:
        chunks.append(threading.get_ident())
        return number

    with Readahead[int, int, int](work, threads=2) as ahead:
        for number in range(100):
            if number % 7 == 3:
                ahead.put(number, number, charge_bytes=1)
            else:
                ahead.submit(number, number, charge_bytes=1, input_bytes=CHUNK_BYTES // 10)
        assert len(ahead) == 100
        assert [ahead.pop() for _ in range(100)] == [(number, number) for number in range(100)]
    assert CHUNK_TASKS >= 10


def test_room_ends_at_the_limit_and_a_head_is_always_admitted() -> None:
    with Readahead[int, int, int](square, threads=1, limit_bytes=100) as ahead:
        assert ahead.room()
        ahead.submit(0, 2, charge_bytes=5000)
        assert not ahead.room()
        ahead.pop()
        assert ahead.in_flight_bytes == 0
        for number in range(3):
            assert ahead.room()
            ahead.submit(number, number, charge_bytes=40)
        assert not ahead.room()
        assert ahead.in_flight_bytes == 120
        assert ahead.peak_bytes == 5000
        ahead.pop()
        assert ahead.room()


def test_an_error_comes_at_its_place() -> None:
    with Readahead[int, int, int](square, threads=2) as ahead:
        for number in (1, 13, 3):
            ahead.submit(number, number, charge_bytes=1)
        assert ahead.pop() == (1, 1)
        with pytest.raises(ArithmeticError, match="thirteen"):
            ahead.pop()
        assert ahead.pop() == (3, 9)


def test_closing_joins_threads_and_drops_what_has_not_begun() -> None:
    release, begun = threading.Event(), threading.Event()
    worked: list[int] = []

    def work(number: int) -> None:
        begun.set()
        assert release.wait(timeout=30)
        worked.append(number)

    ahead = Readahead[int, int, None](work, threads=1)
    for number in range(50):
        ahead.submit(number, number, charge_bytes=1)
    assert begun.wait(timeout=30)
    release.set()
    ahead.close()
    ahead.close()
    assert 1 <= len(worked) <= 50
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle-decode")]
    with pytest.raises(RuntimeError, match="closed"):
        ahead.submit(0, 0, charge_bytes=1)


def test_processes_give_the_same_and_are_other_processes() -> None:
    # A worker process imports what it runs by name; test modules have none, so it runs functions of the standard library.
    with Readahead[int, int, int](math.isqrt, processes=1) as ahead:
        for number in range(5):
            ahead.submit(number, number * number, charge_bytes=1, input_bytes=AWAY_CHUNK_BYTES)
        ahead.submit(13, -1, charge_bytes=1)
        assert [ahead.pop() for _ in range(5)] == [(number, number) for number in range(5)]
        with pytest.raises(ValueError, match="nonnegative"):
            ahead.pop()
    with Readahead[int, str, int](eval, processes=1) as ahead:
        ahead.submit(0, "__import__('os').getpid()", charge_bytes=1)
        assert ahead.pop()[1] != os.getpid()


def test_messages_to_processes_hold_more_than_threads_chunks() -> None:
    size = 80 * 1024
    assert size > CHUNK_BYTES
    for processes, most in ((0, 1), (1, -(-AWAY_CHUNK_BYTES // size))):
        with Readahead[int, int, int](math.isqrt, processes=processes) as ahead:
            for number in range(12):
                ahead.submit(number, number * number, charge_bytes=1, input_bytes=size)
            chunks = [chunk for _, chunk, _, _ in ahead._queue]
            assert max(map(chunks.count, chunks)) == most
            assert [ahead.pop() for _ in range(12)] == [(number, number) for number in range(12)]


def test_a_process_that_dies_is_told_not_waited_for() -> None:
    with Readahead[int, int, int](os._exit, processes=1) as ahead:
        ahead.submit(0, 3, charge_bytes=1)
        with pytest.raises(RuntimeError, match="processes=0"):
            ahead.pop()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        Readahead[int, int, int](square, threads=0)
    with pytest.raises(ValueError, match="processes is -1"):
        Readahead[int, int, int](square, processes=-1)
    with pytest.raises(IndexError):
        Readahead[int, int, int](square).pop()
