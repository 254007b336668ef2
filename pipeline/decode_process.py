"""A worker process: tasks in over a socket, results out, the arrays of the results through shared memory.

Started by `processes.py` as a program of its own, so that the caller's main module is not imported again and needs no guard; it ends
when its starter does. What goes over the socket is pickled by this package on both ends and never comes from data.

    ring:  [ released | stop | begun | task | item .. | arrays of results, in order ........ ]      one writer, one reader

The header says which item is being worked on: should the process end there, crashed, killed, or by its own alarm clock, it costs
that item alone.
"""

import gc
import io
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.decoders import DecodeError
from treadle.decoders.errors import DecodeErrorKind

RING_BYTES: Final = 2**25
"""Arrays of results that wait to be fetched; a result that does not fit goes over the socket."""
HEADER_BYTES: Final = 4096
SMALL_BYTES: Final = 4096
"""Arrays below this travel with the rest of the result: a place in the ring costs more than their copy."""
LARGE_BYTES: Final = 2**20
"""Contents from here on are not pickled with the rest of a task."""
ALIGNMENT: Final = 64
POLL_S: Final = 0.001
GRACE_S: Final = 1.0
"""Seconds past an item's limit in which its decoder may still say by itself that time is up."""
RELEASED, STOP, BEGUN, TASK, ITEM = range(5)
"""Entries of the header: bytes that the reader is done with, over all time; whether to end; whether the work has arrived; the task of a
chunk and the item of a task that are being worked on, the item -1 between two."""

Span = tuple[int, int]
"""Where an array lies in the ring: offset, bytes."""
Reply = tuple[bool, bytes, list[Span], int, float]
"""Whether the work was done; the pickled results, or the error; their arrays; the ring's end after them; seconds of work."""


Lost = dict[tuple[int, int], tuple[DecodeErrorKind, str]]
"""Items that are not to be tried again, by task of the chunk and item of the task: kind and detail of the error in their place."""


class Watch:
    """Says, where the process's starter can see it, which item is being worked on, and ends the process when one takes too long."""

    def __init__(self, header: NDArray[np.int64]) -> None:
        self._header = header
        self._task = 0
        self._lost: Lost = {}
        self._limit_s = 0.0

    def limit(self, limit_s: float) -> None:
        """Items may take `limit_s`, and a moment more."""
        # The longest that timers take.
        self._limit_s = min(limit_s + GRACE_S, 1e8)

    def chunk(self, lost: Lost) -> None:
        """A chunk of tasks begins, of which some items are lost."""
        self._lost = lost

    def task(self, number: int) -> None:
        """Its next task begins."""
        self._task = number
        self._header[TASK] = number

    @contextmanager
    def item(self, number: int) -> Generator[None]:
        """While an item is worked on.

        Raises:
            DecodeError: it has cost a process before.
        """
        lost = self._lost.get((self._task, number))
        if lost is not None:
            raise DecodeError(*lost)
        self._header[ITEM] = number
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._header[ITEM] = -1


class _Pickler(pickle.Pickler):
    """Leaves large contents out, for their own way."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.large: list[bytes] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is bytes and len(obj) >= LARGE_BYTES:
            self.large.append(obj)
            return len(self.large) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, large: list[bytes]) -> None:
        super().__init__(file)
        self._large = large

    def persistent_load(self, pid: Any) -> bytes:
        data: bytes = self._large[pid]
        return data


def send_whole(connection: "Connection[Any, Any]", value: Any) -> None:
    """Sends `value`; large contents within it go as they lie in memory, not in a pickled copy beside themselves."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    connection.send_bytes(len(pickler.large).to_bytes(4, "little") + out.getbuffer())
    for data in pickler.large:
        connection.send_bytes(data)


def receive_whole(connection: "Connection[Any, Any]") -> Any:
    """What `send_whole` sent at the other end.

    Raises:
        EOFError | OSError: the other end has closed.
    """
    data = connection.recv_bytes()
    large = [connection.recv_bytes() for _ in range(int.from_bytes(data[:4], "little"))]
    return _Unpickler(io.BytesIO(data[4:]), large).load()


class Watched(Protocol):
    """Work that can say which item of a task it is at."""

    def watched(self, watch: Watch) -> Callable[[Any], Any]:
        """The same work, done under `watch.item`."""
        ...


class RingWriter:
    """The worker's end of the ring."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._header = np.frombuffer(memory, np.int64, HEADER_BYTES // 8)
        self._data = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES)
        self.end = 0
        """Bytes written over all time, gaps included."""
        self._begin = 0
        self._starter = os.getppid()

    def begin(self) -> None:
        """A new result: what was written before is waited for if need be, what comes now never is, or nobody would ever fetch it."""
        self._begin = self.end

    def put(self, data: memoryview) -> Span | None:
        """Copies `data` into the ring; None where this result fills it alone."""
        size, capacity = data.nbytes, len(self._data)
        if self.end == self._begin and self.end == self._header[RELEASED] and self.end % capacity:
            # All is fetched, and nobody else writes this entry before the next result: memory that both have just used is nearest.
            self.end += -self.end % capacity
            self._begin = self._header[RELEASED] = self.end
        place = self.end % capacity
        # An array lies in one piece: what is left before the ring's edge is passed over.
        gap = capacity - place if place + size > capacity else 0
        padded = size + -size % ALIGNMENT
        if self.end + gap + padded - self._begin > capacity:
            return None
        while self.end + gap + padded - int(self._header[RELEASED]) > capacity:
            if self._header[STOP] or os.getppid() != self._starter:
                sys.exit(0)
            time.sleep(POLL_S)
        place = 0 if gap else place
        self._data[place : place + size] = np.frombuffer(data, np.uint8)
        self.end += gap + padded
        return HEADER_BYTES + place, size


def reply_of(work: Callable[[Any], Any], tasks: list[Any], ring: RingWriter | None, watch: Watch | None = None) -> Reply:
    """Does the tasks, and makes of their results what is sent back."""
    begun = time.perf_counter()
    spans: list[Span] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays with the pickled rest."""
        if ring is None or (data := buffer.raw()).nbytes < SMALL_BYTES:
            return True
        span = ring.put(data)
        if span is not None:
            spans.append(span)
        return span is None

    if ring is not None:
        ring.begin()
    try:
        results: list[Any] = []
        for number, task in enumerate(tasks):
            if watch is not None:
                watch.task(number)
            results.append(work(task))
        worked_s = time.perf_counter() - begun
        data = pickle.dumps(results, protocol=5, buffer_callback=out_of_band)
        return True, data, spans, ring.end if ring is not None else 0, worked_s
    except Exception as error:
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
        except Exception:
            data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return False, data, [], ring.end if ring is not None else 0, 0.0


def main(socket: int, memory: int) -> None:
    """Works until the other end of `socket` is closed; `memory` is the ring's file, -1 for none."""
    # An interrupt from the keyboard is for whoever started this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(socket)
    # Left to itself, the alarm ends the process wherever it is, a codec that never returns included.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    shared = mmap.mmap(memory, HEADER_BYTES + RING_BYTES) if memory >= 0 else None
    ring = watch = None
    try:
        work: Any = pickle.loads(connection.recv_bytes())
        if shared is not None:
            ring, header = RingWriter(shared), np.frombuffer(shared, np.int64, HEADER_BYTES // 8)
            header[BEGUN] = 1
            if hasattr(work, "watched"):
                watch = Watch(header)
                work = work.watched(watch)
        # What is imported stays, and the collector need not look at it again.
        gc.freeze()
        while True:
            tasks, lost = receive_whole(connection)
            if watch is not None:
                watch.chunk(lost)
            connection.send_bytes(pickle.dumps(reply_of(work, tasks, ring, watch)))
            del tasks
    except (EOFError, OSError):
        return
