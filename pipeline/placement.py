"""Which pending bags go into the next batch, and in which rows: integers only, no payloads.

Bags wait in a pool in arrival order. A batch is chosen from the pool by best fit decreasing over all items of its first
bags at once, then its holes are filled by whatever fits best.

The delay is bounded by groups. Arriving bags are also placed, one after the other, into a *witness* batch; when one
does not fit, the witness closes and a new group opens. So every group is known to fit one batch, at recorded rows.
A group opened at batch t must be gone by batch t + 2 * window - 1. Groups are due in the order of their age, one per
batch: when any deadline leaves no slack, the oldest group is forced into this batch, if need be at its witness rows,
which its remaining members still fit. `ready` holds once 2 * window groups wait, which keeps the deadlines feasible.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.arrange import Arrangement
from treadle.pipeline.layout import Capacities
from treadle.pipeline.pending import NUM_FIELDS, Limits, PendingBag, Placed, pack_demand, unpack_demand
from treadle.pipeline.rows import RowSet, exact_rows

POSITION_MARGIN_PERMILLE = 4
"""Share of the positions that selection leaves to the filling of holes: a fuller selection fails more placements."""

SELECTION_MISSES = 8
"""Bags in arrival order that may be passed over before selection stops."""

BALANCE_FROM = (6, 10)
"""Share of a batch from which bags are taken for balance: earlier, the batch's own mean says little."""


class Placement:
    """The pool, its groups, and the choice of the next batch."""

    def __init__(self, num_rows: int, columns: int, capacities: Capacities, window: int) -> None:
        self.num_rows, self.columns, self.window = num_rows, columns, window
        self._limits = Limits(capacities)
        self._window_demand = self._limits.times(window)
        self._selectable = num_rows * columns * (1000 - POSITION_MARGIN_PERMILLE) // 1000
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
        self._witness_room = self._limits.room

    def add(self, bag: PendingBag) -> bool:
        """Puts a bag at the end of the pool; False if no batch could ever hold it."""
        guards, empty = self._limits.guards, self._limits.room
        if not bag.lengths or bag.lengths[0] > self.columns or (empty - bag.demand) & guards != guards:
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
            self._witness, room = alone, empty - bag.demand
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
        guards = self._limits.guards
        return bool((self._pooled_demand + guards - self._window_demand) & guards)

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

    def _select(self, forced: int | None, misses: int, balanced: bool) -> tuple[list[PendingBag], list[PendingBag]]:
        """Bags in arrival order until a capacity would be passed, and the rest of the pool."""
        guards, room, positions = self._limits.guards, self._limits.room, self._selectable
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
        return selected, rest

    def _attempt(self, forced: int | None, *, first: bool, misses: int = SELECTION_MISSES, balanced: bool = True) -> list[Placed] | None:
        """A batch by best fit decreasing, the forced group first if so asked; None if a forced bag finds no place."""
        selected, rest = self._select(forced, misses, balanced)
        batch = Arrangement(self.num_rows, self.columns, self._limits)
        waiting = batch.add_decreasing(selected, forced if first else None) + rest
        if forced is not None:
            for bag in waiting:
                if bag.group == forced and not batch.add(bag):
                    return None
            waiting = [bag for bag in waiting if bag.group != forced]
        waiting.sort(key=lambda bag: bag.positions)
        batch.fill_holes(waiting)
        batch.exchange(waiting, forced)
        return batch.placed

    def _at_witness(self, forced: int) -> list[Placed]:
        """The forced group at its witness rows, then whatever fits, in arrival order."""
        batch = Arrangement(self.num_rows, self.columns, self._limits)
        for bag in self.pool:
            if bag.group == forced:
                batch.put(bag, bag.rows)
        for bag in self.pool:
            if bag.group != forced:
                batch.add(bag)
        return batch.placed

    def snapshot(self) -> Callable[[], dict[str, NDArray[np.int64]]]:
        """What builds the state of this very moment, whenever it is asked for: a bag that waits does not change any more."""
        counters = [self.batches, self._group, self._total_positions, self._total_squares, self.longest_delay]
        witness_use, witness_free = self._limits.room - self._witness_room, list(self._witness.free)
        groups, pool = [(number, opened) for number, (_, opened) in self._groups.items()], list(self.pool)

        def columns() -> dict[str, NDArray[np.int64]]:
            return {
                "counters": np.array(counters, np.int64),
                "witness_use": np.array(unpack_demand(witness_use), np.int64),
                "witness_free": np.array(witness_free, np.int64),
                "group_number": np.array([number for number, _ in groups], np.int64),
                "group_opened": np.array([opened for _, opened in groups], np.int64),
                "bag_group": np.array([bag.group for bag in pool], np.int64),
                "bag_arrival": np.array([bag.arrival for bag in pool], np.int64),
                "bag_items": np.array([len(bag.lengths) for bag in pool], np.int64),
                "item_length": np.array([length for bag in pool for length in bag.lengths], np.int64),
                "item_row": np.array([row for bag in pool for row in bag.rows], np.int64),
            }

        return columns

    def state(self) -> dict[str, NDArray[np.int64]]:
        """Everything but the bags' demands, in plain columns; bags in arrival order, their items by descending length."""
        return self.snapshot()()

    def load(self, state: Mapping[str, NDArray[np.int64]], bags: Sequence[PendingBag]) -> None:
        """Goes on from `state`, with the bags that were pending then, in arrival order.

        Raises:
            ValueError: the state is of another batch shape, or the bags are not the ones that waited.
        """
        columns = {name: values.tolist() for name, values in state.items()}
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
        self.batches, self._group, self._total_positions, self._total_squares, self.longest_delay = columns["counters"]
        self._witness = RowSet(columns["witness_free"], self.columns)
        self._witness_room = self._limits.room - pack_demand(columns["witness_use"])
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
        used: Counter[tuple[int, int]] = Counter()
        for bag in bags:
            for row, length in zip(bag.rows, bag.lengths, strict=True):
                used[bag.group, row] += length
        if any(not 0 <= row < self.num_rows or taken > self.columns for (_, row), taken in used.items()):
            raise ValueError("packer state: a group does not fit the rows that it names")
