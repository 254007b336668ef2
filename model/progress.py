"""Progress of a call over many tensors, reported a bounded number of times, and the exception of a call that was told to stop."""

from treadle.model.config import Progress

DEFAULT_REPORTS = 10


class Stopped(Exception):
    """A progress callback answered False: the call ended without an effect."""


class ProgressReports:
    """Counts tensors towards `total` and reports at most `reports` times (0: ten), evenly spaced, the last at completion."""

    def __init__(self, what: str, progress: Progress | None, reports: int) -> None:
        self._what = what
        self._progress = progress
        self._reports = reports or DEFAULT_REPORTS
        self._told = 0

    def __call__(self, done: int, total: int) -> None:
        """Notes that `done` of `total` tensors are through.

        Raises:
            Stopped: the callback answered False.
        """
        if self._progress is None:
            return
        due = done * self._reports // max(total, 1)
        if due == self._told and done < total:
            return
        if due == self._told == self._reports:
            return
        self._told = due
        if self._progress(done, total) is False:
            raise Stopped(f"{self._what} was stopped after {done} of {total} tensors")
