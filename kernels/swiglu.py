"""SwiGLU: the gate of the block's inner layer.

Bytes moved: 3 F elements a position forward, 5 F backward. Bandwidth bounds it.
Legend: P positions, F inner width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.swiglu_reference import swiglu_reference

register("swiglu")


def swiglu(gate_up_P2F: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension, `[P, F]`."""
    if choose("swiglu", impl, gate_up_P2F.device, gate_up_P2F.dtype) == "reference":
        return swiglu_reference(gate_up_P2F)
    out_PF: Tensor = _TritonSwiGlu.apply(gate_up_P2F)
    return out_PF


class _TritonSwiGlu(torch.autograd.Function):
    """Keeps the product's input alone."""

    @staticmethod
    def forward(ctx: Any, x_P2F: Tensor) -> Tensor:
        from treadle.kernels.swiglu_kernels import SWIGLU_FWD

        x_P2F = unit_stride(x_P2F)
        ctx.save_for_backward(x_P2F)
        positions, inner = x_P2F.shape[0], x_P2F.shape[1] // 2
        out_PF = torch.empty((positions, inner), dtype=x_P2F.dtype, device=x_P2F.device)
        SWIGLU_FWD.launch(x_P2F.device, lambda b: (positions, -(-inner // b["BLOCK_F"])), x_P2F, out_PF, x_P2F.stride(0), F=inner)
        return out_PF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from treadle.kernels.swiglu_kernels import SWIGLU_BWD

        (dout_PF,) = gradients
        (x_P2F,) = ctx.saved_tensors
        dout_PF = unit_stride(dout_PF)
        positions, inner = dout_PF.shape
        dx_P2F = torch.empty(x_P2F.shape, dtype=x_P2F.dtype, device=x_P2F.device)
        SWIGLU_BWD.launch(
            x_P2F.device,
            lambda b: (positions, -(-inner // b["BLOCK_F"])),
            x_P2F,
            dout_PF,
            dx_P2F,
            x_P2F.stride(0),
            dout_PF.stride(0),
            F=inner,
        )
        return dx_P2F
