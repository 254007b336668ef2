"""A bag that waits to be placed, in integers, and the capacities that it must fit."""

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

from treadle.pipeline.bag import TextRun
from treadle.pipeline.layout import Capacities

FIELD_BITS = 48
_LARGEST_DEMAND = 2 ** (FIELD_BITS - 2)

_ALONE = (0,)

NUM_FIELDS = 8
"""Bags, segments, attract, repel and ignore edges, query tokens, documents, document tokens."""


SINGLE_DEMAND = 1 | 1 << FIELD_BITS
"""What one item alone takes: a bag, a segment, nothing else."""


def pack_demand(values: Sequence[int]) -> int:
    """One integer of 48-bit fields, so that one subtraction checks every dimension at once (see `Limits`)."""
    packed = 0
    for value in reversed(values):
        packed = packed << FIELD_BITS | (value if value < _LARGEST_DEMAND else _LARGEST_DEMAND)
    return packed


def unpack_demand(packed: int) -> list[int]:
    """The values that `pack_demand` packed, zeros after them."""
    return [packed >> (FIELD_BITS * field) & ((1 << FIELD_BITS) - 1) for field in range(NUM_FIELDS)]


class Limits:
    """Capacities other than positions, as fields of one integer with a guard bit above each.

    What is left of `room` after subtracting a demand still has every guard bit unless some capacity would be passed:
    `(room - demand) & guards == guards`.
    """

    __slots__ = ("_values", "guards", "room")

    def __init__(self, capacities: Capacities) -> None:
        values = [capacities.bags, capacities.segments, capacities.edges, capacities.edges, capacities.edges]
        if capacities.late_interaction:
            values += [capacities.query_tokens, capacities.documents, capacities.document_tokens]
        self._values = values
        self.guards = sum(1 << (FIELD_BITS * field + FIELD_BITS - 1) for field in range(len(values)))
        self.room = self.guards | pack_demand(values)
        """An empty batch."""

    def singles(self, room: int) -> int:
        """How many of `SINGLE_DEMAND` some room holds, with or without its guards."""
        most = 2 * _LARGEST_DEMAND - 1
        singles: int = min(room & most, room >> FIELD_BITS & most)
        return singles

    def times(self, count: int) -> int:
        """The demand of `count` full batches."""
        return pack_demand([value * count for value in self._values])


class Group:
    """Bags that are known to fit one batch together, and by when they must be gone."""

    __slots__ = ("left", "number", "opened")

    def __init__(self, number: int, opened: int) -> None:
        self.number = number
        self.opened = opened
        """Batches taken when its first bag arrived."""
        self.left = 0
        """Bags of it that wait."""


class PendingBag:
    """A bag that waits: what it takes, and where its witness places it."""

    __slots__ = ("arrival", "content", "demand", "group", "lengths", "longest", "order", "positions", "rows", "serial", "squares", "taken")

    order: Sequence[int]
    """The bag's item of each length."""
    lengths: Sequence[int]
    """Positions of each item, descending."""
    group: Group
    """Set when it is added, like the fields below."""
    rows: list[int]
    """Witness row of each length."""
    content: Any
    """What it stands for."""
    arrival: int
    """Batches taken when it arrived."""
    serial: int
    """Place in the order of arrival."""

    def __init__(self, lengths: Sequence[int], demand: int, content: Any = None) -> None:
        """Takes the positions of each item, at least one, what the bag takes of the other capacities (`pack_demand`), and what it stands for."""
        if len(lengths) == 1:
            self.order = _ALONE
            self.lengths = lengths
            self.positions = self.longest = longest = lengths[0]
            self.squares = longest * longest
        else:
            self.order = order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
            self.lengths = lengths = [lengths[place] for place in order]
            self.longest = lengths[0] if lengths else 0
            self.positions = sum(lengths)
            self.squares = sum(map(mul, lengths, lengths))
        self.demand = demand
        self.content = content
        self.taken = False
        """Whether it is in a batch."""

    def rows_by_item(self, rows: Sequence[int]) -> list[int]:
        """`rows` of the lengths, reordered to the bag's items."""
        if len(rows) == 1:
            return list(rows)
        by_item = [0] * len(rows)
        for place, row in zip(self.order, rows, strict=True):
            by_item[place] = row
        return by_item

    def release(self) -> None:
        """Lets go of the content: states that are not built yet know the bag still, by its token."""
        self.content = self.content[0], None


class PendingText(PendingBag):
    """A text alone; what is not asked for is not made."""

    __slots__ = ("place", "run")

    demand = SINGLE_DEMAND
    order = _ALONE

    def __init__(self, run: TextRun, place: int) -> None:
        self.run = run
        self.place = place
        self.positions = self.longest = longest = run.lengths[place]
        self.squares = longest * longest
        self.taken = False

    # Properties over the attributes of a bag: readers see no difference, and nobody writes them.
    if not TYPE_CHECKING:

        @property
        def lengths(self):
            return (self.longest,)

        @property
        def content(self):
            run = self.run
            return run.token(self.place), run.bag(self.place) if run.texts else None

    def release(self) -> None:
        """As for every bag."""
        self.run = self.run.bare


Placed = tuple[PendingBag, list[int]]
"""A bag and the row of each of its lengths, in the order of `PendingBag.lengths`."""
