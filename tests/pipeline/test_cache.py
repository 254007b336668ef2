"""The cache of whole shards: what it gives equals what the store has, whoever is killed, however little room there is."""

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import cache as cache_module
from treadle.pipeline.cache import Part, ShardCache, shard_name
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.shards import Shard
from treadle.pipeline.stream import ShardStream

QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, timeout_s=5.0)


def shard_bytes(seed: int, count: int = 40, size: int = 5000) -> bytes:
    """A tar of `count` samples of one file each."""
    rng, out = random.Random(seed), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:03d}.txt")
            info.size = size
            tar.addfile(info, io.BytesIO(rng.randbytes(size)))
    return out.getvalue()


@pytest.fixture(autouse=True)
def another_process() -> None:
    """What one test's process has checked says nothing in the next."""
    cache_module._checked.clear()


@pytest.fixture(name="urls")
def urls_fixture(server: Any) -> list[str]:
    """Three shards of the same size."""
    for number in range(3):
        server.files[f"/{number}.tar"] = shard_bytes(number)
    return [f"http://127.0.0.1:{server.port}/{number}.tar" for number in range(3)]


SIZE = len(shard_bytes(0))


def read(url: str, cache: ShardCache | None) -> list[bytes]:
    return [sample.fields[0].data for sample in Shard(url, policy=QUICK, cache=cache).samples()]


def kept(cache: ShardCache) -> list[Path]:
    return sorted(cache.folder.glob("*.shard"))


def parts(cache: ShardCache) -> list[Path]:
    return sorted(cache.folder.glob("*.part"))


def test_the_second_reading_asks_for_nothing(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    first = read(urls[0], cache)
    assert first == read(urls[0], None)
    (path,) = kept(cache)
    assert path.read_bytes() == server.files["/0.tar"]
    assert not parts(cache)
    server.asked.clear()
    assert read(urls[0], cache) == first
    assert not server.asked
    sample = next(iter(Shard(urls[0], policy=QUICK, cache=cache).samples(index=7, offset=7 * 5632)))
    assert Shard(urls[0], policy=QUICK, cache=cache).sample_at(7, sample.offset, sample.size) == sample
    assert not server.asked


def test_another_process_asks_once_whether_it_is_still_that(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    first = read(urls[0], cache)
    cache_module._checked.clear()
    server.asked.clear()
    assert read(urls[0], cache) == first == read(urls[0], cache)
    assert server.asked == [("/0.tar", "bytes=0-0")]


def test_a_shard_that_changed_is_read_anew(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    read(urls[0], cache)
    server.files["/0.tar"], server.etag = shard_bytes(9), '"two"'
    cache_module._checked.clear()
    assert read(urls[0], cache) == read(urls[0], None)
    (path,) = kept(cache)
    assert path.read_bytes() == shard_bytes(9)


def test_a_store_that_cannot_be_reached_is_told(server: Any, urls: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    first = read(urls[0], cache)
    cache_module._checked.clear()
    server.always = lambda handler: handler.answer(500)
    assert read(urls[0], cache) == first
    assert "as the cache has it" in caplog.text


def test_those_not_used_for_longest_give_way(urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache", max_bytes=2 * SIZE + 100)
    read(urls[0], cache)
    read(urls[1], cache)
    for path in kept(cache):
        os.utime(path, (1.0, 1.0))
    read(urls[0], cache)  # now the newer of the two
    read(urls[2], cache)
    assert {path.name.split(".")[0] for path in kept(cache)} == {shard_name(urls[0]), shard_name(urls[2])}


@pytest.mark.parametrize("max_bytes", [1, SIZE - 1])
def test_a_shard_larger_than_the_limit_is_read_without_it(urls: list[str], tmp_path: Path, max_bytes: int) -> None:
    cache = ShardCache(folder=tmp_path / "cache", max_bytes=max_bytes)
    assert read(urls[0], cache) == read(urls[0], None)
    assert not kept(cache) and not parts(cache)


def test_what_is_being_read_stays(urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache", max_bytes=SIZE)
    whole = read(urls[0], cache)
    reading = Shard(urls[0], policy=QUICK, cache=cache).samples()
    found = [next(reading)]
    # There is room for one, and it is in use: the other is read without being kept.
    assert read(urls[1], cache) == read(urls[1], None)
    assert [path.name.split(".")[0] for path in kept(cache)] == [shard_name(urls[0])]
    found += reading
    assert [sample.fields[0].data for sample in found] == whole
    read(urls[1], cache)
    assert [path.name.split(".")[0] for path in kept(cache)] == [shard_name(urls[1])]


def test_a_reader_that_stops_leaves_nothing(server: Any, tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    server.files["/long.tar"] = shard_bytes(5, count=30, size=100_000)
    reading: Any = Shard(f"http://127.0.0.1:{server.port}/long.tar", policy=QUICK, cache=cache).samples()
    next(reading)
    assert len(parts(cache)) == 1
    reading.close()
    assert not kept(cache) and not parts(cache)


def test_a_shard_that_two_read_at_once_is_kept_once(urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    readings = [iter(Shard(urls[0], policy=QUICK, cache=cache).samples()) for _ in range(2)]
    found: list[list[bytes]] = [[], []]
    for _ in range(40):
        for place, reading in enumerate(readings):
            found[place].append(next(reading).fields[0].data)
    for reading in readings:
        assert next(reading, None) is None
    assert found[0] == found[1] == read(urls[0], None)
    assert len(kept(cache)) == 1 and not parts(cache)


def test_faults_on_the_way_do_not_show(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    server.faults = [lambda handler: handler.serve(cut=70_000), lambda handler: handler.answer(503)]
    assert read(urls[0], cache) == read(urls[0], None)
    assert kept(cache)[0].read_bytes() == server.files["/0.tar"]


def test_a_shard_that_breaks_off_is_not_kept(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    server.faults = [lambda handler: handler.serve(cut=70_000), lambda handler: handler.answer(404)]
    with pytest.raises(Exception, match="not_found"):
        read(urls[0], cache)
    assert not kept(cache) and not parts(cache)


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fsync"])
def test_a_full_disk_is_told_and_reading_goes_on(
    urls: list[str], tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ShardCache(folder=tmp_path / "cache")

    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"treadle.pipeline.cache.os.{call}", full)
    found = read(urls[0], cache)
    monkeypatch.undo()
    assert found == read(urls[0], None)
    assert "cache" in caplog.text
    assert not kept(cache) and not parts(cache)


KILLED = """
import sys, os, signal
from pathlib import Path
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.shards import Shard
cache, at = ShardCache(folder=Path(sys.argv[2])), int(sys.argv[3])
for number, sample in enumerate(Shard(sys.argv[1], cache=cache).samples()):
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_reader_leaves_no_corrupt_shard(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(folder=tmp_path / "cache", max_bytes=8 << 20)
    # Long enough that the reader is killed with most of it still to come.
    server.files["/long.tar"] = shard_bytes(5, count=60, size=100_000)
    url = f"http://127.0.0.1:{server.port}/long.tar"
    ended = subprocess.run([sys.executable, "-c", KILLED, url, str(cache.folder), "3"], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = parts(cache)
    assert not kept(cache)
    # It counts at its full size until someone needs the room, who finds that nobody holds it.
    assert left.stat().st_size == len(server.files["/long.tar"])
    assert read(url, cache) == read(url, None)
    assert kept(cache)[0].read_bytes() == server.files["/long.tar"]
    assert not parts(cache)


READER = """
import sys
from pathlib import Path
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.shards import Shard
from hashlib import sha256
cache, digest = ShardCache(folder=Path(sys.argv[1]), max_bytes=int(sys.argv[2])), sha256()
for turn in range(3):
    for url in sys.argv[3:]:
        for sample in Shard(url, cache=cache).samples():
            digest.update(sample.fields[0].data)
print(digest.hexdigest())
"""


def test_several_processes_share_it(server: Any, urls: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", READER, str(folder), str(2 * SIZE)]
    running = [subprocess.Popen([*command, *urls], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=120)[0] for process in running]
    expected = subprocess.run([*command[:3], str(tmp_path / "none"), "1", *urls], capture_output=True, text=True, check=True).stdout
    assert answers == [expected] * 3
    cache = ShardCache(folder=folder)
    assert sum(path.stat().st_size for path in kept(cache)) <= 2 * SIZE
    assert not parts(cache)


def test_readers_that_are_killed_at_random_never_leave_a_wrong_shard(server: Any, urls: list[str], tmp_path: Path) -> None:
    """Three processes that share a folder with room for two of three shards; again and again one of them is killed and begins anew."""
    cache = ShardCache(folder=tmp_path / "cache", max_bytes=2 * SIZE)
    command = [sys.executable, "-c", READER, str(cache.folder), str(2 * SIZE), *urls]
    rng = random.Random(0)
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    asked = 0
    for _ in range(int(os.environ.get("TREADLE_KILLS", "4"))):
        # A moment within their reading: a few more requests have come.
        asked = len(server.asked) + rng.randint(1, 6)
        while len(server.asked) < asked and any(process.poll() is None for process in running):
            time.sleep(0.002)
        place = rng.randrange(3)
        running[place].kill()
        running[place].communicate()
        for path in kept(cache):
            with suppress(FileNotFoundError):
                assert path.read_bytes() in server.files.values()
        running[place] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert len(answers) == 1 and all(process.returncode == 0 for process in running)
    assert len(kept(cache)) == 2 and {path.read_bytes() for path in kept(cache)} < set(server.files.values())


def test_a_held_folder_is_not_waited_for_long(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    monkeypatch.setattr("treadle.pipeline.cache.LOCK_WAIT_S", 0.05)
    with cache_module._folder_locked(cache.folder) as locked:
        assert locked
        assert read(urls[0], cache) == read(urls[0], None)
    assert not kept(cache)


def test_a_part_is_only_finished_whole(tmp_path: Path) -> None:
    part = Part(tmp_path, "a.b.10.shard", 10)
    assert part.write(b"12345")
    assert not part.finish()
    assert not list(tmp_path.iterdir())


def test_a_shard_cut_from_outside_is_not_used(server: Any, urls: list[str], tmp_path: Path) -> None:
    cache = ShardCache(folder=tmp_path / "cache")
    first = read(urls[0], cache)
    os.truncate(kept(cache)[0], 1000)
    assert read(urls[0], cache) == first


def test_signed_urls_of_one_object_are_one(urls: list[str]) -> None:
    assert shard_name(urls[0] + "?X-Amz-Signature=abc") == shard_name(urls[0] + "?X-Amz-Signature=def") == shard_name(urls[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [({"folder": ""}, "folder"), ({"folder": "/proc/nothing/x"}, "cannot be written"), ({"max_bytes": 0}, "max_bytes")],
)
def test_a_cache_is_checked(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardCache(**dict[str, Any]({"folder": tmp_path, **given}))


@pytest.mark.parametrize("lanes", [3, 8])
def test_a_stream_is_the_same_with_a_cache(server: Any, urls: list[str], tars: Any, tmp_path: Path, lanes: int) -> None:
    def run(cache: ShardCache | None) -> list[bytes]:
        with ShardStream(urls, tars.text_shape, lanes=lanes, shuffle=5, epochs=2, seed=1, window=1, threads=1, cache=cache) as stream:
            return [batch.buffer[: batch.used_bytes].tobytes() for batch in stream]

    expected = run(None)
    cache = ShardCache(folder=tmp_path / "cache")
    assert run(cache) == expected
    assert len(kept(cache)) == 3
    server.asked.clear()
    assert run(cache) == expected
    assert not server.asked
