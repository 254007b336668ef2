"""q/k-norm with axial rotary: what queries and keys go through between their projection and attention.

Bytes moved: 4 H K elements a position forward, 6 H K backward. Bandwidth bounds it.
Legend: P positions, H heads, K head width, A = K / 2 pairs.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.rotary_reference import Triple, rotary_reference


def rotary(qkv_P3HK: Tensor, q_gain_K: Tensor, k_gain_K: Tensor, turn_PA: Tensor, *, impl: Impl = "auto") -> Triple:
    """Queries and keys, RMS-normalised per head, scaled by their gain and turned, and the values beside them.

    Args:
        qkv_P3HK: projections to queries, keys and values.
        turn_PA: complex `e^{i angle}` of each pair, computed once per batch.

    Returns:
        Queries, keys and values, `[P, H, K]` each, in the dtype of `qkv_P3HK`.
    """
    choose("rotary", impl, qkv_P3HK.device)
    return rotary_reference(qkv_P3HK, q_gain_K, k_gain_K, turn_PA)
