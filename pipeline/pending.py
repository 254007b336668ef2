"""A bag that waits to be placed, in integers, and the capacities that it must fit."""

from collections.abc import Sequence

from treadle.pipeline.layout import Capacities

FIELD_BITS = 48
_LARGEST_DEMAND = 2 ** (FIELD_BITS - 2)

NUM_FIELDS = 8
"""Bags, segments, attract, repel and ignore edges, query tokens, documents, document tokens."""


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

    def times(self, count: int) -> int:
        """The demand of `count` full batches."""
        return pack_demand([value * count for value in self._values])


class PendingBag:
    """A bag that waits: what it takes, and where its witness places it."""

    __slots__ = ("arrival", "demand", "group", "lengths", "order", "positions", "rows", "serial", "squares")

    def __init__(self, lengths: Sequence[int], demand: int) -> None:
        if len(lengths) == 1:
            self.order: Sequence[int] = (0,)
            self.lengths: Sequence[int] = lengths
            self.positions = lengths[0]
            self.squares = lengths[0] * lengths[0]
        else:
            self.order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
            """The bag's item of each length."""
            self.lengths = [lengths[place] for place in self.order]
            """Positions of each item, descending."""
            self.positions = sum(lengths)
            self.squares = sum(length * length for length in lengths)
        self.demand = demand
        """Bags (one), segments, attract, repel and ignore edges, then late interaction's dimensions."""
        self.group = 0
        self.rows: list[int] = []
        """Witness row of each length."""
        self.arrival = 0
        """Batches taken when it arrived."""
        self.serial = 0
        """Place in the order of arrival."""

    def rows_by_item(self, rows: Sequence[int]) -> list[int]:
        """`rows` of the lengths, reordered to the bag's items."""
        if len(rows) == 1:
            return list(rows)
        by_item = [0] * len(rows)
        for place, row in zip(self.order, rows, strict=True):
            by_item[place] = row
        return by_item


Placed = tuple[PendingBag, list[int]]
"""A bag and the row of each of its lengths, in the order of `PendingBag.lengths`."""
