"""Philox4x32-10 in plain torch: every random draw of a step is a pure function of what it is drawn for.

Words are uint32 values held in int64 tensors; a product of two of them wraps in int64, which leaves all 64 bits right.
Formula source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants of Random123.
"""

import numpy as np
import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
LOW = 0xFFFFFFFF
ROUNDS = 10

_BLOCK = 1 << 15
"""Counters worked on at once: four int64 words and two products of this many stay in the second-level cache."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_reference(key: tuple[int, int], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Words:
    """Four words per counter; `c0` to `c3` broadcast against each other and are taken modulo 2^32."""
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    flat = [c.to(torch.int64).expand(shape).reshape(-1) for c in (c0, c1, c2, c3)]
    if flat[0].numel() <= _BLOCK:
        words = _rounds(key, flat)
    else:
        blocks = [_rounds(key, list(block)) for block in zip(*(torch.split(c, _BLOCK) for c in flat), strict=True)]
        words = [torch.cat(column) for column in zip(*blocks, strict=True)]
    w0, w1, w2, w3 = (w.reshape(shape) for w in words)
    return w0, w1, w2, w3


def _rounds(key: tuple[int, int], counters: list[Tensor]) -> list[Tensor]:
    x0, x1, x2, x3 = (c & LOW for c in counters)
    k0, k1 = key[0] & LOW, key[1] & LOW
    for _ in range(ROUNDS):
        product_0, product_1 = x0 * MULTIPLIER_0, x2 * MULTIPLIER_1
        # The shift is arithmetic: the mask drops the copies of the sign bit.
        x0 = (product_1 >> 32).bitwise_and_(LOW).bitwise_xor_(x1).bitwise_xor_(k0)
        x2 = (product_0 >> 32).bitwise_and_(LOW).bitwise_xor_(x3).bitwise_xor_(k1)
        x1 = product_1.bitwise_and_(LOW)
        x3 = product_0.bitwise_and_(LOW)
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return [x0, x1, x2, x3]
