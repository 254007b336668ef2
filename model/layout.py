"""A packed batch as the ops read it: integer tensors on the device, the used positions without gaps.

Suffixes: P used positions in (row, column) order, S segments in batch order, E edges of a set, N positions of one kind.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.items import Edges
from treadle.shape import BatchShape, Modality

PREFIX: Final = 0
"""Kind of a segment's first position; a token's kind is its modality plus one."""
MASK: Final = 5
"""Kind of the position where an item makes its choice."""

RANK_SHIFT = 40
MICRO_BATCH_SHIFT = 32
"""A defaulted id is the item's index plus `rank << 40 | micro_batch << 32`."""


class LayoutEdges(NamedTuple):
    """One edge set over the segments: segment `i` links to `ids[offsets[i]:offsets[i + 1]]`, ascending."""

    offsets_S1: Tensor
    """int64 `[S + 1]`"""
    ids: Tensor
    """int64 `[E]`"""
    weights: Tensor
    """float32 `[E]`"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchLayout:
    """What the tower, the corruption and the losses read of one batch, on the device."""

    shape: BatchShape
    """Resolved."""
    num_segments: int
    num_positions: int
    num_items: int
    """Items of the step, dropped ones too."""

    segment_P: Tensor
    """int64: segment of each position."""
    coord_P3: Tensor
    """int32: (t, h, w) of each position. A token's place in its grid; 0 for a prefix; for a mask position t is the number of tokens."""
    positions: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    """int64: the positions of each kind, ascending: prefix, text, image, video, audio, mask."""

    modality_S: Tensor
    """int64"""
    start_S: Tensor
    """int64: position of the prefix."""
    length_S: Tensor
    """int64: positions, prefix and mask included."""
    tokens_S: Tensor
    """int64: positions past the prefix and before the mask."""
    grid_S3: Tensor
    """int32: tokens (t, h, w)."""
    extent_S3: Tensor
    """int32: payload size (frames, height, width); text and audio (1, 1, n)."""
    id_S: Tensor
    """int64: the bits of the global uint64 id, which keys every draw."""
    group_S: Tensor
    """int64; 0: none."""
    temperature_group_S: Tensor
    """int64"""
    side_S: Tensor
    """int64: `LateInteractionSide`."""
    item_S: Tensor
    """int64: index among the step's items."""

    choice_offsets_S1: Tensor
    """int64 `[S + 1]`: each segment's run in the two below; empty for a segment that makes no choice."""
    choice_bytes: Tensor
    """int64: legal bytes."""
    choice_targets: Tensor
    """float32: probability of each."""

    attract: LayoutEdges
    repel: LayoutEdges
    ignore: LayoutEdges

    tape: Tensor
    """uint8: the used part of the batch's tape; on the CPU it shares the batch's memory."""
    tape_offsets_S1: Tensor
    """int64 `[S + 1]`: byte where each payload begins."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.id_S.device

    def token_of(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """The segment of each position, and the number of its token there (0 just after the prefix)."""
        segment_N = self.segment_P.index_select(0, position_N)
        return segment_N, position_N - self.start_S.index_select(0, segment_N) - 1

    @classmethod
    def from_batch(cls, batch: PackedBatch, device: torch.device | str, *, rank: int = 0, micro_batch: int = 0) -> "BatchLayout":
        """The layout of a packed batch.

        Args:
            rank, micro_batch: told apart in the ids of items that came without any, so that each draws for itself.
        """
        used = batch.segments
        row, column = batch.row[:used], batch.start[:used]
        length = batch.length[:used].astype(np.int64)
        grid = batch.grid[:used]
        modality = batch.modality[:used].astype(np.int64)
        choice_offsets = batch.choices.offsets[: used + 1]
        tokens = grid.astype(np.int64).prod(1)

        by_place = np.lexsort((column, row))
        ends = np.cumsum(length[by_place])
        start = np.empty(used, np.int64)
        start[by_place] = ends - length[by_place]
        num_positions = int(ends[-1]) if used else 0

        segment = np.repeat(by_place, length[by_place])
        token = np.arange(num_positions, dtype=np.int64) - start[segment] - 1
        coord, kind = _coordinates(token, segment, grid, tokens, modality)

        ids = batch.id[:used].view(np.int64)
        if batch.ids_defaulted:
            ids = ids + np.int64(rank << RANK_SHIFT | micro_batch << MICRO_BATCH_SHIFT)

        def put(array: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

        def put_edges(edges: Edges) -> LayoutEdges:
            weights = put(edges.weights_or_ones(), torch.float32)
            return LayoutEdges(put(edges.offsets[: used + 1]), put(edges.ids.astype(np.int64)), weights)

        by_kind = [put(np.flatnonzero(kind == k)) for k in range(MASK + 1)]
        return cls(
            shape=batch.shape.resolved(),
            num_segments=used,
            num_positions=num_positions,
            num_items=batch.items,
            segment_P=put(segment),
            coord_P3=put(coord, torch.int32),
            positions=(by_kind[0], by_kind[1], by_kind[2], by_kind[3], by_kind[4], by_kind[5]),
            modality_S=put(modality),
            start_S=put(start),
            length_S=put(length),
            tokens_S=put(tokens),
            grid_S3=put(grid, torch.int32),
            extent_S3=put(batch.extent[:used], torch.int32),
            id_S=put(ids),
            group_S=put(batch.group[:used]),
            temperature_group_S=put(batch.temperature_group[:used]),
            side_S=put(batch.side[:used].astype(np.int64)),
            item_S=put(batch.item[:used]),
            choice_offsets_S1=put(choice_offsets),
            choice_bytes=put(batch.choices.data.astype(np.int64)),
            choice_targets=put(batch.choice_targets.data, torch.float32),
            attract=put_edges(batch.attract),
            repel=put_edges(batch.repel),
            ignore=put_edges(batch.ignore),
            tape=put(batch.tape[: batch.used_bytes - batch.layout.tape_offset], torch.uint8),
            tape_offsets_S1=put(batch.tape_offsets[: used + 1]),
        )

    @classmethod
    def empty(cls, shape: BatchShape, device: torch.device | str) -> "BatchLayout":
        """The layout of no items at all, which every op accepts."""
        return cls.from_batch(PackedBatch(shape), device)


def _coordinates(
    token: NDArray[np.int64], segment: NDArray[np.int64], grid: NDArray[np.int32], tokens: NDArray[np.int64], modality: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """(t, h, w) and kind of every position, from the number of its token in its segment (-1 for the prefix)."""
    kind = (modality + 1).astype(np.uint8)[segment]
    kind[token < 0] = PREFIX
    kind[token >= tokens[segment]] = MASK
    coord = np.zeros((len(token), 3), np.int32)
    coord[:, 0] = np.maximum(token, 0)
    # Only pictures and clips have more than one token at a time: text, audio and masks keep the division away.
    spread = np.flatnonzero((kind == Modality.IMAGE + 1) | (kind == Modality.VIDEO + 1))
    across = grid[:, 2][segment[spread]]
    down = grid[:, 1][segment[spread]]
    line, coord[spread, 2] = np.divmod(coord[spread, 0], across)
    coord[spread, 0], coord[spread, 1] = np.divmod(line, down)
    return coord, kind
