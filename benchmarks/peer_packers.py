"""Other packers by their documented rules, on lengths alone: what the packer is compared with.

None of them knows bags, so each gets the items one by one, which only helps it. The look-ahead is the positions that may
wait before a choice is made; every packer answers the used share of the positions of all full-width rows that it gives out.

next fit      one open row; an item that does not fit closes it
Grain         BestFitPackIterDataset: `num_packing_bins` open rows, the fullest that fits takes the item; when none does, all are given out
TRL           pack_dataset(strategy="bfd"): best fit decreasing over one window, all its rows given out
Energon       the example of its documentation for select_samples_to_pack: the buffer sorted ascending, cut into rows
"""

from collections.abc import Callable, Sequence


def next_fit(lengths: Sequence[int], columns: int, look_ahead: int) -> float:
    """Rows one after the other; the look-ahead does not help it."""
    del look_ahead
    rows, free, used = 0, 0, 0
    for length in lengths:
        if length > free:
            rows, free = rows + 1, columns
        free -= length
        used += length
    return used / (rows * columns)


def grain_best_fit(lengths: Sequence[int], columns: int, look_ahead: int) -> float:
    """As many bins as rows of the look-ahead."""
    bins = max(1, look_ahead // columns)
    rows = used = 0
    rows_free = _FreeRows(bins, columns)
    pending = 0
    for length in lengths:
        if not rows_free.place(length):
            rows, used = rows + bins, used + pending
            rows_free, pending = _FreeRows(bins, columns), 0
            rows_free.place(length)
        pending += length
    return used / (rows * columns)


def trl_bfd(lengths: Sequence[int], columns: int, look_ahead: int) -> float:
    """A window holds as many items as fill the look-ahead."""
    rows = used = 0
    for window in _windows(lengths, look_ahead):
        rows_free = _FreeRows(0, columns)
        for length in sorted(window, reverse=True):
            if not rows_free.place(length):
                rows_free.add()
                rows_free.place(length)
        rows, used = rows + rows_free.count, used + sum(window)
    return used / (rows * columns)


def energon_documented(lengths: Sequence[int], columns: int, look_ahead: int) -> float:
    """A buffer holds as many items as fill the look-ahead."""
    rows = used = 0
    for window in _windows(lengths, look_ahead):
        free = 0
        for length in sorted(window):
            if length > free:
                rows, free = rows + 1, columns
            free -= length
        used += sum(window)
    return used / (rows * columns)


PEERS: dict[str, Callable[[Sequence[int], int, int], float]] = {
    "next fit": next_fit,
    "Grain best fit": grain_best_fit,
    "TRL BFD": trl_bfd,
    "Energon documented": energon_documented,
}


def _windows(lengths: Sequence[int], look_ahead: int) -> list[list[int]]:
    """Whole windows; what is left at the end is no steady state."""
    windows: list[list[int]] = []
    window: list[int] = []
    held = 0
    for length in lengths:
        window.append(length)
        held += length
        if held >= look_ahead:
            windows.append(window)
            window, held = [], 0
    return windows


class _FreeRows:
    """Rows by free size: the fullest one that fits is a shift and a lowest set bit away."""

    def __init__(self, count: int, columns: int) -> None:
        self.count, self._columns = count, columns
        self._rows = [0] * (columns + 1)
        self._rows[columns] = count
        self._sizes = 1 << columns if count else 0

    def add(self) -> None:
        self.count += 1
        self._rows[self._columns] += 1
        self._sizes |= 1 << self._columns

    def place(self, length: int) -> bool:
        fitting = self._sizes >> length
        if not fitting:
            return False
        size = length + (fitting & -fitting).bit_length() - 1
        self._rows[size] -= 1
        if not self._rows[size]:
            self._sizes ^= 1 << size
        self._rows[size - length] += 1
        self._sizes |= 1 << (size - length)
        return True
