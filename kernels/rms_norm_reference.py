"""RMSNorm with a residual, in plain torch: `sum = x + residual`, `y = gain * sum / sqrt(mean(sum^2) + eps)`.

Rows are worked on in blocks that stay in the second-level cache; statistics are fp32 or wider.
Legend: P positions, D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.kernels import compiled

EPS = compiled.EPS

_BLOCK_VALUES = 1 << 18
"""Values of a block: 1 MiB of fp32."""


def rms_norm_reference(
    x_PD: Tensor, gain_D: Tensor, residual_PD: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The normalised rows, in `out_dtype` (the sum's by default), and the sum that the residual stream goes on with."""
    if residual_PD is None:
        y_PD, _ = _RmsNorm.apply(x_PD, gain_D, None, out_dtype or x_PD.dtype)
        return y_PD, x_PD
    y_PD, total_PD = _RmsNorm.apply(x_PD, gain_D, residual_PD, out_dtype or torch.promote_types(x_PD.dtype, residual_PD.dtype))
    return y_PD, total_PD


class _RmsNorm(torch.autograd.Function):
    """Addition, statistic and product block by block, and backwards likewise: autograd's own graph would keep and re-read five intermediates,
    and add the sum's gradient in a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, gain_D: Tensor, residual_PD: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        ctx.dtypes = x_PD.dtype, None if residual_PD is None else residual_PD.dtype
        if compiled.fuses(x_PD, *([] if residual_PD is None else [residual_PD])):
            y_PD, total_PD, inverse_P1 = compiled.run(compiled.rms_norm_forward, x_PD, residual_PD, gain_D, dtype)
            total_PD = x_PD if residual_PD is None else total_PD
            ctx.save_for_backward(total_PD, gain_D, inverse_P1)
            return y_PD, None if residual_PD is None else total_PD
        width = x_PD.shape[-1]
        total_PD = x_PD
        if residual_PD is not None:
            total_PD = torch.empty(x_PD.shape, dtype=torch.promote_types(x_PD.dtype, residual_PD.dtype), device=x_PD.device)
        wide = torch.promote_types(total_PD.dtype, torch.float32)
        y_PD = torch.empty(x_PD.shape, dtype=dtype, device=x_PD.device)
        inverse_P1 = torch.empty((x_PD.shape[0], 1), dtype=wide, device=x_PD.device)
        residuals_PD = x_PD if residual_PD is None else residual_PD
        for x, residual, total, y, inverse in row_blocks(width, x_PD, residuals_PD, total_PD, y_PD, inverse_P1):
            if residual_PD is not None:
                torch.add(residual.to(total.dtype), x.to(total.dtype), out=total)
            total = total.to(wide)
            norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
            torch.rsqrt(norm.square_().div_(width).add_(EPS), out=inverse)
            normed = total * inverse
            y.copy_(normed.mul_(gain_D))
        ctx.save_for_backward(total_PD, gain_D, inverse_P1)
        return y_PD, None if residual_PD is None else total_PD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        dy_PD, *dtotals = gradients
        total_PD, gain_D, inverse_P1 = ctx.saved_tensors
        dtype, residual_dtype = ctx.dtypes
        width, wide = total_PD.shape[-1], inverse_P1.dtype
        dtotal_PD = dtotals[0] if residual_dtype is not None else None
        if compiled.fuses(total_PD, dy_PD):
            dsum_PD, dx_PD, dgain_D = compiled.run(compiled.rms_norm_backward, total_PD, inverse_P1, gain_D, dy_PD, dtotal_PD, dtype)
            return dx_PD, dgain_D.to(gain_D.dtype), None if residual_dtype is None else dsum_PD.to(residual_dtype), None
        dsum_PD = torch.empty_like(total_PD)
        dgain_D = torch.zeros_like(gain_D, dtype=wide)
        wide_gain_D = gain_D.to(wide)
        besides_PD = dy_PD if dtotal_PD is None else dtotal_PD
        for total, dy, besides, inverse, dsum in row_blocks(width, total_PD, dy_PD, besides_PD, inverse_P1, dsum_PD):
            normed, dy = total.to(wide) * inverse, dy.to(wide)
            product = dy * normed
            # Sums along either side as matrix-vector products: several times faster than reductions (CPU).
            dgain_D += torch.mv(product.t(), product.new_ones(product.shape[0]))
            along = torch.mv(product, wide_gain_D).div_(width)[:, None]
            # dsum = inverse * (gain * dy - normed * mean(gain * dy * normed)), and what came along the residual stream
            torch.mul(dy, wide_gain_D, out=product)
            product.addcmul_(normed, along, value=-1)
            dsum.copy_(product.mul_(inverse) if dtotal_PD is None else torch.addcmul(besides.to(wide), product, inverse))
        dresidual_PD = None if residual_dtype is None else dsum_PD.to(residual_dtype)
        return dsum_PD.to(dtype), dgain_D.to(gain_D.dtype), dresidual_PD, None


def row_blocks(width: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of every tensor, in blocks of about `_BLOCK_VALUES / width` rows."""
    rows = max(1, _BLOCK_VALUES // width)
    return zip(*(torch.split(column, rows) for column in columns), strict=True)
