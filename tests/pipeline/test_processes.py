"""pipeline/processes.py and decode_process.py: results through shared memory, in order, past the ring's edge and its size; a process
that dies costs an item; scripts without a guard work; nothing is left behind.
"""

import importlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeOptions
from treadle.pipeline import decode_process
from treadle.pipeline.decode_process import LARGE_BYTES, RING_BYTES, receive_whole, send_whole
from treadle.pipeline.feed_config import derived_workers
from treadle.pipeline.nursery import fork_worker
from treadle.pipeline.prepare import Preparer
from treadle.pipeline.processes import Processes, WorkerDiedError
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.samples import Schema
from treadle.pipeline.stream import ShardStream


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


def test_large_contents_are_sent_from_where_they_lie() -> None:
    ours, theirs = multiprocessing.Pipe()
    size = 2**25
    value = {"a": [bytes(range(256)) * (size // 256), "b"], "c": b"small", "d": bytes(LARGE_BYTES)}
    with ours, theirs:
        received: list[Any] = []
        receiver = threading.Thread(target=lambda: received.append(receive_whole(theirs)))
        receiver.start()
        tracemalloc.start()
        try:
            send_whole(ours, value)
            receiver.join()
            # Another copy of the sender's would stand beside the receiver's, which is in this process and whole: its buffer, as it grows
            # by an eighth at a time, is now and then in two places.
            assert tracemalloc.get_traced_memory()[1] < 1.95 * (size + LARGE_BYTES)
        finally:
            tracemalloc.stop()
        assert received == [value]


def test_without_shared_memory_it_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.processes._memory", lambda: -1)
    pool = Processes[Any, Any](np.arange, 1, same)
    try:
        assert np.array_equal(pool.submit([100_000]).result(timeout=60)[0][0], np.arange(100_000))
    finally:
        pool.shutdown()


def test_files_limited_in_size_leave_results_to_the_socket() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RING_BYTES // 2, hard))
    try:
        pool = Processes[Any, Any](np.arange, 1, same)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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


def test_a_worker_that_dies_costs_what_it_had_and_another_takes_its_place() -> None:
    pool = Processes[Any, Any](os._exit, 1, same)
    try:
        futures = [pool.submit([3]) for _ in range(3)]
        for future in futures:
            with pytest.raises(WorkerDiedError):
                future.result(timeout=60)
        # What it does not accept is an error of the work's own, from a worker that lives.
        with pytest.raises(TypeError):
            pool.submit(["x"]).result(timeout=60)
    finally:
        pool.shutdown()


def test_workers_that_end_as_they_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.nursery.PROGRAM", "raise SystemExit(3)")
    pool = Processes[Any, Any](math.isqrt, 2, same)
    try:
        futures = [pool.submit([4]) for _ in range(5)]
        for future in [*futures, pool.submit([4])]:
            with pytest.raises(WorkerDiedError):
                future.result(timeout=60)
    finally:
        pool.shutdown()


def test_a_worker_that_cannot_be_replaced_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    pool = Processes[Any, Any](math.isqrt, 1, same)
    try:
        assert pool.submit([4]).result(timeout=60)[0] == [2]
        monkeypatch.setattr("treadle.pipeline.processes.fork_worker", refused)
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            pool.submit([9]).result(timeout=60)
    finally:
        pool.shutdown()


WORK = """
import os, signal, time
from treadle.decoders import DecodeError

class Work:
    \"\"\"Of each task the items, but for those that end the process, which are the kinds of the errors in their place.\"\"\"

    def __call__(self, task):
        return task

    def watched(self, watch):
        watch.limit(0.1)
        def work(task):
            found = []
            for item, what in enumerate(task):
                try:
                    with watch.item(item):
                        if what == "killed":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if what == "crashed":
                            os.abort()
                        while what == "for ever":
                            pass
                        found.append(what)
                except DecodeError as error:
                    found.append(error.kind)
            if "between items" in task:
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        return work
"""


@pytest.fixture(name="work")
def work_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "ending_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("ending_work").Work()


def test_an_item_that_ends_its_worker_costs_itself_alone(work: Any) -> None:
    pool = Processes[Any, Any](work, 1, same)
    try:
        chunks = [[["a", "killed", "b"], ["c"]], [["d"], ["crashed", "for ever", "e"]], [["f"]], [["killed"], ["killed", "g"]]]
        futures = [pool.submit(chunk) for chunk in chunks]
        assert [future.result(timeout=120)[0] for future in futures] == [
            [["a", "too_large", "b"], ["c"]],
            [["d"], ["corrupt", "timeout", "e"]],
            [["f"]],
            [["too_large"], ["too_large", "g"]],
        ]
        assert len(pool.pids) == 1
    finally:
        pool.shutdown()


def test_a_chunk_that_ends_workers_outside_its_items_is_told_and_costs_no_other(work: Any) -> None:
    pool = Processes[Any, Any](work, 1, same)
    try:
        bad, good = pool.submit([["a"], ["between items"]]), pool.submit([["b"]])
        with pytest.raises(WorkerDiedError):
            bad.result(timeout=120)
        assert good.result(timeout=60)[0] == [["b"]]
    finally:
        pool.shutdown()


def test_idle_workers_that_are_killed_cost_nothing(work: Any) -> None:
    pool = Processes[Any, Any](work, 2, same)
    try:
        assert pool.submit([["a"]]).result(timeout=60)[0] == [["a"]]
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        assert [pool.submit([[letter]]).result(timeout=60)[0] for letter in "bcd"] == [[["b"]], [["c"]], [["d"]]]
    finally:
        pool.shutdown()


def test_in_a_decode_process_nothing_is_isolated_again(tars: Any) -> None:
    preparer = Preparer(Schema(), tars.shape, DecodeOptions(max_wall_s=7.0))
    watched: Any = preparer.watched(decode_process.Watch(np.zeros(8, np.int64)))
    assert preparer.options.isolate
    assert watched.func.options == DecodeOptions(max_wall_s=7.0, isolate=False)


def test_a_worker_killed_within_an_item_costs_a_stream_that_item(tars: Any, tmp_path: Path) -> None:
    """The batches, and every state, are those of a run in which that one item is damaged."""
    rng = random.Random(0)
    samples = [(f"k{number}", tars.mixed_sample(rng)) for number in range(30)]
    # A tenth of a second to decode, or more: the killer looks three times in that.
    noise = np.random.default_rng(0).integers(0, 256, (2600, 2600, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "png", compress_level=1)
    samples.insert(11, ("long", {"txt": b"a text beside it", "png": out.getvalue()}))
    path = tmp_path / "0.tar"
    tars.write_shard(path, samples)

    def make(name: str, **more: Any) -> ShardStream:
        return ShardStream(str(path), tars.shape, lanes=3, shuffle=9, epochs=1, window=2, quarantine=tmp_path / name, **more)

    def kill() -> None:
        ahead = stream._running().ahead
        while not killed and not ended.wait(0.002):
            met = [(worker, worker.at()) for worker in list(ahead._away._workers)] if ahead._away is not None else []
            ended.wait(0.03)
            for worker, at in met:
                if at is not None and worker.at() == at and not killed:
                    killed.append(worker.pid)
                    os.kill(worker.pid, signal.SIGKILL)

    killed: list[int] = []
    ended = threading.Event()
    with make("killed.jsonl", processes=1) as stream:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = tars.run(stream)
        finally:
            ended.set()
            killer.join()
        assert len(killed) == 1 and stream.quarantine.counts == {"too_large": 1}
    lost = json.loads((tmp_path / "killed.jsonl").read_text())
    with tarfile.open(path) as tar:
        member = tar.getmember(lost["member"])
    with path.open("r+b") as file:
        file.seek(member.offset_data)
        file.write(bytes(member.size))
    with make("damaged.jsonl", threads=1) as stream:
        assert tars.run(stream) == found
    damaged = json.loads((tmp_path / "damaged.jsonl").read_text())
    assert [damaged[name] for name in ("key", "member", "offset")] == [lost[name] for name in ("key", "member", "offset")]


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
    expected = tars.run(mixed())
    monkeypatch.setattr("treadle.pipeline.feed_config.PROCESSES_AFTER_S", 0.02)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with mixed(threads=None) as stream:
        assert tars.run(stream) == expected


def test_workers_are_derived_from_the_shape_and_the_machine(tars: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert derived_workers(None, None, tars.shape)["processes"] == 8
    assert derived_workers(None, None, tars.text_shape) == {"threads": 8, "processes": 0, "processes_after_s": 2.0}
    assert derived_workers(3, None, tars.shape)["processes"] == 0
    assert derived_workers(None, 2, tars.shape) == {"threads": 8, "processes": 2, "processes_after_s": 0.0}
    assert derived_workers(None, 0, tars.shape)["processes"] == 0
    # Four ranks of one machine have two processors each.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert derived_workers(None, None, tars.shape)["processes"] == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert derived_workers(None, None, tars.shape)["processes"] == 0


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


def test_memory_that_runs_out_for_a_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Processes[Any, Any](math.isqrt, 1, same)
    real, short = pickle.loads, [True]

    def loads(*args: Any, **kwargs: Any) -> Any:
        if short.pop() if short else False:
            raise MemoryError
        return real(*args, **kwargs)

    try:
        assert pool.submit([4]).result(timeout=60)[0] == [2]
        monkeypatch.setattr(pickle, "loads", loads)
        with pytest.raises(MemoryError):
            pool.submit([9]).result(timeout=60)
        assert pool.submit([16]).result(timeout=60)[0] == [4]
    finally:
        pool.shutdown()


def test_a_task_that_cannot_be_sent_is_told() -> None:
    pool = Processes[Any, Any](math.isqrt, 1, same)
    try:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pool.submit([lambda: None]).result(timeout=60)
        assert pool.submit([9]).result(timeout=60)[0] == [3]
    finally:
        pool.shutdown()


def test_without_another_thread_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real_start = threading.Thread.start

    def fork(*args: Any) -> Any:
        made.append(fork_worker(*args))
        return made[-1]

    def start(thread: threading.Thread) -> None:
        if thread.name == "treadle-decode-receive-1":
            raise RuntimeError("can't start new thread")
        real_start(thread)

    monkeypatch.setattr("treadle.pipeline.processes.fork_worker", fork)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        Processes[Any, Any](math.isqrt, 3, same)
    assert len(made) == 2 and all(process.returncode is not None for process in made)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle-decode-")]


def test_a_forked_process_leaves_the_workers_to_its_parent() -> None:
    ahead = Readahead[int, int, int](math.isqrt, processes=1)
    with ahead:
        for number in range(200):
            ahead.submit(number, number * number, 1)
        assert ahead.pop() == (0, 0)
        child = os.fork()
        if not child:
            try:
                ahead.pop()
            except RuntimeError:
                ahead.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [ahead.pop() for _ in range(199)] == [(number, number) for number in range(1, 200)]
