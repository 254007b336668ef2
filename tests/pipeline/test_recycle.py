"""Recycled buffers: no view ever sees another batch's content, and a batch in used memory is like one in fresh memory."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from treadle.pipeline import AudioShape, BatchShape, Edges, ImageShape, Modality, PackedBatch, Packer, Relations, StepItems
from treadle.pipeline.recycle import KEPT_BUFFERS, Recycler

SHAPE = BatchShape(
    max_rows_per_device=3,
    max_segments_per_device=12,
    max_columns_per_row=40,
    max_choices_per_item=3,
    image=ImageShape(patch_side=4, channels=3),
    audio=AudioShape(chunk_samples=8),
)


def png(rng: random.Random) -> bytes:
    import io

    from PIL import Image

    width, height = rng.randint(1, 20), rng.randint(1, 20)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height)).save(out, "png")
    return out.getvalue()


def random_step(rng: random.Random) -> StepItems:
    count = rng.randint(0, 9)
    kinds = [rng.choice([Modality.TEXT, Modality.IMAGE]) for _ in range(count)]
    offsets, ids = [0], []
    for item in range(count):
        ids += sorted(rng.sample([other for other in range(count) if other != item], rng.randint(0, min(3, count - 1))))
        offsets.append(len(ids))
    edges = Edges(offsets, ids, [rng.random() for _ in ids])
    legal = [b"ABC"[: rng.randint(1, 3)] if kind is Modality.TEXT and rng.random() < 0.3 else None for kind in kinds]
    return StepItems(
        kinds,
        [png(rng) if kind is Modality.IMAGE else rng.randbytes(rng.randint(1, 30)) for kind in kinds],
        temperature_groups=[rng.randint(0, 3) for _ in kinds],
        sides=[rng.randint(0, 3) for _ in kinds],
        groups=[rng.randint(-9, 9) for _ in kinds],
        ids=[rng.randint(0, 2**64 - 1) for _ in kinds] if rng.random() < 0.5 else None,
        choices=legal,
        choice_targets=[None if entry is None else [1 / len(entry)] * len(entry) for entry in legal],
        relations=Relations(*(edges if rng.random() < 0.5 else Edges() for _ in range(3))),
    )


def test_used_memory_makes_the_same_batches_as_fresh_memory() -> None:
    rng = random.Random(0)
    packer = Packer(SHAPE)
    recycled = 0
    for _ in range(150):
        items = random_step(rng)
        before = packer._recycler.unused
        batch = packer.pack(items)
        recycled += packer._recycler.unused < before
        # Every byte, those past the counts too.
        assert np.array_equal(batch.buffer, Packer(SHAPE).pack(items).buffer)
        del batch
    assert recycled > 140


VIEWS: list[tuple[str, Callable[[PackedBatch], Any]]] = [
    ("buffer", lambda batch: batch.buffer),
    ("payload", lambda batch: batch.payload(0)),
    ("part of a column", lambda batch: batch.length[1:2]),
    ("edges", lambda batch: batch.attract),
    ("memoryview", lambda batch: batch.tape.data),
    ("tensor", lambda batch: torch.from_numpy(batch.tape)),
    ("part of a tensor", lambda batch: torch.from_numpy(batch.buffer)[5:].view(torch.uint8)[3:]),
]


@pytest.mark.parametrize(("name", "view"), VIEWS, ids=[name for name, _ in VIEWS])
def test_memory_in_sight_is_not_handed_out_again(name: str, view: Callable[[PackedBatch], Any]) -> None:
    packer = Packer(SHAPE)
    batch = packer.pack(StepItems([0, 0], [b"first", b"second"], relations=Relations(attract=Edges([0, 1, 1], [1]))))
    held = view(batch)
    del batch
    assert packer._recycler.unused == 0
    other = packer.pack(StepItems([0], [b"third"]))
    assert packer._recycler.unused == 0 and other.segments == 1
    del held
    assert packer._recycler.unused == 1


def test_a_few_buffers_are_kept_and_go_with_the_packer() -> None:
    packer = Packer(SHAPE)
    batches = [packer.pack(StepItems([0], [b"text"])) for _ in range(KEPT_BUFFERS + 2)]
    batches.clear()
    assert packer._recycler.unused == KEPT_BUFFERS
    batch = packer.pack(StepItems([0], [b"kept"]))
    del packer
    assert batch.payload(0).tobytes() == b"kept"


def test_buffers_start_on_a_cache_line() -> None:
    recycler = Recycler(PackedBatch(SHAPE).layout)
    for _ in range(3):
        buffer, _ = recycler.take()
        assert buffer.ctypes.data % 64 == 0 and buffer.flags.writeable
        del buffer
