"""How far one request for a part of an object reaches."""

import time

RANGE_BYTES = 8 << 20
"""Bytes asked of a remote store at a time: one request's latency is spread over this."""

MAX_RANGES = 32
"""Most times so many bytes that are asked for at once of an object that is read quickly."""

QUICK_S = 1.0
"""A range that was read within this time, s, was read quickly."""


def range_stop(position: int, stop: int | None, size: int | None, ranges: int = 1) -> int:
    """Where a request that starts at `position` ends: so many ranges further, but not past what is wanted or there."""
    most = position + ranges * RANGE_BYTES if size is None else min(size, position + ranges * RANGE_BYTES)
    return most if stop is None or stop <= position else min(most, stop)


class Reach:
    """How far one request reaches: four times as far each time that the one before was read through quickly, so that whoever reads a whole
    object pays for few round trips, while one who reads slowly leaves no server waiting for long."""

    def __init__(self) -> None:
        self._ranges = 1
        self._stop = -1
        self._asked_s = 0.0

    def stop(self, position: int, stop: int | None, size: int | None) -> int:
        """Where a request that is made now, at `position`, ends."""
        now_s = time.monotonic()
        quick = position == self._stop and now_s - self._asked_s < QUICK_S
        self._ranges = min(4 * self._ranges, MAX_RANGES) if quick else 1
        self._asked_s = now_s
        self._stop = range_stop(position, stop, size, self._ranges)
        return self._stop
