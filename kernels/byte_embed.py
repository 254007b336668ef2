"""Byte embedding: 256 bytes and MASK, which stands at covered positions and where an item makes its choice.

Bytes moved: an index and 2 D elements a position. Bandwidth bounds it; the table's gradient is a matrix product.
Legend: N positions that show a byte, V rows of the table, D width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.byte_embed_reference import byte_embed_reference
from treadle.kernels.dispatch import Impl, choose, register, unit_stride

register("byte_embed")


def byte_embed(table_VD: Tensor, shown_N: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The table's row for each of `shown_N` (int64, below V), `[N, D]`."""
    if choose("byte_embed", impl, table_VD.device, table_VD.dtype) == "reference":
        return byte_embed_reference(table_VD, shown_N)
    out_ND: Tensor = _TritonByteEmbed.apply(table_VD, shown_N)
    return out_ND


class _TritonByteEmbed(torch.autograd.Function):
    """Keeps the indices alone."""

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, shown_N: Tensor) -> Tensor:
        from treadle.kernels.byte_embed_kernels import BYTE_EMBED_FWD

        shown_N = shown_N.contiguous()
        count, width = shown_N.numel(), table_VD.shape[1]
        out_ND = torch.empty((count, width), dtype=table_VD.dtype, device=table_VD.device)
        BYTE_EMBED_FWD.launch(
            table_VD.device,
            lambda b: (-(-count // b["BLOCK_N"]), -(-width // b["BLOCK_D"])),
            *(table_VD.contiguous(), shown_N, out_ND, count),
            D=width,
        )
        ctx.save_for_backward(shown_N)
        ctx.table = table_VD.shape, table_VD.dtype
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        from treadle.kernels.byte_embed_kernels import BYTE_EMBED_BWD
        from treadle.kernels.partial_sums_kernels import sum_partials

        (dout_ND,) = gradients
        (shown_N,) = ctx.saved_tensors
        (rows, width), dtype = ctx.table
        dout_ND = unit_stride(dout_ND)
        splits = BYTE_EMBED_BWD.settings_on(dout_ND.device).blocks["SPLITS"]
        partials_GVD = torch.empty((splits, rows, width), dtype=torch.float32, device=dout_ND.device)
        BYTE_EMBED_BWD.launch(
            dout_ND.device,
            lambda b: (-(-rows // b["BLOCK_V"]), -(-width // b["BLOCK_D"]), splits),
            *(shown_N, dout_ND, partials_GVD, shown_N.numel(), dout_ND.stride(0)),
            V=rows,
            D=width,
            PARTS=3 if dout_ND.dtype is torch.float32 else 1,
        )
        return sum_partials(partials_GVD, (rows, width), dtype), None
