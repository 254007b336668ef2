"""q/k-norm with axial rotary: what queries and keys go through between their projection and attention.

Bytes moved: 4 H K elements a position forward (values stay where they are), 8 H K backward. Bandwidth bounds it.
Legend: P positions, H heads, K head width, A = K / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.rms_norm_reference import EPS
from treadle.kernels.rotary_reference import Triple, rotary_reference

register("rotary")


def rotary(qkv_P3HK: Tensor, q_gain_K: Tensor, k_gain_K: Tensor, turn_PA: Tensor, *, impl: Impl = "auto") -> Triple:
    """Queries and keys, RMS-normalised per head, scaled by their gain and turned, and the values beside them.

    Args:
        qkv_P3HK: projections to queries, keys and values.
        turn_PA: complex `e^{i angle}` of each pair, computed once per batch.

    Returns:
        Queries, keys and values, `[P, H, K]` each, in the dtype of `qkv_P3HK`. The Triton version's values are a view of it.

    Raises:
        ValueError: the Triton version is asked for and the head width is no power of two.
    """
    dtypes = (qkv_P3HK.dtype, q_gain_K.dtype, k_gain_K.dtype)
    if choose("rotary", impl, qkv_P3HK.device, *dtypes) == "reference":
        return rotary_reference(qkv_P3HK, q_gain_K, k_gain_K, turn_PA)
    width = qkv_P3HK.shape[3]
    if width < 2 or width & (width - 1):
        raise ValueError(f"rotary: head width is {width}: the Triton version takes powers of two; use impl='reference'")
    triple: Triple = _TritonRotary.apply(qkv_P3HK, q_gain_K, k_gain_K, turn_PA)
    return triple


class _TritonRotary(torch.autograd.Function):
    """Keeps the projections alone; the three gradients are written into one buffer."""

    @staticmethod
    def forward(ctx: Any, qkv_P3HK: Tensor, q_gain_K: Tensor, k_gain_K: Tensor, turn_PA: Tensor) -> Triple:
        from treadle.kernels.rotary_kernels import ROTARY_FWD

        qkv_P3HK = unit_stride(qkv_P3HK)
        turn_PA2 = torch.view_as_real(turn_PA).to(torch.float32).contiguous()
        positions, _, heads, width = qkv_P3HK.shape
        q_PHK, k_PHK = (torch.empty((positions, heads, width), dtype=qkv_P3HK.dtype, device=qkv_P3HK.device) for _ in range(2))
        rows = positions * heads
        ROTARY_FWD.launch(
            qkv_P3HK.device,
            lambda b: (-(-rows // b["BLOCK_R"]),),
            *(qkv_P3HK, q_gain_K.contiguous(), k_gain_K.contiguous(), turn_PA2, q_PHK, k_PHK, rows, *qkv_P3HK.stride()[:3], EPS),
            H=heads,
            K=width,
        )
        ctx.save_for_backward(qkv_P3HK, q_gain_K, k_gain_K, turn_PA2)
        return q_PHK, k_PHK, qkv_P3HK[:, 2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.kernels.partial_sums_kernels import sum_partials
        from treadle.kernels.rotary_kernels import ROTARY_BWD

        qkv_P3HK, q_gain_K, k_gain_K, turn_PA2 = ctx.saved_tensors
        positions, _, heads, width = qkv_P3HK.shape
        dq_PHK, dk_PHK, dv_PHK = map(unit_stride, gradients)
        dqkv_P3HK = torch.empty(qkv_P3HK.shape, dtype=qkv_P3HK.dtype, device=qkv_P3HK.device)
        rows = positions * heads
        blocks = ROTARY_BWD.settings_on(qkv_P3HK.device).blocks
        programs = -(-rows // (blocks["BLOCK_R"] * blocks["BLOCKS"]))
        dgain_G2K = torch.empty((programs, 2, width), dtype=torch.float32, device=qkv_P3HK.device)
        ROTARY_BWD.launch(
            qkv_P3HK.device,
            lambda _: (programs,),
            *(qkv_P3HK, q_gain_K.contiguous(), k_gain_K.contiguous(), turn_PA2, dq_PHK, dk_PHK, dv_PHK, dqkv_P3HK, dgain_G2K, rows),
            *qkv_P3HK.stride()[:3],
            *(stride for dx in (dq_PHK, dk_PHK, dv_PHK) for stride in dx.stride()[:2]),
            EPS,
            H=heads,
            K=width,
        )
        dq_gain_K, dk_gain_K = sum_partials(dgain_G2K, (2, width), torch.float32).unbind(0)
        return dqkv_P3HK, dq_gain_K.to(q_gain_K.dtype), dk_gain_K.to(k_gain_K.dtype), None
