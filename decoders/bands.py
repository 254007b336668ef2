"""A decoded picture to its payload, band by band, so that no second picture ever stands beside it: converted, composited, scaled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_BAND_PIXELS = 1 << 18
_STRIP_PIXELS = 1 << 19
_STRIP_MARGINS = 12
"""Rows of a strip that is scaled, in units of those that it shares with its neighbours: they are passed over twice."""


@dataclass(frozen=True, slots=True)
class Raster:
    """A picture's pixels as its decoder left them."""

    height: int
    width: int
    rows: "Callable[[int, int], Image.Image]"
    """The rows from one to another as a picture of any 8-bit mode."""
    payload: NDArray[np.uint8] | None = None
    """The pixels `[H, W, channels]` where they lie as a payload does."""


def picture_raster(picture: "Image.Image", convert: "Callable[[Image.Image, int], Image.Image] | None" = None) -> Raster:
    """A library's picture; `convert` answers a band of an 8-bit mode for one as it is, and the number of its first row."""
    width, height = picture.size

    def rows(top: int, bottom: int) -> "Image.Image":
        band = picture if (top, bottom) == (0, height) else picture.crop((0, top, width, bottom))
        return convert(band, top) if convert else band

    return Raster(height, width, rows)


def array_raster(pixels_HWC: NDArray[np.uint8], mode: str) -> Raster:
    """Pixels as one of the library's modes L, RGB or RGBA."""
    from PIL import Image

    height, width = pixels_HWC.shape[:2]

    def rows(top: int, bottom: int) -> "Image.Image":
        # Of four bytes or one a pixel this is no copy of them.
        return Image.frombuffer(mode, (width, bottom - top), pixels_HWC[top:bottom], "raw", mode, 0, 1)

    return Raster(height, width, rows, pixels_HWC)


def fill(raster: Raster, channels: int, size: tuple[int, int], kernel: "Image.Resampling") -> NDArray[np.uint8]:
    """Answers the picture `[H, W, channels]` at `size`, which is at most its own.

    Alpha is resolved before anything is scaled, and what keeps its alpha is scaled with colours multiplied by it: hidden
    colours never bleed.
    """
    if raster.payload is not None and raster.payload.shape == (*size, channels):
        return raster.payload
    height, width = size
    out: NDArray[np.uint8] = np.empty((height, width, channels), np.uint8)
    if size == (raster.height, raster.width):
        count = max(1, _BAND_PIXELS // width)
        for top in range(0, height, count):
            bottom = min(top + count, height)
            out[top:bottom] = _pixels(_plain(raster.rows(top, bottom), channels), channels)
        return out
    # The kernels reach over at most three of the answer's rows, and the library's coarse steps over a third of one more.
    margin = math.ceil(4 * raster.height / height) + 1
    count = max(1, max(_STRIP_PIXELS // raster.width, _STRIP_MARGINS * margin) * height // raster.height)
    for top in range(0, height, count):
        bottom = min(top + count, height)
        begin, end = top * raster.height / height, bottom * raster.height / height
        first, last = max(0, math.floor(begin) - margin), min(raster.height, math.ceil(end) + margin)
        strip = _plain(raster.rows(first, last), channels)
        strip = strip.resize((width, bottom - top), kernel, (0, begin - first, raster.width, end - first), reducing_gap=3.0)
        out[top:bottom] = _pixels(strip, channels)
    return out


def _plain(band: "Image.Image", channels: int) -> "Image.Image":
    """The band in mode L, RGB or RGBA, without alpha where there is no channel for it."""
    from PIL import Image

    if band.mode in ("P", "LA", "PA", "La", "RGBa") or "transparency" in band.info:
        band = band.convert("RGBA")
    if band.mode == "RGBA" and channels != 4:
        paper = Image.new("RGB", band.size, (255, 255, 255))
        paper.paste(band, mask=band.getchannel("A"))
        return paper
    if band.mode == "1":
        return band.convert("L")
    return band if band.mode in ("L", "RGB", "RGBA") else band.convert("RGB")


def _pixels(band: "Image.Image", channels: int) -> NDArray[np.uint8]:
    if band.mode != _MODES[channels]:
        band = band.convert(_MODES[channels])
    return np.asarray(band).reshape(band.height, band.width, channels)
