"""The late-interaction term against an oracle that scores token by token and classifies pair by pair, in plain Python."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.model.config import Contrastive, LateInteraction
from treadle.model.contrastive import Temperatures
from treadle.model.late_interaction import TokenHead, late_interaction_count, late_interaction_sum
from treadle.model.layout import BatchLayout, LayoutEdges
from treadle.shape import BatchShape, LateInteractionSide, Negatives, PairLossForm

torch.set_num_threads(1)
FORMS = (PairLossForm.SIGMOID, PairLossForm.BALANCED, PairLossForm.RANKED)
SHAPE = BatchShape(max_rows_per_device=8, max_segments_per_device=64, max_columns_per_row=64)
Edges = dict[str, dict[tuple[int, int], float]]


def make_layout(
    tokens: list[int], masks: list[bool], sides: list[int], groups: list[int], temperatures: list[int], edges: Edges
) -> BatchLayout:
    """Segments of given tokens back to back: a prefix, the tokens, a mask position where there is one."""
    count = len(tokens)
    empty = BatchLayout.empty(SHAPE, "cpu")
    given: dict[str, Any] = {name: getattr(empty, name) for name in BatchLayout.__dataclass_fields__}
    length = torch.tensor(tokens) + 1 + torch.tensor(masks).long()
    given |= {
        "num_segments": count,
        "num_positions": int(length.sum()),
        "id_S": torch.arange(count),
        "tokens_S": torch.tensor(tokens),
        "length_S": length,
        "start_S": torch.cumsum(length, 0) - length,
        "side_S": torch.tensor(sides),
        "group_S": torch.tensor(groups),
        "temperature_group_S": torch.tensor(temperatures),
    }
    for name in ("attract", "repel", "ignore"):
        links = edges.get(name, {})
        keys = sorted(links)
        starts = [sum(1 for k in keys if k[0] < i) for i in range(count + 1)]
        weights = torch.tensor([links[k] for k in keys], dtype=torch.float32)
        given[name] = LayoutEdges(torch.tensor(starts), torch.tensor([k[1] for k in keys], dtype=torch.int64), weights)
    return BatchLayout(**given)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def oracle(
    layout: BatchLayout,
    edges: Edges,
    vectors: np.ndarray,
    scale: list[float],
    bias: list[float],
    late: LateInteraction,
    contrastive: Contrastive,
) -> tuple[float, int]:
    tokens, starts, sides = layout.tokens_S.tolist(), layout.start_S.tolist(), layout.side_S.tolist()
    groups, temperatures = layout.group_S.tolist(), layout.temperature_group_S.tolist()
    total, count = 0.0, 0
    for q in range(len(tokens)):
        if not sides[q] & LateInteractionSide.QUERY or not tokens[q]:
            continue
        attract, repel = [], []
        for d in range(len(tokens)):
            if d == q or not sides[d] & LateInteractionSide.DOCUMENT or not tokens[d] or (q, d) in edges.get("ignore", {}):
                continue
            best = 0.0
            for i in range(min(tokens[q], late.max_query_span)):
                best += max(float(vectors[starts[q] + 1 + i] @ vectors[starts[d] + 1 + j]) for j in range(tokens[d]))
            score = scale[temperatures[q]] * best + bias[temperatures[q]]
            if (q, d) in edges.get("attract", {}):
                attract.append((score, edges["attract"][q, d]))
            elif (q, d) in edges.get("repel", {}):
                repel.append((score, edges["repel"][q, d]))
            elif contrastive.negatives is Negatives.AMBIENT and not (groups[q] and groups[q] == groups[d]):
                repel.append((score, contrastive.ambient_repulsion_weight))
        attract, repel = [a for a in attract if a[1] > 0], [r for r in repel if r[1] > 0]
        up, down = sum(u for _, u in attract), sum(v for _, v in repel)
        if late.pair_loss is PairLossForm.RANKED:
            if attract and repel:
                count += 1
                total += sum(u * v * softplus(n - p) for p, u in attract for n, v in repel) / (up * down)
        elif attract or repel:
            count += 1
            positive, negative = sum(u * softplus(-s) for s, u in attract), sum(v * softplus(s) for s, v in repel)
            balanced = late.pair_loss is PairLossForm.BALANCED
            total += 0.5 * ((positive / up if up else 0) + (negative / down if down else 0)) if balanced else positive + negative
    return total, count


def random_items(rng: np.random.Generator, count: int) -> tuple[BatchLayout, Edges]:
    edges: Edges = {"attract": {}, "repel": {}, "ignore": {}}
    for name, links in edges.items():
        for _ in range(int(rng.integers(0, 3 * count))):
            i, j = rng.integers(0, count, 2).tolist()
            if i != j:
                links[i, j] = float(rng.choice([0.0, 1.0, 2.5])) if name != "ignore" else 1.0
    columns = [rng.integers(0, most, count).tolist() for most in (9, 2, 4, 3, 2)]
    tokens, masks, sides, groups, temperatures = columns
    return make_layout(tokens, [bool(m) for m in masks], sides, groups, temperatures, edges), edges


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("negatives", Negatives)
@pytest.mark.parametrize("seed", range(4))
def test_against_the_definitions(form: PairLossForm, negatives: Negatives, seed: int) -> None:
    rng = np.random.default_rng([seed, form, negatives])
    layout, edges = random_items(rng, 14)
    late = LateInteraction(weight=1, width=8, max_query_span=(0, 3)[seed % 2], pair_loss=form).resolved(SHAPE)
    contrastive = Contrastive(negatives=negatives, temperature_groups=2, ambient_repulsion_weight=0.5).resolved(16)
    head = TokenHead(16, 8, 1).double()
    temperatures = Temperatures(2, 1.0, 0.0).double()
    with torch.no_grad():
        temperatures.log_scale_G.copy_(torch.tensor([0.0, 1.5]))
        temperatures.bias_G.copy_(torch.tensor([-1.0, 2.0]))
    states = torch.from_numpy(rng.standard_normal((layout.num_positions, 16))).requires_grad_()
    mapped = (states @ head.weight.T).detach().numpy()
    vectors = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
    expected, counted = oracle(
        layout, edges, vectors, temperatures.log_scale_G.exp().tolist(), temperatures.bias_G.tolist(), late, contrastive
    )
    count = late_interaction_count(layout, late, contrastive)
    assert count.dtype == torch.int64 and int(count) == counted
    assert late_interaction_sum(states, head, layout, temperatures, late, contrastive).item() == pytest.approx(
        expected, rel=1e-12, abs=1e-13
    )
    if seed == 0:
        parameters = (states, head.weight, temperatures.log_scale_G, temperatures.bias_G)

        def loss(*_: Tensor) -> Tensor:
            return late_interaction_sum(states, head, layout, temperatures, late, contrastive)

        assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


def test_prefix_and_mask_positions_stay_out() -> None:
    """Values at a prefix or a mask position, and query tokens past the span, change nothing and get no gradient."""
    layout = make_layout([5, 3, 2], [True, False, True], [1, 2, 2], [0, 0, 0], [0, 0, 0], {"attract": {(0, 1): 1.0}})
    late = LateInteraction(weight=1, width=8, max_query_span=4).resolved(SHAPE)
    contrastive = Contrastive().resolved(16)
    head, temperatures = TokenHead(16, 8, 1), Temperatures(1, 1.0, 0.0)
    states = torch.randn(layout.num_positions, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    torch.autograd.backward(late_interaction_sum(states, head, layout, temperatures, late, contrastive))
    assert states.grad is not None
    # Positions: 0 prefix, 1 to 5 tokens (the span is 4), 6 mask; 7 prefix, 8 to 10; 11 prefix, 12, 13, 14 mask.
    touched = states.grad.abs().sum(1) > 0
    assert not touched[[0, 5, 6, 7, 11, 14]].any() and touched[[1, 2, 3, 4]].all() and touched[8:11].any() and touched[12:14].any()


def test_no_query_no_document_and_no_item() -> None:
    late, contrastive = LateInteraction(weight=1, width=8).resolved(SHAPE), Contrastive().resolved(16)
    head, temperatures = TokenHead(16, 8, 1), Temperatures(1, 1.0, 0.0)
    for sides in ([0, 0], [1, 1], [2, 2], [1, 0], [3, 0]):
        layout = make_layout([2, 2], [False, False], sides, [0, 0], [0, 0], {"attract": {(0, 1): 1.0}})
        states = torch.randn(6, 16, requires_grad=True)
        assert late_interaction_count(layout, late, contrastive) == 0
        loss = late_interaction_sum(states, head, layout, temperatures, late, contrastive)
        torch.autograd.backward(loss)
        assert loss.item() == 0 and head.weight.grad is not None and not head.weight.grad.any()
    layout = BatchLayout.empty(SHAPE, "cpu")
    assert late_interaction_count(layout, late, contrastive) == 0
    assert late_interaction_sum(torch.zeros(0, 16), head, layout, temperatures, late, contrastive).item() == 0


def test_zero_states_give_no_nan() -> None:
    layout = make_layout([2, 2, 2], [False] * 3, [1, 2, 2], [0] * 3, [0] * 3, {"attract": {(0, 1): 1.0}})
    states = torch.zeros(9, 16, requires_grad=True)
    head = TokenHead(16, 8, 1)
    late, contrastive = LateInteraction(weight=1, width=8).resolved(SHAPE), Contrastive().resolved(16)
    loss = late_interaction_sum(states, head, layout, Temperatures(1, 1.0, 0.0), late, contrastive)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(math.log(2))  # both documents score alike
    assert (
        states.grad is not None
        and head.weight.grad is not None
        and torch.isfinite(states.grad).all()
        and torch.isfinite(head.weight.grad).all()
    )


def test_token_head_is_keyed_and_unit() -> None:
    a, b, c = TokenHead(32, 8, 5), TokenHead(32, 8, 5), TokenHead(32, 8, 6)
    assert torch.equal(a.weight, b.weight) and not torch.equal(a.weight, c.weight)
    vectors = a(torch.randn(10, 32).bfloat16())
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(10))
