"""Patch and tube embedding in plain torch.

Legend: N patches, V values of a patch, D width.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from treadle.kernels.tape_reference import Patches, patch_bytes, patch_inside

HALF_RANGE = 255.0
"""A byte x is the pixel `(2 x - 255) / 255`, in [-1, 1]."""


def patch_embed_reference(tape: Tensor, patches: Patches, weight_DV: Tensor) -> Tensor:
    """`pixels @ weight.T`, `[N, D]`: pixels scaled to [-1, 1], zeros outside the picture; no bias.

    The product takes `2 x - 255`, an odd integer of 8 bits that bf16 holds exactly, and is divided afterwards.
    """
    values_NV = patch_bytes(tape, patches).to(weight_DV.dtype).mul_(2).sub_(255)
    inside = patch_inside(patches)
    if inside is not None:
        values_NV = torch.where(inside, values_NV, 0)
    return linear(values_NV, weight_DV) / HALF_RANGE
