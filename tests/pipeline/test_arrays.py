"""Bags of arrays: what decoders would give, refused where a row would not take it."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.pipeline import AudioShape, BatchShape, Edges, ImageShape, Modality, Packer, Relations, StepItems, VideoShape, bag_of_arrays

SHAPE = BatchShape(
    max_rows_per_device=2,
    max_segments_per_device=8,
    max_columns_per_row=20,
    max_choices_per_item=2,
    image=ImageShape(patch_side=4, channels=3),
    video=VideoShape(patch_side=4, tube_frames=2),
    audio=AudioShape(chunk_samples=10),
)


def test_arrays_pack_like_the_files_that_hold_them() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    text = b"caption"
    columns: dict[str, Any] = {
        "groups": [5, 5],
        "ids": [9, 10],
        "sides": ["document", "query"],
        "temperature_groups": [1, 0],
        "choices": [None, b"AB"],
        "choice_targets": [None, [0.25, 0.75]],
        "relations": Relations(attract=Edges([0, 1, 2], [1, 0])),
    }
    encoded, arrays = Packer(SHAPE), Packer(SHAPE)
    encoded.add(StepItems(["image", "text"], [out.getvalue(), text], **columns))
    arrays.add_decoded(bag_of_arrays(["image", "text"], [pixels, np.frombuffer(text, np.uint8)], SHAPE, **columns))
    assert encoded.take() == arrays.take()


def test_every_modality_comes_back_as_it_was() -> None:
    rng = np.random.default_rng(1)
    given = [
        rng.integers(0, 256, 19, np.uint8),
        rng.integers(0, 256, (5, 6, 3), np.uint8)[:, ::-1],
        rng.integers(0, 256, (4, 8, 8, 3), np.uint8),
        rng.uniform(-1, 1, 187).astype(np.float32),
    ]
    packer = Packer(replace(SHAPE, max_rows_per_device=4))
    for kind, array in zip(Modality, given, strict=True):
        assert packer.add_decoded(bag_of_arrays([kind], [array], SHAPE))
    batch = packer.take()
    assert batch.grid[:4].tolist() == [[19, 1, 1], [1, 2, 2], [2, 2, 2], [19, 1, 1]]
    assert batch.extent[:4].tolist() == [[1, 1, 19], [1, 5, 6], [4, 8, 8], [1, 1, 187]]
    for segment, array in enumerate(given):
        assert np.array_equal(batch.payload(segment), array)


@pytest.mark.parametrize(
    ("kind", "array", "message"),
    [
        (0, np.zeros(3, np.int64), r"item 0 is text and has int64 \[3\]: it must be uint8 \[bytes\], not empty"),
        (0, np.zeros(0, np.uint8), r"item 0 is text and has uint8 \[0\]"),
        (1, np.zeros((4, 4), np.uint8), r"item 0 is image and has uint8 \[4, 4\]: it must be uint8 \[height, width, channels\]"),
        (1, np.zeros((4, 4, 4), np.uint8), r"item 0 has 4 channels: BatchShape\.image\.channels is 3"),
        (2, np.zeros((3, 4, 4, 3), np.uint8), r"item 0 has 3 frames: they must be a multiple of BatchShape\.video\.tube_frames, 2"),
        (3, np.zeros(5), r"item 0 is audio and has float64 \[5\]: it must be float32 \[samples\]"),
        (3, np.array([0.5, np.nan], np.float32), r"item 0 has samples from nan to nan: they must lie within \[-1, 1\]"),
        (3, np.array([0.5, -3], np.float32), r"item 0 has samples from -3\.0 to 0\.5: they must lie within"),
        (0, [1, 2], r"item 0 is text and has list: it must be uint8 \[bytes\]"),
        (3, np.zeros(191, np.float32), r"item 0 takes 20 tokens \(float32 \[191\]\): a row holds 19; cut it, or use wider rows"),
        (1, np.zeros((20, 16, 3), np.uint8), r"item 0 takes 20 tokens .* a row holds 19"),
    ],
)
def test_what_a_row_cannot_take_is_refused(kind: int, array: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bag_of_arrays([kind], [array], SHAPE)


def test_a_bag_of_another_shape_is_refused() -> None:
    """Its pixels would be read with the other number of channels, past their end."""
    picture = np.zeros((4, 4, 3), np.uint8)
    bag = bag_of_arrays([1], [picture], SHAPE)
    other = Packer(replace(SHAPE, image=replace(SHAPE.image, channels=4)))
    with pytest.raises(ValueError, match="this bag was made for BatchShape"):
        other.add_decoded(bag)
    packer = Packer(SHAPE)
    packer.add_decoded(bag)
    with pytest.raises(ValueError, match="this bag was made for BatchShape"):
        other.load(packer.state(), [bag])
    with pytest.raises(ValueError, match=r"slices or choices of this packer's BatchShape.* differ"):
        Packer(replace(SHAPE, max_choices_per_item=1)).add_decoded(bag)
    # Rows and segments do not matter, nor whether the shape is resolved.
    assert (
        packer.add_decoded(bag_of_arrays([1], [picture], replace(SHAPE, max_rows_per_device=9).resolved())) and packer.take().segments == 2
    )


def test_columns_are_checked_like_a_steps() -> None:
    text = np.zeros(19, np.uint8)
    with pytest.raises(ValueError, match="arrays has 1 entries for 2 modalities"):
        bag_of_arrays([0, 0], [text], SHAPE)
    with pytest.raises(ValueError, match=r"takes 19 tokens .* a row holds 18"):
        bag_of_arrays([0], [text], SHAPE, choices=[b"AB"], choice_targets=[[0.5, 0.5]])
    with pytest.raises(ValueError, match="item 0 is image, which this batch shape leaves out"):
        bag_of_arrays([1], [text], BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=9))
    with pytest.raises(ValueError, match="attract: 3 offsets for 1 items"):
        bag_of_arrays([0], [text], SHAPE, relations=Relations(attract=Edges([0, 1, 2], [1, 0])))
