"""Covering texts by spans in plain torch: every span of a batch of draws at once, taken in the order of their numbers.

Suffixes: S segments, C texts that take part, J drawn spans, N entries of runs, L bounds, P positions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from treadle.kernels.philox_reference import philox_reference

_WORD = 2**32


class Texts(NamedTuple):
    """What is to be covered of every segment."""

    first_S: Tensor
    """int64: position of the first byte."""
    size_S: Tensor
    """int64: bytes."""
    count_S: Tensor
    """int64: bytes to cover, fewer than there are or 0."""
    id_S: Tensor
    """int64: the bits of the id that keys the draws."""


def cover_spans_reference(key: tuple[int, int], texts: Texts, last: Tensor, bounds_L: Tensor, positions: int) -> Tensor:
    """uint8 `[positions]`: 1 at covered ones; arguments as in `cover_spans`."""
    device = bounds_L.device
    covered_P = torch.zeros(positions, dtype=torch.uint8, device=device)
    segment_C = (texts.count_S > 0).nonzero()[:, 0]
    if not segment_C.numel():
        return covered_P
    first_C, size_C, count_C, id_C = (column.index_select(0, segment_C) for column in texts)
    low_C, high_C = id_C & 0xFFFFFFFF, (id_C >> 32) & 0xFFFFFFFF
    byte_first_C = size_C.cumsum(0) - size_C
    never = torch.iinfo(torch.int64).max
    # The first span that covers each byte of the texts, which lie back to back here.
    first_span = torch.full((int(size_C.sum()),), never, dtype=torch.int64, device=device)
    open_C = torch.arange(segment_C.numel(), device=device)
    drawn, batch = 0, _spans_at_once(size_C, count_C, bounds_L)
    while open_C.numel():
        # A few spans more than needed change nothing: bytes are taken in the order of the spans below.
        number_J = torch.arange(drawn, drawn + batch, device=device).repeat(open_C.numel())
        owner_J = open_C.repeat_interleave(batch)
        start_word, length_word, _, _ = philox_reference(key, number_J, low_C[owner_J], high_C[owner_J], last)
        size_J = size_C.index_select(0, owner_J)
        start_J = (start_word * size_J) >> 32
        length_J = 1 + bounds_L.numel() - torch.searchsorted(bounds_L, _WORD - length_word)
        length_J = torch.minimum(length_J, size_J - start_J)
        span_N, offset_N = _spread(length_J)
        byte_N = (byte_first_C.index_select(0, owner_J) + start_J).index_select(0, span_N) + offset_N
        first_span.scatter_reduce_(0, byte_N, number_J.index_select(0, span_N), "amin")
        covered = torch.zeros(first_span.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(first_span != never, 0, out=covered[1:])
        reached_C = covered[byte_first_C + size_C] - covered[byte_first_C]
        open_C = (reached_C < count_C).nonzero()[:, 0]
        drawn += batch
        batch = min(2 * batch, 1 << 16)

    byte_N = (first_span != never).nonzero()[:, 0]
    owner_N = torch.repeat_interleave(size_C).index_select(0, byte_N)
    # Texts in turn; in each, bytes by the span that took them, then by place: the first `count` are covered.
    order_N = torch.argsort(first_span.index_select(0, byte_N), stable=True)
    order_N = order_N.index_select(0, torch.argsort(owner_N.index_select(0, order_N), stable=True))
    byte_N, owner_N = byte_N.index_select(0, order_N), owner_N.index_select(0, order_N)
    taken_C = torch.bincount(owner_N, minlength=segment_C.numel())
    rank_N = torch.arange(owner_N.numel(), device=device) - (taken_C.cumsum(0) - taken_C).index_select(0, owner_N)
    chosen = rank_N < count_C.index_select(0, owner_N)
    byte_N, owner_N = byte_N[chosen], owner_N[chosen]
    covered_P[(first_C - byte_first_C).index_select(0, owner_N) + byte_N] = 1
    return covered_P


def _spans_at_once(size_C: Tensor, count_C: Tensor, bounds_L: Tensor) -> int:
    """About as many spans as a text needs: each covers a share of what is left."""
    share = float((count_C.double() / size_C.double()).mean())
    mean_span = 1 + float(bounds_L.double().sum()) / _WORD
    return max(2, math.ceil(-1.5 * math.log(max(1 - share, 1e-3)) * float(size_C.double().mean()) / mean_span))


def _spread(count_C: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of `count` entries back to back: the run of every entry, and its number within the run."""
    owner_N = torch.repeat_interleave(count_C)
    first_C = count_C.cumsum(0) - count_C
    return owner_N, torch.arange(owner_N.numel(), device=count_C.device) - first_C.index_select(0, owner_N)
