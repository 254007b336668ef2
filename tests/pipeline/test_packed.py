"""Packed shards: what is written is read back in order, resumed from anywhere, and refused or skipped when damaged."""

import errno
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import pytest

from treadle.pipeline import BatchShape, PackedBatch, PackedReader, PackedWriter, Packer, StepItems
from treadle.pipeline.packed import join_parts, read_part
from treadle.pipeline.packed_index import PackedIndex
from treadle.pipeline.tensor_file import PackedError

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32)


def batches_of(count: int, seed: int = 0) -> list[PackedBatch]:
    rng = random.Random(seed)
    packer = Packer(SHAPE)
    return [packer.pack(StepItems([0] * 5, [rng.randbytes(rng.randint(1, 20)) for _ in range(5)])) for _ in range(count)]


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
    assert index["version"] == 3 and index["shape"]["max_columns_per_row"] == 32 and index["capacities"]["edges"] == 64
    first = index["shards"][0]
    assert first["batches"] == 3 and first["segments"] == sum(batch.segments for batch in batches[:3]) and first["states"] == [None] * 3
    assert index["parts"] == 1 and index["complete"] is True and first["part"] == 0
    assert first["bytes"] == (tmp_path / "a" / "batches-000000.tar").stat().st_size
    assert first["fill"]["positions"] == pytest.approx(sum(batch.fill["positions"] for batch in batches[:3]) / 3)


def test_equal_batches_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, batches_of(3))
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_interrupted_writer_leaves_whole_shards_and_goes_on(tmp_path: Path) -> None:
    batches = batches_of(6)
    with pytest.raises(RuntimeError, match="stop"), PackedWriter(tmp_path / "a", batches_per_shard=2) as writer:
        for batch in batches[:5]:
            writer.write(batch)
        assert writer.batches == 4
        raise RuntimeError("stop")
    assert sorted(os.listdir(tmp_path / "a")) == ["batches-000000.tar", "batches-000001.tar", "index.json"]
    assert list(PackedReader(tmp_path / "a")) == batches[:4]
    with pytest.raises(ValueError, match=r"a holds index\.json: give another folder, or append=True"):
        PackedWriter(tmp_path / "a")
    with PackedWriter(tmp_path / "a", batches_per_shard=2, append=True) as writer:
        assert writer.batches == 4
        for batch in batches[4:]:
            writer.write(batch)
    assert list(PackedReader(tmp_path / "a")) == batches


def test_what_a_killed_writer_leaves_the_next_one_removes(tmp_path: Path) -> None:
    """Its open shard is a hidden file that no reader looks at, and that nobody holds a lock on."""
    code = (
        "import os, sys; from treadle.pipeline import BatchShape, PackedWriter, Packer, StepItems; "
        "shape = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32); "
        "writer = PackedWriter(sys.argv[1], batches_per_shard=2); "
        "[writer.write(Packer(shape).pack(StepItems([0], [b'text']))) for _ in range(3)]; os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert sum(name.startswith(".batches-000-") for name in os.listdir(tmp_path)) == 1
    assert len(list(PackedReader(tmp_path))) == 2
    with PackedWriter(tmp_path, append=True) as writer:
        assert writer.batches == 2
        writer.write(batches_of(1)[0])
        hidden = [name for name in os.listdir(tmp_path) if name.startswith(".batches")]
        assert len(hidden) == 1
        # A living writer's file is locked, and so is its part.
        with pytest.raises(ValueError, match="another process is writing into it"):
            PackedWriter(tmp_path, append=True)
    assert sorted(os.listdir(tmp_path)) == ["batches-000000.tar", "batches-000001.tar", "index.json"]
    assert len(list(PackedReader(tmp_path))) == 3


class Full:
    """A file on a disk that has room for `left` more writes."""

    def __init__(self, file: IO[bytes], left: int) -> None:
        self.file, self.left = file, left

    def write(self, data: bytes) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("left", [0, 1, 5])
def test_a_full_disk_closes_the_writer_and_drops_the_open_shard(left: int, tmp_path: Path) -> None:
    """A part of a batch may be in the file: a batch that followed it would lie where no index looks."""
    batches = batches_of(5)
    writer = PackedWriter(tmp_path, batches_per_shard=2)
    for batch in batches[:3]:
        writer.write(batch)
    assert writer._file is not None
    writer._file = Full(writer._file, left)  # type: ignore[assignment]  # what a write needs of one
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}'")):
        writer.write(batches[3])
    with pytest.raises(ValueError, match=r"this writer of .* is closed"):
        writer.write(batches[3])
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["batches-000000.tar", "index.json"]
    with PackedWriter(tmp_path, batches_per_shard=2, append=True) as writer:
        for batch in batches[writer.batches :]:
            writer.write(batch)
    assert list(PackedReader(tmp_path)) == batches


def test_a_close_that_fails_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PackedWriter(tmp_path)
    writer.write(batches_of(1)[0])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}'")):
            writer.close()
    assert os.listdir(tmp_path) == []


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
    reader = PackedReader(tmp_path / "a", on_error="quarantine")
    assert list(reader) == batches[3:] and reader.counts == {"unreadable": 1}


def test_a_shard_that_is_not_the_indexed_one_is_skipped(tmp_path: Path) -> None:
    batches = batches_of(6)
    write(tmp_path / "a", batches, batches_per_shard=3)
    write(tmp_path / "b", batches_of(3, seed=7), batches_per_shard=3)
    (tmp_path / "b" / "batches-000000.tar").rename(tmp_path / "a" / "batches-000000.tar")
    reader = PackedReader(tmp_path / "a", on_error="quarantine")
    # Its batches are sound, but not those that the index describes.
    assert list(reader) == batches[3:] and reader.counts == {"corrupt": 3}


def test_a_foreign_file_in_a_shard_is_refused(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        (tmp_path / "x.txt").write_bytes(b"hello")
        tar.add(tmp_path / "x.txt", "x.txt")
    with pytest.raises(PackedError, match=r"x: a packed shard holds one \.safetensors file per batch"):
        list(PackedReader([str(shard)]))


SHARD: dict[str, Any] = {
    "name": "a.tar", "part": 0, "bytes": 9, "batches": 1, "segments": 1, "bags": 1, "tokens": 1, "dropped": 0, "fill": {}, "sizes": [5], "checks": [7],
    "states": [None],
}  # fmt: skip


def with_checksum(table: dict[str, Any]) -> bytes:
    """An index file whose checksum is right, whatever else is wrong."""
    rest = {name: value for name, value in table.items() if name != "crc32"}
    return json.dumps({**rest, "crc32": crc32(json.dumps(rest, separators=(",", ":")).encode())}).encode()


def test_an_index_with_a_changed_digit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", batches_of(3))
    data = (tmp_path / "a" / "index.json").read_bytes()
    assert with_checksum(json.loads(data)) == json.dumps(json.loads(data)).encode()
    digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    for at in digits[:: max(1, len(digits) // 200)]:
        changed = bytearray(data)
        changed[at] = ord("1") if changed[at] != ord("1") else ord("2")
        with pytest.raises(PackedError):
            PackedIndex.from_bytes(bytes(changed))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"version": 1}, "version", "index version 1: this reads version 3"),
        ({"format": "x"}, "corrupt", "this is no index of treadle.packed_shards"),
        ({"shards": 3}, "corrupt", "the index lists no shards"),
        ({"shards": [{"name": "../a.tar"}]}, "corrupt", "a shard's name is '../a.tar': it must be a file beside the index"),
        ({"shards": [{"name": "a\0.tar"}]}, "corrupt", "it must be a file beside the index"),
        ({"shards": [{"name": "a.tar", "batches": 2, "states": []}]}, "corrupt", "a.tar: its entry in the index is malformed"),
        ({"shards": [{**SHARD, "batches": 2}]}, "corrupt", "a.tar: the index counts 2 batches and names other sizes or states"),
        ({"shards": [{**SHARD, "sizes": [0]}]}, "corrupt", "a.tar: a size or a state in the index is malformed"),
        ({"shards": [{**SHARD, "sizes": [2**52]}]}, "corrupt", "a.tar: a size or a state in the index is malformed"),
        ({"shards": [{**SHARD, "states": [3]}]}, "corrupt", "a.tar: a size or a state in the index is malformed"),
        ({"shards": [{**SHARD, "part": 1}]}, "corrupt", "a.tar: its fill or its part in the index is malformed"),
        ({"shards": [{**SHARD, "tokens": -1}]}, "corrupt", "a.tar: its entry in the index is malformed"),
        ({"parts": 0}, "corrupt", "the index names 0 parts"),
        ({"capacities": {}}, "corrupt", "the batch shape is malformed"),
    ],
)
def test_a_malformed_index_is_refused(change: dict[str, Any], kind: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a", batches_of(1))
    table = json.loads((tmp_path / "a" / "index.json").read_text())
    with pytest.raises(PackedError, match=message) as caught:
        PackedIndex.from_bytes(with_checksum({**table, **change}))
    assert caught.value.kind == kind
    with pytest.raises(PackedError, match="the index is no JSON"):
        PackedIndex.from_bytes(b"{")
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


def test_parts_are_written_apart_and_joined(tmp_path: Path) -> None:
    batches = batches_of(7)
    with pytest.raises(ValueError, match="part 0 of 2 is not complete"):
        join_parts(tmp_path, 2)
    for part in range(2):
        with PackedWriter(tmp_path, batches_per_shard=2, part=part, parts=2) as writer:
            for batch in batches[part::2]:
                writer.write(batch)
        if not part:
            with pytest.raises(ValueError, match="is not packed to its end: run the same `treadle pack` again"):
                PackedReader(tmp_path)
    with pytest.raises(ValueError, match=r"holds part-001\.json: give another folder, or append=True"):
        PackedWriter(tmp_path, part=1, parts=2)
    index = join_parts(tmp_path, 2)
    assert index.complete and index.batches == 7 and [shard.part for shard in index.shards] == [0, 0, 1, 1]
    assert read_part(tmp_path, 1, 2) is not None and read_part(tmp_path, 1, 3) is not None
    # One rank reads the parts in turn, which is the order here; two ranks read one each.
    assert list(PackedReader(tmp_path)) == batches
    for rank in range(2):
        assert list(PackedReader(tmp_path, rank=rank, world_size=2)) == batches[rank::2]
    with pytest.raises(ValueError, match="was packed in 2 parts, not 3"):
        PackedWriter(tmp_path, append=True, part=1, parts=3)
    with pytest.raises(ValueError, match=r"holds index\.json, of 2 parts"):
        PackedWriter(tmp_path, append=True, part=2, parts=3)
    with pytest.raises(ValueError, match=r"PackedWriter\.part is 2: it must lie between 0 and 1"):
        PackedWriter(tmp_path, part=2, parts=2)
