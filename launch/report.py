"""What a run tells while it goes: rows in `metrics.jsonl`, curves for TensorBoard, a progress bar, tables."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from treadle.launch.files import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from treadle.model.evaluate import Retrieval
    from treadle.pipeline import ShardStream

Number = int | float


STAGE_NAMES = {"read": "reading", "decode": "decoding", "pack": "packing", "consumer": "the training step"}
"""How the stages of `ShardStream.stats` are told."""


def input_stats(stream: "ShardStream") -> tuple[dict[str, Number], str]:
    """What a row of metrics says of the stream since its start, and the stage that limits it (empty before the first batch)."""
    stats = stream.stats()
    values: dict[str, Number] = {}
    for stage in ("read", "decode", "pack"):
        found = stats[stage]
        values |= {f"{stage}_{name}": found[name] for name in ("busy_s", "wait_input_s", "wait_room_s", "bytes_per_s")}
    values["in_flight_bytes"] = stats["decode"]["in_flight_bytes"]
    return values, stats["limiting_stage"]


class RunLog:
    """`metrics.jsonl` and the TensorBoard logs of a run. A context manager.

    A row is one JSON object: `step`, `kind` (`train`, `held_out`), `time_s` since the run began, and numbers whose names carry their unit.
    """

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        self.tensorboard = folder / "tensorboard"
        if after_step:
            self._drop_after(after_step)
        elif self.path.exists():
            self.path.unlink()
        self._file: TextIO = open(self.path, "a", encoding="utf-8")
        self._writer = _summary_writer(self.tensorboard, after_step)
        self._began_s = time.monotonic()

    def row(self, step: int, kind: str, values: Mapping[str, Number | str]) -> None:
        """Writes one row, whole, and a point of every curve; what is not finite is null in the one and left out of the other."""
        shown = {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "kind": kind, "time_s": round(time.monotonic() - self._began_s, 3), **shown}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            if not isinstance(value, str) and math.isfinite(value):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _drop_after(self, step: int) -> None:
        """Rows of steps that the run, resumed before them, will take again."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        kept: list[str] = []
        for line in lines:
            try:
                if int(json.loads(line)["step"]) <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # a row that a crash cut short
        write_text(self.path, "".join(f"{line}\n" for line in kept))


class _NoWriter:
    """Stands in on ranks that write no logs."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Nothing is open."""


class _EventWriter:
    """TensorBoard's event files, without torch's wrapper, which imports far more than scalars need."""

    def __init__(self, folder: Path, after_step: int) -> None:
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._event: Any = events.Event
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._files: Any = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        if after_step:  # curves drawn after this step belong to a course that the run has left
            start = events.SessionLog(status=events.SessionLog.START)
            self._files.add_event(self._event(wall_time=time.time(), step=after_step + 1, session_log=start))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one point to a curve."""
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
        self._files.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._files.close()


def _summary_writer(folder: Path, after_step: int) -> "_EventWriter | _NoWriter":
    return _EventWriter(folder, after_step)


def console(stream: TextIO | None = None) -> "Console":
    """A console for tables: as wide as the terminal, and wide enough for a table where there is none."""
    from rich.console import Console

    file = stream if stream is not None else sys.stdout
    return Console(file=file, width=None if file.isatty() else int(os.environ.get("COLUMNS", "0")) or 120, highlight=False)


class Bar:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere. A context manager."""

    LINE_S = 10.0

    def __init__(self, title: str, total: int | None, *, quiet: bool = False) -> None:
        self._title, self._total, self._quiet = title, total, quiet
        self._progress: Progress | None = None
        self._began_s = self._told_s = time.monotonic()
        self._done = 0
        self._note = ""
        self._told = -1

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            progress.start()
            self._task = progress.add_task(self._title, total=self._total, note="")
            self._progress = progress
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif kind is None and self._told != self._done:
            self._line("")

    def at(self, done: int, note: str = "") -> None:
        """Says how far it is, and something about it."""
        self._done = done
        self._note = note or self._note
        if self._progress is not None:
            self._progress.update(self._task, completed=done)
            if note:
                self._progress.update(self._task, note=note)
        elif time.monotonic() - self._told_s >= self.LINE_S:
            self._line(self._note)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _line(self, note: str) -> None:
        if self._quiet:
            return
        self._told_s, self._told = time.monotonic(), self._done
        of = f"/{self._total}" if self._total else ""
        sys.stderr.write(f"{self._title}: {self._done}{of} after {self._told_s - self._began_s:.0f} s{f'; {note}' if note else ''}\n")
        sys.stderr.flush()


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.1f}"


def recall_table(found: "Mapping[tuple[str, str], Retrieval]", title: str) -> None:
    """Prints recall of every pair: `recall ± standard error (chance)`, in percent."""
    from rich.table import Table

    first = next(iter(found.values()), None)
    cutoffs = list(first.recall) if first is not None else []
    table = Table(title=title, title_justify="left", caption="percent ± standard error (chance)", caption_justify="left")
    table.add_column("query → found")
    table.add_column("queries", justify="right")
    for k in cutoffs:
        table.add_column(f"recall@{k}", justify="right")
    table.add_column("median rank", justify="right")
    table.add_column("MRR", justify="right")
    for (query, document), result in found.items():
        cells = [f"{percent(result.recall[k])} ± {percent(result.standard_error[k])} ({percent(result.chance[k])})" for k in cutoffs]
        table.add_row(f"{query} → {document}", str(result.queries), *cells, f"{result.median_rank:g}", f"{result.mean_reciprocal_rank:.3f}")
    console().print(table)
