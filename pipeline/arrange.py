"""One batch being arranged: bags into rows by best fit decreasing, holes filled, small bags exchanged for larger ones."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter, neg

from treadle.pipeline.pending import Group, Limits, PendingBag, Placed
from treadle.pipeline.rows import RowSet

HOLE_TRIES = 64
"""Failed placements in a row that end the filling of holes."""

EXCHANGE_FROM_PERMILLE = 4
"""Share of empty positions from which bags are exchanged: fuller batches gain nothing."""

EXCHANGE_GAIN_PERMILLE = 16
"""Share of a row that an exchange must win: smaller ones cost time and add nothing that shows."""

EXCHANGE_TRIES = 8
"""Waiting bags that are tried in the place of one."""


class Arrangement:
    """The rows, the room in every capacity, and the bags placed so far."""

    __slots__ = ("_guards", "_room", "placed", "rows")

    def __init__(self, num_rows: int, columns: int, limits: Limits) -> None:
        self.rows = RowSet.empty(num_rows, columns)
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

    def add_decreasing(self, bags: Sequence[PendingBag], first: Group | None = None) -> list[PendingBag]:
        """Places the items of all bags together, longest first (those of group `first` before all); the bags of which one failed.

        The bags must fit the capacities together.
        """
        count, columns = len(bags), self.rows.columns
        if first is None and all([bag.longest == bag.positions for bag in bags]):
            return self._add_singles(bags)
        # One integer per item: longest first, then in arrival order.
        keys = [(columns - length) * count + place for place, bag in enumerate(bags) for length in bag.lengths]
        keys.sort(key=None if first is None else lambda key: (bags[key % count].group is not first, key))
        rows_of: list[list[int]] = [[] for _ in bags]
        failed = self.rows.place_each([columns - key // count for key in keys], [key % count for key in keys], rows_of)
        self._room -= sum([bag.demand for bag in bags])
        if not failed:
            self.placed += zip(bags, rows_of, strict=True)
            return []
        for place, bag in enumerate(bags):
            if place in failed:
                self._room += bag.demand
                for row, length in zip(rows_of[place], bag.lengths, strict=False):
                    self.rows.release(row, length)
            else:
                self.placed.append((bag, rows_of[place]))
        return [bags[place] for place in sorted(failed)]

    def _add_singles(self, bags: Sequence[PendingBag]) -> list[PendingBag]:
        """`add_decreasing` of bags of one item each."""
        order = sorted(range(len(bags)), key=[-bag.longest for bag in bags].__getitem__)
        lengths = [bags[place].longest for place in order]
        row_of: list[int] = [-1] * len(bags)
        at = 0
        while at < len(order):
            rows = self.rows.place_run(lengths[at:])
            for place, row in zip(order[at:], rows, strict=False):
                row_of[place] = row
            at += len(rows)
            if at < len(order):
                # Others as long as the one that found no row find none either.
                at = bisect_right(lengths, -lengths[at], at, key=neg)
        placed = [(bag, [row]) for bag, row in zip(bags, row_of, strict=True) if row >= 0]
        self._room -= sum([bag.demand for bag, _ in placed])
        self.placed += placed
        return [bag for bag, row in zip(bags, row_of, strict=True) if row < 0]

    def complete(self, waiting: Sequence[PendingBag], kept: Group | None) -> None:
        """Fills the holes with bags of `waiting`; where they stay large, exchanges bags for larger ones. Bags of group `kept` stay."""
        free, largest = self.free, self.rows.largest_free
        taken: set[int] = set()
        if min([bag.longest for bag in waiting], default=free) <= min(free, largest):
            fitting = [bag for bag in waiting if bag.longest <= largest and bag.positions <= free]
            taken = self._fill_holes(fitting, free) if fitting else taken
        if self.free * 1000 > len(self.rows.free) * self.rows.columns * EXCHANGE_FROM_PERMILLE:
            self._exchange([bag for bag in waiting if bag.serial not in taken] if taken else list(waiting), kept)

    def _fill_holes(self, fitting: list[PendingBag], free: int) -> set[int]:
        """Adds the largest bags that fit what is left, until several in a row do not; the serial numbers of those added."""
        fitting.sort(key=_positions_of)
        tries, largest = HOLE_TRIES, self.rows.largest_free
        sizes = [bag.positions for bag in fitting]
        taken: set[int] = set()
        place = len(sizes) - 1
        while place >= 0 and tries and free:
            if sizes[place] > free:
                place = bisect_right(sizes, free, 0, place) - 1
                continue
            bag = fitting[place]
            if bag.longest <= largest:
                if self.add(bag):
                    taken.add(bag.serial)
                    free -= bag.positions
                    tries, largest = HOLE_TRIES, self.rows.largest_free
                else:
                    tries -= 1
            place -= 1
        return taken

    def _exchange(self, waiting: list[PendingBag], kept: Group | None) -> None:
        """Exchanges bags for larger ones of `waiting`, where the room beside them allows it."""
        rows, free_of, guards, placed = self.rows, self.rows.free, self._guards, self.placed
        gain = max(1, rows.columns * EXCHANGE_GAIN_PERMILLE // 1000)
        most = max([bag.positions for bag in waiting], default=0) - gain
        if most < min([bag.positions for bag, _ in placed], default=0):
            return
        candidates: list[tuple[int, int]] = []
        for at, (bag, bag_rows) in enumerate(placed):
            if bag.positions <= most and bag.group is not kept:
                candidates.append((-max([free_of[row] for row in bag_rows]), at))
        if not candidates:
            return
        candidates.sort()
        waiting.sort(key=_positions_of)
        sizes = [bag.positions for bag in waiting]
        for _, at in candidates:
            bag, bag_rows = placed[at]
            beside = free_of[bag_rows[0]] if len(bag_rows) == 1 else sum([free_of[row] for row in set(bag_rows)])
            last = bisect_right(sizes, bag.positions + beside) - 1
            if last < 0 or sizes[last] < bag.positions + gain:
                continue
            for row, length in zip(bag_rows, bag.lengths, strict=True):
                rows.release(row, length)
            found, largest = None, rows.largest_free
            for place in range(last, max(-1, last - EXCHANGE_TRIES), -1):
                other = waiting[place]
                if other.positions < bag.positions + gain:
                    break
                room = self._room + bag.demand - other.demand
                if other.longest > largest or room & guards != guards:
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


_positions_of = attrgetter("positions")
