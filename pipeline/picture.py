"""A packed batch as a picture: what the packer did, at a glance.

Every row is a strip of columns; a segment is a block in its modality's colour, with a border on its left. Images and first frames of clips are drawn inside their segments where they fit.
"""

from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.batch import PackedBatch
from treadle.shape import Modality

COLOURS: dict[Modality, tuple[int, int, int]] = {
    Modality.TEXT: (86, 140, 214),
    Modality.IMAGE: (88, 168, 104),
    Modality.VIDEO: (214, 130, 66),
    Modality.AUDIO: (160, 104, 190),
}
"""Distinct in hue and, for those who do not see hue, in lightness order."""

EMPTY = (238, 238, 238)
BORDER = (32, 32, 32)
BACKGROUND = (255, 255, 255)
INK = (24, 24, 24)

MAX_WIDTH_PX = 2048
MAX_ROWS_DRAWN = 256
MIN_THUMBNAIL_PX = 8
MARGIN_PX = 12
LEGEND_PX = 40


def draw_batch(batch: PackedBatch, path: str | PathLike[str]) -> None:
    """Writes the picture as a PNG; past `MAX_ROWS_DRAWN` rows the rest is left out, and the legend says so."""
    from PIL import Image, ImageDraw

    shape = batch.shape
    rows, columns = min(shape.max_rows_per_device, MAX_ROWS_DRAWN), shape.max_columns_per_row
    width = min(MAX_WIDTH_PX, columns * max(1, 1024 // columns))
    strip = 24 if rows <= 64 else 10
    pitch = strip + 2
    total = (width + 2 * MARGIN_PX, rows * pitch + LEGEND_PX + 2 * MARGIN_PX)
    picture = Image.new("RGB", total, BACKGROUND)
    draw = ImageDraw.Draw(picture)

    def across(column: int) -> int:
        return MARGIN_PX + column * width // columns

    for row in range(rows):
        top = MARGIN_PX + row * pitch
        draw.rectangle((across(0), top, across(columns) - 1, top + strip - 1), fill=EMPTY)
    for segment in range(batch.segments):
        row = int(batch.row[segment])
        if row >= rows:
            continue
        kind = Modality(int(batch.modality[segment]))
        first, last = int(batch.start[segment]), int(batch.start[segment] + batch.length[segment])
        left, right, top = across(first), max(across(first), across(last) - 1), MARGIN_PX + row * pitch
        draw.rectangle((left, top, right, top + strip - 1), fill=COLOURS[kind])
        if kind is Modality.IMAGE or kind is Modality.VIDEO:
            side = strip - 4
            if side >= MIN_THUMBNAIL_PX and right - left >= MIN_THUMBNAIL_PX + 4:
                small = Image.fromarray(_rgb(batch.payload(segment), kind))
                small.thumbnail((right - left - 3, side))
                picture.paste(small, (left + 3, top + 2))
        draw.line((left, top, left, top + strip - 1), fill=BORDER)
    _draw_legend(draw, batch, rows, MARGIN_PX + rows * pitch + 8)
    picture.save(path, format="PNG")


def _rgb(pixels: NDArray[Any], kind: Modality) -> NDArray[np.uint8]:
    """A picture, or a clip's first frame, as RGB; alpha lies over white."""
    frame: NDArray[np.uint8] = pixels[0] if kind is Modality.VIDEO else pixels
    channels = frame.shape[2]
    if channels == 1:
        return np.repeat(frame, 3, axis=2)
    if channels == 3:
        return np.ascontiguousarray(frame)
    alpha = frame[..., 3:].astype(np.uint16)
    blended = (frame[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return blended.astype(np.uint8)


def _draw_legend(draw: Any, batch: PackedBatch, rows: int, top: int) -> None:
    left = MARGIN_PX
    kinds = np.bincount(batch.modality[: batch.segments], minlength=len(Modality)).tolist()
    for kind, count in zip(Modality, kinds, strict=True):
        draw.rectangle((left, top, left + 11, top + 11), fill=COLOURS[kind], outline=BORDER)
        text = f"{count} {kind}"
        draw.text((left + 16, top), text, fill=INK)
        left += 28 + int(draw.textlength(text))
    hidden = batch.shape.max_rows_per_device - rows
    shares = ", ".join(f"{name} {100 * share:.1f}%" for name, share in batch.fill.items())
    draw.text((MARGIN_PX, top + 16), shares + (f"; {hidden} more rows" if hidden else ""), fill=INK)
