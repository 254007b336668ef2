"""SwiGLU in plain torch: `silu(gate) * up`, the two halves of one matrix product.

Legend: P positions, F inner width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from treadle.kernels.rms_norm_reference import row_blocks


def swiglu_reference(gate_up_P2F: Tensor) -> Tensor:
    """`silu(x[:, :F]) * x[:, F:]`, `[P, F]`."""
    out_PF: Tensor = _SwiGlu.apply(gate_up_P2F)
    return out_PF


class _SwiGlu(torch.autograd.Function):
    """Keeps the product's input alone, and takes one exponential in the backward pass where autograd's graph takes two."""

    @staticmethod
    def forward(ctx: Any, x_P2F: Tensor) -> Tensor:
        ctx.save_for_backward(x_P2F)
        inner = x_P2F.shape[-1] // 2
        out_PF = torch.empty((x_P2F.shape[0], inner), dtype=x_P2F.dtype, device=x_P2F.device)
        for x, out in row_blocks(2 * inner, x_P2F, out_PF):
            torch.mul(silu(x[:, :inner]), x[:, inner:], out=out)
        return out_PF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (dout_PF,) = gradients
        (x_P2F,) = ctx.saved_tensors
        inner = x_P2F.shape[-1] // 2
        wide = torch.promote_types(x_P2F.dtype, torch.float32)
        dx_P2F = torch.empty_like(x_P2F)
        for x, dout, dx in row_blocks(2 * inner, x_P2F, dout_PF, dx_P2F):
            gate, up, dout = x[:, :inner].to(wide), x[:, inner:].to(wide), dout.to(wide)
            share = torch.sigmoid(gate)
            active = gate * share
            torch.mul(dout, active, out=dx[:, inner:])
            # d silu / d gate = share + silu * (1 - share)
            share.addcmul_(active, 1 - share).mul_(up)
            torch.mul(share, dout, out=dx[:, :inner])
        return dx_P2F
