"""Audio chunk embedding straight from the tape's float32 samples.

Operations: `2 N V D` forward and again for the weight's gradient; bytes moved: `4 N V` and `N D` elements out.
Legend: N chunks, V samples of a chunk, D width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.chunk_embed_reference import chunk_embed_reference
from treadle.kernels.dispatch import Impl, choose, compute_dtype, register, unit_stride
from treadle.kernels.tape import tape_words
from treadle.kernels.tape_reference import Chunks

register("chunk_embed")


def chunk_embed(tape: Tensor, chunks: Chunks, weight_DV: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`samples @ weight.T`, `[N, D]`, in autocast's dtype where it is on, else the weight's.

    Args:
        tape: uint8, the batch's payloads; recordings are float32, each 16-byte aligned.
        chunks: where the chunks lie, from `locate_chunks`. The Triton version takes chunks of no samples too: they answer zeros.
    """
    if choose("chunk_embed", impl, weight_DV.device, weight_DV.dtype) == "reference":
        return chunk_embed_reference(tape, chunks, weight_DV)
    samples = tape_words(tape).view(torch.float32)
    out_ND: Tensor = _TritonChunkEmbed.apply(
        weight_DV, samples, compute_dtype(weight_DV), chunks.offset_N.contiguous(), chunks.samples_N.contiguous()
    )
    return out_ND


class _TritonChunkEmbed(torch.autograd.Function):
    """Keeps the tape and the places; the weight's gradient reads the samples again."""

    @staticmethod
    def forward(ctx: Any, weight_DV: Tensor, samples: Tensor, dtype: torch.dtype, *places_N: Tensor) -> Tensor:
        from treadle.kernels.chunk_embed_kernels import CHUNK_EMBED_FWD

        count, (width, values) = places_N[0].numel(), weight_DV.shape
        out_ND = torch.empty((count, width), dtype=dtype, device=weight_DV.device)
        CHUNK_EMBED_FWD.launch(
            weight_DV.device,
            lambda b: (-(-count // b["BLOCK_M"]) * -(-width // b["BLOCK_D"]),),
            *(samples, *places_N, weight_DV.to(dtype).contiguous(), out_ND, count, values),
            wide=dtype is torch.float32,
            V=values,
            D=width,
        )
        ctx.save_for_backward(samples, *places_N)
        ctx.weight = weight_DV.shape, weight_DV.dtype
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.kernels.chunk_embed_kernels import CHUNK_EMBED_DW
        from treadle.kernels.partial_sums_kernels import sum_partials

        (dout_ND,) = gradients
        samples, *places_N = ctx.saved_tensors
        (width, values), dtype = ctx.weight
        dout_ND = unit_stride(dout_ND)
        wide = dout_ND.dtype is torch.float32
        splits = CHUNK_EMBED_DW.settings_on(dout_ND.device, wide=wide).blocks["SPLITS"]
        partials_GDV = torch.empty((splits, width, values), dtype=torch.float32, device=dout_ND.device)
        CHUNK_EMBED_DW.launch(
            dout_ND.device,
            lambda b: (-(-values // b["BLOCK_V"]), -(-width // b["BLOCK_D"]), splits),
            *(samples, *places_N, dout_ND, partials_GDV, places_N[0].numel(), dout_ND.stride(0)),
            wide=wide,
            V=values,
            D=width,
        )
        return sum_partials(partials_GDV, (width, values), dtype), None, None, None, None
