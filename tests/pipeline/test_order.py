"""pipeline/order.py against a plain transcription of its definition, and its promises on random plans: the same lanes for any
number of ranks, every sample once per epoch, and the same rest after any restore. Storage is simulated: sizes only.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from treadle.pipeline.draws import BLEND, HOLD, DrawSequence, permutation
from treadle.pipeline.order import Drawn, Ended, Held, Located, Order, OrderPlan, SourcePlan, UnitBrokenError

Ident = tuple[int, int, int, int]
"""(source, epoch, shard, index)"""


@dataclass
class Shards:
    """Simulated shards: the byte sizes of their samples, and the sample at which a broken one fails."""

    sizes: list[list[list[int]]]
    broken: dict[tuple[int, int], int] = field(default_factory=dict)
    at_hand: int = 1
    """Samples that come into memory together."""
    opened: int = 0

    def living(self, source: int, shard: int) -> int:
        return min(len(self.sizes[source][shard]), self.broken.get((source, shard), 1 << 30))

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[Located]]:
        self.opened += 1
        sizes = self.sizes[source][shard]
        assert offset == sum(sizes[:index])
        places = [place for place in range(index, self.living(source, shard)) if place % parts == part]
        for first in range(0, len(places), self.at_hand):
            yield [Held(place, sum(sizes[:place]), sizes[place]) for place in places[first : first + self.at_hand]]
        if self.living(source, shard) < len(sizes):
            raise UnitBrokenError(OSError(f"shard {shard} of source {source}"))


def random_case(rng: random.Random) -> tuple[OrderPlan, Shards]:
    lanes = rng.choice([1, 3, 8, 12])
    kind = rng.choice(["one", "one", "blend", "blend_repeat", "all_repeat"])
    weights = [1.0] if kind == "one" else [3.0, 1.0, 0.5]
    repeats = {"blend_repeat": [False, False, True], "all_repeat": [True, True, True]}.get(kind, [False] * len(weights))
    counts = [rng.choice([1, 2, 5, 8, 13, 30]) for _ in weights]
    sizes = [[[rng.randint(1, 50) for _ in range(rng.choice([0, 1, 7, 12, 20]))] for _ in range(count)] for count in counts]
    broken = {
        (source, shard): rng.randint(0, len(sizes[source][shard]))
        for source, count in enumerate(counts)
        for shard in range(count)
        if rng.random() < 0.1
    }
    plan = OrderPlan(
        sources=tuple(SourcePlan(shards=c, weight=w, repeat=r) for c, w, r in zip(counts, weights, repeats, strict=True)),
        seed=rng.getrandbits(64),
        lanes=lanes,
        shuffle=rng.choice([0, 1, 5, lanes * 4, 100]),
        shuffle_bytes=rng.choice([1 << 40, 200 * lanes, 2000]),
        epochs=rng.choice([1, 2, 3]),
    )
    return plan, Shards(sizes, broken)


class PlainLane:
    """The definition, step by step and without haste: every sample of a lane, computed from nothing but the plan."""

    def __init__(self, plan: OrderPlan, shards: Shards, lane: int) -> None:
        self.plan, self.shards, self.lane = plan, shards, lane
        self.streams = [self.epochs_of(source) for source in range(len(plan.sources))]
        self.heads = [next(stream, None) for stream in self.streams]
        self.draws = 0

    def epochs_of(self, source: int) -> Iterator[tuple[int, int, Ident]]:
        """(epoch, taken, sample) of the sub-lane."""
        plan, number = self.plan, self.plan.sources[source].shards
        parts = max(1, -(-plan.lanes // number))
        units = number * parts
        endless = plan.epochs is None or plan.sources[source].repeat
        draw = DrawSequence(plan.seed, HOLD, self.lane, source)
        depth, depth_bytes = plan.depth(source), plan.depth_bytes(source)
        count = dry = epoch = 0
        while endless or epoch < (plan.epochs or 0):
            order = permutation(plan.seed, source, epoch, number)
            queue: list[tuple[Ident, int]] = []
            for unit in range(epoch * units, (epoch + 1) * units):
                if unit % plan.lanes == self.lane:
                    place, part = divmod(unit % units, parts)
                    shard = int(order[place])
                    queue += [
                        ((source, epoch, shard, index), self.shards.sizes[source][shard][index])
                        for index in range(part, self.shards.living(source, shard), parts)
                    ]
            pool: list[tuple[Ident, int]] = []
            taken = 0
            while queue or pool:
                while queue and len(pool) < depth and (not pool or sum(s for _, s in pool) < depth_bytes):
                    pool.append(queue.pop(0))
                slot = draw.at(count) * len(pool) >> 32
                count += 1
                ident = pool[slot][0]
                pool[slot] = pool[-1]
                pool.pop()
                yield epoch, taken, ident
                taken += 1
            epoch += 1
            dry = 0 if taken else dry + 1
            if endless and dry == 3:
                return

    def key(self) -> tuple[int, int, int] | None:
        if len(self.heads) == 1:
            head = self.heads[0]
            return None if head is None else (head[0], head[1], self.lane)
        finite = [head for head, source in zip(self.heads, self.plan.sources, strict=True) if not source.repeat]
        if not any(self.heads) or (finite and not any(finite)):
            return None
        return 0, self.draws, self.lane

    def take(self) -> Ident:
        chosen = 0
        if len(self.heads) > 1:
            weights = [source.weight if head else 0.0 for head, source in zip(self.heads, self.plan.sources, strict=True)]
            point = DrawSequence(self.plan.seed, BLEND, self.lane).at(self.draws) / 2**32 * sum(weights)
            alive = [source for source, weight in enumerate(weights) if weight]
            bounds = {source: sum(weights[: source + 1]) for source in alive}
            chosen = next((source for source in alive if point < bounds[source]), alive[-1])
        self.draws += 1
        head = self.heads[chosen]
        assert head is not None
        self.heads[chosen] = next(self.streams[chosen], None)
        return head[2]


def plain_order(plan: OrderPlan, shards: Shards, rank: int, world_size: int, most: int) -> list[Ident]:
    lanes = [PlainLane(plan, shards, lane) for lane in range(rank, plan.lanes, world_size)]
    out: list[Ident] = []
    while len(out) < most:
        keys = [(key, lane) for lane in lanes if (key := lane.key()) is not None]
        if not keys:
            break
        out.append(min(keys, key=lambda each: each[0])[1].take())
    return out


def ident_of(step: Drawn) -> Ident:
    return step.source, step.epoch, step.shard, step.sample.index


def run(order: Order, most: int = 1 << 30) -> list[Drawn]:
    out: list[Drawn] = []
    while len(out) < most and isinstance(step := order.advance(), Drawn):
        out.append(step)
    return out


@pytest.mark.parametrize("seed", range(25))
def test_equals_the_plain_definition(seed: int) -> None:
    rng = random.Random(seed)
    plan, shards = random_case(rng)
    for world_size in sorted({1, min(2, plan.lanes), min(3, plan.lanes)}):
        for rank in range(world_size):
            expected = plain_order(plan, shards, rank, world_size, 250)
            found = [ident_of(step) for step in run(Order(plan, shards, rank=rank, world_size=world_size), 250)]
            assert found == expected


def long_case(rng: random.Random, blend: bool) -> tuple[OrderPlan, Shards]:
    """Long shards in small hold-backs: lanes that take turns for many rounds. Sources of a small weight hold back one sample alone."""
    weights = rng.choice([(3.0, 1.0), (1.0, 0.02), (2.0, 1.0, 0.05), (1.0, 1.0, 1.0, 1.0)]) if blend else (1.0,)
    counts = [rng.choice([3, 13, 20]) for _ in weights]
    plan = OrderPlan(
        sources=tuple(
            SourcePlan(shards=count, weight=weight, repeat=place > 0 and rng.random() < 0.5)
            for place, (weight, count) in enumerate(zip(weights, counts, strict=True))
        ),
        seed=rng.getrandbits(64),
        lanes=rng.choice([4, 8]),
        shuffle=rng.choice([0, 24, 60]),
        shuffle_bytes=rng.choice([1 << 40, 2000]),
        epochs=2,
    )
    sizes = [[[rng.randint(1, 50) for _ in range(rng.choice([200, 230]))] for _ in range(count)] for count in counts]
    return plan, Shards(sizes, {(0, 1): 100}, at_hand=rng.choice([30, 60]))


@pytest.mark.parametrize("seed", range(24))
def test_rounds_are_single_draws_taken_together(seed: int) -> None:
    """The same samples, keys and faults; any number of a round's samples consumed leaves the same standing; the rest can be followed."""
    rng = random.Random(2000 + seed)
    plan, shards = long_case(rng, blend=seed % 3 == 2) if seed % 3 else random_case(rng)
    single, many = Order(plan, shards), Order(plan, shards)
    for order in (single, many):
        order.record_moves(False)
    longest = seen = together = 0
    most = 2000
    while seen < most and (rounds := many.rounds()) is not None:
        count = len(rounds.refs)
        seen += count
        together += count if count > 1 else 0
        longest = max(longest, count)
        stop = rng.choice([1, count, rng.randint(1, count)])
        rest = many.rest([Held(*ref[1:]) for ref in rounds.refs[stop:]])
        steps: list[Drawn] = []
        standing = single.standing()()
        for place in range(count):
            step = single.advance()
            assert isinstance(step, Drawn)
            assert rounds.token(place)[:5] == (*step.key, step.epoch, step.source)
            assert rounds.refs[place] == (step.shard, step.sample.index, step.sample.offset, step.sample.size)
            assert [fault[:4] for fault in step.faults] == [fault[:4] for fault in many.take_faults()]
            if place + 1 == stop:
                standing = single.standing()()
                assert many.standing(count - stop)() == standing
            steps.append(step)
        lane_draws, cursors, pools = standing
        for step, followed in zip(steps[stop:], rest, strict=True):
            assert (followed.key, followed.lane_draws) == (step.key, step.lane_draws)
            for number, appended, slot, cursor in followed.moves:
                pools[number] += appended
                if slot >= 0:
                    last = pools[number].pop()
                    if slot < len(pools[number]):
                        pools[number][slot] = last
                cursors[number] = cursor
            lane_draws[followed.key[2]] = followed.lane_draws
        assert (lane_draws, cursors, pools) == single.standing()()
    assert seen >= most or isinstance(single.advance(), Ended)
    if seed % 3:
        assert (longest >= 25 and together > seen * 0.6) or plan.shuffle_bytes == 2000


@pytest.mark.parametrize("seed", range(16))
def test_every_sample_once_per_epoch_whatever_the_ranks(seed: int) -> None:
    plan, shards = random_case(random.Random(1000 + seed))
    if any(source.repeat for source in plan.sources):
        plan = OrderPlan(
            sources=tuple(SourcePlan(shards=s.shards, weight=s.weight) for s in plan.sources),
            seed=plan.seed, lanes=plan.lanes, shuffle=plan.shuffle, shuffle_bytes=plan.shuffle_bytes, epochs=plan.epochs,
        )  # fmt: skip
    expected = Counter(
        (source, epoch, shard, index)
        for source, each in enumerate(plan.sources)
        for epoch in range(plan.epochs or 0)
        for shard in range(each.shards)
        for index in range(shards.living(source, shard))
    )
    for world_size in range(1, min(plan.lanes, 5) + 1):
        seen: Counter[Ident] = Counter()
        for rank in range(world_size):
            seen.update(ident_of(step) for step in run(Order(plan, shards, rank=rank, world_size=world_size)))
        assert seen == expected


def test_keys_are_in_order_and_do_not_depend_on_ranks() -> None:
    plan, shards = random_case(random.Random(7))
    alone = {step.key: ident_of(step) for step in run(Order(plan, shards), 2000)}
    for rank in range(2):
        steps = run(Order(plan, shards, rank=rank, world_size=2), 400)
        assert [step.key for step in steps] == sorted(step.key for step in steps)
        assert all(alone[step.key] == ident_of(step) for step in steps)


def test_epochs_are_sharp_on_one_rank() -> None:
    rng = random.Random(3)
    shards = Shards([[[10] * rng.randint(5, 40) for _ in range(10)]])
    plan = OrderPlan(sources=(SourcePlan(shards=10),), lanes=64, shuffle=64, epochs=3)
    epochs = [step.epoch for step in run(Order(plan, shards))]
    assert epochs == sorted(epochs)
    orders = [[ident_of(step)[2:] for step in run(Order(plan, shards)) if step.epoch == epoch] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_the_deal_goes_on_across_epochs() -> None:
    # 65 shards on 64 lanes: dealt anew each epoch, lane 0 would read two shards in every epoch; going on, each lane in turn does.
    shards = Shards([[[1] for _ in range(65)]])
    plan = OrderPlan(sources=(SourcePlan(shards=65),), lanes=64, shuffle=0, epochs=64)
    per_lane = Counter(step.key[2] for step in run(Order(plan, shards)))
    assert set(per_lane.values()) == {65}


def test_fewer_shards_than_lanes_are_cut_into_parts() -> None:
    shards = Shards([[[1] * 100, [1] * 100]])
    plan = OrderPlan(sources=(SourcePlan(shards=2),), lanes=8, shuffle=0, epochs=1)
    assert plan.parts(0) == 4
    steps = run(Order(plan, shards))
    assert Counter(step.key[2] for step in steps) == Counter(dict.fromkeys(range(8), 25))
    for lane in range(8):
        assert len({step.sample.index % 4 for step in steps if step.key[2] == lane}) == 1


def test_blend_keeps_its_proportions() -> None:
    shards = Shards([[[1] * 4000] * 4, [[1] * 4000] * 4])
    plan = OrderPlan(sources=(SourcePlan(shards=4, weight=3.0), SourcePlan(shards=4, weight=1.0)), lanes=4, shuffle=8, seed=5)
    sources = Counter(step.source for step in run(Order(plan, shards), 8000))
    # Binomial with n = 8000, p = 1/4: standard deviation sqrt(8000 * 3 / 16) = 38.7; five of them.
    assert abs(sources[1] - 2000) < 194


def test_a_repeating_source_that_stays_dry_is_over() -> None:
    shards = Shards([[[], []], [[1] * 6]])
    sources = (SourcePlan(shards=2, repeat=True), SourcePlan(shards=1))
    steps = run(Order(OrderPlan(sources=sources, lanes=1, shuffle=4, epochs=2), shards))
    assert Counter(step.source for step in steps) == {1: 12}
    order = Order(OrderPlan(sources=(SourcePlan(shards=2),), lanes=1, epochs=None), Shards([[[], []]]))
    ended = order.advance()
    assert isinstance(ended, Ended)
    assert [move[3][6] for move in ended.moves] == [True]
    # Epochs 0, 1 and 2 were dry.
    assert ended.moves[0][3][5] == 2
    assert order.advance() == Ended([], ())


def test_a_broken_shard_ends_its_unit_and_is_told_once() -> None:
    shards = Shards([[[1] * 5, [1] * 5]], broken={(0, 0): 2})
    plan = OrderPlan(sources=(SourcePlan(shards=2),), lanes=1, shuffle=3, epochs=2)
    steps: list[Drawn | Ended] = [*run(order := Order(plan, shards))]
    steps.append(order.advance())
    assert Counter(step.shard for step in steps if isinstance(step, Drawn)) == {0: 4, 1: 10}
    assert [fault[:4] for step in steps for fault in step.faults] == [(0, 0, 0, 0), (0, 1, 0, 0)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"sources": (SourcePlan(shards=0),)}, "has 0 shards"),
        ({"sources": (SourcePlan(shards=1, weight=0.0),)}, "weighs 0.0"),
        ({"lanes": 0}, "lanes is 0"),
        ({"shuffle": -1}, "shuffle is -1"),
        ({"shuffle_bytes": 0}, "shuffle_bytes is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_plan_refuses(change: dict[str, object], named: str) -> None:
    fields: dict[str, object] = {"sources": (SourcePlan(shards=1),), **change}
    with pytest.raises(ValueError, match=named):
        OrderPlan(**fields)  # type: ignore[arg-type]  # the wrong types are the point


def test_more_ranks_than_lanes_are_refused() -> None:
    plan = OrderPlan(sources=(SourcePlan(shards=1),), lanes=4)
    with pytest.raises(ValueError, match="lanes is 4 and world_size is 5"):
        Order(plan, Shards([[[1]]]), world_size=5)
    with pytest.raises(ValueError, match="rank is 2"):
        Order(plan, Shards([[[1]]]), rank=2, world_size=2)
