"""Writes placed bags into a packed batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.bag import NO_RELATIONS, DecodedBag, EdgeColumns, RelationColumns
from treadle.pipeline.batch import DIMENSIONS, PackedBatch
from treadle.pipeline.layout import COUNTS, EDGE_SETS, align
from treadle.shape import ALIGNMENT_BYTES, LateInteractionSide

_SHORT_BYTES = 4096
_ZEROS = bytes(ALIGNMENT_BYTES)

PlacedBag = tuple[DecodedBag, Sequence[int]]
"""A bag and the row of each of its items."""


def late_interaction_use(bag: DecodedBag, query_span: int) -> tuple[int, int, int]:
    """Query tokens, documents and document tokens that one bag takes."""
    query_tokens = documents = document_tokens = 0
    for place, side in enumerate(bag.sides):
        if side:
            tokens = bag.tokens(place)
            if side & LateInteractionSide.QUERY:
                query_tokens += min(tokens, query_span)
            if side & LateInteractionSide.DOCUMENT:
                documents += 1
                document_tokens += tokens
    return query_tokens, documents, document_tokens


def joined_relations(placed: Sequence[PlacedBag]) -> RelationColumns:
    """The relations of all bags between segments, which are numbered bag by bag: order within a bag is kept."""
    if all(bag.relations is NO_RELATIONS for bag, _ in placed):
        return NO_RELATIONS
    firsts: list[int] = []
    count = 0
    for bag, _ in placed:
        firsts.append(count)
        count += len(bag)

    def join(which: int) -> EdgeColumns:
        found = [(bag.relations[which], first) for (bag, _), first in zip(placed, firsts, strict=True) if len(bag.relations[which].sources)]
        shift = np.repeat(np.array([first for _, first in found], np.int64), np.array([len(edges.sources) for edges, _ in found], np.int64))
        none_int, none_float = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return EdgeColumns(
            np.concatenate([none_int, *(edges.sources for edges, _ in found)]) + shift,
            np.concatenate([none_int, *(edges.targets for edges, _ in found)]) + shift,
            np.concatenate([none_float, *(edges.weights for edges, _ in found)]),
        )

    return join(0), join(1), join(2)


def fill_batch(
    batch: PackedBatch,
    placed: Sequence[PlacedBag],
    relations: RelationColumns,
    *,
    num_items: int | None = None,
    dropped: int = 0,
    dropped_edges: int = 0,
    left_out: bool = False,
) -> None:
    """Writes `placed`, in order, into a fresh batch.

    Args:
        num_items: items of the step; None numbers the items by segment.
        dropped: items that no batch holds.
        dropped_edges: edges to and from them.
        left_out: whether bags were left that this batch could not take as well.
    """
    lengths = [length for bag, _ in placed for length in bag.lengths]
    used = len(lengths)
    truncated = 0
    if used:
        truncated = _write_segments(batch, placed, lengths)
        write_positions(batch, used)
    _write_tape(batch, placed)
    _write_choices(batch, placed)
    for name, edges in zip(EDGE_SETS, relations, strict=True):
        _write_edges(batch, name, edges)
    defaulted = all(bag.ids is None for bag, _ in placed)
    if num_items is None:
        batch.item[:used] = np.arange(used)
    if defaulted:
        batch.id[:used] = batch.item[:used].astype(np.uint64)
    counts = dict.fromkeys(COUNTS, 0)
    counts["segments"] = used
    counts["bags"] = len(placed)
    counts["positions"] = sum(lengths)
    counts["tokens"] = int(batch.grid[:used].prod(axis=1, dtype=np.int64).sum())
    counts["truncated"] = truncated
    counts["dropped"] = dropped
    counts["dropped_edges"] = dropped_edges
    counts["items"] = used if num_items is None else num_items
    counts["ids_defaulted"] = int(defaulted)
    counts["tape_used"] = int(batch.tape_offsets[-1])
    if batch.capacities.late_interaction:
        uses = [late_interaction_use(bag, batch.capacities.query_span) for bag, _ in placed]
        for name, column in zip(("query_tokens", "documents", "document_tokens"), zip(*uses, strict=True), strict=False):
            counts[name] = sum(column)
    header = batch.array("counts")
    header[: len(COUNTS)] = [counts[name] for name in COUNTS]
    if left_out:
        shares = batch.fill
        header[COUNTS.index("closed_by")] = 1 + max(range(len(shares)), key=lambda code: (shares[DIMENSIONS[code]], -code))


def _write_segments(batch: PackedBatch, placed: Sequence[PlacedBag], lengths: list[int]) -> int:
    """The columns with one entry per segment; answers how many items were cut."""
    used = len(lengths)
    payloads = [payload for bag, _ in placed for payload in bag.payloads]
    rows = [row for _, bag_rows in placed for row in bag_rows]
    taken = [0] * batch.shape.max_rows_per_device
    starts: list[int] = []
    for row, length in zip(rows, lengths, strict=True):
        starts.append(taken[row])
        taken[row] += length
    batch.modality[:used] = [kind for bag, _ in placed for kind in bag.modalities]
    batch.grid[:used] = [payload.grid for payload in payloads]
    batch.extent[:used] = [payload.extent for payload in payloads]
    batch.row[:used] = rows
    batch.start[:used] = starts
    batch.length[:used] = lengths
    batch.item[:used] = [item for bag, _ in placed for item in bag.items]
    batch.bag[:used] = np.repeat(np.arange(len(placed)), [len(bag) for bag, _ in placed])
    batch.group[:used] = [group for bag, _ in placed for group in bag.groups]
    batch.temperature_group[:used] = [group for bag, _ in placed for group in bag.temperature_groups]
    batch.side[:used] = [side for bag, _ in placed for side in bag.sides]
    if any(bag.ids is not None for bag, _ in placed):
        batch.id[:used] = np.array([identity for bag, _ in placed for identity in bag.ids or bag.items], np.uint64)
    return sum(payload.truncated for payload in payloads)


def write_positions(batch: PackedBatch, used: int) -> None:
    """Fills `position_segment` from the places of the first `used` segments."""
    lengths = batch.length[:used].astype(np.int64)
    first = batch.row[:used].astype(np.int64) * batch.shape.max_columns_per_row + batch.start[:used]
    before = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(first - before, lengths)
    batch.position_segment.reshape(-1)[places] = np.repeat(np.arange(used, dtype=np.int32), lengths)


def _write_tape(batch: PackedBatch, placed: Sequence[PlacedBag]) -> None:
    tape, offsets, end = batch.tape, [0], 0
    short: list[bytes] = []
    short_from = 0
    for bag, _ in placed:
        for payload in bag.payloads:
            array = payload.array
            nbytes = array.nbytes
            if nbytes <= _SHORT_BYTES:
                # A run of short payloads is joined and copied at once: a third of what one copy each costs.
                short.append(array.tobytes())
                short.append(_ZEROS[: -nbytes % ALIGNMENT_BYTES])
            else:
                _write_run(tape, short_from, short)
                tape[end : end + nbytes] = array.reshape(-1).view(np.uint8)
                short_from = align(end + nbytes)
            end = align(end + nbytes)
            offsets.append(end)
    _write_run(tape, short_from, short)
    batch.tape_offsets[: len(offsets)] = offsets
    batch.tape_offsets[len(offsets) :] = end


def _write_run(tape: NDArray[np.uint8], begin: int, parts: list[bytes]) -> None:
    if parts:
        joined = b"".join(parts)
        tape[begin : begin + len(joined)] = np.frombuffer(joined, np.uint8)
        parts.clear()


def _write_choices(batch: PackedBatch, placed: Sequence[PlacedBag]) -> None:
    if not batch.shape.max_choices_per_item or not any(legal for bag, _ in placed for legal in bag.choices):
        return
    legal = b"".join(entry for bag, _ in placed for entry in bag.choices)
    sizes = [len(entry) for bag, _ in placed for entry in bag.choices]
    offsets: NDArray[np.int64] = batch.array("choice_offsets")
    np.cumsum(sizes, out=offsets[1 : len(sizes) + 1])
    offsets[len(sizes) + 1 :] = len(legal)
    batch.array("choice_data")[: len(legal)] = np.frombuffer(legal, np.uint8)
    batch.array("choice_target_data")[: len(legal)] = np.concatenate([targets for bag, _ in placed for targets in bag.choice_targets])


def _write_edges(batch: PackedBatch, name: str, edges: EdgeColumns) -> None:
    count = len(edges.sources)
    if not count:
        return
    per_source = np.bincount(edges.sources, minlength=batch.shape.max_segments_per_device)
    np.cumsum(per_source, out=batch.array(f"{name}_offsets")[1:])
    batch.array(f"{name}_ids")[:count] = edges.targets
    batch.array(f"{name}_weights")[:count] = edges.weights
