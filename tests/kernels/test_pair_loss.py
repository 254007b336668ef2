"""Pair losses against loops over pairs in float64, worked examples to the last digit, gradients, and memory."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.kernels.pair_loss import NamedPairs, PairForm, PairRows, pair_loss, row_loss

torch.set_num_threads(1)
FORMS: tuple[PairForm, ...] = ("sigmoid", "balanced", "ranked")
Weights = dict[tuple[int, int], tuple[float, float]]
"""(anchor, candidate) to (attracting, repelling) weight, of named pairs."""


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def oracle_row(scores: list[float], attract: list[float], repel: list[float], form: str) -> float:
    """The definitions of the three forms, term by term."""
    up, down = sum(attract), sum(repel)
    if form == "ranked":
        total = sum(
            u * v * softplus(sn - sp) for sp, u in zip(scores, attract, strict=True) for sn, v in zip(scores, repel, strict=True) if u and v
        )
        return total / (up * down) if up and down else 0.0
    positive = sum(u * softplus(-s) for s, u in zip(scores, attract, strict=True))
    negative = sum(v * softplus(s) for s, v in zip(scores, repel, strict=True))
    if form == "sigmoid":
        return positive + negative
    return 0.5 * (positive / up if up else 0.0) + 0.5 * (negative / down if down else 0.0)


def oracle(
    x: Tensor,
    y: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    group: list[int],
    rows: list[tuple[list[float], list[float]]],
    form: str,
    widths: tuple[int, ...],
) -> float:
    total = 0.0
    for width in widths:
        for i, (attract, repel) in enumerate(rows):
            a = x[i, :width].double().numpy()
            scores = []
            for j in range(len(y)):
                b = y[j, :width].double().numpy()
                cosine = float(a @ b) / (float(np.linalg.norm(a)) * float(np.linalg.norm(b)))
                scores.append(math.exp(float(log_scale[group[i]])) * cosine + float(bias[group[i]]))
            total += oracle_row(scores, attract, repel, form)
    return total / len(widths)


def dense_rows(pairs: PairRows, named: Weights) -> list[tuple[list[float], list[float]]]:
    rows = []
    for i in range(len(pairs.self_M)):
        attract, repel = [], []
        for j in range(len(pairs.group_N)):
            group = int(pairs.group_M[i])
            if (i, j) in named:
                a, r = named[i, j]
            elif j == int(pairs.self_M[i]) or (group and group == int(pairs.group_N[j])):
                a, r = 0.0, 0.0
            else:
                a, r = 0.0, pairs.ambient_weight
            attract.append(a)
            repel.append(r)
        rows.append((attract, repel))
    return rows


def make_named(anchors: int, named: Weights) -> NamedPairs:
    keys = sorted(named)
    offsets = [sum(1 for k in keys if k[0] < i) for i in range(anchors + 1)]
    weights = torch.tensor([named[k] for k in keys], dtype=torch.float32).reshape(-1, 2)
    return NamedPairs(
        torch.tensor(offsets), torch.tensor([k[1] for k in keys], dtype=torch.int64), weights[:, 0].contiguous(), weights[:, 1].contiguous()
    )


def random_pairs(rng: np.random.Generator, anchors: int, candidates: int, first: int, ambient: float) -> tuple[PairRows, Weights]:
    own = torch.arange(anchors) + first
    named: Weights = {}
    for i in range(anchors):
        for j in rng.permutation(candidates)[: rng.integers(0, min(candidates, 9) + 1)]:
            if j != first + i:
                weight = float(np.float32(rng.choice([0.0, 0.5, 1.0, 2.25])))
                named[i, int(j)] = ((weight, 0.0), (0.0, weight), (0.0, 0.0))[rng.integers(3)]
    group_N = torch.from_numpy(rng.integers(0, 4, candidates))
    return PairRows(own, group_N[first : first + anchors], group_N, make_named(anchors, named), ambient), named


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(6))
def test_against_loops_over_pairs(form: PairForm, seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors, candidates = int(rng.integers(1, 40)), int(rng.integers(40, 70))
    first = int(rng.integers(0, candidates - anchors + 1))
    pairs, named = random_pairs(rng, anchors, candidates, first, float(np.float32(rng.choice([0.0, 1.0, 0.7]))))
    y = torch.from_numpy(rng.standard_normal((candidates, 24)))
    log_scale = torch.log(torch.tensor([0.5, 3.0, 30.0, 100.0], dtype=torch.float64))
    bias = torch.tensor([0.0, -10.0, 1.0, 5.0], dtype=torch.float64)
    group = torch.from_numpy(rng.integers(0, 4, anchors))
    widths = ((24,), (8, 24), (8, 16))[seed % 3]
    expected = oracle(y[first : first + anchors], y, log_scale, bias, group.tolist(), dense_rows(pairs, named), form, widths)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        z = y.to(dtype)
        got = pair_loss(z[first : first + anchors], z, log_scale.to(dtype), bias.to(dtype), group, pairs, form=form, widths=widths)
        assert got.dtype == dtype
        assert got.item() == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ambient", [0.0, 0.75])
def test_gradients(form: PairForm, ambient: float) -> None:
    rng = np.random.default_rng(3)
    pairs, _ = random_pairs(rng, 6, 8, 1, ambient)
    x = torch.from_numpy(rng.standard_normal((6, 4))).requires_grad_()
    y = torch.from_numpy(rng.standard_normal((8, 4))).requires_grad_()
    log_scale = torch.tensor([0.3, 1.5], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([-1.0, 0.5], dtype=torch.float64, requires_grad=True)
    group = torch.tensor([0, 1, 1, 0, 1, 0])

    def loss(x: Tensor, y: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
        return pair_loss(x, y, log_scale, bias, group, pairs, form=form, widths=(2, 4))

    assert torch.autograd.gradcheck(loss, (x, y, log_scale, bias))
    if form == "ranked":
        torch.autograd.backward(loss(x, y, log_scale, bias))
        assert bias.grad is not None and not bias.grad.any()  # only differences of scores enter: the bias cancels


@pytest.mark.parametrize("form", FORMS)
def test_one_tensor_as_anchors_and_candidates(form: PairForm) -> None:
    rng = np.random.default_rng(4)
    pairs, _ = random_pairs(rng, 9, 9, 0, 1.0)
    x = torch.from_numpy(rng.standard_normal((9, 3))).requires_grad_()
    log_scale, bias, group = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), torch.zeros(9, dtype=torch.int64)
    assert torch.autograd.gradcheck(lambda x: pair_loss(x, x, log_scale, bias, group, pairs, form=form, widths=(3,)), (x,))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_scores(form: PairForm) -> None:
    rng = np.random.default_rng(5)
    pairs, named = random_pairs(rng, 7, 12, 1, 0.5)
    scores = torch.from_numpy(rng.standard_normal((7, 12)) * 5).requires_grad_()
    expected = sum(oracle_row(s, a, r, form) for s, (a, r) in zip(scores.tolist(), dense_rows(pairs, named), strict=True))
    assert row_loss(scores, pairs, form=form).item() == pytest.approx(expected, rel=1e-13)
    assert torch.autograd.gradcheck(lambda s: row_loss(s, pairs, form=form), (scores,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [1.0, 39.0, 200.0, 1e4])
def test_extreme_scores_in_fp32(form: PairForm, spread: float) -> None:
    """Beyond a span of 80 the ranked form leaves its shared exponential, at 39 it is at its limit; nothing overflows on either side."""
    rng = np.random.default_rng(6)
    pairs, named = random_pairs(rng, 20, 60, 0, 1.0)
    scores = (torch.from_numpy(rng.uniform(-1, 1, (20, 60))) * spread).float().requires_grad_()
    got = row_loss(scores, pairs, form=form)
    torch.autograd.backward(got)
    double = scores.detach().double().requires_grad_()
    torch.autograd.backward(row_loss(double, pairs, form=form))
    expected = sum(oracle_row(s, a, r, form) for s, (a, r) in zip(scores.tolist(), dense_rows(pairs, named), strict=True))
    assert got.item() == pytest.approx(expected, rel=2e-6)
    assert scores.grad is not None and double.grad is not None
    torch.testing.assert_close(scores.grad.double(), double.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("height", [-3000.0, -95.0, 95.0, 3000.0])
def test_ranked_rows_far_from_zero(height: float) -> None:
    """Row 0 attracts two, row 1 one, row 2 none: what a row lacks of the passes must not meet its scores, whose height changes nothing."""
    named = make_named(3, {(0, 0): (1.0, 0.0), (0, 1): (2.0, 0.0), (1, 2): (1.0, 0.0)})
    pairs = PairRows(torch.full((3,), -1), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), named, 1.0)
    # Multiples of 1/4 are exact in fp32 at every height.
    low = torch.tensor([[0.0, 1.0, 2.25, -1.0], [3.0, 0.5, 0.0, 1.0], [1.0, 1.0, 0.25, 2.0]])
    scores = (low + height).requires_grad_()
    loss = row_loss(scores, pairs, form="ranked")
    torch.autograd.backward(loss)
    rows = [([1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]), ([0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])]
    expected = sum(oracle_row(s, a, r, "ranked") for s, (a, r) in zip(low.tolist(), rows, strict=False))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert scores.grad is not None and bool(torch.isfinite(scores.grad).all()) and not scores.grad[2].any()


def diagonal(count: int) -> PairRows:
    """Anchor i of a first tower attracts candidate i of a second and repels the others, as between two modalities."""
    named = make_named(count, {(i, i): (1.0, 0.0) for i in range(count)})
    return PairRows(torch.full((count,), -1), torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64), named, 1.0)


def test_sigmoid_example() -> None:
    """x = y = I_2, t = 10, b = -10: scores 0 on the diagonal, -10 off it.

    L = (2 softplus(0) + 2 softplus(-10)) / 2 = 0.693147180559945 + 0.0000453988992168647 = 0.6931925794591612.
    dL/ds is -1/4 on the diagonal (over n = 2) and sigmoid(-10) / 2 = 2.269893435e-5 off it, so db = 2 (-1/4 + 2.26989e-5) =
    -0.49995460213129714; d(log t) = sum g (s - b) = 2 (-1/4)(10) = -5; before normalisation dx_11 = -1/4 10 = -2.5 and
    dx_12 = 2.26989e-5 * 10 = 2.26989343512172e-4.
    """
    unit = torch.eye(2, dtype=torch.float64)
    log_scale = torch.tensor([math.log(10.0)], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([-10.0], dtype=torch.float64, requires_grad=True)
    x = unit.clone().requires_grad_()
    loss = pair_loss(x, unit, log_scale, bias, torch.zeros(2, dtype=torch.int64), diagonal(2), form="sigmoid", widths=(2,)) / 2
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(0.6931925794591612, abs=1e-15)
    assert bias.grad is not None and log_scale.grad is not None and x.grad is not None
    assert bias.grad.item() == pytest.approx(-0.4999546021312971, abs=1e-15)
    assert log_scale.grad.item() == pytest.approx(-5.0, abs=1e-14)
    # The unit vector's gradient less its part along the vector, which the normalisation takes away.
    expected = torch.tensor([[0.0, 2.26989343512172e-4], [2.26989343512172e-4, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-15)
    scores = torch.tensor([[0.0, -10.0], [-10.0, 0.0]], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(row_loss(scores, diagonal(2), form="sigmoid") / 2)
    assert scores.grad is not None
    by_unit = scores.grad * 10
    torch.testing.assert_close(by_unit, torch.tensor([[-2.5, 2.26989343512172e-4], [2.26989343512172e-4, -2.5]], dtype=torch.float64))


def test_sigmoid_starting_loss() -> None:
    """Aligned positives and orthogonal negatives at t = 10, b = -10: ln 2 + (n - 1) softplus(-10), with softplus(-10) = 4.53989e-5."""
    for n in (2, 8, 33):
        eye = torch.eye(n, dtype=torch.float64)
        ten = torch.tensor([10.0], dtype=torch.float64)
        loss = pair_loss(eye, eye, ten.log(), -ten, torch.zeros(n, dtype=torch.int64), diagonal(n), form="sigmoid", widths=(n,)) / n
        assert loss.item() == pytest.approx(math.log(2) + (n - 1) * math.log1p(math.exp(-10)), abs=1e-13)


def test_balanced_example() -> None:
    """All scores 0: each half is ln 2 / 2, whatever the counts. On 8 x 8 over 8 anchors, as one set of 8 positives and 56 negatives:

    per anchor -1/(4 |P|) = -1/4 with |P| = 1, +1/(4 |N|) = 1/28; over 8 anchors -0.03125 and +0.004464285714285714; they sum to 0.
    """
    scores = torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    loss = row_loss(scores, diagonal(8), form="balanced") / 8
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    assert scores.grad is not None
    assert scores.grad[0, 0].item() == pytest.approx(-0.03125, abs=1e-17)
    assert scores.grad[0, 1].item() == pytest.approx(0.004464285714285714, abs=1e-17)
    assert scores.grad.sum().item() == pytest.approx(0, abs=1e-15)


def test_balanced_is_blind_to_duplicated_negatives() -> None:
    scores = torch.tensor([[0.3, -0.2, 0.7]], dtype=torch.float64)
    doubled = torch.cat([scores, scores[:, 1:]], 1)

    def pairs(count: int) -> PairRows:
        none = torch.zeros(1, dtype=torch.int64)
        return PairRows(none - 1, none, torch.zeros(count, dtype=torch.int64), make_named(1, {(0, 0): (1.0, 0.0)}), 1.0)

    blind_of: dict[PairForm, bool] = {"balanced": True, "ranked": True, "sigmoid": False}
    for form, blind in blind_of.items():
        one, two = row_loss(scores, pairs(3), form=form), row_loss(doubled, pairs(5), form=form)
        assert (abs(one.item() - two.item()) < 1e-15) is blind


def test_ranked_example() -> None:
    """Positives 2 and 0, negatives 1 and -1: softplus of -1, -3, 1, -1 is 0.313261687518223, 0.048587351573742, 1.313261687518223,
    0.313261687518223; their mean is 0.4970931035321026. sigmoid of the same: 0.268941421369995, 0.047425873177567, 0.731058578630005,
    0.268941421369995, so d/dp = -(0.316367294547562, 1) / 4 and d/dn = (1, 0.316367294547562) / 4."""
    scores = torch.tensor([[2.0, 0.0, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    none = torch.zeros(1, dtype=torch.int64)
    named = make_named(1, {(0, 0): (1.0, 0.0), (0, 1): (1.0, 0.0)})
    pairs = PairRows(none - 1, none, torch.zeros(4, dtype=torch.int64), named, 1.0)
    loss = row_loss(scores, pairs, form="ranked")
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(0.4970931035321026, abs=1e-15)
    assert scores.grad is not None
    expected = torch.tensor([[-0.07909182363689048, -0.25, 0.25, 0.07909182363689048]], dtype=torch.float64)
    torch.testing.assert_close(scores.grad, expected, rtol=0, atol=1e-15)
    assert row_loss(scores + 3.7, pairs, form="ranked").item() == pytest.approx(loss.item(), abs=1e-14)
    assert row_loss(torch.full((1, 4), 5.0), pairs, form="ranked").item() == pytest.approx(math.log(2), abs=1e-7)
    # At a large scale the loss over the scale is the mean hinge: (0 + 0 + 1 + 0) / 4; the share of wrongly ordered pairs is the same here.
    assert row_loss(scores * 1e6, pairs, form="ranked").item() / 1e6 == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_ambient_and_named_repulsion_of_equal_weight_are_the_same(form: PairForm) -> None:
    rng = np.random.default_rng(8)
    scores = torch.from_numpy(rng.standard_normal((3, 5)))
    zero = torch.zeros(3, dtype=torch.int64)
    attract: Weights = {(0, 1): (1.0, 0.0), (1, 0): (2.0, 0.0), (2, 4): (1.0, 0.0)}
    full = {(i, j): (0.0, 0.5) for i in range(3) for j in range(5) if i != j} | attract
    ambient = PairRows(torch.arange(3), zero, torch.zeros(5, dtype=torch.int64), make_named(3, attract), 0.5)
    named = PairRows(torch.arange(3), zero, torch.zeros(5, dtype=torch.int64), make_named(3, full), 0.0)
    a, b = row_loss(scores, ambient, form=form), row_loss(scores, named, form=form)
    assert a.item() == pytest.approx(b.item(), rel=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_matryoshka(form: PairForm) -> None:
    rng = np.random.default_rng(9)
    pairs, _ = random_pairs(rng, 12, 12, 0, 1.0)
    x = torch.from_numpy(rng.standard_normal((12, 32)))
    log_scale, bias, group = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), torch.zeros(12, dtype=torch.int64)

    def loss(x: Tensor, *widths: int) -> Tensor:
        return pair_loss(x, x, log_scale, bias, group, pairs, form=form, widths=widths)

    assert loss(x, 8, 16, 32).item() == pytest.approx((loss(x, 8) + loss(x, 16) + loss(x, 32)).item() / 3, rel=1e-14)
    assert loss(x, 8).item() == pytest.approx(loss(x[:, :8], 8).item(), rel=1e-14)
    padded = torch.cat([x[:, :16], torch.zeros(12, 16, dtype=torch.float64)], 1)
    assert loss(padded, 16).item() == pytest.approx(loss(padded, 32).item(), rel=1e-14)
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(loss(leaf, 8, 16))
    assert leaf.grad is not None and leaf.grad[:, :16].abs().min() > 0 and not leaf.grad[:, 16:].any()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_score_is_zero_with_zero_gradients(form: PairForm) -> None:
    zero = torch.zeros(4, dtype=torch.int64)
    ignored = make_named(4, {(i, j): (0.0, 0.0) for i in range(4) for j in range(4) if i != j})
    for count, pairs in (
        (4, PairRows(torch.arange(4), zero, zero, ignored, 1.0)),
        (4, PairRows(torch.arange(4), zero + 7, zero + 7, make_named(4, {}), 1.0)),
        (4, PairRows(torch.arange(4), zero, zero, make_named(4, {}), 0.0)),
        (1, PairRows(torch.arange(1), zero[:1], zero[:1], make_named(1, {}), 1.0)),
        (0, PairRows(zero[:0], zero[:0], zero[:0], make_named(0, {}), 1.0)),
    ):
        x = torch.randn(count, 8, requires_grad=True)
        log_scale, bias = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        loss = pair_loss(x, x, log_scale, bias, zero[:count], pairs, form=form, widths=(8,))
        torch.autograd.backward(loss)
        assert loss.item() == 0
        for leaf in (x, log_scale, bias):
            assert leaf.grad is not None and not leaf.grad.any()


@pytest.mark.parametrize("form", FORMS)
def test_no_anchors_but_candidates_and_the_reverse(form: PairForm) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.ones(1)
    for anchors, candidates in ((0, 5), (5, 0)):
        groups = torch.zeros(max(anchors, candidates), dtype=torch.int64)
        pairs = PairRows(torch.full((anchors,), -1), groups[:anchors], groups[:candidates], make_named(anchors, {}), 1.0)
        x, y = torch.randn(anchors, 8, requires_grad=True), torch.randn(candidates, 8, requires_grad=True)
        loss = pair_loss(x, y, one, one, torch.zeros(anchors, dtype=torch.int64) if anchors else none, pairs, form=form, widths=(8,))
        torch.autograd.backward(loss)
        assert loss.item() == 0 and x.grad is not None and y.grad is not None and not x.grad.any() and not y.grad.any()


@pytest.mark.parametrize("form", FORMS)
def test_zero_and_tiny_vectors(form: PairForm) -> None:
    """A zero vector scores `b` against everything and has no gradient; a short one has its direction all the same."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    x[4] *= 1e-10
    leaf = x.requires_grad_()
    named = make_named(6, {(i, i ^ 1): (1.0, 0.0) for i in range(6)})
    zero = torch.zeros(6, dtype=torch.int64)
    pairs = PairRows(torch.arange(6), zero, zero, named, 1.0)
    log_scale, bias = torch.full((1,), math.log(5.0)), torch.zeros(1)
    loss = pair_loss(leaf, leaf, log_scale, bias, zero, pairs, form=form, widths=(8,))
    torch.autograd.backward(loss)
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and not leaf.grad[2].any()
    scaled = x.detach().clone()
    scaled[4] *= 1e10
    assert loss.item() == pytest.approx(pair_loss(scaled, scaled, log_scale, bias, zero, pairs, form=form, widths=(8,)).item(), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_anchors_dealt_to_ranks_give_one_call(form: PairForm) -> None:
    """Each rank's call takes its own anchors and everyone's candidates: losses and gradients add up to the single call's."""
    rng = np.random.default_rng(11)
    count = 37
    x = torch.from_numpy(rng.standard_normal((count, 16)))
    bounds = [0, 5, 5, 20, count]  # one rank holds nothing
    named: Weights = {}
    for a, b in itertools.pairwise(bounds):
        for i in range(a, b):
            named |= {(i, int(j)): (1.5, 0.0) if j % 2 else (0.0, 0.5) for j in rng.integers(a, b, 3) if j != i}
    group_N = torch.from_numpy(rng.integers(0, 5, count))
    temperature = torch.from_numpy(rng.integers(0, 2, count))

    def run(parts: list[tuple[int, int]]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        log_scale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        bias = torch.tensor([0.1, -0.4], dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        for a, b in parts:
            part = make_named(b - a, {(i - a, j): w for (i, j), w in named.items() if a <= i < b})
            pairs = PairRows(torch.arange(a, b), group_N[a:b], group_N, part, 0.8)
            total = total + pair_loss(leaf[a:b], leaf, log_scale, bias, temperature[a:b], pairs, form=form, widths=(8, 16))
        torch.autograd.backward(total)
        assert leaf.grad is not None and log_scale.grad is not None and bias.grad is not None
        return [total.detach(), leaf.grad, log_scale.grad, bias.grad]

    for one, many in zip(run([(0, count)]), run(list(itertools.pairwise(bounds))), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-13)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Remembers the elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_linear_in_candidates(form: PairForm) -> None:
    """At 4,096 x 128 no tensor, forwards or backwards, passes the larger of the vectors and a slab: nothing is N x N."""
    count, width = 4096, 128
    x = torch.randn(count, width, requires_grad=True)
    ids = (torch.arange(count) ^ 1).to(torch.int64)
    named = NamedPairs(torch.arange(count + 1), ids, torch.ones(count), torch.zeros(count))
    group = torch.zeros(count, dtype=torch.int64)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        pairs = PairRows(torch.arange(count), group, group, named, 1.0)
        torch.autograd.backward(pair_loss(x, x, torch.ones(1), torch.zeros(1), group, pairs, form=form, widths=(width,)))
    assert largest.elements <= max(count * width, 2**19)


@pytest.mark.parametrize("edges", [2, 12])
def test_a_bias_leaves_ranked_to_the_last_bit(edges: int) -> None:
    """Scores that a bias of 10,000 had shifted would keep four digits behind the point of fp32's seven."""
    count = 64
    named: Weights = {(i, (i + k) % count): (1.0, 0.0) for i in range(count) for k in range(1, edges + 1)}
    group = torch.zeros(count, dtype=torch.int64)
    pairs = PairRows(torch.arange(count), group, group, make_named(count, named), 1.0)
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(edges))
    answers: list[tuple[torch.Tensor, ...]] = []
    for bias in (0.0, -1e4):
        inputs = [x.clone().requires_grad_(), torch.ones(1).requires_grad_(), torch.full((1,), bias).requires_grad_()]
        loss = pair_loss(inputs[0], inputs[0], inputs[1], inputs[2], group, pairs, form="ranked", widths=(16,))
        answers.append((loss, *torch.autograd.grad(loss, inputs)))
    for plain, shifted in zip(*answers, strict=True):
        assert torch.equal(plain, shifted)
    assert float(answers[1][3]) == 0.0


def test_autocast_changes_nothing() -> None:
    pairs, _ = random_pairs(np.random.default_rng(12), 9, 9, 0, 1.0)
    x, zero = torch.randn(9, 16), torch.zeros(9, dtype=torch.int64)
    plain = pair_loss(x, x, torch.ones(1), torch.zeros(1), zero, pairs, form="sigmoid", widths=(16,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair_loss(x, x, torch.ones(1), torch.zeros(1), zero, pairs, form="sigmoid", widths=(16,)), plain)


def test_a_missing_implementation_is_refused() -> None:
    pairs, _ = random_pairs(np.random.default_rng(13), 2, 2, 0, 1.0)
    x, zero = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="impl"):
        pair_loss(x, x, torch.ones(1), torch.zeros(1), zero, pairs, form="sigmoid", widths=(8,), impl="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.25, 1.0, 3.0, 2.0**-20])
@pytest.mark.parametrize("other", [1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranked_with_equal_weights_and_without(level: float, other: float, dtype: torch.dtype) -> None:
    """Where all repelling weights are equal they leave the sums; one that differs, or a weight far from one, takes the general way."""
    rng = np.random.default_rng(21)
    named: Weights = {(0, 39): (0.0, level * other), (5, 2): (0.0, level), (7, 3): (0.0, 0.0)}
    for i in range(10):
        for j in rng.choice(30, 3, replace=False).tolist():
            if i != j:
                named.setdefault((i, j), (float(np.float32(rng.uniform(0.5, 2))), 0.0))
    groups = torch.zeros(40, dtype=torch.int64)
    pairs = PairRows(torch.arange(11), groups[:11], groups, make_named(11, named), level)
    assert pairs.slab(0, 11, dtype)[2] == (level if other == 1.0 else None)
    scores = torch.from_numpy(rng.standard_normal((11, 40)) * 5).to(dtype).requires_grad_()
    loss = row_loss(scores, pairs, form="ranked")
    expected = sum(oracle_row(s, a, r, "ranked") for s, (a, r) in zip(scores.tolist(), dense_rows(pairs, named), strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-13 if dtype is torch.float64 else 1e-6)
    if dtype is torch.float64:
        assert torch.autograd.gradcheck(lambda s: row_loss(s, pairs, form="ranked"), (scores,))
