"""Attention within segments.

Bytes moved per head and position: 4 K elements (q, k, v, out) forward, 8 K backward; operations: `4 L K` forward and `10 L K`
backward for a segment of L positions, so matrix products bound it beyond a few hundred positions.

Legend: P positions, S segments, H heads, K head width.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.segment_attention_reference import SegmentGroups, segment_attention_reference, segment_groups


def segment_attention(
    q_PHK: Tensor,
    k_PHK: Tensor,
    v_PHK: Tensor,
    start_S: Tensor,
    length_S: Tensor,
    *,
    groups: SegmentGroups | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax attention of every position over its own segment's positions, scores scaled by `K ** -0.5`.

    Args:
        q_PHK, k_PHK, v_PHK: one dtype; no positions at all is legal.
        start_S, length_S: first position and number of positions of each segment; segments do not overlap, and may be empty.
        groups: `segment_groups(start_S, length_S, P, H)`, where a caller of many layers has it already.

    Returns:
        `[P, H, K]`; zeros at positions that no segment covers.
    """
    choose("segment_attention", impl, q_PHK.device)
    if groups is None:
        groups = segment_groups(start_S, length_S, q_PHK.shape[0], q_PHK.shape[1])
    return segment_attention_reference(q_PHK, k_PHK, v_PHK, groups)
