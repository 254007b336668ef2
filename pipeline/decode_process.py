"""A worker process: tasks in over a socket, results out, the arrays of the results through shared memory.

Started by `processes.py` as a program of its own, so that the caller's main module is not imported again and needs no guard; it ends
when its starter does. What goes over the socket is pickled by this package on both ends and never comes from data.

    ring:  [ released | stop | ................ | arrays of results, in order ........ ]      one writer, one reader
"""

import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

RING_BYTES: Final = 2**25
"""Arrays of results that wait to be fetched; a result that does not fit goes over the socket."""
HEADER_BYTES: Final = 4096
SMALL_BYTES: Final = 4096
"""Arrays below this travel with the rest of the result: a place in the ring costs more than their copy."""
ALIGNMENT: Final = 64
POLL_S: Final = 0.001
RELEASED, STOP = 0, 1
"""Entries of the header: bytes that the reader is done with, over all time; whether to end."""

Span = tuple[int, int]
"""Where an array lies in the ring: offset, bytes."""
Reply = tuple[bool, bytes, list[Span], int, float]
"""Whether the work was done; the pickled results, or the error; their arrays; the ring's end after them; seconds of work."""


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


def reply_of(work: Callable[[Any], Any], tasks: list[Any], ring: RingWriter | None) -> Reply:
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
        results: Any = [work(task) for task in tasks]
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
    ring = RingWriter(mmap.mmap(memory, HEADER_BYTES + RING_BYTES)) if memory >= 0 else None
    try:
        work = pickle.loads(connection.recv_bytes())
        while True:
            tasks = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(reply_of(work, tasks, ring)))
            del tasks
    except (EOFError, OSError):
        return
