"""The orientation that an Exif block states, read without trusting a single offset in it."""

import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_ORIENTATION_TAG = 0x0112
_MAX_ENTRIES = 512

_TURNS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


def exif_orientation(block: bytes | memoryview) -> int:
    """The orientation, 1 to 8, of a TIFF-structured Exif block; 1 where there is none, or none that makes sense."""
    data = bytes(block[: 1 << 16])
    if data[:6] == b"Exif\0\0":
        data = data[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None or len(data) < 8:
        return 1
    (directory,) = struct.unpack_from(order + "I", data, 4)
    if directory + 2 > len(data):
        return 1
    (count,) = struct.unpack_from(order + "H", data, directory)
    for entry in range(min(count, _MAX_ENTRIES)):
        at = directory + 2 + 12 * entry
        if at + 12 > len(data):
            break
        tag, kind, values = struct.unpack_from(order + "HHI", data, at)
        if tag != _ORIENTATION_TAG:
            continue
        if values != 1 or kind not in (3, 4):
            return 1
        (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, at + 8)
        return value if 1 <= value <= 8 else 1
    return 1


def turns_sides(orientation: int) -> bool:
    """Whether the orientation swaps height and width."""
    return orientation >= 5


def orient(pixels_HWC: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The picture as it is meant to be seen, C-contiguous."""
    turn = _TURNS.get(orientation)
    return np.ascontiguousarray(turn(pixels_HWC) if turn else pixels_HWC)
