"""The masked terms: what the tower makes of hidden bytes, patches, tubes and chunks.

Suffixes: P positions, D hidden, T covered text positions, N masked positions, V values of a payload.
"""

import torch
from torch import Tensor

from treadle.kernels.byte_cross_entropy import byte_cross_entropy
from treadle.kernels.payload_error import payload_error
from treadle.model.corruption import Corruption
from treadle.model.embedding import payload_places
from treadle.model.heads import Heads
from treadle.model.layout import BatchLayout
from treadle.shape import Modality


def masked_counts(layout: BatchLayout, corruption: Corruption) -> Tensor:
    """int64 `[4]`, by modality: covered text positions, masked image, video and audio positions."""
    return torch.tensor([corruption.hidden(m).numel() for m in Modality], dtype=torch.int64, device=layout.device)


def masked_sums(heads: Heads, states_PD: Tensor, layout: BatchLayout, corruption: Corruption) -> Tensor:
    """`[4]` in fp32 or wider, by modality: summed cross-entropy of covered bytes, summed mean squared error of masked payloads.

    0 for a modality without a head. What a term has nothing to score of, its head still takes part in, with a zero gradient.
    """
    sums = [torch.zeros((), dtype=torch.promote_types(states_PD.dtype, torch.float32), device=states_PD.device)] * len(Modality)
    if heads.of(Modality.TEXT) is not None:
        # Logits in full precision: 256 columns at a seventh of the positions cost next to nothing.
        with torch.autocast(states_PD.device.type, enabled=False):
            logits_TV = heads.text(states_PD.index_select(0, corruption.covered_T))
        sums[Modality.TEXT] = byte_cross_entropy(logits_TV, corruption.target_T)
    for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
        head, position_N = heads.of(modality), corruption.hidden(modality)
        if head is not None:
            prediction_NV = head(states_PD.index_select(0, position_N))
            sums[modality] = payload_error(prediction_NV, layout.tape, payload_places(layout, modality, position_N))
    return torch.stack(sums)
