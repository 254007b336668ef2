"""Going on from a state, on random small runs: after every batch, the rest and every later state are the same byte for byte. What
waited in the packer is read as it is placed.
"""

import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import units
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.sources import Source
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream
from treadle.shape import BatchShape

QUICK = RetryPolicy(attempts=20, budget=400, base_delay_s=0.0001, max_delay_s=0.001, timeout_s=20.0)


def shards(tars: Any, rng: random.Random, folder: Path, number: int) -> list[Path]:
    """Shards of a few samples each: texts, pictures, some that do not decode, an empty shard, one that is cut in a member."""
    folder.mkdir()
    paths: list[Path] = []
    for shard in range(number):
        samples = []
        for index in range(rng.choice([0, 3, 7, 12])):
            fields = tars.mixed_sample(rng)
            if rng.random() < 0.1:
                fields["png"] = b"no picture"
            samples.append((f"s{shard}/k{index}", fields))
        path = folder / f"{shard:03d}.tar"
        tars.write_shard(path, samples)
        paths.append(path)
    with tarfile.open(paths[-1]) as tar:
        members = tar.getmembers()
    if members:
        paths[-1].write_bytes(paths[-1].read_bytes()[: members[-1].offset_data])
    return paths


def random_options(rng: random.Random) -> dict[str, Any]:
    return {
        "seed": rng.getrandbits(64),
        "lanes": rng.choice([1, 3, 8]),
        "shuffle": rng.choice([0, 5, 40]),
        "shuffle_bytes": rng.choice([0, 20_000]),
        "epochs": rng.choice([1, 2]),
        "window": rng.choice([1, 2, 4]),
        "threads": 2,
    }


def check_every_restore(tars: Any, make: Any) -> None:
    with make() as stream:
        full = tars.run(stream)
    for place, (_, state) in enumerate(full):
        with make() as again:
            again.load_state(state)
            assert tars.run(again) == full[place + 1 :]


@pytest.mark.parametrize("seed", range(6))
def test_after_every_batch_the_rest_is_the_same(tars: Any, tmp_path: Path, seed: int) -> None:
    """Epoch ends, waiting bags, quarantined samples, a shard that ends in a damage; blends with a source that runs out, and one that repeats."""
    rng = random.Random(seed)
    sets = [shards(tars, rng, tmp_path / name, rng.choice([2, 4])) for name in ("a", "b", "c")]
    options = random_options(rng)
    blend = [Source([str(path) for path in paths], weight=weight) for paths, weight in zip(sets, (3.0, 1.0, 0.5), strict=True)]
    sources: Any = [[str(path) for path in sets[0]], blend[:2], [blend[0], Source(blend[1].urls, weight=2.0, repeat=True)]][seed % 3]
    check_every_restore(tars, lambda: ShardStream(sources, tars.shape, **options))


@pytest.mark.parametrize("seed", range(2))
def test_after_every_batch_the_rest_is_the_same_over_a_connection_that_breaks(tars: Any, tmp_path: Path, server: Any, seed: int) -> None:
    rng = random.Random(seed)
    urls: list[str] = []
    for path in shards(tars, rng, tmp_path / "a", 3):
        server.files[f"/{path.name}"] = path.read_bytes()
        urls.append(server.url.replace("shard.tar", path.name))

    def make(faults: bool = True) -> ShardStream:
        cuts = [rng.randrange(1, 2000) for _ in range(40)] if faults else []
        server.faults[:] = [lambda handler, cut=cut: handler.serve(cut=cut) for cut in cuts]
        return ShardStream(urls, tars.shape, retry=QUICK, **options)

    options = random_options(rng)
    with make(False) as stream:
        whole = tars.run(stream)
    with make() as stream:
        assert tars.run(stream) == whole
    check_every_restore(tars, make)


def test_texts_alone_come_back_alike(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path / "a", [40, 0, 25, 31])
    for lanes, shuffle in ((1, 0), (6, 20), (16, 200)):
        check_every_restore(
            tars, lambda lanes=lanes, shuffle=shuffle: ShardStream(pattern, tars.text_shape, lanes=lanes, shuffle=shuffle, epochs=2)
        )


def test_what_waited_is_read_as_it_is_placed(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window of 8 batches the first one after a resume reads about two of them: its own, and the one that it begins with."""
    pattern = tars.write_texts(tmp_path / "a", [600])
    options: dict[str, Any] = {"lanes": 4, "shuffle": 0, "epochs": 1, "window": 8, "threads": 1}
    stream = ShardStream(pattern, tars.text_shape, **options)
    first = next(stream)
    state = stream.state
    expected = next(stream)
    waiting = len(state.columns["pending_lane"])
    assert waiting > 6 * first.bags
    fetched: list[int] = []
    read_before = units.read_sample

    def counted(url: str, held: Any, retry: Any = None) -> Any:
        fetched.append(held.index)
        return read_before(url, held, retry)

    monkeypatch.setattr("treadle.pipeline.prepare.read_sample", counted)
    with ShardStream(pattern, tars.text_shape, **options) as again:
        again.load_state(state)
        assert next(again) == expected
        assert len(fetched) <= waiting // 2
        assert [batch.used_bytes for batch in again] == [batch.used_bytes for batch in stream]
    assert sorted(set(fetched)) == sorted(fetched)


def test_a_state_stays_small(tars: Any, tmp_path: Path) -> None:
    """64 lanes and `shuffle=10000`: below a MiB, with 4 batches of 64 captions each waiting."""
    pattern = tars.write_texts(tmp_path / "a", [4000, 4000, 4000])
    shape = BatchShape(max_rows_per_device=32, max_segments_per_device=64, max_columns_per_row=32)
    with ShardStream(pattern, shape, lanes=64, shuffle=10_000, epochs=1) as stream:
        batch = next(stream)
        assert batch.state is not None
        assert len(batch.state.columns["held_shard"]) > 9_900
        assert len(batch.state.to_bytes()) < 2**20


def test_worlds_deal_a_direct_stream_anew(tars: Any, tmp_path: Path) -> None:
    """1 to 2 to 4 to 3 to 1 ranks, a batch each: every text once, whichever rank had it."""
    pattern = tars.write_texts(tmp_path / "a", [50, 30, 45])
    options: dict[str, Any] = {"lanes": 12, "shuffle": 24, "epochs": 1, "window": 1}
    seen: Counter[tuple[int, int]] = Counter()
    state: StreamState | None = None
    for world_size in (1, 2, 4, 3, 1):
        states: list[StreamState] = []
        for rank in range(world_size):
            with ShardStream(pattern, tars.text_shape, rank=rank, world_size=world_size, **options) as stream:
                if state is not None:
                    stream.load_state(state)
                batch = next(stream, None)
                if batch is not None:
                    seen.update(tars.texts(batch))
                states.append(stream.state)
        state = StreamState.merge(states)
    with ShardStream(pattern, tars.text_shape, **options) as stream:
        stream.load_state(state)  # type: ignore[arg-type]  # set by the loop
        for batch in stream:
            seen.update(tars.texts(batch))
    assert seen == {(shard, index): 1 for shard, count in enumerate((50, 30, 45)) for index in range(count)}
