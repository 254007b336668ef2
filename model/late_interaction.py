"""The late-interaction term: queries against the documents of their own rank and micro-batch, token by token.

Suffixes: S segments, P positions, D hidden, W token width, T query tokens, K document tokens, Q queries, N documents.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treadle.kernels.maxsim import maxsim
from treadle.kernels.pair_loss import PairRows, row_loss
from treadle.kernels.pair_loss_reference import directions
from treadle.model.config import Contrastive, LateInteraction
from treadle.model.contrastive import Temperatures, ambient_weight
from treadle.model.initial import draw_parameter_
from treadle.model.layout import BatchLayout
from treadle.model.relations import anchors_with_pairs, named_pairs, pair_form
from treadle.shape import LateInteractionSide


class TokenHead(nn.Module):
    """A linear map of final-norm states to unit token vectors; its parameter is `weight [W, D]`."""

    def __init__(self, hidden: int, width: int, seed: int, *, name: str = "token_head") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden))
        draw_parameter_(self.weight, f"{name}.weight", seed, 1.0 / math.sqrt(hidden))

    def forward(self, states_PD: Tensor) -> Tensor:
        """Unit vectors `[P, W]` in fp32 or wider; a state that maps to nothing stays zero and gets no gradient."""
        mapped_PW = linear(states_PD.to(self.weight.dtype), self.weight)
        mapped_PW = mapped_PW if mapped_PW.dtype == torch.float64 else mapped_PW.float()
        return directions(mapped_PW, mapped_PW.shape[1])[0]


@dataclass(frozen=True, slots=True)
class Sides:
    """Queries and documents of a batch, those without a token left out."""

    query_Q: Tensor
    document_N: Tensor
    pairs: PairRows


def _among(chosen_S: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen segments, and every segment's number among them, -1 where it is none."""
    index_S = torch.where(chosen_S, torch.cumsum(chosen_S, 0) - 1, -1)
    return chosen_S.nonzero()[:, 0], index_S


def late_sides(layout: BatchLayout, contrastive: Contrastive) -> Sides:
    """Who is a query and who a document of a batch, and which of them attract and repel."""
    present_S, side_S = layout.tokens_S > 0, layout.side_S
    both_S = side_S == LateInteractionSide.QUERY_AND_DOCUMENT
    query_Q, query_S = _among(present_S & (both_S | (side_S == LateInteractionSide.QUERY)))
    document_N, document_S = _among(present_S & (both_S | (side_S == LateInteractionSide.DOCUMENT)))
    named = named_pairs(layout, query_S, len(query_Q), document_S)
    groups_Q, groups_N = layout.group_S[query_Q], layout.group_S[document_N]
    return Sides(query_Q, document_N, PairRows(document_S[query_Q], groups_Q, groups_N, named, ambient_weight(contrastive)))


def late_tokens(layout: BatchLayout, segments: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the first `most` tokens past the prefix of each segment, and their offsets."""
    counts = layout.tokens_S[segments] if most is None else layout.tokens_S[segments].clamp_max(most)
    offsets = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
    starts = layout.start_S[segments] + 1 - offsets[:-1]
    positions = torch.repeat_interleave(starts, counts)
    return positions + torch.arange(len(positions), device=positions.device), offsets


def late_interaction_count(layout: BatchLayout, config: LateInteraction, contrastive: Contrastive) -> Tensor:
    """int64 scalar: queries with any scored pair, or under RANKED with an attracting and a repelling one. Reads no vector.

    Args:
        config, contrastive: resolved; the second says what repels.
    """
    return anchors_with_pairs(late_sides(layout, contrastive).pairs, pair_form(config.pair_loss)).sum()


def late_interaction_sum(
    states_PD: Tensor, head: TokenHead, layout: BatchLayout, temperatures: Temperatures, config: LateInteraction, contrastive: Contrastive
) -> Tensor:
    """The sum over queries of the pair loss of `t_g maxsim(q, d) + b_g` over the documents of this rank's micro-batch.

    Args:
        states_PD: final-norm states.
        config, contrastive: resolved; the second says what repels.
    """
    sides = late_sides(layout, contrastive)
    query_T, query_offsets_Q1 = late_tokens(layout, sides.query_Q, config.max_query_span)
    document_K, document_offsets_N1 = late_tokens(layout, sides.document_N)
    scores_QN = maxsim(head(states_PD[query_T]), head(states_PD[document_K]), query_offsets_Q1, document_offsets_N1)
    group_Q = layout.temperature_group_S[sides.query_Q]
    scale_Q1 = temperatures.log_scale_G[group_Q].exp()[:, None]
    form = pair_form(config.pair_loss)
    scores_QN = scores_QN * scale_Q1
    # RANKED scores differences, which a bias does not change: added, it would round them, and what that leaves of its gradient make Adam walk.
    if form != "ranked":
        scores_QN = scores_QN + temperatures.bias_G[group_Q][:, None]
    return row_loss(scores_QN, sides.pairs, form=form)
