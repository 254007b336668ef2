"""The contrastive term against an oracle that classifies and scores pair by pair, from the definitions, in plain Python."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.model.config import Contrastive
from treadle.model.contrastive import Candidates, Temperatures, contrastive_count, contrastive_sum
from treadle.model.layout import BatchLayout, LayoutEdges
from treadle.shape import BatchShape, Negatives, PairLossForm

torch.set_num_threads(1)
FORMS = (PairLossForm.SIGMOID, PairLossForm.BALANCED, PairLossForm.RANKED)
SHAPE = BatchShape(max_rows_per_device=4, max_segments_per_device=64, max_columns_per_row=64)


@dataclass
class Rank:
    """One rank's segments: groups, temperature groups, and edges by (from, to) within the rank."""

    groups: list[int]
    temperatures: list[int]
    edges: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)

    def layout(self) -> BatchLayout:
        return make_layout(len(self.groups), self.edges, group_S=integers(self.groups), temperature_group_S=integers(self.temperatures))


def make_layout(count: int, edges: dict[str, dict[tuple[int, int], float]], **fields: Tensor) -> BatchLayout:
    """A layout of `count` segments without payloads: what the pair terms read is given, the rest is the empty layout's."""
    empty = BatchLayout.empty(SHAPE, "cpu")
    given: dict[str, Any] = {name: getattr(empty, name) for name in BatchLayout.__dataclass_fields__}
    given |= {"num_segments": count, "num_items": count, "id_S": torch.arange(count)}
    for name in ("attract", "repel", "ignore"):
        links = edges.get(name, {})
        keys = sorted(links)
        starts = [sum(1 for k in keys if k[0] < i) for i in range(count + 1)]
        given[name] = LayoutEdges(
            torch.tensor(starts),
            torch.tensor([k[1] for k in keys], dtype=torch.int64),
            torch.tensor([links[k] for k in keys], dtype=torch.float32),
        )
    return BatchLayout(**(given | dict[str, Any](fields)))


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def row_loss(attract: list[tuple[float, float]], repel: list[tuple[float, float]], form: PairLossForm) -> float | None:
    """The loss of a row of (score, weight), or None where the form does not count the anchor."""
    attract, repel = [a for a in attract if a[1] > 0], [r for r in repel if r[1] > 0]
    up, down = sum(w for _, w in attract), sum(w for _, w in repel)
    if form is PairLossForm.RANKED:
        if not attract or not repel:
            return None
        return sum(u * v * softplus(n - p) for p, u in attract for n, v in repel) / (up * down)
    if not attract and not repel:
        return None
    positive, negative = sum(u * softplus(-s) for s, u in attract), sum(v * softplus(s) for s, v in repel)
    if form is PairLossForm.SIGMOID:
        return positive + negative
    return 0.5 * (positive / up if attract else 0.0) + 0.5 * (negative / down if repel else 0.0)


def oracle(ranks: list[Rank], vectors: list[np.ndarray], scale: list[float], bias: list[float], config: Contrastive) -> tuple[float, int]:
    """The world's numerator and denominator."""
    world = [(r, i) for r, rank in enumerate(ranks) for i in range(len(rank.groups))]
    total, counted = 0.0, set()
    for width in config.matryoshka_dimensions:
        for r, i in world:
            rank, g = ranks[r], ranks[r].temperatures[i]
            attract, repel = [], []
            for q, j in world:
                if (r, i) == (q, j):
                    continue
                a, b = vectors[r][i, :width], vectors[q][j, :width]
                score = scale[g] * float(a @ b) / (float(np.linalg.norm(a)) * float(np.linalg.norm(b))) + bias[g]
                edge = (i, j) if q == r else None
                if edge in rank.edges.get("ignore", {}):
                    continue
                if edge is not None and edge in rank.edges.get("attract", {}):
                    attract.append((score, rank.edges["attract"][edge]))
                elif edge is not None and edge in rank.edges.get("repel", {}):
                    repel.append((score, rank.edges["repel"][edge]))
                elif rank.groups[i] and rank.groups[i] == ranks[q].groups[j]:
                    continue
                elif config.negatives is Negatives.AMBIENT:
                    repel.append((score, config.ambient_repulsion_weight))
            loss = row_loss(attract, repel, config.pair_loss)
            if loss is not None:
                counted.add((r, i))
                total += loss
    return total / len(config.matryoshka_dimensions), len(counted)


def random_world(rng: np.random.Generator, sizes: list[int]) -> list[Rank]:
    ranks = []
    for size in sizes:
        edges: dict[str, dict[tuple[int, int], float]] = {"attract": {}, "repel": {}, "ignore": {}}
        for name, links in edges.items():
            for _ in range(int(rng.integers(0, 3 * size + 1))):
                i, j = rng.integers(0, size, 2).tolist()
                if i != j:  # the sets may name the same pair: precedence decides
                    links[i, j] = float(rng.choice([0.0, 0.5, 1.0, 3.0])) if name != "ignore" else 1.0
        ranks.append(Rank(rng.integers(0, 4, size).tolist(), rng.integers(0, 3, size).tolist(), edges))
    return ranks


def run(ranks: list[Rank], leaves: list[Tensor], temperatures: Temperatures, config: Contrastive) -> tuple[Tensor, int]:
    """What the ranks of a world sum: each takes its anchors and everyone's candidates."""
    group_N = torch.tensor([g for rank in ranks for g in rank.groups], dtype=torch.int64)
    pooled_ND = torch.cat(leaves)
    numerator, count, first = torch.zeros((), dtype=pooled_ND.dtype), 0, 0
    for rank, pooled_SD in zip(ranks, leaves, strict=True):
        layout, candidates = rank.layout(), Candidates(len(group_N), first, group_N)
        counted = contrastive_count(layout, candidates, config)
        assert counted.dtype == torch.int64
        count += int(counted)
        numerator = numerator + contrastive_sum(pooled_SD, pooled_ND, layout, candidates, temperatures, config)
        first += len(rank.groups)
    return numerator, count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("negatives", Negatives)
@pytest.mark.parametrize("seed", range(5))
def test_against_the_definitions(form: PairLossForm, negatives: Negatives, seed: int) -> None:
    rng = np.random.default_rng([seed, form, negatives])
    sizes = [[1], [2], [9], [6, 0, 5], [3, 3, 3, 3]][seed]
    ranks = random_world(rng, sizes)
    widths = ((24,), (8, 24), (8, 16))[seed % 3]
    config = Contrastive(
        pair_loss=form,
        negatives=negatives,
        matryoshka_dimensions=widths,
        temperature_groups=3,
        ambient_repulsion_weight=(0.0, 0.25)[seed % 2],
    ).resolved(24)
    temperatures = Temperatures(3, 5.0, -1.0).double()
    with torch.no_grad():
        temperatures.log_scale_G.copy_(torch.tensor([0.0, 2.0, 4.6]))
        temperatures.bias_G.copy_(torch.tensor([0.0, -10.0, 3.0]))
    vectors = [rng.standard_normal((size, 24)) for size in sizes]
    expected, counted = oracle(ranks, vectors, temperatures.log_scale_G.exp().tolist(), temperatures.bias_G.tolist(), config)
    leaves = [torch.from_numpy(v).requires_grad_() for v in vectors]
    numerator, count = run(ranks, leaves, temperatures, config)
    assert count == counted
    assert numerator.item() == pytest.approx(expected, rel=1e-12, abs=1e-13)

    # W ranks and one rank that holds the same items agree, in losses and in every gradient.
    torch.autograd.backward(numerator)
    shift = np.cumsum([0, *sizes]).tolist()
    merged = Rank([g for r in ranks for g in r.groups], [t for r in ranks for t in r.temperatures])
    for rank, by in zip(ranks, shift, strict=False):
        for name, links in rank.edges.items():
            merged.edges.setdefault(name, {}).update({(i + by, j + by): w for (i, j), w in links.items()})
    alone = Temperatures(3, 1.0, 0.0).double()
    alone.load_state_dict(temperatures.state_dict())
    leaf = torch.from_numpy(np.concatenate(vectors)).requires_grad_()
    single, single_count = run([merged], [leaf], alone, config)
    torch.autograd.backward(single)
    assert single_count == counted
    torch.testing.assert_close(single, numerator, rtol=1e-12, atol=1e-13)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.cat([x.grad for x in leaves if x.grad is not None]), rtol=1e-11, atol=1e-12)
    for name in ("log_scale_G", "bias_G"):
        torch.testing.assert_close(getattr(alone, name).grad, getattr(temperatures, name).grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_match_the_oracle(form: PairLossForm) -> None:
    """Central differences of the pair-by-pair oracle itself, not of the implementation."""
    rng = np.random.default_rng(17)
    ranks = random_world(rng, [7])
    config = Contrastive(pair_loss=form, matryoshka_dimensions=(8, 16), temperature_groups=3).resolved(16)
    temperatures = Temperatures(3, 4.0, -0.5).double()
    x = rng.standard_normal((7, 16))
    leaf = torch.from_numpy(x.copy()).requires_grad_()
    torch.autograd.backward(run(ranks, [leaf], temperatures, config)[0])
    assert leaf.grad is not None and temperatures.log_scale_G.grad is not None and temperatures.bias_G.grad is not None
    scale, bias, step = temperatures.log_scale_G.tolist(), temperatures.bias_G.tolist(), 1e-5

    def value(x: np.ndarray, log_scale: list[float], bias: list[float]) -> float:
        return oracle(ranks, [x], [math.exp(s) for s in log_scale], bias, config)[0]

    for i, k in ((0, 0), (1, 9), (3, 5), (6, 15)):
        moved = np.zeros_like(x)
        moved[i, k] = step
        slope = (value(x + moved, scale, bias) - value(x - moved, scale, bias)) / (2 * step)
        assert leaf.grad[i, k].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
    for g in range(3):
        up, down = [s + step * (g == h) for h, s in enumerate(scale)], [s - step * (g == h) for h, s in enumerate(scale)]
        assert temperatures.log_scale_G.grad[g].item() == pytest.approx(
            (value(x, up, bias) - value(x, down, bias)) / (2 * step), rel=1e-6, abs=1e-8
        )
        up, down = [b + step * (g == h) for h, b in enumerate(bias)], [b - step * (g == h) for h, b in enumerate(bias)]
        assert temperatures.bias_G.grad[g].item() == pytest.approx(
            (value(x, scale, up) - value(x, scale, down)) / (2 * step), rel=1e-6, abs=1e-8
        )


def test_precedence() -> None:
    """Ignore before attract before repel before group before ambient; a weight of zero names without scoring."""
    edges = {
        "ignore": {(0, 1): 1.0},
        "attract": {(0, 1): 1.0, (0, 2): 0.0, (0, 4): 2.0},
        "repel": {(0, 1): 1.0, (0, 2): 1.0, (0, 3): 0.5, (0, 4): 1.0},
    }
    rank = Rank([7, 7, 7, 7, 7, 7, 0], [0] * 7, edges)
    x = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    config = Contrastive(pair_loss=PairLossForm.SIGMOID).resolved(8)
    temperatures = Temperatures(1, 10.0, -10.0)
    e = x / x.norm(dim=1, keepdim=True)

    def score(i: int, j: int) -> float:
        return 10 * float(e[i] @ e[j]) - 10

    # 0 attracts 4 (2), repels 3 (0.5: the edge beats the group) and 6 (ambient); 6 repels all; 1 to 5 repel only 6, the rest is their group.
    expected = 2 * softplus(-score(0, 4)) + 0.5 * softplus(score(0, 3)) + softplus(score(0, 6))
    expected += sum(softplus(score(6, j)) for j in range(6)) + sum(softplus(score(i, 6)) for i in range(1, 6))
    numerator, count = run([rank], [x], temperatures.double(), config)
    assert numerator.item() == pytest.approx(expected, rel=1e-6) and count == 7  # log 10 is held in fp32
    assert run([rank], [x], temperatures, Contrastive(pair_loss=PairLossForm.RANKED).resolved(8))[1] == 1
    assert run([rank], [x], temperatures, Contrastive(negatives=Negatives.NAMED).resolved(8))[1] == 1


def test_the_same_thing_on_two_ranks_is_no_negative() -> None:
    ranks = [Rank([5, 6], [0, 0]), Rank([5, 6], [0, 0])]
    x = torch.eye(2, dtype=torch.float64)
    config = Contrastive(pair_loss=PairLossForm.SIGMOID).resolved(2 * 8)
    wide = torch.cat([x, torch.zeros(2, 14, dtype=torch.float64)], 1)
    numerator, count = run(ranks, [wide, wide], Temperatures(1, 10.0, -10.0), config)
    # Each of four anchors repels the two candidates of the other group, at score -10.
    assert count == 4 and numerator.item() == pytest.approx(8 * softplus(-10.0), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_segments_take_part_with_nothing(form: PairLossForm) -> None:
    config = Contrastive(pair_loss=form).resolved(8)
    layout = BatchLayout.empty(SHAPE, "cpu")
    temperatures = Temperatures(1, 10.0, 0.0)
    for others in (0, 3):
        pooled_SD, pooled_ND = torch.zeros(0, 8, requires_grad=True), torch.randn(others, 8, requires_grad=True)
        candidates = Candidates(others, others, torch.zeros(others, dtype=torch.int64))
        assert contrastive_count(layout, candidates, config) == 0
        loss = contrastive_sum(pooled_SD, pooled_ND, layout, candidates, temperatures, config)
        torch.autograd.backward(loss)
        assert loss.item() == 0 and pooled_ND.grad is not None and not pooled_ND.grad.any()


def test_temperatures_start_and_bound() -> None:
    """log t starts at log 10; clamped after the update, so at the bound an inward gradient still moves it."""
    temperatures = Temperatures(2, 10.0, -10.0)
    assert temperatures.log_scale_G.dtype == torch.float32
    assert temperatures.log_scale_G.tolist() == [pytest.approx(math.log(10))] * 2 and temperatures.bias_G.tolist() == [-10.0] * 2
    with torch.no_grad():
        temperatures.log_scale_G.copy_(torch.tensor([7.0, -3.0]))
    temperatures.clamp_()
    bound = float(np.float32(math.log(100)))
    assert temperatures.log_scale_G.tolist() == [bound, -3.0]
    optimizer = torch.optim.SGD(temperatures.parameters(), lr=0.5)
    torch.autograd.backward(temperatures.log_scale_G.sum())
    optimizer.step()
    temperatures.clamp_()
    assert temperatures.log_scale_G.tolist() == [pytest.approx(bound - 0.5), -3.5]


def test_an_unresolved_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="derived: resolve"):
        contrastive_count(Rank([0], [0]).layout(), Candidates(1, 0, torch.zeros(1, dtype=torch.int64)), Contrastive())
