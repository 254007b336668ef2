"""SwiGLU in plain torch: `silu(gate) * up`, the two halves of one matrix product.

Legend: P positions, F inner width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from treadle.kernels import compiled
from treadle.kernels.rms_norm_reference import row_blocks


def swiglu_reference(gate_up_P2F: Tensor) -> Tensor:
    """`silu(x[:, :F]) * x[:, F:]`, `[P, F]`."""
    out_PF: Tensor = _SwiGlu.apply(gate_up_P2F)
    return out_PF


class _SwiGlu(torch.autograd.Function):
    """Keeps the product's input alone. The derivative of silu is torch's own op, which works in fp32 inside whatever the type."""

    @staticmethod
    def forward(ctx: Any, x_P2F: Tensor) -> Tensor:
        ctx.save_for_backward(x_P2F)
        if compiled.fuses(x_P2F):
            fused_PF: Tensor = compiled.run(compiled.swiglu_forward, x_P2F)
            return fused_PF
        inner = x_P2F.shape[-1] // 2
        out_PF = torch.empty((x_P2F.shape[0], inner), dtype=x_P2F.dtype, device=x_P2F.device)
        for x, out in row_blocks(2 * inner, x_P2F, out_PF):
            torch.mul(silu(x[:, :inner]), x[:, inner:], out=out)
        return out_PF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (dout_PF,) = gradients
        (x_P2F,) = ctx.saved_tensors
        if compiled.fuses(x_P2F, dout_PF):
            fused_P2F: Tensor = compiled.run(compiled.swiglu_backward, x_P2F, dout_PF)
            return fused_P2F
        inner = x_P2F.shape[-1] // 2
        dx_P2F = torch.empty_like(x_P2F)
        for x, dout, dx in row_blocks(2 * inner, x_P2F, dout_PF, dx_P2F):
            gate, up = x[:, :inner], x[:, inner:]
            torch.mul(dout, silu(gate), out=dx[:, inner:])
            torch.ops.aten.silu_backward.grad_input(dout * up, gate, grad_input=dx[:, :inner])
        return dx_P2F
