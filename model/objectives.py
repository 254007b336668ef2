"""Which terms a step has, and their numerators and world denominators.

Every term is `numerator / denominator`, both summed over micro-batches and ranks before dividing, so that nothing depends on how items
are dealt. Denominators are counts, known before any forward pass: the step sums them over the world once, then back-propagates
`sum_k weight_k numerator_k / denominator_k`, and gradients are summed, never averaged. A term with denominator 0 is 0.

Suffixes: K terms in the order of `TERMS`; S segments of this rank, N of the world's same micro-batch; P positions; D hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.model.choices import choices_count, choices_sum
from treadle.model.config import TrainerConfig
from treadle.model.contrastive import Candidates, contrastive_count, contrastive_sum
from treadle.model.corruption import Corruption, corrupt
from treadle.model.late_interaction import late_interaction_count, late_interaction_sum
from treadle.model.layout import BatchLayout
from treadle.model.masked import masked_counts, masked_sums
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.shape import Modality, Objective

TERMS = ("text", "image", "video", "audio", "contrastive", "late_interaction", "choices")
"""The first four are the masked terms, in the order of `Modality`."""

CONTRASTIVE, LATE_INTERACTION, CHOICES = (TERMS.index(term) for term in ("contrastive", "late_interaction", "choices"))


def term_weights(config: TrainerConfig) -> tuple[float, ...]:
    """The weight of every term, in the order of `TERMS`; 0 for one that the run does not have."""
    masking = config.masking.resolved()
    masks = config.objective is not Objective.CONTRASTIVE
    by_modality = (masking.text_weight, masking.image_weight, masking.video_weight, masking.audio_weight)
    return (
        *(w if masks and config.batch.is_live(m) else 0.0 for m, w in zip(Modality, by_modality, strict=True)),
        0.0 if config.objective is Objective.MASKED else 1.0,
        config.late_interaction.weight,
        config.choices.weight,
    )


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch of this rank, on the device, ready to be counted and run."""

    number: int
    """Its number in the step's window."""
    layout: BatchLayout
    corruption: Corruption | None
    candidates: Candidates | None
    """The world's segments of this micro-batch, where pairs are scored."""
    sizes: Sequence[int]
    """How many of them each rank holds."""


class Objectives:
    """The terms of one run."""

    def __init__(self, config: TrainerConfig) -> None:
        self.weights_K = term_weights(config)
        self._masking = config.masking.resolved() if config.objective is not Objective.CONTRASTIVE else None
        self._contrastive = config.contrastive.resolved(config.hidden)
        self._late = config.late_interaction.resolved(config.batch.resolved())
        self._seed = config.seed
        self.scores_pairs = config.objective is not Objective.MASKED
        """Whether ranks exchange pooled vectors."""

    def prepare(self, number: int, layout: BatchLayout, step: int, world: World, sizes: Sequence[int]) -> MicroBatch:
        """Draws the corruption of a micro-batch and learns of the world's candidates (collective where pairs are scored)."""
        corruption = corrupt(layout, self._masking, self._seed, step) if self._masking is not None and layout.num_segments else None
        candidates = None
        if self.scores_pairs:
            group_N = world.gather(layout.group_S, sizes)
            candidates = Candidates(count=sum(sizes), first=sum(sizes[: world.rank]), group_N=group_N)
        return MicroBatch(number, layout, corruption, candidates, sizes)

    def counts(self, batch: MicroBatch) -> Tensor:
        """float64 `[K]`: this rank's denominators of a micro-batch."""
        layout = batch.layout
        counts_K = torch.zeros(len(TERMS), dtype=torch.float64, device=layout.device)
        if not layout.num_segments:
            return counts_K
        if batch.corruption is not None:
            counts_K[: len(Modality)] = masked_counts(layout, batch.corruption)
        if batch.candidates is not None:
            counts_K[CONTRASTIVE] = contrastive_count(layout, batch.candidates, self._contrastive)
        if self.weights_K[LATE_INTERACTION]:
            counts_K[LATE_INTERACTION] = late_interaction_count(layout, self._late, self._contrastive)
        if self.weights_K[CHOICES]:
            counts_K[CHOICES] = choices_count(layout)
        return counts_K

    def sums(self, network: Network, batch: MicroBatch, world: World) -> "TermSums":
        """Runs the tower on a micro-batch: this rank's numerators, with their graph (collective where pairs are scored)."""
        layout = batch.layout
        numerators: dict[str, Tensor] = {}
        if not layout.num_segments:
            # Nothing to run, but the others' backward passes will ask this rank for its share of the exchange.
            pooled_SD, root = torch.zeros(0, network.hidden, device=layout.device, requires_grad=self.scores_pairs), None
            if network.runs_when_empty:
                states_PD = network.tower(layout, None)
                pooled_SD, root = network.tower.pool(states_PD, layout), 0 * states_PD.sum()
            if self.scores_pairs and world.size > 1:
                numerators["contrastive"] = tied(pooled_SD.sum(), world.gather(pooled_SD, batch.sizes))
            return TermSums(numerators, pooled_SD.detach(), root)
        states_PD = network.tower(layout, batch.corruption)
        pooled_SD = network.tower.pool(states_PD, layout)
        if batch.corruption is not None:
            for name, weight, value in zip(
                TERMS, self.weights_K, masked_sums(network.heads, states_PD, layout, batch.corruption), strict=False
            ):
                if weight:
                    numerators[name] = value
        with torch.autocast(pooled_SD.device.type, enabled=False):
            if batch.candidates is not None and network.temperatures is not None:
                pooled_ND = world.gather(pooled_SD, batch.sizes)
                value = contrastive_sum(pooled_SD, pooled_ND, layout, batch.candidates, network.temperatures, self._contrastive)
                numerators["contrastive"] = tied(value, pooled_ND) if world.size > 1 else value
            if network.token_head is not None and network.token_temperatures is not None:
                numerators["late_interaction"] = late_interaction_sum(
                    states_PD, network.token_head, layout, network.token_temperatures, self._late, self._contrastive
                )
            if self.weights_K[CHOICES]:
                numerators["choices"] = choices_sum(states_PD, network.heads.text, layout)
        return TermSums(numerators, pooled_SD.detach(), 0 * states_PD.sum() if network.runs_when_empty else None)


@dataclass(slots=True)
class TermSums:
    """Numerators of one micro-batch on this rank, by term; a term that is absent is 0."""

    numerators: dict[str, Tensor]
    pooled_SD: Tensor
    """fp32, without a graph."""
    root: Tensor | None = None
    """A zero on top of all blocks, where collectives run within them: every rank's backward pass takes it along, whatever else it has."""

    def values_K(self) -> Tensor:
        """float64 `[K]`, without a graph."""
        zero = torch.zeros((), dtype=torch.float64, device=self.pooled_SD.device)
        return torch.stack([self.numerators[t].detach().double() if t in self.numerators else zero for t in TERMS])

    def loss(self, scales_K: Tensor) -> Tensor | None:
        """`sum_k scale_k numerator_k`, or None where no term has a graph."""
        parts = [scales_K[k].to(self.numerators[t].dtype) * self.numerators[t] for k, t in enumerate(TERMS) if t in self.numerators]
        parts = [p for p in parts if p.requires_grad] + ([] if self.root is None else [self.root])
        return torch.stack(parts).sum() if parts else None

    def terms(self, weights_K: Sequence[float]) -> Iterator[tuple[str, Tensor]]:
        """What to run backward for each term by itself; with a root, all terms of the run, alike on all ranks."""
        for term, weight in zip(TERMS, weights_K, strict=True):
            numerator = self.numerators.get(term)
            if numerator is not None and not numerator.requires_grad:
                numerator = None
            if self.root is not None and weight:
                numerator = self.root if numerator is None else numerator + self.root.to(numerator.dtype)
            if numerator is not None:
                yield term, numerator


class _Tie(torch.autograd.Function):
    """Ties a value to rows that it may not depend on, so that their backward pass runs on every rank."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", value: Tensor, rows_ND: Tensor) -> Tensor:
        ctx.rows = (rows_ND.shape, rows_ND.dtype, rows_ND.device)  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.rows  # type: ignore[attr-defined]
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)


def tied(value: Tensor, rows_ND: Tensor) -> Tensor:
    """`value`, whose backward pass also sends zeros to `rows_ND`: collectives there run on every rank."""
    answer: Tensor = _Tie.apply(value, rows_ND)
    return answer
