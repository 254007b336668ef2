"""MaxSim in Triton: forward keeps each query token's winner in every document, backward gathers (queries) and walks them sorted (documents).

Bytes: queries and documents from cache, 2 `T N` of winners out; backward reads `2 T N W` of winning vectors each way, from cache.
Operations: one product of `2 T K W` forwards, on tensor cores, none backwards. Forward is bound by the product, backward by the cache.

On ties the lowest token wins: equal columns of a tile are equal to the last bit, and a later tile must be larger to win.

Suffixes: T query tokens, K document tokens, W width, Q queries, N documents.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def largest_of_rows(x: "Any") -> "Any":
    """The largest value of each row of a tile."""
    return tl.max(x, 1)


@triton.jit
def _maxsim_fwd_kernel(
    p_u: "Any", p_v: "Any", p_queries: "Any", p_documents: "Any", p_score: "Any", p_winner: "Any", N: "Any", T: "Any", W: "Any",
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """One query against BLOCK_D documents: scores `[Q, N]`, winners `[N, T]` counted from the document's first token."""
    q, g = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(p_queries + q), tl.load(p_queries + q + 1)
    k = tl.arange(0, BLOCK_W)
    m_k = k < W
    d_first, d_end = g * BLOCK_D, tl.minimum(g * BLOCK_D + BLOCK_D, N)
    if end == first:
        for d in range(d_first, d_end):
            tl.store(p_score + q * N + d, 0.0)
    for i_low in range(first, end, BLOCK_M):
        i = i_low + tl.arange(0, BLOCK_M)
        m_i = i < end
        u = tl.load(p_u + i.to(tl.int64)[:, None] * W + k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0)
        for d in range(d_first, d_end):
            low, high = tl.load(p_documents + d), tl.load(p_documents + d + 1)
            best = tl.full([BLOCK_M], -1e30, tl.float32)
            winner = tl.zeros([BLOCK_M], tl.int32)
            for j_low in range(low, high, BLOCK_N):
                j = j_low + tl.arange(0, BLOCK_N)
                m_j = j < high
                v = tl.load(p_v + j.to(tl.int64)[:, None] * W + k[None, :], mask=m_j[:, None] & m_k[None, :], other=0.0)
                s = dot(u, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))  # [M, W] @ [W, N]
                s = tl.where(m_j[None, :], s, -1e30)
                # Two plain reductions take fewer registers than one with indices.
                top = largest_of_rows(s)
                column = tl.min(tl.where(s == top[:, None], (j - low)[None, :], 0x7FFFFFFF), 1)
                winner = tl.where(top > best, column, winner)
                best = tl.maximum(best, top)
            score = tl.where(high > low, tl.sum(tl.where(m_i, best, 0.0)), 0.0)
            p_s = p_score + q * N + d
            # An earlier block of a long query has stored its part, seen by all threads after the barrier.
            tl.store(p_s, score + tl.where(i_low > first, tl.load(p_s), 0.0))
            o_w = (d + tl.zeros([], tl.int64)) * T + i
            tl.store(p_winner + o_w, winner.to(p_winner.dtype.element_ty), mask=tl.where(high > low, m_i, False))
        tl.debug_barrier()


@triton.jit
def _maxsim_du_kernel(
    p_v: "Any", p_winner: "Any", p_documents: "Any", p_by_score: "Any", p_query_of: "Any", p_count: "Any", p_du: "Any",
    N: "Any", T: "Any", W: "Any", BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """dU `[T, W]`: over the documents in order, the winner's vector times the score's gradient; zeros past the last token."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = i < tl.load(p_count)
    k = tl.arange(0, BLOCK_W)
    m_k = k < W
    q = tl.load(p_query_of + i, mask=m_i, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    for d in range(0, N):
        low, high = tl.load(p_documents + d), tl.load(p_documents + d + 1)
        m = tl.where(high > low, m_i, False)
        winner = tl.load(p_winner + (d + tl.zeros([], tl.int64)) * T + i, mask=m, other=0).to(tl.int32)
        by_score = tl.load(p_by_score + q * N + d, mask=m, other=0.0)
        v = tl.load(p_v + (low + winner).to(tl.int64)[:, None] * W + k[None, :], mask=m[:, None] & m_k[None, :], other=0.0)
        acc += by_score[:, None] * v.to(tl.float32)
    tl.store(p_du + i.to(tl.int64)[:, None] * W + k[None, :], acc, mask=(i < T)[:, None] & m_k[None, :])


@triton.jit
def _maxsim_dv_kernel(
    p_u: "Any", p_order: "Any", p_runs: "Any", p_by_score: "Any", p_query_of: "Any", p_document_of: "Any", p_dv: "Any",
    N: "Any", T: "Any", W: "Any", BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """dV of one document token: its run of sorted wins, each an index `document * T + query token`, in order."""
    j = tl.program_id(0)
    k = tl.arange(0, BLOCK_W)
    m_k = k < W
    d = tl.load(p_document_of + j)
    acc = tl.zeros([BLOCK_W], tl.float32)
    end = tl.load(p_runs + j + 1)
    for e_low in range(tl.load(p_runs + j), end, BLOCK_E):
        e = e_low + tl.arange(0, BLOCK_E)
        m_e = e < end
        i = tl.load(p_order + e, mask=m_e, other=0) - d * T
        i = tl.where(m_e, i, 0)
        by_score = tl.load(p_by_score + tl.load(p_query_of + i, mask=m_e, other=0) * N + d, mask=m_e, other=0.0)
        u = tl.load(p_u + i.to(tl.int64)[:, None] * W + k[None, :], mask=m_e[:, None] & m_k[None, :], other=0.0)
        acc += tl.sum(by_score[:, None] * u.to(tl.float32), 0)
    tl.store(p_dv + (j + tl.zeros([], tl.int64)) * W + k, acc, mask=m_k)


QUERY_TOKENS, DOCUMENTS, TOKEN_WIDTH = 2048, 128, 128
"""What costs are counted for: 64 queries of 32 tokens, 128 documents of 256."""


def _fwd_cost(work: Workload) -> Cost:
    tokens = work.positions / 2
    return Cost(
        bytes=2.0 * (TOKEN_WIDTH * (QUERY_TOKENS + tokens) + QUERY_TOKENS * DOCUMENTS),
        matrix_operations=2.0 * QUERY_TOKENS * tokens * TOKEN_WIDTH,
    )


def _bwd_cost(work: Workload) -> Cost:
    del work
    return Cost(bytes=2.0 * QUERY_TOKENS * DOCUMENTS * (TOKEN_WIDTH + 1))


_fwd_types = {"p_u": "*bf16", "p_v": "*bf16", "p_queries": "*i32", "p_documents": "*i32", "p_score": "*fp32", "p_winner": "*i16"}
_back_types = {"p_by_score": "*fp32", "p_query_of": "*i32"}
_sizes = {"N": "i32", "T": "i32", "W": "i32"}
MAXSIM_FWD = declare(
    name="maxsim_fwd",
    function=_maxsim_fwd_kernel,
    kind="matrix",
    settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 8}, warps=4, stages=3),
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_D": 8}, warps=4, stages=2),
    builds=(Build(signature=_fwd_types | _sizes, constants={"BLOCK_W": 128}, divisible=("W",)),),
    cost=_fwd_cost,
)
MAXSIM_DU = declare(
    name="maxsim_du",
    function=_maxsim_du_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_M": 16}, warps=4, stages=3),
    builds=(
        Build(
            signature={
                "p_v": "*bf16",
                "p_winner": "*i16",
                "p_documents": "*i32",
                **_back_types,
                "p_count": "*i32",
                "p_du": "*fp32",
                **_sizes,
            },
            constants={"BLOCK_W": 128},
            divisible=("W",),
        ),
    ),
    cost=_bwd_cost,
)
MAXSIM_DV = declare(
    name="maxsim_dv",
    function=_maxsim_dv_kernel,
    kind="other",
    settings=Settings({"BLOCK_E": 16}, warps=4, stages=2),
    builds=(
        Build(
            signature={
                "p_u": "*bf16",
                "p_order": "*i32",
                "p_runs": "*i32",
                **_back_types,
                "p_document_of": "*i32",
                "p_dv": "*fp32",
                **_sizes,
            },
            constants={"BLOCK_W": 128},
            divisible=("W",),
        ),
    ),
    cost=_bwd_cost,
)
