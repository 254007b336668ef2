"""pipeline/feed.py: what is broken is left out and told once, workers end with the pass, memory in flight is bounded, and where
samples are read from changes nothing.
"""

import gzip
import io
import json
import pickle
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
from treadle.pipeline.losses import NoSamplesError
from treadle.pipeline.prepare import Outcome, Preparer
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import SampleError, Schema
from treadle.pipeline.shards import ShardError
from treadle.pipeline.sources import Source
from treadle.pipeline.stream import ShardStream
from treadle.shape import BatchShape

Make = Callable[..., ShardStream]


def damaged(tars: Any, tmp_path: Path) -> tuple[str, Path]:
    """Shards with a bad picture, a duplicate field, bad relations, an image without a slice, and a shard cut in its middle."""
    rng = random.Random(1)
    pattern = tars.write_mixed(tmp_path / "bad", [10, 10, 10])
    folder = tmp_path / "bad"
    samples: list[tuple[str, dict[str, bytes]]] = [(f"b{index}", {"txt": b"text %d" % index}) for index in range(10)]
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
        members = {member.name: member for member in tar}
    # An item is where its bytes begin, a sample where its first header does, a damage where it lies: d1 comes after one file of a block.
    assert {(line["key"], line["member"]): line["offset"] for line in lines} == {
        ("", ""): (folder / "001.tar").stat().st_size - 100,
        ("b2", "b2.png"): members["b2.png"].offset_data,
        ("b4", "b4.png"): members["b4.png"].offset_data,
        ("b5", ""): members["b5.txt"].offset,
        ("d1", ""): 1024,
    }
    assert all(list(line) == ["url", "key", "member", "offset", "kind", "reason"] for line in lines)
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
    segments, flying = 0, []
    for batch in stream:
        segments += batch.segments
        flying.append(stream.stats()["decode"]["in_flight_bytes"])
    assert segments == 60
    # A picture of 40 x 40 RGBA is 6,400 bytes: some were under way as batches left, and none are at the end.
    assert max(flying) >= 6400 and stream.stats()["decode"]["in_flight_bytes"] == 0
    # A sample is charged its content and at most a row of patches: 48 positions of 8 x 8 RGBA, and a PNG of 40 x 40 random pixels.
    assert stream.stats()["decode"]["peak_bytes"] <= limit + 48 * 256 + 7000


def test_what_is_not_decoded_yet_is_charged_for_what_it_will_hold(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 100_000
    monkeypatch.setattr("treadle.pipeline.feed.IN_FLIGHT_BYTES", limit)
    rng = random.Random(0)
    tars.write_shard(tmp_path / "0.tar", [(f"k{index}", {"png": tars.png(rng, 40, 40)}) for index in range(60)])
    first_waited_for, drawn = threading.Event(), []
    decode, pop = Preparer.__call__, Readahead.pop

    def late(self: Preparer, *given: Any) -> Outcome:
        assert first_waited_for.wait(30)
        return decode(self, *given)

    def counted(self: Readahead[Any, Any, Any]) -> Any:
        drawn.append(len(self))
        first_waited_for.set()
        return pop(self)

    monkeypatch.setattr(Preparer, "__call__", late)
    monkeypatch.setattr(Readahead, "pop", counted)
    stream = ShardStream(str(tmp_path / "0.tar"), tars.shape, lanes=1, shuffle=4, epochs=1, threads=2)
    assert sum(batch.segments for batch in stream) == 60
    # Each picture becomes 40 x 40 pixels of four bytes; one beyond the limit is let in.
    assert 1 < drawn[0] <= 1 + limit // (40 * 40 * 4)


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


NOTHING_SELECTED: dict[str, Any] = {"schema": Schema(fields=["jpg"])}


def never_a_bag(tars: Any, folder: Path, why: str) -> tuple[str, dict[str, Any]]:
    """A shard of 20 samples none of which can be part of a batch, and the stream's options."""
    if why == "not selected":
        return tars.write_texts(folder, [20]), NOTHING_SELECTED
    if why == "not decodable":
        tars.write_shard(folder / "0.tar", [(f"k{index}", {"png": b"no picture"}) for index in range(20)])
    else:
        # 25 items of a sample, and 24 segments in a batch.
        tars.write_shard(folder / "0.tar", [(f"k{index}", {f"t{item}.txt": b"x" for item in range(25)}) for index in range(20)])
    return str(folder / "0.tar"), {}


@pytest.mark.parametrize("lanes", [1, 6, 64])
@pytest.mark.parametrize(
    ("why", "named"),
    [
        ("not selected", r"left out: \d+ not_selected"),
        ("not decodable", r"quarantined: \d+ unsupported"),
        ("too many", r"\d+ samples \(\d+ items\) can fit"),
    ],
)
def test_an_endless_stream_without_a_bag_is_told(tars: Any, tmp_path: Path, why: str, named: str, lanes: int) -> None:
    pattern, options = never_a_bag(tars, tmp_path, why)
    with ShardStream(pattern, tars.shape, lanes=lanes, threads=1, **options) as stream:
        with pytest.raises(NoSamplesError, match=named):
            next(stream)
        # A whole epoch was read, and not many: looked at after 32 samples, and from then on after twice as many.
        assert 20 < stream.stats()["read"]["samples"] <= 128
        with pytest.raises(NoSamplesError):
            next(stream)


def test_an_endless_blend_is_told_once_each_source_is_through(tars: Any, tmp_path: Path) -> None:
    large, small = tars.write_texts(tmp_path / "a", [300]), tars.write_texts(tmp_path / "b", [2])
    stream = ShardStream([Source(large), Source(small)], tars.text_shape, lanes=2, **NOTHING_SELECTED)
    with pytest.raises(NoSamplesError):
        next(stream)
    # Half of the draws are of the large source, whose 300 samples are to be seen whole.
    assert stream.stats()["read"]["samples"] > 300


def test_a_source_that_gives_something_ends_no_stream(tars: Any, tmp_path: Path) -> None:
    """One sample in 400 has an item: the packer waits for it epoch after epoch."""
    tars.write_shard(tmp_path / "0.tar", [(f"k{index}", {"txt" if index == 399 else "bin": b"abc"}) for index in range(400)])
    stream = ShardStream(str(tmp_path / "0.tar"), tars.text_shape, lanes=1, shuffle=0, window=1)
    assert next(stream).segments > 1


@pytest.mark.parametrize("why", ["not selected", "not decodable", "too many"])
def test_a_finite_stream_without_a_bag_ends_with_a_warning(tars: Any, tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    pattern, options = never_a_bag(tars, tmp_path, why)
    stream = ShardStream(pattern, tars.shape, lanes=2, epochs=2, threads=1, **options)
    assert list(stream) == []
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["end of the data without one batch, after 40 samples"]


def test_bags_that_fit_no_batch_are_counted_after_the_last_batch_too(tars: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = [(f"k{index}", {"t.txt": b"x"} if index < 5 else {f"t{item}.txt": b"x" for item in range(25)}) for index in range(7)]
    tars.write_shard(tmp_path / "0.tar", samples)
    # Each batch holds one bag, and leaves as soon as it is full: the two large bags come after the last.
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=24, max_columns_per_row=2)
    stream = ShardStream(str(tmp_path / "0.tar"), shape, lanes=1, shuffle=0, epochs=1, window=1)
    batches = list(stream)
    assert [batch.segments for batch in batches] == [1] * 5
    assert sum(batch.dropped for batch in batches) == 0
    assert (stream.stats()["pack"]["unfit_bags"], stream.stats()["pack"]["unfit_items"]) == (2, 50)
    assert caplog.messages == ["end of the data: 5 batches of 7 samples; 2 samples (50 items) can fit no batch of this shape"]


@pytest.mark.parametrize(("lanes", "pack"), [(1, ""), (6, ""), (1, ".gz"), (6, ".gz")])
def test_what_is_odd_in_a_shard_is_counted_and_told_once(
    tars: Any, tmp_path: Path, lanes: int, pack: str, caplog: pytest.LogCaptureFixture
) -> None:
    tars.write_shard(tmp_path / "0.tar", [(key, {"txt": b"x"}) for key in ("a", "b", "a", "c", "a")])
    with tarfile.open(tmp_path / "1.tar", "w") as tar:
        for name, kind in (("a.txt", tarfile.REGTYPE), ("folder", tarfile.DIRTYPE), ("b.txt", tarfile.SYMTYPE), ("c.txt", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "elsewhere"
            tar.addfile(member)
        size = tar.offset
    for name, length in (("0.tar", None), ("1.tar", size)):
        data = (tmp_path / name).read_bytes()[:length]
        (tmp_path / name).unlink()
        (tmp_path / f"{name}{pack}").write_bytes(gzip.compress(data) if pack else data)
    stream = ShardStream(str(tmp_path / "*.tar*"), tars.text_shape, lanes=lanes, epochs=3)
    assert sum(batch.segments for batch in stream) == 15
    assert stream.warnings == {"key_seen_again": 2, "skipped_directory": 1, "skipped_symbolic_link": 1, "no_end_marker": 1}
    told = [message.split(": ")[:2] for message in caplog.messages if message.startswith("shard")]
    zero, one = f"shard {tmp_path}/0.tar{pack}", f"shard {tmp_path}/1.tar{pack}"
    assert sorted(told) == [[zero, "key_seen_again (2)"], [one, "no_end_marker (1)"], [one, "skipped_symbolic_link (1)"]]


def test_a_remote_shard_is_fetched_once_for_all_lanes(tars: Any, tmp_path: Path, site: Any) -> None:
    tars.write_texts(tmp_path, [300], width=400)
    data = (tmp_path / "000.tar").read_bytes()
    shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=512)
    options: dict[str, Any] = {"lanes": 64, "shuffle": 100, "epochs": 2, "seed": 1}
    for name, content in (("000.tar", data), ("000.tar.gz", gzip.compress(data))):
        site.sent = 0
        with ShardStream(site.url(name, content), shape, **options) as stream:
            found = Counter(index for batch in stream for index in tars.texts(batch))
        assert found == {(0, index): 2 for index in range(300)}
        # Both epochs, and once its first bytes.
        assert site.sent <= len(content) + 4096


def test_a_retry_policy_reaches_the_reads(tars: Any, site: Any) -> None:
    site.down = True
    retry = RetryPolicy(attempts=3, base_delay_s=0.0)
    stream = ShardStream(site.url("0.tar", b""), tars.text_shape, lanes=1, epochs=1, retry=retry)
    assert list(stream) == []
    assert site.requests == 3
    assert stream.quarantine.counts == {"unreadable": 1}
    assert pickle.loads(pickle.dumps(stream))._arguments["retry"] == retry


def test_halves_of_samples_are_told_where_fields_are_required(tars: Any, tmp_path: Path) -> None:
    """A sample that is split over two shards, and two whose files are interleaved: halves as they stand, refused where both fields are required."""
    picture = tars.png(random.Random(0), 8, 8)
    first = [("0", {"txt": b"a", "png": picture}), ("1", {"png": picture})]
    second = [("1", {"txt": b"b"}), ("2", {"txt": b"c", "png": picture})]
    interleaved = [("3", {"txt": b"d"}), ("4", {"txt": b"e"}), ("3", {"png": picture}), ("4", {"png": picture})]
    for number, samples in enumerate((first, second, interleaved)):
        tars.write_shard(tmp_path / f"{number}.tar", samples)
    for required, items, refused in ((), 10, {}), (("txt", "png"), 4, {"incomplete": 6}):
        with ShardStream(str(tmp_path / "*.tar"), tars.shape, lanes=1, epochs=1, schema=Schema(required=required)) as stream:
            assert sum(batch.segments for batch in stream) == items
            assert stream.quarantine.counts == refused
            assert stream.warnings["key_seen_again"] == 2
