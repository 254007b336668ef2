"""What users hold is taken as it is: numbers of numpy and torch, any bytes, lists and whatever else gives its entries one by one."""

import array
import mmap
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from treadle import BatchShape, Encoder, Modality, PackedBatch, Packer, Schedule, ShardStream, StepItems, Trainer, TrainerConfig
from treadle.decoders import decode
from treadle.pipeline import StreamState, TorchStream
from treadle.shape import plain_number

SHAPE: Final = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32)
CONFIG: Final = TrainerConfig(depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=2), device="cpu")
ITEMS: Final = StepItems([Modality.TEXT], [b"a text"])

# Ways to hold a number: as Python's own, as a scalar and as an array of no dimensions, of numpy and of torch.
HELD: Final = pytest.mark.parametrize("held", [np.asarray, torch.tensor, lambda value: np.asarray(value)[()]])
GIVEN: Final = pytest.mark.parametrize("given", [list, tuple, deque, iter, lambda entries: dict(enumerate(entries)).values()])


@HELD
def test_numbers_become_pythons_own(held: Callable[[Any], Any]) -> None:
    config = replace(
        CONFIG,
        depth=held(1),
        seed=held(2**62),
        recompute_blocks=held(True),
        schedule=Schedule(steps=held(5), learning_rate=held(0.25)),
    )
    found = (config.depth, config.seed, config.recompute_blocks, config.schedule.steps, config.schedule.learning_rate)
    assert [(type(value), value) for value in found] == [(int, 1), (int, 2**62), (bool, True), (int, 5), (float, 0.25)]
    assert pickle.loads(pickle.dumps(config)) == config
    assert Schedule(steps=5).learning_rate_at(held(2)) == Schedule(steps=5).learning_rate_at(2)
    assert bytes(ITEMS.content(held(0))) == bytes(Packer(SHAPE, seed=held(3)).pack(ITEMS).payload(held(0))) == b"a text"
    assert SHAPE.token_capacity(choices=held(True)) == 30
    for wrong, message in ((held(True), "must be an integer"), (held(2.0), "must be an integer"), (held([2]), "must be an integer")):
        with pytest.raises(ValueError, match=message):
            Packer(SHAPE, window=wrong)


def test_seeds_have_64_bits() -> None:
    for seed in (0, 2**64 - 1, np.uint64(2**64 - 1)):
        assert Packer(SHAPE, seed=seed).seed == replace(CONFIG, seed=seed).seed == int(seed)  # type: ignore[arg-type]  # numpy's


def test_other_values_are_left_alone() -> None:
    for value in (None, "text", [1], 2**80, 0.5, np.zeros(2), Modality.TEXT):
        assert plain_number(value) is value


@pytest.mark.parametrize(
    "held",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: array.array("B", data),
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.repeat(np.frombuffer(data, np.uint8), 2)[::2],
        lambda data: memoryview(bytes(byte for byte in data for _ in range(2)))[::2],
    ],
)
def test_bytes_of_any_kind_are_decoded(held: Callable[[bytes], Any]) -> None:
    assert decode(Modality.TEXT, held(b"a text"), SHAPE).array.tobytes() == b"a text"
    assert StreamState.from_bytes(held(_state().to_bytes())).lanes == 64
    tape = StepItems([Modality.TEXT], (held(b"a text"), [0, 6])) if not isinstance(held(b""), array.array) else ITEMS
    assert bytes(tape.content(0)) == b"a text"


def test_a_mapped_file_is_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a text")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert decode(Modality.TEXT, mapped, SHAPE).array.tobytes() == b"a text"  # type: ignore[arg-type]  # a buffer
        batch = Packer(SHAPE).pack(StepItems([Modality.TEXT], [mapped]))  # type: ignore[list-item]
    assert bytes(batch.payload(0)) == b"a text"


def _state() -> StreamState:
    with ShardStream(__file__, SHAPE) as stream:
        return stream.state


@GIVEN
def test_columns_are_lists_or_give_their_entries(given: Callable[[Iterable[Any]], Any]) -> None:
    items = StepItems(
        given([0, 0]),
        given([b"a", b"bc"]),
        bags=given([1, 1]),
        groups=given([5, 6]),
        ids=given([7, 8]),
        sides=given(["query", "document"]),
        temperature_groups=given([0, 1]),
    )
    columns = [items.modalities, items.bags, items.groups, items.ids, items.sides, items.temperature_groups]
    assert np.stack([column for column in columns if column is not None]).tolist() == [[0, 0], [1, 1], [5, 6], [7, 8], [1, 2], [0, 1]]
    assert items.contents == [b"a", b"bc"]


@GIVEN
def test_states_are_merged(given: Callable[[Iterable[Any]], Any]) -> None:
    assert StreamState.merge(given([_state()])).to_bytes() == StreamState.merge([_state()]).to_bytes()
    with ShardStream(__file__, SHAPE) as stream:
        one = TorchStream(stream).state_dict()
    assert TorchStream.merge(given([one])) == TorchStream.merge([one])


class Batches(Dataset[PackedBatch]):
    """Knows its entries by their number alone."""

    def __getitem__(self, index: int) -> PackedBatch:
        if index > 1:
            raise IndexError
        return Packer(SHAPE).pack(ITEMS)


def test_a_trainer_and_an_encoder_take_what_gives_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with Trainer(CONFIG) as trainer:
        assert trainer.fit(Batches()) is not None  # type: ignore[arg-type]
        assert trainer.steps_done == 2
        trainer.save(path)
    encoder = Encoder.load(path, "cpu")
    expected = encoder.encode("text", [b"ab", b"cd"])
    for given in (iter([b"ab", b"cd"]), {1: b"ab", 2: b"cd"}.values(), np.array([b"ab", b"cd"], object), deque(["ab", "cd"])):
        assert torch.equal(encoder.encode("text", given), expected)
    with pytest.raises(TypeError, match="of the caller"):
        # What goes wrong in the caller's own iterator is not told as something else.
        encoder.encode("text", (_fail() for _ in range(2)))


def _fail() -> bytes:
    raise TypeError("of the caller")
