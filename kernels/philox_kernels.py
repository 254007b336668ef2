"""Philox4x32-10 in Triton: ten rounds of 32-bit integers, the same bits as the reference.

Bytes moved a counter: four int64 words in and four out, 64 in all. Operations: 20 wide products, about 100 integer operations: on an
H100's 16 integer lanes a quarter cycle, so bandwidth bounds it.
Legend: N counters.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's annotations are those of its host side.


@triton.jit
def philox_rounds(c0: "Any", c1: "Any", c2: "Any", c3: "Any", k0: "Any", k1: "Any") -> "Any":
    """Four words of each counter, all uint32."""
    zero = c0 & 0
    for _ in tl.static_range(10):
        # Zero plus a constant: a bare one has no uint32 type in every version of triton.
        multiplier_0 = zero + tl.full([], 0xD2511F53, tl.uint32)
        multiplier_1 = zero + tl.full([], 0xCD9E8D57, tl.uint32)
        high_0 = tl.umulhi(c0, multiplier_0)
        low_0 = c0 * multiplier_0
        high_1 = tl.umulhi(c2, multiplier_1)
        low_1 = c2 * multiplier_1
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _philox_kernel(
    c0: "Any",
    c1: "Any",
    c2: "Any",
    c3: "Any",
    words_4N: "Any",
    key_low: "Any",
    key_high: "Any",
    N: "Any",
    BLOCK_N: tl.constexpr,
) -> None:
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    x0 = tl.load(c0 + o_n, mask=m_n, other=0).to(tl.uint32)
    x1 = tl.load(c1 + o_n, mask=m_n, other=0).to(tl.uint32)
    x2 = tl.load(c2 + o_n, mask=m_n, other=0).to(tl.uint32)
    x3 = tl.load(c3 + o_n, mask=m_n, other=0).to(tl.uint32)
    # Keys come as int32 of the same bits.
    k0 = (x0 & 0) + key_low.to(tl.uint32, bitcast=True)
    k1 = (x0 & 0) + key_high.to(tl.uint32, bitcast=True)
    x0, x1, x2, x3 = philox_rounds(x0, x1, x2, x3, k0, k1)
    p_n = words_4N + o_n
    N_long = N.to(tl.int64)
    tl.store(p_n, x0.to(tl.int64), mask=m_n)
    tl.store(p_n + N_long, x1.to(tl.int64), mask=m_n)
    tl.store(p_n + 2 * N_long, x2.to(tl.int64), mask=m_n)
    tl.store(p_n + 3 * N_long, x3.to(tl.int64), mask=m_n)


def _cost(work: Workload) -> Cost:
    # One draw a byte and one a patch, column or chunk, and a span of text in every sixteen bytes.
    return Cost(bytes=64.0 * work.positions * 17 / 16)


PHILOX = declare(
    name="philox",
    function=_philox_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_N": 512}, warps=4),
    builds=(
        Build(
            signature={f"c{i}": "*i64" for i in range(4)} | {"words_4N": "*i64", "key_low": "i32", "key_high": "i32", "N": "i32"},
            divisible=("N",),
        ),
    ),
    cost=_cost,
)
