"""The choice of batches: no bag lost, no capacity passed, the delay bound, restore, fill and balance; lengths only."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from treadle.pipeline.layout import Capacities
from treadle.pipeline.pending import PendingBag, Placed, pack_demand
from treadle.pipeline.placement import Placement


class Plan(NamedTuple):
    """A bag by its lengths and demands."""

    lengths: list[int]
    edges: tuple[int, int, int] = (0, 0, 0)
    late: tuple[int, int, int] = (0, 0, 0)


def pending(plan: Plan, *, late: bool = False) -> PendingBag:
    return PendingBag(plan.lengths, pack_demand((1, len(plan.lengths), *plan.edges, *(plan.late if late else ()))))


def check_batch(placed: list[Placed], plans: Sequence[Plan], rows: int, columns: int, limits: Capacities) -> list[int]:
    """The serial numbers of a batch in which every row and every capacity holds."""
    taken = [0] * rows
    for bag, bag_rows in placed:
        assert len(bag_rows) == len(bag.lengths)
        for row, length in zip(bag_rows, bag.lengths, strict=True):
            taken[row] += length
    assert max(taken) <= columns
    chosen = [plans[bag.serial] for bag, _ in placed]
    assert [bag.serial for bag, _ in placed] == sorted(bag.serial for bag, _ in placed)
    assert len(chosen) <= limits.bags
    assert sum(len(plan.lengths) for plan in chosen) <= limits.segments
    for which in range(3):
        assert sum(plan.edges[which] for plan in chosen) <= limits.edges
    if limits.late_interaction:
        for which, limit in enumerate((limits.query_tokens, limits.documents, limits.document_tokens)):
            assert sum(plan.late[which] for plan in chosen) <= limit
    return [bag.serial for bag, _ in placed]


def random_plans(rng: random.Random, rows: int, columns: int) -> list[Plan]:
    style = rng.choice(["small", "half", "huge", "mixed"])
    plans: list[Plan] = []
    for _ in range(rng.randint(20, 200)):
        if style == "small":
            lengths = [rng.randint(1, max(1, columns // 4)) for _ in range(rng.choice([1, 1, 2, 4]))]
        elif style == "half":
            # Two such items never share a row: the worst case for any packer.
            lengths = [rng.randint(columns // 2, columns // 2 + 1 + columns // 8) for _ in range(rng.randint(1, rows))]
        elif style == "huge":
            lengths = [rng.randint(1, columns + 1) for _ in range(rng.randint(1, 2 * rows))]
        else:
            lengths = [rng.randint(1, columns) for _ in range(rng.choice([1, 1, 2, 4, rng.randint(1, 2 * rows)]))]
        edges = (rng.randint(0, 12), rng.randint(0, 3), rng.randint(0, 3))
        plans.append(Plan([max(1, length) for length in lengths], edges, (rng.randint(0, 9), rng.randint(0, 2), rng.randint(0, 30))))
    return plans


def random_setting(rng: random.Random) -> tuple[int, int, int, Capacities]:
    rows, columns, window = rng.randint(1, 12), rng.choice([7, 16, 64, 200]), rng.randint(1, 5)
    segments = rng.randint(3, 60)
    limits = Capacities(
        positions=rows * columns,
        segments=segments,
        bags=rng.choice([segments, 3, 20]),
        edges=rng.choice([10, 100, 10**6]),
    )
    if rng.random() < 0.5:
        limits = replace(
            limits, query_span=8, query_tokens=rng.choice([10, 100]), documents=rng.choice([2, 40]), document_tokens=rng.choice([30, 999])
        )
    return rows, columns, window, limits


class Run:
    """One stream through a placement, batch by batch, with the arrivals that `take` saw."""

    def __init__(self, placement: Placement, plans: Sequence[Plan], late: bool) -> None:
        self.placement, self.plans, self.late = placement, plans, late
        self.arrived = 0
        self.kept: list[int] = []
        """Plan of each serial number."""

    def next_batch(self) -> list[Placed] | None:
        while not self.placement.ready():
            if self.arrived == len(self.plans):
                return self.placement.take() if self.placement.pool else None
            if self.placement.add(pending(self.plans[self.arrived], late=self.late)):
                self.kept.append(self.arrived)
            self.arrived += 1
        return self.placement.take()


def test_random_streams_lose_no_bag_pass_no_capacity_and_bound_the_delay() -> None:
    batches = 0
    for seed in range(150):
        rng = random.Random(seed)
        rows, columns, window, limits = random_setting(rng)
        plans = random_plans(rng, rows, columns)
        run = Run(Placement(rows, columns, limits, window), plans, limits.late_interaction)
        seen: list[int] = []
        while (placed := run.next_batch()) is not None:
            seen += check_batch(placed, [plans[place] for place in run.kept], rows, columns, limits)
            batches += 1
        assert sorted(seen) == list(range(len(run.kept)))
        assert run.placement.longest_delay <= 2 * window
    assert batches > 3000


def test_restoring_at_any_batch_goes_on_alike() -> None:
    for seed in range(60):
        rng = random.Random(1000 + seed)
        rows, columns, window, limits = random_setting(rng)
        plans = random_plans(rng, rows, columns)

        def fresh() -> Placement:
            return Placement(rows, columns, limits, window)  # noqa: B023  # called within this round

        run = Run(fresh(), plans, limits.late_interaction)
        log: list[list[tuple[int, list[int]]]] = []
        states = [(run.arrived, run.placement.state(), [run.kept[bag.serial] for bag in run.placement.pool])]
        while (placed := run.next_batch()) is not None:
            log.append([(run.kept[bag.serial], bag_rows) for bag, bag_rows in placed])
            states.append((run.arrived, run.placement.state(), [run.kept[bag.serial] for bag in run.placement.pool]))
        for at in sorted(rng.sample(range(len(log) + 1), min(6, len(log) + 1))):
            arrived, state, waiting = states[at]
            again = Run(fresh(), plans, limits.late_interaction)
            again.arrived, again.kept = arrived, list(waiting)
            again.placement.load(state, [pending(plans[place], late=limits.late_interaction) for place in waiting])
            for expected in log[at:]:
                placed = again.next_batch()
                assert placed is not None
                assert [(again.kept[bag.serial], bag_rows) for bag, bag_rows in placed] == expected
            assert again.next_batch() is None


def test_the_witness_always_takes_the_forced_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing most attempts on purpose leaves it to the witness rows: always feasible, the delay still bounded."""
    witness_batches = 0
    for seed in range(80):
        rng = random.Random(seed)
        rows, columns, window = rng.randint(1, 10), rng.choice([16, 64]), rng.randint(1, 4)
        limits = Capacities(positions=rows * columns, segments=rng.randint(10, 50), bags=50, edges=10**6)
        placement = Placement(rows, columns, limits, window)
        attempt: Callable[..., list[Placed] | None] = placement._attempt

        def unreliable(
            *args: object, _attempt: Callable[..., list[Placed] | None] = attempt, _rng: random.Random = rng, **named: object
        ) -> list[Placed] | None:
            return None if _rng.random() < 0.7 else _attempt(*args, **named)

        monkeypatch.setattr(placement, "_attempt", unreliable)
        plans = [Plan([rng.randint(1, columns) for _ in range(rng.randint(1, rows))]) for _ in range(200)]
        run, seen = Run(placement, plans, False), 0
        while (placed := run.next_batch()) is not None:
            seen += len(check_batch(placed, [plans[place] for place in run.kept], rows, columns, limits))
        assert seen == len(run.kept) and placement.longest_delay <= 2 * window
        witness_batches += placement.witness_batches
    assert witness_batches > 1000


def test_a_bag_that_only_an_exact_search_packs_is_packed() -> None:
    limits = Capacities(positions=20, segments=10, bags=10, edges=10)
    placement = Placement(2, 10, limits, 1)
    assert placement.add(pending(Plan([4, 3, 4, 3, 3, 3])))
    placed = placement.take()
    assert check_batch(placed, [Plan([4, 3, 4, 3, 3, 3])], 2, 10, limits) == [0]
    assert not placement.add(pending(Plan([11])))
    assert not placement.add(pending(Plan([7, 7, 7])))
    assert not placement.add(pending(Plan([1], edges=(0, 11, 0))))


def test_a_state_of_other_bags_or_rows_is_refused() -> None:
    limits = Capacities(positions=40, segments=10, bags=10, edges=10)
    placement = Placement(4, 10, limits, 2)
    placement.add(pending(Plan([3, 5])))
    state = placement.state()
    with pytest.raises(ValueError, match="4 rows do not suit a packer of 2 rows of 10"):
        Placement(2, 10, limits, 2).load(state, [pending(Plan([3, 5]))])
    with pytest.raises(ValueError, match="1 bags waited, 0 are given"):
        Placement(4, 10, limits, 2).load(state, [])
    with pytest.raises(ValueError, match="an item's length is not what it was"):
        Placement(4, 10, limits, 2).load(state, [pending(Plan([3, 6]))])
    for name, values, message in [
        ("item_row", [0, 4], "a group does not fit the rows that it names"),
        ("item_row", [-1, 0], "column item_row is int64 \\[2\\]: expected int64 \\[any\\], each at least 0"),
        ("item_row", [[0], [0]], "column item_row is int64 \\[2, 1\\]"),
        ("counters", [0, 0, 2**62, 0, 0], "column counters is int64 \\[5\\]: .* below 2\\^62"),
        ("counters", [0, 0, 7, 64, 0], "8 positions wait, and its counters .* know of fewer"),
        ("item_row", [0], "its columns do not belong together"),
        ("counters", [0], "its columns do not belong together"),
        ("bag_group", [7], "bag 0 is of group 7, which the state does not know"),
        ("witness_free", [11, 0, 0, 0], "4 rows do not suit a packer of 4 rows of 10"),
    ]:
        with pytest.raises(ValueError, match=message):
            Placement(4, 10, limits, 2).load({**state, name: np.array(values, np.int64)}, [pending(Plan([3, 5]))])


ROWS, COLUMNS = 32, 512


def generated(kind: str, rng: np.random.Generator, batches: int) -> list[Plan]:
    """Bags of about so many batches. Captions are log-normal; clips uniform from a fifth of a row to a whole one."""
    plans: list[Plan] = []
    total = 0
    while total < batches * ROWS * COLUMNS:
        caption = 2 + int(min(COLUMNS // 4 - 3, rng.lognormal(3.5, 0.6)))
        clip = int(rng.integers(COLUMNS // 5, COLUMNS + 1))
        sizes = {"captions": [caption], "clips": [clip], "captioned clips": [clip, caption]}
        if kind == "mix":
            picture = 1 + int(rng.integers(2, 12)) * int(rng.integers(2, 12))
            lengths = ([caption], [picture, caption], [clip, caption])[int(rng.choice(3, p=[0.5, 0.35, 0.15]))]
        else:
            lengths = sizes[kind]
        plans.append(Plan(lengths, (len(lengths) * (len(lengths) - 1), 0, 0)))
        total += sum(lengths)
    return plans


def steady_fill(plans: list[Plan], window: int) -> tuple[float, list[tuple[int, int]]]:
    """Mean share of positions past the first batches, and each batch's tokens and sum of squared lengths."""
    limits = Capacities(positions=ROWS * COLUMNS, segments=ROWS * COLUMNS // 8, bags=ROWS * COLUMNS // 8, edges=ROWS * COLUMNS)
    placement = Placement(ROWS, COLUMNS, limits, window)
    fills: list[float] = []
    costs: list[tuple[int, int]] = []
    for plan in plans:
        placement.add(pending(plan))
        while placement.ready():
            placed = placement.take()
            used = sum(bag.positions for bag, _ in placed)
            fills.append(used / (ROWS * COLUMNS))
            costs.append((used, sum(bag.squares for bag, _ in placed)))
    assert placement.longest_delay <= 2 * window
    return float(np.mean(fills[4:])), costs[4:]


def next_fit_fill(plans: list[Plan]) -> float:
    """Rows one after the other, without look-ahead: what a packer must at least beat."""
    rows, free, used = 1, COLUMNS, 0
    for plan in plans:
        for length in plan.lengths:
            if length > free:
                rows, free = rows + 1, COLUMNS
            free -= length
            used += length
    return used / (rows * COLUMNS)


@pytest.mark.parametrize(
    ("kind", "window", "least"),
    [("captions", 2, 0.995), ("captions", 4, 0.995), ("mix", 4, 0.99), ("clips", 4, 0.945), ("captioned clips", 4, 0.993)],
)
def test_fill_of_generated_lengths(kind: str, window: int, least: float) -> None:
    plans = generated(kind, np.random.default_rng(7), 60)
    fill, _ = steady_fill(plans, window)
    assert fill >= least
    assert fill > next_fit_fill(plans)


@pytest.mark.parametrize("kind", ["captions", "mix", "clips"])
def test_batches_of_several_ranks_cost_about_the_same(kind: str) -> None:
    """Attention's cost, the sum of squared lengths, over 8 streams: the dearest rank holds every step up."""
    streams = [steady_fill(generated(kind, np.random.default_rng(100 + rank), 14), 4)[1] for rank in range(8)]
    steps = min(len(costs) for costs in streams)
    squares = np.array([[squares for _, squares in costs[:steps]] for costs in streams], np.float64)
    assert float(np.mean(squares.max(axis=0) / squares.mean(axis=0))) <= 1.06


@pytest.mark.parametrize("seed", range(40))
def test_a_step_leaves_out_nothing_that_still_fits(seed: int) -> None:
    """Whichever capacity binds: many bags that want edges, then some that want none."""
    rng = random.Random(seed)
    rows, columns = rng.randint(2, 12), 64
    limits = Capacities(positions=rows * columns, bags=500, segments=500, edges=rng.randint(2, 30))
    plans: list[Plan] = []
    for _ in range(rng.randint(80, 220)):
        wants = rng.random() < 0.9
        lengths = [rng.randint(2, 12) for _ in range(2)] if wants else [rng.randint(1, 40)]
        plans.append(Plan(lengths, (rng.randint(1, 9), 0, 0) if wants else (0, 0, 0)))
    placement = Placement(rows, columns, limits, 1)
    # The others could never fit.
    plans = [plan for plan in plans if placement.add(pending(plan))]
    placed = placement.take_step()
    chosen = check_batch(placed, plans, rows, columns, limits)
    free = [columns] * rows
    for bag, bag_rows in placed:
        for row, length in zip(bag_rows, bag.lengths, strict=True):
            free[row] -= length
    edges = limits.edges - sum(plans[serial].edges[0] for serial in chosen)
    for serial in set(range(len(plans))) - set(chosen):
        plan = plans[serial]
        # Both items of a pair in the freest row, or each in a row of its own.
        longest, pair = max(plan.lengths), sum(plan.lengths)
        beside = sorted(free)[-2:]
        fits = longest <= max(free) and (len(plan.lengths) == 1 or pair <= max(free) or (min(plan.lengths) <= beside[0]))
        assert plan.edges[0] > edges or not fits
