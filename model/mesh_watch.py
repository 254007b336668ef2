"""Finding the rank that hangs: every rank tells how far it has come, and whoever waits too long looks who is behind.

Each rank counts its collectives and a thread of its own writes that count to the world's store. A rank that has waited in one collective for
longer than the time-out reads everybody's count: those that are behind have not come to it. It writes their names where all threads look; every
rank then dumps the stacks of all its threads and ends, the hanging one too where its interpreter still runs threads.
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

logger = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a rank that ended because some rank hung."""

MIN_POLL_S, MAX_POLL_S = 0.05, 30.0
MAX_NAMED = 16


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
    """One rank's count of collectives, and the thread that watches over it.

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
        self._thread = threading.Thread(target=self._run, name="treadle-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, name: str) -> Generator[None, None, None]:
        """Marks a collective, from its call to its end."""
        self._count += 1
        self._name, self._since = name, time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """Ends the watch."""
        self._closing.set()
        self._thread.join(timeout=5)

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

    def _accused(self) -> str:
        """Who is behind, in words."""
        counts = [self._count_of(rank) for rank in range(self._size)]
        behind = [rank for rank, count in enumerate(counts) if count < self._count]
        named = ", ".join(map(str, behind[:MAX_NAMED])) + (", ..." if len(behind) > MAX_NAMED else "")
        if not behind:
            named = "none is behind, so the network is"
        return (
            f"rank {self._rank} has waited {self._timeout_s:g} s in {self._name} (collective {self._count}); "
            f"hanging: rank {named}; the stacks of all ranks stand in their output"
        )

    def _count_of(self, rank: int) -> int:
        key = f"watch/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _fall(self, message: str) -> None:
        logger.error("%s", message)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # Rank 0 may hold the store: it stays until the others have read.
        if self._rank == 0:
            self._closing.wait(4 * self._poll_s)
        self._end(EXIT_CODE)
