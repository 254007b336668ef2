"""Pair losses: Triton versions against the float64 reference, forward and every gradient, over forms, widths, edges and groups."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import treadle.kernels.pair_loss_triton as pair_loss_triton
from treadle.kernels.pair_loss import NamedPairs, PairForm, PairRows, pair_loss, row_loss
from treadle.kernels.pair_tiles_kernels import PAIR_TILES_RANKED, RUN_TILES

pytestmark = pytest.mark.usefixtures("guarded")

Compare = Callable[..., None]
FORMS: tuple[PairForm, ...] = ("sigmoid", "balanced", "ranked")
DTYPES = (torch.float32, torch.bfloat16)


def named_pairs(rng: np.random.Generator, anchors: int, candidates: int, first: int, most: int) -> NamedPairs:
    """Up to `most` named pairs of each anchor: a third attract, repel or name only, with weights, some of them zero."""
    offsets, ids, attract, repel = [0], [], [], []
    for i in range(anchors):
        chosen = rng.permutation(candidates)[: rng.integers(0, min(candidates, most) + 1)]
        for j in sorted(int(j) for j in chosen if j != first + i):
            kind, weight = rng.integers(3), float(np.float32(rng.choice([0.0, 0.5, 1.0, 2.25])))
            ids.append(j)
            attract.append(weight if kind == 0 else 0.0)
            repel.append(weight if kind == 1 else 0.0)
        offsets.append(len(ids))
    return NamedPairs(torch.tensor(offsets), torch.tensor(ids, dtype=torch.int64), torch.tensor(attract), torch.tensor(repel))


def rows(rng: np.random.Generator, anchors: int, candidates: int, first: int, ambient: float, most: int = 9) -> PairRows:
    group_N = torch.from_numpy(rng.integers(0, 4, candidates)) * 10**12
    own = torch.arange(anchors) + first
    return PairRows(own, group_N[first : first + anchors], group_N, named_pairs(rng, anchors, candidates, first, most), ambient)


def on(pairs: PairRows, device: torch.device) -> PairRows:
    named = pairs.named
    moved = NamedPairs(*(t.to(device) for t in (named.offsets_M1, named.ids_E, named.attract_E, named.repel_E)))
    anchor_M, candidate_N = (None if mask is None else mask.to(device) for mask in (pairs.anchor_M, pairs.candidate_N))
    sides = (t.to(device) for t in (pairs.self_M, pairs.group_M, pairs.group_N))
    own_M, group_M, group_N = sides
    return PairRows(own_M, group_M, group_N, moved, pairs.ambient_weight, anchor_M, candidate_N)


def check(
    compare: Compare,
    form: PairForm,
    pairs: PairRows,
    first: int,
    widths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    scales: tuple[float, ...] = (1.0, 5.0),
    extra: int = 8,
    **more: Any,
) -> None:
    """Anchors are some of the candidates; vectors are wider than the widest width; each anchor has one of two temperatures."""
    anchors, candidates = len(pairs.self_M), len(pairs.group_N)
    generator = torch.Generator().manual_seed(anchors + candidates)
    y = torch.randn((candidates, widths[-1] + extra), generator=generator).to(dtype)
    group = torch.arange(anchors) % len(scales)

    def op(x: Tensor, y: Tensor, log_scale: Tensor, bias: Tensor, impl: Any) -> Tensor:
        # Eight times the mean loss: gradients of about one, which the tolerance is relative to.
        share = 8.0 / math.sqrt(max(1, anchors))
        return share * pair_loss(x, y, log_scale, bias, group.to(x.device), on(pairs, x.device), form=form, widths=widths, impl=impl)

    log_scale = torch.tensor([math.log(s) for s in scales])
    bias = torch.tensor([-1.0, 0.5][: len(scales)])
    compare(op, y[first : first + anchors].clone(), y, log_scale, bias, **more)


SIZES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "one anchor": (1, 9, 4, (16,)),
    "three widths": (33, 63, 20, (8, 24, 40)),
}
"""Anchors, candidates, the first anchor among them, widths."""


THOROUGH = (
    ("three widths", "ranked", torch.float32),
    ("three widths", "balanced", torch.bfloat16),
    ("one anchor", "balanced", torch.bfloat16),
)


@pytest.mark.parametrize(
    ("size", "form", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.thorough] if case in THOROUGH else []) for case in product(SIZES, FORMS, DTYPES)],
)
def test_pair_loss(compare: Compare, size: str, form: PairForm, dtype: torch.dtype) -> None:
    """Edges, groups, ignored pairs and weights of zero among ambient pairs; RANKED walks some blocks' edges and takes nodes for others."""
    anchors, candidates, first, widths = SIZES[size]
    rng = np.random.default_rng(anchors)
    pairs = rows(rng, anchors, candidates, first, float(np.float32(0.7)))
    if dtype is torch.bfloat16 and size == "three widths" and form == "ranked":
        pairs = rows(rng, anchors, candidates, first, 1.0, most=3)
    check(compare, form, pairs, first, widths, dtype=dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("anchors", "candidates"), [(63, 127), (127, 1023), (1023, 63)])
def test_pair_loss_at_length(compare: Compare, anchors: int, candidates: int, form: PairForm) -> None:
    rng = np.random.default_rng(3)
    first = max(0, candidates - anchors) // 2
    pairs = rows(rng, min(anchors, candidates), candidates, first, 1.0)
    check(compare, form, pairs, first, (32, 64))


def test_eight_widths_of_named_pairs_alone(compare: Compare) -> None:
    rng = np.random.default_rng(1)
    check(compare, "sigmoid", rows(rng, 10, 20, 7, 0.0), 7, (8, 16, 24, 32, 40, 48, 64, 72), scales=(1.0,))


def test_no_edge_at_all(compare: Compare) -> None:
    rng = np.random.default_rng(2)
    check(compare, "balanced", rows(rng, 17, 33, 0, 1.0, most=0), 0, (16,))


def test_steep_temperatures(compare: Compare) -> None:
    """Inverse temperatures of 100 and 22: scores far from zero, edges walked one by one."""
    rng = np.random.default_rng(4)
    check(compare, "ranked", rows(rng, 20, 70, 5, 1.0, most=6), 5, (24,), scales=(100.0, 22.0), tolerance=1e-4)


@pytest.mark.parametrize("scale", [1.0, pytest.param(8.0, marks=pytest.mark.thorough), pytest.param(20.0, marks=pytest.mark.thorough)])
def test_many_attracting_edges_take_nodes(compare: Compare, scale: float, device: torch.device) -> None:
    """Twelve attracting edges an anchor: losses and gradients by Chebyshev nodes are those of the edges one by one."""
    anchors, candidates = 12, 40
    ids = torch.tensor([[(5 * i + 2 * k + 1) % 27 + 13 for k in range(12)] for i in range(anchors)]).sort(1).values
    named = NamedPairs(torch.arange(anchors + 1) * 12, ids.reshape(-1), torch.linspace(0.2, 2.0, 144), torch.zeros(144))
    pairs = PairRows(torch.arange(anchors), torch.zeros(anchors, dtype=torch.int64), torch.zeros(candidates, dtype=torch.int64), named, 0.5)
    integers = pair_loss_triton.integers(on(pairs, device))
    nodes = int(pair_loss_triton.planned_nodes(integers, torch.full((anchors,), scale, device=device))[0])
    # e^(-n asinh(pi / t)) of 1e-6; at least 8, and 96 where it would take more.
    assert nodes == 2 * math.ceil(min(max(8.0, 13.8 / math.asinh(math.pi / scale)), 96.0) / 2)
    check(compare, "ranked", pairs, 0, (24,), scales=(scale,), tolerance=5e-5)


@pytest.mark.parametrize(
    ("scale", "edges", "nodes"), [(30.0, 7, 0), (30.0, 13, 96), (100.0, 40, 256), (100.0, 32, 0), (1.0, 2, 8), (1.0, 1, 0), (1.0, 0, 0)]
)
def test_ranked_takes_what_costs_less(scale: float, edges: int, nodes: int, device: torch.device) -> None:
    """24 operations a pair and edge against 3 a pair and node: never more than 96 nodes' worth up to a temperature of 30."""
    named = NamedPairs(torch.tensor([0, edges]), torch.arange(1, edges + 1), torch.ones(edges), torch.zeros(edges))
    zeros = torch.zeros(edges + 1, dtype=torch.int64)
    pairs = PairRows(torch.zeros(1, dtype=torch.int64), zeros[:1], zeros, named, 1.0)
    found = pair_loss_triton.planned_nodes(pair_loss_triton.integers(on(pairs, device)), torch.tensor([scale], device=device))
    assert found.tolist() == [nodes]
    cost = pair_loss_triton.NODE_COST * nodes if nodes else pair_loss_triton.DIRECT_COST * edges
    if edges <= 7 or scale <= 30:
        assert cost <= 96 * pair_loss_triton.NODE_COST


def test_anchors_and_candidates_that_take_no_part(compare: Compare) -> None:
    """Padding to capacity: rows past the last segment are zero vectors, and neither anchors nor candidates."""
    rng = np.random.default_rng(5)
    whole = rows(rng, 9, 21, 4, 1.0)
    pad_M, pad_N, named = 7, 11, whole.named
    spare = torch.zeros(5)
    padded = PairRows(
        torch.cat([whole.self_M, torch.full((pad_M,), -1)]),
        torch.cat([whole.group_M, torch.zeros(pad_M, dtype=torch.int64)]),
        torch.cat([whole.group_N, torch.zeros(pad_N, dtype=torch.int64)]),
        NamedPairs(
            torch.cat([named.offsets_M1, named.offsets_M1[-1:].expand(pad_M)]),
            torch.cat([named.ids_E, spare.long()]),
            torch.cat([named.attract_E, spare + 1]),
            torch.cat([named.repel_E, spare]),
        ),
        1.0,
        torch.arange(9 + pad_M) < 9,
        torch.arange(21 + pad_N) < 21,
    )
    y = torch.randn((21 + pad_N, 24), generator=torch.Generator().manual_seed(0))
    y[21:] = 0
    group = torch.zeros(9 + pad_M, dtype=torch.int64)
    scale, bias = torch.tensor([math.log(3.0)]), torch.tensor([-2.0])
    for form in FORMS:

        def op(y: Tensor, scale: Tensor, bias: Tensor, impl: Any, form: PairForm = form) -> Tensor:
            x = torch.cat([y[4:13], torch.zeros_like(y[:pad_M])])
            if impl == "reference":
                # The reference scores the pairs without their padding: what counts is that padding changes nothing.
                return pair_loss(
                    y[4:13], y[:21], scale, bias, group[:9].to(y.device), on(whole, y.device), form=form, widths=(24,), impl=impl
                )
            return pair_loss(x, y, scale, bias, group.to(y.device), on(padded, y.device), form=form, widths=(24,), impl=impl)

        compare(op, y, scale, bias)


def test_padding_in_the_reference() -> None:
    rng = np.random.default_rng(6)
    pairs = rows(rng, 9, 21, 4, 1.0)
    scores = torch.randn(9, 21, dtype=torch.float64)
    masked = replace(pairs, candidate_N=torch.arange(21) < 15, anchor_M=torch.arange(9) < 9)
    keep = pairs.named.ids_E < 15
    cut = np.concatenate([[0], np.cumsum(keep.numpy())])[pairs.named.offsets_M1.numpy()]
    named = NamedPairs(torch.from_numpy(cut), *(t[keep] for t in (pairs.named.ids_E, pairs.named.attract_E, pairs.named.repel_E)))
    shorter = replace(pairs, group_N=pairs.group_N[:15], named=named)
    for form in FORMS:
        found = row_loss(scores, replace(masked, named=named), form=form)
        torch.testing.assert_close(found, row_loss(scores[:, :15], shorter, form=form))


def test_several_slabs_add_up(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_loss_triton, "SLAB_BYTES", 1)
    assert pair_loss_triton.slab_rows(130, 140, 1, False, 4) == 64
    check(compare, "sigmoid", rows(np.random.default_rng(7), 130, 140, 5, 1.0), 5, (16,))


def test_memory_of_a_slab_is_bounded() -> None:
    """Coefficients, and under RANKED moments, of a slab stay within the bound, whatever the candidates."""
    for candidates in (10, 4096, 32_768, 10**6):
        for widths in (1, 8):
            slab = pair_loss_triton.slab_rows(32_768, candidates, widths, True, 2)
            assert slab % 64 == 0 and 64 <= slab <= 1024
            assert slab == 64 or slab * candidates * widths * 2 <= pair_loss_triton.SLAB_BYTES
            runs = -(-candidates // pair_loss_triton.RANKED_RUN)
            assert slab == 64 or slab * runs * widths * pair_loss_triton.MOST_NODES * 4 <= pair_loss_triton.SLAB_BYTES
    blocks = [PAIR_TILES_RANKED.wide_settings, *PAIR_TILES_RANKED.settings.values()]
    assert min(s.blocks["BLOCK_N"] for s in blocks if s is not None) * RUN_TILES == pair_loss_triton.RANKED_RUN


def test_blocks_past_the_last_anchor_have_a_number_of_nodes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """130 anchors in slabs of 128: the second slab's second block holds none, and its programs must not read past the plan."""
    monkeypatch.setattr(pair_loss_triton, "MOST_SLAB_ROWS", 128)
    asked: list[int] = []

    def score(self: Any, first: int) -> None:
        asked.append((first + self.slab) // pair_loss_triton.PLAN_ROWS)
        assert len(self.call.nodes_R) == 4 and not self.call.nodes_R[3:].any()

    monkeypatch.setattr(pair_loss_triton._Slab, "score", score)
    pairs = on(rows(np.random.default_rng(7), 130, 140, 5, 1.0, most=0), device)
    x, zero, group = torch.ones(140, 16, device=device), torch.zeros(1, device=device), torch.zeros(130, dtype=torch.int64, device=device)
    pair_loss(x[:130], x, zero, zero, group, pairs, form="ranked", widths=(16,), impl="triton")
    assert asked == [2, 4]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_score(form: PairForm, device: torch.device) -> None:
    for anchors, candidates in ((0, 5), (5, 0), (0, 0), (3, 3)):
        nothing = torch.zeros(0)
        named = NamedPairs(torch.zeros(anchors + 1, dtype=torch.int64), nothing.long(), nothing, nothing)
        group_M, group_N = (torch.zeros(n, dtype=torch.int64) for n in (anchors, candidates))
        pairs = on(PairRows(torch.arange(anchors), group_M, group_N, named, 0.0), device)
        x, y = (torch.ones((n, 16), device=device, requires_grad=True) for n in (anchors, candidates))
        scale, bias = (torch.zeros(1, device=device, requires_grad=True) for _ in range(2))
        loss = pair_loss(x, y, scale, bias, group_M.to(device), pairs, form=form, widths=(16,), impl="triton")
        torch.autograd.backward(loss)
        assert float(loss.detach()) == 0
        assert all(t.grad is not None and not t.grad.any() for t in (x, y, scale, bias))


def test_widths_that_no_tile_divides_are_refused(device: torch.device) -> None:
    pairs = on(rows(np.random.default_rng(0), 2, 3, 0, 1.0, most=0), device)
    x, zero = torch.ones(3, 12, device=device), torch.zeros(1, device=device)
    group = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="width 12 is no multiple of 8"):
        pair_loss(x[:2], x, zero, zero, group, pairs, form="sigmoid", widths=(12,), impl="triton")


def test_a_vector_without_a_direction_scores_zero_and_gets_no_gradient(compare: Compare) -> None:
    rng = np.random.default_rng(8)
    pairs = rows(rng, 9, 12, 0, 1.0)

    def op(y: Tensor, impl: Any) -> Tensor:
        y = torch.cat([torch.zeros_like(y[:2]), y[2:]])
        scale, bias = torch.ones(1, device=y.device), torch.zeros(1, device=y.device)
        group = torch.zeros(9, dtype=torch.int64, device=y.device)
        return pair_loss(y[:9], y, scale, bias, group, on(pairs, y.device), form="sigmoid", widths=(8, 16), impl=impl)

    compare(op, torch.randn((12, 16), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(1, 2), (63, 127)])
def test_row_loss(compare: Compare, size: tuple[int, int], form: PairForm) -> None:
    rng = np.random.default_rng(9)
    pairs = rows(rng, *size, 0, 0.5)
    scores = torch.randn(size, generator=torch.Generator().manual_seed(2)) * 6

    def op(scores: Tensor, impl: Any) -> Tensor:
        return row_loss(scores, on(pairs, scores.device), form=form, impl=impl)

    compare(op, scores)
