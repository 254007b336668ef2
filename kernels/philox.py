"""Philox4x32-10: the draws behind corruption and initial values.

Counter words of a draw: `(draw index, id low, id high, step * 16 + purpose)`, key `(seed low, seed high)`. Integers in and out,
so every implementation answers the same bits.
"""

import numpy as np
import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register
from treadle.kernels.philox_reference import LOW, Words, philox_reference

register("philox")


def philox4x32(key: tuple[int, int], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, *, impl: Impl = "auto") -> Words:
    """Four 32-bit words per counter.

    Args:
        key: low and high half of the seed.
        c0, c1, c2, c3: integer tensors that broadcast against each other, each taken modulo 2^32.

    Returns:
        Four int64 tensors of the broadcast shape, each value in `[0, 2^32)`.
    """
    if choose("philox", impl, c0.device) == "reference":
        return philox_reference(key, c0, c1, c2, c3)
    from treadle.kernels.philox_kernels import PHILOX

    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    counters = [c.to(torch.int64).expand(shape).contiguous() for c in (c0, c1, c2, c3)]
    words_4N = torch.empty((4, *shape), dtype=torch.int64, device=c0.device)
    count = counters[0].numel()
    PHILOX.launch(c0.device, lambda b: (-(-count // b["BLOCK_N"]),), *counters, words_4N, signed_word(key[0]), signed_word(key[1]), count)
    w0, w1, w2, w3 = words_4N.unbind(0)
    return w0, w1, w2, w3


def signed_word(word: int) -> int:
    """The int32 of the same bits as a uint32: one type of argument whatever the seed."""
    word &= LOW
    return word - 2**32 if word >= 2**31 else word
