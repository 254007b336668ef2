"""Byte cross-entropy in plain torch.

Legend: T covered positions, V classes.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def byte_cross_entropy_reference(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """The sum over positions of `log(sum(exp(logits))) - logits[target]`, a scalar in fp32 or wider; negative targets count for nothing."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return cross_entropy(logits_TV.to(wide), target_T.clamp_min(-1), ignore_index=-1, reduction="sum")
