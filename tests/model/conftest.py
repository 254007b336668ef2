"""Small items and tiny trainers for the tests of the trainer, its checkpoints and the encoder."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from treadle.model.config import Schedule, TrainerConfig
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality

COLOURS = [(220, 30, 30), (30, 200, 60), (40, 60, 220), (230, 220, 40), (200, 50, 210), (40, 210, 210), (240, 240, 240), (20, 20, 20)]
NAMES = ["red", "green", "blue", "yellow", "purple", "cyan", "white", "black"]

SHAPE = BatchShape(
    max_rows_per_device=4,
    max_segments_per_device=32,
    max_columns_per_row=64,
    max_choices_per_item=4,
    image=ImageShape(patch_side=8, channels=3),
    audio=AudioShape(chunk_samples=80, sample_rate=8000),
)


def picture(seed: int, side: int = 16) -> bytes:
    """A PNG of one colour with a little noise."""
    noise = np.random.default_rng(seed).integers(-12, 12, (side, side, 3))
    pixels = np.clip(np.array(COLOURS[seed % 8]) + noise, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def caption(seed: int) -> bytes:
    return f"a {NAMES[seed % 8]} square, number {seed}".encode()


def pairs_edges(count: int) -> Relations:
    """Items 2 i and 2 i + 1 attract each other; in blocks of four, items repel the one two places away, with weights."""
    repelled = [i ^ 2 if i ^ 2 < count else -1 for i in range(count)]
    offsets = np.cumsum([0] + [int(j >= 0) for j in repelled])
    named = [j for j in repelled if j >= 0]
    return Relations(
        attract=Edges(list(range(count + 1)), [i ^ 1 for i in range(count)]),
        repel=Edges(offsets, named, [0.5 + 0.25 * (j % 4) for j in named]),
    )


def caption_pairs(seeds: list[int]) -> StepItems:
    """A caption and a picture for each seed, attracting each other, with global ids."""
    return StepItems(
        [Modality.TEXT, Modality.IMAGE] * len(seeds),
        [content for seed in seeds for content in (caption(seed), picture(seed))],
        bags=[i // 2 for i in range(2 * len(seeds))],
        ids=[1000 * seed + side for seed in seeds for side in (1, 2)],
        groups=[1 + seed % 8 for seed in seeds for _ in range(2)],
        sides=[3, 2] * len(seeds),
        relations=pairs_edges(2 * len(seeds)),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests compute with one thread, whatever ran before: tensors here are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> BatchShape:
    return SHAPE


@pytest.fixture
def tiny() -> Callable[..., TrainerConfig]:
    """A configuration of a tiny tower on the CPU; keywords change its fields."""

    def make(**changes: object) -> TrainerConfig:
        base = TrainerConfig(
            depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=50, learning_rate=2e-3, warmup_steps=3), device="cpu"
        )
        return replace(base, **changes)  # type: ignore[arg-type]  # fields are given by name

    return make


@pytest.fixture
def pairs() -> Callable[[list[int]], StepItems]:
    """Captions and pictures by seeds."""
    return caption_pairs


@pytest.fixture
def packed() -> Callable[[StepItems], PackedBatch]:
    """Packs one step's items."""
    return lambda items: Packer(SHAPE).pack(items)
