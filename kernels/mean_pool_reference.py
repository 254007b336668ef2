"""Pooled mean in plain torch.

Legend: P positions, S segments, D width, N positions that are averaged, in segment order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


def mean_pool_reference(states_PD: Tensor, start_S: Tensor, tokens_S: Tensor) -> Tensor:
    """The mean of each segment's states from `start + 1` on, over `tokens` positions, `[S, D]` in fp32 or wider."""
    pooled_SD: Tensor = _MeanPool.apply(states_PD, start_S, tokens_S)
    return pooled_SD


class _MeanPool(torch.autograd.Function):
    """A bag of rows per segment; the gradient is a copy per row, never an addition."""

    @staticmethod
    def forward(ctx: Any, states_PD: Tensor, start_S: Tensor, tokens_S: Tensor) -> Tensor:
        wide = torch.promote_types(states_PD.dtype, torch.float32)
        end_S = tokens_S.cumsum(0)
        segment_N = torch.repeat_interleave(tokens_S)
        position_N = torch.arange(segment_N.numel(), device=tokens_S.device) + (start_S + 1 - end_S + tokens_S)[segment_N]
        ctx.save_for_backward(segment_N, position_N, tokens_S)
        ctx.states = states_PD.shape, states_PD.dtype
        if states_PD.shape[0] == 0:
            return torch.zeros((tokens_S.numel(), states_PD.shape[1]), dtype=wide, device=states_PD.device)
        sum_SD = embedding_bag(position_N, states_PD.to(wide), end_S - tokens_S, mode="sum")
        return sum_SD / tokens_S.clamp(min=1)[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (dpooled_SD,) = gradients
        segment_N, position_N, tokens_S = ctx.saved_tensors
        shape, dtype = ctx.states
        share_SD = (dpooled_SD / tokens_S.clamp(min=1)[:, None]).to(dtype)
        dstates_PD = torch.zeros(shape, dtype=dtype, device=dpooled_SD.device)
        dstates_PD.index_copy_(0, position_N, share_SD.index_select(0, segment_N))
        return dstates_PD, None, None
