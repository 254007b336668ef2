"""The contrastive term: this rank's segments as anchors against the world's segments as candidates.

The sum is a numerator and the count its denominator; both are summed over micro-batches and ranks before dividing.

Suffixes: S segments of this rank, N of the world, D hidden, G temperature groups.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from treadle.kernels.pair_loss import PairRows, pair_loss
from treadle.model.config import MAX_INVERSE_TEMPERATURE, Contrastive
from treadle.model.layout import BatchLayout
from treadle.model.relations import anchors_with_pairs, named_pairs, pair_form
from treadle.shape import Negatives


class Temperatures(nn.Module):
    """A learnable inverse temperature and bias per temperature group, in fp32 and without decay."""

    def __init__(self, groups: int, inverse_temperature: float, bias: float) -> None:
        super().__init__()
        self.log_scale_G = nn.Parameter(torch.full((groups,), math.log(inverse_temperature), dtype=torch.float32))
        """Logarithm of each group's inverse temperature."""
        self.bias_G = nn.Parameter(torch.full((groups,), bias, dtype=torch.float32))

    @torch.no_grad()
    def clamp_(self) -> None:
        """Holds the inverse temperatures at most at 100.

        After the update, never in the loss: a clamp there would stop the gradient that leads back.
        """
        self.log_scale_G.clamp_(max=math.log(MAX_INVERSE_TEMPERATURE))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The segments of one micro-batch on every rank, rank by rank."""

    count: int
    first: int
    """Where this rank's segments begin among them."""
    group_N: Tensor
    """int64 groups; 0: none."""


def ambient_weight(config: Contrastive) -> float:
    """Repelling weight of a pair that nothing names, as fp32 holds it; 0 under NAMED."""
    return 0.0 if config.negatives is Negatives.NAMED else float(np.float32(config.ambient_repulsion_weight))


def _pairs(layout: BatchLayout, candidates: Candidates, config: Contrastive) -> PairRows:
    own_S = torch.arange(layout.num_segments, device=layout.device)
    named = named_pairs(layout, own_S, layout.num_segments, own_S + candidates.first)
    return PairRows(own_S + candidates.first, layout.group_S, candidates.group_N, named, ambient_weight(config))


def contrastive_count(layout: BatchLayout, candidates: Candidates, config: Contrastive) -> Tensor:
    """int64 scalar: this rank's anchors with any scored pair, or under RANKED with an attracting and a repelling one. Reads no vector."""
    return anchors_with_pairs(_pairs(layout, candidates, config), pair_form(config.pair_loss)).sum()


def contrastive_sum(
    pooled_SD: Tensor, pooled_ND: Tensor, layout: BatchLayout, candidates: Candidates, temperatures: Temperatures, config: Contrastive
) -> Tensor:
    """The sum of this rank's anchors' losses, averaged over matryoshka widths.

    Args:
        pooled_SD: this rank's pooled vectors, not normalised.
        pooled_ND: the world's, gathered differentiably; on one rank the same tensor.
        config: resolved.
    """
    return pair_loss(
        pooled_SD,
        pooled_ND,
        temperatures.log_scale_G,
        temperatures.bias_G,
        layout.temperature_group_S,
        _pairs(layout, candidates, config),
        form=pair_form(config.pair_loss),
        widths=config.matryoshka_dimensions,
    )
