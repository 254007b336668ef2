"""Pooled mean in Triton: a program sums a strip of one segment's states in order.

Bytes moved: forward reads the states once and writes `4 S D`; backward reads `4 S D` and writes the states' gradient once.
Legend: P positions, S segments, D width.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false
# Triton's annotations are those of its host side.


@triton.jit
def _mean_pool_fwd_kernel(
    states: "Any",
    start_S: "Any",
    tokens_S: "Any",
    pooled_SD: "Any",
    stride_p: "Any",
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    i_s = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_p = tl.arange(0, BLOCK_P)
    m_d = o_d < D
    first = tl.load(start_S + i_s) + 1
    tokens = tl.load(tokens_S + i_s)
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for p in range(0, tokens, BLOCK_P):
        p_x = states + (first + p + o_p)[:, None] * stride_p + o_d[None, :]
        acc += tl.load(p_x, mask=(p + o_p < tokens)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(acc, 0) / tl.maximum(tokens, 1).to(tl.float32)
    tl.store(pooled_SD + i_s * D + o_d, mean, mask=m_d)


@triton.jit
def _mean_pool_bwd_kernel(
    dpooled_SD: "Any",
    start_S: "Any",
    tokens_S: "Any",
    dstates_PD: "Any",
    stride_s: "Any",
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    i_s = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_p = tl.arange(0, BLOCK_P)
    m_d = o_d < D
    first = tl.load(start_S + i_s) + 1
    tokens = tl.load(tokens_S + i_s)
    share = tl.load(dpooled_SD + i_s * stride_s + o_d, mask=m_d, other=0.0).to(tl.float32) / tl.maximum(tokens, 1).to(tl.float32)
    share = tl.broadcast_to(narrow(share, dstates_PD.dtype.element_ty)[None, :], [BLOCK_P, BLOCK_D])
    for p in range(0, tokens, BLOCK_P):
        p_dx = dstates_PD + (first + p + o_p)[:, None] * D + o_d[None, :]
        tl.store(p_dx, share, mask=(p + o_p < tokens)[:, None] & m_d[None, :])


def _cost(work: Workload) -> Cost:
    return Cost(bytes=4.0 * (work.positions + work.segments) * work.hidden)


_SETTINGS = Settings({"BLOCK_P": 8, "BLOCK_D": 256}, warps=2)

MEAN_POOL_FWD = declare(
    name="mean_pool_fwd",
    function=_mean_pool_fwd_kernel,
    kind="streaming",
    settings=_SETTINGS,
    builds=(
        Build(
            signature={"states": "*fp32", "start_S": "*i64", "tokens_S": "*i64", "pooled_SD": "*fp32", "stride_p": "i32"},
            constants={"D": 1024},
            divisible=("stride_p",),
        ),
    ),
    cost=_cost,
)
MEAN_POOL_BWD = declare(
    name="mean_pool_bwd",
    function=_mean_pool_bwd_kernel,
    kind="streaming",
    settings=_SETTINGS,
    builds=(
        Build(
            signature={"dpooled_SD": "*fp32", "start_S": "*i64", "tokens_S": "*i64", "dstates_PD": "*fp32", "stride_s": "i32"},
            constants={"D": 1024},
            divisible=("stride_s",),
        ),
    ),
    cost=_cost,
)
