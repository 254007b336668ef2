"""The picture of a batch: colours, thumbnails, and what is left out."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import Payload
from treadle.pipeline import BatchShape, ImageShape, Modality, PackedBatch, Packer, StepItems, VideoShape
from treadle.pipeline.picture import COLOURS, EMPTY, MARGIN_PX, MAX_ROWS_DRAWN


def pixels_of(batch: PackedBatch, path: Path) -> np.ndarray:
    batch.draw(path)
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def png(colour: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (32, 32), colour).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pictures_are_shown_inside_their_segments(channels: int, tmp_path: Path) -> None:
    shape = BatchShape(
        max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=128, image=ImageShape(patch_side=4, channels=channels)
    )
    batch = Packer(shape).pack(StepItems([1, 0], [png((200, 200, 200, 255)), b"x" * 40]))
    pixels = pixels_of(batch, tmp_path / "a.png")
    # 128 columns of 8 pixels. The picture takes 65 positions of row 0, its thumbnail the 20 pixels after the border.
    assert tuple(pixels[MARGIN_PX + 12, MARGIN_PX + 10]) == (200, 200, 200)
    assert tuple(pixels[MARGIN_PX + 12, MARGIN_PX + 300]) == COLOURS[Modality.IMAGE]
    assert tuple(pixels[MARGIN_PX + 12, MARGIN_PX + 8 * (65 + 20)]) == COLOURS[Modality.TEXT]
    assert tuple(pixels[MARGIN_PX + 12, MARGIN_PX + 8 * 120]) == EMPTY
    assert tuple(pixels[MARGIN_PX + 26 + 12, MARGIN_PX + 10]) == EMPTY


def test_transparent_pixels_lie_over_white(tmp_path: Path) -> None:
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=128, image=ImageShape(patch_side=4))
    batch = Packer(shape).pack(StepItems([1], [png((10, 20, 30, 0))]))
    assert tuple(pixels_of(batch, tmp_path / "a.png")[MARGIN_PX + 12, MARGIN_PX + 10]) == (255, 255, 255)


def test_clips_show_their_first_frame(tmp_path: Path) -> None:
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=128, video=VideoShape(patch_side=4))
    packer = Packer(shape)
    frames = np.stack([np.full((32, 32, 3), 90, np.uint8), np.full((32, 32, 3), 250, np.uint8)])
    packer.add(StepItems([0], [b"a"]))
    bag = packer.pending[0][1]
    bag.modalities, bag.payloads, bag.lengths = [2], [Payload(frames, (1, 8, 8), (2, 32, 32))], [65]
    packer = Packer(shape)
    packer.add_decoded(bag)
    assert tuple(pixels_of(packer.take(), tmp_path / "a.png")[MARGIN_PX + 12, MARGIN_PX + 10]) == (90, 90, 90)


def test_very_many_and_very_long_rows_are_drawn_small(tmp_path: Path) -> None:
    batch = Packer(BatchShape(max_rows_per_device=400, max_segments_per_device=800, max_columns_per_row=5000)).pack(
        StepItems([0] * 800, [b"x" * 3000] * 800)
    )
    pixels = pixels_of(batch, tmp_path / "a.png")
    assert pixels.shape[1] == 2048 + 2 * MARGIN_PX
    assert 12 * MAX_ROWS_DRAWN < pixels.shape[0] < 12 * MAX_ROWS_DRAWN + 100
