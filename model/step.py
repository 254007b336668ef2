"""One optimizer step of one rank, in step with all the others.

1. Ranks agree on the host: does anyone refuse its batch, has everyone run out, how many micro-batches, how many segments in each.
2. Every micro-batch is moved to the device and corrupted; counts of all terms are summed over the world, before any forward pass.
3. Every micro-batch runs forward and backward with `sum_k weight_k numerator_k / denominator_k`.
4. Gradients are summed over ranks, beside the last backward pass (`reduction.py`); norm, finiteness and clipping follow from the sum, so
   they are alike everywhere.
5. AdamW, refused on the device where something is not finite; temperatures are clamped; statistics stay on the device.

Suffixes: K terms (`objectives.TERMS`); S segments; D hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.model.capacity import MAX_MICRO_BATCHES
from treadle.model.config import TrainerConfig
from treadle.model.device_layer import DeviceLayer, layer_of
from treadle.model.device_step import VARIABLE, DeviceStep, Mode, Update, step_mode
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World, require_same
from treadle.model.network import Network
from treadle.model.objectives import TERMS, MicroBatch, Objectives, TermSums
from treadle.model.optimizer import AdamW
from treadle.model.parallel import flat_parameters
from treadle.model.reduction import GradientReduction
from treadle.model.statistics import StepRow, Suspects
from treadle.model.window import AccumulationWindow
from treadle.pipeline import PackedBatch


class PeerRefusedError(RuntimeError):
    """Another rank could not take its batch, so no rank took the step."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks told each other at a step's start."""

    num_micro_batches: int
    """The most that any rank brings."""
    ended: bool
    """Every rank has run out."""
    stopping: bool
    """Some rank was told to stop."""
    truncated: int
    dropped: int
    """Summed over ranks."""


class StepRunner:
    """Runs steps: everything that a step changes is here."""

    def __init__(self, config: TrainerConfig, network: Network, world: World, device: torch.device, *, bf16: bool) -> None:
        self.network = network
        self.world = world
        self.device = device
        self.parameters = flat_parameters(config, network, world, device)
        self.reduction = GradientReduction(world, self.parameters, network)
        self.optimizer = AdamW(self.parameters, config.optimizer)
        self.objectives = Objectives(config)
        self.window = AccumulationWindow(self.parameters)
        self.steps = 0
        """Steps taken, refused updates too."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """Updates refused in the whole run."""
        self.dropped = 0
        """Segments dropped in the whole run, by all ranks."""
        self._config = config
        self._schedule = config.schedule.resolved()
        self._bf16 = bf16
        self._weights_K = torch.tensor(self.objectives.weights_K, dtype=torch.float64, device=device)
        self._fixed: DeviceStep | None = None
        if device.type == "cuda" and not self.parameters.is_sharded:
            require_same(world, {VARIABLE: step_mode()})
            if step_mode() != "free":
                self.fix_sizes(layer_of(device), step_mode())

    def fix_sizes(self, layer: DeviceLayer, mode: Mode) -> None:
        """From now on, steps of one micro-batch run at fixed sizes (`device_step.py`), which CUDA does by itself."""
        self._fixed = DeviceStep(
            self._config,
            self.network,
            self.world,
            layer,
            bf16=self._bf16,
            mode=mode,
            zero_gradients=self._zero_for_one_pass,
            update=self._update,
            skipped=self.skipped,
        )

    def _zero_for_one_pass(self) -> None:
        self.parameters.gradients.zero_()
        self.reduction.arm(after_rows=self.objectives.scores_pairs)

    def agree(self, batches: Sequence[PackedBatch], error: Exception | None, *, ended: bool = False, stopping: bool = False) -> Agreement:
        """The first exchange of a step (collective).

        Raises:
            PeerRefusedError: another rank has an error; the rank that has one raises that.
            ValueError: ranks are at different places of an accumulation window.
        """
        if error is None and self.window.micro_batches + len(batches) > MAX_MICRO_BATCHES:
            error = ValueError(
                f"the step would have {self.window.micro_batches + len(batches)} micro-batches: at most {MAX_MICRO_BATCHES} make one"
            )
        truncated = sum(b.truncated for b in batches) + self.window.truncated
        dropped = sum(b.dropped for b in batches) + self.window.dropped
        rows = self.world.exchange(
            [int(error is not None), int(ended), int(stopping), len(batches), truncated, dropped, self.window.micro_batches]
        )
        if error is not None:
            raise error
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        if refused:
            raise PeerRefusedError(f"rank {refused[0]} could not take its batch, see its own error: no rank took step {self.steps + 1}")
        windows = {row[6] for row in rows}
        if len(windows) > 1:
            raise ValueError(
                f"ranks have accumulated {sorted(windows)} micro-batches: every rank calls accumulate equally often, with None for nothing"
            )
        return Agreement(
            num_micro_batches=max(row[3] for row in rows),
            ended=all(row[1] for row in rows),
            stopping=any(row[2] for row in rows),
            truncated=sum(row[4] for row in rows),
            dropped=sum(row[5] for row in rows),
        )

    def watched(self) -> AbstractContextManager[None]:
        """Marks a whole step as a wait for others where blocks are sharded: theirs are PyTorch's collectives, which the world does not mark."""
        return self.world.waiting("a step of sharded blocks") if self.parameters.is_sharded else nullcontext()

    def accumulate(self, batches: Sequence[PackedBatch], agreement: Agreement) -> None:
        """Adds micro-batches to the window, without an update (collective)."""
        prepared = self._prepare(batches, agreement.num_micro_batches)
        for batch in prepared:
            self.window.counts_K += self.objectives.counts(batch)
            sums = self._forward(batch)
            self.window.sums_K += sums.values_K()
            for term, numerator in sums.terms(self.objectives.weights_K):
                self.parameters.gradients.zero_()
                numerator.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                self.parameters.absorb()
                self.window.add(term)
        self.window.micro_batches += agreement.num_micro_batches
        self.window.truncated += sum(b.truncated for b in batches)
        self.window.dropped += sum(b.dropped for b in batches)

    def step(
        self, batches: Sequence[PackedBatch], agreement: Agreement, embeddings: torch.dtype | None = None
    ) -> tuple[StepRow, Tensor | None]:
        """One step over `batches` and the window, which it ends (collective)."""
        number = self.steps + 1
        if self._fixed is not None and agreement.num_micro_batches == 1 and not self.window.micro_batches:
            answer = self._step_at_fixed_sizes(self._fixed, batches, agreement, embeddings)
            if answer is not None:
                return answer
        prepared = self._prepare(batches, agreement.num_micro_batches)
        counts_K = self.window.counts_K.clone()
        for batch in prepared:
            counts_K += self.objectives.counts(batch)
        counts_K = self.world.all_sum(counts_K)
        scales_K = torch.where(counts_K > 0, self._weights_K / counts_K.clamp(min=1), 0.0)

        self.parameters.gradients.zero_()
        self.window.pour(scales_K)
        sums_K = self.window.sums_K.clone()
        rows: list[Tensor] = []
        suspects: list[Suspects] = []
        for batch in prepared:
            sums = self._forward(batch)
            sums_K += sums.values_K()
            loss = sums.loss(scales_K)
            if batch is prepared[-1]:
                self.reduction.arm(after_rows=self.objectives.scores_pairs)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            if batch.layout.num_segments:
                broken_S = ~torch.isfinite(sums.pooled_SD).all(dim=1)
                suspects.append(Suspects(batch.number, batch.layout.id_S, broken_S))
            if embeddings is not None:
                rows.append(_item_rows(batch.layout, sums.pooled_SD, embeddings))
        rate = self._schedule.learning_rate_at(number)
        done = self._update(counts_K, sums_K, rate)
        row = self._row(number, rate, agreement, done, tuple(suspects))
        if embeddings is None:
            return row, None
        # Ranks with fewer micro-batches took part with empty ones, which add no rows.
        empty = torch.zeros(0, self.network.hidden, dtype=embeddings, device=self.device)
        return row, torch.cat([empty, *rows])

    def _step_at_fixed_sizes(
        self, fixed: DeviceStep, batches: Sequence[PackedBatch], agreement: Agreement, embeddings: torch.dtype | None
    ) -> tuple[StepRow, Tensor | None] | None:
        number = self.steps + 1
        rate = self._schedule.learning_rate_at(number)
        answer = fixed.take(batches[0] if batches else PackedBatch(self._config.batch), number)
        if answer is None:
            return None
        suspects = Suspects(0, answer.layout.id_S, ~torch.isfinite(answer.pooled_SD).all(dim=1))
        row = self._row(number, rate, agreement, answer.update, (suspects,) if answer.layout.num_segments else (), answer.reading.values)
        if embeddings is None:
            return row, None
        return row, _item_rows(answer.layout, answer.pooled_SD, embeddings)

    def _update(self, counts_K: Tensor, sums_K: Tensor, rate: float | Tensor) -> Update:
        """What follows the backward pass, on the device alone: reduction, clipping, AdamW (collective)."""
        self.reduction.finish()
        self.parameters.absorb()
        sums_K = self.world.all_sum(sums_K)
        terms_K = torch.where(counts_K > 0, sums_K / counts_K.clamp(min=1), 0.0)
        total = (terms_K * self._weights_K).sum()
        norm = self.parameters.norm()
        finite = torch.isfinite(total) & torch.isfinite(norm)
        self.parameters.clip(norm, self._config.optimizer.max_gradient_norm)
        self.optimizer.step(rate, ~finite)
        self.parameters.publish()
        with torch.no_grad():
            self.network.clamp_()
        self.skipped += (~finite).to(torch.int64)
        return Update(terms_K, total, norm, finite)

    def _row(
        self,
        number: int,
        rate: float,
        agreement: Agreement,
        done: Update,
        suspects: tuple[Suspects, ...],
        values: Callable[[], list[float]] | None = None,
    ) -> StepRow:
        """Ends the step on the host."""
        self.window.clear()
        self.steps = number
        self.dropped += agreement.dropped
        return StepRow(
            step=number,
            learning_rate=rate,
            term_names=TERMS,
            weights_K=self.objectives.weights_K,
            terms_K=done.terms_K,
            loss=done.total,
            gradient_norm=done.norm,
            finite=done.finite,
            skipped_so_far=self.skipped.clone(),
            truncated=agreement.truncated,
            dropped_so_far=self.dropped,
            rank=self.world.rank,
            suspects=suspects,
            values=values,
        )

    def _prepare(self, batches: Sequence[PackedBatch], count: int) -> list[MicroBatch]:
        world = self.world
        segments = [b.segments for b in batches] + [0] * (count - len(batches))
        by_rank = world.exchange(segments) if self.objectives.scores_pairs else [segments]
        prepared: list[MicroBatch] = []
        for place in range(count):
            number = self.window.micro_batches + place
            if place < len(batches):
                layout = BatchLayout.from_batch(batches[place], self.device, rank=world.rank, micro_batch=number)
            else:
                layout = BatchLayout.empty(self._config.batch.resolved(), self.device)
            prepared.append(self.objectives.prepare(number, layout, self.steps + 1, world, [row[place] for row in by_rank]))
        return prepared

    def _forward(self, batch: MicroBatch) -> TermSums:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            return self.objectives.sums(self.network, batch, self.world)


def _item_rows(layout: BatchLayout, pooled_SD: Tensor, dtype: torch.dtype) -> Tensor:
    """`[items, D]`: unit vectors by the step's item order, NaN where an item was dropped."""
    rows = torch.full((layout.num_items, pooled_SD.shape[1]), torch.nan, dtype=dtype, device=pooled_SD.device)
    rows[layout.item_S] = torch.nn.functional.normalize(pooled_SD.float(), dim=1).to(dtype)
    return rows
