"""RMSNorm with a residual in Triton: a row is read once, added, normalised and written.

Bytes moved a position of width D, x bf16, residual stream fp32, y bf16: forward reads 2 D and 4 D, writes 4 D and 2 D; backward reads
2 D (dy), 4 D (sum) and 4 D (its gradient), writes 4 D and 2 D. A few operations a value: bandwidth bounds both.
Legend: P positions, D width, G programs of the backward pass.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _rms_norm_fwd_kernel(
    x: "Any",
    residual: "Any",
    gain_D: "Any",
    y: "Any",
    total: "Any",
    inverse_P: "Any",
    stride_x: "Any",
    stride_residual: "Any",
    eps: "Any",
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_x = tl.load(x + i_p * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_x += tl.load(residual + i_p * stride_residual + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_total = narrow(b_x, total.dtype.element_ty)
        tl.store(total + i_p * D + o_d, b_total, mask=m_d)
        # The backward pass sees the sum as it was stored.
        b_x = b_total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / D + eps)
    gain = tl.load(gain_D + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(y + i_p * D + o_d, narrow(b_x * inverse * gain, y.dtype.element_ty), mask=m_d)
    tl.store(inverse_P + i_p, inverse)


@triton.jit
def _rms_norm_bwd_kernel(
    total: "Any",
    gain_D: "Any",
    inverse_P: "Any",
    dy: "Any",
    dtotal: "Any",
    dx: "Any",
    dresidual: "Any",
    dgain_GD: "Any",
    P: "Any",
    stride_total: "Any",
    stride_dy: "Any",
    stride_dtotal: "Any",
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Each program takes `BLOCK_P` rows in turn and leaves one row of partial sums of the gain's gradient."""
    i_g = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    gain = tl.load(gain_D + o_d, mask=m_d, other=0.0).to(tl.float32)
    dgain = tl.zeros([BLOCK_D], tl.float32)
    first = i_g * BLOCK_P
    for i in range(0, tl.minimum(P - first, BLOCK_P)):
        i_p = first + i
        normed = tl.load(total + i_p * stride_total + o_d, mask=m_d, other=0.0).to(tl.float32) * tl.load(inverse_P + i_p)
        b_dy = tl.load(dy + i_p * stride_dy + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dgain = b_dy * normed
        dgain += b_dgain
        # d = inverse * (gain * dy - normed * mean(gain * dy * normed))
        along = tl.sum(b_dgain * gain, 0) / D
        b_d = (b_dy * gain - normed * along) * tl.load(inverse_P + i_p)
        if HAS_DTOTAL:
            b_d += tl.load(dtotal + i_p * stride_dtotal + o_d, mask=m_d, other=0.0).to(tl.float32)
        tl.store(dx + i_p * D + o_d, narrow(b_d, dx.dtype.element_ty), mask=m_d)
        if HAS_RESIDUAL:
            tl.store(dresidual + i_p * D + o_d, narrow(b_d, dresidual.dtype.element_ty), mask=m_d)
    tl.store(dgain_GD + i_g * D + o_d, dgain, mask=m_d)


def _fwd_cost(work: Workload) -> Cost:
    return Cost(bytes=12.0 * work.positions * work.hidden, launches=2 * work.depth + 1)


def _bwd_cost(work: Workload) -> Cost:
    return Cost(bytes=16.0 * work.positions * work.hidden, launches=2 * work.depth + 1)


_LONG_ROWS = Settings(warps=16)

RMS_NORM_FWD = declare(
    name="rms_norm_fwd",
    function=_rms_norm_fwd_kernel,
    kind="streaming",
    settings=Settings(warps=4),
    wide_settings=_LONG_ROWS,
    builds=(
        Build(
            signature={"x": "*bf16", "residual": "*fp32", "gain_D": "*fp32", "y": "*bf16", "total": "*fp32", "inverse_P": "*fp32"}
            | {"stride_x": "i32", "stride_residual": "i32", "eps": "fp32"},
            constants={"D": 1024, "BLOCK_D": 1024, "HAS_RESIDUAL": True},
            divisible=("stride_x", "stride_residual"),
        ),
    ),
    cost=_fwd_cost,
)
RMS_NORM_BWD = declare(
    name="rms_norm_bwd",
    function=_rms_norm_bwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_P": 128}, warps=4),
    wide_settings=Settings({"BLOCK_P": 128}, warps=16),
    builds=(
        Build(
            signature={"total": "*fp32", "gain_D": "*fp32", "inverse_P": "*fp32", "dy": "*bf16", "dtotal": "*fp32", "dx": "*bf16"}
            | {"dresidual": "*fp32", "dgain_GD": "*fp32", "P": "i32", "stride_total": "i32", "stride_dy": "i32", "stride_dtotal": "i32"},
            constants={"D": 1024, "BLOCK_D": 1024, "HAS_DTOTAL": True, "HAS_RESIDUAL": True},
            divisible=("P", "stride_total", "stride_dy", "stride_dtotal"),
        ),
    ),
    cost=_bwd_cost,
)
