"""Byte embedding in Triton: rows of a table, and its gradient as a product with one-hot rows.

Forward: a program copies a few rows, `8 N + 4 N D` bytes (fp32; the table is read from the cache). Backward: `dtable = onehot @ dout` on tensor cores, in splits of the
positions whose partial sums are added in order: no atomics, no sort, and a byte that stands at half the positions costs no more than
one that stands nowhere. A one-hot factor is exact in bf16, and an fp32 gradient is three bf16 numbers to the last bit, so nothing is
rounded but the sum: `2 * 3 * N V D` operations (V padded to 320).
Legend: N positions that show a byte, V rows of the table, D width, G splits.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot, narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's annotations are those of its host side.


@triton.jit
def _byte_embed_fwd_kernel(
    table_VD: "Any", shown_N: "Any", out_ND: "Any", N: "Any", D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
) -> None:
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_n = o_n < N
    mask = m_n[:, None] & (o_d < D)[None, :]
    shown = tl.load(shown_N + o_n, mask=m_n, other=0)
    rows = tl.load(table_VD + shown[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    tl.store(out_ND + o_n[:, None] * D + o_d[None, :], rows, mask=mask)


@triton.jit
def _byte_embed_bwd_kernel(
    shown_N: "Any",
    dout_ND: "Any",
    partials_GVD: "Any",
    N: "Any",
    stride_n: "Any",
    V: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i_g = tl.program_id(2).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    m_d = o_d < D
    share = tl.cdiv(tl.cdiv(N, SPLITS), BLOCK_N) * BLOCK_N
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, N)
    acc = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    for n in range(low, high, BLOCK_N):
        i_n = n + tl.zeros([], tl.int64)
        m_n = n + o_n < high
        shown = tl.load(shown_N + i_n + o_n, mask=m_n, other=V).to(tl.int32)
        p_dout = dout_ND + (i_n + o_n)[:, None] * stride_n + o_d[None, :]
        b_dout = tl.load(p_dout, mask=m_n[:, None] & m_d[None, :], other=0.0)
        onehot = tl.where(shown[None, :] == o_v[:, None], 1.0, 0.0)
        if PARTS == 1:
            # [V, N] x [N, D]
            acc = dot(onehot.to(b_dout.dtype), b_dout, acc)
        else:
            onehot = onehot.to(tl.bfloat16)
            rest = b_dout.to(tl.float32)
            for _ in tl.static_range(PARTS):
                part = narrow(rest, tl.bfloat16)
                # [V, N] x [N, D]
                acc = dot(onehot, part, acc)
                rest = rest - part.to(tl.float32)
    p_out = partials_GVD + i_g * (V * D) + o_v[:, None] * D + o_d[None, :]
    tl.store(p_out, acc, mask=(o_v < V)[:, None] & m_d[None, :])


def _fwd_cost(work: Workload) -> Cost:
    # Every position has a row: bytes, prefixes, hidden media, zeros. The table stays in the cache.
    return Cost(bytes=work.positions * (8.0 + 4.0 * work.hidden))


def _bwd_cost(work: Workload) -> Cost:
    return Cost(
        bytes=work.positions * (8.0 + 4.0 * work.hidden) + 16 * 4.0 * 257 * work.hidden,
        matrix_operations=6.0 * work.positions * 320 * work.hidden,
    )


BYTE_EMBED_FWD = declare(
    name="byte_embed_fwd",
    function=_byte_embed_fwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_N": 4, "BLOCK_D": 512}, warps=4),
    interpreter_settings=Settings({"BLOCK_N": 64, "BLOCK_D": 64}),
    builds=(
        Build(signature={"table_VD": "*fp32", "shown_N": "*i64", "out_ND": "*fp32", "N": "i32"}, constants={"D": 1024}, divisible=("N",)),
    ),
    cost=_fwd_cost,
)
BYTE_EMBED_BWD = declare(
    name="byte_embed_bwd",
    function=_byte_embed_bwd_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_V": 64, "BLOCK_N": 32, "BLOCK_D": 64, "SPLITS": 16}, warps=4, stages=2),
        90: Settings({"BLOCK_V": 64, "BLOCK_N": 64, "BLOCK_D": 64, "SPLITS": 16}, warps=4, stages=2),
        100: Settings({"BLOCK_V": 64, "BLOCK_N": 64, "BLOCK_D": 64, "SPLITS": 16}, warps=4, stages=2),
    },
    interpreter_settings=Settings({"BLOCK_V": 128, "BLOCK_N": 64, "BLOCK_D": 64, "SPLITS": 3}),
    builds=tuple(
        Build(
            signature={"shown_N": "*i64", "dout_ND": dtype, "partials_GVD": "*fp32", "N": "i32", "stride_n": "i32"},
            constants={"V": 257, "D": 1024, "PARTS": parts},
            divisible=("N", "stride_n"),
            label=label,
        )
        for label, dtype, parts in (("", "*fp32", 3), ("bf16", "*bf16", 1))
    ),
    cost=_bwd_cost,
)
