"""Denominators of every term, counted on the device at fixed sizes, before any forward pass.

Suffixes: K terms, M anchors, N candidates, E named pairs.
"""

import torch
from torch import Tensor

from treadle.kernels.pair_loss import PairForm, PairRows
from treadle.model.device_batch import DeviceBatch
from treadle.model.device_corruption import Hidden
from treadle.model.objectives import CHOICES, LATE_INTERACTION
from treadle.model.relations import pair_form


def term_counts(batch: DeviceBatch, hidden: Hidden) -> Tensor:
    """float64 `[K]`: this rank's denominators, those of `Objectives.counts`."""
    plan = batch.plan
    nothing = torch.zeros((), dtype=torch.int64, device=batch.buffer.device)
    pairs = late = choices = nothing
    if plan.scores_pairs:
        pairs = anchors_counted(batch.pairs("pair"), pair_form(plan.contrastive.pair_loss)).sum()
    if plan.weights_K[LATE_INTERACTION]:
        late = anchors_counted(batch.pairs("late"), pair_form(plan.late.pair_loss)).sum()
    if plan.weights_K[CHOICES]:
        choices = (batch["choice_position"] < plan.positions).sum()
    return torch.stack([*hidden.counts, pairs, late, choices]).double()


def anchors_counted(pairs: PairRows, form: PairForm) -> Tensor:
    """bool `[M]`: `relations.anchors_with_pairs` of padded pairs, whose groups are 0 where nothing is."""
    named, live_M, live_N = pairs.named, pairs.anchor_M, pairs.candidate_N
    assert live_M is not None and live_N is not None, "padded pairs say which of them take part"
    ends_M = named.offsets_M1[1:]

    def tally(mask_E: Tensor) -> Tensor:
        before = torch.cat([mask_E.new_zeros(1, dtype=torch.int64), mask_E.cumsum(0)])
        return before.index_select(0, ends_M) - before.index_select(0, named.offsets_M1[:-1])

    attracts_M = tally(named.attract_E > 0) > 0
    repels_M = tally(named.repel_E > 0) > 0
    if pairs.ambient_weight:
        # Candidates less the anchor's own group (itself in it), less the named ones that the group did not already take.
        grouped_M = pairs.group_M != 0
        sorted_N = torch.sort(pairs.group_N).values
        same_M = torch.searchsorted(sorted_N, pairs.group_M, right=True) - torch.searchsorted(sorted_N, pairs.group_M)
        spared_M = torch.where(grouped_M, same_M, (pairs.self_M >= 0).to(torch.int64))
        # Entries past the last offset get the last row, and no tally holds them.
        places_E = torch.arange(len(named.ids_E), device=ends_M.device)
        row_E = torch.searchsorted(ends_M, places_E, right=True).clamp(max=len(ends_M) - 1)
        apart_E = (pairs.group_M.index_select(0, row_E) != pairs.group_N.index_select(0, named.ids_E)) | ~grouped_M.index_select(0, row_E)
        repels_M = repels_M | (live_N.sum() - spared_M - tally(apart_E) > 0)
    return live_M & (attracts_M & repels_M if form == "ranked" else attracts_M | repels_M)
