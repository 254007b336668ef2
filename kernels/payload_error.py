"""Masked payload error: the numerators of the image, video and audio terms, targets read straight from the tape.

Bytes moved: the payload and the predictions once forward; once more backward, and the gradient once. Bandwidth bounds it.
Legend: N positions, V values of a whole payload.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.kernels.dispatch import Impl, choose, register, unit_stride
from treadle.kernels.payload_error_reference import payload_error_reference
from treadle.kernels.tape_reference import Chunks, Patches

register("payload_error")


def payload_error(prediction_NV: Tensor, tape: Tensor, places: Patches | Chunks, *, impl: Impl = "auto") -> Tensor:
    """The sum over positions of the mean squared error against the position's own standardised payload.

    Args:
        prediction_NV: a prediction per value, in the payload's order.
        tape: uint8, the batch's payloads; 4-byte aligned for Triton, as a batch's is.
        places: where the positions' payloads lie. One without a row, a column or a sample inside counts for nothing.

    Returns:
        A scalar in fp32 or wider, 0 for no positions.
    """
    if choose("payload_error", impl, prediction_NV.device, prediction_NV.dtype) == "reference":
        return payload_error_reference(prediction_NV, tape, places)
    return cast(Tensor, _TritonPayloadError.apply(prediction_NV, tape, places))


class _TritonPayloadError(torch.autograd.Function):
    """Keeps the prediction alone: targets are made again."""

    @staticmethod
    def forward(ctx: Any, prediction_NV: Tensor, tape: Tensor, places: Patches | Chunks) -> Tensor:
        prediction_NV = prediction_NV.detach()
        prediction_NV = unit_stride(prediction_NV)
        spare = -tape.numel() % 4
        tape = torch.nn.functional.pad(tape, (0, spare)) if spare else tape
        ctx.places = places
        ctx.save_for_backward(prediction_NV, tape)
        error_N = torch.empty((len(prediction_NV),), dtype=torch.float32, device=prediction_NV.device)
        _launch(prediction_NV, tape, places, error_N, error_N, backward=False)
        return error_N.double().sum().float()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        prediction_NV, tape = ctx.saved_tensors
        by_prediction_NV = torch.empty(prediction_NV.shape, dtype=prediction_NV.dtype, device=prediction_NV.device)
        _launch(prediction_NV, tape, ctx.places, grad_outputs[0], by_prediction_NV, backward=True)
        return by_prediction_NV, None, None


def _launch(prediction_NV: Tensor, tape: Tensor, places: Patches | Chunks, by_total: Tensor, out: Tensor, *, backward: bool) -> None:
    from treadle.kernels.payload_error_kernels import CHUNK_ERROR_BWD, CHUNK_ERROR_FWD, PATCH_ERROR_BWD, PATCH_ERROR_FWD

    rows, values = prediction_NV.shape
    if isinstance(places, Patches):
        words = tape.view(torch.int32)
        (PATCH_ERROR_BWD if backward else PATCH_ERROR_FWD).launch(
            prediction_NV.device,
            lambda _: (rows,),
            *(prediction_NV, words, tape, places.offset_N, places.row_pitch_N, places.frame_pitch_N, places.rows_N, places.columns_N),
            *(by_total, out, words.numel(), prediction_NV.stride(0)),
            FRAMES=places.frames,
            SIDE=places.side,
            CHANNELS=places.channels,
            BY_WORDS=places.side * places.channels % 8 == 0,
            BACKWARD=backward,
            GROUPS=1 << (-(-values // 8) - 1).bit_length(),
        )
    else:
        (CHUNK_ERROR_BWD if backward else CHUNK_ERROR_FWD).launch(
            prediction_NV.device,
            lambda _: (rows,),
            *(prediction_NV, tape.view(torch.float32), places.offset_N, places.samples_N, by_total, out, prediction_NV.stride(0)),
            SIZE=places.size,
            ALIGNED=places.size % 4 == 0,
            BACKWARD=backward,
            BLOCK_V=1 << (values - 1).bit_length(),
        )
