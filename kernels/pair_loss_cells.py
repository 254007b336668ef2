"""RANKED for anchors with many attracting edges: moments of scores in cells, in fp32 on the CPU.

`sum_p sum_n u_p v_n softplus(s_n - s_p)` pairs two sets of points on a line. A row's scores are cut into cells; all that the negatives of a cell
are to any edge is the moments `sum v a^j` of their places a in it, and all that the edges of a cell are to any negative is `sum u b^l`. Between
two cells stands a matrix that depends on their distance alone, so that one serves all rows: softplus (for the loss) or sigmoid (for its slopes) of
`(cell - cell' + a - b) / cells_per_unit`, as the polynomial in a and b that meets it at Chebyshev's nodes. The cost is a scatter and a gather per
score and moment, and three products of (cells x moments)^2 a row: it does not grow with the number of edges.

With M moments in cells of width h the rest is `|s| (h / 2)^M / (M! 2^(M - 1))` at most, s the M-th derivative of sigmoid: below 2e-7 of the row's
weight, and below 6e-7 of a value in the tails, where sigmoid is an exponential. Fewer moments take more cells: a row's cost decides.

Shape suffixes: B rows, N candidates, K edges of a row, C cells, J and L moments of negatives and of edges, X rows x cells or rows x candidates.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

RESOLUTIONS = {2: 400.0, 3: 24.0, 4: 5.0, 5: 2.0, 6: 1.1, 8: 0.6}
"""Moments, and the fewest cells per unit of score with which they reach fp32's precision."""
FEWEST_CELLS = 48
"""A score's addition to a cell waits for the one before to the same cell: fewer cells take twice the time, and round more."""
MATRIX_ELEMENTS = 2**22
BLOCK_ELEMENTS = 2**16
"""Scores that a dozen passes go over while they lie in a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class Cells:
    """How finely the rows of a slab are cut."""

    per_unit: float
    moments: int
    count: int
    """Cells of a row, from its lowest score up."""

    @staticmethod
    def over(span: float, candidates: int, edges: int) -> "Cells | None":
        """Cells for rows whose scores span that much; None where passes over the candidates for each edge cost less."""
        if not 0 <= span < 2**14:
            return None

        def cost_ns(cells: "Cells") -> float:
            """Of a row, on one core: its scatters and gathers, and its products."""
            return (3 + 3 * cells.moments) * candidates + 0.12 * cells.order**2

        span = 2 ** (math.ceil(8 * math.log2(max(span, 1e-6))) / 8)  # few sizes, so that `between` is seldom computed
        finest = FEWEST_CELLS / span
        sizes = [(max(least, finest), moments) for moments, least in RESOLUTIONS.items()]
        best = min((Cells(per_unit, moments, int(span * per_unit) + 1) for per_unit, moments in sizes), key=cost_ns)
        return best if best.order**2 <= MATRIX_ELEMENTS and cost_ns(best) < 3 * edges * candidates else None

    @property
    def order(self) -> int:
        """Numbers that a row becomes."""
        return self.count * self.moments

    @lru_cache(maxsize=32)  # noqa: B019  # cells are a few numbers, and hash as such
    def between(self) -> tuple[Tensor, Tensor]:
        """Softplus and sigmoid between cells, float32 `[J, L, 2 C - 1]`: entry `C - 1 + d` is that of a cell d cells above the other."""
        nodes_J = (1 + torch.cos((torch.arange(self.moments, dtype=torch.float64) + 0.5) * (torch.pi / self.moments))) / 2
        powers_JJ = torch.linalg.inv(torch.linalg.vander(nodes_J))
        distance_D = torch.arange(1 - self.count, self.count, dtype=torch.float64)
        x_DJL = (distance_D[:, None, None] + (nodes_J[:, None] - nodes_J)) / self.per_unit
        softplus, sigmoid = (
            (powers_JJ @ values_DJL @ powers_JJ.T).permute(1, 2, 0).float().contiguous()
            for values_DJL in (torch.nn.functional.softplus(x_DJL, threshold=60.0), torch.sigmoid(x_DJL))
        )
        return softplus, sigmoid

    def matrix(self, between_JLD: Tensor) -> Tensor:
        """`[J * C, L * C]`; the edges' cells are counted from the highest down, so that strides are positive."""
        width = 2 * self.count - 1
        shape, strides = (self.moments, self.count) * 2, (self.moments * width, 1, width, 1)
        return between_JLD.as_strided(shape, strides).reshape(self.order, self.order)

    def by_row(self, sums_JX: Tensor) -> Tensor:
        return sums_JX.view(self.moments, -1, self.count).transpose(0, 1).reshape(-1, self.order)

    def by_moment(self, sums_BY: Tensor) -> Tensor:
        return sums_BY.view(-1, self.moments, self.count).transpose(0, 1).reshape(self.moments, -1)


def ranked_by_cells(
    scores_BN: Tensor, repel_BN: Tensor, level: float | None, positive_KB: Tensor, weights_KB: Tensor, share_B1: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """RANKED's sums over rows.

    Args:
        scores_BN: scores.
        repel_BN: repelling weights. Where cells are taken, the gradient by the scores that repel takes their place.
        level: the weight of every pair that repels; None where weights differ.
        positive_KB: scores of attracting pairs.
        weights_KB: their weights, 0 where a row has fewer.
        share_B1: a factor of each row.

    Returns:
        The loss [B], its gradient by repelling scores [B, N], and `sum_n v sigmoid(s_n - s_p)` of each attracting pair [K, B]. None where scores
        are not finite, or the exact form costs less.
    """
    rows, candidates = scores_BN.shape
    step = max(1, BLOCK_ELEMENTS // candidates)
    blocks = [slice(first, first + step) for first in range(0, rows, step)]
    scratch_BN = scores_BN.new_empty(min(step, rows), candidates)
    low_B1, place_BN = scores_BN.amin(1, keepdim=True), torch.empty_like(scores_BN)
    highest = list[float]()
    for b in blocks:
        torch.sub(scores_BN[b], low_B1[b], out=place_BN[b])
        # Places are positive, so that a product with the weights hides those that do not repel from the maximum.
        weighted_BN = torch.mul(place_BN[b], repel_BN[b] if level else repel_BN[b] > 0, out=scratch_BN[: len(place_BN[b])])
        highest.append(float(weighted_BN.max()))
    positive_KB = torch.where(weights_KB > 0, positive_KB - low_B1.T, 0.0)
    span = max(max(highest) / (level or 1.0), float(positive_KB.max()))
    cells = Cells.over(span, candidates, len(positive_KB)) if all(map(math.isfinite, highest)) else None
    if cells is None:
        return None
    first_B1 = torch.arange(0, rows * cells.count, cells.count)[:, None]
    top = cells.count * (1 - 2**-23)
    flat_BN = torch.empty_like(place_BN, dtype=torch.int64)
    sums_JX, edges_JX = (place_BN.new_zeros(cells.moments, rows * cells.count) for _ in range(2))
    for b in blocks:
        # Scores that do not repel and lie above all cells go to the last, where they have no weight.
        offset_BN = place_BN[b].mul_(cells.per_unit).clamp_max_(top)
        flat_X = flat_BN[b].copy_(offset_BN).add_(first_B1[b]).view(-1)
        offset_BN.frac_()
        power_BN = repel_BN[b]
        for j, sums_X in enumerate(sums_JX):
            if j:
                power_BN = torch.mul(power_BN, offset_BN, out=scratch_BN[: len(offset_BN)])
            sums_X.scatter_add_(0, flat_X, power_BN.view(-1))

    offset_KB = positive_KB.mul_(cells.per_unit).clamp_max_(top)
    flat_KB = first_B1.T + (cells.count - 1) - offset_KB.long()
    offset_KB.frac_()
    power_KB = weights_KB * share_B1.T
    for edges_X in edges_JX:
        edges_X.scatter_add_(0, flat_KB.view(-1), power_KB.view(-1))
        power_KB.mul_(offset_KB)

    softplus_JLD, sigmoid_JLD = cells.between()
    negatives_BY, edges_BY = cells.by_row(sums_JX), cells.by_row(edges_JX)
    loss_B = ((negatives_BY @ cells.matrix(softplus_JLD)) * edges_BY).sum(1)
    matrix_YY = cells.matrix(sigmoid_JLD)
    pulls_JX, slopes_JX = cells.by_moment((negatives_BY @ matrix_YY).mul_(share_B1)), cells.by_moment(edges_BY @ matrix_YY.T)
    pulled_KB = _polynomial(pulls_JX, flat_KB, offset_KB, torch.empty_like(offset_KB))
    for b in blocks:
        repel_BN[b].mul_(_polynomial(slopes_JX, flat_BN[b], place_BN[b], scratch_BN[: len(place_BN[b])]))
    return loss_B, repel_BN, pulled_KB


def _polynomial(coefficients_JX: Tensor, index: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
    """The polynomial that each index chooses, at x, by Horner's rule; all are contiguous and of one shape."""
    index_X, x_X, next_X = index.view(-1), x.view(-1), scratch.view(-1)
    value_X = coefficients_JX[-1].index_select(0, index_X)
    for coefficients_X in reversed(coefficients_JX[:-1].unbind()):
        torch.index_select(coefficients_X, 0, index_X, out=next_X)
        torch.addcmul(next_X, value_X, x_X, out=value_X)
    return value_X.view_as(x)
