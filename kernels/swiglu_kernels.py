"""SwiGLU in Triton, forward and backward: one pass each over contiguous runs of a row.

Bytes moved: forward reads 2 F and writes F elements a position, backward reads 3 F and writes 2 F. About 10 operations a value, one
exponential and one reciprocal: bandwidth bounds both.
Legend: P positions, F inner width.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _swiglu_fwd_kernel(x: "Any", out: "Any", stride_x: "Any", F: tl.constexpr, BLOCK_F: tl.constexpr) -> None:
    i_p = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < F
    p_x = x + i_p * stride_x + o_f
    gate = tl.load(p_x, mask=m_f, other=0.0).to(tl.float32)
    up = tl.load(p_x + F, mask=m_f, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + i_p * F + o_f, narrow(y, out.dtype.element_ty), mask=m_f)


@triton.jit
def _swiglu_bwd_kernel(
    x: "Any", dout: "Any", dx: "Any", stride_x: "Any", stride_dout: "Any", F: tl.constexpr, BLOCK_F: tl.constexpr
) -> None:
    i_p = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < F
    p_x = x + i_p * stride_x + o_f
    gate = tl.load(p_x, mask=m_f, other=0.0).to(tl.float32)
    up = tl.load(p_x + F, mask=m_f, other=0.0).to(tl.float32)
    dy = tl.load(dout + i_p * stride_dout + o_f, mask=m_f, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = gate * share
    p_dx = dx + i_p * (2 * F) + o_f
    # d silu / d gate = share + silu * (1 - share)
    tl.store(p_dx, narrow(dy * up * (share + active * (1.0 - share)), dx.dtype.element_ty), mask=m_f)
    tl.store(p_dx + F, narrow(dy * active, dx.dtype.element_ty), mask=m_f)


def _fwd_cost(work: Workload) -> Cost:
    return Cost(bytes=2.0 * 3 * work.positions * work.inner, launches=work.depth)


def _bwd_cost(work: Workload) -> Cost:
    return Cost(bytes=2.0 * 5 * work.positions * work.inner, launches=work.depth)


SWIGLU_FWD = declare(
    name="swiglu_fwd",
    function=_swiglu_fwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_F": 1024}, warps=4),
    builds=(Build(signature={"x": "*bf16", "out": "*bf16", "stride_x": "i32"}, constants={"F": 2816}, divisible=("stride_x",)),),
    cost=_fwd_cost,
)
SWIGLU_BWD = declare(
    name="swiglu_bwd",
    function=_swiglu_bwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_F": 1024}, warps=4),
    builds=(
        Build(
            signature={"x": "*bf16", "dout": "*bf16", "dx": "*bf16", "stride_x": "i32", "stride_dout": "i32"},
            constants={"F": 2816},
            divisible=("stride_x", "stride_dout"),
        ),
    ),
    cost=_bwd_cost,
)
