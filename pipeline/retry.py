"""How patiently a broken read is tried again."""

import random
from dataclasses import dataclass

from treadle.shape import require_count, settle_numbers

_JITTER = random.Random()
"""Of our own, so that a retry never moves the random numbers of a user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, and how patiently, a broken read is tried again."""

    attempts: int = 8
    """Faults in a row, without a byte between them, after which a stream is given up."""
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

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name, least in (("attempts", 1), ("budget", 1), ("min_bytes_per_s", 0)):
            require_count("RetryPolicy", name, getattr(self, name), least)
        for name in ("base_delay_s", "max_delay_s", "max_retry_after_s", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"RetryPolicy.{name} is {value!r}: it must be a number of seconds, not negative")
        if self.timeout_s == 0:
            raise ValueError("RetryPolicy.timeout_s is 0: it must be positive")

    def delay_s(self, failures: int, asked_s: float = 0.0) -> float:
        """The wait before the next attempt: between half and all of the doubled delay, and never less than what was asked."""
        doubled = min(self.max_delay_s, self.base_delay_s * 2.0 ** min(failures - 1, 60))
        return max(doubled * _JITTER.uniform(0.5, 1.0), min(asked_s, self.max_retry_after_s))
