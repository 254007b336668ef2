"""What a step reports: values that stay on the device until somebody reads them.

A step fills one row of device scalars and counts that the host knows anyway; `StepResult.stats` reads them, once, and that is the only
host synchronisation.

Suffixes: K terms (`objectives.TERMS`), S segments of a micro-batch.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_REMEMBERED_STEPS = 8
"""Steps whose items are kept to explain a refused update; older refusals nobody has read are counted, not explained."""

MAX_NAMED_ITEMS = 8
"""Item ids that one explanation spells out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStepStats:
    """One step, as the whole world took it: losses are world means, counts are summed over ranks."""

    step: int
    """The step, counted from one across resumes."""
    learning_rate: float
    loss: float
    """The sum that the step minimised: every term times its weight."""
    contrastive_loss: float
    """Before its weight, like the masked and choices terms; 0 when absent."""
    masked_text_loss: float
    """Nats a byte."""
    masked_image_loss: float
    """Mean squared error of standardised payload values."""
    masked_video_loss: float
    masked_audio_loss: float
    late_interaction_loss: float
    """After its weight."""
    choices_loss: float
    """Nats an item."""
    gradient_norm: float
    """Euclidean norm of the world's gradient, before it was clipped."""
    truncated: int
    """This step's packed items that were cut at a row's width."""
    dropped: int
    """Segments left out whole since the last step whose stats were read."""
    skipped: int
    """Updates refused, for a non-finite loss or gradient, since the last step whose stats were read."""
    refusals: tuple[str, ...] = ()
    """For each of the latest of those updates, which terms were not finite on which of this rank's items."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """What it takes to explain a refused update: of one micro-batch, which items were not finite, as far as a vector shows it."""

    micro_batch: int
    id_S: Tensor
    """int64 holding the bits of the global item ids."""
    broken_S: Tensor
    """bool: the item's pooled vector is not finite."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step's values, on the device until they are read."""

    step: int
    learning_rate: float
    term_names: tuple[str, ...]
    weights_K: tuple[float, ...]
    terms_K: Tensor
    """float64: world means before weights."""
    loss: Tensor
    gradient_norm: Tensor
    finite: Tensor
    """bool: the update was applied."""
    skipped_so_far: Tensor
    """int64: updates refused up to and with this step, in the whole run."""
    truncated: int
    dropped_so_far: int
    """Segments dropped up to and with this step, in the whole run."""
    rank: int
    suspects: tuple[Suspects, ...]
    values: Callable[[], list[float]] | None = None
    """Where a ring already brings the numbers to the host: terms, loss, norm, finite, skipped; the tensors are not read then."""

    def was_applied(self) -> bool:
        """Whether the update was applied; reads the device."""
        return bool(self.finite) if self.values is None else bool(self.values()[len(self.term_names) + 2])

    def explain(self, terms: list[float], loss: float, norm: float) -> str:
        """Which terms were not finite on which items, in one line; reads the device."""
        broken = [name for name, value in zip(self.term_names, terms, strict=True) if not _is_finite(value)]
        what = f"{', '.join(broken)} not finite" if broken else ("loss not finite" if not _is_finite(loss) else f"gradient norm {norm}")
        places: list[str] = []
        for suspect in self.suspects:
            ids = [i & (2**64 - 1) for i in suspect.id_S.cpu()[suspect.broken_S.cpu()].tolist()]
            if ids:
                shown = ", ".join(map(str, ids[:MAX_NAMED_ITEMS])) + (", ..." if len(ids) > MAX_NAMED_ITEMS else "")
                places.append(f"micro-batch {suspect.micro_batch}: {len(ids)} of {suspect.id_S.numel()} items ({shown})")
        where = "; ".join(places) if places else "none of its items has a vector that is not finite"
        return f"step {self.step}: update refused, {what}; rank {self.rank}: {where}"


class StatisticsReader:
    """Reads rows and remembers what was told, so that drops and refusals are told once. Steps and readers may be on different threads."""

    def __init__(self, dropped: int = 0, skipped: int = 0) -> None:
        self._dropped_told = dropped
        self._skipped_told = skipped
        self._rows: deque[StepRow] = deque(maxlen=MAX_REMEMBERED_STEPS)
        self._lock = threading.Lock()

    @property
    def told(self) -> tuple[int, int]:
        """Dropped segments and refused updates that a reader was told of, in the whole run."""
        with self._lock:
            return self._dropped_told, self._skipped_told

    def remember(self, row: StepRow) -> None:
        """Keeps a row until it is read or too old, in case its update was refused."""
        with self._lock:
            self._rows.append(row)

    def read(self, row: StepRow) -> TrainerStepStats:
        """The row's values on the host: the one synchronisation."""
        with self._lock:
            return self._read(row)

    def _read(self, row: StepRow) -> TrainerStepStats:
        terms, loss, norm, skipped_so_far = _to_host(row)
        value = dict(zip(row.term_names, terms, strict=True))
        weight = dict(zip(row.term_names, row.weights_K, strict=True))
        skipped = max(0, skipped_so_far - self._skipped_told)
        dropped = max(0, row.dropped_so_far - self._dropped_told)
        refusals = self._explain_up_to(row, skipped)
        self._skipped_told = max(self._skipped_told, skipped_so_far)
        self._dropped_told = max(self._dropped_told, row.dropped_so_far)
        return TrainerStepStats(
            step=row.step,
            learning_rate=row.learning_rate,
            loss=loss,
            contrastive_loss=value["contrastive"],
            masked_text_loss=value["text"],
            masked_image_loss=value["image"],
            masked_video_loss=value["video"],
            masked_audio_loss=value["audio"],
            late_interaction_loss=value["late_interaction"] * weight["late_interaction"],
            choices_loss=value["choices"],
            gradient_norm=norm,
            truncated=row.truncated,
            dropped=dropped,
            skipped=skipped,
            refusals=refusals,
        )

    def _explain_up_to(self, row: StepRow, skipped: int) -> tuple[str, ...]:
        due = [r for r in self._rows if r.step <= row.step]
        for _ in due:
            self._rows.popleft()
        if not skipped:
            return ()
        lines: list[str] = []
        for old in due:
            if not old.was_applied():
                terms, loss, norm, _ = _to_host(old)
                lines.append(old.explain(terms, loss, norm))
        for line in lines:
            logger.warning("%s", line)
        return tuple(lines)


class StepResult:
    """The answer of a step: its statistics, read on demand, and the pooled vectors, if they were asked for."""

    def __init__(self, row: StepRow, reader: StatisticsReader, embeddings: Tensor | None) -> None:
        self._row = row
        self._reader = reader
        self._stats: TrainerStepStats | None = None
        self.embeddings = embeddings
        """`[items, hidden]` in the type asked for, L2-normalised, NaN rows for dropped items; None unless asked for."""

    @property
    def step(self) -> int:
        """The step, counted from one across resumes; known without reading the device."""
        return self._row.step

    @property
    def stats(self) -> TrainerStepStats:
        """The step's statistics; the first read waits for the device."""
        if self._stats is None:
            self._stats = self._reader.read(self._row)
        return self._stats


def _is_finite(value: float) -> bool:
    return value - value == 0


def _to_host(row: StepRow) -> tuple[list[float], float, float, int]:
    if row.values is not None:
        *terms, loss, norm, _, skipped = row.values()
        return terms, loss, norm, int(skipped)
    scalars = torch.stack([row.loss.double(), row.gradient_norm.double(), row.skipped_so_far.double()])
    *terms, loss, norm, skipped = torch.cat([row.terms_K, scalars]).tolist()
    return terms, loss, norm, int(skipped)
