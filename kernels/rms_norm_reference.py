"""RMSNorm with a residual, in plain torch: `sum = x + residual`, `y = gain * sum / sqrt(mean(sum^2) + eps)`.

Rows are worked on in blocks that stay in the second-level cache; statistics are fp32 or wider.
Legend: P positions, D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6

_BLOCK_VALUES = 1 << 18
"""Values of a block: 1 MiB of fp32."""


def rms_norm_reference(
    x_PD: Tensor, gain_D: Tensor, residual_PD: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The normalised rows, in `out_dtype` (the sum's by default), and the sum that the residual stream goes on with."""
    total_PD = x_PD if residual_PD is None else residual_PD + x_PD
    y_PD: Tensor = _RmsNorm.apply(total_PD, gain_D, out_dtype or total_PD.dtype)
    return y_PD, total_PD


class _RmsNorm(torch.autograd.Function):
    """One pass for the statistic and one for the product; autograd's own graph would keep and re-read five intermediates."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, gain_D: Tensor, dtype: torch.dtype) -> Tensor:
        width = x_PD.shape[-1]
        wide = torch.promote_types(x_PD.dtype, torch.float32)
        y_PD = torch.empty(x_PD.shape, dtype=dtype, device=x_PD.device)
        inverse_P1 = torch.empty((x_PD.shape[0], 1), dtype=wide, device=x_PD.device)
        for x, y, inverse in row_blocks(width, x_PD, y_PD, inverse_P1):
            x = x.to(wide)
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            torch.rsqrt(norm.square_().div_(width).add_(EPS), out=inverse)
            torch.mul(x * inverse, gain_D, out=y)
        ctx.save_for_backward(x_PD, gain_D, inverse_P1)
        return y_PD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy_PD,) = gradients
        x_PD, gain_D, inverse_P1 = ctx.saved_tensors
        width, wide = x_PD.shape[-1], inverse_P1.dtype
        dx_PD = torch.empty_like(x_PD)
        dgain_D = torch.zeros_like(gain_D, dtype=wide)
        wide_gain_D = gain_D.to(wide)
        for x, dy, inverse, dx in row_blocks(width, x_PD, dy_PD, inverse_P1, dx_PD):
            normed, dy = x.to(wide) * inverse, dy.to(wide)
            product = dy * normed
            # Sums along either side as matrix-vector products: several times faster than reductions (CPU).
            dgain_D += torch.mv(product.t(), product.new_ones(product.shape[0]))
            along = torch.mv(product, wide_gain_D).div_(width)[:, None]
            # dx = inverse * (gain * dy - normed * mean(gain * dy * normed))
            torch.mul(dy, wide_gain_D, out=product)
            torch.mul(product.addcmul_(normed, along, value=-1), inverse, out=dx)
        return dx_PD, dgain_D.to(gain_D.dtype), None


def row_blocks(width: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, in blocks of about `_BLOCK_VALUES / width` rows."""
    rows = max(1, _BLOCK_VALUES // width)
    return zip(*(torch.split(column, rows) for column in columns), strict=True)
