"""The step at fixed sizes: one copy up, one graph, one row of statistics down, and no waiting in between.

The host settles a micro-batch's integers (`device_batch.py`) into the next slot of a ring of three pinned buffers; one copy on a stream of
its own moves it while the step before computes. The step then reads a static buffer: its own number, what it hides, denominators, forward,
losses, backward, reduction, clipping, learning rate, AdamW, temperatures, statistics. Its first steps run eagerly, which loads every kernel
and connects ranks; then it is captured once in a CUDA graph and replayed. A step of several micro-batches, or of an open accumulation
window, takes the path of free sizes.

Ranks capture their collectives with the rest: sizes come from the configuration, so all ranks queue the same ones in the same order, and
slices of the gradient fork to the backend's stream and join it inside the graph. Capturing sends nothing; afterwards ranks tell each other
on the host whether it worked, and replay together or not at all. NCCL's watchdog sees no replay: a rank that hangs is named by `mesh_watch.py`,
from the exchanges on the host before each step and from the wait for a slot of the ring.

`TREADLE_CUDA_STEP` chooses: `graph` (default), `eager` (the same work, launched call by call) or `free` (the path of free sizes).

Suffixes: K terms, S segments, D hidden.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from treadle.model.config import TrainerConfig
from treadle.model.device_batch import BatchPlan, BatchWriter, DeviceBatch, DoesNotFitError
from treadle.model.device_clock import DeviceClock
from treadle.model.device_corruption import DeviceCorruption
from treadle.model.device_counts import term_counts
from treadle.model.device_forward import fixed_sums
from treadle.model.device_layer import DeviceLayer
from treadle.model.device_ring import ReadBackRing, Reading, UploadRing
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World
from treadle.model.mesh_traffic import Traffic
from treadle.model.network import Network
from treadle.model.objectives import TERMS, TermSums, term_weights
from treadle.pipeline import PackedBatch

logger = logging.getLogger(__name__)

Mode = Literal["graph", "eager", "free"]
MODES: tuple[Mode, ...] = ("graph", "eager", "free")
VARIABLE = "TREADLE_CUDA_STEP"
WARM_STEPS = 3
"""Steps taken eagerly before one is captured: every kernel is loaded, every workspace is there, and ranks are connected."""


def step_mode() -> Mode:
    """What the environment asks for.

    Raises:
        ValueError: it asks for none of the three.
    """
    found = os.environ.get(VARIABLE, "graph")
    for mode in MODES:
        if found == mode:
            return mode
    raise ValueError(f"{VARIABLE} is {found!r}: it must be graph, eager or free")


@dataclass(slots=True)
class Update:
    """What an update answers, all on the device."""

    terms_K: Tensor
    total: Tensor
    norm: Tensor
    finite: Tensor


@dataclass(slots=True)
class FixedAnswer:
    """What one step leaves behind, on the device, until the step after next."""

    reading: Reading
    """Terms, loss, gradient norm, whether it was finite, updates refused so far."""
    update: Update
    """Where they are on the device until the next step."""
    pooled_SD: Tensor
    """fp32: pooled vectors of the step's segments."""
    layout: BatchLayout
    """On the host."""


Updater = Callable[[Tensor, Tensor, Tensor], Update]
"""From the world's counts `[K]`, this rank's sums `[K]` and the learning rate: reduces, clips, updates."""


class DeviceStep:
    """Runs single micro-batches at fixed sizes.

    Args:
        zero_gradients: clears the flat gradient.
        update: what follows the backward pass.
        skipped: updates refused in the whole run, on the device; `update` adds to it.
    """

    def __init__(
        self,
        config: TrainerConfig,
        network: Network,
        world: World,
        layer: DeviceLayer,
        *,
        bf16: bool,
        mode: Mode,
        zero_gradients: Callable[[], object],
        update: Updater,
        skipped: Tensor,
    ) -> None:
        self.plan = BatchPlan(config, world.size)
        self._network, self._world, self._layer = network, world, layer
        self._bf16, self._zero_gradients, self._update, self._skipped = bf16, zero_gradients, update, skipped
        self._captures = mode == "graph" and layer.captures
        self._graph: Callable[[], None] | None = None
        self._sent_by_graph = Traffic()
        self._taken = 0
        self._uploads = UploadRing(layer, self.plan.bytes)
        self._rows = ReadBackRing(layer, len(TERMS) + 4)
        # The graph reads one address, whichever slot the batch came by.
        self._batch = DeviceBatch(self.plan, layer.buffer(self.plan.bytes))
        self._clock = DeviceClock(config.schedule, layer.device)
        self._clock_at: int | None = None
        self._corruption = DeviceCorruption(self._batch, config.seed)
        self._weights_K = torch.tensor(term_weights(config), dtype=torch.float64, device=layer.device)
        self._row = torch.zeros(len(TERMS) + 4, dtype=torch.float64, device=layer.device)
        self._pooled_SD = torch.zeros(self.plan.segments, network.hidden, device=layer.device)

    def take(self, batch: PackedBatch, step: int) -> FixedAnswer | None:
        """One step on one micro-batch (collective); None where some rank's does not fit, before any device work.

        Args:
            batch: an empty one where this rank has run out.
        """
        with self._world.waiting("a step on the device"):
            host = self._uploads.stage()
        layout, used = self._fill(host, batch, step)
        if any(row[0] for row in self._world.exchange([int(used == 0)])):
            return None
        arrived = self._uploads.send(used)
        end = min(arrived.numel(), -(-used // 256) * 256)
        compute = self._layer.compute_stream()

        def receive() -> None:
            self._batch.buffer[:end].copy_(arrived[:end], non_blocking=True)

        self._layer.run(compute, receive)
        if self._clock_at != step - 1:
            self._layer.run(compute, lambda: self._clock.place(step - 1))
        self._clock_at = None
        if self._captures and self._graph is None and self._taken >= WARM_STEPS:
            self._capture()
        if self._graph is None:
            self._layer.run(compute, self._work)
        else:
            self._layer.run(compute, self._graph)
            self._world.traffic.add(self._sent_by_graph)
        self._clock_at = step
        self._uploads.release()
        self._taken += 1
        row, terms = self._row, len(TERMS)
        update = Update(row[:terms], row[terms], row[terms + 1], row[terms + 2])
        return FixedAnswer(self._rows.write(row), update, self._pooled_SD[: layout.num_segments], layout)

    def _fill(self, host: Tensor, batch: PackedBatch, step: int) -> tuple[BatchLayout, int]:
        world = self._world
        layout = BatchLayout.from_batch(batch, "cpu", rank=world.rank)
        most = self.plan.segments
        groups = [layout.group_S.tolist()]
        if self.plan.scores_pairs and world.size > 1:
            padded = [layout.num_segments, *groups[0], *[0] * (most - len(groups[0]))]
            groups = [row[1 : 1 + row[0]] for row in world.exchange(padded)]
        try:
            return layout, BatchWriter(self.plan, host).write(batch, layout, groups, world.rank)
        except DoesNotFitError as error:
            logger.warning("step %d leaves the fixed sizes: %s", step, error)
            return layout, 0

    def _capture(self) -> None:
        """Captures the step, on all ranks or on none (collective, on the host)."""
        before, told = replace(self._world.traffic), ""
        graph: Callable[[], None] | None = None
        try:
            graph = self._layer.capture(self._work)
        except RuntimeError as error:
            told = str(error)
        self._sent_by_graph = self._world.traffic.since(before)
        # Nothing was sent yet.
        self._world.traffic = before
        # A rank that replayed while another launches call by call might wait for it: backends need not match the two.
        failed = [rank for rank, row in enumerate(self._world.exchange([int(graph is None)])) if row[0]]
        if failed:
            logger.warning("the step cannot be captured on rank %d, it goes on eagerly%s", failed[0], told and f": {told}")
            self._captures = False
            return
        self._graph = graph
        logger.info("captured the step in a graph")

    def _work(self) -> None:
        """Everything between the batch and the row of statistics, on the device alone."""
        batch, world, clock = self._batch, self._world, self._clock
        clock.advance()
        hidden = self._corruption.draw(clock.counter)
        counts_K = world.all_sum(term_counts(batch, hidden))
        scales_K = torch.where(counts_K > 0, self._weights_K / counts_K.clamp(min=1), 0.0)
        self._zero_gradients()
        sums: TermSums = fixed_sums(self._network, batch, hidden, world, bf16=self._bf16)
        loss = sums.loss(scales_K)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            done = self._update(counts_K, sums.values_K(), clock.learning_rate())
            self._pooled_SD.copy_(sums.pooled_SD)
            tail = [done.total, done.norm, done.finite, self._skipped]
            self._row.copy_(torch.cat([done.terms_K, torch.stack([x.double().reshape(()) for x in tail])]))
