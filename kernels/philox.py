"""Philox4x32-10: the draws behind corruption and initial values.

Counter words of a draw: `(draw index, id low, id high, step * 16 + purpose)`, key `(seed low, seed high)`. Integers in and out,
so every implementation answers the same bits.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.philox_reference import Words, philox_reference


def philox4x32(key: tuple[int, int], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, *, impl: Impl = "auto") -> Words:
    """Four 32-bit words per counter.

    Args:
        key: low and high half of the seed.
        c0, c1, c2, c3: integer tensors that broadcast against each other, each taken modulo 2^32.

    Returns:
        Four int64 tensors of the broadcast shape, each value in `[0, 2^32)`.
    """
    choose("philox", impl, c0.device)
    return philox_reference(key, c0, c1, c2, c3)
