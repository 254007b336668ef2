"""The learning rate: linear to the peak, cosine to the floor, counted from one."""

import math
from itertools import pairwise

import pytest

from treadle.model.config import Schedule


def test_published_cosine_points() -> None:
    # Warm-up 10 of 110 steps, peak 1, floor (almost) 0: 0.5 (1 + cos(pi (s - 10) / 100)) after the warm-up, s / 10 before.
    floor = 1e-12
    schedule = Schedule(steps=110, learning_rate=1.0, min_learning_rate=floor, warmup_steps=10)
    expected = {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.853553391, 60: 0.5, 85: 0.146446609, 109: 0.000246720, 110: floor, 1000: floor}
    for step, rate in expected.items():
        assert schedule.learning_rate_at(step) == pytest.approx(rate, abs=1e-9)


def test_derived_values() -> None:
    schedule = Schedule(steps=100_000).resolved()
    assert (schedule.learning_rate, schedule.min_learning_rate, schedule.warmup_steps) == (5e-4, 1e-5, 400)
    assert Schedule(steps=1_000).resolved().warmup_steps == 100
    assert Schedule(steps=9).resolved().warmup_steps == 0


def test_floor_stays_and_lies_under_the_curve() -> None:
    schedule = Schedule(steps=20, learning_rate=1.0, min_learning_rate=0.5, warmup_steps=2)
    rates = [schedule.learning_rate_at(s) for s in range(1, 40)]
    assert rates[1] == 1.0
    assert all(a >= b for a, b in pairwise(rates[1:]))
    assert rates[19:] == [0.5] * 20
    assert rates[10] == pytest.approx(0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi * 9 / 18)))


def test_no_warm_up_starts_at_the_peak() -> None:
    schedule = Schedule(steps=5, learning_rate=1.0, min_learning_rate=0.2)
    assert schedule.resolved().warmup_steps == 0
    # Half a cosine from step 1 to step 5: 0.2 + 0.8 * 0.5 (1 + cos(pi (s - 1) / 4)).
    assert [round(schedule.learning_rate_at(s), 6) for s in (1, 3, 5, 6)] == [1.0, 0.6, 0.2, 0.2]
    assert Schedule(steps=1).learning_rate_at(1) == 5e-4
    assert Schedule(steps=1).learning_rate_at(2) == 1e-5


def test_a_warm_up_of_the_whole_run_ends_at_the_peak() -> None:
    schedule = Schedule(steps=4, warmup_steps=4)
    assert schedule.learning_rate_at(4) == 5e-4
    assert schedule.learning_rate_at(5) == 1e-5


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match=r"learning_rate_at\.step is 0: it must lie between 1 and"):
        Schedule(steps=5).learning_rate_at(0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        Schedule(steps=0)
    with pytest.raises(ValueError, match="floor must not exceed the peak"):
        Schedule(steps=5, learning_rate=1e-4, min_learning_rate=1e-3)
    with pytest.raises(ValueError, match="warm-up must end within"):
        Schedule(steps=5, warmup_steps=6)
