"""Which pending bags go into the next batch, and in which rows: integers only, no payloads.

Bags wait in a pool in arrival order. A batch is chosen from the pool by best fit decreasing over all items of its first
bags at once, then its holes are filled by whatever fits best.

The delay is bounded by groups. Arriving bags are also placed, one after the other, into a *witness* batch; when one
does not fit, the witness closes and a new group opens. So every group is known to fit one batch, at recorded rows.
A group opened at batch t must be gone by batch t + 2 * window - 1. Groups are due in the order of their age, one per
batch: when any deadline leaves no slack, the oldest group is forced into this batch, if need be at its witness rows,
which its remaining members still fit. `ready` holds once 2 * window groups wait, which keeps the deadlines feasible.

Attention costs squares, and ranks wait for the slowest: selection keeps a batch's sum of squared lengths near what as
many positions cost on average over all that arrived, within a band that narrows as the batch fills.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.arrange import Arrangement
from treadle.pipeline.layout import Capacities
from treadle.pipeline.pending import NUM_FIELDS, SINGLE_DEMAND, Group, Limits, PendingBag, Placed, pack_demand, unpack_demand
from treadle.pipeline.rows import RowSet, exact_rows

POSITION_MARGIN_PERMILLE = 4
"""Share of the positions that selection leaves to the filling of holes: a fuller selection fails more placements."""

SELECTION_MISSES = 8
"""Bags in arrival order that may be passed over, for want of room, before selection stops."""

BALANCE_BAND = 0.25
"""How far the squares may stray, as a share of what the positions still to be filled cost on average."""


COLUMN_NAMES = (
    "counters", "witness_use", "witness_free", "group_number", "group_opened", "bag_group", "bag_arrival", "bag_items", "item_length",
    "item_row", "demand", "bag_demand",
)  # fmt: skip
"""Of a state; see `Placement.snapshot`."""

Columns = dict[str, NDArray[np.int64]]
"""Named once: subscripted at every definition of an inner function, it would cost more than the snapshot."""


class Placement:
    """The pool, its groups, and the choice of the next batch."""

    def __init__(self, num_rows: int, columns: int, capacities: Capacities, window: int) -> None:
        self.num_rows, self.columns, self.window = num_rows, columns, window
        self._limits = Limits(capacities)
        self._guards = self._limits.guards
        self._window_demand = self._limits.times(window)
        self._window_positions = window * num_rows * columns
        self._selectable = num_rows * columns * (1000 - POSITION_MARGIN_PERMILLE) // 1000
        self.pool: list[PendingBag] = []
        """Appended to or replaced: `waiting` relies on that."""
        """Bags that wait, in arrival order."""
        self.batches = 0
        """Batches taken."""
        self.witness_batches = 0
        """Those of them for which the oldest group went at its witness rows."""
        self.longest_delay = 0
        """Most batches that a bag has waited so far."""
        self._groups: list[Group] = []
        self._group = 0
        self._serial = 0
        self._pooled_positions = 0
        self._pooled_demand = 0
        self._total_positions = 0
        self._total_squares = 0
        self._open_witness(0)

    def _open_witness(self, number: int) -> None:
        self._group = number
        self._open: Group | None = None
        self._witness = RowSet.empty(self.num_rows, self.columns)
        self._witness_room = self._limits.room

    def add(self, bag: PendingBag) -> bool:
        """Puts a bag at the end of the pool; False if no batch could ever hold it."""
        guards, lengths = self._guards, bag.lengths
        room = self._witness_room - bag.demand
        fits = room & guards == guards and 0 < bag.longest <= self.columns
        if fits and len(lengths) == 1:
            row = self._witness.place_one(bag.longest)
            rows = None if row < 0 else [row]
        else:
            rows = self._witness.place(lengths) if fits else None
        if rows is None:
            alone = self._alone(bag)
            if alone is None:
                return False
            self._open_witness(self._group + 1)
            self._witness, rows = alone
            room = self._limits.room - bag.demand
        self._witness_room = room
        group = self._open
        if group is None or not group.left:
            group = self._open = Group(self._group, self.batches)
            self._groups.append(group)
        group.left += 1
        bag.group, bag.rows, bag.arrival, bag.serial = group, rows, self.batches, self._serial
        self._serial += 1
        self._pooled_positions += bag.positions
        self._pooled_demand += bag.demand
        self._total_positions += bag.positions
        self._total_squares += bag.squares
        self.pool.append(bag)
        return True

    def missing_singles(self, lengths: Sequence[int]) -> int:
        """How many items of `lengths`, bags of their own, it takes to fill the window in positions, bags or segments; at most all."""
        sums = list(accumulate(lengths, initial=self._pooled_positions))
        most = self._limits.singles(self._window_demand - self._pooled_demand)
        return min(bisect_left(sums, self._window_positions), most, len(lengths))

    def add_singles(self, bags: Sequence[PendingBag]) -> int:
        """`add` for the first of `bags`, each of one item that takes nothing but itself; how many it was before too many groups waited.

        They must be no more than `missing_singles` allows.
        """
        limits, count = self._limits, len(bags)
        lengths = [bag.longest for bag in bags]
        at, most_groups = 0, 2 * self.window
        while at < count and len(self._groups) < most_groups:
            # The one that opens the last group has to be the last.
            fresh = self._open is None or not self._open.left
            most = limits.singles(self._witness_room)
            if fresh and len(self._groups) + 1 == most_groups:
                most = min(most, 1)
            rows = self._witness.place_run(lengths[at : min(count, at + most)])
            if not rows:
                if lengths[at] > self.columns:
                    break
                self._open_witness(self._group + 1)
                continue
            self._witness_room -= len(rows) * SINGLE_DEMAND
            group = self._open
            if group is None or not group.left:
                group = self._open = Group(self._group, self.batches)
                self._groups.append(group)
            group.left += len(rows)
            arrival, serial = self.batches, self._serial + at
            for bag, row in zip(bags[at : at + len(rows)], rows, strict=True):
                bag.group, bag.rows, bag.arrival, bag.serial = group, [row], arrival, serial
                serial += 1
            at += len(rows)
        self._serial += at
        positions = sum(lengths[:at])
        self._pooled_positions += positions
        self._pooled_demand += at * SINGLE_DEMAND
        self._total_positions += positions
        self._total_squares += sum(map(mul, lengths[:at], lengths))
        self.pool += bags[:at] if at < len(bags) else bags
        return at

    def _alone(self, bag: PendingBag) -> tuple[RowSet, list[int]] | None:
        """A batch that holds this bag alone, and its rows; None if no batch could ever hold it."""
        if not 0 < bag.longest <= self.columns or (self._limits.room - bag.demand) & self._guards != self._guards:
            return None
        batch = RowSet.empty(self.num_rows, self.columns)
        rows = batch.place(bag.lengths)
        if rows is None:
            rows = exact_rows(bag.lengths, self.num_rows, self.columns)
            if rows is None:
                return None
            for row, length in zip(rows, bag.lengths, strict=True):
                batch.occupy(row, length)
        return batch, rows

    def ready(self) -> bool:
        """Whether the pool holds a window of batches in some dimension, or so many groups that one must go."""
        if self._pooled_positions >= self._window_positions or len(self._groups) >= 2 * self.window:
            return True
        guards = self._guards
        return bool((self._pooled_demand + guards - self._window_demand) & guards)

    def _due(self) -> Group | None:
        """The oldest group, when some group's deadline leaves no slack."""
        last = 2 * self.window - 1 - self.batches
        for age, group in enumerate(self._groups):
            if group.opened + last <= age:
                return self._groups[0]
        return None

    def take(self) -> list[Placed]:
        """Takes the next batch out of the pool, in arrival order; empty only when the pool is."""
        if not self.pool:
            self.batches += 1
            return []
        forced = self._due()
        placed = self._attempt(forced)
        if not placed:
            self.witness_batches += 1
            placed = self._at_witness(self._groups[0])
        for bag, _ in placed:
            bag.taken = True
            bag.group.left -= 1
        placed.sort(key=_serial_of)
        self._pooled_positions -= sum([bag.positions for bag, _ in placed])
        self._pooled_demand -= sum([bag.demand for bag, _ in placed])
        self.longest_delay = max(self.longest_delay, self.batches - placed[0][0].arrival)
        self.pool = [bag for bag in self.pool if not bag.taken]
        self._groups = [group for group in self._groups if group.left]
        if not self.pool:
            self._open_witness(self._group + 1)
        self.batches += 1
        return placed

    def take_step(self) -> list[Placed]:
        """Takes as much of the pool as one batch holds, arrival order first: one step's bags, of which the rest is dropped."""
        if not self.pool:
            return []
        placed = in_order = self._at_witness(self._groups[0])
        if len(in_order) < len(self.pool):
            batch = self._arranged(None, len(self.pool), balanced=False)
            assert batch is not None
            there = {bag.serial for bag, _ in batch.placed}
            for bag in self.pool:
                # Where something other than positions binds, holes are given up before all have been tried.
                if bag.serial not in there:
                    batch.add(bag)
            if sum(len(rows) for _, rows in batch.placed) > sum(len(rows) for _, rows in in_order):
                placed = sorted(batch.placed, key=_serial_of)
        gone = {bag.serial for bag, _ in placed}
        self.pool = [bag for bag in self.pool if bag.serial not in gone]
        return placed

    def _select(self, forced: Group | None, misses: int, balanced: bool) -> tuple[list[PendingBag], list[PendingBag]]:
        """Bags in arrival order until a capacity would be passed, and the rest of the pool."""
        guards, room, left, half = self._guards, self._limits.room, self._selectable, self.columns // 2
        rows_left, missed, astray = self.num_rows, 0, 0.0
        # What a position costs on average over all that arrived; nothing is cheap or dear where balance is off.
        mean = self._total_squares / self._total_positions
        band = BALANCE_BAND * mean if balanced else float("inf")
        selected: list[PendingBag] = []
        rest: list[PendingBag] = []
        stop = len(self.pool)
        for place, bag in enumerate(self.pool):
            after, positions, mandatory = room - bag.demand, bag.positions, bag.group is forced
            if (positions <= left or mandatory) and after & guards == guards:
                # No two items over half a row share one: past the rows, such an item would only fail.
                big = 0
                if bag.longest > half:
                    for length in bag.lengths:
                        if length <= half:
                            break
                        big += 1
                if big <= rows_left:
                    strays = astray + bag.squares - mean * positions
                    limit = band * (left - positions)
                    if not (-limit <= strays <= limit or -abs(astray) < strays < abs(astray) or mandatory):
                        rest.append(bag)
                        continue
                    astray = strays
                    rows_left -= big
                    left -= positions
                    room = after
                    selected.append(bag)
                    continue
            rest.append(bag)
            missed += 1
            if missed > misses and not mandatory:
                stop = place + 1
                break
        rest += self.pool[stop:]
        return selected, rest

    def _attempt(self, forced: Group | None) -> list[Placed] | None:
        """A batch by best fit decreasing, the forced group before the others; None if one of its bags finds no place."""
        batch = self._arranged(forced, SELECTION_MISSES, balanced=True)
        return None if batch is None else batch.placed

    def _arranged(self, forced: Group | None, misses: int, *, balanced: bool) -> Arrangement | None:
        selected, rest = self._select(forced, misses, balanced)
        batch = Arrangement(self.num_rows, self.columns, self._limits)
        waiting = batch.add_decreasing(selected, forced) + rest
        if forced is not None:
            for bag in waiting:
                if bag.group is forced and not batch.add(bag):
                    return None
            waiting = [bag for bag in waiting if bag.group is not forced]
        batch.complete(waiting, forced)
        return batch

    def _at_witness(self, forced: Group) -> list[Placed]:
        """The forced group at its witness rows, then whatever fits, in arrival order."""
        batch = Arrangement(self.num_rows, self.columns, self._limits)
        for bag in self.pool:
            if bag.group is forced:
                batch.put(bag, bag.rows)
        for bag in self.pool:
            if bag.group is not forced:
                batch.add(bag)
        return batch.placed

    def waiting(self) -> Callable[[], list[PendingBag]]:
        """What answers the bags that wait at this very moment, whenever it is asked for."""
        # Nothing is copied: a pool grows at its end, until another takes its place.
        pool, count = self.pool, len(self.pool)
        return lambda: pool[:count]

    def snapshot(self) -> Callable[[], Columns]:
        """What builds the state of this very moment, whenever it is asked for: a bag that waits does not change any more."""
        counters = [self.batches, self._group, self._total_positions, self._total_squares, self.longest_delay]
        witness_use, witness_free = self._limits.room - self._witness_room, list(self._witness.free)
        # Groups are as bags are: see `waiting`.
        all_groups, num_groups, waiting = self._groups, len(self._groups), self.waiting()

        def columns() -> Columns:
            groups, pool = all_groups[:num_groups], waiting()
            return {
                "counters": np.array(counters, np.int64),
                "witness_use": np.array(unpack_demand(witness_use), np.int64),
                "witness_free": np.array(witness_free, np.int64),
                "group_number": np.array([group.number for group in groups], np.int64),
                "group_opened": np.array([group.opened for group in groups], np.int64),
                "bag_group": np.array([bag.group.number for bag in pool], np.int64),
                "bag_arrival": np.array([bag.arrival for bag in pool], np.int64),
                "bag_items": np.array([len(bag.lengths) for bag in pool], np.int64),
                "item_length": np.array([length for bag in pool for length in bag.lengths], np.int64),
                "item_row": np.array([row for bag in pool for row in bag.rows], np.int64),
                # Few bags take other than what most take: each demand once, and its number per bag.
                "demand": np.array([unpack_demand(demand) for demand in dict.fromkeys([bag.demand for bag in pool])], np.int64).reshape(-1),
                "bag_demand": numbered([bag.demand for bag in pool]),
            }

        return columns

    def state(self) -> Columns:
        """Everything but the bags' demands, in plain columns; bags in arrival order, their items by descending length."""
        return self.snapshot()()

    def load(self, state: Mapping[str, NDArray[np.int64]], bags: Sequence[PendingBag]) -> None:
        """Goes on from `state`, with the bags that were pending then, in arrival order.

        Raises:
            ValueError: the state is of another batch shape, or the bags are not the ones that waited.
        """
        columns = checked(state, COLUMN_NAMES)
        sizes = {name: len(values) for name, values in columns.items()}
        if (
            sizes["counters"] != 5
            or sizes["witness_use"] != NUM_FIELDS
            or sizes["group_number"] != sizes["group_opened"]
            or not sizes["bag_group"] == sizes["bag_arrival"] == sizes["bag_items"]
            or not sizes["item_length"] == sizes["item_row"] == sum(columns["bag_items"])
        ):
            raise ValueError(f"packer state: its columns do not belong together: {sizes}")
        if len(columns["witness_free"]) != self.num_rows or any(not 0 <= size <= self.columns for size in columns["witness_free"]):
            raise ValueError(
                f"packer state: {len(columns['witness_free'])} rows do not suit a packer of {self.num_rows} rows of {self.columns}"
            )
        if len(bags) != len(columns["bag_group"]) or [len(bag.lengths) for bag in bags] != columns["bag_items"]:
            raise ValueError(f"packer state: {len(columns['bag_group'])} bags waited, {len(bags)} are given, or their item counts differ")
        if [length for bag in bags for length in bag.lengths] != columns["item_length"]:
            raise ValueError("packer state: an item's length is not what it was: the data or the decoding options changed")
        positions, squares = sum(bag.positions for bag in bags), sum(bag.squares for bag in bags)
        if columns["counters"][2] < positions or columns["counters"][3] < squares:
            raise ValueError(f"packer state: {positions} positions wait, and its counters {columns['counters']} know of fewer that came")
        self.batches, number, self._total_positions, self._total_squares, self.longest_delay = columns["counters"]
        self._open_witness(number)
        self._witness = RowSet(columns["witness_free"], self.columns)
        self._witness_room = self._limits.room - pack_demand(columns["witness_use"])
        self._groups = [Group(number, opened) for number, opened in zip(columns["group_number"], columns["group_opened"], strict=True)]
        by_number = {group.number: group for group in self._groups}
        self._open = by_number.get(self._group)
        self.pool, self._serial = list(bags), len(bags)
        self._pooled_positions = positions
        self._pooled_demand = sum(bag.demand for bag in bags)
        first = 0
        for serial, bag in enumerate(bags):
            number = columns["bag_group"][serial]
            if number not in by_number:
                raise ValueError(f"packer state: bag {serial} is of group {number}, which the state does not know")
            bag.group, bag.arrival, bag.serial = by_number[number], columns["bag_arrival"][serial], serial
            bag.group.left += 1
            bag.rows = columns["item_row"][first : first + len(bag.lengths)]
            first += len(bag.lengths)
        used: Counter[tuple[int, int]] = Counter()
        for bag in bags:
            for row, length in zip(bag.rows, bag.lengths, strict=True):
                used[bag.group.number, row] += length
        if any(not 0 <= row < self.num_rows or taken > self.columns for (_, row), taken in used.items()):
            raise ValueError("packer state: a group does not fit the rows that it names")


def checked(state: Mapping[str, NDArray[np.int64]], names: Sequence[str]) -> dict[str, list[int]]:
    """The named columns of a state, which may come from anywhere, as lists.

    Raises:
        ValueError: one is missing, or no plain column of counts.
    """
    columns: dict[str, list[int]] = {}
    for name in names:
        values = state.get(name)
        if values is None:
            raise ValueError(f"packer state: {name} missing")
        if values.dtype != np.int64 or values.ndim != 1 or (len(values) and not 0 <= int(values.min()) <= int(values.max()) < 2**62):
            found = f"{values.dtype} {list(values.shape)}"
            raise ValueError(f"packer state: column {name} is {found}: expected int64 [any], each at least 0 and below 2^62")
        columns[name] = values.tolist()
    return columns


def numbered(values: Sequence[int]) -> NDArray[np.int64]:
    """The number of each value among the different ones, in the order in which they first occur."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], np.int64)


def waiting_bags(state: Mapping[str, NDArray[np.int64]], contents: Sequence[object]) -> list[PendingBag]:
    """The bags that waited when `state` was taken, with their items by descending length.

    Raises:
        ValueError: its columns do not belong together.
    """
    items, lengths, kinds, demands = checked(state, ("bag_items", "item_length", "bag_demand", "demand")).values()
    known = [pack_demand(demands[place : place + NUM_FIELDS]) for place in range(0, len(demands), NUM_FIELDS)]
    whole = sum(items) == len(lengths) and len(kinds) == len(items) == len(contents) and min(*items, *lengths, 1, 1) > 0
    if not whole or len(demands) % NUM_FIELDS or any(not 0 <= kind < len(known) for kind in kinds):
        raise ValueError(
            f"packer state: {len(items)} bags, {len(lengths)} items, {len(known)} demands and {len(contents)} bags given do not fit"
        )
    bags: list[PendingBag] = []
    first = 0
    for count, kind, content in zip(items, kinds, contents, strict=True):
        bags.append(PendingBag(lengths[first : first + count], known[kind], content))
        first += count
    return bags


def _serial_of(placed: Placed) -> int:
    return placed[0].serial
