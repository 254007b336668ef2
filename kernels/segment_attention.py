"""Attention within segments.

Bytes moved per head and position: 4 K elements (q, k, v, out) forward, 12 K in the two kernels of the backward pass; operations: `4 L K`
forward and `14 L K` backward for a segment of L positions, so matrix products bound it beyond a few hundred positions.

Legend: P positions, S segments, H heads, K head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.segment_attention_reference import SegmentGroups, segment_attention_reference, segment_groups

register("segment_attention")

_HEAD_WIDTHS = (16, 32, 64, 128)


def segment_attention(
    q_PHK: Tensor,
    k_PHK: Tensor,
    v_PHK: Tensor,
    start_S: Tensor,
    length_S: Tensor,
    *,
    groups: SegmentGroups | None = None,
    spans_2P: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention of every position over its own segment's positions, scores scaled by `K ** -0.5`.

    Args:
        q_PHK, k_PHK, v_PHK: one dtype; no positions at all is legal.
        start_S, length_S: first position and number of positions of each segment; segments do not overlap, and may be empty.
        groups: `segment_groups(start_S, length_S, P, H)`, where a caller of many layers has it already; the reference reads it.
        spans_2P: `segment_spans(start_S, length_S, P)`, likewise; the Triton version reads it.

    Returns:
        `[P, H, K]`; zeros at positions that no segment covers.

    Raises:
        ValueError: the Triton version is asked for and the head width is none that it has.
    """
    if choose("segment_attention", impl, q_PHK.device, q_PHK.dtype) == "reference":
        if groups is None:
            groups = segment_groups(start_S, length_S, q_PHK.shape[0], q_PHK.shape[1])
        return segment_attention_reference(q_PHK, k_PHK, v_PHK, groups)
    if q_PHK.shape[2] not in _HEAD_WIDTHS:
        raise ValueError(f"segment_attention: head width is {q_PHK.shape[2]}: the Triton version has {_HEAD_WIDTHS}; use impl='reference'")
    if spans_2P is None:
        spans_2P = segment_spans(start_S, length_S, q_PHK.shape[0])
    out_PHK: Tensor = _TritonAttention.apply(q_PHK, k_PHK, v_PHK, spans_2P)
    return out_PHK


def segment_spans(start_S: Tensor, length_S: Tensor, num_positions: int) -> Tensor:
    """First and past-last position of the segment of each position, int32 `[2, P]`; 0, 0 where there is none.

    Runs a Triton kernel and never reads the device: call it once per batch, not once per layer.
    """
    from treadle.kernels.segment_attention_kernels import SEGMENT_SPANS

    spans_2P = torch.zeros((2, num_positions), dtype=torch.int32, device=start_S.device)
    segments = start_S.numel()
    SEGMENT_SPANS.launch(start_S.device, lambda _: (segments,), start_S.contiguous(), length_S.contiguous(), spans_2P, num_positions)
    return spans_2P


class _TritonAttention(torch.autograd.Function):
    """Keeps the inputs, the output and each query's log-sum-exp; the backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, spans_2P: Tensor) -> Tensor:
        from treadle.kernels.segment_attention_kernels import ATTENTION_FWD

        q_PHK, k_PHK, v_PHK = map(unit_stride, (q_PHK, k_PHK, v_PHK))
        positions, heads, width = q_PHK.shape
        out_PHK = torch.empty((positions, heads, width), dtype=q_PHK.dtype, device=q_PHK.device)
        lse_HP = torch.empty((heads, positions), dtype=torch.float32, device=q_PHK.device)
        ATTENTION_FWD.launch(
            q_PHK.device,
            lambda b: (-(-positions // b["BLOCK_M"]), heads),
            *(q_PHK, k_PHK, v_PHK, out_PHK, lse_HP, spans_2P),
            width**-0.5 * math.log2(math.e),
            positions,
            *_strides(q_PHK, k_PHK, v_PHK),
            heads * width,
            wide=q_PHK.dtype is torch.float32,
            K=width,
        )
        ctx.save_for_backward(q_PHK, k_PHK, v_PHK, out_PHK, lse_HP, spans_2P)
        return out_PHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.kernels.segment_attention_kernels import ATTENTION_DKV, ATTENTION_DQ

        (dout_PHK,) = gradients
        q_PHK, k_PHK, v_PHK, out_PHK, lse_HP, spans_2P = ctx.saved_tensors
        positions, heads, width = q_PHK.shape
        dout_PHK = unit_stride(dout_PHK)
        dq_PHK, dk_PHK, dv_PHK = (torch.empty_like(out_PHK) for _ in range(3))
        delta_HP = torch.empty_like(lse_HP)
        scale = width**-0.5
        tail = (scale * math.log2(math.e), scale, positions, *_strides(q_PHK, k_PHK, v_PHK), heads * width, *dout_PHK.stride()[:2])
        wide = q_PHK.dtype is torch.float32
        ATTENTION_DQ.launch(
            q_PHK.device,
            lambda b: (-(-positions // b["BLOCK_M"]), heads),
            *(q_PHK, k_PHK, v_PHK, out_PHK, dout_PHK, lse_HP, delta_HP, dq_PHK, spans_2P),
            *tail,
            wide=wide,
            K=width,
        )
        ATTENTION_DKV.launch(
            q_PHK.device,
            lambda b: (-(-positions // b["BLOCK_N"]), heads),
            *(q_PHK, k_PHK, v_PHK, dout_PHK, lse_HP, delta_HP, dk_PHK, dv_PHK, spans_2P),
            *tail,
            wide=wide,
            K=width,
        )
        return dq_PHK, dk_PHK, dv_PHK, None


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])
