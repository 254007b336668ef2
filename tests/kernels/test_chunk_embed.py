"""Audio chunk embedding against zero-padded recordings, in float64."""

import numpy as np
import pytest
import torch

from treadle.kernels.chunk_embed import chunk_embed
from treadle.kernels.tape_reference import locate_chunks

SIZES = [1, 6, 7, 8, 63, 127]


@pytest.mark.parametrize("size", [1, 7, 63])
def test_forward_and_weight_gradient(size: int) -> None:
    rng = np.random.default_rng(size)
    tokens: list[int] = []
    parts, rows, offsets, extents = [], [], [], []
    at = 0
    for n in SIZES:
        samples = rng.standard_normal(n).astype(np.float32)
        # No number at all lies between recordings: what is past an end must not even be multiplied by zero.
        padded = np.concatenate([samples, np.full(-n % 4, np.nan, np.float32)])
        count = -(-n // size)
        offsets += [at] * count
        extents += [(1, 1, n)] * count
        tokens += range(count)
        parts.append(padded)
        at += 4 * len(padded)
        whole = np.zeros(count * size)
        whole[:n] = samples
        rows.append(whole.reshape(count, size))
    tape = torch.from_numpy(np.concatenate(parts)).view(torch.uint8)
    chunks = locate_chunks(torch.tensor(offsets), torch.tensor(extents), torch.tensor(tokens), size)
    weight = torch.randn(127, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours = chunk_embed(tape, chunks, weight)
    chunked = torch.from_numpy(np.concatenate(rows))
    torch.testing.assert_close(ours, chunked @ weight.T, rtol=1e-12, atol=1e-12)
    along = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(ours, weight, along)[0], along.T @ chunked, rtol=1e-12, atol=1e-12)


def test_no_chunks() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    weight = torch.ones(8, 5, requires_grad=True)
    out = chunk_embed(torch.zeros(7, dtype=torch.uint8), locate_chunks(none, torch.zeros(0, 3, dtype=torch.int32), none, 5), weight)
    assert out.shape == (0, 8)
    assert (torch.autograd.grad(out.sum(), weight)[0] == 0).all()
