"""What was skipped and why: counts by kind, and a log of one JSON line each."""

import json
import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from treadle.pipeline.storage import public_text, public_url
from treadle.shape import require_count, require_member, require_path, settle_numbers

logger = logging.getLogger(__name__)

MAX_TEXT = 1000
"""Characters of a name or a reason that a line keeps: names come from the files themselves."""


class QuarantineFullError(RuntimeError):
    """More was left out than the budget allows: the run stops rather than train on what is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much may be left out before a run stops."""

    max_quarantined: int | float | None = None
    """Most things left out: how many (an integer), or which share of the samples read (above 0, below 1); None sets no bound."""
    quarantine_probation: int = 1000
    """Samples read before a share is judged."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        most = self.max_quarantined
        if isinstance(most, bool) or not (
            most is None or (isinstance(most, int) and most >= 0) or (isinstance(most, float) and 0 < most < 1)
        ):
            raise ValueError(
                f"max_quarantined is {most!r}: it must be a count (an integer, 0 or more), a share of the samples (a number between 0 and "
                "1), or None"
            )
        require_count("Budget", "quarantine_probation", self.quarantine_probation, 0)


class Quarantine:
    """Counts what was skipped; with a path, also appends `{"url", "key", "member", "offset", "kind", "reason"}` lines to that file.

    A line is appended in one write, so that several processes may share the file. It pickles: the copy in another process logs to
    the same file and counts for itself.

    Raises:
        ValueError: the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(require_path("Quarantine", "path", path))
        """The log, None where only counts are kept."""
        self.counts: Counter[str] = Counter()
        """What was skipped so far, by kind."""
        self._distinct: set[int] = set()
        self._lock = threading.Lock()
        self._file = -1
        self._failed = False
        self._open()

    def _open(self) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ValueError(
                f"quarantine file {str(self.path)!r} cannot be opened for appending ({error.strerror}): name one in a folder that can be "
                "written, or None to keep the counts alone"
            ) from error

    def record(self, *, url: str = "", key: str = "", member: str = "", offset: int = -1, kind: str, reason: str) -> None:
        """Counts one thing that was skipped, and logs it.

        Args:
            url: the shard; credentials in it are left out.
            key: the sample, empty for a whole shard.
            member: the file within it, empty for a whole sample.
            offset: its byte in the unpacked tar, -1 where there is none.
            kind: a stable word; counted.
            reason: a sentence for people.

        Raises:
            ValueError: an argument is of another type.
        """
        for name, text in (("url", url), ("key", key), ("member", member), ("kind", kind), ("reason", reason)):
            require_member("Quarantine.record", name, text, str)
        offset = require_count("Quarantine.record", "offset", offset, -1, 2**63 - 1)
        line = {
            "url": public_url(url),
            "key": key[:MAX_TEXT],
            "member": member[:MAX_TEXT],
            "offset": offset,
            "kind": kind,
            "reason": public_text(reason)[:MAX_TEXT],
        }
        data = (json.dumps(line) + "\n").encode()
        with self._lock:
            self.counts[kind] += 1
            if self._file < 0:
                return
            try:
                written = os.write(self._file, data)
            except OSError as error:
                written = -1
                problem = error.strerror
            else:
                problem = "the disk is full"
            if written < len(data) and not self._failed:
                # A run outlives a full disk: the counts go on.
                self._failed = True
                logger.error("quarantine file %s: a line could not be written (%s); further failures are not told", self.path, problem)

    def check(self, budget: Budget, samples: int, *what: str) -> None:
        """After a record of `what`, with `samples` read so far.

        Raises:
            QuarantineFullError: the budget is spent.
        """
        most = budget.max_quarantined
        if isinstance(most, int):
            with self._lock:
                self._distinct.add(hash(what))
            if len(self._distinct) > most:
                raise self._full(budget, samples)
        elif most is not None and max(samples, self.total) >= budget.quarantine_probation:
            self.check_end(budget, samples)

    def check_end(self, budget: Budget, samples: int) -> None:
        """At the end of the data, where a share is judged whatever the probation.

        Raises:
            QuarantineFullError: the budget is spent.
        """
        most = budget.max_quarantined
        # Whole shards that are left out are things without samples.
        if isinstance(most, float) and self.total > most * max(samples, self.total):
            raise self._full(budget, samples)

    def _full(self, budget: Budget, samples: int) -> QuarantineFullError:
        return QuarantineFullError(
            f"stopped: {self.summary()}, after {samples} samples; max_quarantined={budget.max_quarantined} allows no more: mend the shards, "
            "or allow more"
        )

    @property
    def total(self) -> int:
        """How many things were skipped."""
        return self.counts.total()

    def summary(self) -> str:
        """One line: how many were skipped, and of which kinds, most first."""
        if not self.counts:
            return "nothing was quarantined"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items(), key=lambda entry: (-entry[1], entry[0])))
        where = f" (see {self.path})" if self.path is not None else ""
        return f"{self.total} quarantined: {kinds}{where}"

    def close(self) -> None:
        """Closes the log; counting goes on. Safe to call again."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> tuple[Path | None]:
        return (self.path if self._file >= 0 else None,)

    def __setstate__(self, state: tuple[Path | None]) -> None:
        (self.path,) = state
        self.counts, self._lock, self._file, self._failed = Counter(), threading.Lock(), -1, False
        self._distinct = set()
        self._open()
