"""JPEG: headers in Python, pixels by libjpeg-turbo with every warning an error, at a reduced size where that suffices."""

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.bands import Raster, array_raster, picture_raster
from treadle.decoders.colour import from_inks
from treadle.decoders.errors import DecodeError
from treadle.decoders.exif import exif_orientation
from treadle.decoders.jpeg_scan import check_scans
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.sniff import searchable

if TYPE_CHECKING:
    from PIL import Image

_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_SUPPORTED = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
_STANDALONE = {0x01, *range(0xD0, 0xD8)}
_END = b"\xff\xd9"
_SCAN = re.compile(rb"\xff\xda")

_MAX_SCANS = 500
"""Scans of one picture; a progressive encoder needs at most about two hundred."""
_SCAN_WORK = 16
"""Pixels times scans may reach this many times `max_pixels`: each scan passes over the whole picture."""

_MIN_FACTOR = 2
"""A reduced decode is at least this many times the wanted size, so that the resampling filter sees what it cuts off."""


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What stands before a JPEG's first scan."""

    height: int
    width: int
    components: int
    orientation: int
    scans: int
    """Times that the decoder passes over the picture; 1 for what is not progressive."""


def read_jpeg_header(data: memoryview, options: DecodeOptions) -> JpegHeader:
    """Walks the markers up to the first scan.

    Raises:
        DecodeError: they end early, contradict each other or describe a JPEG that is not read.
    """
    at, size = 2, len(data)
    frame: tuple[int, int, int, int] | None = None
    orientation = 1
    while True:
        if at + 2 > size:
            raise DecodeError("truncated", "the JPEG ends before its first scan")
        if data[at] != 0xFF:
            raise DecodeError("corrupt", f"no JPEG marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        at += 2
        if marker in _STANDALONE:
            continue
        if marker in (0xD8, 0xD9, 0x00):
            raise DecodeError("corrupt", f"JPEG marker {marker:#x} before the first scan")
        if at + 2 > size:
            raise DecodeError("truncated", "the JPEG ends before its first scan")
        length = data[at] << 8 | data[at + 1]
        if length < 2:
            raise DecodeError("corrupt", f"a JPEG segment of {length} bytes at byte {at}")
        if at + length > size:
            raise DecodeError("truncated", "the JPEG ends before its first scan")
        body = data[at + 2 : at + length]
        at += length
        if marker in _SIZES:
            if frame is not None or len(body) < 6:
                raise DecodeError("corrupt", "the JPEG has no single well-formed frame header")
            frame = (marker, int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"), body[5])
            if marker not in _SUPPORTED or body[0] != 8:
                raise DecodeError("unsupported", f"JPEG process {marker:#x} with {body[0]} bits a sample")
        elif marker == 0xE1 and orientation == 1 and bytes(body[:6]) == b"Exif\0\0":
            orientation = exif_orientation(body)
        elif marker == 0xDA:
            break
    if frame is None:
        raise DecodeError("corrupt", "the JPEG has no frame header before its first scan")
    process, height, width, components = frame
    if height == 0:
        raise DecodeError("unsupported", "a JPEG that states its height after its first scan")
    scans = 1
    if process in _PROGRESSIVE:
        scans = sum(1 for _ in _SCAN.finditer(data))
        if scans > _MAX_SCANS or scans * height * width > _SCAN_WORK * options.max_pixels:
            raise DecodeError("too_large", f"{scans} scans of {width} x {height} pixels")
    return JpegHeader(height, width, components, orientation, max(1, scans))


def decode_jpeg(
    data: memoryview, header: JpegHeader, channels: int, size: tuple[int, int], options: DecodeOptions, deadline: Deadline
) -> Raster:
    """The stored picture, at a size of at least `size` that the inverse DCT makes by itself.

    Raises:
        DecodeError: libjpeg reports anything but a clean decode.
    """
    import simplejpeg

    factor = min(header.height // size[0], header.width // size[1]) // _MIN_FACTOR
    divisor = next(d for d in (8, 4, 2, 1) if d <= max(factor, 1))
    least = (-(-header.height // divisor), -(-header.width // divisor))
    opaque = "RGBA" if size == (header.height, header.width) else "RGB"
    mode = "CMYK" if header.components == 4 else {1: "L", 3: "RGB", 4: opaque}[channels]

    def run(source: bytes | memoryview) -> NDArray[np.uint8]:
        colours = "GRAY" if mode == "L" else mode
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(source, colours, min_height=least[0], min_width=least[1], strict=True)
        return pixels

    try:
        try:
            pixels = run(data)
        except ValueError as error:
            if options.strict or "Premature end" not in str(error):
                raise
            # Only the end marker may be missing: with it in place the decode must be clean.
            pixels = run(bytes(data) + _END)
    except ValueError as error:
        if "subsampling level" in str(error):
            return picture_raster(_decode_odd_sampling(data, options, deadline))
        raise _refusal(str(error)) from error
    return _inks_raster(pixels) if mode == "CMYK" else array_raster(pixels, mode)


def _inks_raster(inks_HW4: NDArray[np.uint8]) -> Raster:
    from PIL import Image

    height, width = inks_HW4.shape[:2]
    return Raster(height, width, lambda top, bottom: Image.fromarray(from_inks(inks_HW4[top:bottom]), "RGB"))


def _refusal(message: str) -> DecodeError:
    if "Premature end" in message:
        return DecodeError("truncated", message)
    return DecodeError("unsupported" if "nsupported" in message else "corrupt", message)


def _decode_odd_sampling(data: memoryview, options: DecodeOptions, deadline: Deadline) -> "Image.Image":
    """Chroma samplings that the fast path has no name for go through Pillow, which says nothing of damage: so that is looked for here."""
    from PIL import JpegImagePlugin

    whole = searchable(data)
    if whole.rfind(_END) < 0:
        if options.strict:
            raise DecodeError("truncated", "the JPEG has no end marker")
        whole = bytes(data) + _END
    check_scans(memoryview(whole), deadline)
    try:
        picture = JpegImagePlugin.JpegImageFile(io.BytesIO(whole))
        picture.load()
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
        raise DecodeError("truncated" if "truncated" in str(error) else "corrupt", f"JPEG: {error}") from error
    return picture
