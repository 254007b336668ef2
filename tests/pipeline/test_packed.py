"""Packed shards: what is written is read back in order, resumed from anywhere, and refused or skipped when damaged."""

import json
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import BatchShape, PackedBatch, PackedReader, PackedWriter, Packer, StepItems
from treadle.pipeline.packed import PackedPosition, read_index, state_digest
from treadle.pipeline.tensor_file import PackedError

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32)


def batches_of(count: int, seed: int = 0) -> list[PackedBatch]:
    rng = random.Random(seed)
    packer = Packer(SHAPE)
    return [packer.pack(StepItems([0] * 5, [rng.randbytes(rng.randint(1, 20)) for _ in range(5)])) for _ in range(count)]


class State:
    """What a batch carries, as far as packed shards look at it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def to_bytes(self) -> bytes:
        return self.name.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "State":
        return cls(data.decode())


@pytest.fixture
def plain_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream states need a stream: here they are names."""
    monkeypatch.setattr("treadle.pipeline.state.StreamState", State)


def write(folder: Path, batches: list[PackedBatch], **named: Any) -> None:
    with PackedWriter(folder, **named) as writer:
        for batch in batches:
            writer.write(batch)


def test_batches_come_back_in_order(tmp_path: Path) -> None:
    batches = batches_of(7)
    write(tmp_path / "a", batches, batches_per_shard=3)
    assert sorted(os.listdir(tmp_path / "a")) == ["batches-000000.tar", "batches-000001.tar", "batches-000002.tar", "index.json"]
    for source in (tmp_path / "a", str(tmp_path / "a"), str(tmp_path / "a" / "index.json"), str(tmp_path / "a") + "/"):
        reader = PackedReader(source)
        assert len(reader) == 7 and list(reader) == batches and list(reader) == []
    shards = [str(tmp_path / "a" / f"batches-{number:06d}.tar") for number in range(3)]
    assert list(PackedReader(shards)) == batches
    assert list(PackedReader(str(tmp_path / "a" / "batches-{000000..000002}.tar"))) == batches
    with pytest.raises(TypeError, match="given without an index"):
        len(PackedReader(shards))


def test_shards_are_plain_tars_and_the_index_says_what_they_hold(tmp_path: Path) -> None:
    batches = batches_of(4)
    write(tmp_path / "a", batches, batches_per_shard=3)
    with tarfile.open(tmp_path / "a" / "batches-000000.tar") as tar:
        assert tar.getnames() == ["00000000.safetensors", "00000001.safetensors", "00000002.safetensors"]
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert index["version"] == 1 and index["shape"]["max_columns_per_row"] == 32 and index["capacities"]["edges"] == 64
    first = index["shards"][0]
    assert first["batches"] == 3 and first["segments"] == sum(batch.segments for batch in batches[:3]) and first["states"] == [None] * 3
    assert first["bytes"] == (tmp_path / "a" / "batches-000000.tar").stat().st_size
    assert first["fill"]["positions"] == pytest.approx(sum(batch.fill["positions"] for batch in batches[:3]) / 3)


def test_equal_batches_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, batches_of(3))
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_reading_goes_on_from_any_position(tmp_path: Path) -> None:
    batches = batches_of(8)
    write(tmp_path / "a", batches, batches_per_shard=3)
    reader = PackedReader(tmp_path / "a")
    positions = [reader.position]
    for _ in reader:
        positions.append(reader.position)
    assert positions[0] == PackedPosition(0, 0, 0) and len(set(positions)) == 9
    for count, position in enumerate(positions):
        again = PackedReader(tmp_path / "a")
        again.load_position(position)
        assert list(again) == batches[count:]
    with pytest.raises(ValueError, match="lies outside these 3 shards"):
        reader.load_position(PackedPosition(4, 0, 0))


def test_reading_goes_on_after_the_batch_of_a_state(tmp_path: Path, plain_states: None) -> None:
    batches = batches_of(5)
    for number, batch in enumerate(batches):
        batch.state = State(f"after {number}")  # type: ignore[assignment]  # a name instead of a stream's position
    write(tmp_path / "a", batches, batches_per_shard=2)
    read = list(PackedReader(tmp_path / "a"))
    assert [batch.state.name for batch in read] == [f"after {number}" for number in range(5)]  # type: ignore[union-attr]
    for number, batch in enumerate(batches):
        reader = PackedReader(tmp_path / "a")
        assert batch.state is not None
        reader.load_state(batch.state)
        assert reader.state is batch.state and list(reader) == batches[number + 1 :]
    with pytest.raises(ValueError, match="no batch of these packed shards carries this stream state"):
        PackedReader(tmp_path / "a").load_state(State("elsewhere"))  # type: ignore[arg-type]
    assert state_digest(State("a")) != state_digest(State("b"))  # type: ignore[arg-type]


def test_an_interrupted_writer_leaves_whole_shards_and_goes_on(tmp_path: Path) -> None:
    batches = batches_of(6)
    with pytest.raises(RuntimeError, match="stop"), PackedWriter(tmp_path / "a", batches_per_shard=2) as writer:
        for batch in batches[:5]:
            writer.write(batch)
        assert writer.batches == 4
        raise RuntimeError("stop")
    assert sorted(os.listdir(tmp_path / "a")) == ["batches-000000.tar", "batches-000001.tar", "index.json"]
    assert list(PackedReader(tmp_path / "a")) == batches[:4]
    with pytest.raises(ValueError, match=r"a holds an index\.json: give another folder, or append=True"):
        PackedWriter(tmp_path / "a")
    with PackedWriter(tmp_path / "a", batches_per_shard=2, append=True) as writer:
        assert writer.batches == 4
        for batch in batches[4:]:
            writer.write(batch)
    assert list(PackedReader(tmp_path / "a")) == batches


def test_a_killed_writer_leaves_what_the_index_names(tmp_path: Path) -> None:
    """A writer that never came to close: its open shard is a hidden file that no reader looks at."""
    batches = batches_of(5)
    writer = PackedWriter(tmp_path / "a", batches_per_shard=2)
    for batch in batches:
        writer.write(batch)
    assert list(PackedReader(tmp_path / "a")) == batches[:4]
    assert sum(name.startswith(".batches-") for name in os.listdir(tmp_path / "a")) == 1
    writer.close()


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "a") as writer:
        writer.write(batches_of(1)[0])
        other = BatchShape(max_rows_per_device=3, max_segments_per_device=8, max_columns_per_row=32)
        with pytest.raises(ValueError, match="this batch has shape and capacities"):
            writer.write(Packer(other).pack(StepItems([], [])))
        with pytest.raises(ValueError, match="this batch has shape and capacities"):
            writer.write(Packer(SHAPE, max_edges=3).pack(StepItems([], [])))
    with pytest.raises(ValueError, match=r"PackedWriter\.batches_per_shard is 0"):
        PackedWriter(tmp_path / "b", batches_per_shard=0)
    with pytest.raises(ValueError, match=r"PackedReader\.on_error is 'ignore'"):
        PackedReader(tmp_path / "a", on_error="ignore")  # type: ignore[arg-type]  # what is refused


class Log:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def record(self, *, url: str, key: str, member: str, offset: int, kind: str, reason: str) -> None:
        self.told.append((os.path.basename(url), key, kind))


def test_an_altered_batch_is_refused_or_skipped_alone(tmp_path: Path) -> None:
    batches = batches_of(6)
    write(tmp_path / "a", batches, batches_per_shard=3)
    shard = tmp_path / "a" / "batches-000000.tar"
    with tarfile.open(shard) as tar:
        place = tar.getmembers()[1].offset_data + tar.getmembers()[1].size - 20
    data = bytearray(shard.read_bytes())
    data[place] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PackedError, match=r"a/batches-000000\.tar, batch 00000001: the arrays do not match their checksum"):
        list(PackedReader(tmp_path / "a"))
    log = Log()
    reader = PackedReader(tmp_path / "a", on_error="quarantine", quarantine=log)
    assert list(reader) == [batches[0], *batches[2:]]
    assert reader.counts == {"corrupt": 1} and log.told == [("batches-000000.tar", "00000001", "corrupt")]


def test_a_truncated_shard_gives_what_is_before_the_cut(tmp_path: Path) -> None:
    batches = batches_of(6)
    write(tmp_path / "a", batches, batches_per_shard=3)
    shard = tmp_path / "a" / "batches-000000.tar"
    whole = shard.read_bytes()
    with tarfile.open(shard) as tar:
        ends = [member.offset for member in tar.getmembers()]
    # In the middle of the third batch, and exactly between two batches: the index knows how many there were.
    for cut, left in ((ends[2] + 700, 2), (ends[2], 2), (ends[1], 1)):
        shard.write_bytes(whole[:cut])
        with pytest.raises(PackedError) as caught:
            list(PackedReader(tmp_path / "a"))
        assert caught.value.kind == "truncated"
        reader = PackedReader(tmp_path / "a", on_error="quarantine")
        assert list(reader) == batches[:left] + batches[3:]
        assert reader.counts == {"truncated": 1}
    shard.unlink()
    assert list(PackedReader(tmp_path / "a", on_error="quarantine")) == batches[3:]


def test_a_foreign_file_in_a_shard_is_refused(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        (tmp_path / "x.txt").write_bytes(b"hello")
        tar.add(tmp_path / "x.txt", "x.txt")
    with pytest.raises(PackedError, match=r"x: a packed shard holds one \.safetensors file per batch"):
        list(PackedReader([str(shard)]))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"version": 2}, "version", "index version 2: this reads version 1"),
        ({"format": "x"}, "corrupt", "this is no index of treadle.packed_shards"),
        ({"shards": 3}, "corrupt", "the index lists no shards"),
        ({"shards": [{"name": "../a.tar"}]}, "corrupt", "a shard's name is '../a.tar': it must be a file beside the index"),
        ({"shards": [{"name": "a.tar", "batches": 2, "states": []}]}, "corrupt", "a.tar: the index counts 2 batches"),
        ({"capacities": {}}, "corrupt", "the batch shape is malformed"),
    ],
)
def test_a_malformed_index_is_refused(change: dict[str, Any], kind: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a", batches_of(1))
    table = json.loads((tmp_path / "a" / "index.json").read_text())
    with pytest.raises(PackedError, match=message) as caught:
        read_index(json.dumps({**table, **change}).encode())
    assert caught.value.kind == kind
    with pytest.raises(PackedError, match="the index is no JSON"):
        read_index(b"{")
    (tmp_path / "a" / "index.json").write_text("{")
    with pytest.raises(PackedError, match=r"a/index\.json: the index is no JSON") as caught:
        PackedReader(tmp_path / "a")
    assert caught.value.kind == "corrupt"


def test_a_folder_without_an_index_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"a' holds no index\.json: give a folder that PackedWriter closed"):
        PackedReader(tmp_path / "a")
    # Credentials do not show.
    with pytest.raises(ValueError, match="'memory://a/b' holds no index"):
        PackedReader("memory://name:secret@a/b")


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_the_batches(world_size: int, tmp_path: Path) -> None:
    batches = batches_of(11)
    write(tmp_path / "a", batches, batches_per_shard=3)
    for rank in range(world_size):
        reader = PackedReader(tmp_path / "a", rank=rank, world_size=world_size)
        positions, own = [reader.position], batches[rank::world_size]
        for expected, batch in zip(own, reader, strict=True):
            assert batch == expected
            positions.append(reader.position)
        for count, position in enumerate(positions):
            again = PackedReader(tmp_path / "a", rank=rank, world_size=world_size)
            again.load_position(position)
            assert list(again) == own[count:]
    with pytest.raises(ValueError, match=r"PackedReader\.rank is 2: it must lie between 0 and world_size - 1, 1"):
        PackedReader(tmp_path / "a", rank=2, world_size=2)
    with pytest.raises(ValueError, match="shards without an index cannot be shared"):
        PackedReader([str(tmp_path / "a" / "batches-000000.tar")], world_size=2)


def test_an_object_store_is_written_and_read() -> None:
    import fsspec

    batches = batches_of(5)
    try:
        with PackedWriter("memory://packed/a", batches_per_shard=2) as writer:
            for batch in batches[:3]:
                writer.write(batch)
        with PackedWriter("memory://packed/a", batches_per_shard=2, append=True) as writer:
            assert writer.batches == 3
            for batch in batches[3:]:
                writer.write(batch)
        names = sorted(os.path.basename(path) for path in fsspec.filesystem("memory").ls("/packed/a", detail=False))
        assert names == ["batches-000000.tar", "batches-000001.tar", "batches-000002.tar", "index.json"]
        assert list(PackedReader("memory://packed/a")) == batches
    finally:
        fsspec.filesystem("memory").rm("/packed", recursive=True)
    with pytest.raises(ValueError, match="shards cannot be written over HTTP"):
        PackedWriter("http://localhost/packed")
    with pytest.raises(ValueError, match="pipe: is refused"):
        PackedWriter("pipe://cat")
