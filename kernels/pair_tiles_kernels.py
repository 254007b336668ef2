"""Tile kernels of the pair losses: one pass over anchors x candidates gives losses, row and column sums, and what gradients are made of.

A program owns 64 anchors and a run of candidate tiles. The dot product of width w is the running sum of column blocks, so one pass over
the columns serves every matryoshka width; groups, edges and validity are settled in registers. Of the pairs, only repelling ones are
scored here: attracting edges are few, and `pair_edges_kernels.py` scores them one by one.

RANKED's positives are walked one by one (`direct`), or, where that would cost more, the anchor's repelling scores enter as Chebyshev
moments: `sum_n v_n T_k(x_n)` for k below a number of nodes that the temperature sets, three operations per pair and node.

Bytes: X once per candidate run and Y once per anchor block from the second-level cache, H written once. Operations: `2 M N D` on tensor
cores, and about 40 per pair and width beside them (RANKED: 24 more per attracting edge, or 3 per node).

Suffixes: M anchors, N candidates, D width, W widths, A attracting edges, E named edges, C runs of candidates, B anchors of a slab.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot, narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2147483647)
PLAN_ROWS = tl.constexpr(64)
"""Anchors that choose together how their attracting edges are scored: a multiple of every BLOCK_M."""


@triton.jit
def log1p_unit(e: "Any") -> "Any":
    """log(1 + e) for e in [0, 1], relative error 2e-7: `tl.log` is a software routine of 20 instructions that spills here."""
    p = 0.005253457929939032 * e - 0.02958850748836994
    p = p * e + 0.07836166769266129
    p = p * e - 0.13674770295619965
    p = p * e + 0.19111430644989014
    p = p * e - 0.24844369292259216
    p = p * e + 0.33319270610809326
    p = p * e - 0.49999502301216125
    return (p * e + 1.0) * e


@triton.jit
def softplus_sigmoid(s: "Any") -> "Any":
    """softplus(s) and its derivative, from one exponential and one reciprocal."""
    e = tl.exp2(-tl.abs(s) * LOG2E)
    r = 1.0 / (1.0 + e)
    return tl.maximum(s, 0.0) + log1p_unit(e), tl.where(s >= 0, r, e * r)


@triton.jit
def largest(x: "Any") -> "Any":
    """The largest value of a block, as a bound of loops."""
    return tl.max(x)


@triton.jit
def named_run(p_offsets: "Any", p_ids: "Any", i: "Any", m_i: "Any") -> "Any":
    """Where each anchor's named edges begin, how many there are, the most of the block, and the span of ids they touch."""
    first = tl.load(p_offsets + i, mask=m_i, other=0)
    count = tl.load(p_offsets + i + 1, mask=m_i, other=0) - first
    low = tl.min(tl.load(p_ids + first, mask=count > 0, other=FAR))
    high = tl.max(tl.load(p_ids + first + count - 1, mask=count > 0, other=-1))
    return first, count, largest(count), low, high


@triton.jit
def repelling(
    s: "Any",
    i_self: "Any",
    i_group: "Any",
    m_i: "Any",
    first: "Any",
    count: "Any",
    most: "Any",
    low: "Any",
    high: "Any",
    j: "Any",
    p_weight: "Any",
    p_group: "Any",
    p_ids: "Any",
    p_repel: "Any",
    N: "Any",
    BLOCK_N: tl.constexpr,
) -> "Any":
    """Repelling weight of every pair of the tile: named edges first, else the candidate's own weight unless it is the anchor or of its group."""
    m_j = j < N
    weight = tl.load(p_weight + j, mask=m_j, other=0.0)
    group = tl.load(p_group + j, mask=m_j, other=-1)
    # The comparison with s is never true: it ties v to the dot's layout, or its row sum would be made in a second copy of the tile.
    v = tl.where((i_group[:, None] == group[None, :]) | (i_self[:, None] == j[None, :]) | (s < -1e30), 0.0, weight[None, :])
    j_low = tl.min(j)
    if (low < j_low + BLOCK_N) & (high >= j_low):
        for e in range(most):
            m_e = e < count
            ids = tl.load(p_ids + first + e, mask=m_e, other=-1)
            named = tl.load(p_repel + first + e, mask=m_e, other=0.0)
            v = tl.where(ids[:, None] == j[None, :], named[:, None], v)
    return tl.where(m_i[:, None], v, 0.0)


@triton.jit
def add_to(p: "Any", m: "Any", value: "Any", fresh: "Any") -> "Any":
    """Adds to what this program alone owns; its first tile overwrites."""
    old = tl.load(p, mask=m, other=0.0)
    tl.store(p, tl.where(fresh, 0.0, old) + value, mask=m)


@triton.jit
def ranked_direct(
    s: "Any", v: "Any", p_attract: "Any", p_scores: "Any", p_pulled: "Any", a_first: "Any", a_count: "Any", a_most: "Any", fresh: "Any"
) -> "Any":
    """`sum_p u_p softplus(s - s_p)` over attracting edges: its weighted row sums, its slope by s, and into `p_pulled` each edge's own sums."""
    loss = tl.sum(v * 0.0, 1)
    slope = v * 0.0
    for p in range(a_most):
        m_p = p < a_count
        u = tl.load(p_attract + a_first + p, mask=m_p, other=0.0)
        score = tl.load(p_scores + a_first + p, mask=m_p, other=0.0)
        f, g = softplus_sigmoid(s - score[:, None])
        loss += u * tl.sum(v * f, 1)
        slope += u[:, None] * g
        add_to(p_pulled + a_first + p, m_p, tl.sum(v * g, 1), fresh)
    return loss, slope * v


@triton.jit
def ranked_moments(
    cosine: "Any",
    v: "Any",
    p_moments: "Any",
    p_slopes: "Any",
    stride: "Any",
    m_b: "Any",
    nodes: "Any",
    fresh: "Any",
    GRADIENT: tl.constexpr,
) -> "Any":
    """Moments `sum_n v_n T_k(x_n)` of the tile's scores, and the slope `v sum_k g_k T_k(x)`: the weight rides in the recurrence."""
    a = v
    b = v * cosine
    twice = 2.0 * cosine
    slope = v * 0.0
    for k in range(0, nodes, 2):
        add_to(p_moments + k * stride, m_b, tl.sum(a, 1), fresh)
        add_to(p_moments + (k + 1) * stride, m_b, tl.sum(b, 1), fresh)
        if GRADIENT:
            g0 = tl.load(p_slopes + k * stride, mask=m_b, other=0.0)
            g1 = tl.load(p_slopes + (k + 1) * stride, mask=m_b, other=0.0)
            slope += g0[:, None] * a + g1[:, None] * b
        a = twice * b - a
        b = twice * a - b
    return slope


@triton.jit
def _pair_tiles_kernel(
    p_x: "Any", p_y: "Any", p_nx: "Any", p_ny: "Any", p_scale: "Any", p_bias: "Any", p_self: "Any", p_gx: "Any", p_gy: "Any", p_weight: "Any", p_offsets: "Any", p_ids: "Any", p_repel: "Any", p_cv: "Any",
    p_a_offsets: "Any", p_attract: "Any", p_a_scores: "Any", p_nodes: "Any", p_slopes: "Any",
    p_loss: "Any", p_rs: "Any", p_rb: "Any", p_cs: "Any", p_h: "Any", p_pulled: "Any", p_moments: "Any", p_widths: "Any",
    M: "Any", N: "Any", D: "Any", A: "Any", i_base: "Any", slab: "Any", pitch: "Any",
    W: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, RANKED: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Losses and gradients of one slab of anchors.

    Out: loss, rs, rb `[C, W, slab]`: sums over a run of candidates of `v f(s)`, of `G (s - b)` and of `G = dL/ds`; cs `[blocks, W, pitch]`: column
    sums of `G (s - b)`; h `[W, slab, pitch]`: `G t nx ny`; pulled `[C, W, A]` and moments `[C, W, K, slab]` under RANKED.
    """
    i_m, i_c = tl.program_id(0), tl.program_id(1)
    o_b = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    i = i_base + o_b
    m_i = i < M
    i_self = tl.load(p_self + i, mask=m_i, other=-1)
    i_group = tl.load(p_gx + i, mask=m_i, other=-2)
    scale = tl.load(p_scale + i, mask=m_i, other=0.0)
    bias = tl.load(p_bias + i, mask=m_i, other=0.0)
    cv = tl.load(p_cv + i, mask=m_i, other=0.0)
    first, count, most, low, high = named_run(p_offsets, p_ids, i, m_i)
    a_first, a_count, a_most, nodes = 0, 0, 0, 0
    if RANKED:
        a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
        a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
        nodes = tl.load(p_nodes + (i_base + i_m * BLOCK_M) // PLAN_ROWS)
        a_most = tl.where(nodes > 0, 0, largest(a_count))
    for tile in range(tl.minimum(TILES, tl.cdiv(N - i_c * TILES * BLOCK_N, BLOCK_N))):
        j_low = (i_c * TILES + tile) * BLOCK_N
        j = j_low + tl.arange(0, BLOCK_N)
        m_j = j < N
        fresh = tile == 0
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # A loop, not unrolled: one copy of what follows the dot for all widths.
        for w in range(W):
            # Widths come in units of 8, whose product carries the 16-byte divisibility that a loaded width would lose.
            k_first, k_end = tl.load(p_widths + w), tl.load(p_widths + w + 1)
            for k8 in range(k_first, k_end, BLOCK_K // 8):
                k = k8 * 8 + tl.arange(0, BLOCK_K)
                m_k = k < k_end * 8
                x = tl.load(p_x + i.to(tl.int64)[:, None] * D + k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0)
                y = tl.load(p_y + j.to(tl.int64)[:, None] * D + k[None, :], mask=m_j[:, None] & m_k[None, :], other=0.0)
                product = dot(x, tl.trans(y), product)  # [M, K] @ [K, N]
            nx = tl.load(p_nx + w * M + i, mask=m_i, other=0.0)
            ny = tl.load(p_ny + w * N + j, mask=m_j, other=0.0)
            cosine = product * nx[:, None] * ny[None, :]
            s = cosine * scale[:, None] + bias[:, None]
            v = repelling(s, i_self, i_group, m_i, first, count, most, low, high, j, p_weight, p_gy, p_ids, p_repel, N, BLOCK_N)
            o_w = (i_c * W + w).to(tl.int64) * slab + o_b
            if RANKED:
                loss, slope = ranked_direct(
                    s, v, p_attract, p_a_scores + w * A, p_pulled + (i_c * W + w).to(tl.int64) * A, a_first, a_count, a_most, fresh
                )
                p_m = p_moments + (i_c * W + w).to(tl.int64) * K * slab + o_b
                slope += ranked_moments(cosine, v, p_m, p_slopes + w * K * slab + o_b, slab, m_i, nodes, fresh, GRADIENT)
            else:
                f, g = softplus_sigmoid(s)
                loss = tl.sum(v * f, 1)
                slope = v * g
            add_to(p_loss + o_w, m_i, loss, fresh)
            if GRADIENT:
                slope *= cv[:, None]
                rise = slope * (cosine * scale[:, None])
                add_to(p_rs + o_w, m_i, tl.sum(rise, 1), fresh)
                add_to(p_rb + o_w, m_i, tl.sum(slope, 1), fresh)
                tl.store(p_cs + (i_m * W + w).to(tl.int64) * pitch + j, tl.sum(rise, 0))
                h = slope * (scale * nx)[:, None] * ny[None, :]
                o_h = (w * slab + o_b).to(tl.int64)[:, None] * pitch + j[None, :]
                tl.store(p_h + o_h, narrow(h, p_h.dtype.element_ty))
            # What add_to wrote, other threads of this program read in the next tile.
            tl.debug_barrier()


@triton.jit
def _pair_weights_kernel(
    p_self: "Any", p_gx: "Any", p_gy: "Any", p_weight: "Any", p_offsets: "Any", p_ids: "Any", p_repel: "Any", p_a_offsets: "Any", p_attract: "Any", p_su: "Any", p_sv: "Any", M: "Any", N: "Any",
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Every anchor's summed attracting and repelling weights, `[M]`, from integers and weights alone.

    Bytes: 8 N a block of anchors, from cache. Operations: about 6 a pair.
    """
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = i < M
    i_self = tl.load(p_self + i, mask=m_i, other=-1)
    i_group = tl.load(p_gx + i, mask=m_i, other=-2)
    first, count, most, low, high = named_run(p_offsets, p_ids, i, m_i)
    sv = tl.zeros([BLOCK_M], tl.float32)
    for j_low in range(0, N, BLOCK_N):
        j = j_low + tl.arange(0, BLOCK_N)
        none = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        v = repelling(none, i_self, i_group, m_i, first, count, most, low, high, j, p_weight, p_gy, p_ids, p_repel, N, BLOCK_N)
        sv += tl.sum(v, 1)
    a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
    a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
    su = tl.zeros([BLOCK_M], tl.float32)
    for p in range(largest(a_count)):
        su += tl.load(p_attract + a_first + p, mask=p < a_count, other=0.0)
    tl.store(p_su + i, su, mask=m_i)
    tl.store(p_sv + i, sv, mask=m_i)


@triton.jit
def _row_tiles_kernel(
    p_s: "Any", p_self: "Any", p_gx: "Any", p_gy: "Any", p_weight: "Any", p_offsets: "Any", p_ids: "Any", p_repel: "Any", p_cv: "Any", p_a_offsets: "Any", p_attract: "Any", p_a_scores: "Any", p_loss: "Any", p_g: "Any", p_pulled: "Any",
    M: "Any", N: "Any", A: "Any", stride: "Any", TILES: tl.constexpr, RANKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """`_pair_tiles_kernel` over a matrix of scores instead of products of vectors: loss `[C, M]`, its gradient by the scores g `[M, N]`.

    Bytes: 8 a pair. Operations: about 40 a pair, RANKED 24 per attracting edge. Bandwidth bounds it up to about ten edges.
    """
    i_c = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_i = i < M
    i_self = tl.load(p_self + i, mask=m_i, other=-1)
    i_group = tl.load(p_gx + i, mask=m_i, other=-2)
    cv = tl.load(p_cv + i, mask=m_i, other=0.0)
    first, count, most, low, high = named_run(p_offsets, p_ids, i, m_i)
    a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
    a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
    for tile in range(tl.minimum(TILES, tl.cdiv(N - i_c * TILES * BLOCK_N, BLOCK_N))):
        j = (i_c * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        fresh = tile == 0
        m_ij = m_i[:, None] & (j < N)[None, :]
        s = tl.load(p_s + i.to(tl.int64)[:, None] * stride + j[None, :], mask=m_ij, other=0.0).to(tl.float32)
        v = repelling(s, i_self, i_group, m_i, first, count, most, low, high, j, p_weight, p_gy, p_ids, p_repel, N, BLOCK_N)
        if RANKED:
            loss, slope = ranked_direct(
                s, v, p_attract, p_a_scores, p_pulled + i_c.to(tl.int64) * A, a_first, a_count, largest(a_count), fresh
            )
        else:
            f, g = softplus_sigmoid(s)
            loss = tl.sum(v * f, 1)
            slope = v * g
        add_to(p_loss + i_c.to(tl.int64) * M + i, m_i, loss, fresh)
        tl.store(p_g + i.to(tl.int64)[:, None] * N + j[None, :], slope * cv[:, None], mask=m_ij)
        tl.debug_barrier()


_TYPES = {
    "p_x": "*bf16", "p_y": "*bf16", "p_h": "*bf16", "p_self": "*i32", "p_gx": "*i32", "p_gy": "*i32", "p_offsets": "*i32", "p_ids": "*i32",
    "p_a_offsets": "*i32", "p_nodes": "*i32", "p_widths": "*i32", "p_columns": "*i32", "p_rows": "*i32", "p_in_offsets": "*i32",
    "p_in_edges": "*i32", "p_count": "*i32", "p_group": "*i32", "p_copy": "*bf16",
}  # fmt: skip


def signature(function: Any, constants: Mapping[str, Any], **given: str) -> dict[str, str]:
    """Types of a pair kernel's parameters by name: integers and vectors as above, every other pointer fp32, numbers int32."""
    names = [name for name in function.arg_names if name not in constants and not name.startswith("BLOCK_")]
    return {name: given.get(name, _TYPES.get(name, "*fp32" if name.startswith("p_") else "i32")) for name in names}


RUN_TILES = 4
"""Candidate tiles that one program walks: what it keeps per anchor is written this many times less often."""
MOST_NODES = 256

_tile_constants = {"W": 1, "K": MOST_NODES, "TILES": RUN_TILES, "GRADIENT": True}
_divisible = ("D", "slab", "pitch")


def _tile_builds(ranked: bool) -> tuple[Build, ...]:
    forms = []
    for widths in (1, 4, 8):
        constants = _tile_constants | {"W": widths, "RANKED": ranked}
        forms.append(
            Build(
                signature=signature(_pair_tiles_kernel, constants),
                constants=constants,
                divisible=_divisible,
                label=f"{widths} widths" if widths > 1 else "",
            )
        )
    return tuple(forms)


def _tile_cost(work: Workload) -> Cost:
    pairs, width = work.segments**2, work.hidden
    return Cost(bytes=2.0 * (2 * work.segments * width + pairs), matrix_operations=2.0 * pairs * width)


PAIR_TILES = declare(
    name="pair_tiles",
    function=_pair_tiles_kernel,
    kind="matrix",
    settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, warps=8, stages=3),
    wide_settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, warps=8, stages=2),
    builds=_tile_builds(False),
    cost=_tile_cost,
)
PAIR_TILES_RANKED = declare(
    name="pair_tiles_ranked",
    function=_pair_tiles_kernel,
    kind="matrix",
    # 64 candidates spill: on sm_80 and sm_100 in triton 3.8, on sm_90 in 3.6.
    settings=Settings({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64}, warps=8, stages=3),
    wide_settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, warps=8, stages=2),
    builds=_tile_builds(True),
    cost=_tile_cost,
)
PAIR_WEIGHTS = declare(
    name="pair_weights",
    function=_pair_weights_kernel,
    kind="other",
    settings=Settings({"BLOCK_M": 8, "BLOCK_N": 256}, warps=4, stages=1),
    builds=(Build(signature=signature(_pair_weights_kernel, {})),),
    cost=lambda work: Cost(bytes=32.0 * work.segments),
)
_row_constants = {"TILES": RUN_TILES}
ROW_TILES = declare(
    name="row_tiles",
    function=_row_tiles_kernel,
    kind="other",
    settings=Settings({"BLOCK_M": 16, "BLOCK_N": 128}, warps=4, stages=1),
    builds=tuple(
        Build(
            signature=signature(_row_tiles_kernel, _row_constants | {"RANKED": 0}),
            constants=_row_constants | {"RANKED": ranked},
            divisible=("N", "stride"),
            label="ranked" if ranked else "",
        )
        for ranked in (False, True)
    ),
    cost=lambda work: Cost(bytes=8.0 * work.segments**2),
)
