"""pipeline/nursery.py: processes forked from one that has imported everything; how they end is told, and one that has lost its nursery
is let go of.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

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


def test_a_nursery_whose_user_is_killed_with_an_answer_unread_ends_silently() -> None:
    ours, theirs = socket.socketpair(type=nursery._WHOLE)
    with ours, theirs:
        command = [sys.executable, "-c", nursery.PROGRAM, str(theirs.fileno()), *sys.path]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        worker, far = socket.socketpair()
        with worker, far:
            socket.send_fds(ours, [json.dumps([1, 0, ["channel"], []]).encode().ljust(nursery.REQUEST_BYTES)], [far.fileno()])
        ours.settimeout(60.0)
        # The answer is there, and stays unread.
        assert ours.recv(1, socket.MSG_PEEK)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")


@pytest.fixture(name="inherited")
def inherited_fixture() -> Generator[None]:
    """What this process hands down: ends of children ignored, alarms blocked."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGCHLD])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("inherited")
def test_signals_that_this_process_ignores_or_blocks_are_not_so_in_workers(home: _Home) -> None:
    forked, channel = fork()
    with channel:
        status = Path(f"/proc/{forked.pid}/status").read_text()
        assert "SigBlk:\t0000000000000000" in status
        forked.kill()
        assert forked.wait() == -signal.SIGKILL
    again, channel = fork()
    with channel:
        assert parent(again.pid) == parent(again.pid) and again.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_what_a_scheduler_tells_the_whole_group_is_for_whoever_started_it(home: _Home, number: signal.Signals) -> None:
    pool = Processes[Any, Any](math.isqrt, 1, same)
    try:
        assert pool.submit([4]).result(timeout=60)[0] == [2]
        (pid,) = pool.pids
        for told in (pid, parent(pid)):
            os.kill(told, number)
        assert pool.submit([9]).result(timeout=60)[0] == [3]
        assert pool.pids == [pid] and home._nursery is not None and home._nursery._process.poll() is None
    finally:
        pool.shutdown()


def test_a_nursery_killed_as_all_its_workers_start_costs_none_of_their_tries(home: _Home) -> None:
    pool = Processes[Any, Any](math.isqrt, 4, same)
    try:
        assert home._nursery is not None
        home._nursery._process.kill()
        assert [pool.submit([number]).result(timeout=60)[0] for number in (1, 4, 9)] == [[1], [2], [3]]
    finally:
        pool.shutdown()


def test_more_workers_start_than_their_socket_holds_answers(home: _Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "START_S", 20.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forked = [fork_worker(theirs.fileno(), -1) for _ in range(400)]
        assert len({process.pid for process in forked}) == 400
        assert {parent(process.pid) for process in forked} == {parent(forked[0].pid)}


def test_workers_end_with_their_starter_wherever_they_are(home: _Home) -> None:
    forked, channel = fork()
    with channel:
        # It would wait for its work as long as this end is open.
        assert Path(f"/proc/{forked.pid}").exists()
        home.close()
        deadline = time.monotonic() + 20.0
        while Path(f"/proc/{forked.pid}").exists() and ") Z " not in Path(f"/proc/{forked.pid}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_end_that_was_told_and_got_lost_is_no_end_of_the_nursery(home: _Home) -> None:
    lost, channel = fork()
    other, second = fork()
    with channel, second:
        lost.kill()
        assert home._nursery is not None
        while home._nursery.answer(home._nursery.ask(lost.pid))[1] == nursery._RUNNING:
            time.sleep(0.01)
        assert lost.wait() is None
        other.kill()
        assert other.wait() == -signal.SIGKILL


class Interrupting:
    """An object, one method of which is interrupted as it has returned for the first time."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method, self._done = inner, method, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._method or self._done:
            return found

        def interrupted(*args: Any) -> Any:
            found(*args)
            self._done = True
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("method", ["recv", "answer", "drop"])
def test_an_interrupt_loses_no_answer(home: _Home, method: str) -> None:
    forked, channel = fork()
    with channel:
        assert home._nursery is not None
        if method == "recv":
            home._nursery._socket = cast(socket.socket, Interrupting(home._nursery._socket, method))
        else:
            forked._nursery = cast(Any, Interrupting(forked._nursery, method))
        with pytest.raises(KeyboardInterrupt):
            _ = forked.pid
        # An answer that was lost would be waited for, two minutes long.
        home._nursery._socket.settimeout(20.0)
        assert parent(forked.pid) == home._nursery._process.pid
        forked.kill()
        assert forked.wait() == -signal.SIGKILL


def test_a_module_that_fails_in_its_own_way_is_passed_over(home: _Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a_failing_module.py").write_text("raise ZeroDivisionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forked = fork_worker(theirs.fileno(), -1, ["a_failing_module"])
        assert forked.poll() is None and forked.pid > 0


def test_a_search_path_longer_than_one_argument_may_be(home: _Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/nowhere/{'x' * 100}/{number}" for number in range(2000))])
    forked, channel = fork()
    with channel:
        assert forked.poll() is None


def test_without_an_interpreter_to_start_it_is_said(home: _Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(OSError, match=r"sys\.executable"):
        fork_worker(0, -1)


def test_messages_that_come_in_parts_are_put_together(home: _Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "_WHOLE", socket.SOCK_STREAM)
    first, channel = fork()
    with channel:
        assert first.pid > 0 and home._nursery is not None
        ticket, data = 999, json.dumps([999, first.pid, [], []]).encode().ljust(nursery.REQUEST_BYTES)
        for part in (data[:7], data[7:]):
            home._nursery._socket.sendall(part)
            time.sleep(0.05)
        assert home._nursery.answer(ticket) == (first.pid, nursery._RUNNING)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_it_runs_without_standard_streams(tmp_path: Path, closed: str) -> None:
    code = (
        "import math, pathlib, sys; from treadle.decoders.isolate import POOL; from treadle.pipeline.processes import Processes; "
        "pool = Processes(math.isqrt, 2, int); found = [pool.submit([n]).result(timeout=60)[0] for n in (4, 9)]; pool.shutdown(); "
        "POOL.give(POOL.take()); pathlib.Path(sys.argv[1]).write_text(repr(found))"
    )
    out = tmp_path / "out"
    subprocess.run(["/bin/sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(out)], timeout=100, check=True)
    assert out.read_text() == "[[2], [3]]"
