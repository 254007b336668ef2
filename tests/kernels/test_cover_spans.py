"""Covering texts by spans against a reading of the definition, byte by byte."""

import pytest
import torch
from torch import Tensor

from treadle.kernels.cover_spans import Texts, cover_spans
from treadle.pipeline.draws import philox

KEY = (0x9ABC_DEF0, 0x1234_5678)
LAST = 16 * 77
WORD = 2**32


def bounds(mean_span: float) -> Tensor:
    """Lengths of a geometric distribution: `2^32 q^t` for t = 1, 2, ..., ascending."""
    q = 1 - 1 / mean_span
    return torch.tensor(sorted(int(WORD * q**t) for t in range(1, 200) if int(WORD * q**t)), dtype=torch.int64)


def spelled_out(size: int, count: int, identity: int, bounds_L: list[int]) -> set[int]:
    covered: set[int] = set()
    number = 0
    while len(covered) < count:
        u, v = (int(w) for w in philox(KEY, number, identity & 0xFFFFFFFF, identity >> 32, LAST)[:2])
        start = u * size // WORD
        length = 1 + sum(bound >= WORD - v for bound in bounds_L)
        for byte in range(start, min(start + length, size)):
            if len(covered) < count:
                covered.add(byte)
        number += 1
    return covered


@pytest.mark.parametrize("mean_span", [1.0, 2.5, 16.0])
def test_equals_the_definition(mean_span: float) -> None:
    """Texts of all sizes and counts, one with all but a byte to cover, one with nothing, gaps between them."""
    sizes, counts = [7, 1, 127, 64, 300, 2], [3, 0, 19, 63, 45, 1]
    ids = [5, 6, 2**40 + 7, 2**63 + 8, 9, 2**64 - 1]
    first = [3, 20, 30, 200, 300, 700]
    bounds_L = bounds(mean_span)
    texts = Texts(*(torch.tensor(c) for c in (first, sizes, counts, [i if i < 2**63 else i - 2**64 for i in ids])))
    covered = cover_spans(KEY, texts, torch.tensor(LAST), bounds_L, 720)
    want = {f + b for f, s, c, i in zip(first, sizes, counts, ids, strict=True) for b in spelled_out(s, c, i, bounds_L.tolist())}
    assert covered.dtype == torch.uint8 and covered.nonzero()[:, 0].tolist() == sorted(want)
    assert len(want) == sum(counts)


def test_nothing_to_cover() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert not cover_spans(KEY, Texts(nothing, nothing, nothing, nothing), torch.tensor(LAST), bounds(2.0), 5).any()
    zero = torch.zeros(3, dtype=torch.int64)
    assert not cover_spans(KEY, Texts(zero, zero, zero, zero), torch.tensor(LAST), nothing, 5).any()
