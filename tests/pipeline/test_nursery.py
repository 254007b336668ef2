"""pipeline/nursery.py: processes forked from one that has imported everything; how they end is told, and one that has lost its nursery
is let go of.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.decoders.isolate import codec_modules
from treadle.pipeline import nursery
from treadle.pipeline.nursery import Forked, _Home, fork_worker
from treadle.pipeline.processes import Processes


def same(task: Any) -> Any:
    return task


@pytest.fixture(name="home")
def home_fixture(monkeypatch: pytest.MonkeyPatch) -> Generator[_Home]:
    """A home of the test's own."""
    home = _Home()
    monkeypatch.setattr(nursery, "_HOME", home)
    yield home
    home.close()


def parent(pid: int) -> int:
    # After the name in parentheses: state, parent.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork() -> tuple[Forked, "Connection[Any, Any]"]:
    """A process that waits for its work, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        forked = fork_worker(theirs.fileno(), -1, ["a_module_that_is_not_there"])
    return forked, Connection(ours.detach())


def test_workers_of_all_pools_come_from_one_process_with_one_thread(home: _Home) -> None:
    parents = set()
    for _ in range(2):
        pool = Processes[Any, Any](math.isqrt, 2, same)
        try:
            assert pool.submit([9]).result(timeout=60)[0] == [3]
            parents |= {parent(pid) for pid in pool.pids}
        finally:
            pool.shutdown()
    assert home._nursery is not None and parents == {home._nursery._process.pid}
    (only,) = parents
    assert len(os.listdir(f"/proc/{only}/task")) == 1
    assert parent(only) == os.getpid()


def test_what_a_stream_decodes_with_is_imported_before_its_workers_are(tars: Any) -> None:
    # None of the names is misspelt: a module that is not there would be passed over.
    code = f"import importlib; [importlib.import_module(name) for name in {codec_modules(tars.shape)!r}]"
    assert "av" in codec_modules(tars.shape) and "PIL.PngImagePlugin" in codec_modules(tars.shape)
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert codec_modules(tars.text_shape) == []


def test_how_a_process_ends_is_told(home: _Home) -> None:
    closed, channel = fork()
    assert closed.poll() is None
    channel.close()
    assert closed.wait() == 0 and closed.poll() == 0
    killed, channel = fork()
    with channel:
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        # Its number may be somebody else's by now.
        killed.kill()
    crashed, channel = fork()
    with channel:
        # No work, and no pickle either: the process ends with a traceback, as a program does.
        channel.send_bytes(b"\x80")
        assert crashed.wait() == 1


def test_a_process_that_does_not_end_in_time_is_told(home: _Home) -> None:
    forked, channel = fork()
    with channel:
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.0)
        forked.kill()
        assert forked.wait() == -signal.SIGKILL


def test_threads_that_ask_at_once_get_their_own_answers(home: _Home) -> None:
    forked = [fork() for _ in range(6)]
    found: dict[int, tuple[int, int | None]] = {}

    def end(number: int) -> None:
        process, channel = forked[number]
        pid = process.pid
        if number % 2:
            process.kill()
        else:
            channel.close()
        found[number] = pid, process.wait()

    threads = [threading.Thread(target=end, args=(number,)) for number in range(len(forked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pid for pid, _ in found.values()}) == len(forked)
    assert {number: status for number, (_, status) in found.items()} == {number: -9 if number % 2 else 0 for number in range(6)}
    for _, channel in forked:
        if not channel.closed:
            channel.close()


def test_another_environment_takes_another_nursery(home: _Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, channel = fork()
    with channel:
        old = home._nursery
        assert old is not None
        monkeypatch.setenv("TREADLE_TEST_NURSERY", "1")
        second, other = fork()
        with other:
            assert parent(second.pid) != parent(first.pid) == old._process.pid
            monkeypatch.chdir(tmp_path)
            third, last = fork()
            with last:
                assert os.readlink(f"/proc/{third.pid}/cwd") == str(tmp_path)
                # The first one lives on, and so long its nursery, which then ends.
                assert first.poll() is None and old._process.poll() is None
                for process in (first, second, third):
                    process.kill()
                    assert process.wait() == -signal.SIGKILL
    assert old._process.returncode == 0


def test_a_nursery_that_is_killed_is_replaced_and_its_workers_are_let_go_of(home: _Home) -> None:
    pool = Processes[Any, Any](np.arange, 1, same)
    try:
        assert len(pool.submit([4]).result(timeout=60)[0][0]) == 4
        (orphan,) = pool.pids
        assert home._nursery is not None
        lost = home._nursery._process
        lost.kill()
        lost.wait()
        # It works on, and once it ends another comes from elsewhere.
        assert len(pool.submit([5]).result(timeout=60)[0][0]) == 5
        os.kill(orphan, signal.SIGKILL)
        while orphan in pool.pids:
            os.sched_yield()
        assert len(pool.submit([6]).result(timeout=60)[0][0]) == 6
        (pid,) = pool.pids
        assert pid != orphan
        home._nursery._process.kill()
        home._nursery._process.wait()
    finally:
        # Nobody can say how the last one ended, and nothing waits for that.
        pool.shutdown()


def test_a_fork_of_this_process_has_a_nursery_of_its_own(home: _Home) -> None:
    forked, channel = fork()
    with channel:
        assert forked.pid and home._nursery is not None
        nursery_pid = home._nursery._process.pid
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            home.forget()
            other, _ = fork()
            os.write(writer, str(parent(other.pid)).encode())
            home.close()
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        assert int(os.read(reader, 100)) != nursery_pid
        os.close(reader)
        forked.kill()
        assert forked.wait() == -signal.SIGKILL
