"""Packed shards as a stream: any number of ranks shares them, any position goes on exactly, near or over the network."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import PackedBatch, PackedReader, PackedWriter, ShardStream, StreamState
from treadle.pipeline.packed import join_parts

Tars = Any
Make = Callable[..., ShardStream]
Seen = list[tuple[bytes, bytes]]


def pack(folder: Path | str, make: Make, parts: int, batches_per_shard: int = 3) -> list[list[PackedBatch]]:
    """Packs a stream of so many ranks; answers each part's batches."""
    packed: list[list[PackedBatch]] = []
    for part in range(parts):
        with (
            make(rank=part, world_size=parts) as stream,
            PackedWriter(folder, batches_per_shard=batches_per_shard, part=part, parts=parts) as writer,
        ):
            packed.append([])
            for batch in stream:
                writer.write(batch)
                packed[-1].append(batch)
    if parts > 1:
        join_parts(folder, parts)
    return packed


def content(batch: PackedBatch) -> bytes:
    return batch.buffer[: batch.used_bytes].tobytes()


def saved(state: StreamState | None) -> StreamState:
    """What a checkpoint gives back."""
    assert state is not None
    return StreamState.from_bytes(state.to_bytes())


@pytest.mark.parametrize("parts", [1, 2])
def test_as_many_ranks_as_packed_see_what_their_streams_give(parts: int, mixed: Make, tars: Tars, tmp_path: Path) -> None:
    pack(tmp_path / "packed", mixed, parts)
    for rank in range(parts):
        with mixed(rank=rank, world_size=parts) as stream:
            streamed: Seen = tars.run(stream)
        for epochs in (1, None):
            reader = PackedReader(tmp_path / "packed", rank=rank, world_size=parts, epochs=epochs)
            assert [tars.snapshot(batch) for _, batch in zip(streamed, reader, strict=False)] == streamed
            assert len(streamed) > 4


def test_a_stream_goes_on_where_a_reader_was_and_the_other_way_round(mixed: Make, tars: Tars, tmp_path: Path) -> None:
    pack(tmp_path / "packed", mixed, 1)
    with mixed() as stream:
        streamed: Seen = tars.run(stream)
    reader = PackedReader(tmp_path / "packed")
    half = [tars.snapshot(batch) for _, batch in zip(range(3), reader, strict=False)]
    with mixed() as stream:
        stream.load_state(saved(reader.state))
        assert half + tars.run(stream) == streamed
    again = PackedReader(tmp_path / "packed")
    with mixed() as stream:
        tars.run(stream, 2)
        again.load_state(stream.state.to_bytes())
    assert [tars.snapshot(batch) for batch in again] == streamed[2:]
    # A stream that has given nothing yet is at the start.
    fresh = PackedReader(tmp_path / "packed")
    with mixed() as stream:
        fresh.load_state(stream.state)
    assert [tars.snapshot(batch) for batch in fresh] == streamed


@pytest.mark.parametrize(
    ("parts", "world_size", "epochs"), [(1, 1, 1), (1, 1, 3), (1, 3, 1), (1, 5, 2), (2, 2, 2), (2, 2, 1), (2, 3, 1), (4, 1, 2)]
)
def test_reading_goes_on_exactly_from_any_position(parts: int, world_size: int, epochs: int, mixed: Make, tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", mixed, parts)
    everything: list[bytes] = []
    for rank in range(world_size):

        def reader(_rank: int = rank) -> PackedReader:
            return PackedReader(tmp_path / "packed", rank=_rank, world_size=world_size, epochs=epochs)

        whole = [(content(batch), saved(batch.state)) for batch in reader()]
        everything += [seen for seen, _ in whole]
        for at in range(0, len(whole), 2):
            again = reader()
            again.load_state(whole[at][1])
            assert again.state == whole[at][1]
            assert [(content(batch), saved(batch.state)) for batch in again] == whole[at + 1 :]
        untouched = reader()
        untouched.load_state(saved(reader().state))
        assert [content(batch) for batch in untouched] == [seen for seen, _ in whole]
    # Every batch, in every epoch, on one rank.
    assert sorted(everything) == sorted([content(batch) for part in packed for batch in part] * epochs)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2, None])
def test_merged_positions_are_dealt_to_other_worlds(parts: int, epochs: int | None, mixed: Make, tmp_path: Path) -> None:
    """Chains of worlds: nothing is lost, nothing comes twice in an epoch, and the first world's states may be the streams' own."""
    packed = pack(tmp_path / "packed", mixed, parts, batches_per_shard=2)
    total = sorted([content(batch) for part in packed for batch in part] * (epochs or 2))
    for seed in range(4):
        rng = random.Random(seed)
        seen: list[bytes] = []
        state: StreamState | None = None
        worlds = [parts, *rng.choices([1, 2, 3, 4, 5], k=3)]
        if epochs is None:
            worlds = [parts, 3, 1]
        for number, world_size in enumerate(worlds):
            last = number == len(worlds) - 1
            states: list[StreamState] = []
            for rank in range(world_size):
                reader = PackedReader(tmp_path / "packed", rank=rank, world_size=world_size, epochs=epochs)
                if state is not None:
                    reader.load_state(state)
                # Ranks stop at different batches; the last world runs to the end.
                most = rng.randint(0, 3) if not last else 10**6 if epochs else len(total) - len(seen)
                for _, batch in zip(range(most), reader, strict=False):
                    seen.append(content(batch))
                states.append(saved(reader.state))
            if not last:
                state = StreamState.merge(states)
        assert len(seen) == len(total)
        if epochs is not None:
            assert sorted(seen) == total


def test_states_of_other_data_and_other_worlds_are_refused(mixed: Make, tmp_path: Path) -> None:
    pack(tmp_path / "packed", mixed, 2)
    pack(tmp_path / "more", mixed, 2, batches_per_shard=2)
    reader = PackedReader(tmp_path / "packed", rank=0, world_size=2)
    with mixed(seed=4, rank=0, world_size=2) as stream:
        next(stream)
        with pytest.raises(ValueError, match="no batch of these packed shards carries this stream state: it belongs to other data"):
            reader.load_state(stream.state)
    with mixed() as stream, pytest.raises(ValueError, match="the state is of 1 ranks, and these batches were packed as 2"):
        reader.load_state(stream.state)
    batch = next(iter(PackedReader(tmp_path / "packed", rank=1, world_size=2)))
    assert batch.state is not None
    with pytest.raises(ValueError, match=r"this reader is rank 0 of 2, and the state is of \[1\] of 2: load the rank's own state"):
        reader.load_state(batch.state)
    with pytest.raises(ValueError, match="or those of all ranks merged"):
        PackedReader(tmp_path / "packed", rank=0, world_size=3).load_state(batch.state)
    third = PackedReader(tmp_path / "packed", rank=0, world_size=3)
    next(iter(third))
    with pytest.raises(ValueError, match=r"belongs to other packed shards .*options\.digest"):
        PackedReader(tmp_path / "more", rank=0, world_size=3).load_state(saved(third.state))
    with pytest.raises(ValueError, match=r"PackedReader\.lanes is 3: it must be a multiple of the 2 parts that were packed"):
        PackedReader(tmp_path / "packed", lanes=3)
    with pytest.raises(ValueError, match=r"and at least world_size, 5"):
        PackedReader(tmp_path / "packed", lanes=4, world_size=5)
    shards = sorted(map(str, (tmp_path / "packed").glob("*.tar")))
    with pytest.raises(ValueError, match="shards without an index cannot be shared or repeated"):
        PackedReader(shards, epochs=2)
    with pytest.raises(ValueError, match="they were given without an index"):
        PackedReader(shards).load_state(batch.state)


def test_more_ranks_than_batches_or_lanes(mixed: Make, tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", mixed, 1)
    ranks = 70
    read = [[content(batch) for batch in PackedReader(tmp_path / "packed", rank=rank, world_size=ranks)] for rank in range(ranks)]
    assert sorted(seen for part in read for seen in part) == sorted(map(content, packed[0])) and max(map(len, read)) == 1
    # An endless reader without a batch ends.
    assert list(PackedReader(tmp_path / "packed", rank=69, world_size=ranks, epochs=None)) == []


def test_damage_is_skipped_alike_in_every_epoch_and_after_a_restore(mixed: Make, tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", mixed, 1, batches_per_shard=2)[0]
    second = tmp_path / "packed" / "batches-000001.tar"
    second.write_bytes(second.read_bytes()[:-2000])
    left = [content(batch) for batch in packed]
    del left[3]
    reader = PackedReader(tmp_path / "packed", epochs=2, on_error="quarantine")
    whole = [(content(batch), saved(batch.state)) for batch in reader]
    assert [seen for seen, _ in whole] == left * 2 and reader.counts == {"truncated": 2}
    for at in (2, 3, len(left)):
        again = PackedReader(tmp_path / "packed", epochs=2, on_error="quarantine")
        again.load_state(whole[at][1])
        assert [(content(batch), saved(batch.state)) for batch in again] == whole[at + 1 :]


def test_over_http(mixed: Make, site: Any, tars: Tars, tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", mixed, 2)
    urls = [site.url(f"packed/{path.name}", path.read_bytes()) for path in (tmp_path / "packed").iterdir()]
    folder = urls[0].rsplit("/", 1)[0]
    for rank in range(2):
        with PackedReader(folder, rank=rank, world_size=2) as reader:
            read = [tars.snapshot(batch) for batch in reader]
        assert read == [tars.snapshot(batch) for batch in packed[rank]]
    before = site.sent
    with PackedReader(folder, rank=1, world_size=3) as reader:
        reader.load_state(StreamState.merge([saved(part[1].state) for part in packed]))
        rest = [content(batch) for batch in reader]
    # What was consumed is not fetched again.
    assert rest and site.sent - before < sum(len(data) for data in site.files.values())


def test_over_an_object_store(mixed: Make, tmp_path: Path) -> None:
    import fsspec

    try:
        packed = pack("memory://reader/packed", mixed, 2)
        read = [content(batch) for rank in range(3) for batch in PackedReader("memory://reader/packed", rank=rank, world_size=3)]
        assert sorted(read) == sorted(content(batch) for part in packed for batch in part)
    finally:
        fsspec.filesystem("memory").rm("/reader", recursive=True)
