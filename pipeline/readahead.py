"""Ordered, byte-bounded execution: tasks go in, are worked on by threads or processes, and come out in the order they went in.

Each task is charged an estimate of what it will hold in memory; past the limit nothing more is admitted until the head has been
popped, but a head is always admitted, so that one task larger than the limit does not stop the stream. What comes out, and in
which order, does not depend on timing.

    submit --> [ head ] [ done ] [ running ] [ queued ] <-- charged bytes <= limit
                 |
                pop
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, Generic, TypeVar

from treadle.pipeline.processes import Processes, WorkerDiedError

Context = TypeVar("Context")
Task = TypeVar("Task")
Result = TypeVar("Result")

CHUNK_TASKS: Final = 32
CHUNK_BYTES: Final = 65_536
"""Small tasks share a future, up to so many and so many bytes of input: a future costs 6 us, a place in a chunk 0.3 us."""
AWAY_CHUNK_BYTES: Final = 2**18
"""The same of tasks for a process, where a message takes 0.2 ms on both sides together."""


def _work_chunk(work: Callable[[Task], Result], tasks: Sequence[Task]) -> tuple[list[Result], float]:
    """The results of a chunk, and the seconds that it took; runs in the worker."""
    begun = time.perf_counter()
    results = [work(task) for task in tasks]
    return results, time.perf_counter() - begun


class _Chunk(Generic[Task, Result]):
    """Tasks that share a future."""

    __slots__ = ("away", "bytes", "charges", "future", "settled", "tasks")

    def __init__(self, away: bool) -> None:
        self.away = away
        """Whether a process works on it."""
        self.tasks: list[Task] = []
        self.charges: list[int] = []
        self.bytes = 0
        self.future: Future[tuple[list[Result], float]] | None = None
        self.settled = False


class Readahead(Generic[Context, Task, Result]):
    """Runs `work(task)` ahead of whoever pops the results.

    Close it when done, or use it as a context manager: closing drops what has not begun and joins every worker.
    """

    def __init__(
        self,
        work: Callable[[Task], Result],
        *,
        threads: int = 1,
        processes: int = 0,
        processes_after_s: float = 0.0,
        limit_bytes: int = 2**28,
        measure: Callable[[Result], int] | None = None,
        prepared: Callable[[Task], Task] | None = None,
    ) -> None:
        """
        Args:
            work: what is done with a task; with `processes` it is a module's own function, or a callable object, and task and
                result travel by pickle, arrays through shared memory.
            threads: workers, unless there are processes.
            processes: worker processes; 0 works in threads.
            processes_after_s: seconds of work that threads do before processes are started, so that little work never pays for them.
            limit_bytes: charged bytes past which `room` is False.
            measure: bytes that a result really holds; takes the place of its charge as soon as it is there.
            prepared: what is done with a task before it is sent to a process, in a thread that may wait.
        """
        if threads < 1:
            raise ValueError(f"threads is {threads}: it must be at least 1")
        if processes < 0:
            raise ValueError(f"processes is {processes}: it must be 0 (work in threads) or a number of processes")
        self._work = work
        self._threads = threads
        self._processes = processes
        self._processes_after_s = processes_after_s
        self._prepared = prepared or _as_it_is
        self._limit_bytes = limit_bytes
        self._measure = measure
        self._lock = threading.Lock()
        self._threaded: ThreadPoolExecutor | None = None
        self._away: Processes[Task, Result] | None = None
        # The number is the task's place in its chunk, or the charge of what needed no work.
        self._queue: deque[tuple[Context, _Chunk[Task, Result] | None, int, Result | None]] = deque()
        self._open: _Chunk[Task, Result] | None = None
        self._closed = False
        self._process = os.getpid()
        self.in_flight_bytes = 0
        """Bytes charged for what is queued."""
        self.peak_bytes = 0
        self.waited_s = 0.0
        """Seconds that `pop` has waited for the head."""
        self.measured_bytes = 0
        """Bytes that results held."""
        self._there_from = 0.0
        self.worked_s = 0.0
        """Seconds of work, over all workers, of what is done."""

    @property
    def workers(self) -> int:
        """Tasks that run at once."""
        return self._processes if self._away is not None or not self._threads_first else self._threads

    @property
    def _threads_first(self) -> bool:
        return not self._processes or self.worked_s < self._processes_after_s

    def __len__(self) -> int:
        return len(self._queue)

    def __enter__(self) -> "Readahead[Context, Task, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def room(self) -> bool:
        """Whether one more may be submitted."""
        return not self._queue or self.in_flight_bytes < self._limit_bytes

    def _charge(self, charge_bytes: int) -> None:
        with self._lock:
            self.in_flight_bytes += charge_bytes
            self.peak_bytes = max(self.peak_bytes, self.in_flight_bytes)

    def _settle(self, chunk: _Chunk[Task, Result], results: Sequence[Result], worked_s: float) -> None:
        """Charges a chunk what it really holds; done once, by the worker's callback or by whoever pops first."""
        with self._lock:
            if chunk.settled:
                return
            chunk.settled = True
            self.worked_s += worked_s
            if self._measure is not None:
                measured = [self._measure(result) for result in results]
                self.measured_bytes += sum(measured)
                self.in_flight_bytes += sum(measured) - sum(chunk.charges)
                chunk.charges = measured

    def _done(self, chunk: _Chunk[Task, Result], future: Future[tuple[list[Result], float]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._settle(chunk, *future.result())

    def put(self, context: Context, result: Result, charge_bytes: int) -> None:
        """Queues what needs no work."""
        self._charge(charge_bytes)
        self._queue.append((context, None, charge_bytes, result))

    def submit(self, context: Context, task: Task, charge_bytes: int, input_bytes: int = AWAY_CHUNK_BYTES) -> None:
        """Queues a task; `context` comes out with its result, and never leaves this process."""
        self._open_here()
        self._charge(charge_bytes)
        chunk = self._open
        if chunk is None:
            chunk = self._open = _Chunk(self._away is not None or not self._threads_first)
        chunk.tasks.append(task)
        chunk.charges.append(charge_bytes)
        chunk.bytes += input_bytes
        self._queue.append((context, chunk, len(chunk.tasks) - 1, None))
        if len(chunk.tasks) >= CHUNK_TASKS or chunk.bytes >= (AWAY_CHUNK_BYTES if chunk.away else CHUNK_BYTES):
            self._start(chunk)

    def _open_here(self) -> None:
        if self._closed:
            raise RuntimeError("this readahead is closed")
        self._stay()

    def _stay(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("a stream that had begun does not go on in a forked process: make one there, or iterate it there first")

    def _start(self, chunk: _Chunk[Task, Result]) -> None:
        chunk.future = self._submitted(chunk.away, chunk.tasks)
        chunk.future.add_done_callback(partial(self._done, chunk))
        # The executor has its own reference; what has been worked on is not held twice.
        chunk.tasks = []
        if self._open is chunk:
            self._open = None

    def there_s(self) -> float:
        """Seconds that the workers were there for, all together, since the first task or the last call."""
        now = time.perf_counter()
        began_s, self._there_from = self._there_from, now if self._there_from else 0.0
        return (now - began_s) * self.workers if began_s else 0.0

    def _submitted(self, away: bool, tasks: Sequence[Task]) -> Future[tuple[list[Result], float]]:
        self._there_from = self._there_from or time.perf_counter()
        if away:
            if self._away is None:
                self._away = Processes(self._work, self._processes, self._prepared)
            return self._away.submit(tasks)
        if self._threaded is None:
            self._threaded = ThreadPoolExecutor(self._threads, thread_name_prefix="treadle-decode")
        return self._threaded.submit(_work_chunk, self._work, tasks)

    def apart(self, task: Task) -> Future[tuple[list[Result], float]]:
        """Begins a task that stands in no queue, and is charged nothing; `waited` has its result."""
        self._open_here()
        return self._submitted(self._away is not None or not self._threads_first, [task])

    def waited(self, future: Future[tuple[list[Result], float]]) -> Result:
        """The result of a task apart, once it is there.

        Raises:
            RuntimeError: worker processes ended again and again, and not for an item.
            Exception: whatever `work` raised.
        """
        try:
            results, worked_s = future.result()
        except WorkerDiedError as error:
            raise self._died() from error
        with self._lock:
            self.worked_s += worked_s
        return results[0]

    def pop(self) -> tuple[Context, Result]:
        """The head and its result, once it is there.

        Raises:
            IndexError: nothing is queued.
            RuntimeError: worker processes ended again and again, and not for an item.
            Exception: whatever `work` raised.
        """
        self._stay()
        context, chunk, place, result = self._queue.popleft()
        if chunk is None:
            with self._lock:
                self.in_flight_bytes -= place
            return context, result  # type: ignore[return-value]  # queued by put, whose result is a Result
        if chunk.future is None:
            self._start(chunk)
        assert chunk.future is not None
        begun = time.perf_counter()
        try:
            results, worked_s = chunk.future.result()
        except WorkerDiedError as error:
            raise self._died() from error
        finally:
            self.waited_s += time.perf_counter() - begun
        self._settle(chunk, results, worked_s)
        with self._lock:
            self.in_flight_bytes -= chunk.charges[place]
        result = results[place]
        results[place] = None  # type: ignore[assignment]  # handed out once, and no longer held here
        return context, result

    def _died(self) -> RuntimeError:
        return RuntimeError(
            f"one of {self._processes} decode processes after the other ended, and not for an item that could be left out (killed, out of "
            "memory, or unable to start): pass fewer processes, or processes=0 to decode in threads"
        )

    def close(self) -> None:
        """Drops what is queued and joins every worker; safe to call again."""
        self._closed = True
        self._queue.clear()
        self._open = None
        self.in_flight_bytes = 0
        if os.getpid() != self._process:
            # The workers are the parent's, which still talks to them.
            self._away = self._threaded = None
        # Let go of once they have ended: an interrupt before that leaves them to whoever closes next.
        if self._away is not None:
            self._away.shutdown()
            self._away = None
        if self._threaded is not None:
            self._threaded.shutdown(wait=True, cancel_futures=True)
            self._threaded = None


def _as_it_is(task: Task) -> Task:
    return task
