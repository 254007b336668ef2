"""Philox4x32-10 against the vectors that Random123 publishes, and against the stream's own numpy version."""

import numpy as np
import pytest
import torch

from treadle.kernels.philox import philox4x32
from treadle.pipeline import draws

# From Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    words = philox4x32(key, c0, c1, c2, c3)
    assert tuple(int(w) for w in words) == answer


@pytest.mark.parametrize("count", [0, 1, 63, 127, 1 << 15, (1 << 15) + 1, 100_001])
def test_equals_the_numpy_version(count: int) -> None:
    rng = np.random.default_rng(count)
    counters = rng.integers(0, 2**32, (4, count), dtype=np.uint32)
    key = (0x12345678, 0x9ABCDEF0)
    c0, c1, c2, c3 = (torch.from_numpy(c.astype(np.int64)) for c in counters)
    ours = philox4x32(key, c0, c1, c2, c3)
    theirs = draws.philox(key, *counters)
    for mine, word in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.int64
        assert np.array_equal(mine.numpy(), word.astype(np.int64))


def test_counters_broadcast_and_are_taken_modulo_2_to_the_32() -> None:
    row, column = torch.arange(3)[:, None], torch.arange(5)[None, :]
    grid = philox4x32((1, 2), row, column, torch.tensor(7), torch.tensor(-1))
    wrapped = philox4x32((1 + 2**32, 2), row + 2**32, column, torch.tensor(7), torch.tensor(0xFFFFFFFF))
    for a, b in zip(grid, wrapped, strict=True):
        assert a.shape == (3, 5)
        assert torch.equal(a, b)
    one = philox4x32((1, 2), torch.tensor(2), torch.tensor(4), torch.tensor(7), torch.tensor(0xFFFFFFFF))
    assert [int(w[2, 4]) for w in grid] == [int(w) for w in one]
