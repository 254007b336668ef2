"""The packer: bags in, packed batches out. One step at a time, or a stream with a look-ahead.

    pack(items)                          one step: one batch, and what does not fit is dropped
    add(bag) ... ready() ... take()      a stream: bags wait in a pool, batches leave it full; flush() empties it

Which bags go together, and where, is `placement.py`; how they are written is `fill.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.decoders import DecodeOptions
from treadle.pipeline.bag import (
    DecodedBag,
    LateBag,
    OnError,
    TextRun,
    assemble_bag,
    decode_bag,
    decode_items,
    relation_columns,
)
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.fill import PlacedBag, TextColumns, fill_batch, joined_relations, late_interaction_use
from treadle.pipeline.items import StepItems
from treadle.pipeline.layout import Capacities, LateInteractionCapacities, batch_layout
from treadle.pipeline.memory import check_memory
from treadle.pipeline.pending import PendingBag, PendingText, Placed, pack_demand
from treadle.pipeline.placement import COLUMN_NAMES, Placement, checked, waiting_bags
from treadle.pipeline.recycle import Recycler
from treadle.shape import BatchShape, require_choice, require_count, require_member

MAX_WINDOW = 1024


class Packer:
    """Weaves whole bags into rows. Placement makes no random choice: the same bags make the same batches.

    In a stream, call `take` whenever `ready` answers True before adding more: then a bag waits for at most
    `2 * window` batches after its arrival.
    """

    def __init__(
        self,
        shape: BatchShape,
        *,
        window: int = 4,
        max_edges: int = 0,
        late_interaction: LateInteractionCapacities | None = None,
        seed: int = 0,
        options: DecodeOptions | None = None,
    ) -> None:
        """
        Args:
            window: batches' worth of bags that wait to be chosen from.
            max_edges: edges that each edge set of a batch holds; 0 derives 8 per segment.
            late_interaction: query tokens, documents and document tokens become capacities too.
            seed: kept for callers that configure a stream and a packer alike; placement draws nothing.
            options: how `pack` and `add` decode.

        Raises:
            ValueError: an argument is out of range or of another type, or the host has no memory for one batch of such capacities.
        """
        require_member("Packer", "shape", shape, BatchShape)
        require_member("Packer", "options", options, DecodeOptions, optional=True)
        self.window = require_count("Packer", "window", window, 1, MAX_WINDOW)
        self.seed = require_count("Packer", "seed", seed, 0, 2**64 - 1)
        self._given, self.shape = shape, shape.resolved()
        self.options = options or DecodeOptions()
        self.capacities = Capacities.of(self.shape, max_edges, late_interaction)
        self._layout = batch_layout(self.shape, self.capacities.edges)
        check_memory(self.shape, self.capacities, self._layout)
        self._placement = self._new_placement(self.window)
        self._recycler = Recycler(self._layout)
        self._late = 0
        self._dropped = 0
        self._dropped_edges = 0
        self._without_ids: bool | None = None

    def _new_placement(self, window: int) -> Placement:
        return Placement(self.shape.max_rows_per_device, self.shape.max_columns_per_row, self.capacities, window)

    def _pending(self, bag: DecodedBag, edges: Sequence[int], token: object = None) -> PendingBag:
        late = late_interaction_use(bag, self.capacities.query_span) if self.capacities.late_interaction else ()
        return PendingBag(bag.lengths, pack_demand((1, len(bag.lengths), *edges, *late)), (token, bag))

    def pack(self, items: StepItems, on_error: OnError = "raise") -> PackedBatch:
        """Packs one step's items into one batch; bags that do not fit are dropped, later ones first.

        Bags that wait in this packer are left alone. Edges may link any two items of the step; those to a dropped
        item are dropped. None of the bags left out fits beside the others, an edge between two bags counted with the later one, whether
        or not the earlier one is dropped: where `max_edges` binds, a bag may be left out for edges that are gone in the end.

        Raises:
            ValueError: an item does not suit the shape, or an argument is of another type.
            DecodeError: an item does not decode and `on_error` is "raise"; its `index` says which.
        """
        require_member("Packer.pack", "items", items, StepItems)
        require_choice("Packer.pack", "on_error", on_error, ("raise", "drop"))
        payloads = decode_items(items, self.shape, self.options, on_error=on_error)
        labels = np.arange(len(items)) if items.bags is None else items.bags
        _, first, bag_of_label = np.unique(labels, return_index=True, return_inverse=True)
        members: list[list[int]] = [[] for _ in first]
        rank_of = np.empty(len(first), np.int64)
        rank_of[np.argsort(first)] = np.arange(len(first))
        bag_of_item = rank_of[bag_of_label.reshape(-1)] if len(items) else np.zeros(0, np.int64)
        for item, number in enumerate(bag_of_item.tolist()):
            members[number].append(item)
        there = np.array([payload is not None for payload in payloads], bool)
        relations = relation_columns(items.relations)
        # An edge counts with the later of its bags: the earlier one costs the same whether or not the later one is dropped.
        edges_of_bag = [
            np.bincount(
                np.maximum(bag_of_item[edges.sources], bag_of_item[edges.targets])[there[edges.sources] & there[edges.targets]],
                minlength=len(members),
            ).tolist()
            for edges in relations
        ]
        placement = self._new_placement(1)
        for number, listed in enumerate(members):
            bag = assemble_bag(items, payloads, listed)
            placement.add(self._pending(bag, [edges[number] for edges in edges_of_bag]))
        placed = [(pending.content[1], pending.rows_by_item(rows)) for pending, rows in placement.take_step()]
        segment_of = np.full(len(items), -1, np.int64)
        order = [item for bag, _ in placed for item in bag.items]
        segment_of[order] = np.arange(len(order))
        attract, repel, ignore = relations
        kept = attract.remapped(segment_of), repel.remapped(segment_of), ignore.remapped(segment_of)
        batch, stale_tape = self._new_batch()
        lost = sum(len(edges.sources) for edges in relations) - sum(len(edges.sources) for edges in kept)
        left_out = sum(payload is not None for payload in payloads) > len(order)
        fill_batch(
            batch,
            placed,
            kept,
            num_items=len(items),
            dropped=len(items) - len(order),
            dropped_edges=lost,
            left_out=left_out,
            stale_tape=stale_tape,
        )
        return batch

    def _new_batch(self) -> tuple[PackedBatch, int]:
        """An empty batch to fill, and how many bytes of its tape hold an earlier one's content."""
        buffer, stale_tape = self._recycler.take()
        return PackedBatch.over(self.shape, self.capacities, self._layout, buffer), stale_tape

    def add(self, bag: StepItems, on_error: OnError = "raise", token: object = None) -> bool:
        """Decodes one bag and puts it at the end of the pool; False where nothing of it could ever be packed.

        Raises:
            ValueError: `bag` names several bags, an item does not suit the shape, or an argument is of another type.
            DecodeError: an item does not decode and `on_error` is "raise"; its `index` says which.
        """
        require_member("Packer.add", "bag", bag, StepItems)
        require_choice("Packer.add", "on_error", on_error, ("raise", "drop"))
        if bag.bags is not None and len(np.unique(bag.bags)) > 1:
            raise ValueError(f"add takes one bag, and bags names {len(np.unique(bag.bags))}: add them one by one, or pack() them as a step")
        return self.add_decoded(decode_bag(bag, self.shape, self.options, on_error=on_error), token)

    def add_decoded(self, bag: DecodedBag, token: object = None) -> bool:
        """Puts a decoded bag at the end of the pool, with the caller's `token`; False, and counted, where it could never fit.

        Raises:
            ValueError: some bags of the pool carry ids and this one does not, or the other way round; or the bag was made for
                other slices or choices; or it is no bag.
        """
        require_member("Packer.add_decoded", "bag", bag, DecodedBag)
        if bag.made_for is not None:
            self._check_shape(bag.made_for)
        lengths, without_ids = bag.lengths, bag.without_ids
        if without_ids is not self._without_ids and lengths and self._placement.pool:
            raise ValueError("ids: some pending bags carry ids and others do not: give ids to all bags, or to none")
        self._dropped += bag.dropped
        self._dropped_edges += bag.dropped_edges
        if not lengths:
            return False
        pending = self._pending(bag, [len(columns.sources) for columns in bag.relations], token)
        if not self._placement.add(pending):
            self._dropped += len(lengths)
            self._dropped_edges += sum([len(columns.sources) for columns in bag.relations])
            return False
        self._without_ids = without_ids
        return True

    def add_texts(self, run: TextRun, first: int = 0) -> tuple[int, bool]:
        """`add_decoded` for the texts of a run, from place `first` on, until `ready` or until one could never fit.

        Returns:
            the place after the last one added or refused, and whether that one fits.
        """
        place, end = first, len(run.texts)
        while place < end and not self.ready():
            # The first one in is checked, and leaves the rest to be like it.
            if self._without_ids is False and not self.capacities.late_interaction:
                count = self._placement.missing_singles(run.lengths[place:])
                place += self._placement.add_singles([PendingText(run, at) for at in range(place, place + count)])
                continue
            place += 1
            if not self.add_decoded(run.bag(place - 1), run.token(place - 1)):
                return place, False
        return place, True

    def _check_shape(self, made_for: BatchShape) -> None:
        """Refuses a bag of another shape: its payloads would be read at the wrong sizes."""
        if made_for is self._given:
            return
        made, own = made_for.resolved(), self.shape
        alike = (made.image, made.video, made.audio) == (own.image, own.video, own.audio)
        if not alike or made.max_choices_per_item > own.max_choices_per_item:
            raise ValueError(f"this bag was made for {made}: slices or choices of this packer's {own} differ; make both with one shape")

    def ready(self) -> bool:
        """Whether a window of batches waits, so that `take` fills one well."""
        return self._placement.ready()

    def take(self) -> PackedBatch:
        """The next batch, ready or not; an empty one when nothing waits."""
        return self._take()[0]

    def take_with_tokens(self) -> tuple[PackedBatch, list[object]]:
        """The next batch, and the tokens of its bags in the order of its bags."""
        batch, chosen = self._take()
        return batch, [pending.content[0] for pending, _ in chosen]

    def _take(self) -> tuple[PackedBatch, list[Placed]]:
        chosen = self._placement.take()
        if self._late:
            chosen = self._arrived(chosen)
        batch, stale_tape = self._new_batch()
        placed: list[PlacedBag] = []
        texts = TextColumns.of(chosen)
        if texts is None:
            placed = [(pending.content[1], pending.rows_by_item(rows)) for pending, rows in chosen]
        fill_batch(
            batch,
            texts or placed,
            joined_relations(placed),
            dropped=self._dropped,
            dropped_edges=self._dropped_edges,
            left_out=bool(self._placement.pool),
            stale_tape=stale_tape,
        )
        self._dropped = self._dropped_edges = 0
        for pending, _ in chosen:
            pending.release()
        return batch, chosen

    def _arrived(self, chosen: list[Placed]) -> list[Placed]:
        """The bags of `chosen` with their content; one that cannot be had any more, or is not what it was, is dropped."""
        for pending, _ in chosen:
            if isinstance(pending.content[1], LateBag):
                pending.content[1].begin()
        arrived: list[Placed] = []
        for pending, rows in chosen:
            token, late = pending.content
            if isinstance(late, LateBag):
                self._late -= 1
                bag = late.content()
                if bag is None or sorted(bag.lengths, reverse=True) != list(pending.lengths):
                    self._dropped += len(pending.lengths)
                    continue
                pending.order = sorted(range(len(rows)), key=bag.lengths.__getitem__, reverse=True)
                pending.content = token, bag
            arrived.append((pending, rows))
        return arrived

    def flush(self) -> Iterator[PackedBatch]:
        """Batches until nothing waits: the end of a stream."""
        while self._placement.pool:
            yield self.take()

    @property
    def pending(self) -> list[tuple[object, DecodedBag]]:
        """What waits, in arrival order: the caller's token and the bag."""
        return [entry.content for entry in self._placement.pool]

    @property
    def tokens(self) -> list[object]:
        """The callers' tokens of what waits, in arrival order."""
        return [entry.content[0] for entry in self._placement.pool]

    @property
    def num_pending(self) -> int:
        """Bags that wait."""
        return len(self._placement.pool)

    @property
    def longest_delay(self) -> int:
        """Most batches that a bag has waited so far."""
        return self._placement.longest_delay

    def state(self) -> dict[str, NDArray[np.int64]]:
        """The position of the packer in integers, without content: what `load` needs beside the pending bags."""
        return self.snapshot()()

    def tokens_now(self) -> Callable[[], list[object]]:
        """What answers the tokens of what waits at this very moment, whenever it is asked for."""
        waiting = self._placement.waiting()
        return lambda: [entry.content[0] for entry in waiting()]

    def snapshot(self) -> Callable[[], dict[str, NDArray[np.int64]]]:
        """What builds the state of this very moment, whenever it is asked for: cheap where it never is."""
        placement, dropped = self._placement.snapshot(), (self._dropped, self._dropped_edges)
        return lambda: {**placement(), "dropped": np.array(dropped, np.int64)}

    def load(
        self, state: Mapping[str, NDArray[np.int64]], bags: Sequence[DecodedBag | LateBag], tokens: Sequence[object] | None = None
    ) -> None:
        """Goes on from `state`; `bags` are the ones that were pending then, in arrival order, decoded alike, or still to be.

        Raises:
            ValueError: the state is of another shape, or the bags are not the ones that waited.
        """
        if tokens is not None and len(tokens) != len(bags):
            raise ValueError(f"packer state: {len(tokens)} tokens for {len(bags)} bags")
        columns = {name: np.asarray(values) for name, values in state.items()}
        dropped = checked(columns, [*COLUMN_NAMES, "dropped"])["dropped"]
        if len(dropped) != 2:
            raise ValueError(f"packer state: dropped holds {len(dropped)} counts: expected items and edges")
        for bag in bags:
            if not isinstance(bag, LateBag) and bag.made_for is not None:
                self._check_shape(bag.made_for)
        placement = self._new_placement(self.window)
        contents = list(zip(tokens if tokens is not None else [None] * len(bags), bags, strict=True))
        late = [bag for bag in bags if isinstance(bag, LateBag)]
        known = [bag for bag in bags if not isinstance(bag, LateBag)]
        if late:
            entries = waiting_bags(columns, contents)
        else:
            edges = [[len(edges.sources) for edges in bag.relations] for bag in known]
            entries = [self._pending(bag, count, token) for (token, _), bag, count in zip(contents, known, edges, strict=True)]
        placement.load(columns, entries)
        self._placement = placement
        self._late = len(late)
        self._without_ids = known[0].without_ids if known else False if late else None
        self._dropped, self._dropped_edges = dropped

    def add_late(self, columns: Mapping[str, NDArray[np.int64]], bags: Sequence[LateBag], tokens: Sequence[object]) -> None:
        """Puts bags that waited in other packers at the end of the pool, in this order; their content comes once they are placed.

        Args:
            columns: `bag_items`, `item_length`, `demand` and `bag_demand` of a packer's state, of these bags alone.

        Raises:
            ValueError: the columns do not belong together.
        """
        for pending in waiting_bags(columns, list(zip(tokens, bags, strict=True))):
            if self._placement.add(pending):
                self._late += 1
                self._without_ids = False
            else:
                self._dropped += len(pending.lengths)
