"""Covering texts by spans in Triton: one program of one warp a segment, which draws span after span until its text's count is reached.

The loop's length is the data's, which neither the host nor a captured graph has to know. Bytes: 40 of a segment, and each covered byte
twice or so. What bounds it is the chain of spans of the longest text: ten Philox rounds, a load, a sum and a store each, about half a
microsecond; a text of 1024 bytes of which 15 % are covered in spans of 8 takes about 20.
Legend: S segments, L bounds, P positions.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.philox_kernels import philox_rounds
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's annotations are those of its host side.


@triton.jit(do_not_specialize=["key_low", "key_high", "L"])
def _cover_spans_kernel(
    first_S: "Any", size_S: "Any", count_S: "Any", id_S: "Any", p_last: "Any", bounds_L: "Any", covered_P: "Any",
    key_low: "Any", key_high: "Any", L: "Any",
    BLOCK_L: tl.constexpr, BLOCK_B: tl.constexpr,
) -> None:  # fmt: skip
    i_s = tl.program_id(0)
    left = tl.load(count_S + i_s).to(tl.int32)
    size = tl.load(size_S + i_s)
    p_text = covered_P + tl.load(first_S + i_s)
    identity = tl.load(id_S + i_s)
    low, high = identity.to(tl.uint32), (identity >> 32).to(tl.uint32)
    last = tl.load(p_last).to(tl.uint32)
    k0 = (low & 0) + key_low.to(tl.uint32, bitcast=True)
    k1 = (low & 0) + key_high.to(tl.uint32, bitcast=True)
    o_l = tl.arange(0, BLOCK_L)
    b_bound = tl.load(bounds_L + o_l, mask=o_l < L, other=0)
    o_b = tl.arange(0, BLOCK_B)
    number = low & 0
    while left > 0:
        start_word, length_word, _, _ = philox_rounds(number, low, high, last, k0, k1)
        at = (start_word.to(tl.int64) * size) >> 32
        length = 1 + tl.sum((b_bound >= 4294967296 - length_word.to(tl.int64)).to(tl.int32))
        end = tl.minimum(at + length, size)
        while at < end:
            o_byte = at + o_b
            inside = o_byte < end
            fresh = inside & (tl.load(p_text + o_byte, mask=inside, other=1) == 0)
            # The last span covers no more than is still to be covered.
            taken = fresh & (tl.cumsum(fresh.to(tl.int32), 0) <= left)
            tl.store(p_text + o_byte, (o_b * 0 + 1).to(tl.uint8), mask=taken)
            left -= tl.sum(taken.to(tl.int32))
            at += BLOCK_B
        # What one thread stored, another loads for the next span.
        tl.debug_barrier()
        number += tl.full([], 1, tl.uint32)


def _cost(work: Workload) -> Cost:
    return Cost(bytes=40.0 * work.segments + 2 * 0.15 * work.text_positions)


COVER_SPANS = declare(
    name="cover_spans",
    function=_cover_spans_kernel,
    kind="other",
    settings=Settings({"BLOCK_B": 32}, warps=1),
    builds=(
        Build(
            signature={name: "*i64" for name in ("first_S", "size_S", "count_S", "id_S", "p_last", "bounds_L")}
            | {"covered_P": "*u8", "key_low": "i32", "key_high": "i32", "L": "i32"},
            constants={"BLOCK_L": 512},
        ),
    ),
    cost=_cost,
)
