"""q/k-norm with axial rotary in Triton: a head's vector stays in registers from its load to its store.

Bytes moved a position (bf16, H heads of K): forward reads and writes 4 H K for queries and keys, values stay where they are; backward reads
6 H K of gradients and 4 H K of projections and writes 6 H K; both read 4 K bytes of turns. Bandwidth bounds both.
Legend: P positions, H heads, K head width, A = K / 2 pairs, R = P * H rows, G programs of the backward pass.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _split_pairs(x_RK: "Any", R: tl.constexpr, K: tl.constexpr) -> "Any":
    """Even and odd channels."""
    return tl.split(tl.reshape(x_RK, [R, K // 2, 2]))


@triton.jit
def _join_pairs(even_RA: "Any", odd_RA: "Any", R: tl.constexpr, K: tl.constexpr) -> "Any":
    return tl.reshape(tl.join(even_RA, odd_RA), [R, K])


@triton.jit
def _norm_and_turn(x_RK: "Any", gain_K: "Any", cosine_RA: "Any", sine_RA: "Any", eps: "Any", R: tl.constexpr, K: tl.constexpr) -> "Any":
    inverse_R = 1.0 / tl.sqrt(tl.sum(x_RK * x_RK, 1) / K + eps)
    even, odd = _split_pairs(x_RK * inverse_R[:, None] * gain_K[None, :], R, K)
    return _join_pairs(even * cosine_RA - odd * sine_RA, even * sine_RA + odd * cosine_RA, R, K)


@triton.jit
def _rotary_fwd_kernel(
    qkv: "Any",
    q_gain_K: "Any",
    k_gain_K: "Any",
    turn_PA2: "Any",
    q: "Any",
    k: "Any",
    rows: "Any",
    stride_p: "Any",
    stride_part: "Any",
    stride_h: "Any",
    eps: "Any",
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    # Rows fit int32, whose division is the cheaper one; addresses do not.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, K)
    m_r = (o_r < rows)[:, None]
    i_p = (o_r // H).to(tl.int64)
    o_x = (i_p * stride_p + (o_r % H) * stride_h)[:, None] + o_k[None, :]
    o_y = o_r.to(tl.int64)[:, None] * K + o_k[None, :]
    cosine_RA, sine_RA = _split_pairs(tl.load(turn_PA2 + i_p[:, None] * K + o_k[None, :], mask=m_r, other=0.0), BLOCK_R, K)
    x_RK = tl.load(qkv + o_x, mask=m_r, other=0.0).to(tl.float32)
    gain_K = tl.load(q_gain_K + o_k).to(tl.float32)
    y_RK = _norm_and_turn(x_RK, gain_K, cosine_RA, sine_RA, eps, BLOCK_R, K)
    tl.store(q + o_y, narrow(y_RK, q.dtype.element_ty), mask=m_r)
    x_RK = tl.load(qkv + stride_part + o_x, mask=m_r, other=0.0).to(tl.float32)
    gain_K = tl.load(k_gain_K + o_k).to(tl.float32)
    y_RK = _norm_and_turn(x_RK, gain_K, cosine_RA, sine_RA, eps, BLOCK_R, K)
    tl.store(k + o_y, narrow(y_RK, k.dtype.element_ty), mask=m_r)


@triton.jit
def _undo(
    x_RK: "Any", dy_RK: "Any", gain_K: "Any", cosine_RA: "Any", sine_RA: "Any", eps: "Any", R: tl.constexpr, K: tl.constexpr
) -> "Any":
    """Gradients of the projection and, per row, of the gain."""
    inverse_R = 1.0 / tl.sqrt(tl.sum(x_RK * x_RK, 1) / K + eps)
    even, odd = _split_pairs(dy_RK, R, K)
    dy_RK = _join_pairs(even * cosine_RA + odd * sine_RA, odd * cosine_RA - even * sine_RA, R, K)
    normed_RK = x_RK * inverse_R[:, None]
    dgain_RK = dy_RK * normed_RK
    along_R = tl.sum(dgain_RK * gain_K[None, :], 1) / K
    return (dy_RK * gain_K[None, :] - normed_RK * along_R[:, None]) * inverse_R[:, None], dgain_RK


@triton.jit
def _rotary_bwd_kernel(
    qkv: "Any",
    q_gain_K: "Any",
    k_gain_K: "Any",
    turn_PA2: "Any",
    dq: "Any",
    dk: "Any",
    dv: "Any",
    dqkv: "Any",
    dgain_G2K: "Any",
    rows: "Any",
    stride_p: "Any",
    stride_part: "Any",
    stride_h: "Any",
    stride_qp: "Any",
    stride_qh: "Any",
    stride_kp: "Any",
    stride_kh: "Any",
    stride_vp: "Any",
    stride_vh: "Any",
    eps: "Any",
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Each program takes `BLOCKS` blocks of rows in turn and leaves one row of partial sums of the gains' gradients."""
    i_g = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, K)
    q_gain = tl.load(q_gain_K + o_k).to(tl.float32)
    k_gain = tl.load(k_gain_K + o_k).to(tl.float32)
    dq_gain_RK = tl.zeros([BLOCK_R, K], tl.float32)
    dk_gain_RK = tl.zeros([BLOCK_R, K], tl.float32)
    first = tl.program_id(0) * (BLOCK_R * BLOCKS)
    for block in range(0, tl.minimum(tl.cdiv(rows - first, BLOCK_R), BLOCKS)):
        o_r = first + block * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = (o_r < rows)[:, None]
        i_p = (o_r // H).to(tl.int64)
        i_h = o_r % H
        o_x = (i_p * stride_p + i_h * stride_h)[:, None] + o_k[None, :]
        o_dx = (i_p * (3 * H * K) + i_h * K)[:, None] + o_k[None, :]
        cosine_RA, sine_RA = _split_pairs(tl.load(turn_PA2 + i_p[:, None] * K + o_k[None, :], mask=m_r, other=0.0), BLOCK_R, K)
        x_RK = tl.load(qkv + o_x, mask=m_r, other=0.0).to(tl.float32)
        dy_RK = tl.load(dq + (i_p * stride_qp + i_h * stride_qh)[:, None] + o_k[None, :], mask=m_r, other=0.0).to(tl.float32)
        dx_RK, dgain_RK = _undo(x_RK, dy_RK, q_gain, cosine_RA, sine_RA, eps, BLOCK_R, K)
        dq_gain_RK += dgain_RK
        tl.store(dqkv + o_dx, narrow(dx_RK, dqkv.dtype.element_ty), mask=m_r)
        x_RK = tl.load(qkv + stride_part + o_x, mask=m_r, other=0.0).to(tl.float32)
        dy_RK = tl.load(dk + (i_p * stride_kp + i_h * stride_kh)[:, None] + o_k[None, :], mask=m_r, other=0.0).to(tl.float32)
        dx_RK, dgain_RK = _undo(x_RK, dy_RK, k_gain, cosine_RA, sine_RA, eps, BLOCK_R, K)
        dk_gain_RK += dgain_RK
        tl.store(dqkv + H * K + o_dx, narrow(dx_RK, dqkv.dtype.element_ty), mask=m_r)
        dv_RK = tl.load(dv + (i_p * stride_vp + i_h * stride_vh)[:, None] + o_k[None, :], mask=m_r, other=0.0)
        tl.store(dqkv + 2 * H * K + o_dx, dv_RK, mask=m_r)
    p_dgain = dgain_G2K + i_g * (2 * K) + o_k
    tl.store(p_dgain, tl.sum(dq_gain_RK, 0))
    tl.store(p_dgain + K, tl.sum(dk_gain_RK, 0))


def _fwd_cost(work: Workload) -> Cost:
    return Cost(bytes=work.positions * (8.0 * work.hidden + 256), launches=work.depth)


def _bwd_cost(work: Workload) -> Cost:
    return Cost(bytes=work.positions * (16.0 * work.hidden + 256), launches=work.depth)


_INPUTS = {"qkv": "*bf16", "q_gain_K": "*fp32", "k_gain_K": "*fp32", "turn_PA2": "*fp32"}
_STRIDES = {"stride_p": "i32", "stride_part": "i32", "stride_h": "i32"}
_GRADIENT_STRIDES = {f"stride_{part}{side}": "i32" for part in "qkv" for side in "ph"}

ROTARY_FWD = declare(
    name="rotary_fwd",
    function=_rotary_fwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_R": 32}, warps=4),
    builds=(
        Build(
            signature=_INPUTS | {"q": "*bf16", "k": "*bf16", "rows": "i32", "eps": "fp32"} | _STRIDES,
            constants={"H": 16, "K": 64},
            divisible=("rows", *_STRIDES),
        ),
    ),
    cost=_fwd_cost,
)
ROTARY_BWD = declare(
    name="rotary_bwd",
    function=_rotary_bwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_R": 16, "BLOCKS": 64}, warps=4),
    builds=(
        Build(
            signature=_INPUTS
            | {"dq": "*bf16", "dk": "*bf16", "dv": "*bf16", "dqkv": "*bf16", "dgain_G2K": "*fp32", "rows": "i32", "eps": "fp32"}
            | _STRIDES
            | _GRADIENT_STRIDES,
            constants={"H": 16, "K": 64},
            divisible=("rows", *_STRIDES, *_GRADIENT_STRIDES),
        ),
    ),
    cost=_bwd_cost,
)
