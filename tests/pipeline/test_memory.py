"""Batches that no host holds are refused by field and bytes, before anything is allocated."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.layout import Capacities, batch_layout
from treadle.pipeline.memory import check_memory, host_bytes
from treadle.pipeline.packer import Packer
from treadle.pipeline.stream import ShardStream
from treadle.shape import BatchShape

SMALL: dict[str, Any] = {"max_rows_per_device": 2, "max_segments_per_device": 8, "max_columns_per_row": 32}


@pytest.mark.parametrize(
    ("sizes", "max_edges", "field", "part_bytes"),
    [
        # An edge takes an id of 4 bytes and a weight of 4, in three sets.
        ({}, 2**31 - 1, "max_edges, 2147483647", 24 * (2**31 - 1)),
        # A position takes the number of its segment, 4 bytes, and a byte of the tape, which begins each of 8 payloads and its end at a multiple of 16.
        (
            {"max_rows_per_device": 2**10, "max_columns_per_row": 2**20},
            0,
            "max_rows_per_device x max_columns_per_row, 1024 x 1048576",
            5 * 2**30 + 16 * 9,
        ),
        # A choice is a byte and its target 4.
        (
            {"max_segments_per_device": 2**24, "max_choices_per_item": 256},
            0,
            "max_choices_per_item, 256",
            5 * 2**24 * 256,
        ),
    ],
)
@pytest.mark.parametrize("make", [Packer, PackedBatch])
def test_a_batch_that_the_host_cannot_hold_is_refused(
    sizes: dict[str, Any],
    max_edges: int,
    field: str,
    part_bytes: int,
    make: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treadle.pipeline.memory.host_bytes", lambda: 2**32)
    monkeypatch.setattr(np, "zeros", lambda *_: pytest.fail("something was allocated"))
    shape = BatchShape(**{**SMALL, **sizes})
    capacities = Capacities.of(shape.resolved(), max_edges)
    total = batch_layout(shape.resolved(), capacities.edges).total_bytes
    with pytest.raises(ValueError, match=rf"a batch takes [\d.]+ GiB \({total:,} bytes\), the host has 4.0 GiB") as caught:
        make(shape, max_edges=max_edges)
    assert f"most of it, {part_bytes / 2**30:,.1f} GiB, is for " in str(caught.value)
    assert field in str(caught.value)


def test_what_just_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BatchShape(**SMALL).resolved()
    capacities = Capacities.of(shape, 2**22)
    total = batch_layout(shape, 2**22).total_bytes
    monkeypatch.setattr("treadle.pipeline.memory.host_bytes", lambda: total)
    check_memory(shape, capacities, batch_layout(shape, 2**22))
    monkeypatch.setattr("treadle.pipeline.memory.host_bytes", lambda: total - 1)
    with pytest.raises(ValueError, match="is for max_edges, 4194304; lower it"):
        check_memory(shape, capacities, batch_layout(shape, 2**22))


def test_a_stream_refuses_it_where_it_is_made(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.memory.host_bytes", lambda: 2**32)
    with pytest.raises(ValueError, match="is for max_edges, 1000000000; lower it"):
        ShardStream(f"{tmp_path}/no.tar", BatchShape(**SMALL), max_edges=10**9)


def test_memory_that_others_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", full)
    with pytest.raises(ValueError, match=r"a batch of this BatchShape and max_edges takes [\d,]+ bytes, more than there are left"):
        PackedBatch(BatchShape(**SMALL))


def test_this_host_has_some_memory() -> None:
    assert 2**28 < host_bytes() < 2**60
