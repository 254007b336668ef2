"""Colours that libraries leave to us: luma of RGB, and light of inks."""

import numpy as np
from numpy.typing import NDArray

_BAND_PIXELS = 1 << 16


def luma(pixels_HW3: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """ITU-R 601 luma `[H, W, 1]` in 16-bit fixed point, the arithmetic of Pillow's mode L."""
    height, width = pixels_HW3.shape[:2]
    out = np.empty((height, width, 1), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        red, green, blue = (pixels_HW3[top : top + rows, :, c].astype(np.uint32) for c in range(3))
        out[top : top + rows, :, 0] = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16
    return out


def from_inks(inks_HW4: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB `[H, W, 3]` of inks as Adobe stores them, inverted, which every decoder assumes: light is ink times black over 255."""
    black = inks_HW4[..., 3:].astype(np.uint16)
    return ((inks_HW4[..., :3] * black + 127) // 255).astype(np.uint8)
