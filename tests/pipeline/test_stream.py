"""pipeline/stream.py over real tars of texts, PNGs and WAVs: the same batches and states after any restore and for any number of
threads, elastic worlds, faults left out and told once, and the end of the data.
"""

import pickle
import random
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.decoders import DecodeOptions
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.samples import Schema, sample_id
from treadle.pipeline.sources import Source
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream
from treadle.shape import Modality

Make = Callable[..., ShardStream]


def test_every_item_once_per_epoch_with_its_id(mixed: Make, tmp_path: Path) -> None:
    ids = [int(batch.id[segment]) for batch in mixed() for segment in range(batch.segments)]
    assert set(Counter(ids).values()) == {2}
    # All items of a sample share the group made from the sample's id, and 45 samples were written.
    groups = {int(batch.group[segment]) for batch in mixed() for segment in range(batch.segments)}
    url = str(tmp_path / "mixed" / "000.tar")
    assert len(groups) == 45
    assert np.int64(np.uint64(sample_id(url, 3))) in groups


def test_restore_at_every_batch_gives_the_same_batches_and_states(tars: Any, mixed: Make) -> None:
    with mixed() as stream:
        full = tars.run(stream)
    assert len(full) > 12
    assert any(len(StreamState.from_bytes(state).columns["pending_lane"]) for _, state in full)
    assert any(len(StreamState.from_bytes(state).columns["held_shard"]) for _, state in full)
    for place in range(len(full)):
        with mixed(threads=1 + place % 3) as again:
            again.load_state(full[place][1])
            assert again.state.to_bytes() == full[place][1]
            assert tars.run(again) == full[place + 1 :]


def test_threads_and_processes_do_not_change_a_byte(tars: Any, mixed: Make) -> None:
    one = tars.run(mixed(threads=1))
    assert tars.run(mixed(threads=4)) == one
    assert tars.run(mixed(processes=1)) == one


def test_a_state_survives_pickle_and_travels_with_its_batch(tars: Any, mixed: Make, tmp_path: Path) -> None:
    stream = mixed()
    assert stream.state.samples == 0
    first = next(stream)
    assert first.state == stream.state
    assert first.state is not None
    assert pickle.loads(pickle.dumps(first.state)) == first.state
    first.save(tmp_path / "batch.safetensors")
    loaded = PackedBatch.load(tmp_path / "batch.safetensors").state
    rest = tars.run(stream)
    again = mixed()
    assert loaded is not None
    again.load_state(loaded)
    assert tars.run(again) == rest


def test_a_pickled_stream_goes_on_where_it_was(tars: Any, mixed: Make) -> None:
    stream = mixed()
    fresh = pickle.loads(pickle.dumps(stream))
    tars.run(stream, 3)
    moved = pickle.loads(pickle.dumps(stream))
    assert tars.run(moved) == tars.run(stream)
    assert len(tars.run(fresh)) > 12


def test_leaving_a_loop_and_iterating_again_goes_on(tars: Any, mixed: Make) -> None:
    full = tars.run(mixed())
    stream = mixed()
    found = []
    for batch in stream:
        found.append(tars.snapshot(batch))
        break
    assert found + tars.run(stream) == full
    assert list(stream) == []


def test_load_state_goes_back_and_forth(tars: Any, mixed: Make) -> None:
    stream = mixed()
    full = tars.run(stream)
    for place in (5, 0, 8):
        stream.load_state(StreamState.from_bytes(full[place][1]))
        assert tars.run(stream, 2) == full[place + 1 : place + 3]


@pytest.mark.parametrize("seed", range(4))
def test_worlds_1_2_4_3_1_see_each_sample_once_per_epoch(tars: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([0, 3, 8, 20]) for _ in range(rng.choice([2, 5, 9]))]
    pattern = tars.write_texts(tmp_path, counts)

    def make(rank: int, world_size: int) -> ShardStream:
        return ShardStream(
            pattern, tars.text_shape, rank=rank, world_size=world_size, lanes=12, shuffle=30, epochs=2, seed=seed, window=2, threads=1
        )

    seen: Counter[tuple[int, int]] = Counter()
    state: StreamState | None = None
    for world_size in (1, 2, 4, 3, 1):
        states: list[StreamState] = []
        for rank in range(world_size):
            stream = make(rank, world_size)
            if state is not None:
                stream.load_state(state)
            for _, batch in zip(range(rng.randint(0, 3)), stream, strict=False):
                seen.update(tars.texts(batch))
            states.append(stream.state)
        state = StreamState.merge(states)
    assert state is not None
    stream = make(0, 1)
    stream.load_state(state)
    for batch in stream:
        seen.update(tars.texts(batch))
    assert seen == {(shard, index): 2 for shard, count in enumerate(counts) for index in range(count)}


def test_a_merged_state_is_exact_at_its_own_world_size(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [30, 30, 30])

    def make(rank: int) -> ShardStream:
        return ShardStream(pattern, tars.text_shape, rank=rank, world_size=2, lanes=4, shuffle=8, epochs=1, window=2)

    streams = [make(0), make(1)]
    for count, stream in zip((2, 3), streams, strict=True):
        tars.run(stream, count)
    merged = StreamState.merge([stream.state for stream in streams])
    for rank, stream in enumerate(streams):
        again = make(rank)
        again.load_state(merged)
        assert again.state == stream.state
        assert tars.run(again) == tars.run(stream)


def test_blends_keep_their_weights_and_a_repeating_source_never_ends_a_lane(tars: Any, tmp_path: Path) -> None:
    big = tars.write_texts(tmp_path / "a", [60, 60])
    small = tars.write_texts(tmp_path / "b", [5])

    def make() -> ShardStream:
        sources = [Source(big, weight=2.0), Source(small, weight=1.0, repeat=True)]
        return ShardStream(sources, tars.text_shape, lanes=2, shuffle=10, epochs=1, window=2, threads=1)

    batches = list(make())
    groups = Counter(int(batch.group[segment]) for batch in batches for segment in range(batch.segments))
    repeated = {int(np.int64(np.uint64(sample_id(str(tmp_path / "b" / "000.tar"), index)))) for index in range(5)}
    once = [count for group, count in groups.items() if group not in repeated]
    assert once == [1] * 120
    # 120 draws of weight two beside about 60 of weight one: five deviations of a negative binomial, sqrt(120 * 1/3) / (2/3) = 9.5.
    assert 12 < sum(groups[group] for group in repeated) < 108
    full = [tars.snapshot(batch) for batch in batches]
    for place in (0, len(full) // 2, len(full) - 1):
        again = make()
        again.load_state(full[place][1])
        assert tars.run(again) == full[place + 1 :]


def test_an_exhausted_rank_stops_and_keeps_its_state(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [3])
    stream = ShardStream(pattern, tars.text_shape, rank=3, world_size=4, lanes=4, epochs=1)
    assert list(stream) == []
    ended = stream.state
    assert ended.samples == 0
    again = ShardStream(pattern, tars.text_shape, rank=3, world_size=4, lanes=4, epochs=1)
    again.load_state(ended)
    assert list(again) == []
    assert again.state == ended


def test_without_epochs_it_never_ends(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [6])
    stream = ShardStream(pattern, tars.text_shape, lanes=1, window=1, threads=1)
    seen = Counter(ident for _, batch in zip(range(30), stream, strict=False) for ident in tars.texts(batch))
    assert min(seen.values()) > 10


def test_another_manifest_is_refused_naming_what_differs(tars: Any, mixed: Make, tmp_path: Path) -> None:
    state = next(mixed()).state
    assert state is not None
    other = tars.write_texts(tmp_path / "other", [3])
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 4}, "seed: 4 is not 3"),
        ({"lanes": 8}, "lanes: 8 is not 4"),
        ({"shuffle": 13}, "shuffle: 13 is not 12"),
        ({"shuffle_bytes": 99}, "shuffle_bytes: 99 is not"),
        ({"epochs": 3}, "epochs: 3 is not 2"),
        ({"window": 3}, r"options\.window: 3 is not 2"),
        ({"max_edges": 500}, r"options\.max_edges: 500 is not 0"),
        ({"schema": Schema(fields=["txt"])}, r"schema\.fields"),
        ({"options": DecodeOptions(video_min_tubes=9)}, r"options\.decode\.video_min_tubes: 9 is not 8"),
    ]
    for change, named in changes:
        with pytest.raises(ValueError, match=named):
            mixed(**change).load_state(state)
    with pytest.raises(ValueError, match=r"shape\.audio\.chunk_samples: 0 is not 64; shape\.image\.patch_side: 0 is not 8"):
        ShardStream(str(tmp_path / "mixed" / "*.tar"), tars.text_shape, lanes=4, shuffle=12, epochs=2, seed=3, window=2).load_state(state)
    with pytest.raises(ValueError, match=r"sources\[0\]\.urls"):
        ShardStream(other, tars.shape, lanes=4, shuffle=12, epochs=2, seed=3, window=2).load_state(state)
    with pytest.raises(ValueError, match=r"sources\[0\]\.weight: 2.0 is not 1.0"):
        ShardStream(Source(str(tmp_path / "mixed" / "*.tar"), 2.0), tars.shape, lanes=4, shuffle=12, epochs=2, seed=3, window=2).load_state(
            state
        )
    with pytest.raises(ValueError, match="merge the states of all ranks"):
        mixed(rank=0, world_size=2).load_state(mixed(rank=0, world_size=4).state)


def test_lanes_are_derived_brought_by_a_state_and_checked(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [30])
    assert ShardStream(pattern, tars.text_shape).lanes == 64
    given = ShardStream(pattern, tars.text_shape, lanes=6)
    derived = ShardStream(pattern, tars.text_shape)
    derived.load_state(given.state)
    assert derived.lanes == 6
    assert tars.run(derived, 2) == tars.run(given, 2)
    with pytest.raises(ValueError, match="lanes is 4 and world_size is 5"):
        ShardStream(pattern, tars.text_shape, lanes=4, world_size=5)
    with pytest.raises(ValueError, match=r"lanes is 0 \(64 are derived\) and world_size is 65"):
        ShardStream(pattern, tars.text_shape, world_size=65)
    with pytest.warns(UserWarning, match="world_size=48 does not divide lanes=64.*use 64 ranks, or lanes=96"):
        ShardStream(pattern, tars.text_shape, world_size=48)
    with warnings.catch_warnings(record=True) as caught:
        ShardStream(pattern, tars.text_shape, world_size=32)
    assert caught == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 1}, r"ShardStream\.rank is 1"),
        ({"world_size": 0}, r"ShardStream\.world_size is 0"),
        ({"shuffle": -1}, r"ShardStream\.shuffle is -1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"threads": 0}, r"ShardStream\.threads is 0"),
        ({"processes": -1}, r"ShardStream\.processes is -1"),
        ({"on_error": "skip"}, r"ShardStream\.on_error is 'skip'"),
        ({"window": 0}, "window"),
    ],
)
def test_refusals(tars: Any, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    pattern = tars.write_texts(tmp_path, [1])
    with pytest.raises(ValueError, match=named):
        ShardStream(pattern, tars.text_shape, **change)


def test_sources_are_patterns_or_sources_not_both(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [1])
    with pytest.raises(ValueError, match="wrap each pattern in a Source"):
        ShardStream([pattern, Source(pattern)], tars.text_shape)
    with pytest.raises(ValueError, match="sources is empty"):
        ShardStream([], tars.text_shape)
    with pytest.raises(ValueError, match="nowhere"):
        ShardStream(str(tmp_path / "nowhere*.tar"), tars.text_shape)


def test_patterns_together_are_one_source(tars: Any, tmp_path: Path) -> None:
    first, second = tars.write_texts(tmp_path / "a", [9, 9]), tars.write_texts(tmp_path / "b", [9])
    together = ShardStream([first, second], tars.text_shape, lanes=2, epochs=1)
    assert len(together.manifest.sources) == 1
    assert together.manifest.sources[0].num_shards == 3
    assert sum(batch.segments for batch in together) == 27


def test_modalities_arrive_whole(mixed: Make) -> None:
    kinds: Counter[int] = Counter()
    for batch in mixed(epochs=1):
        kinds.update(batch.modality[: batch.segments].tolist())
    assert set(kinds) == {Modality.TEXT, Modality.IMAGE, Modality.AUDIO}
    assert kinds[Modality.TEXT] == 45


SCRIPT = """
import sys
from pathlib import Path
from treadle.pipeline import AudioShape, BatchShape, ImageShape, ShardStream
shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48,
    image=ImageShape(patch_side=8), audio=AudioShape(chunk_samples=64))
stream = ShardStream(sys.argv[1], shape, seed=3, lanes=4, shuffle=12, epochs=2, threads=2, window=2)
state = Path(sys.argv[2])
if state.exists():
    stream.load_state(state.read_bytes())
for batch in stream:
    sys.stdout.write(batch.buffer[: batch.used_bytes].tobytes().hex() + "\\n")
    sys.stdout.flush()
    beside = state.with_suffix(".new")
    beside.write_bytes(batch.state.to_bytes())
    beside.replace(state)
    sys.stdin.readline()
sys.stdout.write("end\\n")
"""


def test_killed_and_resumed_it_gives_the_same_batches(tars: Any, mixed: Make, tmp_path: Path) -> None:
    expected = [content.hex() for content, _ in tars.run(mixed())]
    found: list[str] = []
    state = tmp_path / "state"
    while not found or found[-1] != "end":
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "mixed" / "*.tar"), str(state)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            for line in process.stdout:
                found.append(line.strip())
                # The state of a batch is on disk once the next one is asked for: kill there, several batches in.
                if len(found) % 11 == 0 and found[-1] != "end":
                    process.stdin.write("\n")
                    process.stdin.flush()
                    following = process.stdout.readline().strip()
                    found.append(following)
                    process.kill()
                    break
                process.stdin.write("\n")
                process.stdin.flush()
        if found[-1] != "end":
            # Killed at any moment around the write: the state is that of the last batch or of the one before.
            resumed = StreamState.from_bytes(state.read_bytes())
            full = [StreamState.from_bytes(data) for _, data in tars.run(mixed())]
            found = found[: full.index(resumed) + 1]
    assert found == [*expected, "end"]


def test_threads_that_share_a_stream_take_turns(tars: Any, tmp_path: Path) -> None:
    pattern = tars.write_texts(tmp_path, [300, 300])

    def make() -> ShardStream:
        return ShardStream(pattern, tars.text_shape, lanes=4, epochs=1, window=1, threads=1)

    alone = tars.run(make())
    shared = make()
    found: list[tuple[bytes, bytes]] = []
    failures: list[BaseException] = []

    def take() -> None:
        try:
            for batch in shared:
                found.append(tars.snapshot(batch))
        except BaseException as error:  # the point: of every kind
            failures.append(error)

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        takers = [threading.Thread(target=take) for _ in range(6)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
    finally:
        sys.setswitchinterval(often)
    assert failures == []
    assert sorted(found) == sorted(alone)


def test_a_stream_without_a_batch_ends_where_it_began(tars: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.tar"
    tars.write_shard(path, [("a", {"png": b"no picture"})])

    def make() -> ShardStream:
        return ShardStream(str(path), tars.shape, lanes=2, epochs=1)

    unasked, asked = make(), make()
    began = asked.state
    assert list(unasked) == list(asked) == []
    assert unasked.quarantine.total == asked.quarantine.total == 1
    assert unasked.state == asked.state == began
