"""Best fit over rows, against a slow search over all rows; undo; the exact search."""

import random
from itertools import product

import pytest

from treadle.pipeline.rows import RowSet, exact_rows, fewest_rows


def slow_best_fit(free: list[int], length: int) -> int | None:
    """The lowest row among those with the fewest free columns that hold `length`."""
    fitting = [(size, row) for row, size in enumerate(free) if size >= length]
    return min(fitting)[1] if fitting else None


def test_place_is_best_fit_with_the_lowest_row_first() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_rows, columns = rng.randint(1, 70), rng.choice([1, 7, 64, 1000])
        rows, free = RowSet([columns] * num_rows, columns), [columns] * num_rows
        for _ in range(rng.randint(1, 40)):
            lengths = [rng.randint(1, columns) for _ in range(rng.randint(1, 4))]
            before = list(free)
            expected: list[int] | None = []
            for length in lengths:
                row = slow_best_fit(free, length)
                if row is None:
                    expected, free = None, before
                    break
                assert expected is not None
                expected.append(row)
                free[row] -= length
            assert rows.place(lengths) == expected
            assert rows.free == free
            assert rows.largest_free == max(free)


def test_a_row_set_made_from_its_free_columns_goes_on_alike() -> None:
    rng = random.Random(1)
    for _ in range(100):
        rows = RowSet([50] * 9, 50)
        for _ in range(20):
            rows.place([rng.randint(1, 50), rng.randint(1, 20)])
        again = RowSet(rows.free, 50)
        for _ in range(20):
            lengths = [rng.randint(1, 30) for _ in range(3)]
            assert rows.place(lengths) == again.place(lengths)
        assert rows.free == again.free


def test_place_each_leaves_out_the_rest_of_a_failed_owner() -> None:
    rows = RowSet([10, 10], 10)
    rows_of: list[list[int]] = [[], [], []]
    # Owner 1's second length finds no row; its third is not tried although it would fit.
    failed = rows.place_each([9, 8, 7, 2, 1], [0, 1, 1, 2, 1], rows_of)
    assert failed == {1}
    assert rows_of == [[0], [1], [1]]
    assert rows.free == [1, 0]


def test_occupy_and_release_name_rows() -> None:
    rows = RowSet([5, 5], 5)
    rows.occupy(1, 3)
    assert rows.free == [5, 2] and rows.place([2]) == [1]
    rows.release(1, 5)
    assert rows.free == [5, 5]
    with pytest.raises(AssertionError, match="row 0 has 5 free columns, not 6"):
        rows.occupy(0, 6)


def test_exact_rows_finds_a_packing_that_best_fit_decreasing_misses() -> None:
    # Best fit decreasing puts both 4s into one row and strands a 3; 4 + 3 + 3 fills both.
    lengths = [4, 4, 3, 3, 3, 3]
    assert RowSet([10, 10], 10).place(lengths) is None
    rows = exact_rows(lengths, 2, 10)
    assert rows is not None
    assert sorted(sum(length for length, row in zip(lengths, rows, strict=True) if row == at) for at in (0, 1)) == [10, 10]


def test_exact_rows_agrees_with_trying_everything() -> None:
    rng = random.Random(2)
    for _ in range(200):
        num_rows, columns = rng.randint(1, 3), rng.randint(2, 12)
        lengths = sorted((rng.randint(1, columns) for _ in range(rng.randint(1, 6))), reverse=True)
        possible = any(
            all(sum(length for length, row in zip(lengths, rows, strict=True) if row == at) <= columns for at in range(num_rows))
            for rows in product(range(num_rows), repeat=len(lengths))
        )
        found = exact_rows(lengths, num_rows, columns)
        assert (found is not None) == possible
        if found is not None:
            for at in range(num_rows):
                assert sum(length for length, row in zip(lengths, found, strict=True) if row == at) <= columns


def test_fewest_rows_is_a_lower_bound() -> None:
    # Three lengths over half a row share none; beside 6, 6, 6 of 10 columns there is room for 4, 4, 4 and no more.
    assert fewest_rows([6, 6, 6], 10) == 3
    assert fewest_rows([6, 6, 6, 4, 4, 4], 10) == 3
    assert fewest_rows([6, 6, 6, 5], 10) == 4
    assert fewest_rows([9, 2], 10) == 2
    rng = random.Random(3)
    for _ in range(300):
        columns = rng.randint(2, 30)
        rows, lengths = rng.randint(1, 6), []
        for _ in range(rows):
            free = columns
            while free and rng.random() < 0.8:
                lengths.append(rng.randint(1, free))
                free -= lengths[-1]
        assert fewest_rows(lengths, columns) <= rows


def test_a_hopeless_search_ends() -> None:
    """Thirds of a row, a little too long, beside halves: no bound sees it, and the search gives up."""
    lengths = [53] * 20 + [34] * 21 + [13] * 14
    assert RowSet([100] * 20, 100).place(lengths) is None
    exact_rows(lengths, 20, 100)
