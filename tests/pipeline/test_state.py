"""pipeline/state.py: positions that follow the order, and states that come back, merge and are dealt anew, on random plans.

Storage and packer are simulated: shards are sizes, the packer is a pool that gives batches by a fixed rule.
"""

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from treadle.pipeline.order import Drawn, Held, Located, Order, OrderPlan, SourcePlan, UnitBrokenError
from treadle.pipeline.pending import NUM_FIELDS
from treadle.pipeline.sources import Manifest, ManifestSource
from treadle.pipeline.state import Pending, Position, StreamState

Ident = tuple[int, int, int, int]
Batch = tuple[list[Ident], StreamState]


class Shards:
    """Simulated shards: sizes of their samples, and where broken ones fail."""

    def __init__(self, sizes: list[list[list[int]]], broken: dict[tuple[int, int], int]) -> None:
        self.sizes, self.broken = sizes, broken

    def living(self, source: int, shard: int) -> int:
        return min(len(self.sizes[source][shard]), self.broken.get((source, shard), 1 << 30))

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[Located]]:
        sizes = self.sizes[source][shard]
        assert offset == sum(sizes[:index])
        for place in range(index, self.living(source, shard)):
            if place % parts == part:
                yield [Held(place, sum(sizes[:place]), sizes[place])]
        if self.living(source, shard) < len(sizes):
            raise UnitBrokenError(OSError("broken"))


def manifest_of(plan: OrderPlan, seed: int | None = None) -> Manifest:
    return Manifest(
        sources=tuple(ManifestSource.of([f"{s}/{shard}.tar" for shard in range(each.shards)]) for s, each in enumerate(plan.sources)),
        seed=plan.seed if seed is None else seed, lanes=plan.lanes, shuffle=plan.shuffle, shuffle_bytes=plan.shuffle_bytes,
        epochs=plan.epochs,
    )  # fmt: skip


class Stream:
    """The stream's loop over a simulated packer: draws run ahead of what is consumed, and the state follows the consumer."""

    def __init__(self, plan: OrderPlan, shards: Shards, bad: set[tuple[int, int, int]], rank: int, world_size: int, ahead: int = 0) -> None:
        self.plan, self.bad, self.rank, self.world_size, self.ahead = plan, bad, rank, world_size, ahead
        self.manifest = manifest_of(plan).to_json()
        self.order = Order(plan, shards, rank=rank, world_size=world_size)
        self.position = Position(plan, rank, world_size)
        self.pool: list[Pending] = []
        self.batches = 0

    def state(self) -> StreamState:
        packer: dict[str, NDArray[Any]] = {"batches": np.array([self.batches]), **columns_of_bags(self.pool)}
        return StreamState.of_rank(self.manifest, self.rank, self.world_size, self.position.snapshot(), tuple(self.pool), lambda: packer)

    def load(self, state: StreamState) -> None:
        share = state.deal(self.rank, self.world_size)
        self.order.restore(share.lane_draws, share.cursors, share.pools)
        self.position.restore(share)
        self.pool = list(share.pending)
        self.batches = int(share.packer["batches"].tolist()[0]) if share.exact else 0
        if not share.exact:
            # Whoever drew a bag, what its packer knew of it came along.
            assert {name: values.tolist() for name, values in waiting(share.packer).items()} == {
                name: values.tolist() for name, values in waiting(columns_of_bags(self.pool)).items()
            }

    def take(self) -> Batch:
        """Some of the pool: which, depends on the batch's number, so that a wrong packer state shows."""
        chosen = [bag for place, bag in enumerate(self.pool) if place == 0 or (bag.sample_index + self.batches + place) % 3 == 0]
        self.pool = [bag for bag in self.pool if bag not in chosen]
        self.batches += 1
        return [(bag.source, bag.epoch, bag.shard, bag.sample_index) for bag in chosen], self.state()

    def __iter__(self) -> Iterator[Batch]:
        queue: list[Drawn] = []
        ended = None
        while True:
            # A loaded pool may already be past the mark: it gives batches before more is drawn.
            while len(self.pool) >= 9:
                yield self.take()
            while ended is None and len(queue) <= self.ahead:
                step = self.order.advance()
                if isinstance(step, Drawn):
                    queue.append(step)
                else:
                    ended = step
            if not queue:
                break
            step = queue.pop(0)
            self.position.follow(step)
            if (step.source, step.shard, step.sample.index) not in self.bad:
                sample = step.sample
                self.pool.append(Pending(*step.key, step.epoch, step.source, step.shard, sample.index, sample.offset, sample.size))
        assert ended is not None
        self.position.follow(ended)
        while self.pool:
            yield self.take()


def columns_of_bags(bags: Sequence[Pending]) -> dict[str, NDArray[Any]]:
    """What a packer would say of bags of one to three items, of two demands."""
    items = [bag.sample_index % 3 + 1 for bag in bags]
    return {
        "bag_items": np.array(items, np.int64),
        "item_length": np.array([bag.offset + place for bag, count in zip(bags, items, strict=True) for place in range(count)], np.int64),
        "demand": np.arange(2 * NUM_FIELDS),
        "bag_demand": np.array([bag.shard % 2 for bag in bags], np.int64),
    }


def waiting(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same with each bag's demand written out."""
    demands = columns["demand"].reshape(-1, NUM_FIELDS)[columns["bag_demand"]]
    return {"bag_items": columns["bag_items"], "item_length": columns["item_length"], "demands": demands}


def random_case(rng: random.Random) -> tuple[OrderPlan, Shards, set[tuple[int, int, int]]]:
    lanes = rng.choice([1, 3, 8, 12])
    kind = rng.choice(["one", "one", "blend", "blend_repeat"])
    weights = [1.0] if kind == "one" else [3.0, 1.0, 0.5]
    counts = [rng.choice([1, 2, 5, 8, 13]) for _ in weights]
    sizes = [[[rng.randint(1, 50) for _ in range(rng.choice([0, 1, 4, 9]))] for _ in range(count)] for count in counts]
    broken = {
        (source, shard): rng.randint(0, len(sizes[source][shard]))
        for source, count in enumerate(counts)
        for shard in range(count)
        if rng.random() < 0.1
    }
    plan = OrderPlan(
        sources=tuple(
            SourcePlan(shards=count, weight=weight, repeat=kind == "blend_repeat" and place == 2)
            for place, (count, weight) in enumerate(zip(counts, weights, strict=True))
        ),
        seed=rng.getrandbits(64),
        lanes=lanes,
        shuffle=rng.choice([0, 1, 5, lanes * 4, 100]),
        shuffle_bytes=rng.choice([1 << 40, 200 * lanes, 2000]),
        epochs=rng.choice([1, 2, 3]),
    )
    bad = {(rng.randrange(len(weights)), rng.randrange(13), rng.randrange(9)) for _ in range(12)}
    return plan, Shards(sizes, broken), bad


@pytest.mark.parametrize("seed", range(40))
def test_restore_at_every_batch_gives_the_same_rest(seed: int) -> None:
    rng = random.Random(seed)
    plan, shards, bad = random_case(rng)
    for world_size in sorted({1, min(2, plan.lanes), min(3, plan.lanes)}):
        for rank in range(world_size):
            full = [(batch, state.to_bytes()) for batch, state in Stream(plan, shards, bad, rank, world_size)]
            places = range(len(full)) if len(full) < 10 else sorted(rng.sample(range(len(full)), 4))
            for place in places:
                again = Stream(plan, shards, bad, rank, world_size, ahead=rng.choice([0, 1, 7, 40]))
                again.load(StreamState.from_bytes(full[place][1]))
                assert again.state().to_bytes() == full[place][1]
                assert [(batch, state.to_bytes()) for batch, state in again] == full[place + 1 :]


@pytest.mark.parametrize("seed", range(24))
def test_worlds_1_2_4_3_1_see_each_sample_once_per_epoch(seed: int) -> None:
    rng = random.Random(500 + seed)
    plan, shards, bad = random_case(rng)
    while plan.lanes < 4:
        plan, shards, bad = random_case(rng)
    seen: Counter[Ident] = Counter()
    state: StreamState | None = None
    for world_size in (1, 2, 4, 3, 1):
        states: list[StreamState] = []
        for rank in range(world_size):
            stream = Stream(plan, shards, bad, rank, world_size, ahead=rng.choice([0, 5]))
            if state is not None:
                stream.load(state)
            states.append(stream.state())
            # Ranks stop after different numbers of batches; states merge all the same.
            for _, (batch, position) in zip(range(rng.randint(0, 5)), stream, strict=False):
                seen.update(batch)
                states[rank] = position
        rng.shuffle(states)
        state = StreamState.merge(states)
        state = pickle.loads(pickle.dumps(state))
    stream = Stream(plan, shards, bad, 0, 1)
    assert state is not None
    stream.load(state)
    for batch, _ in stream:
        seen.update(batch)
    expected = Counter(
        (source, epoch, shard, index)
        for source, each in enumerate(plan.sources)
        if not each.repeat
        for epoch in range(plan.epochs or 0)
        for shard in range(each.shards)
        for index in range(shards.living(source, shard))
        if (source, shard, index) not in bad
    )
    assert Counter({ident: n for ident, n in seen.items() if not plan.sources[ident[0]].repeat}) == expected
    assert max(seen.values(), default=1) == 1


def small_states(world_size: int) -> list[StreamState]:
    shards = Shards([[[10] * 9 for _ in range(4)]], {})
    plan = OrderPlan(sources=(SourcePlan(shards=4),), lanes=4, shuffle=8, epochs=1)
    return [next(iter(Stream(plan, shards, set(), rank, world_size)))[1] for rank in range(world_size)]


def test_a_state_comes_back_from_bytes_equal() -> None:
    state = small_states(1)[0]
    again = StreamState.from_bytes(state.to_bytes())
    assert again == state
    assert again.to_bytes() == state.to_bytes()
    assert (again.world_size, again.ranks, again.lanes) == (1, (0,), 4)
    assert again.samples == sum(again.columns["draws"].tolist()) > 0
    assert "samples=" in repr(again)
    assert again != small_states(2)[0]
    assert again != "a state"


def test_a_later_snapshot_does_not_change_an_earlier_one() -> None:
    shards = Shards([[[10] * 9 for _ in range(4)]], {})
    plan = OrderPlan(sources=(SourcePlan(shards=4),), lanes=4, shuffle=8, epochs=1)
    lazy = [state for _, state in Stream(plan, shards, set(), 0, 1)]
    eager = [state.to_bytes() for _, state in Stream(plan, shards, set(), 0, 1)]
    assert [state.to_bytes() for state in lazy] == eager


def test_merge_does_not_depend_on_the_order_of_states() -> None:
    states = small_states(3)
    assert StreamState.merge(states) == StreamState.merge(states[::-1])
    assert StreamState.merge([StreamState.merge(states)]) == StreamState.merge(states)


def test_merge_refuses() -> None:
    states = small_states(3)
    with pytest.raises(ValueError, match=r"missing \[1\]"):
        StreamState.merge([states[0], states[2]])
    with pytest.raises(ValueError, match=r"there twice \[0\]"):
        StreamState.merge([*states, states[0]])
    with pytest.raises(ValueError, match="states of 3 ranks and of 2"):
        StreamState.merge([*states, small_states(2)[1]])
    with pytest.raises(ValueError, match="no states"):
        StreamState.merge([])
    plan = OrderPlan(sources=(SourcePlan(shards=4),), lanes=4, shuffle=8, epochs=1)
    other = StreamState(manifest_of(plan, seed=9).to_json(), 3, (1,), dict(states[1].columns))
    with pytest.raises(ValueError, match="seed: 0 is not 9"):
        StreamState.merge([states[0], other, states[2]])


def test_deal_refuses_what_it_does_not_hold() -> None:
    states = small_states(3)
    with pytest.raises(ValueError, match=r"this stream is rank 1, the state is of \[0\]"):
        states[0].deal(1, 3)
    with pytest.raises(ValueError, match=r"StreamState\.merge"):
        states[0].deal(0, 2)


def test_dealt_bags_are_sorted_by_their_draw() -> None:
    merged = StreamState.merge(small_states(3))
    alone = merged.deal(0, 1)
    assert not alone.exact
    assert [bag[:3] for bag in alone.pending] == sorted(bag[:3] for bag in alone.pending)
    halves = [merged.deal(rank, 2) for rank in range(2)]
    assert sorted([*halves[0].pending, *halves[1].pending]) == sorted(alone.pending)
    assert all(bag.lane % 2 == rank for rank, half in enumerate(halves) for bag in half.pending)


def test_from_bytes_refuses_what_is_no_state() -> None:
    data = small_states(1)[0].to_bytes()
    columns = load(data)

    def changed(**change: NDArray[Any] | None) -> bytes:
        return save({name: values for name, values in {**columns, **change}.items() if values is not None})

    for bad, named in [
        (b"nothing", "not a safetensors file"),
        (data[:-9], "not a safetensors file"),
        (save({"x": np.zeros(1)}), "no format and manifest"),
        (changed(format=np.array([2, 1])), "format is 2"),
        (changed(manifest=np.frombuffer(b"{", np.uint8)), "not JSON"),
        (changed(manifest=np.frombuffer(b"[]", np.uint8)), "names no lanes"),
        (changed(unit=None), "column unit is missing"),
        (changed(epoch=columns["epoch"][:-1]), "column epoch is int64"),
        (changed(draws=columns["draws"] - 1000), "column draws holds a negative"),
        (changed(held_count=columns["held_count"] + 1), "column held_shard"),
        (changed(lane=columns["lane"][::-1].copy()), "lanes"),
        (changed(rank=np.array([1], np.int32)), "ranks"),
        (changed(pending_count=np.array([10**12])), "column pending_round"),
        (changed(held_shard=columns["held_shard"] + 4), "held_shard names a shard"),
        (changed(pending_source=columns["pending_source"] + 1), "pending_source names a source"),
        (changed(pending_shard=columns["pending_shard"] + 4), "pending_shard names a shard"),
    ]:
        with pytest.raises(ValueError, match=named):
            StreamState.from_bytes(bad)
