"""pipeline/feed.py: what is broken is left out and told once, workers end with the pass, memory in flight is bounded, and where
samples are read from changes nothing.
"""

import io
import json
import random
import re
import tarfile
import threading
import wave
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeError
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.samples import SampleError
from treadle.pipeline.shards import ShardError
from treadle.pipeline.stream import ShardStream
from treadle.shape import AudioShape, BatchShape, ImageShape

SHAPE = BatchShape(
    max_rows_per_device=2,
    max_segments_per_device=24,
    max_columns_per_row=48,
    image=ImageShape(patch_side=8),
    audio=AudioShape(chunk_samples=64),
)
TEXT_SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48)

Sample = tuple[str, Mapping[str, bytes]]


def png(rng: random.Random, width: int, height: int) -> bytes:
    pixels = np.frombuffer(rng.randbytes(width * height * 4), np.uint8).reshape(height, width, 4)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def wav(rng: random.Random, samples: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(rng.randbytes(2 * samples))
    return out.getvalue()


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, fields in samples:
            for name, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def mixed_sample(rng: random.Random) -> dict[str, bytes]:
    fields = {"txt": rng.randbytes(rng.randint(1, 30))}
    kind = rng.randrange(3)
    if kind == 1:
        fields["png"] = png(rng, rng.randint(1, 24), rng.randint(1, 24))
    if kind == 2:
        fields["wav"] = wav(rng, rng.randint(1, 900))
    return fields


def write_mixed(folder: Path, counts: Sequence[int], seed: int = 0) -> str:
    """Shards with these many samples; answers the pattern that names them."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for shard, count in enumerate(counts):
        write_shard(folder / f"{shard:03d}.tar", [(f"s{shard}/k{index}", mixed_sample(rng)) for index in range(count)])
    return str(folder / "*.tar")


def write_texts(folder: Path, counts: Sequence[int], width: int = 9) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for shard, count in enumerate(counts):
        samples = [(f"k{index}", {"txt": f"{shard}.{index} ".encode().ljust(width + index % 5, b".")}) for index in range(count)]
        write_shard(folder / f"{shard:03d}.tar", samples)
    return str(folder / "*.tar")


def texts(batch: PackedBatch) -> list[tuple[int, int]]:
    """(shard, index) of the texts of `write_texts` in a batch."""
    found = []
    for segment in range(batch.segments):
        shard, index = batch.payload(segment).tobytes().split(b" ")[0].split(b".")
        found.append((int(shard), int(index)))
    return found


def snapshot(batch: PackedBatch) -> tuple[bytes, bytes]:
    assert batch.state is not None
    return batch.buffer[: batch.used_bytes].tobytes(), batch.state.to_bytes()


def run(stream: ShardStream, most: int = 1 << 30) -> list[tuple[bytes, bytes]]:
    return [snapshot(batch) for _, batch in zip(range(most), stream, strict=False)]


Make = Callable[..., ShardStream]


@pytest.fixture(name="mixed")
def mixed_fixture(tmp_path: Path) -> Make:
    pattern = write_mixed(tmp_path / "mixed", [14, 0, 9, 17, 5])

    def make(**changed: Any) -> ShardStream:
        options: dict[str, Any] = {"seed": 3, "lanes": 4, "shuffle": 12, "epochs": 2, "threads": 2, "window": 2, **changed}
        return ShardStream(pattern, SHAPE, **options)

    return make


def damaged(tmp_path: Path) -> tuple[str, Path]:
    """Shards with a bad picture, a duplicate field, bad relations, an image without a slice, and a shard cut in its middle."""
    rng = random.Random(1)
    pattern = write_mixed(tmp_path / "bad", [10, 10, 10])
    folder = tmp_path / "bad"
    samples: list[Sample] = [(f"b{index}", {"txt": b"text %d" % index}) for index in range(10)]
    samples[2] = ("b2", {"txt": b"caption", "png": png(rng, 9, 9)[:-20]})
    samples[4] = ("b4", {"png": b"nothing at all"})
    samples[5] = ("b5", {"txt": b"x", "relations.json": b"{"})
    samples[6] = ("b6", {"txt": b"y", "mp4": b"....", "bin": b"..."})
    write_shard(folder / "003.tar", samples)
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


def test_what_is_broken_is_left_out_and_told_once(tmp_path: Path) -> None:
    pattern, folder = damaged(tmp_path)
    log = tmp_path / "quarantine.jsonl"

    def make(path: Path | None = None) -> ShardStream:
        # Twelve lanes cut five shards into three parts each: a damage is told once, not by every part.
        return ShardStream(pattern, SHAPE, lanes=12, shuffle=24, epochs=1, window=2, quarantine=path, seed=5)

    with make(log) as stream:
        full = run(stream)
        counts = stream.quarantine.counts
        left_out = stream.left_out
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert counts.total() == len(lines) == 5
    named = {(Path(line["url"]).name, line["key"], line["member"]) for line in lines}
    assert named == {("001.tar", "", ""), ("003.tar", "b2", "b2.png"), ("003.tar", "b4", "b4.png"), ("003.tar", "b5", ""), ("004.tar", "d1", "")}
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
            assert run(again) == full[place + 1 :]
            later = again.quarantine.counts
        with make() as before:
            run(before, place + 1)
            assert before.quarantine.counts + later == counts


@pytest.mark.parametrize(
    ("shards", "error", "noted"),
    [
        ({"001.tar"}, ShardError, "in shard .*001.tar, at byte"),
        ({"003.tar"}, DecodeError, "sample 'b2', member 'b2.png'"),
        ({"004.tar"}, SampleError, "sample 'd1'"),
    ],
)
def test_on_error_raise_stops_and_says_where(tmp_path: Path, shards: set[str], error: type[Exception], noted: str) -> None:
    _, folder = damaged(tmp_path)
    stream = ShardStream([folder / name for name in shards], SHAPE, lanes=1, shuffle=0, epochs=1, on_error="raise")
    with pytest.raises(error) as caught:
        list(stream)
    assert re.search(noted, "\n".join(caught.value.__notes__))
    with pytest.raises(error):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]


@pytest.mark.parametrize("lanes", [1, 6])
def test_a_shard_that_vanishes_is_quarantined_and_the_rest_goes_on(tmp_path: Path, lanes: int) -> None:
    # Six lanes cut three shards into two parts each; it is told once an epoch all the same.
    pattern = write_texts(tmp_path, [8, 8, 8])
    stream = ShardStream(pattern, TEXT_SHAPE, lanes=lanes, shuffle=0, epochs=2, window=1, threads=1)
    (tmp_path / "001.tar").unlink()
    seen = Counter(ident for batch in stream for ident in texts(batch))
    assert seen == {(shard, index): 2 for shard in (0, 2) for index in range(8)}
    assert stream.quarantine.counts == {"not_found": 2}


def test_a_pending_sample_that_vanishes_does_not_stop_a_resume(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, [40, 40])
    stream = ShardStream(pattern, TEXT_SHAPE, lanes=2, shuffle=20, epochs=1, threads=1)
    seen = Counter(texts(next(stream)))
    again = ShardStream(pattern, TEXT_SHAPE, lanes=2, shuffle=20, epochs=1, threads=1)
    again.load_state(stream.state)
    (tmp_path / "001.tar").unlink()
    for batch in again:
        seen.update(texts(batch))
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


def test_memory_in_flight_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 400_000
    monkeypatch.setattr("treadle.pipeline.feed.IN_FLIGHT_BYTES", limit)
    rng = random.Random(0)
    write_shard(tmp_path / "0.tar", [(f"k{index}", {"png": png(rng, 40, 40)}) for index in range(60)])
    stream = ShardStream(str(tmp_path / "0.tar"), SHAPE, lanes=1, shuffle=4, epochs=1, threads=2)
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


def test_remote_units_are_read_ahead_alike(mixed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    local = run(mixed())
    monkeypatch.setattr("treadle.pipeline.units.local_path", lambda url: None)
    monkeypatch.setattr("treadle.pipeline.units.STRIDE_SAMPLES", 2)
    assert run(mixed()) == local
    stream = mixed()
    run(stream, 2)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]


def test_a_text_only_stream_starts_no_thread(tmp_path: Path) -> None:
    stream = ShardStream(write_texts(tmp_path, [50]), TEXT_SHAPE, lanes=2, epochs=1)
    next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("treadle")]
