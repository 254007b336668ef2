"""pipeline/units.py: remote units read ahead give what local ones give, end at a damage, and let go of their threads."""

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.order import Held, UnitBrokenError
from treadle.pipeline.shards import ShardError
from treadle.pipeline.storage import RetryPolicy
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


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("treadle-read")]


def test_parts_together_are_the_shard(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    found = [list(units.read(0, 0, part=part, parts=3, index=0, offset=0)) for part in range(3)]
    assert [[sample.index for sample in part] for part in found] == [list(range(part, 25, 3)) for part in range(3)]
    assert threads()
    units.close()
    units.close()
    assert threads() == []


def test_reading_goes_on_at_a_sample(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    whole = list(units.read(0, 0, part=0, parts=1, index=0, offset=0))
    assert list(units.read(0, 0, part=0, parts=1, index=11, offset=whole[11].offset)) == whole[11:]
    assert read_sample(str(shard), Held(whole[4].index, whole[4].offset, whole[4].size)) == whole[4]
    units.close()


def test_a_damage_ends_the_unit_after_what_was_whole(shard: Path, remote: None) -> None:
    shard.write_bytes(shard.read_bytes()[: 10 * 1024 + 100])
    units = Units([[str(shard)]])
    found = []
    with pytest.raises(UnitBrokenError) as caught:
        for sample in units.read(0, 0, part=0, parts=1, index=0, offset=0):
            found.append(sample.index)
    assert found == list(range(10))
    assert isinstance(caught.value.fault, ShardError)
    units.close()


def test_an_abandoned_unit_waits_for_its_stride_and_closes(shard: Path, remote: None) -> None:
    units = Units([[str(shard)]])
    samples = units.read(0, 0, part=0, parts=1, index=0, offset=0)
    assert next(samples).index == 0
    del samples
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
    samples = units.read(0, 0, part=0, parts=1, index=0, offset=0)
    site.asked.acquire()
    units.close()
    assert threads() == []
    with pytest.raises(UnitBrokenError, match="closed"):
        next(samples)
