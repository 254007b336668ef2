"""The choices term: softmax over an item's legal bytes at its mask position, against targets."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from treadle.model.choices import choice_log_probabilities, choices_count, choices_sum
from treadle.model.layout import BatchLayout
from treadle.shape import BatchShape

torch.set_num_threads(1)
SHAPE = BatchShape(max_rows_per_device=4, max_segments_per_device=16, max_columns_per_row=64, max_choices_per_item=8)


def make_layout(tokens: list[int], choices: list[bytes], targets: list[list[float]]) -> BatchLayout:
    empty = BatchLayout.empty(SHAPE, "cpu")
    given: dict[str, Any] = {name: getattr(empty, name) for name in BatchLayout.__dataclass_fields__}
    length = torch.tensor([n + 1 + bool(c) for n, c in zip(tokens, choices, strict=True)])
    given |= {
        "num_segments": len(tokens),
        "num_positions": int(length.sum()),
        "tokens_S": torch.tensor(tokens),
        "length_S": length,
        "start_S": torch.cumsum(length, 0) - length,
        "choice_offsets_S1": torch.tensor([0, *np.cumsum([len(c) for c in choices]).tolist()]),
        "choice_bytes": torch.tensor(list(b"".join(choices)), dtype=torch.int64),
        "choice_targets": torch.tensor([t for row in targets for t in row]),
    }
    return BatchLayout(**given)


def test_against_the_definition() -> None:
    layout = make_layout([3, 2, 4, 1], [b"AB", b"", b"xyz", b"q"], [[0.75, 0.25], [], [0.5, 0.0, 0.5], [1.0]])
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.standard_normal((layout.num_positions, 8))).requires_grad_()
    weight = torch.from_numpy(rng.standard_normal((256, 8)) * 3).requires_grad_()
    # Mask positions: 1 + 3 = 4; 5 + 3 + 1 + 4 = 13; 14 + 1 + 1 = 16.
    expected = 0.0
    for position, legal, target in ((4, b"AB", (0.75, 0.25)), (13, b"xyz", (0.5, 0.0, 0.5)), (16, b"q", (1.0,))):
        logits = [float(states[position].detach() @ weight[b].detach()) for b in legal]
        total = math.log(sum(math.exp(v) for v in logits))
        expected -= sum(t * (v - total) for t, v in zip(target, logits, strict=True))
    assert int(choices_count(layout)) == 3
    assert choices_sum(states, lambda x: x @ weight.T, layout).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda s, w: choices_sum(s, lambda x: x @ w.T, layout), (states, weight), fast_mode=True)
    probability = choice_log_probabilities(states, lambda x: x @ weight.T, layout).exp()
    assert [probability[a:b].sum().item() for a, b in ((0, 2), (2, 5), (5, 6))] == [pytest.approx(1.0)] * 3


def test_even_logits_give_the_logarithm_of_the_count() -> None:
    """Whatever the targets, equal logits over n bytes cost ln n: ln 2 + ln 4."""
    layout = make_layout([1, 1], [b"ab", b"cdef"], [[0.1, 0.9], [0.25] * 4])
    assert choices_sum(torch.zeros(6, 8), lambda x: x @ torch.ones(8, 256), layout).item() == pytest.approx(math.log(8), rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    layout = make_layout([1], [b"ab"], [[0.0, 1.0]])
    logits = torch.zeros(1, 256)
    logits[0, 97], logits[0, 98] = 3e4, -3e4
    logits.requires_grad_()
    loss = choices_sum(torch.zeros(3, 8), lambda x: logits, layout)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(6e4)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert logits.grad[0, 97] == 1 and logits.grad[0, 98] == -1 and logits.grad.abs().sum() == 2


def test_no_choices() -> None:
    for layout in (BatchLayout.empty(SHAPE, "cpu"), make_layout([2, 3], [b"", b""], [[], []])):
        states = torch.randn(layout.num_positions, 8, requires_grad=True)
        weight = torch.randn(256, 8, requires_grad=True)
        assert choices_count(layout) == 0
        loss = choices_sum(states, lambda x, w=weight: x @ w.T, layout)  # type: ignore[misc]
        torch.autograd.backward(loss)
        assert loss.item() == 0 and weight.grad is not None and not weight.grad.any()
