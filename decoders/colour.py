"""Colours that libraries leave to us: luma of RGB, and light of inks."""

import numpy as np
from numpy.typing import NDArray


def luma(pixels_HW3: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """ITU-R 601 luma `[..., 1]` in 16-bit fixed point, the arithmetic of Pillow's mode L."""
    red, green, blue = (pixels_HW3[..., c].astype(np.uint32) for c in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)[..., None]


def from_cmyk(inks_HW4: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """`[H, W, channels]` of inks as Adobe stores them, inverted, which every decoder assumes: light is ink times black over 255."""
    black = inks_HW4[..., 3:].astype(np.uint16)
    light = ((inks_HW4[..., :3] * black + 127) // 255).astype(np.uint8)
    if channels == 1:
        return luma(light)
    if channels == 4:
        return np.concatenate([light, np.full_like(light[..., :1], 255)], axis=-1)
    return light
