"""Patch and tube embedding straight from the uint8 tape: no copy of the patches in memory beyond the op.

Operations: `2 N V D` forward and again for the weight's gradient; bytes moved: `N V` pixels and `N D` elements out. Matrix products
bound it for every hidden width from 256 on.
Legend: N patches, V values of a patch, D width.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.patch_embed_reference import patch_embed_reference
from treadle.kernels.tape_reference import Patches


def patch_embed(tape: Tensor, patches: Patches, weight_DV: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`pixels @ weight.T`, `[N, D]`.

    Args:
        tape: uint8, the batch's payloads.
        patches: where the patches or tubes lie, from `locate_patches`.
        weight_DV: its columns in (frame, row, column, channel) order.
    """
    choose("patch_embed", impl, weight_DV.device)
    return patch_embed_reference(tape, patches, weight_DV)
