"""Which pairs a step's edges name, settled once in integers: ignore before attract before repel, each pair once.

Suffixes: S segments, E named pairs, M anchors, N candidates.
"""

import torch
from torch import Tensor

from treadle.kernels.pair_loss import NamedPairs, PairForm, PairRows
from treadle.model.layout import BatchLayout
from treadle.shape import PairLossForm

_FORMS: dict[PairLossForm, PairForm] = {
    PairLossForm.SIGMOID: "sigmoid",
    PairLossForm.BALANCED: "balanced",
    PairLossForm.RANKED: "ranked",
}


def pair_form(form: PairLossForm) -> PairForm:
    """The op's name of a resolved form.

    Raises:
        ValueError: `form` is DERIVED, which a resolved configuration never holds.
    """
    if form not in _FORMS:
        raise ValueError(f"pair_loss is {form}: resolve the configuration first")
    return _FORMS[form]


def compress_rows(rows_E: Tensor, count: int) -> Tensor:
    """Offsets `[count + 1]` of entries sorted by row."""
    return torch.searchsorted(rows_E, torch.arange(count + 1, device=rows_E.device))


def edge_rows(offsets_S1: Tensor) -> Tensor:
    """The row of every entry."""
    counts_S = torch.diff(offsets_S1)
    return torch.repeat_interleave(torch.arange(len(counts_S), device=counts_S.device), counts_S)


def named_pairs(layout: BatchLayout, anchor_S: Tensor, anchors: int, candidate_S: Tensor) -> NamedPairs:
    """The pairs that the layout's edges name, between anchors and candidates.

    Args:
        anchor_S: int64 anchor index of each segment, ascending, -1 for a segment that is none.
        anchors: how many there are.
        candidate_S: int64 candidate index of each segment, ascending, -1 for a segment that is none.
    """
    count = layout.num_segments
    rows, columns, attracts, repels = [], [], [], []
    for kind, (offsets_S1, ids, weights) in enumerate((layout.ignore, layout.attract, layout.repel)):
        if not len(offsets_S1):
            continue
        rows_E = edge_rows(offsets_S1)
        rows.append(rows_E)
        columns.append(ids[: len(rows_E)])
        weights = weights[: len(rows_E)] if len(weights) else torch.ones(len(rows_E), device=ids.device)
        attracts.append(weights if kind == 1 else torch.zeros_like(weights))
        repels.append(weights if kind == 2 else torch.zeros_like(weights))
    if not rows:
        nothing = torch.zeros(0, dtype=torch.int64, device=layout.device)
        return NamedPairs(torch.zeros(anchors + 1, dtype=torch.int64, device=layout.device), nothing, nothing.float(), nothing.float())
    # Stable, so that of the edges that name one pair the first set, in the order of precedence, comes first.
    key_E, order_E = torch.sort(torch.cat(rows) * max(1, count) + torch.cat(columns), stable=True)
    fresh_E = torch.ones_like(key_E, dtype=torch.bool)
    fresh_E[1:] = key_E[1:] != key_E[:-1]
    row_E = torch.div(key_E, max(1, count), rounding_mode="floor")
    column_E = key_E - row_E * max(1, count)
    keep_E = (fresh_E & (row_E != column_E) & (anchor_S[row_E] >= 0) & (candidate_S[column_E] >= 0)).nonzero()[:, 0]
    row_E, column_E, order_E = anchor_S[row_E[keep_E]], candidate_S[column_E[keep_E]], order_E[keep_E]
    return NamedPairs(compress_rows(row_E, anchors), column_E, torch.cat(attracts)[order_E].float(), torch.cat(repels)[order_E].float())


def anchors_with_pairs(pairs: PairRows, form: PairForm) -> Tensor:
    """bool [M]: which anchors the form counts, those with any scored pair, or with both kinds under RANKED. Integers and weights alone."""
    named = pairs.named
    count = len(pairs.self_M)
    row_E = edge_rows(named.offsets_M1)

    def tally(mask_E: Tensor) -> Tensor:
        return torch.bincount(row_E[mask_E], minlength=count)

    attracts_M = tally(named.attract_E > 0) > 0
    repels_M = tally(named.repel_E > 0) > 0
    if pairs.ambient_weight:
        # Candidates less the anchor's own group (itself in it), less the named ones that the group did not already take.
        grouped_M = pairs.group_M != 0
        sorted_N = torch.sort(pairs.group_N).values
        first_M = torch.searchsorted(sorted_N, pairs.group_M)
        same_M = torch.searchsorted(sorted_N, pairs.group_M, right=True) - first_M
        spared_M = torch.where(grouped_M, same_M, (pairs.self_M >= 0).to(torch.int64))
        apart_E = (pairs.group_M[row_E] != pairs.group_N[named.ids_E]) | ~grouped_M[row_E]
        repels_M |= len(pairs.group_N) - spared_M - tally(apart_E) > 0
    return attracts_M & repels_M if form == "ranked" else attracts_M | repels_M
