"""Sums of partial results in a fixed order: how sums over positions stay deterministic without atomics.

Programs of another kernel each leave a row of fp32 partials; this one adds the rows up. Bytes moved: `4 R V` in, `V` elements out.
Legend: R rows of partials, V values of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare


@triton.jit
def _partial_sums_kernel(partials_RV: "Any", out_V: "Any", R: "Any", V: "Any", BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr) -> None:
    o_v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < V
    o_r = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for r in range(0, R, BLOCK_R):
        i_r = r + tl.zeros([], tl.int64)
        p_x = partials_RV + (i_r + o_r[:, None]) * V + o_v[None, :]
        acc += tl.load(p_x, mask=(r + o_r < R)[:, None] & m_v[None, :], other=0.0)
    tl.store(out_V + o_v, narrow(tl.sum(acc, 0), out_V.dtype.element_ty), mask=m_v)


def _cost(work: Workload) -> Cost:
    # The weight gradient of the image patches in eight splits: the largest of these sums.
    return Cost(bytes=(8 * 4 + 4.0) * work.image_values * work.hidden)


PARTIAL_SUMS = declare(
    name="partial_sums",
    function=_partial_sums_kernel,
    kind="streaming",
    settings=Settings({"BLOCK_R": 16, "BLOCK_V": 256}, warps=2),
    interpreter_settings=Settings({"BLOCK_R": 4, "BLOCK_V": 8192}),
    builds=(Build(signature={"partials_RV": "*fp32", "out_V": "*fp32", "R": "i32", "V": "i32"}, divisible=("V",)),),
    cost=_cost,
)


def sum_partials(partials_RV: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of fp32 partials, in `dtype` and `shape`."""
    out = torch.empty(shape, dtype=dtype, device=partials_RV.device)
    rows, values = partials_RV.shape[0], out.numel()
    PARTIAL_SUMS.launch(partials_RV.device, lambda b: (-(-values // b["BLOCK_V"]),), partials_RV, out, rows, values)
    return out
