"""Byte cross-entropy: the text term's numerator, at covered positions alone.

Bytes moved: the logits once forward, twice backward. Bandwidth bounds it; the logits' own product comes before.
Legend: T covered positions, V classes.
"""

from torch import Tensor

from treadle.kernels.byte_cross_entropy_reference import byte_cross_entropy_reference
from treadle.kernels.dispatch import Impl, choose


def byte_cross_entropy(logits_TV: Tensor, target_T: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The summed cross-entropy of `target_T` (int64, below V): a scalar in fp32 or wider, 0 for no positions."""
    choose("byte_cross_entropy", impl, logits_TV.device)
    return byte_cross_entropy_reference(logits_TV, target_T)
