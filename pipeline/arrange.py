"""One batch being arranged: bags into rows by best fit decreasing, holes filled, small bags exchanged for larger ones."""

from bisect import bisect_right
from collections.abc import Sequence

from treadle.pipeline.pending import Limits, PendingBag, Placed
from treadle.pipeline.rows import RowSet

HOLE_TRIES = 64
"""Failed placements in a row that end the filling of holes."""

EXCHANGE_FROM_PERMILLE = 4
"""Share of empty positions from which bags are exchanged: fuller batches gain nothing."""

EXCHANGE_TRIES = 8
"""Waiting bags that are tried in the place of one."""


class Arrangement:
    """The rows, the room in every capacity, and the bags placed so far."""

    __slots__ = ("_guards", "_room", "placed", "rows")

    def __init__(self, num_rows: int, columns: int, limits: Limits) -> None:
        self.rows = RowSet([columns] * num_rows, columns)
        self.placed: list[Placed] = []
        self._guards, self._room = limits.guards, limits.room

    @property
    def free(self) -> int:
        """Positions that are not taken."""
        return sum(self.rows.free)

    def add(self, bag: PendingBag) -> bool:
        """Places a bag by best fit, longest item first; False, and nothing changed, where it does not fit."""
        room = self._room - bag.demand
        found = self.rows.place(bag.lengths) if room & self._guards == self._guards else None
        if found is None:
            return False
        self._room = room
        self.placed.append((bag, found))
        return True

    def put(self, bag: PendingBag, rows: list[int]) -> None:
        """Places a bag in rows that are known to take it."""
        for row, length in zip(rows, bag.lengths, strict=True):
            self.rows.occupy(row, length)
        self._room -= bag.demand
        self.placed.append((bag, rows))

    def add_decreasing(self, bags: Sequence[PendingBag], first: int | None = None) -> list[PendingBag]:
        """Places the items of all bags together, longest first (those of group `first` before all); the bags of which one failed.

        The bags must fit the capacities together.
        """
        count, columns = len(bags), self.rows.columns
        # One integer per item: longest first, then in arrival order.
        keys = [(columns - length) * count + place for place, bag in enumerate(bags) for length in bag.lengths]
        keys.sort(key=None if first is None else lambda key: (bags[key % count].group != first, key))
        rows_of: list[list[int]] = [[] for _ in bags]
        failed = self.rows.place_each([columns - key // count for key in keys], [key % count for key in keys], rows_of)
        for place, bag in enumerate(bags):
            if place in failed:
                for row, length in zip(rows_of[place], bag.lengths, strict=False):
                    self.rows.release(row, length)
            else:
                self._room -= bag.demand
                self.placed.append((bag, rows_of[place]))
        return [bags[place] for place in sorted(failed)]

    def fill_holes(self, waiting: list[PendingBag]) -> None:
        """Adds the largest bags that fit what is left, until several in a row do not; takes them out of `waiting`, which ascends."""
        free, tries, rows = self.free, HOLE_TRIES, self.rows
        if not free or not waiting:
            return
        sizes = [bag.positions for bag in waiting]
        taken: list[int] = []
        place = bisect_right(sizes, free) - 1
        while place >= 0 and tries and free:
            if sizes[place] > free:
                place = bisect_right(sizes, free, 0, place) - 1
                continue
            bag = waiting[place]
            if bag.lengths[0] <= rows.largest_free:
                if self.add(bag):
                    taken.append(place)
                    free -= bag.positions
                    tries = HOLE_TRIES
                else:
                    tries -= 1
            place -= 1
        for place in taken:
            del waiting[place]

    def exchange(self, waiting: list[PendingBag], kept: int | None) -> None:
        """Exchanges bags for larger ones of `waiting`, which ascends, where the room beside them allows it; group `kept` stays."""
        rows, free_of, guards = self.rows, self.rows.free, self._guards
        if self.free * 1000 <= len(free_of) * rows.columns * EXCHANGE_FROM_PERMILLE:
            return
        sizes = [bag.positions for bag in waiting]
        placed = self.placed
        for at in sorted(range(len(placed)), key=lambda at: -max(free_of[row] for row in placed[at][1])):
            bag, bag_rows = placed[at]
            beside = free_of[bag_rows[0]] if len(bag_rows) == 1 else sum(free_of[row] for row in set(bag_rows))
            last = bisect_right(sizes, bag.positions + beside) - 1
            if bag.group == kept or last < 0 or sizes[last] <= bag.positions:
                continue
            for row, length in zip(bag_rows, bag.lengths, strict=True):
                rows.release(row, length)
            found, largest = None, rows.largest_free
            for place in range(last, max(-1, last - EXCHANGE_TRIES), -1):
                other = waiting[place]
                if other.positions <= bag.positions:
                    break
                room = self._room + bag.demand - other.demand
                if other.lengths[0] > largest or room & guards != guards:
                    continue
                found = rows.place(other.lengths)
                if found is not None:
                    placed[at], self._room = (other, found), room
                    del waiting[place], sizes[place]
                    into = bisect_right(sizes, bag.positions)
                    waiting.insert(into, bag)
                    sizes.insert(into, bag.positions)
                    break
            if found is None:
                for row, length in zip(bag_rows, bag.lengths, strict=True):
                    rows.occupy(row, length)
