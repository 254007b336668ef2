"""What must hold in a batch that came from a file, before anything follows its indices."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.batch import DIMENSIONS, PackedBatch
from treadle.pipeline.items import check_choices
from treadle.pipeline.layout import COUNTS, EDGE_SETS
from treadle.pipeline.tensor_file import PackedError
from treadle.shape import ALIGNMENT_BYTES, BatchShape, LateInteractionSide, Modality

Sizes = NDArray[np.int64]


def check_batch(batch: PackedBatch) -> None:
    """Checks that every index points where it may and that the arrays agree with each other.

    Raises:
        PackedError: they do not.
    """
    used, shape = batch.segments, batch.shape
    kinds = batch.modality[:used]
    grid, extent = batch.grid[:used].astype(np.int64), batch.extent[:used].astype(np.int64)
    _require([value for value in batch.counts.values() if not 0 <= value < 2**53] == [], "a count is out of range")
    _require(kinds < len(Modality), "a modality is unknown")
    _require([shape.is_live(Modality(kind)) for kind in np.unique(kinds).tolist()], "a modality has no live slice")
    _require(extent > 0, "an extent is not positive")
    _require(grid == expected_grid(kinds, extent, shape), "a grid does not follow from its extent")
    _require((grid > 0) & (grid <= shape.max_columns_per_row), "a grid passes the row")
    tokens = grid.prod(axis=1)
    _check_offsets("choice_offsets", batch.array("choice_offsets"), len(batch.array("choice_data")))
    offered = np.diff(batch.array("choice_offsets")[: used + 1])
    _require(offered <= shape.max_choices_per_item, "an item offers more choices than the shape holds")
    length = batch.length[:used].astype(np.int64)
    _require(length == 1 + tokens + (offered > 0), "a length is not its prefix, its tokens and its mask")
    row, start = batch.row[:used], batch.start[:used].astype(np.int64)
    _require((row >= 0) & (row < shape.max_rows_per_device), "a row is out of range")
    _require((start >= 0) & (start + length <= shape.max_columns_per_row), "a segment passes its row")
    order = np.lexsort((start, row))
    follows, ends = np.diff(row[order], prepend=-1) == 0, np.concatenate(([0], (start + length)[order]))[:used]
    _require(start[order] == np.where(follows, ends, 0), "segments overlap, or leave gaps between them")
    _check_labels(batch, used)
    _check_offsets("tape_offsets", batch.tape_offsets, len(batch.tape))
    nbytes = payload_bytes(kinds, extent, shape)
    _require(
        np.diff(batch.tape_offsets[: used + 1]) == -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, "the tape does not follow the extents"
    )
    _check_counts(batch, tokens, length)
    try:
        for name in EDGE_SETS:
            _check_offsets(f"{name}_offsets", batch.array(f"{name}_offsets"), batch.capacities.edges)
            edges = getattr(batch, name)
            _require(edges.ids < used, f"{name} names a segment that is not there")
            edges.check(shape.max_segments_per_device, name)
        check_choices(batch.modality, batch.choices, batch.choice_targets)
    except ValueError as error:
        raise PackedError("corrupt", str(error)) from error


def _check_labels(batch: PackedBatch, used: int) -> None:
    steps = np.diff(batch.bag[:used], prepend=-1)
    _require((steps >= 0) & (steps <= 1), "bags are not numbered in turn")
    _require(batch.bags == (int(batch.bag[used - 1]) + 1 if used else 0), "the number of bags does not match")
    _require(batch.bags <= batch.capacities.bags, "there are more bags than the shape holds")
    _require(batch.side[:used] <= max(LateInteractionSide), "a side is unknown")
    _require(batch.temperature_group[:used] >= 0, "a temperature group is negative")
    _require((batch.item[:used] >= 0) & (batch.item[:used] < batch.items), "an item is out of range")


def _check_counts(batch: PackedBatch, tokens: Sizes, length: Sizes) -> None:
    counts, limits = batch.counts, batch.capacities
    side = batch.side[: len(tokens)]
    queries, documents = (side & LateInteractionSide.QUERY) > 0, (side & LateInteractionSide.DOCUMENT) > 0
    expected = {"tape_used": int(batch.tape_offsets[-1]), "positions": int(length.sum()), "tokens": int(tokens.sum())}
    if limits.late_interaction:
        expected["query_tokens"] = int(np.minimum(tokens[queries], limits.query_span).sum())
        expected["documents"] = int(documents.sum())
        expected["document_tokens"] = int(tokens[documents].sum())
        for name in ("query_tokens", "documents", "document_tokens"):
            _require(expected[name] <= getattr(limits, name), f"{name} pass their capacity")
    for name, value in expected.items():
        _require(counts[name] == value, f"the count of {name} is {counts[name]}, the arrays say {value}")
    _require(counts["closed_by"] <= len(DIMENSIONS), "closed_by is unknown")
    _require(batch.array("counts")[len(COUNTS) :] == 0, "a reserved count is set")


def expected_grid(kinds: NDArray[np.uint8], extent: Sizes, shape: BatchShape) -> Sizes:
    """[n, 3] the grid of each extent; -1 where no grid has that extent."""
    grid = np.ones_like(extent)
    frames, high, wide = extent[:, 0], extent[:, 1], extent[:, 2]
    for kind in Modality:
        at = kinds == kind
        if not at.any():
            continue
        if kind is Modality.TEXT or kind is Modality.AUDIO:
            chunk = 1 if kind is Modality.TEXT else shape.audio.chunk_samples
            grid[at, 0] = np.where((frames == 1) & (high == 1), -(-wide // chunk), -1)[at]
            continue
        side = shape.image.patch_side if kind is Modality.IMAGE else shape.video.patch_side
        tube = 1 if kind is Modality.IMAGE else shape.video.tube_frames
        whole = (frames == 1) if kind is Modality.IMAGE else (frames % tube == 0)
        grid[at, 0] = np.where(whole, frames // tube, -1)[at]
        grid[at, 1] = -(-high // side)[at]
        grid[at, 2] = -(-wide // side)[at]
    return grid


def payload_bytes(kinds: NDArray[np.uint8], extent: Sizes, shape: BatchShape) -> Sizes:
    """[n] bytes of each payload."""
    per_value = np.array([1, shape.image.channels, shape.video.channels, 4], np.int64)
    sizes: Sizes = extent.prod(axis=1) * per_value[kinds]
    return sizes


def _check_offsets(name: str, offsets: NDArray[np.int64], size: int) -> None:
    _require(offsets[0] == 0 and bool((np.diff(offsets) >= 0).all()) and offsets[-1] <= size, f"{name} fall, or pass their {size} entries")


def _require(holds: Any, what: str) -> None:
    if not bool(np.all(holds)):
        raise PackedError("corrupt", what)
