"""Pooled mean: one vector per segment.

Bytes moved: the states once, `S D` out; backward writes the states' gradient once. Bandwidth bounds it.
Legend: P positions, S segments, D width.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.mean_pool_reference import mean_pool_reference


def mean_pool(states_PD: Tensor, start_S: Tensor, tokens_S: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The mean of each segment's states past its prefix.

    Args:
        start_S: position of each segment's prefix.
        tokens_S: positions that count, from the one after the prefix on; a segment of none pools to zeros.

    Returns:
        `[S, D]`, fp32 or wider.
    """
    choose("mean_pool", impl, states_PD.device)
    return mean_pool_reference(states_PD, start_S, tokens_S)
