"""pipeline/spool.py: the parts of a packed or remote shard share one reading, and get what each would have read alone."""

import gzip
import io
import logging
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from treadle.pipeline import shards, spool
from treadle.pipeline.shards import RawSample, Shard, ShardError
from treadle.pipeline.spool import MAX_IDLE, Spools
from treadle.pipeline.storage import ByteStream, StorageError, open_stream

PARTS = 5
Reading = tuple[list[RawSample], tuple[str, int] | None]


def archive(count: int, long: int = 2_500_000) -> bytes:
    """Samples of 600 bytes, and of `long` bytes every seventh."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for index in range(count):
            member = tarfile.TarInfo(f"{index:04d}.txt")
            member.size = long if index % 7 == 3 else 600
            tar.addfile(member, io.BytesIO(bytes([index % 251]) * member.size))
    return out.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "a.tar.gz": lambda data: gzip.compress(data, 1),
    "a.tar.zst": lambda data: bytes(zstandard.ZstdCompressor(level=1).compress(data)),
    "b.tar": lambda data: gzip.compress(data, 1),
}


@pytest.fixture(name="spools")
def spools_fixture() -> Iterator[Spools]:
    spools = Spools()
    yield spools
    spools.close()
    assert spool.disk.used == 0


@pytest.fixture(name="opened")
def opened_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which shards are opened, looks at their first bytes apart."""
    opened: list[int] = []

    def counted(url: str, offset: int = 0, **given: object) -> ByteStream:
        if given.get("length") is None:
            opened.append(offset)
        return open_stream(url, offset)

    monkeypatch.setattr(shards, "open_stream", counted)
    return opened


def reading(samples: Iterator[RawSample]) -> Reading:
    found: list[RawSample] = []
    try:
        found.extend(samples)
    except ShardError as error:
        return found, (error.kind, error.offset)
    return found, None


def alone(url: str, index: int = 0, offset: int = 0) -> list[Reading]:
    return [reading(Shard(url).samples(part=part, parts=PARTS, index=index, offset=offset)) for part in range(PARTS)]


def together(url: str, spools: Spools, index: int = 0, offset: int = 0) -> list[Reading]:
    shard = Shard(url)
    return [reading(shard.samples(part=part, parts=PARTS, index=index, offset=offset, spools=spools)) for part in range(PARTS)]


@pytest.mark.parametrize("name", PACKED)
def test_parts_are_unpacked_once(tmp_path: Path, spools: Spools, opened: list[int], name: str) -> None:
    url = str(tmp_path / name)
    Path(url).write_bytes(PACKED[name](archive(40)))
    expected = alone(url)
    opened.clear()
    assert together(url, spools) == expected
    shard = Shard(url)
    turns = [shard.samples(part=part, parts=PARTS, spools=spools) for part in range(PARTS)]
    assert [next(turn).index for _ in range(8) for turn in turns] == list(range(40))
    # Parts one after the other, and in turns afterwards.
    assert len(opened) == 1


@pytest.mark.parametrize("name", PACKED)
def test_parts_go_on_where_they_were(tmp_path: Path, spools: Spools, opened: list[int], name: str) -> None:
    url = str(tmp_path / name)
    Path(url).write_bytes(PACKED[name](archive(20)))
    (whole, _) = reading(Shard(url).samples())
    for start in (12, 13, 4):
        where = {"index": start, "offset": whole[start].offset}
        expected = alone(url, **where)
        assert together(url, spools, **where) == expected


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("damage", ["cut", "cut packed", "flipped"])
def test_a_damage_is_met_as_by_a_part_alone(tmp_path: Path, spools: Spools, name: str, damage: str) -> None:
    url = str(tmp_path / name)
    data = archive(12, long=1_200_000)
    pack = PACKED[name]
    for place in (0, 1, 300, 512, 700, 1112, 1536, 3100, 4600, 1_000_000, 1_205_000, len(data) - 2000, len(data) - 1):
        if damage == "cut":
            content = pack(data[:place])
        elif damage == "cut packed":
            content = pack(data)
            content = content[: len(content) * place // len(data)]
        else:
            content = pack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        Path(url).write_bytes(content)
        assert together(url, spools) == alone(url)
        # The next one is another shard.
        Path(url).unlink()
        url = str(tmp_path / f"{place}{name}")


def test_past_the_bound_each_part_reads_for_itself(tmp_path: Path, spools: Spools, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "a.tar.gz")
    Path(url).write_bytes(gzip.compress(archive(30), 1))
    expected = alone(url)
    for bound in (0, spool.PIECE_BYTES, 4 * spool.PIECE_BYTES):
        monkeypatch.setattr(spool, "SPOOL_BYTES", bound)
        own = Spools()
        assert together(url, own) == expected
        assert spool.disk.used <= bound
        own.close()


def test_without_a_place_for_the_file_it_reads_on(
    tmp_path: Path, spools: Spools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "a.tar.gz")
    Path(url).write_bytes(gzip.compress(archive(12), 1))

    def refuse(**given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with caplog.at_level(logging.WARNING):
        assert together(url, spools) == alone(url)
    assert "No space left" in caplog.text


def test_parts_in_threads(tmp_path: Path, spools: Spools, opened: list[int]) -> None:
    url = str(tmp_path / "a.tar.gz")
    Path(url).write_bytes(gzip.compress(archive(60), 1))
    expected = alone(url)
    opened.clear()
    shard = Shard(url)
    found: dict[int, Reading] = {}

    def work(part: int) -> None:
        found[part] = reading(shard.samples(part=part, parts=PARTS, spools=spools))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(PARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[part] for part in range(PARTS)] == expected
    assert len(opened) == 1


def test_a_later_part_tries_storage_that_failed_anew(tmp_path: Path, spools: Spools, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "a.tar.gz")
    Path(url).write_bytes(gzip.compress(archive(12), 1))
    expected = alone(url)
    broken = [True]

    def failing(url: str, offset: int = 0, **given: object) -> ByteStream:
        if broken:
            raise StorageError("unreadable", offset, "given up")
        return open_stream(url, offset)

    monkeypatch.setattr(shards, "open_stream", failing)
    shard = Shard(url)
    assert reading(shard.samples(part=0, parts=PARTS, spools=spools)) == ([], ("unreadable", 0))
    broken.clear()
    assert [reading(shard.samples(part=part, parts=PARTS, spools=spools)) for part in range(PARTS)] == expected


def test_files_are_given_back(tmp_path: Path, spools: Spools) -> None:
    data = archive(3)
    size, url = len(data), ""
    for number in range(MAX_IDLE + 3):
        url = str(tmp_path / f"{number}.tar.gz")
        Path(url).write_bytes(gzip.compress(data, 1))
        assert len(reading(Shard(url).samples(part=0, parts=2, spools=spools))[0]) == 2
        assert spool.disk.used <= (MAX_IDLE + 1) * size
    assert spool.disk.used == MAX_IDLE * size
    begun: Any = Shard(url).samples(part=0, parts=2, spools=spools)
    next(begun)
    spools.close()
    assert spool.disk.used == size
    begun.close()
    assert spool.disk.used == 0
