"""pipeline/sample_table.py: windows that are read again, large samples, and files that change, give what one pass over the shard gives."""

import io
import random
import tarfile
from pathlib import Path

import pytest

from treadle.pipeline import sample_table
from treadle.pipeline.sample_table import SampleTable, local_table
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import LocalStream


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_table, "WINDOW_BYTES", 8192)
    monkeypatch.setattr(sample_table, "HELD_WINDOWS", 2)
    monkeypatch.setattr(sample_table, "_tables", type(sample_table._tables)())


def write(path: Path, sizes: list[int], seed: int = 0) -> str:
    rng = random.Random(seed)
    with tarfile.open(path, "w") as tar:
        for index, size in enumerate(sizes):
            for name in ("txt", "en.txt") if index % 3 else ("txt",):
                member = tarfile.TarInfo(f"k{index}.{name}")
                member.size = size
                tar.addfile(member, io.BytesIO(rng.randbytes(size)))
            if index % 7 == 3:
                folder = tarfile.TarInfo(f"folder{index}")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
    return str(path)


@pytest.mark.parametrize("sizes", [[300] * 60, [60_000] * 12, [300] * 20 + [90_000] * 8 + [300] * 20, [0, 1, 512, 513] * 10])
def test_parts_in_any_turn_read_what_one_pass_reads(tmp_path: Path, sizes: list[int]) -> None:
    url = write(tmp_path / "0.tar", sizes)
    whole = list(Shard(url).samples())
    for parts in (2, 5, 16):
        # One after the other: each part finds the windows of the last ones only.
        assert [list(Shard(url).samples(part=part, parts=parts)) for part in range(parts)] == [whole[part::parts] for part in range(parts)]
        turns = [Shard(url).samples(part=part, parts=parts) for part in range(parts)]
        assert [next(turns[index % parts]) for index in range(len(whole))] == whole


def test_a_window_is_held_while_parts_read(tmp_path: Path) -> None:
    url = write(tmp_path / "0.tar", [300] * 100)
    turns = [Shard(url).samples(part=part, parts=4) for part in range(4)]
    for turn in turns:
        next(turn)
    table = local_table(url, 0, 0)
    assert [window.samples is not None for window in table._windows] == [True]
    for turn in turns:
        list(turn)
    assert all(window.samples is None for window in table._windows)


def test_a_file_that_changed_is_told_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    url = write(path, [300] * 60)
    table = SampleTable(lambda: LocalStream(url, url), 0, 0)
    with LocalStream(url, url) as stream:
        while table.window(59, stream) is None:
            pass
        data = bytearray(path.read_bytes())
        # The third sample's name: its headers do not add up any more.
        data[table.span(2)[0]] ^= 1
        path.write_bytes(bytes(data))
        found = table.window(2, stream)
        assert found is not None
        assert found[1] is None
    reading = Shard(url).samples(part=0, parts=2)
    with pytest.raises(ShardError):
        list(reading)
