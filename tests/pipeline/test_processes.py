"""pipeline/processes.py and decode_process.py: results through shared memory, in order, past the ring's edge and its size; a process
that dies is told; scripts without a guard work; nothing is left behind.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.decoders import DecodeOptions
from treadle.pipeline import decode_process
from treadle.pipeline.decode_process import RING_BYTES
from treadle.pipeline.processes import Processes, WorkerDiedError
from treadle.pipeline.stream import derived_workers


def same(task: Any) -> Any:
    return task


def test_arrays_come_back_equal_writable_and_in_order() -> None:
    # Of 3 MiB each: the ring goes round several times.
    pool = Processes[Any, Any](np.arange, 2, same)
    try:
        count = RING_BYTES // (3 * 2**20) * 4
        futures = [pool.submit([3 * 2**17 + number]) for number in range(count)]
        for number, future in enumerate(futures):
            results, worked_s = future.result(timeout=120)
            assert np.array_equal(results[0], np.arange(3 * 2**17 + number))
            assert results[0].flags.writeable
            assert worked_s > 0
    finally:
        pool.shutdown()


def test_what_does_not_fit_the_ring_comes_over_the_socket() -> None:
    pool = Processes[Any, Any](np.arange, 1, same)
    try:
        size = RING_BYTES // 8
        results, _ = pool.submit([size // 2, size // 2 + 7, size + 3, 5]).result(timeout=120)
        assert [len(result) for result in results] == [size // 2, size // 2 + 7, size + 3, 5]
        assert all(np.array_equal(result, np.arange(len(result))) for result in results)
        assert np.array_equal(pool.submit([9999]).result(timeout=60)[0][0], np.arange(9999))
    finally:
        pool.shutdown()


def test_without_shared_memory_it_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.processes._memory", lambda: -1)
    pool = Processes[Any, Any](np.arange, 1, same)
    try:
        assert np.array_equal(pool.submit([100_000]).result(timeout=60)[0][0], np.arange(100_000))
    finally:
        pool.shutdown()


def test_errors_come_back_and_the_worker_goes_on() -> None:
    pool = Processes[Any, Any](math.isqrt, 1, same)
    try:
        bad, good = pool.submit([4, -1]), pool.submit([81])
        with pytest.raises(ValueError, match="nonnegative"):
            bad.result(timeout=60)
        assert good.result(timeout=60)[0] == [9]
    finally:
        pool.shutdown()


def test_a_task_that_cannot_be_prepared_is_told() -> None:
    def refuse(task: int) -> int:
        if task < 0:
            raise ArithmeticError("below zero")
        return task

    pool = Processes[int, int](math.isqrt, 1, refuse)
    try:
        with pytest.raises(ArithmeticError, match="below zero"):
            pool.submit([-1]).result(timeout=60)
        assert pool.submit([9]).result(timeout=60)[0] == [3]
    finally:
        pool.shutdown()


def test_a_worker_that_dies_fails_what_it_had_and_what_waits() -> None:
    pool = Processes[Any, Any](os._exit, 1, same)
    try:
        futures = [pool.submit([3]) for _ in range(5)]
        for future in futures:
            with pytest.raises(WorkerDiedError):
                future.result(timeout=60)
        with pytest.raises(WorkerDiedError):
            pool.submit([3]).result(timeout=60)
    finally:
        pool.shutdown()


def test_shutdown_ends_a_worker_that_waits_for_room() -> None:
    pool = Processes[Any, Any](np.zeros, 1, same)
    for _ in range(40):
        pool.submit([2**19])
    pool.shutdown()
    assert all(worker._process.returncode is not None for worker in pool._workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


UNGUARDED = """
import os, sys
from treadle.pipeline import AudioShape, BatchShape, ImageShape, ShardStream
shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48,
    image=ImageShape(patch_side=8), audio=AudioShape(chunk_samples=64))
stream = ShardStream(sys.argv[1], shape, seed=3, lanes=4, shuffle=12, epochs=1, processes=1, window=2)
next(stream)
print(*[worker._process.pid for worker in stream._feed.ahead._away._workers], flush=True)
sys.stdin.readline()
print(1 + len(list(stream)))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_script_without_a_guard_works_and_leaves_no_process(tars: Any, tmp_path: Path, killed: bool) -> None:
    tars.write_mixed(tmp_path / "mixed", [14, 9])
    script = tmp_path / "run.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "mixed" / "*.tar")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        worker = int(process.stdout.readline())
        assert alive(worker)
        if killed:
            process.kill()
        process.stdin.close()
        rest = process.stdout.read()
    assert killed or int(rest) > 1
    limit = time.monotonic() + 60
    while alive(worker) and time.monotonic() < limit:
        os.sched_yield()
    assert not alive(worker)


def test_processes_take_over_from_threads_without_changing_a_byte(tars: Any, mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tars.run(mixed(options=DecodeOptions(isolate=False)))
    monkeypatch.setattr("treadle.pipeline.stream.PROCESSES_AFTER_S", 0.02)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with mixed(threads=None, options=DecodeOptions(isolate=False)) as stream:
        assert tars.run(stream) == expected


def test_workers_are_derived_from_the_shape_and_the_machine(tars: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert derived_workers(None, None, tars.shape, False)["processes"] == 8
    assert derived_workers(None, None, tars.text_shape, False) == {"threads": 8, "processes": 0, "processes_after_s": 2.0}
    assert derived_workers(3, None, tars.shape, False)["processes"] == 0
    assert derived_workers(None, 2, tars.shape, True) == {"threads": 8, "processes": 2, "processes_after_s": 0.0}
    assert derived_workers(None, 0, tars.shape, False)["processes"] == 0
    # Isolated decoders have processes of their own.
    assert derived_workers(None, None, tars.shape, True) == {"threads": 8, "processes": 0, "processes_after_s": 2.0}
    # Four ranks of one machine have two processors each.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert derived_workers(None, None, tars.shape, False)["processes"] == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert derived_workers(None, None, tars.shape, False)["processes"] == 0


def test_a_ring_without_room_waits_for_its_reader() -> None:
    import mmap

    memory = mmap.mmap(-1, decode_process.HEADER_BYTES + RING_BYTES)
    ring = decode_process.RingWriter(memory)
    piece = memoryview(bytes(RING_BYTES // 4))
    ring.begin()
    assert [ring.put(piece) is not None for _ in range(5)] == [True] * 4 + [False]
    # The next result needs room that the last one still takes: told to stop, it ends.
    ring.begin()
    ring._header[decode_process.STOP] = 1
    with pytest.raises(SystemExit):
        ring.put(piece)
    ring._header[decode_process.RELEASED] = ring.end
    assert ring.put(piece) == (decode_process.HEADER_BYTES, RING_BYTES // 4)
