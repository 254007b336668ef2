"""Masked payload error: the numerators of the image, video and audio terms, targets read straight from the tape.

Bytes moved: the payload and the predictions once forward, the gradient once backward. Bandwidth bounds it.
Legend: N positions, V values of a whole payload.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.payload_error_reference import payload_error_reference
from treadle.kernels.tape_reference import Chunks, Patches


def payload_error(prediction_NV: Tensor, tape: Tensor, places: Patches | Chunks, *, impl: Impl = "auto") -> Tensor:
    """The sum over positions of the mean squared error against the position's own standardised payload.

    Args:
        prediction_NV: a prediction per value, in the payload's order.
        tape: uint8, the batch's payloads.
        places: where the positions' payloads lie.

    Returns:
        A scalar in fp32 or wider, 0 for no positions.
    """
    choose("payload_error", impl, prediction_NV.device)
    return payload_error_reference(prediction_NV, tape, places)
