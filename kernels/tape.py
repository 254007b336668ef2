"""The tape as kernels read it."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def tape_words(tape: Tensor) -> Tensor:
    """The uint8 tape as int32 words: a view, or a copy with zeros at its end where its length is no multiple of 16 bytes or its start none of 4."""
    spare = -tape.numel() % 16
    if spare or tape.storage_offset() % 4 or tape.data_ptr() % 4 or not tape.is_contiguous():
        tape = pad(tape, (0, spare)).clone(memory_format=torch.contiguous_format)
    return tape.view(torch.int32)
