"""Byte cross-entropy: the text term's numerator, at covered positions alone.

Bytes moved: the logits once forward, twice backward. Bandwidth bounds it; the logits' own product comes before.
Legend: T covered positions, V classes.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.kernels.byte_cross_entropy_reference import byte_cross_entropy_reference
from treadle.kernels.dispatch import Impl, choose, register, unit_stride

register("byte_cross_entropy")


def byte_cross_entropy(logits_TV: Tensor, target_T: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The summed cross-entropy of `target_T` (int64, below V; a negative one is not scored): a scalar in fp32 or wider, 0 for none."""
    if choose("byte_cross_entropy", impl, logits_TV.device, logits_TV.dtype) == "reference":
        return byte_cross_entropy_reference(logits_TV, target_T)
    return cast(Tensor, _TritonByteCrossEntropy.apply(logits_TV, target_T))


class _TritonByteCrossEntropy(torch.autograd.Function):
    """Keeps the logits and a value per row; the softmax is made again."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        from treadle.kernels.byte_cross_entropy_kernels import BYTE_CROSS_ENTROPY_FWD

        logits_TV = logits_TV.detach()
        logits_TV = unit_stride(logits_TV)
        rows, classes = logits_TV.shape
        loss_T, total_T = torch.empty((2, rows), dtype=torch.float32, device=logits_TV.device)
        BYTE_CROSS_ENTROPY_FWD.launch(
            logits_TV.device,
            lambda b: (-(-rows // b["BLOCK_T"]),),
            *(logits_TV, target_T, loss_T, total_T, rows, classes, logits_TV.stride(0)),
            BLOCK_V=1 << (classes - 1).bit_length(),
        )
        ctx.save_for_backward(logits_TV, target_T, total_T)
        total: Tensor = loss_T.double().sum().float()
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        from treadle.kernels.byte_cross_entropy_kernels import BYTE_CROSS_ENTROPY_BWD

        logits_TV, target_T, total_T = ctx.saved_tensors
        rows, classes = logits_TV.shape
        by_logits_TV = torch.empty((rows, classes), dtype=logits_TV.dtype, device=logits_TV.device)
        BYTE_CROSS_ENTROPY_BWD.launch(
            logits_TV.device,
            lambda b: (-(-rows // b["BLOCK_T"]),),
            *(logits_TV, target_T, total_T, grad_outputs[0], by_logits_TV, rows, classes, logits_TV.stride(0)),
            BLOCK_V=1 << (classes - 1).bit_length(),
        )
        return by_logits_TV, None
