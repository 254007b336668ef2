"""A state may come from anywhere: cut, altered bit by bit, with columns of other types, lengths and numbers. It is refused by a `ValueError`,
or it is a position like any other, from which the stream goes on; never any other error, and never without end.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from treadle.pipeline.sources import Source
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream

NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 127, 10**6, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1)


def changed(data: bytes, rng: random.Random) -> bytes:
    """The state with one or two things wrong."""
    kind = rng.choice(("cut", "bits", "number", "number", "type", "length", "name"))
    if kind == "cut":
        return data[: rng.randrange(len(data))]
    if kind == "bits":
        altered = bytearray(data)
        for _ in range(rng.choice((1, 3))):
            altered[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(altered)
    columns: dict[str, Any] = dict(load(data))
    for _ in range(rng.choice((1, 2))):
        name = rng.choice(sorted(set(columns) - {"manifest"}))
        values = columns[name]
        if kind == "number" and values.size:
            altered_values = values.copy()
            altered_values.reshape(-1)[rng.randrange(values.size)] = np.int64(rng.choice(NUMBERS)).astype(values.dtype)
            columns[name] = altered_values
        elif kind == "type":
            columns[name] = values.astype(rng.choice((np.float32, np.int8, np.uint64, np.int64, np.int32, np.bool_)))
        elif kind == "length":
            columns[name] = rng.choice((values[:-1], np.tile(values, 2), values.reshape(-1, 1), np.zeros(0, values.dtype)))
        elif rng.random() < 0.5:
            del columns[name]
        else:
            columns[f"{name}x"] = values
    return bytes(save({name: np.ascontiguousarray(values) for name, values in columns.items()}))


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_an_altered_state_is_refused_or_a_position(tars: Any, tmp_path: Path, blended: bool) -> None:
    first, second = tars.write_mixed(tmp_path / "a", [9, 4, 11]), tars.write_texts(tmp_path / "b", [20, 10])
    sources: str | Sequence[Source] = first
    if blended:
        sources = [Source(first, weight=2.0), Source(second, repeat=True)]

    def make(rank: int = 0, world_size: int = 1) -> ShardStream:
        return ShardStream(
            sources, tars.shape, rank=rank, world_size=world_size, lanes=4, shuffle=12, epochs=2, window=2, threads=1, seed=3
        )

    with make() as stream:
        states = [batch.state.to_bytes() for batch in stream if batch.state is not None]
    rng = random.Random(blended)
    refused = went_on = 0
    for number in range(160):
        data = changed(states[(1, len(states) // 2)[number % 2]], rng)
        # Dealt anew, a state takes another way.
        with make(*((0, 1), (1, 2))[number % 3 == 2]) as stream:
            try:
                stream.load_state(data)
            except ValueError:
                refused += 1
                continue
            for _, batch in zip(range(12), stream, strict=False):
                assert batch.state is not None
                StreamState.from_bytes(batch.state.to_bytes())
            went_on += 1
    assert refused > 60 and went_on > 10
