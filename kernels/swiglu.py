"""SwiGLU: the gate of the block's inner layer.

Bytes moved: 3 F elements a position forward, 5 F backward. Bandwidth bounds it.
Legend: P positions, F inner width.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.swiglu_reference import swiglu_reference


def swiglu(gate_up_P2F: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension, `[P, F]`."""
    choose("swiglu", impl, gate_up_P2F.device)
    return swiglu_reference(gate_up_P2F)
