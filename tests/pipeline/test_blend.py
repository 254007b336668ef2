"""Blended sources: long-run proportions, what becomes of a source that is exhausted (it stops, or it repeats), and going on in the
middle of either, with the same ranks or others.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.order import Drawn, Held, Located, Order, OrderPlan, SourcePlan
from treadle.pipeline.sources import Source
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream
from treadle.shape import BatchShape

Text = tuple[str, int, int]
"""Name of its source, shard, index."""


class Endless:
    """Shards of a hundred samples each, of every source."""

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[Located]]:
        return iter([[Held(number, number, 1) for number in range(index, 100) if number % parts == part]])


def write(tars: Any, folder: Path, name: str, counts: Sequence[int]) -> str:
    """Texts that say where they are from."""
    (folder / name).mkdir(parents=True)
    for shard, count in enumerate(counts):
        tars.write_shard(
            folder / name / f"{shard:03d}.tar", [(f"k{index}", {"txt": f"{name} {shard} {index}".encode()}) for index in range(count)]
        )
    return str(folder / name / "*.tar")


def texts(batch: Any) -> list[Text]:
    """The texts of a batch."""
    found: list[Text] = []
    for segment in range(batch.segments):
        name, shard, index = batch.payload(segment).tobytes().decode().split()
        found.append((name, int(shard), int(index)))
    return found


def every(name: str, counts: Sequence[int], times: int) -> Counter[Text]:
    return Counter({(name, shard, index): times for shard, count in enumerate(counts) for index in range(count)})


@pytest.mark.parametrize("weights", [(1.0, 1.0), (5.0, 3.0, 2.0), (0.02, 0.98), (7.0, 1e-3, 3.0)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_proportions_hold_in_the_long_run_on_every_rank(weights: tuple[float, ...], world_size: int) -> None:
    plan = OrderPlan(sources=tuple(SourcePlan(shards=6, weight=weight) for weight in weights), lanes=6, shuffle=30, seed=11)
    draws = 6000
    for rank in range(world_size):
        order = Order(plan, Endless(), rank=rank, world_size=world_size)
        counts: Counter[int] = Counter()
        for number in range(1, draws + 1):
            step = order.advance()
            assert isinstance(step, Drawn)
            counts[step.source] += 1
            if number in (500, draws):
                for source, weight in enumerate(weights):
                    share = weight / sum(weights)
                    # Binomial: five standard deviations, and one draw for shares whose deviation is below it.
                    assert abs(counts[source] - number * share) <= 5 * (number * share * (1 - share)) ** 0.5 + 1


def test_lanes_draw_their_blends_apart() -> None:
    plan = OrderPlan(sources=(SourcePlan(shards=4), SourcePlan(shards=4)), lanes=4, shuffle=0)
    order = Order(plan, Endless())
    lanes: list[list[int]] = [[] for _ in range(4)]
    for _ in range(400):
        step = order.advance()
        assert isinstance(step, Drawn)
        lanes[step.key[2]].append(step.source)
    # Two lanes alike in all of 100 fair draws: once in 2^100.
    assert len({tuple(lane) for lane in lanes}) == 4


A, B = [9, 2, 12], [40, 31, 5, 44]


def stopping(tars: Any, folder: Path, **changed: Any) -> ShardStream:
    """A small source with a large share, which is exhausted long before the other."""
    return blended(tars, folder, repeat=False, **changed)


def repeating(tars: Any, folder: Path, **changed: Any) -> ShardStream:
    """The same, and it begins again."""
    return blended(tars, folder, repeat=True, **changed)


def blended(tars: Any, folder: Path, *, repeat: bool, **changed: Any) -> ShardStream:
    sources = [Source(str(folder / "a" / "*.tar"), weight=3.0, repeat=repeat), Source(str(folder / "b" / "*.tar"), weight=1.0)]
    options: dict[str, Any] = {"lanes": 12, "shuffle": 24, "epochs": 2, "window": 2, "seed": 4, **changed}
    return ShardStream(sources, tars.text_shape, **options)


@pytest.fixture(name="folder")
def folder_fixture(tars: Any, tmp_path: Path) -> Path:
    write(tars, tmp_path, "a", A)
    write(tars, tmp_path, "b", B)
    return tmp_path


def test_a_source_that_is_exhausted_stops_and_the_others_go_on(tars: Any, folder: Path) -> None:
    with stopping(tars, folder, lanes=1) as stream:
        drawn = [text for batch in stream for text in texts(batch)]
    assert Counter(drawn) == every("a", A, 2) + every("b", B, 2)
    last = max(place for place, text in enumerate(drawn) if text[0] == "a")
    before = Counter(text[0] for text in drawn[: last + 1])
    # Up to its 46th and last draw of weight 3 in 4, the other was drawn some 15 times: five deviations of a negative binomial,
    # sqrt(46 * 1/4) / (3/4) = 4.5; batches mix what a window of two holds, some 40 samples.
    assert before["a"] == 46 and before["b"] <= 15 + 23 + 40
    assert len(drawn) - last - 1 >= 240 - 15 - 23 - 40


def test_a_source_that_repeats_keeps_its_share_to_the_end(tars: Any, folder: Path) -> None:
    with repeating(tars, folder) as stream:
        drawn = Counter(text for batch in stream for text in texts(batch))
    assert Counter({text: count for text, count in drawn.items() if text[0] == "b"}) == every("b", B, 2)
    total = sum(count for text, count in drawn.items() if text[0] == "a")
    # 240 draws of weight 1 beside some 720 of weight 3: five deviations of a negative binomial, sqrt(240 * 3/4) / (1/4) = 53.7. A lane
    # ends with its last draw of the other source, so that what would follow it is missing.
    assert abs(total - 720) < 270
    assert set(drawn) == set(every("a", A, 1) + every("b", B, 1))


@pytest.mark.parametrize("make", [stopping, repeating])
def test_going_on_after_every_batch_gives_the_same_rest(tars: Any, folder: Path, make: Any) -> None:
    with make(tars, folder, lanes=3) as stream:
        full = tars.run(stream)
    over = [StreamState.from_bytes(state).columns["over"].reshape(3, 2) for _, state in full]
    # Lanes in which the first source is exhausted: one of three, then all, while the other goes on; of a repeating one, none.
    exhausted = {int(columns[:, 0].sum()) for columns in over[:-1]}
    assert exhausted >= {1, 3} if make is stopping else exhausted == {0}
    for place, (_, state) in enumerate(full):
        with make(tars, folder, lanes=3) as again:
            again.load_state(state)
            assert tars.run(again) == full[place + 1 :]


@pytest.mark.parametrize("make", [stopping, repeating])
@pytest.mark.parametrize("seed", range(3))
def test_worlds_1_2_4_3_1_in_a_blend(tars: Any, folder: Path, make: Any, seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[Text] = Counter()
    state: StreamState | None = None
    for world_size in (1, 2, 4, 3, 1):
        states: list[StreamState] = []
        for rank in range(world_size):
            with make(tars, folder, rank=rank, world_size=world_size) as stream:
                if state is not None:
                    stream.load_state(state)
                for _, batch in zip(range(rng.randint(0, 3)), stream, strict=False):
                    seen.update(texts(batch))
                states.append(stream.state)
        state = StreamState.merge(states)
    assert state is not None
    with make(tars, folder) as stream:
        stream.load_state(state)
        for batch in stream:
            seen.update(texts(batch))
        ended = stream.state
    assert Counter({text: count for text, count in seen.items() if text[0] == "b"}) == every("b", B, 2)
    if make is stopping:
        assert Counter({text: count for text, count in seen.items() if text[0] == "a"}) == every("a", A, 2)
    else:
        # Each lane stands in an epoch of its own: a sample has come in every epoch that all lanes are through, and in none that none began.
        epochs = ended.columns["epoch"].reshape(12, 2)[:, 0]
        assert all(epochs.min() <= seen[text] <= epochs.max() + 1 for text in every("a", A, 1))


def test_a_state_of_another_blend_is_refused_naming_the_difference(tars: Any, folder: Path) -> None:
    with stopping(tars, folder) as stream:
        state = next(stream).state
    assert state is not None
    a, b = str(folder / "a" / "*.tar"), str(folder / "b" / "*.tar")
    cases: list[tuple[list[Source], str]] = [
        ([Source(a, weight=2.0), Source(b)], r"sources\[0\]\.weight: 2\.0 is not 3\.0"),
        ([Source(a, weight=3.0, repeat=True), Source(b)], r"sources\[0\]\.repeat: True is not False"),
        ([Source(a, weight=3.0)], r"sources"),
        ([Source(b, weight=3.0), Source(a)], r"sources\[0\]\.urls"),
        ([Source([a, str(folder / "b" / "000.tar")], weight=3.0), Source(b)], r"sources\[0\]"),
    ]
    for sources, named in cases:
        with (
            ShardStream(sources, tars.text_shape, lanes=12, shuffle=24, epochs=2, window=2, seed=4) as other,
            pytest.raises(ValueError, match="the state belongs to another stream.*" + named),
        ):
            other.load_state(state)


@pytest.mark.parametrize("seed", range(3))
def test_long_sources_are_dealt_through_a_chain_of_worlds(tars: Any, tmp_path: Path, seed: int) -> None:
    """Lanes that take turns for many samples at once, ranks that stop anywhere in between, a source so small that a lane holds back one of it."""
    counts = {"a": [130, 150, 90], "b": [200, 40], "c": [37]}
    for name, each in counts.items():
        write(tars, tmp_path, name, each)
    weights = [(3.0, 1.0, 0.05), (1.0, 1.0, 1.0), (0.02, 2.0, 1.0)][seed]
    sources = [Source(str(tmp_path / name / "*.tar"), weight=weight) for name, weight in zip(counts, weights, strict=True)]
    rng = random.Random(seed)
    shape = BatchShape(max_rows_per_device=2, max_segments_per_device=64, max_columns_per_row=256)

    def make(rank: int, world_size: int) -> ShardStream:
        return ShardStream(sources, shape, rank=rank, world_size=world_size, lanes=12, shuffle=40, epochs=2, window=1, seed=seed, threads=1)

    seen: Counter[Text] = Counter()
    state: StreamState | None = None
    for number, world_size in enumerate((1, 2, 4, 3, 1)):
        states: list[StreamState] = []
        for rank in range(world_size):
            with make(rank, world_size) as stream:
                if state is not None:
                    stream.load_state(state)
                most = 1 << 30 if number == 4 else rng.randint(0, 3)
                for _, batch in zip(range(most), stream, strict=False):
                    seen.update(texts(batch))
                states.append(StreamState.from_bytes(stream.state.to_bytes()))
        state = StreamState.merge(states)
    assert seen == every("a", counts["a"], 2) + every("b", counts["b"], 2) + every("c", counts["c"], 2)


@pytest.mark.parametrize("repeat", [False, True])
def test_any_position_of_long_sources_goes_on_exactly(tars: Any, tmp_path: Path, repeat: bool) -> None:
    write(tars, tmp_path, "a", [300, 250, 90])
    write(tars, tmp_path, "b", [37, 20])
    sources = [Source(str(tmp_path / "a" / "*.tar"), weight=2.0), Source(str(tmp_path / "b" / "*.tar"), weight=0.1, repeat=repeat)]

    def make() -> ShardStream:
        return ShardStream(sources, tars.text_shape, lanes=4, shuffle=30, epochs=1, window=1, seed=2, threads=1)

    with make() as stream:
        whole = tars.run(stream)
    # Every third: 2 seconds.
    for at in range(0, len(whole), 3):
        with make() as stream:
            stream.load_state(whole[at][1])
            assert tars.run(stream, 4) == whole[at + 1 : at + 5]
