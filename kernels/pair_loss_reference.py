"""Pair losses in plain torch: SIGMOID, BALANCED and RANKED over anchors x candidates, any device, float32 or float64.

Anchors go by in slabs of a few megabytes; a slab's scores, losses and gradients are made and folded into `dX [M, D]` and `dY [N, D]`
before the next one, so memory is O(N * D) and nothing is recomputed backwards: one product for the scores and two for the gradients.
RANKED is exact up to `EXACT_EDGES` attracting edges an anchor: P of them cost P passes over a slab, of one logarithm and one division each,
because `softplus(s_n - s_p) = log(1 + e^(s_n - c) e^(c - s_p))` shares one exponential between the edges while the row's scores span less
than 80; wider rows take one for each. Where all repelling weights are equal (ambient pairs), they leave the passes: sums over negatives are
plain sums.

More edges in fp32 on the CPU go by moments of scores in cells (`pair_loss_cells.py`), within fp32's rounding of the exact form.

A vector shorter than `MIN_NORM` has no direction: it scores as the zero vector and gets no gradient.

Shape suffixes: M anchors, N candidates, D width, B anchors of a slab, G temperature groups, E named pairs, K attracting pairs of an anchor.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.kernels.pair_loss_cells import BLOCK_ELEMENTS, ranked_by_cells

PairForm = Literal["sigmoid", "balanced", "ranked"]

MIN_NORM = 1e-12
EXACT_EDGES = 7
"""Attracting edges of an anchor up to which RANKED passes over all candidates for each."""
WIDEST_EXPONENT = 80.0
"""e^80 is a number in float32, and log(1 + e^80) is 80 in either type."""
SLAB_ELEMENTS = 2**19
"""Scores of a slab: 2 MiB in float32, which a core's cache holds while a dozen passes go over it."""


@dataclass(frozen=True, slots=True)
class NamedPairs:
    """Pairs that an edge names, as one set of compressed sparse rows: every pair once, whichever relation won."""

    offsets_M1: Tensor
    """int64: anchor `i` names `ids_E[offsets_M1[i]:offsets_M1[i + 1]]`."""
    ids_E: Tensor
    """int64 candidate indices, ascending within a row, never the anchor itself."""
    attract_E: Tensor
    """float32 attracting weight; 0 where the pair does not attract."""
    repel_E: Tensor
    """float32 repelling weight; 0 where the pair does not repel. A pair with neither is named without being scored."""

    def rows(self, first: int, end: int) -> tuple[Tensor, slice]:
        """The row of every pair of anchors `first` to `end`, counted from `first`, and where those pairs lie."""
        counts = torch.diff(self.offsets_M1[first : end + 1])
        low, high = int(self.offsets_M1[first]), int(self.offsets_M1[end])
        rows = torch.repeat_interleave(torch.arange(end - first, device=counts.device), counts, output_size=high - low)
        return rows, slice(low, high)


@dataclass(frozen=True, slots=True)
class PairRows:
    """What classifies the pairs of an anchors x candidates rectangle, scores aside."""

    self_M: Tensor
    """int64 candidate index of the anchor itself, -1 where it is no candidate."""
    group_M: Tensor
    """int64 groups of the anchors."""
    group_N: Tensor
    """int64 groups of the candidates."""
    named: NamedPairs
    ambient_weight: float
    """Repelling weight of a pair that no edge names and no group spares; 0 leaves it unscored."""
    anchor_M: Tensor | None = None
    """bool: the anchors that take part; None: all. The others score nothing, and no edge names them."""
    candidate_N: Tensor | None = None
    """bool: the candidates that take part; None: all."""

    def slab(self, first: int, end: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], float | None]:
        """What anchors `first` to `end` repel and attract.

        Returns:
            Repelling weights [B, N], 0 for a pair that does not repel; row, candidate and weight of every attracting pair, by row; the weight
            of every pair that repels, None where weights differ.
        """
        group_B1, self_B = self.group_M[first:end, None], self.self_M[first:end]
        repel_BN = torch.full((end - first, len(self.group_N)), self.ambient_weight, dtype=dtype, device=self.group_N.device)
        if self.ambient_weight:
            if bool(group_B1.any()):
                repel_BN.masked_fill_((group_B1 == self.group_N) & (group_B1 != 0), 0.0)
            present = (self_B >= 0).nonzero()[:, 0]
            repel_BN[present, self_B[present]] = 0.0
            if self.candidate_N is not None:
                repel_BN.mul_(self.candidate_N.to(dtype))
            if self.anchor_M is not None:
                repel_BN.mul_(self.anchor_M[first:end, None].to(dtype))
        rows_E, pairs = self.named.rows(first, end)
        ids_E, attract_E = self.named.ids_E[pairs], self.named.attract_E[pairs].to(dtype)
        repel_E = self.named.repel_E[pairs].to(dtype)
        repel_BN[rows_E, ids_E] = repel_E
        keep = (attract_E > 0).nonzero()[:, 0]
        named_E = repel_E[repel_E > 0]
        level = self.ambient_weight or (float(named_E[0]) if len(named_E) else 0.0)
        alike = bool((named_E == level).all())
        return repel_BN, (rows_E[keep], ids_E[keep], attract_E[keep]), level if alike else None


def slab_rows(candidates: int) -> int:
    """Anchors of a slab over that many candidates."""
    return max(16, min(256, SLAB_ELEMENTS // max(1, candidates)))


def row_losses(
    scores_BN: Tensor, repel_BN: Tensor, attract: tuple[Tensor, Tensor, Tensor], level: float | None, form: PairForm
) -> tuple[Tensor, Tensor]:
    """The loss of every row of scores [B], and its gradient by the scores [B, N]; 0 for rows that the form does not count.

    Args:
        scores_BN: scores; where neither weight is positive they must still be finite.
        repel_BN: repelling weights, 0 at attracting pairs. Overwritten.
        attract: row, column and positive weight of each attracting pair, sorted by row.
        level: the weight of every pair that repels; None where weights differ.
    """
    rows_E, columns_E, weights_E = attract
    total_B = scores_BN.new_zeros(len(scores_BN)).index_add_(0, rows_E, weights_E)
    if form == "ranked":
        return _ranked(scores_BN, repel_BN, attract, level, total_B)
    if form == "balanced":
        half_E = 0.5 * weights_E / total_B[rows_E]
        repel_BN.mul_(_reciprocal(repel_BN.sum(1))[:, None]).mul_(0.5)
    else:
        half_E = weights_E
    scores_E = scores_BN[rows_E, columns_E]
    loss_B = _dot(_softplus(scores_BN), repel_BN)
    gradient_BN = torch.sigmoid(scores_BN).mul_(repel_BN)
    loss_B.index_add_(0, rows_E, half_E * _softplus(-scores_E))
    gradient_BN[rows_E, columns_E] = -half_E * torch.sigmoid(-scores_E)
    return loss_B, gradient_BN


def _ranked(
    scores_BN: Tensor, repel_BN: Tensor, attract: tuple[Tensor, Tensor, Tensor], level: float | None, total_B: Tensor
) -> tuple[Tensor, Tensor]:
    rows_E, columns_E, weights_E = attract
    counts_B = torch.bincount(rows_E, minlength=len(scores_BN))
    most = int(counts_B.max()) if len(rows_E) else 0
    # Attracting pairs as columns: pass k takes the k-th of every anchor, with weight 0 where it has fewer.
    rank_E = torch.arange(len(rows_E), device=rows_E.device) - (torch.cumsum(counts_B, 0) - counts_B)[rows_E]
    weights_KB = scores_BN.new_zeros(most, len(scores_BN))
    weights_KB[rank_E, rows_E] = weights_E / total_B[rows_E]
    share_B1 = _reciprocal(repel_BN.sum(1, keepdim=True))

    positive_KB = scores_BN.new_zeros(most, len(scores_BN))
    positive_KB[rank_E, rows_E] = scores_BN[rows_E, columns_E]
    answer = None
    if most > EXACT_EDGES and scores_BN.dtype == torch.float32 and scores_BN.device.type == "cpu":
        answer = ranked_by_cells(scores_BN, repel_BN, level, positive_KB, weights_KB, share_B1)
    loss_B, gradient_BN, pulled_KB = answer or _ranked_exactly(scores_BN, repel_BN, level, positive_KB, weights_KB, share_B1)
    gradient_BN[rows_E, columns_E] = -(weights_KB * pulled_KB)[rank_E, rows_E]
    return loss_B, gradient_BN


def _ranked_exactly(
    scores_BN: Tensor, repel_BN: Tensor, level: float | None, positive_KB: Tensor, weights_KB: Tensor, share_B1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `ranked_by_cells` computes, by a pass over the candidates for each edge; a few rows at a time, which stay in the cache."""
    loss_B, gradient_BN, pulled_KB = scores_BN.new_zeros(len(scores_BN)), torch.zeros_like(scores_BN), torch.zeros_like(positive_KB)
    rows = max(1, 2 * BLOCK_ELEMENTS // max(1, scores_BN.shape[1])) if scores_BN.device.type == "cpu" else max(1, len(scores_BN))
    for first in range(0, len(scores_BN) if len(positive_KB) else 0, rows):
        b = slice(first, first + rows)
        arguments = (scores_BN[b], repel_BN[b], level, positive_KB[:, b], weights_KB[:, b], share_B1[b], gradient_BN[b])
        loss_B[b], pulled_KB[:, b] = _ranked_block(*arguments)
    return loss_B, gradient_BN, pulled_KB


def _ranked_block(
    scores_BN: Tensor, repel_BN: Tensor, level: float | None, positive_KB: Tensor, weights_KB: Tensor, share_B1: Tensor, slope_BN: Tensor
) -> tuple[Tensor, Tensor]:
    low_B1, high_B1 = scores_BN.amin(1, keepdim=True), scores_BN.amax(1, keepdim=True)
    middle_B1 = (low_B1 + high_B1) / 2
    # An absent pair stands in the row's middle: anywhere else, e^(c - s_p) could be infinite, and infinity times weight 0 is no number.
    positive_KB = torch.where(weights_KB > 0, positive_KB, middle_B1.T)
    shared = float((high_B1 - low_B1).max()) <= WIDEST_EXPONENT
    if level is not None:
        # A pair that does not repel stands infinitely far below, so that no sum needs a weight.
        scores_BN = scores_BN.masked_fill(repel_BN == 0, -torch.inf)
    loss_B, pulled_KB = scores_BN.new_zeros(len(scores_BN)), torch.zeros_like(positive_KB)
    term_BN, other_BN, scratch_BN = torch.empty_like(scores_BN), torch.empty_like(scores_BN), torch.empty_like(scores_BN)
    raised_BN = torch.exp(scores_BN - middle_B1) if shared else scores_BN

    def total(x_BN: Tensor) -> Tensor:
        return x_BN.sum(1) if level is not None else torch.mul(x_BN, repel_BN, out=scratch_BN).sum(1)

    for k in range(len(positive_KB)):
        weight_B1, positive_B1 = weights_KB[k][:, None], positive_KB[k][:, None]
        if shared:
            torch.mul(raised_BN, torch.exp(middle_B1 - positive_B1), out=term_BN)
            torch.add(term_BN, 1.0, out=other_BN)
            term_BN.div_(other_BN)
            other_BN.log_()
        else:
            torch.sub(scores_BN, positive_B1, out=other_BN)
            torch.clamp_max(other_BN, WIDEST_EXPONENT, out=term_BN).exp_()
            torch.add(term_BN, 1.0, out=scratch_BN)
            term_BN.div_(scratch_BN)
            torch.maximum(scratch_BN.log_(), other_BN, out=other_BN)
        slope_BN.addcmul_(term_BN, weight_B1)
        pulled_KB[k] = total(term_BN)
        loss_B.addcmul_(total(other_BN), weights_KB[k])
    if level is None:
        slope_BN.mul_(repel_BN)
    else:
        share_B1 = share_B1 * level
    slope_BN.mul_(share_B1)
    return loss_B.mul_(share_B1[:, 0]), pulled_KB.mul_(share_B1.T)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x): above 40 the missing term, below e^-40, is no longer part of either type's mantissa."""
    return torch.nn.functional.softplus(x, threshold=40.0)


def _reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0: an empty set weighs nothing."""
    return torch.where(x > 0, x.clamp_min(torch.finfo(x.dtype).tiny).reciprocal(), torch.zeros_like(x))


def _dot(a_BN: Tensor, b_BN: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vecdot(a_BN, b_BN, dim=1))


def directions(x_MD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Unit vectors of the first `width` values, and one over their lengths (0 for a vector without a direction)."""
    norm_M1 = torch.linalg.vector_norm(x_MD[:, :width], dim=1, keepdim=True)
    inverse_M1 = torch.where(norm_M1 > MIN_NORM, norm_M1.clamp_min(MIN_NORM).reciprocal(), torch.zeros_like(norm_M1))
    return x_MD[:, :width] * inverse_M1, inverse_M1


def _add_through_norm(gradient_MD: Tensor, width: int, unit_MW: Tensor, inverse_M1: Tensor, by_unit_MW: Tensor) -> None:
    """Adds what a gradient by unit vectors is by the vectors themselves."""
    along_M1 = (unit_MW * by_unit_MW).sum(1, keepdim=True)
    gradient_MD[:, :width] += (by_unit_MW - unit_MW * along_M1) * inverse_M1


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        y_ND: Tensor,
        log_scale_G: Tensor,
        bias_G: Tensor,
        temperature_group_M: Tensor,
        pairs: PairRows,
        form: PairForm,
        widths: tuple[int, ...],
    ) -> Tensor:
        inputs = (x_MD, y_ND, log_scale_G, bias_G)
        dtype = torch.float64 if torch.float64 in (x_MD.dtype, y_ND.dtype) else torch.float32
        x_MD, y_ND, log_scale_G, bias_G = (t.detach().to(dtype) for t in inputs)
        scale_M1 = log_scale_G[temperature_group_M].exp()[:, None]
        # RANKED scores differences, which a bias does not change: added, it would only round them.
        bias_M1 = (torch.zeros_like(bias_G) if form == "ranked" else bias_G)[temperature_group_M][:, None]
        loss_M = x_MD.new_zeros(len(x_MD))
        by_x_MD, by_y_ND = torch.zeros_like(x_MD), torch.zeros_like(y_ND)
        by_log_scale_M, by_bias_M = torch.zeros_like(loss_M), torch.zeros_like(loss_M)
        step = slab_rows(len(y_ND))
        for width in widths:
            unit_x_MW, inverse_x_M1 = directions(x_MD, width)
            unit_y_NW, inverse_y_N1 = directions(y_ND, width)
            by_unit_x_MW, by_unit_y_NW = torch.zeros_like(unit_x_MW), torch.zeros_like(unit_y_NW)
            for first in range(0, len(x_MD) if len(y_ND) else 0, step):
                end = min(first + step, len(x_MD))
                slab = slice(first, end)
                scaled_BW = unit_x_MW[slab] * scale_M1[slab]
                scores_BN = torch.addmm(bias_M1[slab], scaled_BW, unit_y_NW.T)
                loss_B, by_score_BN = row_losses(scores_BN, *pairs.slab(first, end, dtype), form)
                loss_M[slab] += loss_B
                if not any(ctx.needs_input_grad):
                    continue
                # What rounding leaves of this sum under RANKED would make Adam walk.
                if form != "ranked":
                    by_bias_M[slab] += by_score_BN.sum(1)
                # <scaled, dL/dscaled> = sum_j g_ij (s_ij - b): the gradient of the log scale needs no pass over the tile.
                by_scaled_BW = by_score_BN @ unit_y_NW
                by_log_scale_M[slab] += (scaled_BW * by_scaled_BW).sum(1)
                by_unit_x_MW[slab] = by_scaled_BW * scale_M1[slab]
                by_unit_y_NW.addmm_(by_score_BN.T, scaled_BW)
            _add_through_norm(by_x_MD, width, unit_x_MW, inverse_x_M1, by_unit_x_MW)
            _add_through_norm(by_y_ND, width, unit_y_NW, inverse_y_N1, by_unit_y_NW)
        share = 1.0 / len(widths)
        by_log_scale_G = torch.zeros_like(log_scale_G).index_add_(0, temperature_group_M, by_log_scale_M)
        by_bias_G = torch.zeros_like(bias_G).index_add_(0, temperature_group_M, by_bias_M)
        gradients = (by_x_MD, by_y_ND, by_log_scale_G, by_bias_G)
        ctx.save_for_backward(*((g * share).to(t.dtype) for g, t in zip(gradients, inputs, strict=True)))
        return (loss_M.double().sum() * share).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (by_loss,) = grad_outputs
        return (*((g * by_loss).to(g.dtype) for g in ctx.saved_tensors), None, None, None, None)


def pair_loss_reference(
    x_MD: Tensor,
    y_ND: Tensor,
    log_scale_G: Tensor,
    bias_G: Tensor,
    temperature_group_M: Tensor,
    pairs: PairRows,
    *,
    form: PairForm,
    widths: tuple[int, ...],
) -> Tensor:
    """The sum of the anchors' losses, averaged over `widths`: a scalar in float32, or float64 where a vector is.

    Args:
        x_MD: vectors of this rank's anchors, not normalised.
        y_ND: vectors of the candidates, not normalised; may hold the same memory as `x_MD`.
        log_scale_G: logarithm of the inverse temperatures.
        bias_G: biases.
        temperature_group_M: int64 temperature group of each anchor.
        pairs: which pairs attract and repel, and how much.
        form: the loss of a row of scores.
        widths: ascending prefixes scored, each normalised on its own.
    """
    if not pairs.ambient_weight and len(pairs.named.ids_E):
        # Only named pairs are scored, and they lie close together: the other candidates cannot take part.
        low, high = int(pairs.named.ids_E.min()), int(pairs.named.ids_E.max()) + 1
        named = NamedPairs(pairs.named.offsets_M1, pairs.named.ids_E - low, pairs.named.attract_E, pairs.named.repel_E)
        y_ND, pairs = y_ND[low:high], PairRows(pairs.self_M - low, pairs.group_M, pairs.group_N[low:high], named, 0.0)
    with torch.autocast(x_MD.device.type, enabled=False):
        return cast(Tensor, _PairLoss.apply(x_MD, y_ND, log_scale_G, bias_G, temperature_group_M, pairs, form, widths))


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_MN: Tensor, pairs: PairRows, form: PairForm) -> Tensor:
        dtype = torch.float64 if scores_MN.dtype == torch.float64 else torch.float32
        gradient_MN = torch.zeros_like(scores_MN, dtype=dtype)
        loss_M = gradient_MN.new_zeros(len(scores_MN))
        step = slab_rows(scores_MN.shape[1])
        for first in range(0, len(scores_MN) if scores_MN.shape[1] else 0, step):
            end = min(first + step, len(scores_MN))
            scores_BN = scores_MN[first:end].detach().to(dtype)
            loss_M[first:end], gradient_MN[first:end] = row_losses(scores_BN, *pairs.slab(first, end, dtype), form)
        ctx.save_for_backward(gradient_MN.to(scores_MN.dtype))
        return loss_M.double().sum().to(dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gradient_MN,) = ctx.saved_tensors
        return (gradient_MN * grad_outputs[0]).to(gradient_MN.dtype), None, None


def row_loss_reference(scores_MN: Tensor, pairs: PairRows, *, form: PairForm) -> Tensor:
    """The sum over anchors of the pair loss of a matrix of scores: a scalar in float32, or float64 where the scores are."""
    return cast(Tensor, _RowLoss.apply(scores_MN, pairs, form))
