"""Progress reports: how many, when, and how they stop a call."""

import pytest

from treadle.model.progress import ProgressReports, Stopped


def _reports(total: int, steps: int) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    reports = ProgressReports("saving", lambda done, total: seen.append((done, total)), steps)
    for done in range(1, total + 1):
        reports(done, total)
    return seen


@pytest.mark.parametrize(("total", "steps"), [(100, 0), (100, 7), (3, 10), (1, 0), (10, 10), (11, 10)])
def test_at_most_so_many_the_last_at_completion(total: int, steps: int) -> None:
    seen = _reports(total, steps)
    assert len(seen) <= (steps or 10)
    assert seen[-1] == (total, total)
    assert seen == sorted(set(seen))


def test_evenly_spaced() -> None:
    assert _reports(100, 4) == [(25, 100), (50, 100), (75, 100), (100, 100)]


def test_false_stops_and_none_goes_on() -> None:
    reports = ProgressReports("saving x", lambda done, total: done < 50, 4)
    reports(25, 100)
    with pytest.raises(Stopped, match="saving x was stopped after 50 of 100 tensors"):
        reports(50, 100)


def test_no_callback_no_report() -> None:
    ProgressReports("saving", None, 0)(1, 1)
