"""The choices term: at an item's mask position, the text head's distribution over the item's legal bytes against its targets.

Suffixes: P positions, D hidden, C items that make a choice, L legal bytes in all.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from treadle.model.layout import BatchLayout
from treadle.model.relations import edge_rows


def choices_count(layout: BatchLayout) -> Tensor:
    """int64 scalar: items that make a choice."""
    return (torch.diff(layout.choice_offsets_S1) > 0).sum()


def choice_log_probabilities(states_PD: Tensor, text_head: Callable[[Tensor], Tensor], layout: BatchLayout) -> Tensor:
    """Logarithm of the probability of every legal byte `[L]`, in the order of `layout.choice_bytes`; each item's sum to one."""
    counts_S = torch.diff(layout.choice_offsets_S1)
    chooser_C = (counts_S > 0).nonzero()[:, 0]
    mask_C = layout.start_S[chooser_C] + layout.length_S[chooser_C] - 1
    logits_CV = text_head(states_PD[mask_C])
    item_L = edge_rows(torch.cat([counts_S.new_zeros(1), torch.cumsum(counts_S[chooser_C], 0)]))
    logits_L = logits_CV[item_L, layout.choice_bytes[: len(item_L)]]
    logits_L = logits_L if logits_L.dtype == torch.float64 else logits_L.float()
    most_C = logits_L.new_full((len(chooser_C),), -torch.inf).scatter_reduce(0, item_L, logits_L.detach(), "amax")
    shifted_L = logits_L - most_C[item_L]
    total_C = logits_L.new_zeros(len(chooser_C)).index_add(0, item_L, shifted_L.exp())
    return shifted_L - total_C.log()[item_L]


def choices_sum(states_PD: Tensor, text_head: Callable[[Tensor], Tensor], layout: BatchLayout) -> Tensor:
    """The sum over items that make a choice of the cross-entropy of their targets, in fp32 or wider.

    Args:
        states_PD: final-norm states.
        text_head: maps states to logits over the 256 bytes.
    """
    log_probability_L = choice_log_probabilities(states_PD, text_head, layout)
    return -(layout.choice_targets[: len(log_probability_L)] * log_probability_L).sum()
