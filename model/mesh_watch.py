"""Finding the rank that hangs: every rank tells how far it has come, and whoever waits too long looks who is behind.

Each rank counts its collectives and a thread of its own writes that count to the world's store. A rank that has waited in one collective for
longer than the time-out reads everybody's count: those that are behind have not come to it. It writes their names where all threads look; every
rank then dumps the stacks of all its threads and ends, the hanging one too where its interpreter still runs threads.

The store itself may not answer, because the network to rank 0's machine is cut: a second thread, which asks nobody, then ends the rank.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol

from treadle.model.mesh_rendezvous import first_of

logger = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a rank that ended because some rank hung."""

MIN_POLL_S, MAX_POLL_S = 0.05, 10.0
READING_S = 1.0
MIN_SILENCE_S, MAX_SILENCE_S = 2.0, 25.0
"""How long past the time-out the store may take to say who hangs: less than the backend's own grace."""


class Store(Protocol):
    """What a watch needs of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def end_process(code: int) -> None:
    """Ends the process at once: a thread that waits in a collective can be told nothing."""
    sys.stderr.flush()
    os._exit(code)


class Watch:
    """One rank's count of collectives, and the threads that watch over it.

    Args:
        timeout_s: how long a rank may wait in one collective, seconds.
        end: ends this process.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, *, end: Callable[[int], None] = end_process) -> None:
        self._store, self._rank, self._size, self._timeout_s, self._end = store, rank, size, timeout_s, end
        self._count = 0
        self._name = ""
        self._since: float | None = None
        self._closing = threading.Event()
        self._poll_s = min(MAX_POLL_S, max(MIN_POLL_S, timeout_s / 20))
        self._silence_s = min(MAX_SILENCE_S, max(MIN_SILENCE_S, 4 * self._poll_s))
        self._falling = threading.Lock()
        self._threads = [threading.Thread(target=run, name="treadle-watch", daemon=True) for run in (self._run, self._run_alone)]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def waiting(self, name: str) -> Generator[None, None, None]:
        """Marks a collective, from its call to its end, or something longer in which there are collectives, marked or not."""
        around = (self._name, self._since)
        self._count += 1
        self._name, self._since = name, time.monotonic()
        try:
            yield
        finally:
            self._name, self._since = around

    def passed(self) -> None:
        """Counts a place that every rank passes equally often."""
        self._count += 1

    def close(self) -> None:
        """Ends the watch."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self) -> None:
        told = -1
        # A store that is gone is told by the collectives themselves.
        with contextlib.suppress(RuntimeError, OSError):
            while not self._closing.wait(self._poll_s):
                if self._count != told:
                    told = self._count
                    self._store.set(f"watch/{self._rank}", str(told))
                if self._store.check(["watch/hung"]):
                    self._fall(self._store.get("watch/hung").decode())
                    return
                since = self._since
                if since is not None and time.monotonic() - since > self._timeout_s:
                    self._store.set("watch/hung", self._accused())

    def _run_alone(self) -> None:
        """What is left to say where the store has said nothing."""
        while not self._closing.wait(self._poll_s):
            since = self._since
            if since is not None and time.monotonic() - since > self._timeout_s + self._silence_s:
                self._fall(
                    f"rank {self._rank} has waited {self._timeout_s:g} s in {self._name} (collective {self._count}), and rank 0's store does "
                    "not answer: rank 0 or its machine has ended, or the network to it is cut; this rank's stacks stand in its output"
                )
                return

    def _accused(self) -> str:
        """Who is behind, in words."""
        counts = [self._count_of(rank) for rank in range(self._size)]
        behind = [rank for rank, count in enumerate(counts) if count < self._count]
        # Else it may be this rank that is behind, in something long that it has marked.
        behind = behind or [rank for rank, count in enumerate(counts) if count < max(counts)]
        named = first_of(behind) if behind else "none is behind, so the network is"
        return (
            f"rank {self._rank} has waited {self._timeout_s:g} s in {self._name} (collective {self._count}); "
            f"hanging: rank {named}; the stacks of all ranks stand in their output"
        )

    def _count_of(self, rank: int) -> int:
        key = f"watch/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _fall(self, message: str) -> None:
        if not self._falling.acquire(blocking=False):
            return
        logger.error("%s", message)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # Ends close connections, which fails others' collectives: all have read before the first ends, and the store, rank 0's, goes last.
        self._closing.wait(max(READING_S, 2 * self._poll_s) * (2 if self._rank == 0 else 1))
        self._end(EXIT_CODE)
