"""How patiently a broken read is tried again, and a server that nobody has reached yet."""

import errno
import random
import socket
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from treadle.shape import require_count, settle_numbers

_JITTER = random.Random()
"""Of our own, so that a retry never moves the random numbers of a user."""

_PAUSE_S: Final = 60.0
"""A server that nobody has tried for so long, s, is tried as if for the first time."""

_NO_WAY: Final = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, and how patiently, a broken read is tried again.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    attempts: int = 10
    """Faults in a row, without a byte between them, after which a stream is given up: with the waits below, three quarters of a minute of them at
    the least, in which a server restarts."""
    budget: int = 64
    """Faults of one stream in all after which it is given up."""
    base_delay_s: float = 0.25
    """Wait after the first fault, s; doubled after each one in a row."""
    max_delay_s: float = 30.0
    """Longest such wait, s."""
    max_retry_after_s: float = 120.0
    """Longest wait that a server's Retry-After may ask for, s."""
    timeout_s: float = 60.0
    """A connection that gives nothing for so long is a fault, s."""
    min_bytes_per_s: int = 1024
    """A connection that gives less, averaged over `timeout_s` of waiting for it, is a fault; 0 lets it drip."""
    first_contact_s: float = 5.0
    """A server that has never answered this process is given up after so long, s, of two tries at least, while its name is not known, it
    refuses connections or no way leads to it: its URL is more likely wrong than it is down. One that has answered is waited for as above."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name, least in (("attempts", 1), ("budget", 1), ("min_bytes_per_s", 0)):
            require_count("RetryPolicy", name, getattr(self, name), least)
        for name in ("base_delay_s", "max_delay_s", "max_retry_after_s", "timeout_s", "first_contact_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"RetryPolicy.{name} is {value!r}: it must be a number of seconds, not negative")
        if self.timeout_s == 0:
            raise ValueError("RetryPolicy.timeout_s is 0: it must be positive")

    def delay_s(self, failures: int, asked_s: float = 0.0) -> float:
        """The wait before the next attempt: between half and all of the doubled delay, and never less than what was asked."""
        doubled = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(failures - 1, 60))
        return max(doubled * _JITTER.uniform(0.5, 1.0), min(asked_s, self.max_retry_after_s))


class Contacts:
    """Which servers have answered this process, and since when the others are being tried."""

    def __init__(self) -> None:
        self._answered: set[Hashable] = set()
        self._tried_s: dict[Hashable, tuple[float, float]] = {}
        """When those that have not were tried first and last."""
        self._lock = threading.Lock()

    def answered(self, server: Hashable) -> None:
        """Notes that `server` is there."""
        if server not in self._answered:
            with self._lock:
                self._answered.add(server)
                self._tried_s.pop(server, None)

    def tried_s(self, server: Hashable) -> float | None:
        """Called when `server` could not be reached: the time since that was so first, s, in a row without long pauses; None where it has
        answered before."""
        with self._lock:
            now_s = time.monotonic()
            if server in self._answered:
                return None
            first_s, last_s = self._tried_s.get(server, (now_s, now_s))
            first_s = first_s if now_s - last_s < _PAUSE_S else now_s
            self._tried_s[server] = first_s, now_s
            return now_s - first_s


contacts: Final = Contacts()
"""Those of this process."""


def unreachable(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, says that a name is not known, a connection refused, or that there is no way."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _NO_WAY):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
