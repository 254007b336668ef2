"""q/k-norm with axial rotary, in plain torch.

Each head vector is RMS-normalised over its 64 channels and scaled by a gain that all heads share; then channels `2i` and `2i + 1`
turn together by the angle of pair `i`. As complex numbers that is one product per pair, so a turn is `e^{i angle}`.
Legend: P positions, H heads, K head width, A = K / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels import compiled
from treadle.kernels.rms_norm_reference import EPS, row_blocks

Triple = tuple[Tensor, Tensor, Tensor]


def rotary_reference(qkv_P3HK: Tensor, q_gain_K: Tensor, k_gain_K: Tensor, turn_PA: Tensor) -> Triple:
    """The normalised and turned queries and keys, and the values as they are, `[P, H, K]` each, in the dtype of `qkv`."""
    q_PHK, k_PHK, v_PHK = _QkNormRotary.apply(qkv_P3HK, torch.stack([q_gain_K, k_gain_K]), turn_PA)
    return q_PHK, k_PHK, v_PHK


def _turn_(x_NHK: Tensor, turn_NA: Tensor) -> None:
    """Turns each pair of channels of contiguous `x`, whose first dimension is the turn's, in place."""
    pairs = torch.view_as_complex(x_NHK.view(*x_NHK.shape[:-1], x_NHK.shape[-1] // 2, 2))
    pairs.mul_(turn_NA.view(turn_NA.shape[0], *[1] * (pairs.ndim - 2), turn_NA.shape[1]))


def _fuses(qkv_P3HK: Tensor) -> bool:
    return qkv_P3HK.dtype is torch.bfloat16 and qkv_P3HK.shape[-1] % 2 == 0 and compiled.fuses(qkv_P3HK)


def _by_pairs(qkv_P3HK: Tensor, gain_2K: Tensor, turn_PA: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the compiled passes take: channels in words, gains and turns in parts."""
    gain_22A = gain_2K.float().view(2, -1, 2).transpose(1, 2).contiguous()
    return compiled.words(qkv_P3HK)[:, :2], gain_22A, turn_PA.real.float().contiguous(), turn_PA.imag.float().contiguous()


class _QkNormRotary(torch.autograd.Function):
    """Norm and turn of queries and keys, in fp32 or wider; keeps the projections and their norms alone.

    The values pass through, as a view, so that the three gradients are written into one buffer instead of added up.
    """

    @staticmethod
    def forward(ctx: Any, qkv_P3HK: Tensor, gain_2K: Tensor, turn_PA: Tensor) -> Triple:
        positions, _, heads, width = qkv_P3HK.shape
        if _fuses(qkv_P3HK):
            q_PHA, k_PHA, inverse_P2H1 = compiled.run(compiled.rotary_forward, *_by_pairs(qkv_P3HK, gain_2K, turn_PA))
            ctx.save_for_backward(qkv_P3HK, gain_2K, turn_PA, inverse_P2H1)
            return q_PHA.view(torch.bfloat16), k_PHA.view(torch.bfloat16), qkv_P3HK[:, 2]
        wide = torch.promote_types(qkv_P3HK.dtype, torch.float32)
        out_2PHK = torch.empty((2, positions, heads, width), dtype=qkv_P3HK.dtype, device=qkv_P3HK.device)
        inverse_P2H1 = torch.empty((positions, 2, heads, 1), dtype=wide, device=qkv_P3HK.device)
        gain_21K = gain_2K.to(wide)[:, None, :]
        for qkv, inverse, turn, *outs in row_blocks(2 * heads * width, qkv_P3HK, inverse_P2H1, turn_PA, *out_2PHK.unbind(0)):
            x = qkv[:, :2].to(wide, copy=True, memory_format=torch.contiguous_format)
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            torch.rsqrt(norm.square_().div_(width).add_(EPS), out=inverse)
            x.mul_(inverse).mul_(gain_21K)
            _turn_(x, turn)
            for out, part in zip(outs, (x[:, 0], x[:, 1]), strict=True):
                out.copy_(part)
        ctx.save_for_backward(qkv_P3HK, gain_2K, turn_PA, inverse_P2H1)
        return out_2PHK[0], out_2PHK[1], qkv_P3HK[:, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv_P3HK, gain_2K, turn_PA, inverse_P2H1 = ctx.saved_tensors
        _, _, heads, width = qkv_P3HK.shape
        if _fuses(qkv_P3HK):
            arguments = _by_pairs(qkv_P3HK, gain_2K, turn_PA)
            dqkv_P3HA, dgain_22A = compiled.run(compiled.rotary_backward, *arguments, inverse_P2H1, *map(compiled.words, gradients))
            return dqkv_P3HA.view(torch.bfloat16), dgain_22A.transpose(1, 2).flatten(1).to(gain_2K.dtype), None
        wide = inverse_P2H1.dtype
        wide_gain_2K = gain_2K.to(wide)
        dqkv_P3HK = torch.empty_like(qkv_P3HK)
        dgain_2K = torch.zeros_like(wide_gain_2K)
        back_PA = turn_PA.conj().resolve_conj()
        for qkv, inverse, turn, dqkv, *douts in row_blocks(heads * width, qkv_P3HK, inverse_P2H1, back_PA, dqkv_P3HK, *gradients):
            for part in (0, 1):
                dy = douts[part].to(wide, copy=True, memory_format=torch.contiguous_format)
                _turn_(dy, turn)
                normed = qkv[:, part].to(wide) * inverse[:, part]
                rows = (dy * normed).view(-1, width)
                dgain_2K[part] += torch.mv(rows.t(), rows.new_ones(rows.shape[0]))
                along = torch.mv(rows, wide_gain_2K[part]).div_(width).view(*dy.shape[:-1], 1)
                dy.mul_(wide_gain_2K[part]).addcmul_(normed, along, value=-1)
                dqkv[:, part] = dy.mul_(inverse[:, part])
            dqkv[:, 2] = douts[2]
        return dqkv_P3HK, dgain_2K.to(gain_2K.dtype), None
