"""One bag, decoded: payloads, the positions they take, and relations by place in the bag."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode
from treadle.decoders.errors import DecodeErrorKind
from treadle.pipeline.identity import as_group, item_ids, mixed
from treadle.pipeline.items import AllPairs, Edges, Relations, StepItems
from treadle.shape import BatchShape, Modality

OnError = Literal["raise", "drop"]


class ItemDecodeError(DecodeError):
    """A `DecodeError` that knows which of a step's items it is about."""

    def __init__(self, kind: DecodeErrorKind, detail: str, index: int = -1) -> None:
        super().__init__(kind, detail)
        self.index = index
        """The item's place among the step's items."""


class EdgeColumns(NamedTuple):
    """Edges written out: one entry per edge, ascending by (source, target)."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]

    @classmethod
    def of(cls, edges: Edges) -> "EdgeColumns":
        """The edges of a set in compressed sparse rows."""
        if not len(edges):
            return NO_EDGES
        if isinstance(edges, AllPairs):
            return shared_columns(len(edges.offsets) - 1)
        return cls(edges.sources(), edges.ids.astype(np.int64), edges.weights_or_ones())

    def remapped(self, place_of: NDArray[np.int64]) -> "EdgeColumns":
        """These edges between new places; an edge with an end at place -1 is gone."""
        sources, targets = place_of[self.sources], place_of[self.targets]
        kept = (sources >= 0) & (targets >= 0)
        sources, targets, weights = sources[kept], targets[kept], self.weights[kept]
        order = np.lexsort((targets, sources))
        return EdgeColumns(sources[order], targets[order], weights[order])


class SharedColumns(EdgeColumns):
    """The columns of `AllPairs`, which go to another process as the number of items."""

    __slots__ = ()

    def __reduce__(self) -> "tuple[Callable[[int], EdgeColumns], tuple[int]]":
        return shared_columns, (int(self.sources[-1]) + 1,)


@lru_cache(maxsize=64)
def shared_columns(num_items: int) -> EdgeColumns:
    """The columns of `AllPairs`: one object for all bags of so many items."""
    pairs = AllPairs(num_items)
    return SharedColumns(pairs.sources(), pairs.ids.astype(np.int64), pairs.weights_or_ones())


NO_EDGES = EdgeColumns(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
NO_RELATIONS = (NO_EDGES, NO_EDGES, NO_EDGES)

RelationColumns = tuple[EdgeColumns, EdgeColumns, EdgeColumns]
"""attract, repel, ignore."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodedBag:
    """Items that land in one batch together, decoded. Every list has one entry per item that decoded."""

    modalities: list[int]
    payloads: list[Payload]
    lengths: Sequence[int]
    """Positions: the prefix, the tokens, and the mask position where the item offers choices."""
    items: list[int]
    """Each item's number in the step, or in its sample."""
    ids: list[int] | None
    """Global item ids; None: the item's index in its batch."""
    groups: list[int]
    temperature_groups: list[int]
    sides: list[int]
    choices: list[bytes]
    """Legal bytes, empty where the item makes no choice."""
    choice_targets: list[NDArray[np.float32]]
    relations: RelationColumns = NO_RELATIONS
    """Edges between places in this bag."""
    dropped: int = 0
    """Items that did not decode."""
    dropped_edges: int = 0
    """Edges to and from them."""
    made_for: BatchShape | None = None
    """The shape whose slices and choices it suits, where a user named one; None: its maker saw to that."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def without_ids(self) -> bool:
        """Whether its items go by their index in the batch."""
        return self.ids is None

    def tokens(self, place: int) -> int:
        """Tokens of one item: its positions less the prefix and the mask."""
        return self.lengths[place] - 1 - (1 if self.choices[place] else 0)


_NO_TARGETS = np.zeros(0, np.float32)


class TextForm(NamedTuple):
    """How texts of one set of field names are labelled: columns that all such samples share."""

    modalities: list[int]
    items: list[int]
    temperature_groups: list[int]
    sides: list[int]
    choices: list[bytes]
    choice_targets: list[NDArray[np.float32]]
    relations: RelationColumns


class TextBag(DecodedBag):
    """The texts of one sample, as bytes. What else a bag has is made when asked for: a packer that knows asks for all bags at once."""

    __slots__ = ("cuts", "form", "seed", "texts")

    def __init__(self, form: TextForm, texts: tuple[bytes, ...], lengths: tuple[int, ...], seed: int) -> None:
        """Takes tuples, which the garbage collector leaves alone; `seed` is what the sample's id is mixed from."""
        self.texts = texts
        self.lengths = lengths
        self.seed = seed
        self.form = form
        self.cuts: Sequence[bool] = ()
        """Which texts are cut at the row's width; empty: none is."""

    # Properties over the dataclass's attributes: readers see no difference, and nobody writes them.
    if not TYPE_CHECKING:
        dropped = dropped_edges = property(lambda _: 0)
        made_for = property(lambda _: None)
        modalities, items, temperature_groups, sides, choices, choice_targets, relations = [
            property(attrgetter(f"form.{name}")) for name in TextForm._fields
        ]

        @property
        def payloads(self):
            cuts = self.cuts or [False] * len(self.texts)
            return [
                Payload(np.frombuffer(text, np.uint8), (len(text), 1, 1), (1, 1, len(text)), cut)
                for text, cut in zip(self.texts, cuts, strict=True)
            ]

        @property
        def ids(self):
            return item_ids(mixed(self.seed), len(self.texts))

        @property
        def groups(self):
            return [as_group(mixed(self.seed))] * len(self.texts)

    @property
    def without_ids(self) -> bool:
        """Never."""
        return False


class TextRun:
    """Texts, each a sample of its own, in columns: an object for each would cost more than all that is done with it."""

    __slots__ = ("bare", "forms", "lengths", "seeds", "texts", "token")

    def __init__(self, forms: Sequence[TextForm], texts: Sequence[bytes], seeds: Sequence[int], token: Callable[[int], object]) -> None:
        """Takes each text's form, what its id is mixed from, and what answers the caller's token of each, by its place."""
        self.forms = forms
        self.texts = texts
        self.lengths = [len(text) + 1 for text in texts]
        self.seeds = seeds
        self.token = token
        self.bare: TextRun = TextRun((), (), (), token) if texts else self
        """The same without the texts, for those who still know one by its token."""

    def bag(self, place: int) -> TextBag:
        """One of them as a bag."""
        return TextBag(self.forms[place], (self.texts[place],), (self.lengths[place],), self.seeds[place])


class LateBag:
    """A bag that waited when a state was taken: where it goes is known, and its content comes once it is placed."""

    __slots__ = ("_begin", "_begun")

    def __init__(self, begin: Callable[[], Callable[[], DecodedBag | None]]) -> None:
        """`begin` starts reading it and answers what waits for it: the bag, None where it cannot be had any more."""
        self._begin = begin
        self._begun: Callable[[], DecodedBag | None] | None = None

    @property
    def begun(self) -> bool:
        """Whether reading it has started."""
        return self._begun is not None

    def begin(self) -> None:
        """Starts reading it, once."""
        if self._begun is None:
            self._begun = self._begin()

    def content(self) -> DecodedBag | None:
        """The bag, once it is there."""
        self.begin()
        assert self._begun is not None
        return self._begun()


def relation_columns(relations: Relations) -> RelationColumns:
    """All three edge sets written out."""
    if not (len(relations.attract) or len(relations.repel) or len(relations.ignore)):
        return NO_RELATIONS
    return EdgeColumns.of(relations.attract), EdgeColumns.of(relations.repel), EdgeColumns.of(relations.ignore)


def item_choices(items: StepItems, item: int) -> tuple[bytes, NDArray[np.float32]]:
    """One item's legal bytes and their targets; both empty where it makes no choice."""
    if items.choices is None or items.choice_targets is None:
        return b"", _NO_TARGETS
    data, offsets = items.choices
    targets, target_offsets = items.choice_targets
    legal = data[int(offsets[item]) : int(offsets[item + 1])].tobytes()
    return legal, targets[int(target_offsets[item]) : int(target_offsets[item + 1])]


def decode_items(
    items: StepItems,
    shape: BatchShape,
    options: DecodeOptions,
    *,
    on_error: OnError = "raise",
    on_drop: Callable[[int, DecodeError], None] | None = None,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> list[Payload | None]:
    """Every item's payload, None for one that does not decode under `on_error="drop"`; each is decoded within `around(its number)`.

    Raises:
        ValueError: an item does not suit the shape, as `StepItems.check`.
        DecodeError: an item does not decode and `on_error` is "raise" (an `ItemDecodeError`: its `index` says which).
    """
    if on_error not in ("raise", "drop"):
        raise ValueError(f'on_error is {on_error!r}: it must be "raise" or "drop"')
    items.check(shape)
    offers = None if items.choices is None else np.diff(items.choices.offsets).tolist()
    payloads: list[Payload | None] = []
    for item, kind in enumerate(items.modalities.tolist()):
        try:
            cut: Literal["head", "tail"] = "head" if offers is not None and offers[item] else "tail"
            with around(item):
                payloads.append(decode(Modality(kind), items.content(item), shape, options, cut))
        except DecodeError as error:
            if on_error == "raise":
                raise ItemDecodeError(error.kind, f"item {item}: {error.detail}", item) from error
            if on_drop is not None:
                on_drop(item, error)
            payloads.append(None)
    return payloads


def assemble_bag(items: StepItems, payloads: Sequence[Payload | None], members: Sequence[int] | None = None) -> DecodedBag:
    """The bag of the items whose payload is there; `members` picks some of the step's items and leaves relations out."""
    chosen = range(len(items)) if members is None else members
    kept = [item for item in chosen if payloads[item] is not None]
    found: list[Payload] = [payload for item in kept if (payload := payloads[item]) is not None]
    legal: list[bytes] = [b""] * len(kept)
    targets: list[NDArray[np.float32]] = [_NO_TARGETS] * len(kept)
    if items.choices is not None and len(items.choices.data):
        for place, item in enumerate(kept):
            legal[place], targets[place] = item_choices(items, item)
    lengths: list[int] = []
    for payload, entry in zip(found, legal, strict=True):
        frames, high, wide = payload.grid
        lengths.append(1 + frames * high * wide + (1 if entry else 0))
    relations, lost = NO_RELATIONS, 0
    if members is None:
        relations = relation_columns(items.relations)
        if len(kept) < len(items) and relations is not NO_RELATIONS:
            place_of = np.full(len(items), -1, np.int64)
            place_of[kept] = np.arange(len(kept))
            before = sum(len(edges.sources) for edges in relations)
            attract, repel, ignore = relations
            relations = attract.remapped(place_of), repel.remapped(place_of), ignore.remapped(place_of)
            lost = before - sum(len(edges.sources) for edges in relations)
    return DecodedBag(
        modalities=_picked(items.modalities, kept),
        payloads=found,
        lengths=lengths,
        items=kept,
        ids=None if items.ids is None else _picked(items.ids, kept),
        groups=_picked(items.groups, kept),
        temperature_groups=_picked(items.temperature_groups, kept),
        sides=_picked(items.sides, kept),
        choices=legal,
        choice_targets=targets,
        relations=relations,
        dropped=len(chosen) - len(kept),
        dropped_edges=lost,
    )


def _picked(column: NDArray[np.integer[Any]] | None, kept: list[int]) -> list[int]:
    if column is None:
        return [0] * len(kept)
    values: list[int] = column.tolist()
    return values if len(values) == len(kept) else [values[item] for item in kept]


def decode_bag(
    items: StepItems,
    shape: BatchShape,
    options: DecodeOptions | None = None,
    *,
    on_error: OnError = "raise",
    on_drop: Callable[[int, DecodeError], None] | None = None,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> DecodedBag:
    """Decodes one bag: all of `items`, whatever their `bags` column says; each within `around(its number)`.

    Raises:
        ValueError: an item does not suit the shape.
        DecodeError: an item does not decode and `on_error` is "raise" (an `ItemDecodeError`: its `index` says which).
    """
    payloads = decode_items(items, shape, options or DecodeOptions(), on_error=on_error, on_drop=on_drop, around=around)
    return assemble_bag(items, payloads)
