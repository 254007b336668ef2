"""pipeline/torch_stream.py: the position of the batches handed out, without workers, with them, and at another number of them."""

import io
import pickle
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream
from treadle.pipeline.torch_stream import TorchStream
from treadle.shape import BatchShape

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48)


@pytest.fixture(name="pattern")
def pattern_fixture(tmp_path: Path) -> str:
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for index in range(40):
                data = f"{shard}.{index} ".encode().ljust(9 + index % 5, b".")
                member = tarfile.TarInfo(f"k{index}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return str(tmp_path / "*.tar")


def make(pattern: str, rank: int = 0, world_size: int = 1) -> TorchStream:
    return TorchStream(ShardStream(pattern, SHAPE, lanes=12, shuffle=24, epochs=1, window=2, threads=1, rank=rank, world_size=world_size))


def texts(batch: PackedBatch) -> list[bytes]:
    return [batch.payload(segment).tobytes().split(b" ")[0] for segment in range(batch.segments)]


EVERY = {f"{shard}.{index}".encode(): 1 for shard in range(3) for index in range(40)}


def test_without_workers_it_is_the_stream_itself(pattern: str) -> None:
    direct = [texts(batch) for batch in make(pattern).stream]
    loader = DataLoader(make(pattern), batch_size=None)
    assert [texts(batch) for batch in loader] == direct


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_state_dict_is_exact_for_any_number_of_workers(pattern: str, workers: int) -> None:
    full = [texts(batch) for batch in make(pattern).loader(num_workers=workers)]
    assert Counter(text for batch in full for text in batch) == EVERY
    for count in (0, 1, 2, 5):
        stream = make(pattern)
        batches = stream.loader(num_workers=workers)
        head = [texts(next(batches)) for _ in range(count)]
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        again = make(pattern)
        again.load_state_dict(state)
        assert head + [texts(batch) for batch in again.loader(num_workers=workers)] == full


def loaded(stream: TorchStream, workers: int = 2, start: str = "fork") -> Iterator[PackedBatch]:
    """Through a DataLoader of one's own."""
    return iter(DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=start))


def drain(batches: Iterator[PackedBatch]) -> None:
    """Lets workers end by themselves: torch kills those of a loader that is left, which may complain of it."""
    for _ in batches:
        continue


def test_a_loader_of_ones_own_is_observed(pattern: str) -> None:
    full = [texts(batch) for batch in loaded(make(pattern))]
    assert Counter(text for batch in full for text in batch) == EVERY
    stream = make(pattern)
    batches = loaded(stream)
    head = []
    for batch in (next(batches) for _ in range(5)):
        stream.observe(batch)
        head.append(texts(batch))
    again = make(pattern)
    again.load_state_dict(stream.state_dict())
    assert head + [texts(batch) for batch in loaded(again)] == full
    drain(batches)


@pytest.mark.parametrize(("workers", "start"), [(2, "fork"), (1, "spawn")])
def test_a_loader_of_ones_own_that_is_not_observed_is_told(pattern: str, workers: int, start: str) -> None:
    stream = make(pattern)
    batches = loaded(stream, workers, start)
    # Before a batch has been handed out it stands at its beginning, whatever the workers have made.
    assert {StreamState.from_bytes(state).samples for state in stream.state_dict()["states"].values()} == {0}
    for _ in range(3 * workers):
        next(batches)
    with pytest.raises(ValueError, match=r"call observe\(batch\) for each batch"):
        stream.state_dict()
    drain(batches)


def in_a_worker(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    info = SimpleNamespace(id=number, num_workers=count)
    monkeypatch.setattr("treadle.pipeline.torch_stream.get_worker_info", lambda: info)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_each_workers_own_state_goes_on(pattern: str, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loaders ask for it that keep the state_dict of each worker: torchdata's StatefulDataLoader."""
    for number in range(3):
        in_a_worker(monkeypatch, number, 3)
        full = [texts(batch) for batch in make(pattern)]
        worker = make(pattern)
        batches = iter(worker)
        head = [texts(next(batches)) for _ in range(taken)]
        state = pickle.loads(pickle.dumps(worker.state_dict()))
        again = make(pattern)
        again.load_state_dict(state)
        assert head + [texts(batch) for batch in again] == full


def test_it_begins_where_the_stream_stands(pattern: str) -> None:
    stream = make(pattern).stream
    seen = Counter(text for _ in range(3) for text in texts(next(stream)))
    state = stream.state
    for workers in (0, 2):
        fresh = make(pattern)
        fresh.stream.load_state(state)
        rest = Counter(text for batch in fresh.loader(num_workers=workers) for text in texts(batch))
        assert seen + rest == EVERY


def test_what_was_dealt_anew_can_be_dealt_again(pattern: str) -> None:
    """To ranks and workers 1 x 2, 2 x 1, 1 x 2: also before every reader has had its turn."""
    seen: Counter[bytes] = Counter()
    merged: dict[str, Any] | None = None
    for world_size, workers, most in ((1, 2, 3), (2, 1, 1), (1, 2, 1), (1, 0, 1 << 30)):
        states = []
        for rank in range(world_size):
            stream = make(pattern, rank, world_size)
            if merged is not None:
                stream.load_state_dict(merged)
            batches = stream.loader(num_workers=workers)
            for _, batch in zip(range(most), batches, strict=False):
                seen.update(texts(batch))
            states.append(stream.state_dict())
            drain(batches)
        merged = TorchStream.merge(states)
    assert seen == EVERY


def test_merged_state_dicts_are_dealt_to_other_ranks_and_workers(pattern: str) -> None:
    seen: Counter[bytes] = Counter()
    states = []
    for rank in range(2):
        stream = make(pattern, rank, 2)
        batches = stream.loader(num_workers=2)
        for _ in range(2 + rank):
            seen.update(texts(next(batches)))
        states.append(stream.state_dict())
    merged = TorchStream.merge(states)
    alone = make(pattern)
    alone.load_state_dict(merged)
    for batch in alone.loader(num_workers=0):
        seen.update(texts(batch))
    assert seen == EVERY


def test_a_batch_without_a_state_and_a_wrong_dictionary_are_refused(pattern: str) -> None:
    stream = make(pattern)
    batch = next(iter(stream))
    batch.state = None
    with pytest.raises(ValueError, match="carries no state"):
        stream.observe(batch)
    with pytest.raises(ValueError, match=r"load_state_dict: .*states.* missing"):
        stream.load_state_dict({})
    with pytest.raises(ValueError, match="num_workers is -1"):
        next(stream.loader(num_workers=-1))


def test_another_number_of_workers_needs_a_merged_state(pattern: str) -> None:
    stream = make(pattern)
    next(stream.loader(num_workers=2))
    state = stream.state_dict()
    again = make(pattern)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"TorchStream\.merge"):
        next(iter(again))
    again.load_state_dict(TorchStream.merge([state]))
    assert next(iter(again)).segments > 0
