"""Writes placed bags into a packed batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.bag import NO_RELATIONS, DecodedBag, EdgeColumns, RelationColumns, TextBag, TextForm
from treadle.pipeline.batch import DIMENSIONS, PackedBatch
from treadle.pipeline.identity import identities
from treadle.pipeline.layout import COUNTS, EDGE_SETS
from treadle.pipeline.pending import PendingText, Placed
from treadle.shape import ALIGNMENT_BYTES, LateInteractionSide

_SHORT_BYTES = 4096
_LONG_POSITIONS = 64
"""Mean length from which positions are written segment by segment rather than all at once."""

_ZEROS = [bytes(count) for count in range(ALIGNMENT_BYTES)]

PlacedBag = tuple[DecodedBag, Sequence[int]]
"""A bag and the row of each of its items."""


@dataclass(slots=True)
class TextColumns:
    """Placed bags of texts alone, in columns."""

    rows: Sequence[int]
    """One per text, as `contents`."""
    contents: Sequence[bytes]
    forms: Sequence[TextForm]
    """One per bag, as the two below."""
    counts: Sequence[int]
    """Texts of the bag."""
    seeds: Sequence[int]
    truncated: int = 0

    @classmethod
    def of(cls, chosen: Sequence[Placed]) -> "TextColumns | None":
        """The columns of single texts; None where there is anything else, or nothing."""
        texts = [pending for pending, _ in chosen if type(pending) is PendingText]
        if not texts or len(texts) != len(chosen):
            return None
        places = [(text.run, text.place) for text in texts]
        return cls(
            [rows[0] for _, rows in chosen],
            [run.texts[place] for run, place in places],
            [run.forms[place] for run, place in places],
            [1] * len(places),
            [run.seeds[place] for run, place in places],
        )

    @classmethod
    def of_bags(cls, placed: "Sequence[PlacedBag]") -> "TextColumns | None":
        """The same of the bags of texts that samples of several give."""
        bags = [bag for bag, _ in placed if isinstance(bag, TextBag)]
        if not bags or len(bags) != len(placed):
            return None
        return cls(
            list(chain.from_iterable([rows for _, rows in placed])),
            list(chain.from_iterable([bag.texts for bag in bags])),
            [bag.form for bag in bags],
            [len(bag.texts) for bag in bags],
            [bag.seed for bag in bags],
            sum([sum(bag.cuts) for bag in bags]),
        )


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
    relations = [bag.relations for bag, _ in placed]
    if all([found is NO_RELATIONS for found in relations]):
        return NO_RELATIONS
    sizes = np.array([len(bag.lengths) for bag, _ in placed], np.int64)
    firsts = np.cumsum(sizes) - sizes

    def join(which: int) -> EdgeColumns:
        sets = [found[which] for found in relations]
        counts = np.array([len(edges.sources) for edges in sets], np.int64)
        if not counts.any():
            return NO_RELATIONS[which]
        # Samples of one form share their columns: one copy per different set, not one per bag.
        alike = {id(edges): edges for edges in sets}
        if len(alike) == 1:
            same = sets[0]
            joined = EdgeColumns(np.tile(same.sources, len(sets)), np.tile(same.targets, len(sets)), np.tile(same.weights, len(sets)))
        else:
            joined = EdgeColumns(
                np.concatenate([edges.sources for edges in sets]),
                np.concatenate([edges.targets for edges in sets]),
                np.concatenate([edges.weights for edges in sets]),
            )
        shift = np.repeat(firsts, counts)
        return EdgeColumns(joined.sources + shift, joined.targets + shift, joined.weights)

    return join(0), join(1), join(2)


def fill_batch(
    batch: PackedBatch,
    placed: "Sequence[PlacedBag] | TextColumns",
    relations: RelationColumns,
    *,
    num_items: int | None = None,
    dropped: int = 0,
    dropped_edges: int = 0,
    left_out: bool = False,
    stale_tape: int = 0,
) -> None:
    """Writes `placed`, in order, into a fresh or a cleared batch.

    Args:
        num_items: items of the step; None numbers the items by segment.
        dropped: items that no batch holds.
        dropped_edges: edges to and from them.
        left_out: whether bags were left that this batch could not take as well.
        stale_tape: bytes of the tape that an earlier batch of the same memory used.
    """
    bags: Sequence[DecodedBag] = ()
    texts = placed if isinstance(placed, TextColumns) else TextColumns.of_bags(placed)
    if texts is not None:
        rows, num_bags, defaulted = np.fromiter(texts.rows, np.int32), len(texts.forms), False
        contents, truncated = _write_texts(batch, texts)
    else:
        assert not isinstance(placed, TextColumns)
        bags = [bag for bag, _ in placed]
        rows, num_bags = np.fromiter(chain.from_iterable([rows for _, rows in placed]), np.int32), len(bags)
        defaulted = all([bag.without_ids for bag in bags])
        contents, truncated = _write_contents(batch, bags, len(rows)) if len(rows) else ([], 0)
    used = len(rows)
    _write_places(batch, rows)
    batch.bag[:used] = (
        np.arange(used)
        if used == num_bags
        else np.repeat(np.arange(num_bags), texts.counts if texts is not None else [len(bag.lengths) for bag in bags])
    )
    write_positions(batch, used)
    _write_tape(batch, contents, stale_tape)
    _write_choices(batch, bags)
    for name, edges in zip(EDGE_SETS, relations, strict=True):
        _write_edges(batch, name, edges)
    if num_items is None:
        batch.item[:used] = np.arange(used)
    if defaulted:
        batch.id[:used] = batch.item[:used]
    counts = dict.fromkeys(COUNTS, 0)
    counts["segments"] = used
    counts["bags"] = num_bags
    counts["positions"] = positions = int(batch.length[:used].sum())
    # What is left of the positions are prefixes, and masks of the items that offer choices.
    masks = int(np.count_nonzero(np.diff(batch.array("choice_offsets")))) if batch.shape.max_choices_per_item else 0
    counts["tokens"] = positions - used - masks
    counts["truncated"] = truncated
    counts["dropped"] = dropped
    counts["dropped_edges"] = dropped_edges
    counts["items"] = used if num_items is None else num_items
    counts["ids_defaulted"] = int(defaulted)
    counts["tape_used"] = int(batch.tape_offsets[-1])
    if batch.capacities.late_interaction:
        assert not isinstance(placed, TextColumns), "texts that take late interaction's capacities are placed one by one"
        uses = [late_interaction_use(bag, batch.capacities.query_span) for bag, _ in placed]
        for name, column in zip(("query_tokens", "documents", "document_tokens"), zip(*uses, strict=True), strict=False):
            counts[name] = sum(column)
    header = batch.array("counts")
    header[: len(COUNTS)] = list(counts.values())
    if left_out:
        shares = batch.fill
        header[COUNTS.index("closed_by")] = 1 + max(range(len(shares)), key=lambda code: (shares[DIMENSIONS[code]], -code))


def _write_joined(into: NDArray[Any], columns: Sequence[Sequence[int]]) -> None:
    """One column of all bags; bags that are labelled alike, which most are, cost next to nothing."""
    first = columns[0]
    if columns.count(first) == len(columns):
        into.reshape(len(columns), len(first))[:] = first
    else:
        into[:] = list(chain.from_iterable(columns))


def _write_texts(batch: PackedBatch, texts: TextColumns) -> tuple[list[bytes | NDArray[Any]], int]:
    """What is known of samples of texts alone, all of them at once; as `_write_contents`."""
    contents: list[bytes | NDArray[Any]] = [*texts.contents]
    used, forms = len(contents), texts.forms
    sizes = np.fromiter(map(len, contents), np.int32, used)
    batch.grid[:used] = batch.extent[:used] = 1
    batch.grid[:used, 0] = batch.extent[:used, 2] = sizes
    batch.length[:used] = sizes + 1
    # Samples of one form, which most are, cost next to nothing.
    first, alike = forms[0], len(set(map(id, forms))) == 1
    for name, into in (("items", batch.item), ("temperature_groups", batch.temperature_group), ("sides", batch.side)):
        if alike:
            into[:used].reshape(len(forms), -1)[:] = getattr(first, name)
        else:
            into[:used] = list(chain.from_iterable(map(attrgetter(name), forms)))
    batch.group[:used], batch.id[:used] = identities(texts.seeds, texts.counts)
    return contents, texts.truncated


def _write_contents(batch: PackedBatch, bags: Sequence[DecodedBag], used: int) -> tuple[list[bytes | NDArray[Any]], int]:
    """Modalities, sizes and labels; answers every segment's content, and how many items were cut."""
    payloads = list(chain.from_iterable([bag.payloads for bag in bags]))
    contents: list[bytes | NDArray[Any]] = [payload.array for payload in payloads]
    batch.length[:used] = list(chain.from_iterable([bag.lengths for bag in bags]))
    batch.grid.reshape(-1)[: 3 * used] = list(chain.from_iterable([payload.grid for payload in payloads]))
    batch.extent.reshape(-1)[: 3 * used] = list(chain.from_iterable([payload.extent for payload in payloads]))
    _write_joined(batch.modality[:used], [bag.modalities for bag in bags])
    _write_joined(batch.item[:used], [bag.items for bag in bags])
    _write_joined(batch.temperature_group[:used], [bag.temperature_groups for bag in bags])
    _write_joined(batch.side[:used], [bag.sides for bag in bags])
    batch.group[:used] = list(chain.from_iterable([bag.groups for bag in bags]))
    ids = [bag.ids for bag in bags]
    if any(ids):
        batch.id[:used] = np.fromiter(
            chain.from_iterable([each or bag.items for each, bag in zip(ids, bags, strict=True)]), np.uint64, used
        )
    return contents, sum([payload.truncated for payload in payloads])


def _write_places(batch: PackedBatch, rows: NDArray[np.int32]) -> None:
    """Rows and columns: the segments of one row lie back to back, in their own order."""
    used = len(rows)
    batch.row[:used] = rows
    order = np.argsort(rows, kind="stable")
    sorted_rows, lengths = rows[order], batch.length[:used][order]
    before = np.cumsum(lengths) - lengths
    row_begins = before[np.searchsorted(sorted_rows, sorted_rows)]
    batch.start[:used][order] = before - row_begins


def write_positions(batch: PackedBatch, used: int) -> None:
    """Writes all of `position_segment` from the places of the first `used` segments."""
    positions = batch.position_segment.reshape(-1)
    columns = batch.shape.max_columns_per_row
    rows, starts, lengths = batch.row[:used], batch.start[:used], batch.length[:used]
    firsts = rows.astype(np.int64) * columns + starts
    if used * _LONG_POSITIONS <= len(positions):
        # Segments lie back to back from each row's begin: what is empty is its end alone.
        ends = np.arange(0, len(positions), columns)
        np.maximum.at(ends, rows, firsts + lengths)
        for end, stop in zip(ends.tolist(), range(columns, len(positions) + 1, columns), strict=True):
            if end < stop:
                positions[end:stop] = -1
        for segment, (first, end) in enumerate(zip(firsts.tolist(), (firsts + lengths).tolist(), strict=True)):
            positions[first:end] = segment
        return
    positions.fill(-1)
    order = np.argsort(firsts)
    counts = lengths[order]
    before = np.cumsum(counts) - counts
    places = np.repeat(firsts[order] - before, counts)
    places += np.arange(len(places))
    positions[places] = np.repeat(order.astype(np.int32), counts)


def _write_tape(batch: PackedBatch, contents: Sequence[bytes | NDArray[Any]], stale: int) -> None:
    """Copies the contents, zeros after each up to the next, and over what an earlier batch left."""
    tape, used = batch.tape, len(contents)
    of_bytes = set(map(type, contents)) == {bytes}
    sizes = np.fromiter(map(len, contents) if of_bytes else [_size(content) for content in contents], np.int64, used)
    pads = -sizes & (ALIGNMENT_BYTES - 1)
    ends = np.cumsum(sizes + pads)
    batch.tape_offsets[1 : used + 1] = ends
    end = int(ends[-1]) if used else 0
    batch.tape_offsets[used + 1 :] = end
    if stale > end:
        tape[end:stale] = 0
    if of_bytes and sizes.max() <= _SHORT_BYTES:
        pieces: Iterable[Any] = [*contents]
        if pads.any():
            pieces = chain.from_iterable(zip(contents, [_ZEROS[pad] for pad in pads.tolist()], strict=True))
        tape[:end] = np.frombuffer(b"".join(pieces), np.uint8)
        return
    short: list[bytes] = []
    short_from = 0
    for content, size, stop in zip(contents, sizes.tolist(), ends.tolist(), strict=True):
        if size <= _SHORT_BYTES:
            # A run of short contents is joined and copied at once: a third of what one copy each costs.
            short.append(content if isinstance(content, bytes) else content.tobytes())
            short.append(_ZEROS[-size % ALIGNMENT_BYTES])
            continue
        begin = stop - size - -size % ALIGNMENT_BYTES
        if short:
            tape[short_from:begin] = np.frombuffer(b"".join(short), np.uint8)
            short.clear()
        tape[begin : begin + size] = np.frombuffer(content, np.uint8)
        tape[begin + size : stop] = 0
        short_from = stop
    if short:
        tape[short_from:end] = np.frombuffer(b"".join(short), np.uint8)


def _size(content: bytes | NDArray[Any]) -> int:
    return len(content) if isinstance(content, bytes) else content.nbytes


def _write_choices(batch: PackedBatch, bags: Sequence[DecodedBag]) -> None:
    if not batch.shape.max_choices_per_item or not any(legal for bag in bags for legal in bag.choices):
        return
    legal = b"".join(entry for bag in bags for entry in bag.choices)
    sizes = [len(entry) for bag in bags for entry in bag.choices]
    offsets: NDArray[np.int64] = batch.array("choice_offsets")
    np.cumsum(sizes, out=offsets[1 : len(sizes) + 1])
    offsets[len(sizes) + 1 :] = len(legal)
    batch.array("choice_data")[: len(legal)] = np.frombuffer(legal, np.uint8)
    batch.array("choice_target_data")[: len(legal)] = np.concatenate([targets for bag in bags for targets in bag.choice_targets])


def _write_edges(batch: PackedBatch, name: str, edges: EdgeColumns) -> None:
    count = len(edges.sources)
    if not count:
        return
    per_source = np.bincount(edges.sources, minlength=batch.shape.max_segments_per_device)
    np.cumsum(per_source, out=batch.array(f"{name}_offsets")[1:])
    batch.array(f"{name}_ids")[:count] = edges.targets
    batch.array(f"{name}_weights")[:count] = edges.weights
