"""Covering texts by spans in Triton: the bytes that the reference covers, whatever the sizes, draw after draw."""

import pytest
import torch

from treadle.kernels.cover_spans import Texts, cover_spans

KEY = (0xDEAD_BEEF, 0x8000_0001)


def check(device: torch.device, sizes: list[int], counts: list[int], mean_span: float) -> None:
    q = 1 - 1 / mean_span
    bounds = torch.tensor(sorted(int(2**32 * q**t) for t in range(1, 400) if int(2**32 * q**t)), dtype=torch.int64)
    first, at = [], 1
    for size in sizes:
        first.append(at)
        at += size + 3
    ids = [(-1) ** i * (i * 2**41 + 17) for i in range(len(sizes))]
    texts = Texts(*(torch.tensor(column, dtype=torch.int64).to(device) for column in (first, sizes, counts, ids)))
    last = torch.tensor(2**32 - 16, device=device)
    found, again = (cover_spans(KEY, texts, last, bounds.to(device), at, impl="triton") for _ in range(2))
    want = cover_spans(KEY, texts, last, bounds.to(device), at, impl="reference")
    assert found.dtype == torch.uint8 and torch.equal(found, want) and torch.equal(found, again)
    assert int(found.sum()) == sum(counts)


@pytest.mark.parametrize("mean_span", [1.0, 3.0, 40.0])
def test_cover_spans(device: torch.device, mean_span: float) -> None:
    """Spans within a block of 32 bytes and past several; all but one byte of a text; texts that take no part; no text at all."""
    check(device, [63, 1, 127, 9, 0, 200], [9, 0, 20, 8, 0, 0], mean_span)
    check(device, [], [], mean_span)


@pytest.mark.thorough
@pytest.mark.parametrize("mean_span", [4.0, 16.0, 200.0])
def test_cover_spans_at_length(device: torch.device, mean_span: float) -> None:
    check(device, [1023, 64, 700] + [5] * 40, [153, 32, 350] + [1] * 40, mean_span)
