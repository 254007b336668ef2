"""Ordered, byte-bounded execution: tasks go in, are worked on by threads or processes, and come out in the order they went in.

Each task is charged an estimate of what it will hold in memory; past the limit nothing more is admitted until the head has been
popped, but a head is always admitted, so that one task larger than the limit does not stop the stream. What comes out, and in
which order, does not depend on timing.

    submit --> [ head ] [ done ] [ running ] [ queued ] <-- charged bytes <= limit
                 |
                pop
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Final, Generic, TypeVar

Context = TypeVar("Context")
Task = TypeVar("Task")
Result = TypeVar("Result")

CHUNK_TASKS: Final = 32
CHUNK_BYTES: Final = 65_536
"""Small tasks share a future, up to so many and so many bytes of input: a future costs 6 us, a place in a chunk 0.3 us."""


def _work_chunk(work: Callable[[Task], Result], tasks: Sequence[Task]) -> tuple[list[Result], float]:
    """The results of a chunk, and the seconds that it took; runs in the worker."""
    begun = time.perf_counter()
    results = [work(task) for task in tasks]
    return results, time.perf_counter() - begun


class _Chunk(Generic[Task, Result]):
    """Tasks that share a future."""

    __slots__ = ("bytes", "charges", "future", "settled", "tasks")

    def __init__(self) -> None:
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
        limit_bytes: int = 2**28,
        measure: Callable[[Result], int] | None = None,
    ) -> None:
        """
        Args:
            work: what is done with a task; with `processes` it is a module's own function, or a partial of one, and task and
                result travel by pickle.
            threads: workers, unless there are processes.
            processes: worker processes, started by spawn; 0 works in threads.
            limit_bytes: charged bytes past which `room` is False.
            measure: bytes that a result really holds; takes the place of its charge as soon as it is there.
        """
        if threads < 1:
            raise ValueError(f"threads is {threads}: it must be at least 1")
        if processes < 0:
            raise ValueError(f"processes is {processes}: it must be 0 (work in threads) or a number of processes")
        self._work = work
        self._threads = threads
        self._processes = processes
        self._limit_bytes = limit_bytes
        self._measure = measure
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        # The number is the task's place in its chunk, or the charge of what needed no work.
        self._queue: deque[tuple[Context, _Chunk[Task, Result] | None, int, Result | None]] = deque()
        self._open: _Chunk[Task, Result] | None = None
        self._closed = False
        self.in_flight_bytes = 0
        """Bytes charged for what is queued."""
        self.peak_bytes = 0
        self.waited_s = 0.0
        """Seconds that `pop` has waited for the head."""
        self.worked_s = 0.0
        """Seconds of work, over all workers, of what is done."""

    @property
    def workers(self) -> int:
        """Tasks that run at once."""
        return self._processes or self._threads

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
                self.in_flight_bytes += sum(measured) - sum(chunk.charges)
                chunk.charges = measured

    def _done(self, chunk: _Chunk[Task, Result], future: Future[tuple[list[Result], float]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._settle(chunk, *future.result())

    def put(self, context: Context, result: Result, charge_bytes: int) -> None:
        """Queues what needs no work."""
        self._charge(charge_bytes)
        self._queue.append((context, None, charge_bytes, result))

    def submit(self, context: Context, task: Task, charge_bytes: int, input_bytes: int = CHUNK_BYTES) -> None:
        """Queues a task; `context` comes out with its result, and never leaves this process."""
        if self._closed:
            raise RuntimeError("this readahead is closed")
        self._charge(charge_bytes)
        chunk = self._open
        if chunk is None:
            chunk = self._open = _Chunk()
        chunk.tasks.append(task)
        chunk.charges.append(charge_bytes)
        chunk.bytes += input_bytes
        self._queue.append((context, chunk, len(chunk.tasks) - 1, None))
        if len(chunk.tasks) >= CHUNK_TASKS or chunk.bytes >= CHUNK_BYTES:
            self._start(chunk)

    def _start(self, chunk: _Chunk[Task, Result]) -> None:
        if self._executor is None:
            if self._processes:
                self._executor = ProcessPoolExecutor(self._processes, mp_context=get_context("spawn"))
            else:
                self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="treadle-decode")
        try:
            chunk.future = self._executor.submit(_work_chunk, self._work, chunk.tasks)
        except BrokenProcessPool as error:
            # Told when its turn comes: what was done before the processes broke is still good.
            chunk.future = Future()
            chunk.future.set_exception(error)
        chunk.future.add_done_callback(partial(self._done, chunk))
        # The executor has its own reference; what has been worked on is not held twice.
        chunk.tasks = []
        if self._open is chunk:
            self._open = None

    def pop(self) -> tuple[Context, Result]:
        """The head and its result, once it is there.

        Raises:
            IndexError: nothing is queued.
            RuntimeError: a worker process ended in the middle of its work.
            Exception: whatever `work` raised.
        """
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
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"one of {self._processes} decode processes ended in the middle of its work (killed, or out of memory): "
                "pass fewer processes, or processes=0 to decode in threads"
            ) from error
        finally:
            self.waited_s += time.perf_counter() - begun
        self._settle(chunk, results, worked_s)
        with self._lock:
            self.in_flight_bytes -= chunk.charges[place]
        result = results[place]
        results[place] = None  # type: ignore[assignment]  # handed out once, and no longer held here
        return context, result

    def close(self) -> None:
        """Drops what is queued and joins every worker; safe to call again."""
        self._closed = True
        self._queue.clear()
        self._open = None
        self.in_flight_bytes = 0
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
