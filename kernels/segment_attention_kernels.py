"""Segment attention in Triton: forward, and a backward pass of two kernels without atomics.

Two integers per position, the first and the past-last position of its segment (0, 0 where there is none), say all: the mask is
`first[q] <= n < last[q]`, out of registers; a block's keys run from the smallest first to the largest last; and as the relation is
symmetric, the same two give a block of keys its queries. Blocks of other segments are never visited.

Per head and position of a segment of L: forward moves `8 K` bytes (bf16 q, k, v, out) and does `4 L K` operations; dQ moves `14 K` and does
`6 L K`; dK and dV move `12 K` and do `8 L K`. Tensor cores bound all three from about 300 positions on.
Legend: P positions, S segments, H heads, K head width, M queries and N keys of a tile.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot, narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false
# Triton's annotations are those of its host side.


@triton.jit
def _segment_spans_kernel(start_S: "Any", length_S: "Any", spans_2P: "Any", P: "Any", BLOCK_P: tl.constexpr) -> None:
    i_s = tl.program_id(0)
    start = tl.load(start_S + i_s)
    length = tl.load(length_S + i_s)
    for n in range(0, length, BLOCK_P):
        o_n = n + tl.arange(0, BLOCK_P)
        m_n = o_n < length
        p_n = spans_2P + start + o_n
        tl.store(p_n, tl.zeros([BLOCK_P], tl.int32) + start.to(tl.int32), mask=m_n)
        tl.store(p_n + P, tl.zeros([BLOCK_P], tl.int32) + (start + length).to(tl.int32), mask=m_n)


@triton.jit
def _attention_fwd_kernel(
    q: "Any",
    k: "Any",
    v: "Any",
    out: "Any",
    lse_HP: "Any",
    spans_2P: "Any",
    scale: "Any",
    P: "Any",
    stride_qp: "Any",
    stride_qh: "Any",
    stride_kp: "Any",
    stride_kh: "Any",
    stride_vp: "Any",
    stride_vh: "Any",
    stride_op: "Any",
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    i_m = tl.program_id(0) * BLOCK_M
    i_h = tl.program_id(1).to(tl.int64)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, K)
    m_m = o_m < P
    first = tl.load(spans_2P + o_m, mask=m_m, other=0)
    last = tl.load(spans_2P + P + o_m, mask=m_m, other=0)
    live = last > first
    low = tl.min(tl.where(live, first, P))
    high = tl.max(last)
    b_q = tl.load(
        q + i_m.to(tl.int64) * stride_qp + i_h * stride_qh + o_r[:, None] * stride_qp + o_k[None, :], mask=m_m[:, None], other=0.0
    )
    p_k = k + i_h * stride_kh + o_n[:, None] * stride_kp + o_k[None, :]
    p_v = v + i_h * stride_vh + o_n[:, None] * stride_vp + o_k[None, :]
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, K], tl.float32)
    for n in range(low, high, BLOCK_N):
        i_n = n + tl.zeros([], tl.int64)
        m_n = n + o_n < high
        b_k = tl.load(p_k + i_n * stride_kp, mask=m_n[:, None], other=0.0)
        # [M, K] x [K, N]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        own = (n + o_n[None, :] >= first[:, None]) & (n + o_n[None, :] < last[:, None])
        # Finite, so that no row gives NaN. Until its first own key a row counts what it sees as ones, which `shrink` then makes zeros.
        b_s = tl.where(own, b_s, -1e30)
        higher = tl.maximum(top, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - higher[:, None])
        shrink = tl.exp2(top - higher)
        weight = weight * shrink + tl.sum(b_p, 1)
        b_v = tl.load(p_v + i_n * stride_vp, mask=m_n[:, None], other=0.0)
        # [M, N] x [N, K]
        acc = dot(narrow(b_p, v.dtype.element_ty), b_v, acc * shrink[:, None])
        top = higher
    weight = tl.where(live, weight, 1.0)
    acc = tl.where(live[:, None], acc, 0.0)
    p_out = out + i_m.to(tl.int64) * stride_op + i_h * K + o_r[:, None] * stride_op + o_k[None, :]
    tl.store(p_out, narrow(acc / weight[:, None], out.dtype.element_ty), mask=m_m[:, None])
    tl.store(lse_HP + i_h * P + o_m, top + tl.log2(weight), mask=m_m)


@triton.jit
def _attention_dq_kernel(
    q: "Any",
    k: "Any",
    v: "Any",
    out: "Any",
    dout: "Any",
    lse_HP: "Any",
    delta_HP: "Any",
    dq: "Any",
    spans_2P: "Any",
    scale: "Any",
    scale_out: "Any",
    P: "Any",
    stride_qp: "Any",
    stride_qh: "Any",
    stride_kp: "Any",
    stride_kh: "Any",
    stride_vp: "Any",
    stride_vh: "Any",
    stride_op: "Any",
    stride_dp: "Any",
    stride_dh: "Any",
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Also stores `delta = sum(out * dout)`, which the kernel after it reads."""
    i_m = tl.program_id(0) * BLOCK_M
    i_h = tl.program_id(1).to(tl.int64)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, K)
    m_m = o_m < P
    first = tl.load(spans_2P + o_m, mask=m_m, other=0)
    last = tl.load(spans_2P + P + o_m, mask=m_m, other=0)
    live = last > first
    low = tl.min(tl.where(live, first, P))
    high = tl.max(last)
    row = i_m.to(tl.int64)
    b_q = tl.load(q + row * stride_qp + i_h * stride_qh + o_r[:, None] * stride_qp + o_k[None, :], mask=m_m[:, None], other=0.0)
    b_do = tl.load(dout + row * stride_dp + i_h * stride_dh + o_r[:, None] * stride_dp + o_k[None, :], mask=live[:, None], other=0.0)
    b_o = tl.load(out + row * stride_op + i_h * K + o_r[:, None] * stride_op + o_k[None, :], mask=live[:, None], other=0.0)
    delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta_HP + i_h * P + o_m, delta, mask=m_m)
    lse = tl.load(lse_HP + i_h * P + o_m, mask=m_m, other=0.0)
    p_k = k + i_h * stride_kh + o_n[:, None] * stride_kp + o_k[None, :]
    p_v = v + i_h * stride_vh + o_n[:, None] * stride_vp + o_k[None, :]
    acc = tl.zeros([BLOCK_M, K], tl.float32)
    for n in range(low, high, BLOCK_N):
        i_n = n + tl.zeros([], tl.int64)
        m_n = n + o_n < high
        b_k = tl.load(p_k + i_n * stride_kp, mask=m_n[:, None], other=0.0)
        b_v = tl.load(p_v + i_n * stride_vp, mask=m_n[:, None], other=0.0)
        # [M, K] x [K, N]
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        own = (n + o_n[None, :] >= first[:, None]) & (n + o_n[None, :] < last[:, None])
        b_p = tl.exp2(tl.where(own, b_s - lse[:, None], -1e30))
        # [M, K] x [K, N]
        b_dp = dot(b_do, tl.trans(b_v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        b_ds = b_p * (b_dp - delta[:, None])
        # [M, N] x [N, K]
        acc = dot(narrow(b_ds, k.dtype.element_ty), b_k, acc)
    p_dq = dq + row * stride_op + i_h * K + o_r[:, None] * stride_op + o_k[None, :]
    tl.store(p_dq, narrow(acc * scale_out, dq.dtype.element_ty), mask=m_m[:, None])


@triton.jit
def _attention_dkv_kernel(
    q: "Any",
    k: "Any",
    v: "Any",
    dout: "Any",
    lse_HP: "Any",
    delta_HP: "Any",
    dk: "Any",
    dv: "Any",
    spans_2P: "Any",
    scale: "Any",
    scale_out: "Any",
    P: "Any",
    stride_qp: "Any",
    stride_qh: "Any",
    stride_kp: "Any",
    stride_kh: "Any",
    stride_vp: "Any",
    stride_vh: "Any",
    stride_op: "Any",
    stride_dp: "Any",
    stride_dh: "Any",
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    i_n = tl.program_id(0) * BLOCK_N
    i_h = tl.program_id(1).to(tl.int64)
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, K)
    m_n = o_n < P
    first = tl.load(spans_2P + o_n, mask=m_n, other=0)
    last = tl.load(spans_2P + P + o_n, mask=m_n, other=0)
    low = tl.min(tl.where(last > first, first, P))
    high = tl.max(last)
    row = i_n.to(tl.int64)
    b_k = tl.load(k + row * stride_kp + i_h * stride_kh + o_r[:, None] * stride_kp + o_k[None, :], mask=m_n[:, None], other=0.0)
    b_v = tl.load(v + row * stride_vp + i_h * stride_vh + o_r[:, None] * stride_vp + o_k[None, :], mask=m_n[:, None], other=0.0)
    p_q = q + i_h * stride_qh + o_m[:, None] * stride_qp + o_k[None, :]
    p_do = dout + i_h * stride_dh + o_m[:, None] * stride_dp + o_k[None, :]
    p_lse = lse_HP + i_h * P + o_m
    p_delta = delta_HP + i_h * P + o_m
    b_dk = tl.zeros([BLOCK_N, K], tl.float32)
    b_dv = tl.zeros([BLOCK_N, K], tl.float32)
    for m in range(low, high, BLOCK_M):
        i_m = m + tl.zeros([], tl.int64)
        m_m = m + o_m < high
        b_q = tl.load(p_q + i_m * stride_qp, mask=m_m[:, None], other=0.0)
        b_do = tl.load(p_do + i_m * stride_dp, mask=m_m[:, None], other=0.0)
        lse = tl.load(p_lse + m, mask=m_m, other=0.0)
        delta = tl.load(p_delta + m, mask=m_m, other=0.0)
        # [N, K] x [K, M]
        b_s = dot(b_k, tl.trans(b_q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * scale
        own = (m + o_m[None, :] >= first[:, None]) & (m + o_m[None, :] < last[:, None])
        b_p = tl.exp2(tl.where(own, b_s - lse[None, :], -1e30))
        # [N, M] x [M, K]
        b_dv = dot(narrow(b_p, dout.dtype.element_ty), b_do, b_dv)
        # [N, K] x [K, M]
        b_dp = dot(b_v, tl.trans(b_do), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        b_ds = b_p * (b_dp - delta[None, :])
        # [N, M] x [M, K]
        b_dk = dot(narrow(b_ds, q.dtype.element_ty), b_q, b_dk)
    o_out = row * stride_op + i_h * K + o_r[:, None] * stride_op + o_k[None, :]
    tl.store(dk + o_out, narrow(b_dk * scale_out, dk.dtype.element_ty), mask=m_n[:, None])
    tl.store(dv + o_out, narrow(b_dv, dv.dtype.element_ty), mask=m_n[:, None])


def _cost(elements: int, products: int) -> Any:
    def cost(work: Workload) -> Cost:
        each = work.positions * work.hidden
        return Cost(bytes=2.0 * elements * each, matrix_operations=2.0 * products * work.segment_length * each, launches=work.depth)

    return cost


def _spans_cost(work: Workload) -> Cost:
    return Cost(bytes=8.0 * work.positions)


_STRIDES = {name: "i32" for name in ("stride_qp", "stride_qh", "stride_kp", "stride_kh", "stride_vp", "stride_vh", "stride_op")}
_OUT_STRIDES = _STRIDES | {"stride_dp": "i32", "stride_dh": "i32"}
_POINTERS = {name: "*bf16" for name in ("q", "k", "v", "out")}
_ROWS = {"lse_HP": "*fp32", "delta_HP": "*fp32", "spans_2P": "*i32", "scale": "fp32", "scale_out": "fp32", "P": "i32"}
_TILE_64 = {"BLOCK_M": 64, "BLOCK_N": 64}
_WIDE = Settings({"BLOCK_M": 32, "BLOCK_N": 32}, warps=8, stages=1)
# A multiprocessor holds four programs of 128 registers a thread, three of 168. On sm_90 the code of triton 3.9 spills in 128.
_FWD_REGISTERS_90 = 128 if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9) else 168

SEGMENT_SPANS = declare(
    name="segment_spans",
    function=_segment_spans_kernel,
    kind="other",
    settings=Settings({"BLOCK_P": 128}, warps=1),
    builds=(Build(signature={"start_S": "*i64", "length_S": "*i64", "spans_2P": "*i32", "P": "i32"}, divisible=("P",)),),
    cost=_spans_cost,
)
ATTENTION_FWD = declare(
    name="attention_fwd",
    function=_attention_fwd_kernel,
    kind="matrix",
    settings={
        80: Settings(_TILE_64, warps=4, stages=3),
        90: Settings(_TILE_64, warps=4, stages=2, max_registers=_FWD_REGISTERS_90),
        100: Settings(_TILE_64, warps=4, stages=3, max_registers=168),
    },
    wide_settings=_WIDE,
    builds=(
        Build(
            signature=_POINTERS | {"lse_HP": "*fp32", "spans_2P": "*i32", "scale": "fp32", "P": "i32"} | _STRIDES,
            constants={"K": 64},
            divisible=("P", *_STRIDES),
        ),
    ),
    cost=_cost(4, 2),
)
ATTENTION_DQ = declare(
    name="attention_dq",
    function=_attention_dq_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 64, "BLOCK_N": 32}, warps=4, stages=2),
        90: Settings(_TILE_64, warps=4, stages=2),
        100: Settings(_TILE_64, warps=4, stages=2),
    },
    wide_settings=_WIDE,
    builds=(
        Build(
            signature=_POINTERS | {"dout": "*bf16", "dq": "*bf16"} | _ROWS | _OUT_STRIDES,
            constants={"K": 64},
            divisible=("P", *_OUT_STRIDES),
        ),
    ),
    cost=_cost(6, 3),
)
ATTENTION_DKV = declare(
    name="attention_dkv",
    function=_attention_dkv_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 32, "BLOCK_N": 64}, warps=4, stages=2),
        90: Settings(_TILE_64, warps=8, stages=2),
        100: Settings(_TILE_64, warps=8, stages=2),
    },
    wide_settings=_WIDE,
    builds=(
        Build(
            signature={name: "*bf16" for name in ("q", "k", "v", "dout", "dk", "dv")} | _ROWS | _OUT_STRIDES,
            constants={"K": 64},
            divisible=("P", *_OUT_STRIDES),
        ),
    ),
    cost=_cost(6, 4),
)
