"""Rows of a batch, filled by exact best fit.

The free sizes that exist are the bits of one large integer, and the rows of each free size the bits of another:
the smallest free size that holds a length is a shift and a lowest set bit away, whatever the number of rows.
Among rows of that size the lowest is taken, so that the whole state of a row set is `free`, the free columns per row.
"""

from collections.abc import Sequence

EXACT_SEARCH_STEPS = 5_000
"""Placements that the exact search tries before it gives a bag up."""


class RowSet:
    """R rows of C columns."""

    __slots__ = ("_rows_of", "_sizes", "columns", "free")

    def __init__(self, free: Sequence[int], columns: int) -> None:
        self.columns = columns
        self.free = list(free)
        """Free columns of each row."""
        self._rows_of: dict[int, int] = {}
        for row, size in enumerate(self.free):
            self._rows_of[size] = self._rows_of.get(size, 0) | 1 << row
        self._sizes = sum(1 << size for size in self._rows_of)

    @classmethod
    def empty(cls, num_rows: int, columns: int) -> "RowSet":
        """Rows of which nothing is taken."""
        rows = cls((), columns)
        rows.free = [columns] * num_rows
        rows._rows_of, rows._sizes = {columns: (1 << num_rows) - 1}, 1 << columns
        return rows

    @property
    def largest_free(self) -> int:
        """Free columns of the emptiest row."""
        return self._sizes.bit_length() - 1

    def place_one(self, length: int) -> int:
        """The row that takes `length`, by best fit; -1, and nothing changed, if none does."""
        rows_of = self._rows_of
        fitting = self._sizes >> length
        if not fitting:
            return -1
        size = length + (fitting & -fitting).bit_length() - 1
        rows = rows_of[size]
        lowest = rows & -rows
        rows ^= lowest
        if rows:
            rows_of[size] = rows
        else:
            del rows_of[size]
            self._sizes ^= 1 << size
        size -= length
        if size in rows_of:
            rows_of[size] |= lowest
        else:
            rows_of[size] = lowest
            self._sizes |= 1 << size
        row = lowest.bit_length() - 1
        self.free[row] = size
        return row

    def place(self, lengths: Sequence[int]) -> list[int] | None:
        """The rows that take `lengths`, in their order, each by best fit; None, and nothing changed, if one finds no row."""
        placed: list[int] = []
        for length in lengths:
            row = self.place_one(length)
            if row < 0:
                for taken, back in zip(placed, lengths, strict=False):
                    self.release(taken, back)
                return None
            placed.append(row)
        return placed

    def place_run(self, lengths: Sequence[int]) -> list[int]:
        """The rows that take the first of `lengths`, each by best fit, up to one that finds no row."""
        rows_of, free, sizes = self._rows_of, self.free, self._sizes
        placed: list[int] = []
        append = placed.append
        bit = row = size = last = 0
        for length in lengths:
            # What fits into the row that was best for one of its length fits nowhere better.
            if length != last or size < length:
                if bit:
                    free[row] = size
                    if size in rows_of:
                        rows_of[size] |= bit
                    else:
                        rows_of[size] = bit
                        sizes |= 1 << size
                fitting = sizes >> length
                if not fitting:
                    bit = 0
                    break
                size = length + (fitting & -fitting).bit_length() - 1
                rows = rows_of[size]
                bit = rows & -rows
                rows ^= bit
                if rows:
                    rows_of[size] = rows
                else:
                    del rows_of[size]
                    sizes ^= 1 << size
                row, last = bit.bit_length() - 1, length
            size -= length
            append(row)
        if bit:
            free[row] = size
            rows_of[size] = rows_of.get(size, 0) | bit
            sizes |= 1 << size
        self._sizes = sizes
        return placed

    def place_each(self, lengths: Sequence[int], owners: Sequence[int], rows_of_owner: list[list[int]]) -> set[int]:
        """Places every length by best fit, appending its row to its owner's list; the owners of which one found no row.

        Once a length of an owner has failed, the owner's later lengths are left out.
        """
        rows = self.place_run(lengths)
        for owner, row in zip(owners, rows, strict=False):
            rows_of_owner[owner].append(row)
        failed: set[int] = set()
        for length, owner in zip(lengths[len(rows) :], owners[len(rows) :], strict=True):
            if owner in failed:
                continue
            row = self.place_one(length)
            if row < 0:
                failed.add(owner)
            else:
                rows_of_owner[owner].append(row)
        return failed

    def occupy(self, row: int, length: int) -> None:
        """Takes `length` columns of one row, which must have them."""
        assert length <= self.free[row], f"row {row} has {self.free[row]} free columns, not {length}"
        self._move(row, self.free[row] - length)

    def release(self, row: int, length: int) -> None:
        """Gives `length` columns of one row back."""
        assert self.free[row] + length <= self.columns
        self._move(row, self.free[row] + length)

    def _move(self, row: int, size: int) -> None:
        rows_of, bit = self._rows_of, 1 << row
        rows = rows_of[self.free[row]] ^ bit
        if rows:
            rows_of[self.free[row]] = rows
        else:
            del rows_of[self.free[row]]
            self._sizes ^= 1 << self.free[row]
        rows_of[size] = rows_of.get(size, 0) | bit
        self._sizes |= 1 << size
        self.free[row] = size


def exact_rows(lengths: Sequence[int], num_rows: int, columns: int) -> list[int] | None:
    """Rows of an empty batch that hold `lengths` (descending), found by search; None where there are none.

    Best fit decreasing can miss a packing that exists. The search tries every row of each different free size, best
    fit first, and gives up after `EXACT_SEARCH_STEPS` placements: past that, "could never fit" is a judgement.
    """
    if fewest_rows(lengths, columns) > num_rows:
        return None
    free = [columns] * num_rows
    rows: list[int] = []
    tried: list[list[int]] = [[]]
    for _ in range(EXACT_SEARCH_STEPS):
        depth = len(rows)
        if depth == len(lengths):
            return rows
        length = lengths[depth]
        # Rows of one free size are alike: the lowest stands for all of them.
        open_rows = {free[row]: row for row in reversed(range(num_rows)) if free[row] >= length}
        size = min((size for size in open_rows if size not in tried[depth]), default=-1)
        if size >= 0:
            tried[depth].append(size)
            row = open_rows[size]
            free[row] -= length
            rows.append(row)
            tried.append([])
            continue
        if not rows:
            return None
        tried.pop()
        row = rows.pop()
        free[row] += lengths[len(rows)]
    return None


def fewest_rows(lengths: Sequence[int], columns: int) -> int:
    """Rows that `lengths` need at least, whatever packs them: the bound L2 of Martello and Toth (1990).

    For every threshold: lengths that leave less than it beside them have a row each, so do the others over half a
    row, and what is left of the latter must hold the lengths from the threshold to half a row.
    """
    best = -(-sum(lengths) // columns)
    halves = [length for length in lengths if 2 * length > columns]
    for threshold in {1, *(length for length in lengths if 2 * length <= columns)}:
        alone = sum(length > columns - threshold for length in halves)
        shared = [length for length in halves if length <= columns - threshold]
        small = sum(length for length in lengths if threshold <= length and 2 * length <= columns)
        over = small - (len(shared) * columns - sum(shared))
        best = max(best, alone + len(shared) + max(0, -(-over // columns)))
    return best
