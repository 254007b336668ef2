"""One step's items in columns: modalities, contents, and how the items relate.

Everything that does not depend on a batch's shape is checked where it is built; `StepItems.check` checks the rest
before use. Every refusal is a `ValueError` that names the column, the item, the value and the rule.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.pipeline.columns import (
    Content,
    Tape,
    byte_tape,
    content_list,
    float_column,
    float_tape,
    group_column,
    integer_column,
    item_column,
    members,
    sized,
    temperature_group_column,
)
from treadle.shape import BatchShape, LateInteractionSide, Modality, require_count, require_member

TARGET_SUM_TOLERANCE = 1e-3
"""How far an item's choice targets may sum from one."""

_EMPTY_INT64 = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Edges:
    """One edge set over a step's items, as compressed sparse rows; empty offsets name no edges."""

    offsets: NDArray[np.int64]
    """One more than the step's items, non-decreasing: where each item's run begins in `ids`."""
    ids: NDArray[np.integer[Any]]
    """Item `i` links to items `ids[offsets[i]:offsets[i + 1]]`, ascending within the run; uint32."""
    weights: NDArray[np.float32]
    """Weight of each edge; empty weighs every edge one, zero names a pair without scoring it."""

    def __init__(self, offsets: ArrayLike = (), ids: ArrayLike = (), weights: ArrayLike = ()) -> None:
        put = object.__setattr__
        put(self, "offsets", integer_column("Edges.offsets", offsets, np.int64))
        put(self, "weights", float_column("Edges.weights", weights))
        if isinstance(ids, np.ndarray) and ids.dtype == np.uint32 and ids.ndim == 1:
            put(self, "ids", ids)
            return
        wide = integer_column("Edges.ids", ids, np.int64)
        # An id outside uint32 stays as it came, so that `check` can say whose it is.
        narrow = not wide.size or (int(wide.min()) >= 0 and int(wide.max()) < 2**32)
        put(self, "ids", wide.astype(np.uint32) if narrow else wide)

    def __len__(self) -> int:
        """Edges of the set."""
        return len(self.ids)

    def __repr__(self) -> str:
        weighed = ", weighed" if len(self.weights) else ""
        return f"Edges({len(self.ids)} edges over {max(0, len(self.offsets) - 1)} items{weighed})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Edges):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("offsets", "ids", "weights"))

    def __hash__(self) -> int:
        raise TypeError("Edges hold arrays: they are compared by content and are not hashable")

    def sources(self) -> NDArray[np.int64]:
        """The item that each edge starts from."""
        if not len(self.offsets):
            return _EMPTY_INT64
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets))

    def weights_or_ones(self) -> NDArray[np.float32]:
        """The weight of each edge, written out."""
        return self.weights if len(self.weights) else np.ones(len(self.ids), np.float32)

    def check(self, num_items: int, name: str) -> None:
        """Checks this set against a step's item count; `name` is the edge set in messages.

        Raises:
            ValueError: the rows are malformed, or an edge is out of range, out of order, to itself or badly weighed.
        """
        if type(num_items) is not int or num_items < 0:
            num_items = require_count(name, "num_items", num_items, 0, 2**63 - 1)
        offsets, ids, weights = self.offsets, self.ids, self.weights
        if not len(offsets):
            if len(ids) or len(weights):
                raise ValueError(f"{name}: {len(ids)} ids and {len(weights)} weights but no offsets; give {num_items + 1} offsets")
            return
        if len(offsets) != num_items + 1:
            raise ValueError(f"{name}: {len(offsets)} offsets for {num_items} items: there must be {num_items + 1}, or none at all")
        if offsets[0] != 0:
            raise ValueError(f"{name}: offsets[0] is {offsets[0]} (item 0): it must be 0")
        falls = np.flatnonzero(np.diff(offsets) < 0)
        if len(falls):
            item = int(falls[0])
            raise ValueError(f"{name}: offsets fall from {offsets[item]} to {offsets[item + 1]} at item {item}: they must never decrease")
        if offsets[-1] != len(ids):
            raise ValueError(
                f"{name}: offsets end at {offsets[-1]} (item {num_items - 1}) but there are {len(ids)} ids: the last offset must count the ids"
            )
        if len(weights) not in (0, len(ids)):
            raise ValueError(f"{name}: {len(weights)} weights for {len(ids)} ids: give one per edge, or none to weigh every edge one")
        if not len(ids):
            return
        sources = self.sources()
        wide = ids.astype(np.int64)
        self._refuse(name, (wide < 0) | (wide >= num_items), sources, f"it must be an item's index, 0 to {num_items - 1}")
        self._refuse(name, wide == sources, sources, "no item may link to itself")
        unordered = np.zeros(len(ids), bool)
        unordered[1:] = (np.diff(wide) <= 0) & (np.diff(sources) == 0)
        self._refuse(name, unordered, sources, "ids must ascend strictly within an item's run")
        if len(weights):
            bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
            if len(bad):
                edge = int(bad[0])
                raise ValueError(
                    f"{name}: item {sources[edge]} links to {wide[edge]} with weight {weights[edge]}: it must be finite and not negative"
                )

    def _refuse(self, name: str, bad: NDArray[np.bool_], sources: NDArray[np.int64], rule: str) -> None:
        if bad.any():
            edge = int(bad.argmax())
            raise ValueError(f"{name}: item {sources[edge]} links to {self.ids[edge]} (edge {edge}): {rule}")


@dataclass(frozen=True, slots=True)
class Relations:
    """The contrastive targets of one step: a pair `ignore` names is skipped, else `attract` pulls, else `repel` pushes.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    attract: Edges = field(default_factory=Edges)
    """Pairs pulled together."""
    repel: Edges = field(default_factory=Edges)
    """Pairs pushed apart."""
    ignore: Edges = field(default_factory=Edges)
    """Pairs skipped, like known false negatives; their weights are not read."""

    def __post_init__(self) -> None:
        for name, edges in self.named():
            if not isinstance(cast(object, edges), Edges):
                raise ValueError(f"Relations.{name} is {edges!r}: it must be an Edges")

    def named(self) -> tuple[tuple[str, Edges], tuple[str, Edges], tuple[str, Edges]]:
        """The edge sets with their names, in their fixed order."""
        return ("attract", self.attract), ("repel", self.repel), ("ignore", self.ignore)

    def check(self, num_items: int) -> None:
        """Checks all three edge sets against a step's item count.

        Raises:
            ValueError: as `Edges.check`.
        """
        for name, edges in self.named():
            edges.check(num_items, name)


NO_RELATIONS = Relations()
"""No pair is named."""


class AllPairs(Edges):
    """Every item linked to every other: in order as it is made, so that a step's check of it is one of the count."""

    __slots__ = ()

    def __init__(self, num_items: int) -> None:
        """Takes how many items there are, from two on."""
        ids = np.tile(np.arange(num_items, dtype=np.uint32), (num_items, 1))[~np.eye(num_items, dtype=bool)]
        super().__init__(np.arange(num_items + 1) * (num_items - 1), ids)
        for column in (self.offsets, self.ids, self.weights):
            column.setflags(write=False)

    def check(self, num_items: int, name: str) -> None:
        """As `Edges.check`."""
        if len(self.offsets) != num_items + 1:
            super().check(num_items, name)


@lru_cache(maxsize=64)
def all_attract(num_items: int) -> Relations:
    """Every item attracts every other. Shared between samples: building it costs more than the rest of a bag."""
    return Relations(AllPairs(num_items)) if num_items > 1 else NO_RELATIONS


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class StepItems:
    """One step's items in columns, in the order given; no items at all is legal."""

    modalities: NDArray[np.uint8]
    """What the bytes of each item hold."""
    contents: list[Content] | Tape[np.uint8]
    """The bytes of each item: a list of them, or a tape."""
    bags: NDArray[np.int64] | None
    """Items with equal numbers land in one batch together; None makes every item its own bag."""
    temperature_groups: NDArray[np.int32] | None
    """The learnable temperature that each item scores with as an anchor; None: 0."""
    sides: NDArray[np.uint8] | None
    """Each item's role in late interaction; None: none."""
    groups: NDArray[np.int64] | None
    """64-bit ids of things that are the same, 0: none; equal ones never repel unless an edge names the pair."""
    ids: NDArray[np.uint64] | None
    """Global item ids that key every random draw; None: the item's index."""
    choices: Tape[np.uint8] | None
    """Legal bytes of each text item that makes a choice; an empty run makes none."""
    choice_targets: Tape[np.float32] | None
    """Target probability of each legal byte."""
    relations: Relations
    """Which pairs attract, repel or are ignored."""

    def __init__(
        self,
        modalities: Iterable[object],
        contents: Sequence[Content | NDArray[np.uint8]] | tuple[Content | NDArray[np.uint8] | Sequence[int], ArrayLike],
        bags: ArrayLike | None = None,
        temperature_groups: ArrayLike | None = None,
        sides: Iterable[object] | None = None,
        groups: ArrayLike | None = None,
        ids: ArrayLike | None = None,
        choices: Sequence[Content | None] | tuple[Content | NDArray[np.uint8] | Sequence[int], ArrayLike] | None = None,
        choice_targets: Sequence[ArrayLike | None] | tuple[ArrayLike, ArrayLike] | None = None,
        relations: Relations | None = None,
    ) -> None:
        """
        Raises:
            ValueError: a column is of another type, of another length, or breaks its rule; the message names it and the item.
        """
        kinds = members("modalities", modalities, Modality)
        count = len(kinds)
        put = object.__setattr__
        put(self, "modalities", kinds)
        put(self, "contents", content_list(contents, count))
        put(self, "bags", None if bags is None else item_column("bags", bags, np.int64, count))
        put(self, "temperature_groups", None if temperature_groups is None else temperature_group_column(temperature_groups, count))
        put(self, "sides", None if sides is None else sized("sides", members("sides", sides, LateInteractionSide), count))
        put(self, "groups", None if groups is None else group_column(groups, count))
        put(self, "ids", None if ids is None else item_column("ids", ids, np.uint64, count))
        put(self, "choices", None if choices is None else byte_tape("choices", choices, count))
        put(self, "choice_targets", None if choice_targets is None else float_tape("choice_targets", choice_targets, count))
        put(self, "relations", NO_RELATIONS if relations is None else relations)
        if not isinstance(cast(object, self.relations), Relations):
            raise ValueError(f"relations is {self.relations!r}: it must be a Relations")
        if (self.choices is None) != (self.choice_targets is None):
            given, absent = ("choice_targets", "choices") if self.choices is None else ("choices", "choice_targets")
            raise ValueError(f"{given} are given without {absent}: give both, with entries of equal length")
        if self.choices is not None and self.choice_targets is not None:
            check_choices(self.modalities, self.choices, self.choice_targets)
        if self.relations is not NO_RELATIONS:
            self.relations.check(count)

    def __len__(self) -> int:
        """Items of the step."""
        return len(self.modalities)

    def __repr__(self) -> str:
        parts = [f"{int((self.modalities == kind).sum())} {kind}" for kind in Modality if (self.modalities == kind).any()]
        given = [name for name in ("bags", "temperature_groups", "sides", "groups", "ids", "choices") if getattr(self, name) is not None]
        edges = [f"{len(found)} {name}" for name, found in self.relations.named() if len(found)]
        return f"StepItems({len(self)} items: {', '.join([*parts, *given, *edges]) or 'none'})"

    def content(self, item: int) -> Content:
        """The bytes of one item, not copied.

        Raises:
            ValueError: `item` is no item's index.
        """
        if type(item) is not int or not 0 <= item < len(self.modalities):
            item = require_count("StepItems.content", "item", item, 0, len(self.modalities) - 1)
        if isinstance(self.contents, Tape):
            data, offsets = self.contents
            return data.data[int(offsets[item]) : int(offsets[item + 1])]
        return self.contents[item]

    def check(self, shape: BatchShape, num_temperature_groups: int | None = None) -> None:
        """Checks what depends on the batch and the run.

        Raises:
            ValueError: an item's modality has no live slice, offers more choices than the shape holds, or has a
                temperature group that the run does not; or `shape` is no `BatchShape`.
        """
        require_member("StepItems.check", "shape", shape, BatchShape)
        if num_temperature_groups is not None:
            num_temperature_groups = require_count("StepItems.check", "num_temperature_groups", num_temperature_groups)
        for number in sorted(set(self.modalities.tolist())):
            kind = Modality(number)
            if not shape.is_live(kind):
                item = int((self.modalities == number).argmax())
                raise ValueError(
                    f"modalities: item {item} is {kind}, which this batch shape leaves out: make its slice live "
                    f"(BatchShape.{kind}) or leave the item out"
                )
        if self.choices is not None and len(self.choices.data):
            lengths = np.diff(self.choices.offsets)
            most = int(lengths.argmax())
            if lengths[most] > shape.max_choices_per_item:
                raise ValueError(
                    f"choices: item {most} offers {lengths[most]} bytes: BatchShape.max_choices_per_item allows {shape.max_choices_per_item}"
                )
        if num_temperature_groups is not None and self.temperature_groups is not None and len(self):
            most = int(self.temperature_groups.argmax())
            if self.temperature_groups[most] >= num_temperature_groups:
                raise ValueError(
                    f"temperature_groups: item {most} has group {self.temperature_groups[most]}: there are {num_temperature_groups}, "
                    f"0 to {num_temperature_groups - 1}"
                )


def check_choices(modalities: NDArray[np.uint8], choices: Tape[np.uint8], choice_targets: Tape[np.float32]) -> None:
    """Checks every item's legal bytes and their targets.

    Raises:
        ValueError: an item that makes a choice is no text, or its bytes and targets break a rule.
    """
    data, offsets = choices
    targets, target_offsets = choice_targets
    lengths, target_lengths = np.diff(offsets), np.diff(target_offsets)
    for item in np.flatnonzero((lengths > 0) | (target_lengths > 0)).tolist():
        if lengths[item] != target_lengths[item]:
            raise ValueError(
                f"choice_targets: item {item} has {target_lengths[item]} targets for {lengths[item]} choices: they must be equal"
            )
        if modalities[item] != Modality.TEXT:
            raise ValueError(f"choices: item {item} is {Modality(int(modalities[item]))}: only text items offer choices")
        legal = data[offsets[item] : offsets[item + 1]]
        if len(np.unique(legal)) != len(legal):
            raise ValueError(f"choices: item {item} offers {bytes(legal)!r}: its bytes must be distinct")
        wanted = targets[target_offsets[item] : target_offsets[item + 1]]
        if not (np.isfinite(wanted).all() and (wanted >= 0).all()):
            raise ValueError(f"choice_targets: item {item} has {wanted.tolist()}: every target must be finite and not negative")
        total = float(wanted.sum(dtype=np.float64))
        if abs(total - 1.0) > TARGET_SUM_TOLERANCE:
            raise ValueError(f"choice_targets: item {item} sums to {total:.6g}: targets must sum to one within {TARGET_SUM_TOLERANCE}")
