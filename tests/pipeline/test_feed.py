"""pipeline/feed.py: what is broken is left out and told once, workers end with the pass, memory in flight is bounded, and where
samples are read from changes nothing.
"""

import io
import json
import random
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.decoders import DecodeError
from treadle.pipeline.samples import SampleError
from treadle.pipeline.shards import ShardError
from treadle.pipeline.stream import ShardStream

Make = Callable[..., ShardStream]


def damaged(tars: Any, tmp_path: Path) -> tuple[str, Path]:
    """Shards with a bad picture, a duplicate field, bad relations, an image without a slice, and a shard cut in its middle."""
    rng = random.Random(1)
    pattern = tars.write_mixed(tmp_path / "bad", [10, 10, 10])
    folder = tmp_path / "bad"
    samples: list[Sample] = [(f"b{index}", {"txt": b"text %d" % index}) for index in range(10)]
    samples[2] = ("b2", {"txt": b"caption", "png": tars.png(rng, 9, 9)[:-20]})
    samples[4] = ("b4", {"png": b"nothing at all"})
    samples[5] = ("b5", {"txt": b"x", "relations.json": b"{"})
    samples[6] = ("b6", {"txt": b"y", "mp4": b"....", "bin": b"..."})
    tars.write_shard(folder / "003.tar", samples)
    with tarfile.open(folder / "004.tar", "w") as tar:
        for name in ("d0.txt", "d1.txt", "d1.txt", "d2.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    whole = (folder / "001.tar").read_bytes()
    with tarfile.open(folder / "001.tar") as tar:
        seventh = next(member for member in tar if member.name.startswith("s1/k7."))
    (folder / "001.tar").write_bytes(whole[: seventh.offset + 100])
    return pattern, folder


def test_what_is_broken_is_left_out_and_told_once(tars: Any, tmp_path: Path) -> None:
    pattern, folder = damaged(tars, tmp_path)
    log = tmp_path / "quarantine.jsonl"

    def make(path: Path | None = None) -> ShardStream:
        # Twelve lanes cut five shards into three parts each: a damage is told once, not by every part.
        return ShardStream(pattern, tars.shape, lanes=12, shuffle=24, epochs=1, window=2, quarantine=path, seed=5)

    with make(log) as stream:
        full = tars.run(stream)
        counts = stream.quarantine.counts
        left_out = stream.left_out
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert counts.total() == len(lines) == 5
    named = {(Path(line["url"]).name, line["key"], line["member"]) for line in lines}
    assert named == {
        ("001.tar", "", ""),
        ("003.tar", "b2", "b2.png"),
        ("003.tar", "b4", "b4.png"),
        ("003.tar", "b5", ""),
        ("004.tar", "d1", ""),
    }
    assert all(line["kind"] in counts and line["reason"] for line in lines)
    assert left_out["video"] == 1
    assert sum(left_out.values()) == 2
    with tarfile.open(folder / "003.tar") as tar:
        offsets = {member.name: member.offset_data for member in tar}
    assert {line["member"]: line["offset"] for line in lines if line["member"]} == {name: offsets[name] for name in ("b2.png", "b4.png")}
    # 10 + 7 + 10 samples of the mixed shards, the 8 of the fourth that keep an item, the 2 of the fifth.
    batches = list(make())
    groups = {int(batch.group[segment]) for batch in batches for segment in range(batch.segments)}
    assert len(groups) == 27 + 8 + 2
    assert sum(batch.dropped for batch in batches) == 2
    for place in range(len(full)):
        with make() as again:
            again.load_state(full[place][1])
            assert tars.run(again) == full[place + 1 :]
            later = again.quarantine.counts
        with make() as before:
            tars.run(before, place + 1)
            assert before.quarantine.counts + later == counts


@pytest.mark.parametrize(
    ("shards", "error", "noted"),
    [
        ({"001.tar"}, ShardError, "in shard .*001.tar, at byte"),
        ({"003.tar"}, DecodeError, "sample 'b2', member 'b2.png'"),
        ({"004.tar"}, SampleError, "sample 'd1'"),
    ],
)
def test_on_error_raise_stops_and_says_where(tars: Any, tmp_path: Path, shards: set[str], error: type[Exception], noted: str) -> None:
    _, folder = damaged(tars, tmp_path)
    stream = ShardStream([folder / name for name in shards], tars.shape, lanes=1, shuffle=0, epochs=1, on_error="raise")
    with pytest.raises(error) as caught:
        list(stream)
    assert re.search(noted, "\n".join(caught.value.__notes__))
    with pytest.raises(error):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]


@pytest.mark.parametrize("lanes", [1, 6])
def test_a_shard_that_vanishes_is_quarantined_and_the_rest_goes_on(tars: Any, tmp_path: Path, lanes: int) -> None:
    # Six lanes cut three shards into two parts each; it is told once an epoch all the same.
    pattern = tars.write_texts(tmp_path, [8, 8, 8])
    stream = ShardStream(pattern, tars.text_shape, lanes=lanes, shuffle=0, epochs=2, window=1, threads=1)
    (tmp_path / "001.tar").unlink()
    seen = Counter(ident for batch in stream for ident in tars.texts(batch))
    assert seen == {(shard, index): 2 for shard in (0, 2) for index in range(8)}
    assert stream.quarantine.counts == {"not_found": 2}


def test_a_pending_sample_that_vanishes_does_not_stop_a_resume(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [40, 40])
    stream = ShardStream(pattern, tars.text_shape, lanes=2, shuffle=20, epochs=1, threads=1)
    seen = Counter(tars.texts(next(stream)))
    again = ShardStream(pattern, tars.text_shape, lanes=2, shuffle=20, epochs=1, threads=1)
    again.load_state(stream.state)
    (tmp_path / "001.tar").unlink()
    for batch in again:
        seen.update(tars.texts(batch))
    assert max(seen.values()) == 1
    assert {(0, index) for index in range(40)} <= set(seen)
    assert again.quarantine.total > 0


def test_no_thread_is_left_after_the_end_after_close_or_after_an_abandoned_loop(mixed: Make) -> None:
    def alive() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("treadle")]

    list(mixed())
    assert alive() == []
    with mixed() as stream:
        next(stream)
        assert alive()
    assert alive() == []
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    for _ in mixed():
        assert alive()
        break
    assert alive() == []


def test_memory_in_flight_is_bounded(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 400_000
    monkeypatch.setattr("treadle.pipeline.feed.IN_FLIGHT_BYTES", limit)
    rng = random.Random(0)
    tars.write_shard(tmp_path / "0.tar", [(f"k{index}", {"png": tars.png(rng, 40, 40)}) for index in range(60)])
    stream = ShardStream(str(tmp_path / "0.tar"), tars.shape, lanes=1, shuffle=4, epochs=1, threads=2)
    assert sum(batch.segments for batch in stream) == 60
    # A sample is charged its content and at most a row of patches: 48 positions of 8 x 8 RGBA, and a PNG of 40 x 40 random pixels.
    assert stream.stats()["decode"]["peak_bytes"] <= limit + 48 * 256 + 7000


def test_stats_count_what_was_done(mixed: Make) -> None:
    stream = mixed()
    batches = len(list(stream))
    stats = stream.stats()
    assert stats["pack"]["batches"] == batches
    assert stats["read"]["samples"] == 90
    assert stats["read"]["bytes"] > 0
    assert stats["decode"]["busy_s"] > 0
    json.dumps(stats)


def test_remote_units_are_read_ahead_alike(tars: Any, mixed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tars.run(mixed())
    monkeypatch.setattr("treadle.pipeline.units.local_path", lambda url: None)
    monkeypatch.setattr("treadle.pipeline.units.STRIDE_SAMPLES", 2)
    assert tars.run(mixed()) == local
    stream = mixed()
    tars.run(stream, 2)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]


def test_a_text_only_stream_starts_no_thread(tars: Any, tmp_path: Path) -> None:
    stream = ShardStream(tars.write_texts(tmp_path, [50]), tars.text_shape, lanes=2, epochs=1)
    next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]
