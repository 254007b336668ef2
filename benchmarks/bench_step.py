"""Claims: a step does useful work at every position, near the machine's own matrix-product rate, and is little else than the tower.

The same tower, items and loss on the stamps mix, in turns:
  packed     forward, loss and backward over rows of whole segments, as Treadle trains
  padded     the same over right-padded batches, one for each modality, every item as long as its longest; padding is hidden from attention by
             a key mask, and the embedding and the loss see none of it
  step       `Trainer.step`, whole: layout, corruption, losses, optimizer, statistics
  tower      the part of that step from the tower's input to its states, and from the states' gradient to the last of its parameters'
  matmul     products of the tower's own sizes, forward and both gradients, back to back: the ceiling

Tokens are real tokens either way. `useful rate` is a whole contrastive step's floating-point operations (matrix products of the forward and
backward pass and attention scores) a second over the rate of bare products. `overhead` is the share of a step that is not the tower.

    python benchmarks/bench_step.py --shards shards              14 rows of 160 positions
    python benchmarks/bench_step.py --shards shards --full       28 rows, as examples/stamps trains
    TREADLE_CPU_COMPILE=1 python benchmarks/bench_step.py ...    elementwise passes compiled (kernels/compiled.py)
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import record
import torch
from torch import Tensor

from treadle import (
    AudioShape,
    BatchShape,
    ImageShape,
    LateInteraction,
    LateInteractionSide,
    Modality,
    Objective,
    PackedBatch,
    Schedule,
    ShardStream,
    Trainer,
    TrainerConfig,
)
from treadle.kernels import compiled
from treadle.kernels.dispatch import compute_dtype
from treadle.kernels.rms_norm import rms_norm
from treadle.kernels.rotary import rotary
from treadle.kernels.segment_attention import segment_attention
from treadle.kernels.segment_attention_reference import SegmentGroup, SegmentGroups
from treadle.kernels.swiglu import swiglu
from treadle.model.contrastive import Candidates, contrastive_count, contrastive_sum
from treadle.model.device import keep_freed_memory
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.objectives import Objectives
from treadle.model.tower import Block, inner_width
from treadle.pipeline import Schema

HIDDEN, DEPTH = 512, 12
SHAPE = BatchShape(
    max_rows_per_device=14,
    max_segments_per_device=512,
    max_columns_per_row=160,
    image=ImageShape(patch_side=24, channels=4),
    audio=AudioShape(chunk_samples=640, sample_rate=16_000),
)
FIELDS = ("png", "en.txt", "es.txt", "fr.txt", "ru.txt", "el.txt", "fr.ogg", "ru.ogg")
SIDES = {name: LateInteractionSide.QUERY if name.endswith("txt") else LateInteractionSide.DOCUMENT for name in FIELDS}
SCHEDULE = Schedule(steps=1000)
CPU = torch.device("cpu")


def packed_batch(shards: list[str], shape: BatchShape) -> PackedBatch:
    """A full batch of the stamps."""
    with ShardStream(shards, shape, epochs=1, schema=Schema(sides=SIDES)) as stream:
        return next(iter(stream))


class Padded:
    """The tower over right-padded batches, one for each modality: the positions of a packed batch and the padding between them."""

    def __init__(self, layout: BatchLayout) -> None:
        self.layout = layout
        self.parts: list[tuple[Tensor, Tensor, Tensor, SegmentGroup]] = []
        for modality in Modality:
            segment_B = (layout.modality_S == modality).nonzero()[:, 0]
            if not len(segment_B):
                continue
            length_B = layout.length_S[segment_B]
            longest, count = int(length_B.max()), len(segment_B)
            place_L = torch.arange(longest)
            real_BL = place_L < length_B[:, None]
            source_BL = layout.start_S[segment_B][:, None] + place_L
            group = SegmentGroup(0, count * longest, count, longest, None, None, real_BL[:, None, None, :])
            self.parts.append(
                (segment_B, source_BL.where(real_BL, torch.full_like(source_BL, layout.num_positions)).view(-1), real_BL, group)
            )

    @property
    def positions(self) -> int:
        """Positions of all parts, padding included."""
        return sum(group.count * group.longest for *_, group in self.parts)

    def pooled(self, network: Network) -> Tensor:
        """The pooled vectors `[S, D]`, padding left out of the means."""
        tower, layout = network.tower, self.layout
        nothing_1D = torch.zeros(1, tower.hidden)
        embedded_PD = torch.cat([tower.embedding(layout, None, None), nothing_1D])
        turn_PA = torch.cat([tower.turn(layout.coord_P3), torch.ones(1, 32, dtype=torch.complex64)])
        pooled: list[Tensor] = []
        for segment_B, source_N, real_BL, group in self.parts:
            x_ND, change_ND = embedded_PD.index_select(0, source_N), None
            turn_NA = turn_PA.index_select(0, source_N)
            for block in tower.blocks:
                assert isinstance(block, Block)
                x_ND, change_ND = self._block(block, x_ND, change_ND, turn_NA, group)
            states_ND, _ = rms_norm(change_ND, tower.norm, x_ND, out_dtype=x_ND.dtype)  # type: ignore[arg-type]  # there is a block
            kept_BL = real_BL.clone()
            kept_BL[:, 0] = False
            states_BLD = states_ND.view(group.count, group.longest, -1) * kept_BL[:, :, None]
            pooled.append(states_BLD.sum(1) / layout.tokens_S[segment_B][:, None])
        order_S = torch.cat([segment_B for segment_B, *_ in self.parts]).argsort()
        return torch.cat(pooled)[order_S]

    @staticmethod
    def _block(block: Block, x_ND: Tensor, change_ND: Tensor | None, turn_NA: Tensor, group: SegmentGroup) -> tuple[Tensor, Tensor]:
        compute, groups = compute_dtype(x_ND), SegmentGroups((group,), None, None)
        linear = torch.nn.functional.linear
        none_S = torch.zeros(0, dtype=torch.int64)
        first = (x_ND, block.norm1, None) if change_ND is None else (change_ND, block.norm1, x_ND)
        y_ND, x_ND = rms_norm(*first, out_dtype=compute)
        q, k, v = rotary(linear(y_ND, block.qkv).view(len(y_ND), 3, -1, 64), block.q_gain, block.k_gain, turn_NA)
        mixed = segment_attention(q, k, v, none_S, none_S, groups=groups)
        y_ND, x_ND = rms_norm(linear(mixed.flatten(1), block.out), block.norm2, x_ND, out_dtype=compute)
        return x_ND, linear(swiglu(linear(y_ND, block.gate_up)), block.down)


class Cases:
    """The cases of one compute type."""

    def __init__(self, batch: PackedBatch, dtype: torch.dtype) -> None:
        self.batch, self.bf16 = batch, dtype is torch.bfloat16
        self.layout = BatchLayout.from_batch(batch, CPU)
        base = TrainerConfig(
            depth=DEPTH, hidden=HIDDEN, batch=batch.shape, schedule=SCHEDULE, device="cpu", precision="bf16" if self.bf16 else "fp32"
        )
        self.config = replace(base, objective=Objective.CONTRASTIVE)
        self.joint = replace(base, objective=Objective.JOINT)
        self.network = Network(self.config)
        self.padded = Padded(self.layout)

    def _timed(self, run: Callable[[], Tensor]) -> float:
        for parameter in self.network.parameters():
            parameter.grad = None
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            loss = run()
        loss.backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start

    def packed_s(self) -> float:
        objectives = Objectives(self.config)

        def run() -> Tensor:
            prepared = objectives.prepare(0, self.layout, 1, World(), [self.layout.num_segments])
            counts = objectives.counts(prepared)
            loss = objectives.sums(self.network, prepared, World()).loss(1 / counts.clamp(min=1))
            assert loss is not None
            return loss

        return self._timed(run)

    def padded_s(self) -> float:
        config = self.config.contrastive.resolved(HIDDEN)
        candidates = Candidates(count=self.layout.num_segments, first=0, group_N=self.layout.group_S)

        def run() -> Tensor:
            pooled_SD = self.padded.pooled(self.network).float()
            assert self.network.temperatures is not None
            value = contrastive_sum(pooled_SD, pooled_SD, self.layout, candidates, self.network.temperatures, config)
            return value / contrastive_count(self.layout, candidates, config)

        return self._timed(run)


class TowerClock:
    """What of a trainer's steps passes in its tower, forward and backward: clocked within the step, so that load falls on both alike."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._stamps: dict[str, float] = {}
        tower = trainer.network.tower
        tower.register_forward_pre_hook(lambda *_: self._stamp("in"))
        tower.register_forward_hook(self._after)
        for parameter in tower.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._stamp("last gradient"))

    def _stamp(self, name: str) -> None:
        self._stamps[name] = time.perf_counter()

    def _after(self, _module: object, _inputs: object, states_PD: Tensor) -> None:
        self._stamp("states")
        states_PD.register_hook(lambda _: self._stamp("their gradient"))

    def overhead(self, batch: PackedBatch) -> float:
        """The share of a whole step, its statistics read, that is not the tower's."""
        whole = step_s(self._trainer, batch)
        at = self._stamps
        return 1 - (at["states"] - at["in"] + at["last gradient"] - at["their gradient"]) / whole


def operations(batch: PackedBatch) -> float:
    """Floating-point operations of a forward and backward pass: two a multiply-add, the backward pass twice the forward."""
    length = batch.length[: batch.segments].astype(np.float64)
    positions = length.sum()
    products = 2 * positions * DEPTH * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * inner_width(HIDDEN))
    attention = 4 * (length**2).sum() * HIDDEN * DEPTH
    return float(3 * (products + attention))


def matmul_rate(positions: int, dtype: torch.dtype, seconds: float = 0.7) -> float:
    """Floating-point operations a second of the tower's own products, forward and both gradients, back to back."""
    inner = inner_width(HIDDEN)
    sizes = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * inner), (inner, HIDDEN))
    cases = [
        (torch.randn(positions, k, dtype=dtype), torch.randn(n, k, dtype=dtype), torch.randn(positions, n, dtype=dtype)) for k, n in sizes
    ]
    done, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for x, w, dy in cases:
            torch.mm(x, w.t())
            torch.mm(dy, w)
            torch.mm(dy.t(), x)
            done += 6.0 * positions * x.shape[1] * w.shape[0]
    return done / (time.perf_counter() - start)


def step_s(trainer: Trainer, batch: PackedBatch) -> float:
    """Seconds of a whole step, its statistics read."""
    start = time.perf_counter()
    _ = trainer.step(batch).stats
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of every case; more than one wants a quiet machine [1]")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--full", action="store_true", help="28 rows instead of 14")
    parser.add_argument("--steps-only", action="store_true", help="whole steps and the tower alone: leave packed and padded passes out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    batch = packed_batch(shards, replace(SHAPE, max_rows_per_device=28) if arguments.full else SHAPE)
    positions = int(batch.length[: batch.segments].sum())
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        cases = Cases(batch, dtype)
        late = replace(cases.joint, late_interaction=LateInteraction(weight=0.3))
        shape = {
            "threads": arguments.threads, "hidden": HIDDEN, "depth": DEPTH, "segments": batch.segments, "positions": positions,
            "padded": cases.padded.positions,
        }  # fmt: skip
        rates: dict[str, list[float]] = {k: [] for k in ("packed", "padded", "useful", "joint", "late")}
        with Trainer(cases.config) as contrastive, Trainer(cases.joint) as joint, Trainer(late) as joint_late:
            # What the first of each costs (libraries that load, passes that compile) is no part of the claim.
            clock, late_clock = TowerClock(joint), TowerClock(joint_late)
            for trainer in (contrastive, joint, joint_late):
                step_s(trainer, batch)
            for _ in range(arguments.repetitions):
                if not arguments.steps_only:
                    rates["packed"].append(batch.tokens / cases.packed_s())
                    rates["padded"].append(batch.tokens / cases.padded_s())
                # The ceiling on both sides of the step: a shared machine's clock moves within seconds.
                before, step, after = matmul_rate(positions, dtype), step_s(contrastive, batch), matmul_rate(positions, dtype)
                rates["useful"].append(operations(batch) / step / ((before + after) / 2))
                rates["joint"].append(clock.overhead(batch))
                rates["late"].append(late_clock.overhead(batch))

        def row(
            impl: str, baseline: str, metric: str, unit: str, values: list[float], shape: dict[str, int] = shape, name: str = name
        ) -> None:
            if compiled.is_asked():
                impl += ", compiled"
            record.append(
                record.Row(op="step", impl=impl, baseline=baseline, shape=shape, dtype=name, metric=metric, unit=unit, values=values)
            )

        if not arguments.steps_only:
            for case in ("packed", "padded"):
                row(case, "", "tokens", "1/s", rates[case])
            row("packed", "padded", "rate ratio", "x", record.ratios(rates["packed"], rates["padded"]))
        row("Trainer.step", "bare matrix products", "useful rate", "x", rates["useful"])
        row("Trainer.step, joint", "tower", "overhead", "share", rates["joint"])
        row("Trainer.step, joint and late interaction", "tower", "overhead", "share", rates["late"])


if __name__ == "__main__":
    main()
