"""pipeline/torch_stream.py: the position of the batches handed out, without workers, with them, and at another number of them."""

import io
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from treadle.pipeline.batch import PackedBatch
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
        stream._readers = max(1, workers)
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        again = make(pattern)
        again.load_state_dict(state)
        assert head + [texts(batch) for batch in again.loader(num_workers=workers)] == full


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
    with pytest.raises(ValueError, match="states, merged, readers, next_reader missing"):
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
