"""The safetensors container of packed batches: what any reader of the format reads, and nothing that lies."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from treadle.pipeline.tensor_file import PackedError, read_tensors, tensor_parts


def container(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_the_published_library_reads_what_is_written_and_the_other_way_round() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float32),
        "b": np.array([7], np.uint64),
    }
    written = b"".join(tensor_parts(arrays, {"format": "x"}))
    for read in (load(written), read_tensors(written)[0], read_tensors(save(arrays, {"format": "x"}))[0]):
        assert set(read) == set(arrays)
        for name, array in arrays.items():
            assert read[name].dtype == array.dtype
            assert np.array_equal(read[name], array)
    assert read_tensors(written)[1] == {"format": "x"}


ENTRY = '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (b"1234567", "truncated", "ends after 7 bytes"),
        (b"\xff" * 8, "corrupt", "the header claims"),
        (container(b"[1, 2]"), "corrupt", "no JSON table"),
        (container(f'{{"a": {ENTRY}, "a": {ENTRY}}}'.encode(), b"x"), "corrupt", "names something twice"),
        (container({"a": {"dtype": "U8", "shape": [0, 2**50, 2**50], "data_offsets": [0, 0]}}), "corrupt", "larger than any file"),
        (container({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}}), "corrupt", "no list of"),
        (container({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}), "corrupt", "is not one of"),
        (
            container({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"x"),
            "truncated",
            r"a ends at byte \d+, the file at \d+",
        ),
        (container({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xy"), "corrupt", "follow the last tensor"),
    ],
)
def test_refusals(data: bytes, kind: str, detail: str) -> None:
    with pytest.raises(PackedError, match=detail) as caught:
        read_tensors(data)
    assert caught.value.kind == kind


def test_places_are_counted_from_the_start_of_the_file() -> None:
    whole = b"".join(tensor_parts({"a": np.arange(3, dtype=np.int64), "b": np.zeros(5, np.uint8)}, {}))
    # 24 bytes of `a` and 5 of `b` end the file; one byte of `b` is missing.
    with pytest.raises(PackedError, match=f"b ends at byte {len(whole)}, the file at {len(whole) - 1}$"):
        read_tensors(whole[:-1])
    gap = container({"a": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]}}, b"xyz")
    with pytest.raises(PackedError, match=f"a starts at byte {len(gap) - 1} of the file, not at {len(gap) - 3}$"):
        read_tensors(gap)
