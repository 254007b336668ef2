"""What stands at each position before the first block: prefixes, bytes, patches, tubes, chunks, and what hides them.

Suffixes: P positions, S segments, D hidden, N positions of one kind, V values of a payload.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from treadle.kernels.byte_embed import byte_embed
from treadle.kernels.chunk_embed import chunk_embed
from treadle.kernels.patch_embed import patch_embed
from treadle.kernels.tape_reference import Chunks, Patches, locate_chunks, locate_patches
from treadle.model.corruption import MASK_BYTE, Corruption
from treadle.model.initial import draw_parameter_
from treadle.model.layout import MASK, BatchLayout
from treadle.shape import BatchShape, Modality

VECTOR_DEVIATION = 0.5
"""Starting deviation of bytes, prefixes and mask vectors: about what a map of pixels in [-1, 1] gives."""


def payload_values(shape: BatchShape, modality: Modality) -> int:
    """Values of one whole patch, tube or chunk."""
    return {
        Modality.IMAGE: shape.image.token_bytes,
        Modality.VIDEO: shape.video.token_bytes,
        Modality.AUDIO: shape.audio.chunk_samples,
    }[modality]


def payload_places(layout: BatchLayout, modality: Modality, position_N: Tensor) -> Patches | Chunks:
    """Where the payloads of positions of one modality lie on the tape."""
    segment_N, token_N = layout.token_of(position_N)
    offset_N = layout.tape_offsets_S1.index_select(0, segment_N)
    extent_N3 = layout.extent_S3.index_select(0, segment_N)
    if modality is Modality.AUDIO:
        return locate_chunks(offset_N, extent_N3, token_N, layout.shape.audio.chunk_samples)
    grid_N3 = layout.grid_S3.index_select(0, segment_N)
    if modality is Modality.IMAGE:
        return locate_patches(offset_N, extent_N3, grid_N3, token_N, 1, layout.shape.image.patch_side, layout.shape.image.channels)
    video = layout.shape.video
    return locate_patches(offset_N, extent_N3, grid_N3, token_N, video.tube_frames, video.patch_side, video.channels)


class Embedding(nn.Module):
    """The first layer: one table of bytes, one linear map per live modality, one learned vector to hide behind for each.

    Parameters: `prefix [4, D]`, `byte [257, D]` (row 256 is MASK), and for each live modality `<name> [D, V]` and `<name>_mask [D]`.
    """

    def __init__(self, hidden: int, shape: BatchShape, seed: int, name: str) -> None:
        super().__init__()
        self._media = tuple(m for m in Modality if m is not Modality.TEXT and shape.is_live(m))
        self.prefix = nn.Parameter(torch.empty(len(Modality), hidden))
        self.byte = nn.Parameter(torch.empty(MASK_BYTE + 1, hidden))
        draw_parameter_(self.prefix, f"{name}.prefix", seed, VECTOR_DEVIATION)
        draw_parameter_(self.byte, f"{name}.byte", seed, VECTOR_DEVIATION)
        for modality in self._media:
            values = payload_values(shape, modality)
            weight, mask = nn.Parameter(torch.empty(hidden, values)), nn.Parameter(torch.empty(hidden))
            draw_parameter_(weight, f"{name}.{modality}", seed, 1 / math.sqrt(values))
            draw_parameter_(mask, f"{name}.{modality}_mask", seed, VECTOR_DEVIATION)
            self.register_parameter(str(modality), weight)
            self.register_parameter(f"{modality}_mask", mask)

    def forward(self, layout: BatchLayout, corruption: Corruption | None, order_P: Tensor | None) -> Tensor:
        """The input of the first block, `[P, D]` in fp32 or wider, positions in `order_P` where one is given."""
        prefixes = self.prefix.index_select(0, layout.modality_S.index_select(0, layout.segment_P.index_select(0, layout.positions[0])))
        text, mask = layout.positions[Modality.TEXT + 1], layout.positions[MASK]
        position_N = torch.cat([text, mask])
        rows, positions = [prefixes, byte_embed(self.byte, self.shown(layout, corruption, text, mask))], [layout.positions[0], position_N]
        for modality in self._media:
            shown_N, hidden_N = self.split(layout, corruption, modality)
            rows += [self._embed(layout, modality, shown_N), self._hide(modality, hidden_N)]
            positions += [shown_N, hidden_N]
        place_P = torch.cat(positions)
        source_P = torch.empty_like(place_P)
        source_P[place_P] = torch.arange(layout.num_positions, device=layout.device)
        if order_P is not None:
            source_P = source_P.index_select(0, order_P)
        wide = self.byte.dtype
        return permute_rows(torch.cat([row.to(wide) for row in rows]), source_P)

    @staticmethod
    def shown(layout: BatchLayout, corruption: Corruption | None, text_N: Tensor, mask_N: Tensor) -> Tensor:
        """The byte that each text position shows, then MASK for each mask position."""
        segment_N, byte_N = layout.token_of(text_N)
        shown = torch.full((layout.num_positions,), MASK_BYTE, dtype=torch.int64, device=layout.device)
        shown[text_N] = layout.tape.index_select(0, layout.tape_offsets_S1.index_select(0, segment_N) + byte_N).long()
        if corruption is not None:
            shown[corruption.covered_T] = corruption.shown_T
        return shown.index_select(0, torch.cat([text_N, mask_N]))

    @staticmethod
    def split(layout: BatchLayout, corruption: Corruption | None, modality: Modality) -> tuple[Tensor, Tensor]:
        """The modality's positions that show their payload, and those that show the learned vector."""
        position_N = layout.positions[modality + 1]
        if corruption is None:
            return position_N, position_N[:0]
        hidden_N = corruption.hidden(modality)
        shown = torch.ones(layout.num_positions, dtype=torch.bool, device=layout.device)
        shown[hidden_N] = False
        return position_N[shown.index_select(0, position_N)], hidden_N

    def _embed(self, layout: BatchLayout, modality: Modality, position_N: Tensor) -> Tensor:
        places = payload_places(layout, modality, position_N)
        weight = self.get_parameter(str(modality))
        return patch_embed(layout.tape, places, weight) if isinstance(places, Patches) else chunk_embed(layout.tape, places, weight)

    def _hide(self, modality: Modality, position_N: Tensor) -> Tensor:
        return self.get_parameter(f"{modality}_mask").expand(position_N.numel(), -1)


def permute_rows(x_PD: Tensor, source_P: Tensor) -> Tensor:
    """`x[source]` for a permutation `source`, whose gradient is a permutation too and adds nothing up."""
    permuted: Tensor = _PermuteRows.apply(x_PD, source_P)
    return permuted


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, source_P: Tensor) -> Tensor:
        ctx.save_for_backward(source_P)
        return x_PD.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (dy_PD,) = gradients
        (source_P,) = ctx.saved_tensors
        return torch.empty_like(dy_PD).index_copy_(0, source_P, dy_PD), None
