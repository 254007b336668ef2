"""WebP: the container is walked here for size, orientation and missing bytes, and its picture is decoded by libwebp itself, the copy that
Pillow brings: Pillow decodes every WebP as an animation, which holds the picture four times."""

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.bands import Raster, array_raster
from treadle.decoders.errors import DecodeError
from treadle.decoders.exif import exif_orientation
from treadle.decoders.limits import DecodeOptions, check_pixels

_ABI_VERSION = 0x0209
"""Of the library's decoder interface, whose upper byte must be its own."""


_ANIMATED, _ALPHA = 0x02, 0x10
_KINDS = {b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ICCP", b"EXIF", b"XMP ", b"ANIM", b"ANMF"}


class _Features(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("has_alpha", ctypes.c_int),
        ("has_animation", ctypes.c_int),
        ("form", ctypes.c_int),
        ("spare", ctypes.c_uint32 * 5),
    )


class _Place(NamedTuple):
    """Where the picture, or an animation's first frame, stands in the canvas and, with its alpha, in the file."""

    left: int
    top: int
    width: int
    height: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WebpHeader:
    """What a WebP's container says."""

    height: int
    width: int
    orientation: int
    end: int
    """Where the container ends; what follows is not its own."""
    place: _Place


def read_webp_header(data: memoryview, options: DecodeOptions) -> WebpHeader:
    """Walks the RIFF chunks.

    Raises:
        DecodeError: a chunk is cut, there is no picture, or its size is beyond the options.
    """
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise DecodeError("truncated", f"the WebP has {len(data)} of its {end} bytes")
    size: tuple[int, int] | None = None
    orientation, at = 1, 12
    animated = announced = alpha = False
    place: _Place | None = None
    for _ in range(options.max_chunks):
        if at + 8 > end:
            break
        kind = bytes(data[at : at + 4])
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        body = data[at + 8 : at + 8 + length]
        if at + 8 + length > end:
            raise DecodeError("truncated", f"the WebP's {kind!r} chunk passes its end")
        if size is None:
            if kind not in (b"VP8X", b"VP8 ", b"VP8L"):
                raise DecodeError("corrupt", f"the WebP begins with a {kind!r} chunk")
            size = _canvas(kind, body)
            check_pixels(*size, options)
            animated, alpha = (kind == b"VP8X" and bool(body[0] & flag) for flag in (_ANIMATED, _ALPHA))
        if kind == b"EXIF":
            orientation = exif_orientation(body)
        elif kind == b"ANIM":
            announced = True
        elif place is None and kind in (b"ANMF", b"ALPH", b"VP8 ", b"VP8L"):
            if (kind == b"ANMF") != animated or animated != announced:
                raise DecodeError("corrupt", f"a WebP with {kind!r} that {'is' if animated else 'is not'} an animation")
            place = (
                _frame(data, at + 8, at + 8 + length, alpha)
                if animated
                else _Place(0, 0, size[1], size[0], *_fragment(data, 12, end, alpha))
            )
        at += 8 + length + (length & 1)
    else:
        raise DecodeError("too_large", f"the WebP has more than max_chunks {options.max_chunks} chunks")
    if size is None or place is None:
        raise DecodeError("corrupt", "the WebP has no picture")
    if place.left + place.width > size[1] or place.top + place.height > size[0]:
        raise DecodeError("corrupt", "the WebP's first frame passes its canvas")
    return WebpHeader(*size, orientation, end, place)


def decode_webp(data: memoryview, header: WebpHeader, channels: int, size: tuple[int, int]) -> Raster | None:
    """The picture, or an animation's first frame on its canvas, where the library's copy is found; else None.

    Raises:
        DecodeError: the picture is damaged, or not of the size that the container says.
    """
    library = _library()
    if library is None:
        return None
    whole = np.frombuffer(data[: header.end], np.uint8)
    told = _Features()
    if library.WebPGetFeaturesInternal(whole.ctypes.data, len(whole), ctypes.byref(told), _ABI_VERSION):
        raise DecodeError("corrupt", "libwebp reads no header of the WebP")
    place = header.place
    # Opaque pixels at their size are decoded to where they stay; those that are yet to be scaled need no fourth byte.
    full = size == (header.height, header.width)
    depth = 4 if told.has_alpha or (full and channels == 4) else 3
    make = np.empty if place[:4] == (0, 0, header.width, header.height) else np.zeros
    pixels: NDArray[np.uint8] = make((header.height, header.width, depth), np.uint8)
    part = whole[place.start : place.end]
    seen = [ctypes.c_int(), ctypes.c_int()]
    if not library.WebPGetInfo(part.ctypes.data, len(part), *map(ctypes.byref, seen)) or (seen[0].value, seen[1].value) != place[2:4]:
        raise DecodeError(
            "corrupt", f"a WebP picture of {seen[0].value} x {seen[1].value} pixels where {place.width} x {place.height} are stated"
        )
    within = pixels[place.top : place.top + place.height, place.left : place.left + place.width]
    decode = library.WebPDecodeRGBInto if depth == 3 else library.WebPDecodeRGBAInto
    left_bytes = pixels.nbytes - (within.ctypes.data - pixels.ctypes.data)
    if not decode(part.ctypes.data, len(part), within.ctypes.data, left_bytes, pixels.strides[0]):
        raise DecodeError("corrupt", "libwebp refuses the WebP's pixels")
    if depth == 4 and not told.has_alpha:
        pixels[..., 3] = 255
    return array_raster(pixels, "RGB" if depth == 3 else "RGBA")


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The libwebp that Pillow loaded: a wheel's own, the environment's or the system's; None where it is inside Pillow or another."""
    import PIL
    from PIL import features

    home = Path(PIL.__file__).parent
    folders = ((home.parent, "pillow.libs/libwebp-*"), (home, ".dylibs/libwebp.*"), (Path(sys.prefix), "lib/libwebp.*"))
    paths = [str(path) for folder, pattern in folders for path in sorted(folder.glob(pattern))]
    for path in [*paths, "libwebp.so.7", "libwebp.7.dylib"]:
        try:
            library = ctypes.CDLL(path)
            version = int(library.WebPGetDecoderVersion())
            library.WebPGetFeaturesInternal.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
            library.WebPGetInfo.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
            for decode in (library.WebPDecodeRGBInto, library.WebPDecodeRGBAInto):
                decode.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
                decode.restype = ctypes.c_void_p
        except (OSError, AttributeError):
            continue
        if f"{version >> 16}.{version >> 8 & 255}.{version & 255}" == features.version("webp"):
            return library
    return None


def _frame(data: memoryview, start: int, end: int, alpha: bool) -> _Place:
    """The frame whose ANMF chunk has its body from `start` to `end`."""
    if end - start < 16:
        raise DecodeError("corrupt", f"a WebP frame of {end - start} bytes")
    left, top, width, height = (int.from_bytes(data[start + i : start + i + 3], "little") for i in (0, 3, 6, 9))
    return _Place(2 * left, 2 * top, 1 + width, 1 + height, *_fragment(data, start + 16, end, alpha))


def _fragment(data: memoryview, at: int, end: int, alpha: bool) -> tuple[int, int]:
    """From the first of the chunks behind `at` that make a picture, its alpha or the picture itself, to its last byte.

    Where `alpha` is announced, lacks, and a chunk has no known name, that name is damaged: readers would show the picture opaque.
    """
    start, unknown, veiled = at, b"", False
    while at + 8 <= end:
        kind, length = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        after = at + 8 + length
        if kind in (b"VP8 ", b"VP8L"):
            if after > end:
                break
            if alpha and unknown and not veiled and kind == b"VP8 ":
                raise DecodeError("corrupt", f"a WebP with a chunk {unknown!r} where its alpha should be")
            # The byte that pads it is the library's to read, as from Pillow.
            return start, min(after + (length & 1), end)
        at = after + (length & 1)
        veiled = veiled or kind == b"ALPH"
        if kind not in _KINDS:
            unknown = kind
        if kind != b"ALPH":
            start = at
    raise DecodeError("corrupt", "a WebP picture without pixels")


def _canvas(kind: bytes, body: memoryview) -> tuple[int, int]:
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8 " and len(body) >= 10 and bytes(body[3:6]) == b"\x9d\x01\x2a":
        return int.from_bytes(body[8:10], "little") & 0x3FFF, int.from_bytes(body[6:8], "little") & 0x3FFF
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    raise DecodeError("corrupt", f"the WebP's {kind!r} chunk has no size")
