"""Patch and tube embedding straight from the uint8 tape: no copy of the patches in memory beyond the op.

Operations: `2 N V D` forward and again for the weight's gradient; bytes moved: `N V` pixels and `N D` elements out. Matrix products
bound it for every hidden width from 256 on.
Legend: N patches, V values of a patch, D width.
"""

from typing import Any

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, compute_dtype, register, unit_stride
from treadle.kernels.patch_embed_reference import patch_embed_reference
from treadle.kernels.tape import tape_words
from treadle.kernels.tape_reference import Patches

register("patch_embed")


def patch_embed(tape: Tensor, patches: Patches, weight_DV: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`pixels @ weight.T`, `[N, D]`, in autocast's dtype where it is on, else the weight's.

    Args:
        tape: uint8, the batch's payloads.
        patches: where the patches or tubes lie, from `locate_patches`. The Triton version takes patches of no rows too: they answer
            zeros.
        weight_DV: its columns in (frame, row, column, channel) order.
    """
    if choose("patch_embed", impl, weight_DV.device, weight_DV.dtype) == "reference":
        return patch_embed_reference(tape, patches, weight_DV)
    places = [column.contiguous() for column in patches[:5]]
    form = {"SIDE": patches.side, "CHANNELS": patches.channels, "FRAMES": patches.frames}
    out_ND: Tensor = _TritonPatchEmbed.apply(weight_DV, tape_words(tape), form, compute_dtype(weight_DV), *places)
    return out_ND


class _TritonPatchEmbed(torch.autograd.Function):
    """Keeps the tape and the places; the weight's gradient reads the pixels again."""

    @staticmethod
    def forward(ctx: Any, weight_DV: Tensor, words: Tensor, form: dict[str, int], dtype: torch.dtype, *places_N: Tensor) -> Tensor:
        from treadle.kernels.patch_embed_kernels import PATCH_EMBED_FWD

        count, width = places_N[0].numel(), weight_DV.shape[0]
        out_ND = torch.empty((count, width), dtype=dtype, device=weight_DV.device)
        all_words = _words_of(form)
        PATCH_EMBED_FWD.launch(
            weight_DV.device,
            lambda b: (-(-count // b["BLOCK_M"]) * -(-width // b["BLOCK_D"]),),
            *(words, *places_N, weight_DV.to(dtype).contiguous(), out_ND, count, words.numel(), all_words),
            wide=dtype is torch.float32,
            **form,
            D=width,
        )
        ctx.save_for_backward(words, *places_N)
        ctx.form, ctx.weight = form, (weight_DV.shape, weight_DV.dtype)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from treadle.kernels.partial_sums_kernels import sum_partials
        from treadle.kernels.patch_embed_kernels import PATCH_EMBED_DW

        (dout_ND,) = gradients
        words, *places_N = ctx.saved_tensors
        (width, values), dtype = ctx.weight
        form: dict[str, int] = ctx.form
        dout_ND = unit_stride(dout_ND)
        wide = dout_ND.dtype is torch.float32
        splits = PATCH_EMBED_DW.settings_on(dout_ND.device, wide=wide).blocks["SPLITS"]
        partials_GDV = torch.empty((splits, width, values), dtype=torch.float32, device=dout_ND.device)
        all_words = _words_of(form)
        # Lists at fixed sizes end in patches of no rows: the device knows where.
        number_N = torch.arange(1, places_N[0].numel() + 1, device=dout_ND.device)
        end = torch.where(places_N[3] > 0, number_N, 0).amax() if len(number_N) else number_N.new_zeros(())
        PATCH_EMBED_DW.launch(
            dout_ND.device,
            lambda b: (-(-all_words // b["BLOCK_W"]), -(-width // b["BLOCK_D"]), splits),
            *(words, *places_N, dout_ND, partials_GDV, places_N[0].numel(), end, words.numel(), dout_ND.stride(0)),
            wide=wide,
            **form,
            D=width,
        )
        return sum_partials(partials_GDV, (width, values), dtype), *([None] * 8)


def _words_of(form: dict[str, int]) -> int:
    """32-bit words of one patch or tube, each of its rows in words of its own."""
    return form["FRAMES"] * form["SIDE"] * (-(-form["SIDE"] * form["CHANNELS"] // 4))
