"""Held-out samples, read and packed once, and how a network does on them: the loss it was trained for, and recall between modalities."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from treadle.decoders import DecodeError
from treadle.launch.samples import LabelledSample, read_samples
from treadle.launch.settings import HeldOutSettings
from treadle.model.config import TrainerConfig
from treadle.model.evaluate import Retrieval, Vectors, retrieve_between
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.objectives import TERMS, Objectives
from treadle.pipeline import PackedBatch, Packer
from treadle.pipeline.bag import decode_bag
from treadle.shape import Modality, Objective

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOutItem:
    """One item that was read: what it is, and what it shows."""

    key: str
    field: str
    """The sample's field, such as `txt` or `el.txt`."""
    modality: Modality
    label: int
    """Equal for items that are relevant to each other."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """How a network does on the held-out samples."""

    losses: Mapping[str, float]
    """By term, before weights; terms that the run does not have are absent."""
    loss: float
    """Their weighted sum."""
    pairs: Mapping[tuple[str, str], Retrieval]
    """By kind of query and kind of document."""

    @property
    def mean_recall(self) -> float | None:
        """The mean of recall@1 over all pairs; None where there are none."""
        values = [result.recall[1] for result in self.pairs.values()]
        return float(np.mean(values)) if values else None

    def value(self, best_by: str, objective: Objective) -> float | None:
        """What makes one checkpoint better than another, higher being better."""
        if best_by == "recall" or (best_by == "derived" and objective is not Objective.MASKED):
            return self.mean_recall
        return -self.loss

    def record(self) -> dict[str, float | int]:
        """This result as flat numbers, for logs."""
        out: dict[str, float | int] = {"loss": self.loss, **{f"{name}_loss": value for name, value in self.losses.items()}}
        for (query, document), result in self.pairs.items():
            for name, value in result.record().items():
                if name.startswith(("recall_at", "median", "mean_reciprocal", "ndcg")):
                    out[f"{query}_to_{document}/{name}"] = value
        return out


@dataclass(slots=True)
class HeldOut:
    """Held-out samples, packed for a trainer's shape."""

    settings: HeldOutSettings
    config: TrainerConfig
    batches: list[PackedBatch] = field(default_factory=list)
    items: list[list[HeldOutItem]] = field(default_factory=list)
    """What each segment of each batch is."""
    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, settings: HeldOutSettings, config: TrainerConfig) -> "HeldOut":
        """Reads, decodes and packs the samples.

        Raises:
            ValueError: a pattern names no shard, or there are not two samples to compare.
        """
        held = cls(settings, config)
        late = config.late_interaction.resolved(config.batch.resolved()) if config.late_interaction.weight > 0 else None
        packer = Packer(config.batch, window=2, max_edges=config.contrastive.max_edges_per_device, late_interaction=late)
        for sample in read_samples(settings.sources, config.batch, settings.schema, limit=settings.max_samples, skipped=held.skipped):
            held._add(packer, sample)
        while packer.num_pending:
            held._take(packer)
        if held.samples < 2:
            why = ", ".join(f"{count} {kind}" for kind, count in held.skipped.items()) or "the shards are empty"
            raise ValueError(f"held_out.sources: {held.samples} samples could be read ({why}): recall needs at least 2")
        logger.info("held out: %d samples in %d batches", held.samples, len(held.batches))
        return held

    def _add(self, packer: Packer, sample: LabelledSample) -> None:
        def dropped(item: int, error: DecodeError) -> None:
            self.skipped[error.kind] += 1
            logger.warning("%s: %s of sample %s: %s", sample.url, sample.fields[item], sample.key, error)

        bag = decode_bag(sample.items, self.config.batch, self.settings.decode, on_error="drop", on_drop=dropped)
        group = next((group for group in bag.groups if group), 0)
        label = int(group) if group else -1 - self.samples
        described = [
            HeldOutItem(sample.key, sample.fields[item], Modality(kind), label)
            for item, kind in zip(bag.items, bag.modalities, strict=True)
        ]
        if packer.add_decoded(bag, described):
            self.samples += 1
            while packer.ready():
                self._take(packer)

    def _take(self, packer: Packer) -> None:
        batch, tokens = packer.take_with_tokens()
        listed: list[HeldOutItem] = []
        for token in tokens:
            assert isinstance(token, list)
            listed += token
        if len(listed) != batch.segments:
            raise RuntimeError(f"{len(listed)} items make {batch.segments} segments: a batch lost its bags' order")
        self.batches.append(batch)
        self.items.append(listed)

    @property
    def forward_passes(self) -> int:
        """How often an evaluation runs the tower: on items as training corrupts them, where it does, and on whole ones."""
        return len(self.batches) * (1 if self.config.objective is Objective.CONTRASTIVE else 2)

    def evaluate(self, network: Network, device: torch.device, *, bf16: bool = False, dimensions: int | None = None) -> HeldOutResult:
        """Runs the network on the samples, without a gradient.

        Args:
            dimensions: leading values of the vectors that recall compares; None takes all of them.
        """
        objectives = Objectives(self.config)
        world = World()
        sums_K = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        counts_K = torch.zeros_like(sums_K)
        vectors: list[Vectors] = []
        with torch.no_grad():
            for number, batch in enumerate(self.batches):
                layout = BatchLayout.from_batch(batch, device)
                prepared = objectives.prepare(number, layout, 0, world, [layout.num_segments])
                counts_K += objectives.counts(prepared)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                    sums = objectives.sums(network, prepared, world)
                    pooled_SD = sums.pooled_SD
                    if prepared.corruption is not None:  # vectors are of whole items
                        pooled_SD = network.tower.pool(network.tower(layout, None), layout)
                sums_K += sums.values_K()
                shown_SD = pooled_SD.float()[:, : dimensions or pooled_SD.shape[1]]
                vectors.append(torch.nn.functional.normalize(shown_SD, dim=1).cpu().numpy())
        means = torch.where(counts_K > 0, sums_K / counts_K.clamp(min=1), 0.0).tolist()
        weighted = sum(mean * weight for mean, weight in zip(means, objectives.weights_K, strict=True))
        losses = {name: mean for name, mean, weight in zip(TERMS, means, objectives.weights_K, strict=True) if weight}
        return HeldOutResult(losses, weighted, self._pairs(np.concatenate(vectors)))

    def _pairs(self, vectors_ND: Vectors) -> dict[tuple[str, str], Retrieval]:
        items: Sequence[HeldOutItem] = [item for listed in self.items for item in listed]
        kept = [number for number, vector_D in enumerate(vectors_ND) if np.isfinite(vector_D).all()]
        if len(kept) < len(items):
            logger.warning("%d of %d held-out vectors are not finite: they are left out of recall", len(items) - len(kept), len(items))
        kinds = [self.settings.kinds.get(items[n].field, str(items[n].modality)) for n in kept]
        return retrieve_between(vectors_ND[kept], kinds, [items[n].label for n in kept])


def take_part(network: Network, config: TrainerConfig, device: torch.device, forward_passes: int) -> None:
    """Runs a sharded tower on nothing as often as rank 0 runs it in an evaluation, which needs this rank's slices of the blocks."""
    layout = BatchLayout.empty(config.batch.resolved(), device)
    with torch.no_grad():
        for _ in range(forward_passes):
            network.tower(layout, None)
