"""RANKED's moments in cells, which fp32 takes for anchors with many attracting edges, against its exact form in float64."""

import pytest
import torch
from torch import Tensor

from treadle.kernels.pair_loss import NamedPairs, PairRows, pair_loss
from treadle.kernels.pair_loss_cells import RESOLUTIONS, Cells
from treadle.kernels.pair_loss_reference import row_losses


def draw(scale: float, edges: int, *, anchors: int = 24, candidates: int = 3000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores in [-scale, scale], repelling weights of which a third is 0, and for each anchor `edges` columns with their weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = (2 * torch.rand(anchors, candidates, generator=generator) - 1) * scale
    repel = torch.rand(anchors, candidates, generator=generator) * (torch.rand(anchors, candidates, generator=generator) > 1 / 3)
    columns = torch.stack([torch.randperm(candidates, generator=generator)[:edges] for _ in range(anchors)])
    repel.scatter_(1, columns, 0.0)
    return scores, repel, columns, torch.rand(anchors, edges, generator=generator) + 0.1


def losses(
    scores: Tensor, repel: Tensor, columns: Tensor, weights: Tensor, dtype: torch.dtype, level: float | None = None
) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(scores)).repeat_interleave(columns.shape[1])
    attract = (rows, columns.reshape(-1), weights.reshape(-1).to(dtype))
    return row_losses(scores.to(dtype), repel.to(dtype, copy=True), attract, level, "ranked")


@pytest.fixture
def by_cells(monkeypatch: pytest.MonkeyPatch) -> list[Cells]:
    """How each slab that went by cells was cut."""
    cut: list[Cells] = []
    real = Cells.over

    def noted(span: float, candidates: int, edges: int) -> Cells | None:
        cells = real(span, candidates, edges)
        cut.extend([cells] if cells else [])
        return cells

    monkeypatch.setattr(Cells, "over", noted)
    return cut


@pytest.mark.parametrize(
    ("scale", "edges"), [(0.01, 20), (0.9, 20), (3.0, 20), (10.0, 20), (30.0, 20), (0.9, 100), (30.0, 100), (100.0, 100)]
)
@pytest.mark.parametrize("level", [None, 0.75])
def test_as_close_to_the_exact_form_as_fp32_allows(scale: float, edges: int, level: float | None, by_cells: list[Cells]) -> None:
    scores, repel, columns, weights = draw(scale, edges)
    if level is not None:
        repel = (repel > 0) * level
    loss, gradient = losses(scores, repel, columns, weights, torch.float32, level)
    assert len(by_cells) == 1 and by_cells[0].per_unit >= RESOLUTIONS[by_cells[0].moments]
    exact_loss, exact_gradient = losses(scores, repel, columns, weights, torch.float64, level)
    assert len(by_cells) == 1, "float64 stays exact"
    # Sums of 3,000 fp32 terms (a few times 6e-8) and the polynomials' rest (2e-7 of the row's weight, 6e-7 of a value in the tails).
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-6, atol=0)
    for attracts in (False, True):
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, columns, True) == attracts
        exact = exact_gradient[mask]
        torch.testing.assert_close(gradient[mask].double(), exact, rtol=3e-6, atol=float(1e-6 * exact.abs().max()))


def test_well_separated_rows_keep_their_relative_precision(by_cells: list[Cells]) -> None:
    """Every edge 25 above every negative: the loss is near e^-25, and right to fp32's own precision."""
    scores, repel, columns, weights = draw(0.5, 30)
    scores.scatter_(1, columns, 25.0)
    loss, _ = losses(scores, repel, columns, weights, torch.float32)
    exact, _ = losses(scores, repel, columns, weights, torch.float64)
    assert by_cells and float(exact.max()) < 1e-10
    torch.testing.assert_close(loss.double(), exact, rtol=3e-6, atol=0)


def test_scores_that_do_not_repel_lie_anywhere(by_cells: list[Cells]) -> None:
    """They count for nothing, and do not stretch the cells where they lie above them, as an anchor's own score does."""
    scores, repel, columns, weights = draw(1.0, 20)
    apart = repel == 0
    apart.scatter_(1, columns, False)
    expected = losses(scores, repel, columns, weights, torch.float32)
    scores[apart] += 500.0
    found = losses(scores, repel, columns, weights, torch.float32)
    assert len(by_cells) == 2 and by_cells[0] == by_cells[1]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=3e-6, atol=float(1e-6 * other.abs().max()))


@pytest.mark.parametrize("height", [-3000.0, 3000.0])
def test_edges_far_from_all_negatives(height: float, by_cells: list[Cells]) -> None:
    """softplus is 0 below and the distance itself above; fp32 scores near 3,000 are multiples of 2^-12, so differences are exact to that."""
    scores, repel, columns, weights = draw(1.0, 20)
    scores.scatter_(1, columns, height)
    loss, gradient = losses(scores, repel, columns, weights, torch.float32)
    exact_loss, exact_gradient = losses(scores, repel, columns, weights, torch.float64)
    assert not by_cells, "so many cells cost more than they save"
    assert gradient.isfinite().all()
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize(("odd", "value"), [("nothing repels", 0.0), ("a score is no number", torch.nan), ("an infinite score", torch.inf)])
def test_odd_rows(odd: str, value: float, by_cells: list[Cells]) -> None:
    scores, repel, columns, weights = draw(1.0, 20)
    if odd == "nothing repels":
        repel[:] = 0
    else:
        scores[3, 5], repel[3, 5] = value, 1.0
    loss, gradient = losses(scores, repel, columns, weights, torch.float32)
    if odd == "nothing repels":
        assert not loss.any() and not gradient.any()
    else:
        assert not by_cells, "no cells hold it: the exact form says what comes of it"
        assert not torch.isfinite(loss[3]) and torch.isfinite(loss[:3]).all()


def test_rows_of_unlike_numbers_of_edges_and_slabs_that_stay_exact(by_cells: list[Cells]) -> None:
    """One anchor with 40 edges takes its slab along; a row with few or no edges answers as it does alone."""
    scores, repel, columns, weights = draw(5.0, 40)
    rows = torch.cat([torch.zeros(40, dtype=torch.int64), torch.full((3,), 4)])
    attract = (rows, torch.cat([columns[0], columns[4, :3]]), torch.cat([weights[0], weights[4, :3]]))
    loss, gradient = row_losses(scores, repel.clone(), attract, None, "ranked")
    assert len(by_cells) == 1
    wide = (attract[0], attract[1], attract[2].double())
    exact_loss, exact_gradient = row_losses(scores.double(), repel.double(), wide, None, "ranked")
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=3e-6, atol=float(1e-6 * exact_gradient.abs().max()))
    assert not loss[[1, 2, 3, 5]].any()
    few = (rows[-3:] - 4, columns[4, :3], weights[4, :3])
    losses_alone, _ = row_losses(scores[4:5], repel[4:5].clone(), few, None, "ranked")
    assert len(by_cells) == 1, "seven edges or fewer stay exact"
    torch.testing.assert_close(losses_alone[0], loss[4], rtol=3e-6, atol=0)


def test_through_vectors(by_cells: list[Cells]) -> None:
    """The whole term in bags of 33 at inverse temperature 30: vectors' and temperature's gradients."""
    count, bag = 33 * 40, 33
    ids = torch.arange(count).view(-1, 1, bag).expand(-1, bag, -1)[:, ~torch.eye(bag, dtype=torch.bool)].reshape(-1)
    named = NamedPairs(torch.arange(count + 1) * (bag - 1), ids, torch.ones(len(ids)), torch.zeros(len(ids)))
    nobody = torch.zeros(count, dtype=torch.int64)
    pairs = PairRows(torch.arange(count), nobody, nobody, named, 1.0)
    vectors = torch.randn(count, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        leaves = [vectors.to(dtype).requires_grad_(), torch.tensor([30.0], dtype=dtype).log().requires_grad_()]
        bias = torch.zeros(1, dtype=dtype)
        loss = pair_loss(leaves[0], leaves[0], leaves[1], bias, nobody, pairs, form="ranked", widths=(16,))
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert by_cells
    # Scores of up to 30 in fp32 are right to 30 * 2^-24 = 2e-6, and so are the losses' slopes.
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.detach().double(), exact.detach(), rtol=0, atol=float(1e-5 * exact.detach().abs().max()))


@pytest.mark.parametrize("level", [None, 0.75])
@pytest.mark.parametrize("scale", [0.1, 30.0, 45.0, 150.0, 2000.0])
def test_few_edges_pass_over_rows_of_any_width(scale: float, level: float | None, by_cells: list[Cells]) -> None:
    """Rows that span more than 80 share no exponential; against the definition in float64."""
    scores, repel, columns, weights = draw(scale, 5, anchors=8, candidates=300)
    if level is not None:
        repel = (repel > 0) * level
    loss, gradient = losses(scores, repel, columns, weights, torch.float32, level)
    assert not by_cells
    wide = scores.double().requires_grad_()
    share = weights.double() / weights.double().sum(1, keepdim=True)
    difference = wide[:, None, :] - wide.gather(1, columns)[:, :, None]
    terms = torch.logaddexp(difference, torch.zeros_like(difference)) * share[:, :, None] * repel.double()[:, None, :]
    exact = terms.sum((1, 2)) / repel.double().sum(1)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), wide)
    exact = exact.detach()
    # e^(s - c) e^(c - p) is right to the rounding of its exponents: 2^-24 of the distance c - p, in the sums' largest terms.
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=float(2e-6 * exact_gradient.abs().max()))
