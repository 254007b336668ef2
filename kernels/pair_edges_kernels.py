"""Sparse and per-anchor kernels of the pair losses: directions, attracting edges, Chebyshev nodes, and what closes a slab of anchors.

None is large: directions read every vector once, edges gather two vectors each, the rest reads what a pass over tiles left per anchor.

RANKED by nodes: on the interval of an anchor's scores, `F(s) = sum_p u_p softplus(s - s_p)` is a polynomial to within rounding, so
`sum_n v_n F(s_n)` is `sum_j W_j F(x_j)` over Chebyshev nodes `x_j`, where `W` follows from the moments `sum_n v_n T_k`. The slope F' has
coefficients `g_k`, made here before the pass (Trefethen, Approximation Theory and Approximation Practice, chapters 3 and 19).

Suffixes: M anchors, N candidates, D width, W widths, A attracting edges, C runs of candidates, B anchors of a slab, K nodes.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.pair_tiles_kernels import MOST_NODES, PLAN_ROWS, largest, signature, softplus_sigmoid
from treadle.kernels.registry import Build, Cost, Kernel, Settings, declare

PI = tl.constexpr(3.141592653589793)


@triton.jit
def _directions_kernel(
    p_x: "Any", p_copy: "Any", p_inverse: "Any", p_widths: "Any", M: "Any", D: "Any", stride: "Any",
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """The vectors in the products' type, `[M, D]`, and one over the length of every width's prefix, `[W, M]`; 0 below 1e-12."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = i < M
    square = tl.zeros([BLOCK_M], tl.float32)
    for w in range(W):
        k_first, k_end = tl.load(p_widths + w), tl.load(p_widths + w + 1)
        for k8 in range(k_first, k_end, BLOCK_K // 8):
            k = k8 * 8 + tl.arange(0, BLOCK_K)
            m = m_i[:, None] & (k < k_end * 8)[None, :]
            x = tl.load(p_x + i.to(tl.int64)[:, None] * stride + k[None, :], mask=m, other=0.0).to(tl.float32)
            copy = narrow(x, p_copy.dtype.element_ty)
            tl.store(p_copy + i.to(tl.int64)[:, None] * D + k[None, :], copy, mask=m)
            x = copy.to(tl.float32)
            square += tl.sum(x * x, 1)
        length = tl.sqrt(square)
        tl.store(p_inverse + w * M + i, tl.where(length > 1e-12, 1.0 / tl.maximum(length, 1e-12), 0.0), mask=m_i)


@triton.jit
def _edge_scores_kernel(
    p_x: "Any", p_y: "Any", p_nx: "Any", p_ny: "Any", p_scale: "Any", p_bias: "Any", p_rows: "Any", p_columns: "Any", p_scores: "Any", p_widths: "Any",
    p_count: "Any", M: "Any", N: "Any", D: "Any", A: "Any", W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Scores `[W, A]` of the attracting edges."""
    e = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    m_e = e < tl.load(p_count)
    row = tl.load(p_rows + e, mask=m_e, other=0)
    column = tl.load(p_columns + e, mask=m_e, other=0)
    scale = tl.load(p_scale + row, mask=m_e, other=0.0)
    bias = tl.load(p_bias + row, mask=m_e, other=0.0)
    product = tl.zeros([BLOCK_A], tl.float32)
    for w in range(W):
        k_first, k_end = tl.load(p_widths + w), tl.load(p_widths + w + 1)
        for k8 in range(k_first, k_end, BLOCK_K // 8):
            k = k8 * 8 + tl.arange(0, BLOCK_K)
            m = m_e[:, None] & (k < k_end * 8)[None, :]
            x = tl.load(p_x + row.to(tl.int64)[:, None] * D + k[None, :], mask=m, other=0.0).to(tl.float32)
            y = tl.load(p_y + column.to(tl.int64)[:, None] * D + k[None, :], mask=m, other=0.0).to(tl.float32)
            product += tl.sum(x * y, 1)
        nx = tl.load(p_nx + w * M + row, mask=m_e, other=0.0)
        ny = tl.load(p_ny + w * N + column, mask=m_e, other=0.0)
        tl.store(p_scores + w * A + e, product * nx * ny * scale + bias, mask=m_e)


@triton.jit
def chebyshev(k: "Any", o_k: "Any", nodes: "Any") -> "Any":
    """T_k at the nodes `cos((j + 1/2) pi / nodes)`: the angle is folded into a quarter turn in integers, where a polynomial is exact to 1e-8.

    `tl.cos` keeps a table in local memory for arguments that never occur here.
    """
    turn = (k * (2 * o_k + 1)) % (4 * nodes)
    half = tl.minimum(turn, 4 * nodes - turn)
    quarter = tl.minimum(half, 2 * nodes - half)
    angle = quarter.to(tl.float32) * (PI / (2.0 * nodes))
    x = angle * angle
    p = 2.08767569878681e-09 * x - 2.755731922398589e-07
    p = p * x + 2.48015873015873e-05
    p = p * x - 1.388888888888889e-03
    p = p * x + 4.1666666666666664e-02
    p = (p * x - 0.5) * x + 1.0
    return tl.where(half > nodes, -p, p)


@triton.jit
def _ranked_slopes_kernel(
    p_scale: "Any", p_bias: "Any", p_a_offsets: "Any", p_attract: "Any", p_a_scores: "Any", p_nodes: "Any", p_slopes: "Any",
    M: "Any", A: "Any", i_base: "Any", slab: "Any", W: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """Chebyshev coefficients `[W, K, slab]` of `F'(s) = sum_p u_p sigmoid(s - s_p)` on `[b - t, b + t]`, for anchors that take nodes."""
    o_b = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tl.program_id(1)
    i = i_base + o_b
    m_i = i < M
    nodes = tl.load(p_nodes + (i_base + tl.program_id(0) * BLOCK_M) // PLAN_ROWS)
    if nodes > 0:
        o_k = tl.arange(0, K)
        scale = tl.load(p_scale + i, mask=m_i, other=0.0)
        bias = tl.load(p_bias + i, mask=m_i, other=0.0)
        a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
        a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
        place = scale[:, None] * chebyshev(1, o_k, nodes)[None, :] + bias[:, None]
        value = tl.zeros([BLOCK_M, K], tl.float32)
        for p in range(largest(a_count)):
            m_p = p < a_count
            u = tl.load(p_attract + a_first + p, mask=m_p, other=0.0)
            score = tl.load(p_a_scores + w * A + a_first + p, mask=m_p, other=0.0)
            _, slope = softplus_sigmoid(place - score[:, None])
            value += u[:, None] * slope
        value = tl.where((o_k < nodes)[None, :], value, 0.0)
        for k in range(nodes):
            share = tl.where(k == 0, 1.0, 2.0) / nodes
            coefficient = tl.sum(value * chebyshev(k, o_k, nodes)[None, :], 1) * share
            tl.store(p_slopes + (w * K + k) * slab + o_b, coefficient, mask=m_i)


@triton.jit
def _ranked_nodes_kernel(
    p_scale: "Any", p_bias: "Any", p_a_offsets: "Any", p_attract: "Any", p_a_scores: "Any", p_nodes: "Any", p_moments: "Any", p_loss: "Any", p_pulled: "Any",
    M: "Any", A: "Any", i_base: "Any", slab: "Any", C: "Any",
    W: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """From the moments `[C, W, K, slab]`: `sum_n v F(s_n)` per anchor into loss `[W, slab]`, `sum_n v sigmoid(s_n - s_p)` per edge into pulled `[W, A]`."""
    o_b = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tl.program_id(1)
    i = i_base + o_b
    m_i = i < M
    nodes = tl.load(p_nodes + (i_base + tl.program_id(0) * BLOCK_M) // PLAN_ROWS)
    if nodes > 0:
        o_k = tl.arange(0, K)
        o_c = tl.arange(0, BLOCK_C)
        weight = tl.zeros([BLOCK_M, K], tl.float32)
        for k in range(nodes):
            moment = tl.zeros([BLOCK_M], tl.float32)
            for c in range(0, C, BLOCK_C):
                o = ((c + o_c).to(tl.int64) * W + w)[:, None] * K * slab + k * slab + o_b[None, :]
                moment += tl.sum(tl.load(p_moments + o, mask=(c + o_c < C)[:, None] & m_i[None, :], other=0.0), 0)
            share = tl.where(k == 0, 1.0, 2.0) / nodes
            weight += (moment * share)[:, None] * chebyshev(k, o_k, nodes)[None, :]
        weight = tl.where((o_k < nodes)[None, :], weight, 0.0)
        scale = tl.load(p_scale + i, mask=m_i, other=0.0)
        bias = tl.load(p_bias + i, mask=m_i, other=0.0)
        a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
        a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
        place = scale[:, None] * chebyshev(1, o_k, nodes)[None, :] + bias[:, None]
        loss = tl.zeros([BLOCK_M], tl.float32)
        for p in range(largest(a_count)):
            m_p = p < a_count
            u = tl.load(p_attract + a_first + p, mask=m_p, other=0.0)
            score = tl.load(p_a_scores + w * A + a_first + p, mask=m_p, other=0.0)
            f, slope = softplus_sigmoid(place - score[:, None])
            loss += u * tl.sum(weight * f, 1)
            tl.store(p_pulled + w * A + a_first + p, tl.sum(weight * slope, 1), mask=m_p)
        tl.store(p_loss + w * slab + o_b, loss, mask=m_i)


@triton.jit
def _anchors_kernel(
    p_cu: "Any", p_cv: "Any", p_scale: "Any", p_bias: "Any", p_nx: "Any", p_ny: "Any", p_a_offsets: "Any", p_columns: "Any", p_attract: "Any", p_a_scores: "Any",
    p_sums: "Any", p_rs: "Any", p_rb: "Any", p_pulled: "Any", p_loss: "Any", p_slope: "Any", p_by_scale: "Any", p_by_bias: "Any", p_force: "Any", p_along: "Any",
    M: "Any", N: "Any", A: "Any", i_base: "Any", slab: "Any",
    W: tl.constexpr, RANKED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    """What closes a slab: each anchor's loss and gradients by log scale and bias `[M]`, edges included.

    In: sums, rs, rb `[W, slab]` over all candidates; pulled `[W, A]`. Out: rs with the edges' part; of every attracting edge slope `dL/ds`,
    force `dL/ds t nx ny` and along `dL/ds (s - b)`, `[W, A]`.
    """
    o_b = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = i_base + o_b
    m_i = i < M
    cu = tl.load(p_cu + i, mask=m_i, other=0.0)
    cv = tl.load(p_cv + i, mask=m_i, other=0.0)
    scale = tl.load(p_scale + i, mask=m_i, other=0.0)
    bias = tl.load(p_bias + i, mask=m_i, other=0.0)
    a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
    a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
    a_most = largest(a_count)
    loss = tl.zeros([BLOCK_M], tl.float32)
    by_scale = tl.zeros([BLOCK_M], tl.float32)
    by_bias = tl.zeros([BLOCK_M], tl.float32)
    for w in range(W):
        loss += cv * tl.load(p_sums + w * slab + o_b, mask=m_i, other=0.0)
        rs = tl.zeros([BLOCK_M], tl.float32)
        if GRADIENT:
            rs += tl.load(p_rs + w * slab + o_b, mask=m_i, other=0.0)
            by_bias += tl.load(p_rb + w * slab + o_b, mask=m_i, other=0.0)
        nx = tl.load(p_nx + w * M + i, mask=m_i, other=0.0)
        for p in range(a_most):
            m_p = p < a_count
            a = a_first + p
            u = tl.load(p_attract + a, mask=m_p, other=0.0)
            score = tl.load(p_a_scores + w * A + a, mask=m_p, other=0.0)
            if RANKED:
                slope = -cv * u * tl.load(p_pulled + w * A + a, mask=m_p, other=0.0)
            else:
                f, share = softplus_sigmoid(-score)
                loss += cu * u * f
                slope = -cu * u * share
            if GRADIENT:
                rs += slope * (score - bias)
                by_bias += slope
                ny = tl.load(p_ny + w * N + tl.load(p_columns + a, mask=m_p, other=0), mask=m_p, other=0.0)
                tl.store(p_slope + w * A + a, slope, mask=m_p)
                tl.store(p_force + w * A + a, slope * scale * nx * ny, mask=m_p)
                tl.store(p_along + w * A + a, slope * (score - bias), mask=m_p)
        by_scale += rs
        if GRADIENT:
            tl.store(p_rs + w * slab + o_b, rs, mask=m_i)
    tl.store(p_loss + i, loss, mask=m_i)
    if GRADIENT:
        tl.store(p_by_scale + i, by_scale, mask=m_i)
        tl.store(p_by_bias + i, by_bias, mask=m_i)


@triton.jit
def _group_sums_kernel(p_group: "Any", p_a: "Any", p_b: "Any", p_sum_a: "Any", p_sum_b: "Any", M: "Any", BLOCK_M: tl.constexpr) -> None:
    """Sums of two columns over the anchors of one temperature group, in the order of the anchors."""
    g = tl.program_id(0)
    a = tl.zeros([BLOCK_M], tl.float32)
    b = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, M, BLOCK_M):
        i = first + tl.arange(0, BLOCK_M)
        m = (i < M) & (tl.load(p_group + i, mask=i < M, other=-1) == g)
        a += tl.load(p_a + i, mask=m, other=0.0)
        b += tl.load(p_b + i, mask=m, other=0.0)
    tl.store(p_sum_a + g, tl.sum(a))
    tl.store(p_sum_b + g, tl.sum(b))


EDGES = 8
"""Attracting edges per anchor that costs are counted for."""


def _declare(name: str, function: Any, blocks: dict[str, int], constants: dict[str, Any], cost: Any, **more: Any) -> Kernel:
    return declare(
        name=name,
        function=function,
        kind=more.pop("kind", "other"),
        settings=Settings(blocks, warps=4, stages=more.pop("stages", 2)),
        builds=(Build(signature=signature(function, constants, **more), constants=constants, divisible=("D", "stride", "slab", "M", "N")),),
        cost=cost,
    )


DIRECTIONS = _declare(
    "directions",
    _directions_kernel,
    {"BLOCK_M": 16, "BLOCK_K": 128},
    {"W": 1},
    lambda work: Cost(bytes=6.0 * work.segments * work.hidden, launches=2),
    kind="streaming",
    p_x="*fp32",
)
EDGE_SCORES = _declare(
    "edge_scores",
    _edge_scores_kernel,
    {"BLOCK_A": 16, "BLOCK_K": 128},
    {"W": 1},
    lambda work: Cost(bytes=4.0 * EDGES * work.segments * work.hidden),
)
RANKED_SLOPES = _declare(
    "ranked_slopes",
    _ranked_slopes_kernel,
    {"BLOCK_M": 8},
    {"W": 1, "K": MOST_NODES},
    lambda work: Cost(bytes=4.0 * work.segments * MOST_NODES),
)
RANKED_NODES = _declare(
    "ranked_nodes",
    _ranked_nodes_kernel,
    {"BLOCK_M": 8, "BLOCK_C": 16},
    {"W": 1, "K": MOST_NODES},
    lambda work: Cost(bytes=4.0 * work.segments * MOST_NODES),
)
ANCHORS = _declare(
    "pair_anchors",
    _anchors_kernel,
    {"BLOCK_M": 32},
    {"W": 1, "RANKED": False, "GRADIENT": True},
    lambda work: Cost(bytes=4.0 * work.segments * (12 + 6 * EDGES)),
)
GROUP_SUMS = _declare("group_sums", _group_sums_kernel, {"BLOCK_M": 1024}, {}, lambda work: Cost(bytes=12.0 * work.segments))
