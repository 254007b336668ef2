"""Covering texts by spans: which bytes the masked objective hides, by draws whose counter lies on the device.

Span `j` of a text of n bytes starts at `floor(u n)` and is as long as one plus the number of bounds that `2^32 - v` does not pass, at
most up to the text's end; u and v are words 0 and 1 of the draw with counter words `(j, id low, id high, last)`. In turn, spans cover
what they find uncovered, byte by byte, until a text's count is reached.
Legend: S segments, L bounds, P positions.
"""

import torch
from torch import Tensor

from treadle.kernels.cover_spans_reference import Texts, cover_spans_reference
from treadle.kernels.dispatch import Impl, choose, register
from treadle.kernels.philox import signed_word

__all__ = ["Texts", "cover_spans"]

register("cover_spans")


def cover_spans(key: tuple[int, int], texts: Texts, last: Tensor, bounds_L: Tensor, positions: int, *, impl: Impl = "auto") -> Tensor:
    """uint8 `[positions]`: 1 at covered ones.

    Args:
        key: low and high half of the seed.
        texts: of every segment; one with count 0 takes no part.
        last: int64 scalar tensor: word 3 of the counters, which holds the step and the purpose.
        bounds_L: int64 bounds of lengths, ascending.
    """
    if choose("cover_spans", impl, bounds_L.device) == "reference":
        return cover_spans_reference(key, texts, last, bounds_L, positions)
    from treadle.kernels.cover_spans_kernels import COVER_SPANS

    covered_P = torch.zeros(positions, dtype=torch.uint8, device=bounds_L.device)
    length = max(1, bounds_L.numel())
    COVER_SPANS.launch(
        bounds_L.device,
        lambda _: (texts.count_S.numel(),),
        *(column.contiguous() for column in texts),
        *(last, bounds_L.contiguous(), covered_P, signed_word(key[0]), signed_word(key[1]), bounds_L.numel()),
        BLOCK_L=1 << (length - 1).bit_length(),
    )
    return covered_P
