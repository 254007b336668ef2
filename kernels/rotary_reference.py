"""q/k-norm with axial rotary, in plain torch.

Each head vector is RMS-normalised over its 64 channels and scaled by a gain that all heads share; then channels `2i` and `2i + 1`
turn together by the angle of pair `i`. As complex numbers that is one product per pair, so a turn is `e^{i angle}`.
Legend: P positions, H heads, K head width, A = K / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.rms_norm_reference import EPS, row_blocks

Triple = tuple[Tensor, Tensor, Tensor]


def rotary_reference(qkv_P3HK: Tensor, q_gain_K: Tensor, k_gain_K: Tensor, turn_PA: Tensor) -> Triple:
    """The normalised and turned queries and keys, and the values as they are, `[P, H, K]` each, in the dtype of `qkv`."""
    q_PHK, k_PHK, v_PHK = _QkNormRotary.apply(qkv_P3HK, torch.stack([q_gain_K, k_gain_K]), turn_PA)
    return q_PHK, k_PHK, v_PHK


def _turn(x_PHK: Tensor, turn_PA: Tensor, out_PHK: Tensor) -> None:
    """Writes contiguous `x`, each pair of channels turned, into `out`."""
    if out_PHK.dtype is x_PHK.dtype:
        torch.mul(_pairs(x_PHK), turn_PA[:, None, :], out=_pairs(out_PHK))
    else:
        out_PHK.copy_(torch.view_as_real(_pairs(x_PHK) * turn_PA[:, None, :]).view(x_PHK.shape))


def _pairs(x_PHK: Tensor) -> Tensor:
    return torch.view_as_complex(x_PHK.view(*x_PHK.shape[:-1], x_PHK.shape[-1] // 2, 2))


class _QkNormRotary(torch.autograd.Function):
    """Norm and turn of queries and keys, in fp32 or wider; keeps the projections and their norms alone.

    The values pass through so that the three gradients are written into one buffer instead of added up.
    """

    @staticmethod
    def forward(ctx: Any, qkv_P3HK: Tensor, gain_2K: Tensor, turn_PA: Tensor) -> Triple:
        positions, _, heads, width = qkv_P3HK.shape
        wide = torch.promote_types(qkv_P3HK.dtype, torch.float32)
        out_3PHK = torch.empty((3, positions, heads, width), dtype=qkv_P3HK.dtype, device=qkv_P3HK.device)
        inverse_P2H1 = torch.empty((positions, 2, heads, 1), dtype=wide, device=qkv_P3HK.device)
        for qkv, inverse, turn, *outs in row_blocks(heads * width, qkv_P3HK, inverse_P2H1, turn_PA, *out_3PHK.unbind(0)):
            for part in (0, 1):
                x = qkv[:, part].to(wide)
                norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
                torch.rsqrt(norm.square_().div_(width).add_(EPS), out=inverse[:, part])
                normed = x * inverse[:, part]
                _turn(normed.mul_(gain_2K[part]), turn, outs[part])
            outs[2].copy_(qkv[:, 2])
        ctx.save_for_backward(qkv_P3HK, gain_2K, turn_PA, inverse_P2H1)
        q_PHK, k_PHK, v_PHK = out_3PHK.unbind(0)
        return q_PHK, k_PHK, v_PHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_P3HK, gain_2K, turn_PA, inverse_P2H1 = ctx.saved_tensors
        _, _, heads, width = qkv_P3HK.shape
        wide = inverse_P2H1.dtype
        wide_gain_2K = gain_2K.to(wide)
        dqkv_P3HK = torch.empty_like(qkv_P3HK)
        dgain_2K = torch.zeros_like(wide_gain_2K)
        for qkv, inverse, turn, dqkv, *douts in row_blocks(
            heads * width, qkv_P3HK, inverse_P2H1, turn_PA.conj().resolve_conj(), dqkv_P3HK, *gradients
        ):
            for part in (0, 1):
                dy = torch.empty(douts[part].shape, dtype=wide, device=qkv.device)
                _turn(douts[part].to(wide).contiguous(), turn, dy)
                normed = qkv[:, part] * inverse[:, part]
                product = dy * normed
                rows = product.view(-1, width)
                dgain_2K[part] += torch.mv(rows.t(), rows.new_ones(rows.shape[0]))
                along = torch.mv(rows, wide_gain_2K[part]).div_(width).view(*product.shape[:-1], 1)
                dy.mul_(wide_gain_2K[part]).addcmul_(normed, along, value=-1)
                torch.mul(dy, inverse[:, part], out=dqkv[:, part])
            dqkv[:, 2] = douts[2]
        return dqkv_P3HK, dgain_2K.to(gain_2K.dtype), None
