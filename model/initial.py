"""Initial values: keyed draws by parameter name, so that a run's start depends on its seed and names alone.

Element `4 b + j` of a parameter takes word pair `j // 2` of the draw with counter words `(b, id low, id high, INIT)` and key (seed low,
seed high), `id` being the 64-bit BLAKE2b hash (little endian) of the parameter's name. A pair `(w, v)` of words makes two normal values
by Box and Muller: `sqrt(-2 log((w + 1/2) / 2^32))` times the cosine and the sine of `2 pi v / 2^32`. All in float64 on the CPU, then cast:
the device that trains does not matter.
"""

import math
from hashlib import blake2b

import torch
from torch import Tensor, nn

from treadle.kernels.philox import philox4x32

INIT = 3
"""Purpose of an initial value's draw; step 0."""

_BLOCK = 1 << 15
"""Draws made at once: all their words stay in the second-level cache."""


def seed_key(seed: int) -> tuple[int, int]:
    """The Philox key (low, high) of a 64-bit seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def name_id(name: str) -> int:
    """The 64-bit id that a parameter's name draws under."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def keyed_normal(name: str, count: int, seed: int) -> Tensor:
    """`count` standard normal values of the parameter `name`, float64 on the CPU."""
    identity = name_id(name)
    low, high, purpose = (torch.tensor(v) for v in (identity & 0xFFFFFFFF, identity >> 32, INIT))
    values = torch.empty(-(-count // 4), 4, dtype=torch.float64)
    for first in range(0, len(values), _BLOCK):
        block = values[first : first + _BLOCK]
        words = philox4x32(seed_key(seed), torch.arange(first, first + len(block)), low, high, purpose)
        for pair in (0, 2):
            radius = words[pair].double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
            angle = words[pair + 1].double().mul_(2 * math.pi * 2.0**-32)
            block[:, pair] = radius * angle.cos()
            block[:, pair + 1] = radius * angle.sin()
    return values.view(-1)[:count]


@torch.no_grad()
def draw_parameter_(parameter: nn.Parameter, name: str, seed: int, deviation: float) -> None:
    """Fills a parameter with normal values of standard deviation `deviation`, drawn under its full name (its checkpoint key).

    A parameter on the meta device has a size alone, and stays so.
    """
    if parameter.is_meta:
        return
    parameter.copy_(keyed_normal(name, parameter.numel(), seed).mul_(deviation).view(parameter.shape))
