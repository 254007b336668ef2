"""Pooled mean: one vector per segment.

Bytes moved: the states once, `S D` out; backward writes the states' gradient once. Bandwidth bounds it.
Legend: P positions, S segments, D width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.mean_pool_reference import mean_pool_reference

register("mean_pool")


def mean_pool(states_PD: Tensor, start_S: Tensor, tokens_S: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The mean of each segment's states past its prefix.

    Args:
        start_S: position of each segment's prefix.
        tokens_S: positions that count, from the one after the prefix on; a segment of none pools to zeros.

    Returns:
        `[S, D]`, fp32 or wider.
    """
    if choose("mean_pool", impl, states_PD.device, states_PD.dtype) == "reference":
        return mean_pool_reference(states_PD, start_S, tokens_S)
    pooled_SD: Tensor = _TritonMeanPool.apply(states_PD, start_S, tokens_S)
    return pooled_SD


class _TritonMeanPool(torch.autograd.Function):
    """A strip of a segment per program, so nothing is added to by two."""

    @staticmethod
    def forward(ctx: Any, states_PD: Tensor, start_S: Tensor, tokens_S: Tensor) -> Tensor:
        from treadle.kernels.mean_pool_kernels import MEAN_POOL_FWD

        states_PD = unit_stride(states_PD)
        start_S, tokens_S = start_S.contiguous(), tokens_S.contiguous()
        segments, width = tokens_S.numel(), states_PD.shape[1]
        pooled_SD = torch.empty((segments, width), dtype=torch.float32, device=states_PD.device)
        MEAN_POOL_FWD.launch(
            states_PD.device,
            lambda b: (segments, -(-width // b["BLOCK_D"])),
            *(states_PD, start_S, tokens_S, pooled_SD, states_PD.stride(0)),
            D=width,
        )
        ctx.save_for_backward(start_S, tokens_S)
        ctx.states = states_PD.shape, states_PD.dtype
        return pooled_SD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from treadle.kernels.mean_pool_kernels import MEAN_POOL_BWD

        (dpooled_SD,) = gradients
        start_S, tokens_S = ctx.saved_tensors
        shape, dtype = ctx.states
        segments, width = tokens_S.numel(), shape[1]
        dpooled_SD = unit_stride(dpooled_SD)
        # Prefixes, masks and positions of no segment take no part in a mean.
        dstates_PD = torch.zeros(shape, dtype=dtype, device=dpooled_SD.device)
        MEAN_POOL_BWD.launch(
            dpooled_SD.device,
            lambda b: (segments, -(-width // b["BLOCK_D"])),
            *(dpooled_SD, start_S, tokens_S, dstates_PD, dpooled_SD.stride(0)),
            D=width,
        )
        return dstates_PD, None, None
