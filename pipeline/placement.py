"""Which pending bags go into the next batch, and in which rows: integers only, no payloads.

Bags wait in a pool in arrival order. A batch is chosen from the pool by best fit decreasing over all items of its first
bags at once, then its holes are filled by whatever fits best.

The delay is bounded by groups. Arriving bags are also placed, one after the other, into a *witness* batch; when one
does not fit, the witness closes and a new group opens. So every group is known to fit one batch, at recorded rows.
A group opened at batch t must be gone by batch t + 2 * window - 1. Groups are due in the order of their age, one per
batch: when any deadline leaves no slack, the oldest group is forced into this batch, if need be at its witness rows,
which its remaining members still fit. `ready` holds once 2 * window groups wait, which keeps the deadlines feasible.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.layout import Capacities
from treadle.pipeline.rows import RowSet, exact_rows

_FIELD_BITS = 48
_LARGEST_DEMAND = 2 ** (_FIELD_BITS - 2)

POSITION_MARGIN_PERMILLE = 4
"""Share of the positions that selection leaves to the filling of holes: a fuller selection fails more placements."""

SELECTION_MISSES = 8
"""Bags in arrival order that may be passed over before selection stops."""

HOLE_TRIES = 64
"""Failed placements in a row that end the filling of holes."""

BALANCE_FROM = (3, 10)
"""Share of a batch from which bags are taken for balance: earlier, the batch's own mean says little."""

Placed = tuple["PendingBag", list[int]]
"""A bag and the row of each of its lengths, in the order of `PendingBag.lengths`."""


def pack_demand(values: Sequence[int]) -> int:
    """One integer of 48-bit fields, so that one subtraction checks every dimension at once (see `Placement`)."""
    packed = 0
    for value in reversed(values):
        packed = packed << _FIELD_BITS | min(value, _LARGEST_DEMAND)
    return packed


class PendingBag:
    """A bag that waits: what it takes, where its witness places it."""

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
        """Bags (one), segments, attract, repel and ignore edges, then late interaction's dimensions: 48 bits each."""
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


class Placement:
    """The pool, its groups, and the choice of the next batch.

    Capacities other than positions are fields of one integer, each with a guard bit above it: after subtracting a
    demand, a cleared guard bit says that some capacity would be passed.
    """

    def __init__(self, num_rows: int, columns: int, capacities: Capacities, window: int, *, margin_permille: int = POSITION_MARGIN_PERMILLE) -> None:
        self.num_rows, self.columns, self.window = num_rows, columns, window
        limits = [capacities.bags, capacities.segments, capacities.edges, capacities.edges, capacities.edges]
        if capacities.late_interaction:
            limits += [capacities.query_tokens, capacities.documents, capacities.document_tokens]
        self._guards = sum(1 << (_FIELD_BITS * field + _FIELD_BITS - 1) for field in range(len(limits)))
        self._whole = self._guards | pack_demand(limits)
        self._window_demand = pack_demand([limit * window for limit in limits])
        self._selectable = num_rows * columns * (1000 - margin_permille) // 1000
        self.pool: list[PendingBag] = []
        """Bags that wait, in arrival order."""
        self.batches = 0
        """Batches taken."""
        self.second_attempts = 0
        self.witness_batches = 0
        self.longest_delay = 0
        self._groups: dict[int, list[int]] = {}
        self._group = 0
        self._serial = 0
        self._pooled_positions = 0
        self._pooled_demand = 0
        self._total_positions = 0
        self._total_squares = 0
        self._open_witness()

    def _open_witness(self) -> None:
        self._witness = RowSet([self.columns] * self.num_rows, self.columns)
        self._witness_room = self._whole

    def add(self, bag: PendingBag) -> bool:
        """Puts a bag at the end of the pool; False if no batch could ever hold it."""
        guards = self._guards
        if not bag.lengths or bag.lengths[0] > self.columns or (self._whole - bag.demand) & guards != guards:
            return False
        room = self._witness_room - bag.demand
        rows = self._witness.place(bag.lengths) if room & guards == guards else None
        if rows is None:
            alone = RowSet([self.columns] * self.num_rows, self.columns)
            rows = alone.place(bag.lengths)
            if rows is None:
                rows = exact_rows(bag.lengths, self.num_rows, self.columns)
                if rows is None:
                    return False
                for row, length in zip(rows, bag.lengths, strict=True):
                    alone.occupy(row, length)
            self._witness, room = alone, self._whole - bag.demand
            self._group += 1
        self._witness_room = room
        bag.group, bag.rows, bag.arrival, bag.serial = self._group, rows, self.batches, self._serial
        self._serial += 1
        members = self._groups.get(self._group)
        if members is None:
            self._groups[self._group] = [1, self.batches]
        else:
            members[0] += 1
        self._pooled_positions += bag.positions
        self._pooled_demand += bag.demand
        self._total_positions += bag.positions
        self._total_squares += bag.squares
        self.pool.append(bag)
        return True

    def ready(self) -> bool:
        """Whether the pool holds a window of batches in some dimension, or so many groups that one must go."""
        if not self.pool:
            return False
        if self._pooled_positions >= self.window * self.num_rows * self.columns or len(self._groups) >= 2 * self.window:
            return True
        return bool((self._pooled_demand + self._guards - self._window_demand) & self._guards)

    def _due(self) -> int | None:
        """The oldest group, when some group's deadline leaves no slack."""
        last = 2 * self.window - 1 - self.batches
        for age, (_, opened) in enumerate(self._groups.values()):
            if opened + last <= age:
                return next(iter(self._groups))
        return None

    def take(self) -> list[Placed]:
        """Takes the next batch out of the pool, in arrival order; empty only when the pool is."""
        if not self.pool:
            self.batches += 1
            return []
        forced = self._due()
        placed = self._attempt(forced, first=False)
        if placed is None:
            self.second_attempts += 1
            placed = self._attempt(forced, first=True)
        if not placed:
            self.witness_batches += 1
            placed = self._at_witness(next(iter(self._groups)))
        placed.sort(key=lambda entry: entry[0].serial)
        gone = {bag.serial for bag, _ in placed}
        self.pool = [bag for bag in self.pool if bag.serial not in gone]
        for bag, _ in placed:
            members = self._groups[bag.group]
            members[0] -= 1
            if not members[0]:
                del self._groups[bag.group]
            self._pooled_positions -= bag.positions
            self._pooled_demand -= bag.demand
            self.longest_delay = max(self.longest_delay, self.batches - bag.arrival)
        if not self.pool:
            self._open_witness()
            self._group += 1
        self.batches += 1
        return placed

    def take_step(self) -> list[Placed]:
        """Takes as much of the pool as one batch holds, arrival order first: one step's bags, of which the rest is dropped."""
        if not self.pool:
            return []
        placed = in_order = self._at_witness(next(iter(self._groups)))
        if len(in_order) < len(self.pool):
            decreasing = self._attempt(None, first=False, misses=len(self.pool), balanced=False) or []
            if sum(len(rows) for _, rows in decreasing) > sum(len(rows) for _, rows in in_order):
                placed = sorted(decreasing, key=lambda entry: entry[0].serial)
        gone = {bag.serial for bag, _ in placed}
        self.pool = [bag for bag in self.pool if bag.serial not in gone]
        return placed

    def _select(self, forced: int | None, misses: int, balanced: bool) -> tuple[list[PendingBag], list[PendingBag], int]:
        """Bags in arrival order until a capacity would be passed, the rest of the pool, and the room that is left."""
        guards, room, positions = self._guards, self._whole, self._selectable
        half, rows_left, columns = self.columns // 2, self.num_rows, self.columns
        share, of = BALANCE_FROM
        steer_below = self._selectable - self.num_rows * columns * share // of if balanced else -1
        mean_squares, mean_positions = self._total_squares, self._total_positions
        selected: list[PendingBag] = []
        rest: list[PendingBag] = []
        used = squares = missed = 0
        stop = len(self.pool)
        for place, bag in enumerate(self.pool):
            after = room - bag.demand
            if (bag.positions <= positions or bag.group == forced) and after & guards == guards:
                # No two items over half a row share one: past the rows, such an item would only fail.
                big = 0
                if bag.lengths[0] > half:
                    for length in bag.lengths:
                        if length <= half:
                            break
                        big += 1
                if big <= rows_left:
                    if positions < steer_below and bag.group != forced:
                        # Attention costs squares: pass over a bag that would move the batch further from the long-run mean.
                        above = squares * mean_positions > mean_squares * used
                        if above == (bag.squares * mean_positions > mean_squares * bag.positions):
                            rest.append(bag)
                            continue
                    rows_left -= big
                    positions -= bag.positions
                    used += bag.positions
                    squares += bag.squares
                    room = after
                    selected.append(bag)
                    continue
            rest.append(bag)
            missed += 1
            if missed > misses and bag.group != forced:
                stop = place + 1
                break
        rest += self.pool[stop:]
        return selected, rest, room

    def _attempt(self, forced: int | None, *, first: bool, misses: int = SELECTION_MISSES, balanced: bool = True) -> list[Placed] | None:
        """A batch by best fit decreasing, the forced group first if so asked; None if a forced bag finds no place."""
        selected, rest, room = self._select(forced, misses, balanced)
        guards, count, columns = self._guards, len(selected), self.columns
        # One integer per item: longest first, then in arrival order.
        keys = [(columns - length) * count + place for place, bag in enumerate(selected) for length in bag.lengths]
        keys.sort(key=(lambda key: (selected[key % count].group != forced, key)) if first else None)
        rows = RowSet([columns] * self.num_rows, columns)
        rows_of: list[list[int]] = [[] for _ in selected]
        failed = rows.place_each([columns - key // count for key in keys], [key % count for key in keys], rows_of)
        for place in failed:
            for row, length in zip(rows_of[place], selected[place].lengths, strict=False):
                rows.release(row, length)
            room += selected[place].demand
        placed = [(bag, rows_of[place]) for place, bag in enumerate(selected) if place not in failed]
        waiting = [selected[place] for place in sorted(failed)] + rest
        if forced is not None:
            for bag in waiting:
                if bag.group == forced:
                    room -= bag.demand
                    found = rows.place(bag.lengths) if room & guards == guards else None
                    if found is None:
                        return None
                    placed.append((bag, found))
            waiting = [bag for bag in waiting if bag.group != forced]
        self._fill_holes(waiting, rows, room, placed)
        return placed

    def _fill_holes(self, waiting: list[PendingBag], rows: RowSet, room: int, placed: list[Placed]) -> None:
        """Adds the largest bags that fit what is left, best fit, until several in a row do not."""
        guards = self._guards
        free = self.num_rows * self.columns - sum(bag.positions for bag, _ in placed)
        if not free or not waiting:
            return
        waiting = sorted(waiting, key=lambda bag: bag.positions)
        sizes = [bag.positions for bag in waiting]
        tries = HOLE_TRIES
        place = bisect_right(sizes, free) - 1
        while place >= 0 and tries and free:
            if sizes[place] > free:
                place = bisect_right(sizes, free, 0, place) - 1
                continue
            bag = waiting[place]
            place -= 1
            largest = rows.largest_free
            if bag.lengths[0] > largest:
                if len(bag.lengths) == 1:
                    place = min(place, bisect_right(sizes, largest * self.num_rows, 0, place + 1) - 1)
                continue
            after = room - bag.demand
            found = rows.place(bag.lengths) if after & guards == guards else None
            if found is None:
                tries -= 1
                continue
            placed.append((bag, found))
            free -= bag.positions
            room = after
            tries = HOLE_TRIES

    def _at_witness(self, forced: int) -> list[Placed]:
        """The forced group at its witness rows, then whatever fits, in arrival order."""
        rows, room = RowSet([self.columns] * self.num_rows, self.columns), self._whole
        placed: list[Placed] = []
        for bag in self.pool:
            if bag.group == forced:
                for row, length in zip(bag.rows, bag.lengths, strict=True):
                    rows.occupy(row, length)
                room -= bag.demand
                placed.append((bag, bag.rows))
        guards = self._guards
        for bag in self.pool:
            after = room - bag.demand
            found = rows.place(bag.lengths) if bag.group != forced and after & guards == guards else None
            if found is not None:
                placed.append((bag, found))
                room = after
        return placed

    def state(self) -> dict[str, NDArray[np.int64]]:
        """Everything but the bags' demands, in plain columns; bags in arrival order, their items by descending length."""
        room = [(self._whole - self._witness_room) >> (_FIELD_BITS * field) & ((1 << _FIELD_BITS) - 1) for field in range(8)]
        return {
            "counters": np.array([self.batches, self._group, self._total_positions, self._total_squares, self.longest_delay], np.int64),
            "witness_use": np.array(room, np.int64),
            "witness_free": np.array(self._witness.free, np.int64),
            "group_number": np.array(list(self._groups), np.int64),
            "group_opened": np.array([opened for _, opened in self._groups.values()], np.int64),
            "bag_group": np.array([bag.group for bag in self.pool], np.int64),
            "bag_arrival": np.array([bag.arrival for bag in self.pool], np.int64),
            "bag_items": np.array([len(bag.lengths) for bag in self.pool], np.int64),
            "item_length": np.array([length for bag in self.pool for length in bag.lengths], np.int64),
            "item_row": np.array([row for bag in self.pool for row in bag.rows], np.int64),
        }

    def load(self, state: dict[str, NDArray[np.int64]], bags: Sequence[PendingBag]) -> None:
        """Goes on from `state`, with the bags that were pending then, in arrival order.

        Raises:
            ValueError: the state is of another batch shape, or the bags are not the ones that waited.
        """
        columns = {name: values.tolist() for name, values in state.items()}
        if len(columns["witness_free"]) != self.num_rows or any(not 0 <= size <= self.columns for size in columns["witness_free"]):
            raise ValueError(f"packer state: {len(columns['witness_free'])} rows do not suit a packer of {self.num_rows} rows of {self.columns}")
        if len(bags) != len(columns["bag_group"]) or [len(bag.lengths) for bag in bags] != columns["bag_items"]:
            raise ValueError(f"packer state: {len(columns['bag_group'])} bags waited, {len(bags)} are given, or their item counts differ")
        if [length for bag in bags for length in bag.lengths] != columns["item_length"]:
            raise ValueError("packer state: an item's length is not what it was: the data or the decoding options changed")
        self.batches, self._group, self._total_positions, self._total_squares, self.longest_delay = columns["counters"]
        self._witness = RowSet(columns["witness_free"], self.columns)
        self._witness_room = self._whole - pack_demand(columns["witness_use"])
        self._groups = {group: [0, opened] for group, opened in zip(columns["group_number"], columns["group_opened"], strict=True)}
        self.pool, self._serial = list(bags), len(bags)
        self._pooled_positions = sum(bag.positions for bag in bags)
        self._pooled_demand = sum(bag.demand for bag in bags)
        first = 0
        for serial, bag in enumerate(bags):
            bag.group, bag.arrival, bag.serial = columns["bag_group"][serial], columns["bag_arrival"][serial], serial
            bag.rows = columns["item_row"][first : first + len(bag.lengths)]
            first += len(bag.lengths)
            if bag.group not in self._groups:
                raise ValueError(f"packer state: bag {serial} is of group {bag.group}, which the state does not know")
            self._groups[bag.group][0] += 1
