"""Worker processes that decode: an executor whose results come back through shared memory, and which outlives its workers.

Two chunks are under way per worker, so that none waits for this process, which may be busy. Arrays are copied out of the ring once;
the rest of a result is pickled, by this package on both ends.

    submit --> queue --> sender thread --socket--> worker --socket, ring--> receiver thread --> future
                 ^                                    | ends in the middle of an item
                 \\-- its chunks again, without that item --/      another worker takes its place
"""

import contextlib
import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Final, Generic, TypeVar

import numpy as np

from treadle.decoders import DecodeError
from treadle.decoders.channel import socket_pair
from treadle.decoders.isolate import crash_error
from treadle.pipeline.decode_process import BEGUN, HEADER_BYTES, ITEM, RELEASED, RING_BYTES, STOP, TASK, Lost, Reply, send_whole
from treadle.pipeline.nursery import closing, fork_worker
from treadle.pipeline.storage import raise_shortage

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")

UNDER_WAY: Final = 2
"""Chunks sent to a worker whose results have not come yet."""

MAX_DEATHS: Final = 3
"""Workers that a chunk may cost outside its items, and workers in a row that may end as they start, before that is told."""

PATIENCE_S: Final = 5.0
"""Seconds that a process whose socket is closed may take to end."""

_TOO_LONG: Final = DecodeError("timeout", "decoding took longer than DecodeOptions.max_wall_s, and its process was ended")


class WorkerDiedError(RuntimeError):
    """A worker process ended in the middle of its work, and not for an item that could be left out."""


class _Chunk(Generic[Task, Result]):
    """Tasks that travel together."""

    __slots__ = ("deaths", "future", "lost", "prepared", "tasks")

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.future: Future[tuple[list[Result], float]] = Future()
        self.tasks = tasks
        self.prepared = False
        self.lost: Lost = {}
        """Items that ended a worker, by task and item: kind and detail of the error that takes their place."""
        self.deaths = 0
        """Workers that ended with this chunk, outside its items."""


class _Queue(Generic[Task, Result]):
    """Chunks that wait for a worker."""

    def __init__(self) -> None:
        self._waiting: deque[_Chunk[Task, Result]] = deque()
        self._changed = threading.Condition()

    def put(self, chunk: _Chunk[Task, Result], *, first: bool = False) -> None:
        with self._changed:
            if first:
                self._waiting.appendleft(chunk)
            else:
                self._waiting.append(chunk)
            self._changed.notify()

    def get(self, ended: Callable[[], bool]) -> _Chunk[Task, Result] | None:
        """The next one, once there is one; None once `ended`, which `wake` makes it look at."""
        with self._changed:
            while not ended():
                if self._waiting:
                    return self._waiting.popleft()
                self._changed.wait()
            # Whoever was to be woken for a chunk may be this one.
            self._changed.notify()
            return None

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def drain(self) -> list[_Chunk[Task, Result]]:
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            return left


class _Worker(Generic[Task, Result]):
    """One process, and the two threads that talk with it."""

    def __init__(
        self,
        number: int,
        starts: int,
        work: bytes,
        modules: Sequence[str],
        queue: _Queue[Task, Result],
        prepared: Callable[[Task], Task],
        died: Callable[["_Worker[Task, Result]", Sequence[_Chunk[Task, Result]]], None],
    ) -> None:
        self.number = number
        self.starts = starts
        """Starts before this one, one after the other, that came to nothing."""
        self._queue = queue
        self._prepared = prepared
        self._died = died
        self._room = threading.Semaphore(UNDER_WAY)
        self._under_way: deque[_Chunk[Task, Result]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        self._failure: Exception | None = None
        """Why what goes over the socket can no longer be told apart."""
        ours, theirs = socket_pair()
        memory = _memory()
        try:
            self._ring = mmap.mmap(memory, HEADER_BYTES + RING_BYTES) if memory >= 0 else None
            self._process = fork_worker(theirs.fileno(), memory, modules)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            if memory >= 0:
                os.close(memory)
        self._header = None if self._ring is None else np.frombuffer(self._ring, np.int64, HEADER_BYTES // 8)
        if self._header is not None:
            self._header[ITEM] = -1
        self._socket = ours
        self._connection: Connection[Any, Any] = Connection(os.dup(ours.fileno()))
        self._sender = threading.Thread(target=self._send, args=(work,), name=f"treadle-decode-send-{number}", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name=f"treadle-decode-receive-{number}", daemon=True)
        try:
            self._sender.start()
            self._receiver.start()
        except BaseException:
            self.stop()
            queue.wake()
            # One that runs may want what is locked around this.
            if self._receiver.ident is None:
                self.let_go()
            raise

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def begun(self) -> bool:
        """Whether it came as far as its first task; where that cannot be told, yes."""
        return self._header is None or bool(self._header[BEGUN])

    def _send(self, work: bytes) -> None:
        try:
            self._connection.send_bytes(work)
            while True:
                self._room.acquire()
                chunk = self._queue.get(lambda: self._ended)
                if chunk is None:
                    return
                if not chunk.future.running() and not chunk.future.set_running_or_notify_cancel():
                    self._room.release()
                    continue
                if not chunk.prepared:
                    try:
                        chunk.tasks = [self._prepared(task) for task in chunk.tasks]
                    except Exception as error:
                        chunk.future.set_exception(error)
                        self._room.release()
                        continue
                    chunk.prepared = True
                with self._lock:
                    gone = self._ended
                    if not gone:
                        self._under_way.append(chunk)
                if gone:
                    self._queue.put(chunk, first=True)
                    return
                send_whole(self._connection, (chunk.tasks, chunk.lost))
        except OSError:
            # The receiver meets the end of the process too, and sees to what was under way.
            return
        except Exception as error:  # memory, most likely
            self._fail(error)

    def _receive(self) -> None:
        while True:
            try:
                reply: Reply = pickle.loads(self._connection.recv_bytes())
                done, data, spans, end, worked_s = reply
                arrays = (
                    [np.frombuffer(self._ring, np.uint8, size, offset).copy() for offset, size in spans] if self._ring is not None else []
                )
                result = pickle.loads(data, buffers=arrays)
            except (EOFError, OSError):
                break
            except Exception as error:  # memory, most likely
                self._fail(error)
                break
            if self._header is not None:
                self._header[RELEASED] = end
            with self._lock:
                chunk = self._under_way.popleft()
            if done:
                chunk.future.set_result((result, worked_s))
            else:
                chunk.future.set_exception(result)
            self._room.release()
        with self._lock:
            self._ended = True
            left = list(self._under_way)
            self._under_way.clear()
        if self._failure is not None:
            for chunk in left:
                chunk.future.set_exception(self._failure)
            left = []
        self._died(self, left)

    def _fail(self, error: Exception) -> None:
        """Ends a process with which something went wrong here."""
        self._failure = error
        self.tell()

    def at(self) -> tuple[int, int] | None:
        """Task and item, within the first chunk under way, that the process ended in; None outside of any."""
        if self._header is None or self._header[ITEM] < 0:
            return None
        return int(self._header[TASK]), int(self._header[ITEM])

    def status(self) -> int | None:
        """How the process ended, as `Popen.returncode` says it; None where it had to be ended."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def tell(self) -> None:
        """Tells the process to end, and waits for nothing: without the nursery it cannot be killed."""
        with self._lock:
            self._ended = True
            if self._header is not None:
                self._header[STOP] = 1
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._room.release()

    def stop(self) -> None:
        """Ends the process: there is nothing in it that anyone still wants."""
        self.tell()
        self._process.kill()
        self._process.wait()

    def let_go(self) -> None:
        """Waits for the threads, which end with the process, and lets go of the memory."""
        self._room.release()
        self._queue.wake()
        for thread in (self._sender, self._receiver):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        with self._lock:
            self._connection.close()
            self._socket.close()
            self._header = None
            ring, self._ring = self._ring, None
            if ring is not None:
                ring.close()


class Processes(Generic[Task, Result]):
    """Runs `work` on chunks of tasks in worker processes.

    A worker that ends in the middle of an item, killed, crashed or past the clock, costs that item: `work` is called again with the
    error that stands for it, in another process. That takes work that says where it is (`decode_process.Watched`) and shared memory;
    a worker of other work costs the chunk that it had.

    Args:
        work: a module's own function or a callable object, importable by name in another process.
        count: how many processes.
        prepared: what is done with a task here, in a thread that may wait, before it is sent.
    """

    def __init__(self, work: Callable[[Task], Result], count: int, prepared: Callable[[Task], Task]) -> None:
        self._queue = _Queue[Task, Result]()
        self._prepared = prepared
        self._watched = hasattr(work, "watched")
        self._data = pickle.dumps(work)
        self._modules: Sequence[str] = getattr(work, "modules", ())
        self._lock = threading.Lock()
        self._closing = self._broken = False
        self._workers: set[_Worker[Task, Result]] = set()
        try:
            for number in range(count):
                self._start(number)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, number: int, starts: int = 0) -> None:
        with self._lock:
            if not self._closing:
                self._workers.add(_Worker[Task, Result](number, starts, self._data, self._modules, self._queue, self._prepared, self._died))

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        with self._lock:
            return [worker.pid for worker in self._workers]

    def _died(self, worker: _Worker[Task, Result], left: Sequence[_Chunk[Task, Result]]) -> None:
        """A worker ended: another takes its place, and what it had begins again. Runs in the worker's receiver thread."""
        if self._closing or closing():
            self._fail(left)
            return
        status, at = worker.status(), worker.at()
        # One after the other: whatever ends all at once, a nursery that is killed, counts once.
        starts = 0 if worker.begun else worker.starts + 1
        self._broken = self._broken or starts >= MAX_DEATHS
        again = list(left)
        if left and worker.begun:
            first = left[0]
            if at is not None:
                error = _TOO_LONG if status == -signal.SIGALRM else crash_error(status)
                first.lost[at] = error.kind, error.detail
            else:
                first.deaths += 1
                if first.deaths >= MAX_DEATHS or not self._watched:
                    again.remove(first)
                    self._fail([first])
        for chunk in reversed(again):
            self._queue.put(chunk, first=True)
        if not self._broken:
            try:
                self._start(worker.number, starts)
            except (OSError, RuntimeError) as error:  # no process, or no thread
                logger.warning("no process to decode in takes the place of one that ended: %s", error)
                self._broken = True
        if self._broken:
            self._fail(self._queue.drain())
        worker.let_go()
        with self._lock:
            self._workers.discard(worker)

    @staticmethod
    def _fail(chunks: Sequence[_Chunk[Task, Result]]) -> None:
        for chunk in chunks:
            if chunk.future.running() or chunk.future.set_running_or_notify_cancel():
                chunk.future.set_exception(WorkerDiedError())

    def submit(self, tasks: Sequence[Task]) -> "Future[tuple[list[Result], float]]":
        """The results of `tasks`, and the seconds that they took, once they are there.

        The future's exception is whatever `work` raised, or a `WorkerDiedError`.
        """
        chunk = _Chunk[Task, Result](tasks)
        self._queue.put(chunk)
        if self._broken:
            self._fail(self._queue.drain())
        return chunk.future

    def shutdown(self) -> None:
        """Ends every process and joins every thread; futures that are not done get a `WorkerDiedError`."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        for worker in workers:
            worker.tell()
        self._queue.wake()
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.let_go()
        self._fail(self._queue.drain())


def _memory() -> int:
    """A file in memory that both processes map; -1 where there can be none, and results then go over the socket."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        return -1
    memory = -1
    try:
        memory = int(create("treadle-decode"))
        os.ftruncate(memory, HEADER_BYTES + RING_BYTES)
    except OSError as error:
        if memory >= 0:
            os.close(memory)
        raise_shortage(error)
        # Files may be limited in size, or a sandbox may lack the call.
        return -1
    return memory
