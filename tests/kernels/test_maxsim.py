"""MaxSim against loops over tokens in float64, ties, empty sides, gradients, and tiles that split queries and documents."""

import numpy as np
import pytest
import torch
from torch import Tensor

import treadle.kernels.maxsim_reference as reference
from treadle.kernels.maxsim import maxsim

torch.set_num_threads(1)


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int64)


def oracle(u: Tensor, v: Tensor, q: Tensor, d: Tensor) -> list[list[float]]:
    scores = []
    for a, b in zip(q.tolist(), q[1:].tolist(), strict=False):
        row = []
        for lo, hi in zip(d.tolist(), d[1:].tolist(), strict=False):
            row.append(sum(max(float(u[i].double() @ v[j].double()) for j in range(lo, hi)) for i in range(a, b)) if hi > lo else 0.0)
        scores.append(row)
    return scores


def unit(rng: np.random.Generator, count: int, width: int) -> Tensor:
    x = torch.from_numpy(rng.standard_normal((count, width)))
    return torch.nn.functional.normalize(x, dim=1)


@pytest.mark.parametrize("seed", range(4))
def test_against_loops_over_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # tiny tiles, so that a slab holds one query and a tile one document
        monkeypatch.setattr(reference, "SLAB_TOKENS", 4)
        monkeypatch.setattr(reference, "TILE_ELEMENTS", 24)
    rng = np.random.default_rng(seed)
    queries, documents = rng.integers(0, 6, 7).tolist(), rng.integers(0, 9, 11).tolist()
    u, v, q, d = unit(rng, sum(queries), 3), unit(rng, sum(documents), 3), offsets(queries), offsets(documents)
    expected = torch.tensor(oracle(u, v, q, d), dtype=torch.float64)
    torch.testing.assert_close(maxsim(u, v, q, d), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(maxsim(u.float(), v.float(), q, d).double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda u, v: maxsim(u, v, q, d), (u.clone().requires_grad_(), v.clone().requires_grad_()))


def test_padding_never_wins() -> None:
    """A query token against one opposite document token is -1, not the 0 that a zero row of padding would give."""
    u, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    assert maxsim(u, v, offsets([1]), offsets([1, 2])).tolist() == [[-1.0, pytest.approx(0.6)]]


def test_empty_sides_score_zero_and_get_no_gradient() -> None:
    u = torch.randn(3, 4, requires_grad=True)
    v = torch.randn(2, 4, requires_grad=True)
    scores = maxsim(u, v, offsets([0, 3]), offsets([2, 0]))
    assert scores[0].tolist() == [0.0, 0.0] and scores[1, 1] == 0
    torch.autograd.backward(scores[:, 1].sum())
    assert u.grad is not None and v.grad is not None and not u.grad.any() and not v.grad.any()
    for counts in ([], [0]):
        assert maxsim(u[:0], v, offsets(counts), offsets([2])).shape == (len(counts), 1)
        assert maxsim(u, v[:0], offsets([3]), offsets(counts)).shape == (1, len(counts))


def test_the_lowest_token_takes_the_gradient_of_a_tie() -> None:
    u = torch.tensor([[1.0, 0.0]])
    v = torch.tensor([[0.0, 1.0], [0.6, 0.8], [0.6, 0.8], [0.6, -0.8]], requires_grad=True)
    torch.autograd.backward(maxsim(u, v, offsets([1]), offsets([4])).sum())
    assert v.grad is not None
    assert v.grad.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("length", [1, 2, 63, 127])
def test_planted_duplicates(length: int) -> None:
    """Every token twice, the copy behind: the copies get nothing, however the product rounds its columns."""
    rng = np.random.default_rng(length)
    u, half = unit(rng, 50, 128).float(), unit(rng, length, 128).float()
    v = torch.cat([half, half]).requires_grad_()
    torch.autograd.backward(maxsim(u, v, offsets([20, 30]), offsets([2 * length])).sum())
    assert v.grad is not None and not v.grad[length:].any()


def test_invariances() -> None:
    rng = np.random.default_rng(5)
    u, v = unit(rng, 7, 8), unit(rng, 9, 8)
    whole = maxsim(u, v, offsets([7]), offsets([9])).item()
    order = torch.from_numpy(rng.permutation(9))
    assert maxsim(u, v[order], offsets([7]), offsets([9])).item() == pytest.approx(whole, abs=1e-14)
    assert maxsim(u, torch.cat([v, v[3:4]]), offsets([7]), offsets([10])).item() == pytest.approx(whole, abs=1e-14)
    assert maxsim(u, torch.cat([v, unit(rng, 1, 8)]), offsets([7]), offsets([10])).item() >= whole - 1e-14
    parts = maxsim(u, v, offsets([3, 4]), offsets([9]))
    assert parts.sum().item() == pytest.approx(whole, abs=1e-14)


def test_repeats_bit_for_bit() -> None:
    rng = np.random.default_rng(6)
    q, d = offsets(rng.integers(1, 40, 30).tolist()), offsets(rng.integers(1, 70, 40).tolist())
    u, v = unit(rng, int(q[-1]), 16).float(), unit(rng, int(d[-1]), 16).float()
    seen = []
    for _ in range(2):
        a, b = u.clone().requires_grad_(), v.clone().requires_grad_()
        scores = maxsim(a, b, q, d)
        torch.autograd.backward(scores.square().sum())
        assert a.grad is not None and b.grad is not None
        seen.append((scores.detach(), a.grad, b.grad))
    assert all(torch.equal(x, y) for x, y in zip(*seen, strict=True))
