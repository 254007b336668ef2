"""What was skipped and why: counts by kind, and a log of one JSON line each."""

import json
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from treadle.pipeline.storage import public_text, public_url

logger = logging.getLogger(__name__)

MAX_TEXT = 1000
"""Characters of a name or a reason that a line keeps: names come from the files themselves."""


class Quarantine:
    """Counts what was skipped; with a path, also appends `{"url", "key", "member", "offset", "kind", "reason"}` lines to that file.

    A line is appended in one write, so that several processes may share the file. It pickles: the copy in another process logs to
    the same file and counts for itself.

    Raises:
        ValueError: the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        """The log, None where only counts are kept."""
        self.counts: Counter[str] = Counter()
        """What was skipped so far, by kind."""
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
        """
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
        self._open()
