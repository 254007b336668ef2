"""Linear maps from states back to what a position holds: bytes, pixels, samples.

Suffixes: N positions, D hidden, V classes or payload values.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treadle.model.embedding import payload_values
from treadle.model.initial import draw_parameter_
from treadle.shape import BatchShape, Modality

BYTES = 256

HEAD_DEVIATION = 0.1
"""Starting deviation of a prediction: states have mean square one, so losses start at those of a guess of nothing."""


class Head(nn.Module):
    """One map without a bias; its parameter is `weight [V, D]`."""

    def __init__(self, hidden: int, values: int, seed: int, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(values, hidden))
        draw_parameter_(self.weight, f"{name}.weight", seed, HEAD_DEVIATION / math.sqrt(hidden))

    def forward(self, states_ND: Tensor) -> Tensor:
        """`[N, V]`"""
        return linear(states_ND, self.weight)


class Heads(nn.Module):
    """The heads of `modalities`, each named as its modality; one that is left out, or not live, does not exist.

    Args:
        name: what the parameters' checkpoint keys begin with.
    """

    text: Head
    """The head over the 256 bytes, of a run that masks text or makes choices."""

    def __init__(self, hidden: int, shape: BatchShape, modalities: Iterable[Modality], seed: int, *, name: str = "heads") -> None:
        super().__init__()
        shape = shape.resolved()
        for modality in sorted(set(modalities)):
            if not shape.is_live(modality):
                raise ValueError(f"Heads: {modality} has no live slice in the batch's shape")
            values = BYTES if modality is Modality.TEXT else payload_values(shape, modality)
            self.add_module(str(modality), Head(hidden, values, seed, f"{name}.{modality}"))

    def of(self, modality: Modality) -> Head | None:
        """The head of a modality, or None."""
        head = self._modules.get(str(modality))
        return head if isinstance(head, Head) else None
