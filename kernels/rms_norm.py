"""RMSNorm with a residual: the block's addition and normalisation in one pass.

Bytes moved per value: read x and residual, write y and sum; backward reads dy, sum and the sum's gradient, writes dx. Bandwidth bounds it.
Legend: P positions, D width.
"""

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.rms_norm_reference import rms_norm_reference


def rms_norm(
    x_PD: Tensor,
    gain_D: Tensor,
    residual_PD: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """`(y, sum)`: `sum = x + residual` (x where there is none), `y = gain * sum / sqrt(mean(sum^2) + 1e-6)`.

    Args:
        out_dtype: dtype of `y`; by default that of the sum.
    """
    choose("rms_norm", impl, x_PD.device)
    return rms_norm_reference(x_PD, gain_D, residual_PD, out_dtype)
