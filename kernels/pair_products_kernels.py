"""Gradient products of the pair losses: coefficients times vectors, for both sides, every width in one accumulator.

With `H_w = dL/ds t nx ny`, the raw gradients are `sum_w H_w Y[:, :w]` and `sum_w H_w^T X[:, :w]`. What a gradient by a unit vector is by
the vector itself takes its part along the vector away; that part is a row (or column) sum of `dL/ds (s - b)`, known from the tiles.

Bytes: H once each, the vectors from cache, the gradients once (dY once per slab of anchors). Operations: `2 M N sum(widths)` each.

Suffixes: M anchors, N candidates, D width, W widths, A attracting edges, B anchors of a slab.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot
from treadle.kernels.pair_tiles_kernels import largest, signature
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _pair_dx_kernel(
    p_h: "Any", p_x: "Any", p_y: "Any", p_nx: "Any", p_rs: "Any", p_a_offsets: "Any", p_columns: "Any", p_force: "Any", p_dx: "Any", p_widths: "Any",
    M: "Any", N: "Any", D: "Any", A: "Any", i_base: "Any", slab: "Any", pitch: "Any",
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """dX of a slab's anchors, edges included."""
    o_b = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = i_base + o_b
    m_i = i < M
    k_low = tl.program_id(1) * BLOCK_K
    k = k_low + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for w in range(W):
        width = tl.load(p_widths + w + 1) * 8
        n_end = tl.where(width > k_low, N, 0)
        for j_low in range(0, n_end, BLOCK_N):
            j = j_low + tl.arange(0, BLOCK_N)
            h = tl.load(p_h + (w * slab + o_b).to(tl.int64)[:, None] * pitch + j[None, :], mask=(j < N)[None, :], other=0.0)
            y = tl.load(p_y + j.to(tl.int64)[:, None] * D + k[None, :], mask=(j < N)[:, None] & (k < width)[None, :], other=0.0)
            acc = dot(h, y, acc)  # [M, N] @ [N, K]
    x = tl.load(p_x + i.to(tl.int64)[:, None] * D + k[None, :], mask=m_i[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
    along = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for w in range(W):
        width = tl.load(p_widths + w + 1) * 8
        nx = tl.load(p_nx + w * M + i, mask=m_i, other=0.0)
        rs = tl.load(p_rs + w * slab + o_b, mask=m_i, other=0.0)
        along += tl.where((k < width)[None, :], (nx * nx * rs)[:, None], 0.0)
    acc -= along * x
    a_first = tl.load(p_a_offsets + i, mask=m_i, other=0)
    a_count = tl.load(p_a_offsets + i + 1, mask=m_i, other=0) - a_first
    for p in range(largest(a_count)):
        m_p = p < a_count
        column = tl.load(p_columns + a_first + p, mask=m_p, other=0)
        y = tl.load(p_y + column.to(tl.int64)[:, None] * D + k[None, :], mask=m_p[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
        for w in range(W):
            width = tl.load(p_widths + w + 1) * 8
            force = tl.load(p_force + w * A + a_first + p, mask=m_p, other=0.0)
            acc += tl.where((k < width)[None, :], force[:, None] * y, 0.0)
    tl.store(p_dx + i.to(tl.int64)[:, None] * D + k[None, :], acc, mask=m_i[:, None] & (k < D)[None, :])


@triton.jit
def _pair_dy_kernel(
    p_h: "Any", p_x: "Any", p_y: "Any", p_ny: "Any", p_cs: "Any", p_dy: "Any", p_widths: "Any",
    M: "Any", N: "Any", D: "Any", i_base: "Any", slab: "Any", pitch: "Any",
    W: tl.constexpr, FRESH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Adds a slab of anchors' part to dY; cs `[W, pitch]` are the slab's column sums. The first slab overwrites (FRESH)."""
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_j = j < N
    k_low = tl.program_id(1) * BLOCK_K
    k = k_low + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for w in range(W):
        width = tl.load(p_widths + w + 1) * 8
        b_end = tl.where(width > k_low, slab, 0)
        for b_low in range(0, b_end, BLOCK_M):
            o_b = b_low + tl.arange(0, BLOCK_M)
            i = i_base + o_b
            h = tl.load(p_h + (w * slab + o_b).to(tl.int64)[:, None] * pitch + j[None, :], mask=m_j[None, :], other=0.0)
            x = tl.load(p_x + i.to(tl.int64)[:, None] * D + k[None, :], mask=(i < M)[:, None] & (k < width)[None, :], other=0.0)
            acc = dot(tl.trans(h), x, acc)  # [N, M] @ [M, K]
    m_jk = m_j[:, None] & (k < D)[None, :]
    o_jk = j.to(tl.int64)[:, None] * D + k[None, :]
    y = tl.load(p_y + o_jk, mask=m_jk, other=0.0).to(tl.float32)
    along = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for w in range(W):
        width = tl.load(p_widths + w + 1) * 8
        ny = tl.load(p_ny + w * N + j, mask=m_j, other=0.0)
        cs = tl.load(p_cs + w * pitch + j, mask=m_j, other=0.0)
        along += tl.where((k < width)[None, :], (ny * ny * cs)[:, None], 0.0)
    acc -= along * y
    if not FRESH:
        acc += tl.load(p_dy + o_jk, mask=m_jk, other=0.0)
    tl.store(p_dy + o_jk, acc, mask=m_jk)


@triton.jit
def _pair_dy_edges_kernel(
    p_x: "Any", p_y: "Any", p_ny: "Any", p_in_offsets: "Any", p_in_edges: "Any", p_rows: "Any", p_force: "Any", p_along: "Any", p_dy: "Any", p_widths: "Any",
    N: "Any", D: "Any", A: "Any", W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Adds to dY what attracting edges that lead to each candidate bring, in the order of the anchors."""
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_j = j < N
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.load(p_in_offsets + j, mask=m_j, other=0)
    count = tl.load(p_in_offsets + j + 1, mask=m_j, other=0) - first
    most = largest(count)
    if most > 0:
        m_jk = m_j[:, None] & (k < D)[None, :]
        o_jk = j.to(tl.int64)[:, None] * D + k[None, :]
        y = tl.load(p_y + o_jk, mask=m_jk, other=0.0).to(tl.float32)
        acc = tl.load(p_dy + o_jk, mask=m_jk, other=0.0)
        for e in range(most):
            m_e = e < count
            a = tl.load(p_in_edges + first + e, mask=m_e, other=0)
            row = tl.load(p_rows + a, mask=m_e, other=0)
            x = tl.load(p_x + row.to(tl.int64)[:, None] * D + k[None, :], mask=m_e[:, None] & (k < D)[None, :], other=0.0).to(tl.float32)
            for w in range(W):
                width = tl.load(p_widths + w + 1) * 8
                force = tl.load(p_force + w * A + a, mask=m_e, other=0.0)
                along = tl.load(p_along + w * A + a, mask=m_e, other=0.0)
                ny = tl.load(p_ny + w * N + j, mask=m_e, other=0.0)
                acc += tl.where((k < width)[None, :], force[:, None] * x - (ny * ny * along)[:, None] * y, 0.0)
        tl.store(p_dy + o_jk, acc, mask=m_jk)


def _product_cost(work: Workload) -> Cost:
    pairs = work.segments**2
    return Cost(bytes=2.0 * pairs + 8.0 * work.segments * work.hidden, matrix_operations=2.0 * pairs * work.hidden)


def _builds(function: Any, constants: dict[str, Any]) -> tuple[Build, ...]:
    return (Build(signature=signature(function, constants), constants=constants, divisible=("D", "slab", "pitch", "i_base", "N")),)


PAIR_DX = declare(
    name="pair_dx",
    function=_pair_dx_kernel,
    kind="matrix",
    settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}, warps=8, stages=3),
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64}, warps=4, stages=2),
    builds=_builds(_pair_dx_kernel, {"W": 1}),
    cost=_product_cost,
)
PAIR_DY = declare(
    name="pair_dy",
    function=_pair_dy_kernel,
    kind="matrix",
    settings=Settings({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}, warps=8, stages=3),
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64}, warps=4, stages=2),
    builds=_builds(_pair_dy_kernel, {"W": 1, "FRESH": False}),
    cost=_product_cost,
)
PAIR_DY_EDGES = declare(
    name="pair_dy_edges",
    function=_pair_dy_edges_kernel,
    kind="other",
    settings=Settings({"BLOCK_N": 32, "BLOCK_K": 64}, warps=4, stages=1),
    builds=_builds(_pair_dy_edges_kernel, {"W": 1}),
    cost=lambda work: Cost(bytes=8.0 * work.segments * work.hidden),
)
