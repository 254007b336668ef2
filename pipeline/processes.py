"""Worker processes that decode: an executor whose results come back through shared memory.

Two chunks are under way per worker, so that none waits for this process, which may be busy. Arrays are copied out of the ring once;
the rest of a result is pickled, by this package on both ends.

    submit --> queue --> sender thread --socket--> worker --socket, ring--> receiver thread --> future
"""

import json
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

import numpy as np

from treadle.pipeline.decode_process import HEADER_BYTES, RELEASED, RING_BYTES, STOP, Reply

Task = TypeVar("Task")
Result = TypeVar("Result")

UNDER_WAY: Final = 2
"""Chunks sent to a worker whose results have not come yet."""

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from treadle.pipeline.decode_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class WorkerDiedError(RuntimeError):
    """A worker process ended in the middle of its work."""


class _Worker(Generic[Task, Result]):
    """One process, and the two threads that talk with it."""

    def __init__(
        self,
        number: int,
        work: bytes,
        queue: "SimpleQueue[tuple[Future[tuple[list[Result], float]], Sequence[Task]] | None]",
        prepared: Callable[[Task], Task],
        broke: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._prepared = prepared
        self._broke = broke
        self._room = threading.Semaphore(UNDER_WAY)
        self._under_way: deque[Future[tuple[list[Result], float]]] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self.died = False
        ours, theirs = socket.socketpair()
        memory = _memory()
        try:
            self._ring = mmap.mmap(memory, HEADER_BYTES + RING_BYTES) if memory >= 0 else None
            fds = [theirs.fileno(), *([memory] if memory >= 0 else [])]
            arguments = [json.dumps([path for path in sys.path if isinstance(path, str)]), str(theirs.fileno()), str(memory)]
            # -P: the current folder shadows nothing; what this process finds, the worker finds in the same places.
            command = [sys.executable, "-P", "-c", _PROGRAM, *arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds)
        finally:
            theirs.close()
            if memory >= 0:
                os.close(memory)
        self._header = None if self._ring is None else np.frombuffer(self._ring, np.int64, HEADER_BYTES // 8)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._threads = [
            threading.Thread(target=target, name=f"treadle-decode-{name}-{number}", daemon=True)
            for name, target in (("send", self._send), ("receive", self._receive))
        ]
        self._connection.send_bytes(work)
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while True:
            self._room.acquire()
            entry = None if self.died else self._queue.get()
            if entry is None:
                return
            future, tasks = entry
            if not future.set_running_or_notify_cancel():
                self._room.release()
                continue
            with self._lock:
                self._under_way.append(future)
            try:
                self._connection.send_bytes(pickle.dumps([self._prepared(task) for task in tasks], protocol=5))
            except OSError:
                self._fail()
                return
            except Exception as error:
                with self._lock:
                    self._under_way.pop()
                future.set_exception(error)
                self._room.release()

    def _receive(self) -> None:
        while True:
            try:
                reply: Reply = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._fail()
                return
            done, data, spans, end, worked_s = reply
            arrays = [np.frombuffer(self._ring, np.uint8, size, offset).copy() for offset, size in spans] if self._ring is not None else []
            if self._header is not None:
                self._header[RELEASED] = end
            with self._lock:
                future = self._under_way.popleft()
            if done:
                future.set_result((pickle.loads(data, buffers=arrays), worked_s))
            else:
                future.set_exception(pickle.loads(data))
            self._room.release()

    def _fail(self) -> None:
        with self._lock:
            self.died = True
            failed = list(self._under_way)
            self._under_way.clear()
        for future in failed:
            future.set_exception(WorkerDiedError())
        self._room.release()
        if not self._closing:
            self._broke()

    def stop(self) -> None:
        """Ends the process: there is nothing in it that anyone still wants."""
        self._closing = True
        if self._header is not None:
            self._header[STOP] = 1
        self._process.kill()
        self._process.wait()

    def join(self) -> None:
        """Waits for the threads, which end with the process."""
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._header = None
        if self._ring is not None:
            self._ring.close()


class Processes(Generic[Task, Result]):
    """Runs `work` on chunks of tasks in worker processes.

    Args:
        work: a module's own function or a callable object, importable by name in another process.
        count: how many processes.
        prepared: what is done with a task here, in a thread that may wait, before it is sent.
    """

    def __init__(self, work: Callable[[Task], Result], count: int, prepared: Callable[[Task], Task]) -> None:
        self._queue: SimpleQueue[tuple[Future[tuple[list[Result], float]], Sequence[Task]] | None] = SimpleQueue()
        self._broken = False
        data = pickle.dumps(work)
        self._workers = [_Worker[Task, Result](number, data, self._queue, prepared, self._break) for number in range(count)]

    def _break(self) -> None:
        """A worker died: what waits is told, too."""
        self._broken = True
        while not self._queue.empty():
            entry = self._queue.get()
            if entry is not None and entry[0].set_running_or_notify_cancel():
                entry[0].set_exception(WorkerDiedError())

    def submit(self, tasks: Sequence[Task]) -> "Future[tuple[list[Result], float]]":
        """The results of `tasks`, and the seconds that they took, once they are there.

        The future's exception is whatever `work` raised, or a `WorkerDiedError`.
        """
        future: Future[tuple[list[Result], float]] = Future()
        self._queue.put((future, tasks))
        if self._broken:
            self._break()
        return future

    def shutdown(self) -> None:
        """Ends every process and joins every thread; futures that are not done get a `WorkerDiedError`."""
        for worker in self._workers:
            worker.stop()
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()
        self._break()


def _memory() -> int:
    """A file in memory that both processes map; -1 where the system has none, and results then go over the socket."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        return -1
    memory: int = create("treadle-decode")
    os.ftruncate(memory, HEADER_BYTES + RING_BYTES)
    return memory
