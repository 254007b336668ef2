"""Going on from a state, on random small runs: after every batch, the rest and every later state are the same byte for byte. What
waited in the packer is read as it is placed.
"""

import gzip
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from treadle.pipeline import units
from treadle.pipeline.bag import decode_bag
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.sources import Source
from treadle.pipeline.state import StreamState
from treadle.pipeline.storage import LocalStream
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


def test_dealt_anew_what_waited_is_read_as_it_is_placed(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bags of 8 batches that waited on two ranks, one rank reads about two batches' worth before it has its first."""
    pattern = tars.write_texts(tmp_path / "a", [600, 600])
    options: dict[str, Any] = {"lanes": 4, "shuffle": 0, "epochs": 1, "window": 8, "threads": 1}
    states: list[StreamState] = []
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(2):
        with ShardStream(pattern, tars.text_shape, rank=rank, world_size=2, **options) as stream:
            seen.update(tars.texts(next(stream)))
            states.append(stream.state)
    merged = StreamState.merge(states)
    waiting = len(merged.columns["pending_lane"])
    fetched: list[tuple[str, int]] = []
    read_before = units.read_sample

    def counted(url: str, held: Any, retry: Any = None) -> Any:
        fetched.append((url, held.index))
        return read_before(url, held, retry)

    monkeypatch.setattr("treadle.pipeline.prepare.read_sample", counted)
    with ShardStream(pattern, tars.text_shape, **options) as alone:
        alone.load_state(merged)
        # Its own position is known before anything is read, and another stream goes on from it alike.
        own = alone.state
        assert not fetched and len(own.columns["pending_lane"]) == waiting
        first = next(alone)
        assert len(fetched) <= 3 * first.bags < waiting // 2
        rest = [first, *alone]
        assert sorted(set(fetched)) == sorted(fetched)
    with ShardStream(pattern, tars.text_shape, **options) as again:
        again.load_state(own)
        assert list(again) == rest
    for batch in rest:
        seen.update(tars.texts(batch))
    assert seen == {(shard, index): 1 for shard in range(2) for index in range(600)}


def test_a_resume_asks_for_ranges_over_shared_connections(tars: Any, tmp_path: Path, site: Any) -> None:
    """Held-back and waiting samples come as ranges, neighbours together, over as many connections as reads at once and no more."""
    rng = random.Random(3)
    urls: list[str] = []
    for shard in range(20):
        path = tmp_path / f"{shard}.tar"
        tars.write_shard(path, [(f"k{index}", {"txt": rng.randbytes(20), "png": tars.png(rng, 20, 20)}) for index in range(40)])
        urls.append(site.url(path.name, path.read_bytes()))

    def make() -> ShardStream:
        return ShardStream(urls, tars.shape, lanes=8, shuffle=400, epochs=1, window=2, threads=2)

    with make() as stream:
        state = next(stream).state
        full = tars.run(stream)
    assert state is not None
    before = site.requests, site.sent, site.connections
    with make() as again:
        again.load_state(state)
        assert tars.run(again, 1) == full[:1]
        requests, sent, connections = site.requests - before[0], site.sent - before[1], site.connections - before[2]
        # Of the shards' 800 samples some 400 are held back: most of them are left where they are.
        assert requests < 200 and connections < requests
        assert sent < sum(len(data) for data in site.files.values())
        assert tars.run(again) == full[1:]


@pytest.mark.parametrize("where", ["local", "http"])
def test_what_was_consumed_is_not_read_again(tars: Any, tmp_path: Path, site: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a plain shard of 4 MB, of which a chunk is 1 to 2 MiB: half of it is read, not what comes before."""
    tars.write_texts(tmp_path, [2000], width=1000)
    data = (tmp_path / "000.tar").read_bytes()
    url = str(tmp_path / "000.tar") if where == "local" else site.url("000.tar", data)
    read: list[int] = []
    read_before = LocalStream.read

    def counted(self: LocalStream, n: int) -> bytes:
        piece = read_before(self, n)
        read.append(len(piece))
        return piece

    monkeypatch.setattr(LocalStream, "read", counted)

    def make() -> ShardStream:
        shape = BatchShape(max_rows_per_device=4, max_segments_per_device=24, max_columns_per_row=1024)
        return ShardStream(url, shape, lanes=1, shuffle=0, epochs=1, window=1, threads=1)

    with make() as stream:
        full = tars.run(stream)
    half = len(full) // 2
    read.clear()
    site.sent = 0
    with make() as again:
        again.load_state(full[half][1])
        assert tars.run(again) == full[half + 1 :]
    assert len(data) * 0.4 < (sum(read) if where == "local" else site.sent) < len(data) * 0.6


@pytest.mark.parametrize("pack", ["gz", "zst"])
@pytest.mark.parametrize("lanes", [1, 6])
def test_a_packed_shard_is_read_again_and_not_decoded_again(
    tars: Any, tmp_path: Path, pack: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    for shard in range(2):
        path = tmp_path / f"{shard}.tar"
        tars.write_shard(path, [(f"s{shard}/k{index}", {"png": tars.png(rng, 16, 16)}) for index in range(30)])
        data = path.read_bytes()
        (tmp_path / f"{shard}.tar.{pack}").write_bytes(gzip.compress(data) if pack == "gz" else zstandard.compress(data))
    decoded: list[int] = []

    def counted(items: Any, *given: Any, **named: Any) -> Any:
        decoded.append(len(items))
        return decode_bag(items, *given, **named)

    monkeypatch.setattr("treadle.pipeline.prepare.decode_bag", counted)

    def make() -> ShardStream:
        return ShardStream(str(tmp_path / f"*.tar.{pack}"), tars.shape, lanes=lanes, shuffle=8, epochs=1, window=1, threads=1)

    with make() as stream:
        full = tars.run(stream)
    assert sum(decoded) == 60
    for place, (_, state) in enumerate(full):
        # Of what was consumed only the pictures that waited for their batch are decoded again.
        consumed = StreamState.from_bytes(state)
        decoded.clear()
        with make() as again:
            again.load_state(state)
            assert tars.run(again) == full[place + 1 :]
        assert sum(decoded) == 60 - consumed.samples + len(consumed.columns["pending_lane"])


def test_at_the_very_end_of_an_epoch(tars: Any, tmp_path: Path) -> None:
    """Four texts of 24 positions fill a batch of two rows of 48: after six batches the first epoch of 24 is over, and nothing waits."""
    tars.write_shard(tmp_path / "0.tar", [(f"k{index}", {"txt": f"{index:023d}".encode()}) for index in range(24)])

    def make() -> ShardStream:
        return ShardStream(str(tmp_path / "0.tar"), tars.text_shape, lanes=1, shuffle=5, epochs=3, window=1)

    with make() as stream:
        states = [batch.state for batch in stream]
    assert [state.samples for state in states if state is not None] == list(range(4, 73, 4))
    assert all(state is not None and not len(state.columns["pending_lane"]) for state in states)
    check_every_restore(tars, make)


def test_between_an_items_arrival_and_its_batch(tars: Any, mixed: Any) -> None:
    with mixed(window=4) as stream:
        waited = [len(batch.state.columns["pending_lane"]) for batch in stream]
    assert max(waited) > 10
    check_every_restore(tars, lambda: mixed(window=4))


def test_before_and_after_what_is_quarantined_it_is_told_once(tars: Any, tmp_path: Path) -> None:
    rng = random.Random(1)
    samples = [(f"k{index}", tars.mixed_sample(rng)) for index in range(60)]
    for index in (7, 31, 32, 50):
        samples[index] = (f"k{index}", {"txt": b"beside it", "png": b"no picture"})
    tars.write_shard(tmp_path / "0.tar", samples)

    def make() -> ShardStream:
        return ShardStream(str(tmp_path / "0.tar"), tars.shape, lanes=3, shuffle=9, epochs=1, window=2, threads=2)

    full, told = [], []
    with make() as stream:
        for batch in stream:
            full.append(tars.snapshot(batch))
            told.append(stream.quarantine.total)
    assert told[0] < told[len(told) // 2] < told[-1] == 4
    for place, (_, state) in enumerate(full):
        with make() as again:
            again.load_state(state)
            assert tars.run(again) == full[place + 1 :]
            assert again.quarantine.total == 4 - told[place]


def test_in_the_middle_of_a_shard_that_is_tried_again(tars: Any, tmp_path: Path, server: Any) -> None:
    """Every restore reads over a connection that breaks, and finds its place again in mid-shard."""
    rng = random.Random(2)
    tars.write_shard(tmp_path / "0.tar", [(f"k{index}", tars.mixed_sample(rng)) for index in range(40)])
    server.files["/shard.tar"] = (tmp_path / "0.tar").read_bytes()

    def make() -> ShardStream:
        return ShardStream(server.url, tars.shape, lanes=1, shuffle=4, epochs=1, window=2, threads=2, retry=QUICK)

    with make() as stream:
        full = tars.run(stream)
    for place, (_, state) in enumerate(full):
        server.faults[:] = [lambda handler, cut=cut: handler.serve(cut=cut) for cut in (700, 3000, 1, 2500)]
        before = len(server.asked)
        with make() as again:
            again.load_state(state)
            assert tars.run(again) == full[place + 1 :]
        if place < len(full) // 2:
            # All four were met: four answers broke off, and reading went on where they did.
            assert not server.faults and len(server.asked) - before > 4
