"""RMSNorm with a residual: the block's addition and normalisation in one pass.

Bytes moved per value: read x and residual, write y and sum; backward reads dy, sum and the sum's gradient, writes dx. Bandwidth bounds it.
Legend: P positions, D width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.rms_norm_reference import EPS, rms_norm_reference

register("rms_norm")

_LONG_ROW = 2048
"""Widths from which on a row takes more warps."""


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
    dtypes = [x_PD.dtype, gain_D.dtype, *(t for t in (out_dtype, None if residual_PD is None else residual_PD.dtype) if t is not None)]
    if choose("rms_norm", impl, x_PD.device, *dtypes) == "reference":
        return rms_norm_reference(x_PD, gain_D, residual_PD, out_dtype)
    sum_dtype = x_PD.dtype if residual_PD is None else torch.promote_types(x_PD.dtype, residual_PD.dtype)
    if residual_PD is None:
        y_PD: Tensor = _TritonRmsNorm.apply(x_PD, gain_D, out_dtype or sum_dtype)
        return y_PD, x_PD
    pair: tuple[Tensor, Tensor] = _TritonAddRmsNorm.apply(x_PD, residual_PD, gain_D, out_dtype or sum_dtype, sum_dtype)
    return pair


class _TritonRmsNorm(torch.autograd.Function):
    """The norm alone."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, gain_D: Tensor, dtype: torch.dtype) -> Tensor:
        x_PD = unit_stride(x_PD)
        y_PD, _, inverse_P = _forward(x_PD, None, gain_D, dtype, x_PD.dtype)
        ctx.save_for_backward(x_PD, gain_D, inverse_P)
        return y_PD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_PD, gain_D, inverse_P = ctx.saved_tensors
        dx_PD, _, dgain_D = _backward(x_PD, gain_D, inverse_P, gradients[0], None, x_PD.dtype, None)
        return dx_PD, dgain_D, None


class _TritonAddRmsNorm(torch.autograd.Function):
    """Addition and norm; the sum's own gradient joins in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, x_PD: Tensor, residual_PD: Tensor, gain_D: Tensor, dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y_PD, total_PD, inverse_P = _forward(unit_stride(x_PD), unit_stride(residual_PD), gain_D, dtype, sum_dtype)
        ctx.save_for_backward(total_PD, gain_D, inverse_P)
        ctx.dtypes = x_PD.dtype, residual_PD.dtype
        return y_PD, total_PD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total_PD, gain_D, inverse_P = ctx.saved_tensors
        dy_PD, dtotal_PD = gradients
        x_dtype, residual_dtype = ctx.dtypes
        if dy_PD is None:
            if dtotal_PD is None:
                return None, None, None, None, None
            return dtotal_PD.to(x_dtype), dtotal_PD.to(residual_dtype), None, None, None
        dx_PD, dresidual_PD, dgain_D = _backward(total_PD, gain_D, inverse_P, dy_PD, dtotal_PD, x_dtype, residual_dtype)
        return dx_PD, dresidual_PD, dgain_D, None, None


def _forward(
    x_PD: Tensor, residual_PD: Tensor | None, gain_D: Tensor, dtype: torch.dtype, sum_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from treadle.kernels.rms_norm_kernels import RMS_NORM_FWD

    positions, width = x_PD.shape
    y_PD = torch.empty((positions, width), dtype=dtype, device=x_PD.device)
    total_PD = x_PD if residual_PD is None else torch.empty((positions, width), dtype=sum_dtype, device=x_PD.device)
    inverse_P = torch.empty(positions, dtype=torch.float32, device=x_PD.device)
    other_PD = x_PD if residual_PD is None else residual_PD
    RMS_NORM_FWD.launch(
        x_PD.device,
        lambda _: (positions,),
        *(x_PD, other_PD, gain_D.contiguous(), y_PD, total_PD, inverse_P, x_PD.stride(0), other_PD.stride(0), EPS),
        wide=width > _LONG_ROW,
        D=width,
        BLOCK_D=1 << (width - 1).bit_length(),
        HAS_RESIDUAL=residual_PD is not None,
    )
    return y_PD, total_PD, inverse_P


def _backward(
    total_PD: Tensor,
    gain_D: Tensor,
    inverse_P: Tensor,
    dy_PD: Tensor,
    dtotal_PD: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the residual (that of x where they share a dtype, or there is none) and of the gain."""
    from treadle.kernels.partial_sums_kernels import sum_partials
    from treadle.kernels.rms_norm_kernels import RMS_NORM_BWD

    positions, width = total_PD.shape
    device = total_PD.device
    wide = width > _LONG_ROW
    dy_PD = unit_stride(dy_PD)
    dtotal_PD = None if dtotal_PD is None else unit_stride(dtotal_PD)
    dx_PD = torch.empty((positions, width), dtype=x_dtype, device=device)
    both = residual_dtype is not None and residual_dtype is not x_dtype
    dresidual_PD = torch.empty((positions, width), dtype=residual_dtype, device=device) if both else dx_PD
    programs = -(-positions // RMS_NORM_BWD.settings_on(device, wide=wide).blocks["BLOCK_P"])
    dgain_GD = torch.empty((programs, width), dtype=torch.float32, device=device)
    other_PD = dy_PD if dtotal_PD is None else dtotal_PD
    RMS_NORM_BWD.launch(
        device,
        lambda _: (programs,),
        *(total_PD, gain_D.contiguous(), inverse_P, dy_PD, other_PD, dx_PD, dresidual_PD, dgain_GD),
        *(positions, total_PD.stride(0), dy_PD.stride(0), other_PD.stride(0)),
        wide=wide,
        D=width,
        BLOCK_D=1 << (width - 1).bit_length(),
        HAS_DTOTAL=dtotal_PD is not None,
        HAS_RESIDUAL=both,
    )
    return dx_PD, dresidual_PD, sum_partials(dgain_GD, tuple(gain_D.shape), gain_D.dtype)
