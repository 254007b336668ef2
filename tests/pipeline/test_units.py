"""pipeline/units.py: remote units read ahead give what local ones give, end at a damage, and let go of their threads."""

import gzip
import io
import random
import tarfile
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import unpack
from treadle.pipeline.order import Held, UnitBrokenError
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import ByteStream
from treadle.pipeline.units import Units, read_sample


@pytest.fixture(name="shard")
def shard_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for index in range(25):
            member = tarfile.TarInfo(f"k{index}.txt")
            member.size = 7
            tar.addfile(member, io.BytesIO(b"caption"))
    return path


@pytest.fixture(name="remote")
def remote_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every path count as remote, with strides of three samples."""
    monkeypatch.setattr("treadle.pipeline.units.local_path", lambda url: None)
    monkeypatch.setattr("treadle.pipeline.units.STRIDE_SAMPLES", 3)


def all_of(runs: Iterator[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(runs))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("treadle-read")]


def test_parts_together_are_the_shard(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    found = [all_of(units.read(0, 0, part=part, parts=3, index=0, offset=0)) for part in range(3)]
    assert [[sample.index for sample in part] for part in found] == [list(range(part, 25, 3)) for part in range(3)]
    assert threads()
    units.close()
    units.close()
    assert threads() == []


def test_reading_goes_on_at_a_sample(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    whole = all_of(units.read(0, 0, part=0, parts=1, index=0, offset=0))
    assert all_of(units.read(0, 0, part=0, parts=1, index=11, offset=whole[11].offset)) == whole[11:]
    assert read_sample(str(shard), Held(whole[4].index, whole[4].offset, whole[4].size)) == whole[4]
    units.close()


def test_a_damage_ends_the_unit_after_what_was_whole(shard: Path, remote: None) -> None:
    shard.write_bytes(shard.read_bytes()[: 10 * 1024 + 100])
    units = Units([[str(shard)]])
    found = []
    with pytest.raises(UnitBrokenError) as caught:
        for samples in units.read(0, 0, part=0, parts=1, index=0, offset=0):
            found += [sample.index for sample in samples]
    assert found == list(range(10))
    assert isinstance(caught.value.fault, ShardError)
    units.close()


def test_an_abandoned_unit_waits_for_its_stride_and_closes(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    runs = units.read(0, 0, part=0, parts=1, index=0, offset=0)
    assert next(runs)[0].index == 0
    del runs
    units.close()
    assert threads() == []


@pytest.mark.parametrize("parts", [1, 4])
def test_a_shard_that_is_not_there_ends_its_unit(tmp_path: Path, parts: int) -> None:
    units = Units([[str(tmp_path / "none.tar")]])
    with pytest.raises(UnitBrokenError):
        list(units.read(0, 0, part=0, parts=parts, index=0, offset=0))
    with pytest.raises(ShardError):
        read_sample(str(tmp_path / "none.tar"), Held(0, 0, 1024))


def test_closing_ends_the_waits_of_a_broken_read(site: Any) -> None:
    site.down = True
    units = Units([[site.url("0.tar", b"")]], retry=RetryPolicy(base_delay_s=86_400.0, max_delay_s=86_400.0))
    runs = units.read(0, 0, part=0, parts=1, index=0, offset=0)
    assert site.asked.acquire(timeout=60)
    units.close()
    assert threads() == []
    with pytest.raises(UnitBrokenError, match="closed"):
        next(runs)


def test_samples_known_by_reference_are_fetched_in_runs(tars: Any, tmp_path: Path, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours with one request; a packed shard is unpacked once, whatever the order they are asked for in."""
    tars.write_texts(tmp_path, [200], width=400)
    data = (tmp_path / "000.tar").read_bytes()
    whole = list(Shard(str(tmp_path / "000.tar")).samples())
    chosen = whole[3:180:4]
    begun: list[str] = []
    unpacked_before = unpack.unpacked

    def counted(stream: ByteStream) -> ByteStream:
        begun.append(stream.url)
        return unpacked_before(stream)

    monkeypatch.setattr("treadle.pipeline.shards.unpacked", counted)
    for name, content in (("000.tar", data), ("000.tar.gz", gzip.compress(data))):
        url = site.url(name, content)
        units = Units([[url]])
        units.expect((0, (0, sample.index, sample.offset, sample.size)) for sample in chosen)
        site.requests = 0
        begun.clear()
        order = random.Random(0).sample(chosen, len(chosen))
        coming = [units.fetch(url, Held(sample.index, sample.offset, sample.size)) for sample in order]
        assert [each.result() for each in coming if each is not None] == order
        # 180 KiB of neighbours in runs of at most 128 KiB; of the packed shard, its first bytes and all of it.
        assert site.requests <= 4
        assert len(begun) <= 2
        units.close()


def test_a_run_that_breaks_tells_each_sample(tars: Any, tmp_path: Path, site: Any) -> None:
    tars.write_texts(tmp_path, [8], width=400)
    data = (tmp_path / "000.tar").read_bytes()
    whole = list(Shard(str(tmp_path / "000.tar")).samples())
    url = site.url("000.tar", data[: whole[5].offset + 100] + bytes(5000))
    units = Units([[url]])
    units.expect((0, (0, sample.index, sample.offset, sample.size)) for sample in whole)
    coming = [units.fetch(url, Held(sample.index, sample.offset, sample.size)) for sample in whole]
    for sample, each in zip(whole, coming, strict=True):
        assert each is not None
        if sample.index < 5:
            assert each.result() == sample
        else:
            with pytest.raises(ShardError):
                each.result()
    units.close()
