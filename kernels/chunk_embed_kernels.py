"""Audio chunk embedding in Triton, straight from the tape's float32 samples, and the weight's gradient.

Operations: `2 N V D` forward and again for the gradient. Bytes moved: `4 N V` samples and `2 N D` out forward; samples, `2 N D` and
`8 * 4 V D` of partial sums for the gradient. At V = 320 and D = 1024 that is 200 operations a byte: near the balance of an H100.
Legend: N chunks, V samples of a chunk, D width, M chunks of a tile, G splits.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot, narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _samples(tape_samples: "Any", offset_M: "Any", samples_M: "Any", o_v: "Any", V: tl.constexpr, dtype: tl.constexpr) -> "Any":
    """`[M, V]` samples from byte offsets on, zeros past a recording's end."""
    if V % 4 == 0:
        # Recordings start and end at 16 bytes and so do their chunks: said so, loads are as wide.
        first_M = (offset_M >> 4) * 4
        loaded_M = (samples_M + 3) // 4 * 4
    else:
        first_M = offset_M >> 2
        loaded_M = samples_M
    x = tl.load(tape_samples + first_M[:, None] + o_v[None, :], mask=o_v[None, :] < loaded_M[:, None], other=0.0)
    return narrow(tl.where(o_v[None, :] < samples_M[:, None], x, 0.0), dtype)


@triton.jit
def _chunk_embed_fwd_kernel(
    tape_samples: "Any",
    offset_N: "Any",
    samples_N: "Any",
    weight_DV: "Any",
    out_ND: "Any",
    N: "Any",
    values: "Any",
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """`values` is V, at run time so that the loop is not unrolled."""
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    o_m = (tl.program_id(0) // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = (tl.program_id(0) % TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_m = o_m < N
    m_d = o_d < D
    offset_M = tl.load(offset_N + o_m, mask=m_m, other=0)
    samples_M = tl.load(samples_N + o_m, mask=m_m, other=0).to(tl.int32)
    high = tl.minimum(tl.max(samples_M), values)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for v in range(0, high, BLOCK_V):
        o_v = v + tl.arange(0, BLOCK_V)
        b_x = _samples(tape_samples, offset_M, samples_M, o_v, V, weight_DV.dtype.element_ty)
        b_weight = tl.load(weight_DV + o_d[:, None] * V + o_v[None, :], mask=m_d[:, None] & (o_v < V)[None, :], other=0.0)
        # [M, V] x [V, D]
        acc = dot(b_x, tl.trans(b_weight), acc)
    mask = m_m[:, None] & m_d[None, :]
    tl.store(out_ND + o_m[:, None] * D + o_d[None, :], narrow(acc, out_ND.dtype.element_ty), mask=mask)


@triton.jit
def _chunk_embed_dw_kernel(
    tape_samples: "Any",
    offset_N: "Any",
    samples_N: "Any",
    dout_ND: "Any",
    partials_GDV: "Any",
    N: "Any",
    stride_n: "Any",
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i_g = tl.program_id(2).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_d = o_d < D
    share = tl.cdiv(tl.cdiv(N, SPLITS), BLOCK_M) * BLOCK_M
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, N)
    acc = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    for n in range(low, high, BLOCK_M):
        i_n = n + tl.zeros([], tl.int64) + o_m
        m_m = n + o_m < high
        offset_M = tl.load(offset_N + i_n, mask=m_m, other=0)
        samples_M = tl.load(samples_N + i_n, mask=m_m, other=0).to(tl.int32)
        b_x = _samples(tape_samples, offset_M, samples_M, o_v, V, dout_ND.dtype.element_ty)
        b_dout = tl.load(dout_ND + i_n[:, None] * stride_n + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        # [D, M] x [M, V]
        acc = dot(tl.trans(b_dout), b_x, acc)
    p_out = partials_GDV + i_g * (D * V) + o_d[:, None] * V + o_v[None, :]
    tl.store(p_out, acc, mask=m_d[:, None] & (o_v < V)[None, :])


def _fwd_cost(work: Workload) -> Cost:
    shown, values, hidden = work.visible_share * work.audio_chunks, work.audio_values, work.hidden
    return Cost(bytes=shown * (4.0 * values + 2.0 * hidden) + 2.0 * values * hidden, matrix_operations=2.0 * shown * values * hidden)


def _dw_cost(work: Workload) -> Cost:
    shown, values, hidden = work.visible_share * work.audio_chunks, work.audio_values, work.hidden
    return Cost(bytes=shown * (4.0 * values + 2.0 * hidden) + 8 * 4.0 * values * hidden, matrix_operations=2.0 * shown * values * hidden)


_PLACES = {"tape_samples": "*fp32", "offset_N": "*i64", "samples_N": "*i64", "N": "i32"}

CHUNK_EMBED_FWD = declare(
    name="chunk_embed_fwd",
    function=_chunk_embed_fwd_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_V": 64}, warps=8, stages=3),
        90: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_V": 64}, warps=4, stages=3),
        100: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_V": 64}, warps=4, stages=3),
    },
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_V": 32}, warps=4, stages=2),
    builds=(
        Build(
            signature=_PLACES | {"weight_DV": "*bf16", "out_ND": "*bf16", "values": "i32"},
            constants={"V": 320, "D": 1024},
            divisible=("N", "values"),
        ),
    ),
    cost=_fwd_cost,
)
CHUNK_EMBED_DW = declare(
    name="chunk_embed_dw",
    function=_chunk_embed_dw_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 32, "BLOCK_D": 128, "BLOCK_V": 64, "SPLITS": 8}, warps=4, stages=3),
        90: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_V": 64, "SPLITS": 8}, warps=4, stages=2),
        100: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_V": 64, "SPLITS": 8}, warps=4, stages=2),
    },
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_V": 32, "SPLITS": 8}, warps=4, stages=2),
    interpreter_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_V": 128, "SPLITS": 3}),
    builds=(
        Build(
            signature=_PLACES | {"dout_ND": "*bf16", "partials_GDV": "*fp32", "stride_n": "i32"},
            constants={"V": 320, "D": 1024},
            divisible=("N", "stride_n"),
        ),
    ),
    cost=_dw_cost,
)
