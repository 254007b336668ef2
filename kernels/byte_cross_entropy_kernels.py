"""Byte cross-entropy in Triton: one pass over the logits each way, a block of rows a program.

Bytes: the logits once forward; once in and once out backward. About 8 operations a logit: bandwidth bounds both.
Legend: T covered positions, V classes.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _byte_cross_entropy_fwd_kernel(
    p_logits: "Any", p_target: "Any", p_loss: "Any", p_total: "Any", T: "Any", V: "Any", stride: "Any",
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """Each row's loss, 0 for a negative target, and the logarithm of its summed exponentials."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_v = tl.arange(0, BLOCK_V)
    m = m_t[:, None] & (o_v < V)[None, :]
    x = tl.load(p_logits + o_t.to(tl.int64)[:, None] * stride + o_v[None, :], mask=m, other=-float("inf")).to(tl.float32)
    target = tl.load(p_target + o_t, mask=m_t, other=-1)
    top = tl.where(m_t, tl.max(x, 1), 0.0)
    total = top + tl.log(tl.where(m_t, tl.sum(tl.exp(x - top[:, None]), 1), 1.0))
    picked = tl.sum(tl.where(o_v[None, :] == target[:, None], x, 0.0), 1)
    tl.store(p_loss + o_t, tl.where(target >= 0, total - picked, 0.0), mask=m_t)
    tl.store(p_total + o_t, total, mask=m_t)


@triton.jit
def _byte_cross_entropy_bwd_kernel(
    p_logits: "Any", p_target: "Any", p_total: "Any", p_by_loss: "Any", p_by_logits: "Any", T: "Any", V: "Any", stride: "Any",
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """Softmax less the target, times the loss's gradient; zeros for a negative target."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_v = tl.arange(0, BLOCK_V)
    m = m_t[:, None] & (o_v < V)[None, :]
    x = tl.load(p_logits + o_t.to(tl.int64)[:, None] * stride + o_v[None, :], mask=m, other=0.0).to(tl.float32)
    target = tl.load(p_target + o_t, mask=m_t, other=-1)
    total = tl.load(p_total + o_t, mask=m_t, other=0.0)
    by_loss = tl.load(p_by_loss).to(tl.float32)
    share = tl.exp(x - total[:, None]) - tl.where(o_v[None, :] == target[:, None], 1.0, 0.0)
    by_x = tl.where((target >= 0)[:, None], share * by_loss, 0.0)
    tl.store(p_by_logits + o_t.to(tl.int64)[:, None] * V + o_v[None, :], narrow(by_x, p_by_logits.dtype.element_ty), mask=m)


COVERED_SHARE = 0.15


def _cost(passes: float, work: Workload) -> Cost:
    return Cost(bytes=4.0 * 256 * passes * COVERED_SHARE * work.text_positions)


_sizes = {"T": "i32", "V": "i32", "stride": "i32"}
BYTE_CROSS_ENTROPY_FWD = declare(
    name="byte_cross_entropy_fwd",
    function=_byte_cross_entropy_fwd_kernel,
    kind="other",
    settings=Settings({"BLOCK_T": 8}, warps=4),
    builds=(
        Build(
            signature={"p_logits": "*fp32", "p_target": "*i64", "p_loss": "*fp32", "p_total": "*fp32", **_sizes},
            constants={"BLOCK_V": 256},
            divisible=("V", "stride"),
        ),
    ),
    cost=lambda work: _cost(1, work),
)
BYTE_CROSS_ENTROPY_BWD = declare(
    name="byte_cross_entropy_bwd",
    function=_byte_cross_entropy_bwd_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_T": 8}, warps=4),
    builds=(
        Build(
            signature={"p_logits": "*fp32", "p_target": "*i64", "p_total": "*fp32", "p_by_loss": "*fp32", "p_by_logits": "*fp32", **_sizes},
            constants={"BLOCK_V": 256},
            divisible=("V", "stride"),
        ),
    ),
    cost=lambda work: _cost(2, work),
)
