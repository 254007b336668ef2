"""Worker processes by fork, from a process that has imported what they need: the start of an interpreter is paid once, not by every
worker of every stream.

    this process --socket: files, modules--> nursery --fork--> worker --> decode_process.main
                 <--- process number, status ---

The nursery is a program of its own with one thread, so that forking it is safe, as forking a process that has torch's or a driver's
threads would not be. It is started with the first worker, serves every later one, and ends with the process that started it.
"""

import atexit
import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Final, NoReturn

from treadle.decoders.channel import socket_pair
from treadle.decoders.isolate import search_path, worker_environment
from treadle.decoders.worker import stand_apart
from treadle.pipeline import decode_process

PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[2:]; "
    "from treadle.pipeline.nursery import tend; tend(int(sys.argv[1]))"
)

START_S: Final = 120.0
"""Seconds that an answer may take, a start on a busy machine included."""

POLL_S: Final = 0.002
NO_FILES: Final[Mapping[str, int]] = {}

REQUEST_BYTES: Final = 4096
"""JSON, filled up: `[ticket, pid, [], []]` asks how a process has ended, `[ticket, 0, files, modules]` for a new one, whose files come along."""
_ANSWER: Final = struct.Struct("<qqq")
"""The request's ticket; the process's number, negative an `errno`; how it ended, as `Popen.returncode` says it."""
_RUNNING: Final = 2**31
_MOST_FILES: Final = 3
_WHOLE: Final = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM
"""Messages that come whole or not at all, where there are."""


class Forked:
    """A process that a nursery has forked, as `subprocess.Popen` has its own."""

    def __init__(self, nursery: "_Nursery", ticket: int) -> None:
        self._nursery = nursery
        self._ticket = ticket
        self._pid = 0
        self._gone = False
        self._lock = threading.RLock()
        self.returncode: int | None = None
        """How it ended, once that is known."""

    @property
    def pid(self) -> int:
        """The process's number, once it has one.

        Raises:
            OSError: it could not be started.
        """
        with self._lock:
            if not self._pid:
                self._pid, _ = self._nursery.answer(self._ticket)
                # Kept until it is written down: an interrupt before that asks for it once more.
                self._nursery.drop(self._ticket)
                if self._pid < 0:
                    self._nursery.reaped()
        if self._pid < 0:
            raise OSError(-self._pid, os.strerror(-self._pid))
        return self._pid

    def poll(self) -> int | None:
        """How it ended; None while it runs, and where nobody knows any more."""
        with self._lock:
            if self.returncode is None and not self._gone:
                try:
                    ticket = self._nursery.ask(self.pid)
                    pid, status = self._nursery.answer(ticket)
                    self._nursery.drop(ticket)
                except OSError:
                    self._gone = True
                    return None
                if pid < 0:
                    # It has been told before, and an interrupt came between.
                    self._gone = True
                    self._nursery.reaped()
                elif status != _RUNNING:
                    self.returncode = status
                    self._nursery.reaped()
            return self.returncode

    def wait(self, timeout: float = START_S) -> int | None:
        """How it ended, once it has; None where nobody knows any more.

        Raises:
            subprocess.TimeoutExpired: it has not, in `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while self.poll() is None and not self._gone:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a decode process", timeout)
            time.sleep(POLL_S)
        return self.returncode

    def kill(self) -> None:
        """Ends it. The number is its own until its end has been asked for; without its nursery it ends as its socket closes."""
        with self._lock:
            if self.poll() is None and not self._gone:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, signal.SIGKILL)


class _Nursery:
    """The process that forks, and the socket to it."""

    def __init__(self, command: Sequence[str], arguments: Sequence[str]) -> None:
        ours, theirs = socket_pair(_WHOLE)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if _is_open(2) else subprocess.DEVNULL,
                    env=worker_environment(),
                )
            except OSError:
                ours.close()
                raise
        ours.settimeout(START_S)
        self._socket = ours
        self._lock = threading.Lock()
        self._tickets = count(1)
        self._answers: dict[int, tuple[int, int]] = {}
        self._come = select.poll()
        self._come.register(ours, select.POLLIN)
        self._children = 0
        self._last = False

    def fork(self, files: Mapping[str, int], modules: Sequence[str]) -> Forked:
        """A new process that has `files`: asked for, and not waited for.

        Raises:
            OSError: the nursery has ended.
        """
        return Forked(self, self.ask(0, files, modules))

    def ask(self, pid: int, files: Mapping[str, int] = NO_FILES, modules: Sequence[str] = ()) -> int:
        """The ticket that the answer is had for.

        Raises:
            OSError: the nursery has ended.
        """
        ticket = next(self._tickets)
        data = json.dumps([ticket, pid, [*files], [*modules]]).encode().ljust(REQUEST_BYTES)
        with self._lock:
            # Were they left to lie until somebody wants them, there would be no room for more, and it could not go on.
            while self._come.poll(0):
                self._receive()
            sent = socket.send_fds(self._socket, [data], [*files.values()])
            if sent < len(data):
                self._socket.sendall(data[sent:])
            self._children += not pid
        return ticket

    def answer(self, ticket: int) -> tuple[int, int]:
        """What the nursery says to what was asked: a process's number, and how it ended.

        Raises:
            OSError: the nursery has ended.
        """
        with self._lock:
            while ticket not in self._answers:
                self._receive()
            return self._answers[ticket]

    def drop(self, ticket: int) -> None:
        """The answer is not wanted any more."""
        with self._lock:
            self._answers.pop(ticket, None)

    def _receive(self) -> None:
        """The next answer, if it is there whole. It is looked at, kept, and only then taken: an interrupt in between loses nothing."""
        try:
            data = self._socket.recv(_ANSWER.size, socket.MSG_PEEK)
        except TimeoutError:
            # Whoever asks next would wait as long.
            self._process.kill()
            raise
        if not data or (len(data) < _ANSWER.size and self._process.poll() is not None):
            raise OSError(errno.ECHILD, "the process that decode processes are forked from has ended")
        if len(data) < _ANSWER.size:
            time.sleep(POLL_S)
            return
        of, pid, status = _ANSWER.unpack(data)
        self._answers[of] = pid, status
        self._socket.recv(_ANSWER.size)

    def reaped(self) -> None:
        """One of its processes has ended."""
        with self._lock:
            self._children -= 1
            done = self._last and not self._children
        if done:
            self.close()

    def retire(self) -> None:
        """No other process comes from it: it ends with the last that did."""
        with self._lock:
            self._last = True
            done = not self._children or self._process.poll() is not None
        if done:
            self.close()

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        self._socket.close()
        self._process.returncode = 0


class _Home:
    """The nursery of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nursery: _Nursery | None = None
        self._made_for: object = None
        self.closed = False
        """Whether this process is about to end."""

    def fork(self, files: Mapping[str, int], modules: Sequence[str]) -> Forked:
        if not sys.executable or self.closed:
            why = "this process is about to end" if self.closed else "sys.executable names no interpreter to start: decode in threads"
            raise OSError(errno.ENOEXEC, why)
        command = [sys.executable, "-P", "-c", PROGRAM], search_path()
        # What a program started now would be told or inherit: as it changes, another nursery takes over.
        made_for = command, dict(os.environ), _place()
        with self._lock:
            nursery = self._nursery
            if nursery is not None and self._made_for == made_for:
                try:
                    return nursery.fork(files, modules)
                except OSError as error:
                    if error.errno in _SHORT:
                        raise
                    self._nursery = None
                    nursery.close()
            elif nursery is not None:
                self._nursery = None
                nursery.retire()
            self._nursery, self._made_for = _Nursery(*command), made_for
            return self._nursery.fork(files, modules)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close()

    def forget(self) -> None:
        nursery, self._nursery, self._lock = self._nursery, None, threading.Lock()
        if nursery is not None:
            nursery.forget()


_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
"""What this process is short of, when another nursery would be no help."""
_HOME = _Home()
atexit.register(_HOME.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HOME.forget)


def fork_worker(channel: int, memory: int, modules: Sequence[str] = ()) -> Forked:
    """A process that runs `decode_process.main(channel, memory)`; its number is asked for and not waited for.

    Args:
        channel: its end of a socket.
        memory: the file of the ring, -1 for none.
        modules: what it will need, imported once for all that come after; one that is not there is passed over.

    Raises:
        OSError: there is no process to fork it from.
    """
    # What it has to say it says where this process does now.
    files = {"channel": channel, "memory": memory, "errors": 2 if sys.__stderr__ is not None and _is_open(2) else -1}
    return _HOME.fork({name: file for name, file in files.items() if file >= 0}, modules)


def closing() -> bool:
    """Whether no process comes any more, because this one is about to end."""
    return _HOME.closed


def tend(descriptor: int) -> None:
    """Forks a process for each one asked for, and says how those asked about have ended, until the other end is closed; what is left of
    them then is ended: there is nobody whom it could answer."""
    stand_apart()
    # What every worker runs.
    import_module("treadle.pipeline.prepare")
    children: set[int] = set()
    # Killed with an answer unread, the other end resets the connection in place of closing it.
    with socket.socket(fileno=descriptor) as channel, contextlib.suppress(ConnectionError):
        while True:
            data, received, _, _ = socket.recv_fds(channel, REQUEST_BYTES, _MOST_FILES)
            while 0 < len(data) < REQUEST_BYTES:
                more = channel.recv(REQUEST_BYTES - len(data))
                data = data + more if more else b""
            if not data:
                break
            ticket, pid, names, modules = json.loads(data)
            if pid:
                channel.sendall(_ANSWER.pack(ticket, *_status(pid, children)))
                continue
            for module in modules:
                # What does not load is told of by whoever needs it.
                with contextlib.suppress(Exception):
                    import_module(module)
            # Pages that no collector writes to are shared by all.
            gc.freeze()
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or errno.EAGAIN)
            if not pid:
                _work(channel, names, received)
            if pid > 0:
                children.add(pid)
            for file in received:
                os.close(file)
            channel.sendall(_ANSWER.pack(ticket, pid, _RUNNING))
    for pid in children:
        # Those that nobody asked about have kept their numbers.
        os.kill(pid, signal.SIGKILL)


def _status(pid: int, children: set[int]) -> tuple[int, int]:
    if pid not in children:
        return -errno.ECHILD, _RUNNING
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return pid, _RUNNING
    children.discard(pid)
    return pid, os.waitstatus_to_exitcode(status)


def _work(channel: socket.socket, names: Sequence[str], received: Sequence[int]) -> NoReturn:
    """All that a forked process does."""
    code = 1
    try:
        channel.close()
        files = dict(zip(names, received, strict=True))
        errors = files.pop("errors", None)
        if errors is not None:
            os.dup2(errors, 2)
            os.close(errors)
        decode_process.main(files["channel"], files.get("memory", -1))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _place() -> tuple[object, ...]:
    """The current folder, the processors and the memory that may be used, and whose process this is."""
    folder = ""
    # It may have been removed.
    with contextlib.suppress(OSError):
        folder = os.getcwd()
    affinity = getattr(os, "sched_getaffinity", None)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    return folder, None if affinity is None else affinity(0), memory, os.geteuid(), os.getegid()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
