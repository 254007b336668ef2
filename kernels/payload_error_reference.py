"""Masked payload error in plain torch: how far predictions are from each position's own standardised payload.

Targets are `(x - mean) / sqrt(variance + 1e-6)` of the payload as decoded (bytes as 0 to 255, samples as they are), population variance,
over the values inside the extent; values outside count neither there nor in the error.
Legend: N positions, V values of a whole payload.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.tape_reference import Chunks, Patches, chunk_inside, chunk_samples, patch_bytes, patch_inside

EPS = 1e-6


def payload_error_reference(prediction_NV: Tensor, tape: Tensor, places: Patches | Chunks) -> Tensor:
    """The sum over positions of the mean squared error, a scalar in fp32 or wider."""
    wide = torch.promote_types(prediction_NV.dtype, torch.float32)
    if isinstance(places, Patches):
        values_NV, inside = patch_bytes(tape, places).to(wide), patch_inside(places)
    else:
        values_NV, inside = chunk_samples(tape, places).to(wide), chunk_inside(places)
    total: Tensor = _StandardisedError.apply(prediction_NV, values_NV, inside)
    return total


def standardised(values_NV: Tensor, inside: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's standardised values, zeros outside, and the number of its values inside, `[N, 1]`."""
    if inside is None:
        count_N1 = torch.full((values_NV.shape[0], 1), values_NV.shape[1], dtype=values_NV.dtype, device=values_NV.device)
        centred = values_NV - values_NV.mean(-1, keepdim=True)
    else:
        # A place without a value inside divides nothing by one.
        count_N1 = inside.sum(-1, keepdim=True).clamp_(min=1).to(values_NV.dtype)
        shown = torch.where(inside, values_NV, 0)
        centred = torch.where(inside, shown - shown.sum(-1, keepdim=True) / count_N1, 0)
    variance_N1 = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).square_() / count_N1
    return centred.mul_(variance_N1.add_(EPS).rsqrt_()), count_N1


class _StandardisedError(torch.autograd.Function):
    """Keeps the scaled difference alone, which is the gradient."""

    @staticmethod
    def forward(ctx: Any, prediction_NV: Tensor, values_NV: Tensor, inside: Tensor | None) -> Tensor:
        target_NV, count_N1 = standardised(values_NV, inside)
        difference = prediction_NV - target_NV
        if inside is not None:
            difference = torch.where(inside, difference, 0)
        error_N: Tensor = torch.linalg.vector_norm(difference, dim=-1).square_() / count_N1[:, 0]
        ctx.save_for_backward(difference.mul_(2 / count_N1).to(prediction_NV.dtype))
        return error_N.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (dtotal,) = gradients
        (slope_NV,) = ctx.saved_tensors
        return slope_NV * dtotal.to(slope_NV.dtype), None, None
