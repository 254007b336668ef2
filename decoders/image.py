"""Pictures: any stored form to uint8 `[H, W, channels]`, upright, as large as the row allows."""

import io
import re
from typing import TYPE_CHECKING, NamedTuple

from treadle.decoders.bands import fill, picture_raster
from treadle.decoders.errors import DecodeError
from treadle.decoders.exif import exif_orientation, orient, turns_sides
from treadle.decoders.gif import read_gif_size
from treadle.decoders.jpeg import JpegHeader, decode_jpeg, read_jpeg_header
from treadle.decoders.limits import Deadline, DecodeOptions, check_pixels
from treadle.decoders.payload import Payload, Probe
from treadle.decoders.png import PngParts, decode_png, read_png
from treadle.decoders.scale import fit_size, grid_side
from treadle.decoders.sniff import IMAGE_FORMATS, Format, describe, searchable, sniff
from treadle.decoders.webp import WebpHeader, decode_webp, read_webp_header
from treadle.shape import ImageShape

if TYPE_CHECKING:
    from PIL import Image

_EXIF_ITEM = re.compile(rb"(infe[\x02\x03].{3}(?:..|.{4})\0\0)Exif", re.DOTALL)
"""The item of an AVIF that holds an Exif block, in the list of its items."""


class Picture(NamedTuple):
    """A picture as its header describes it."""

    height: int
    width: int
    orientation: int
    source: "JpegHeader | PngParts | WebpHeader | Image.Image"

    @property
    def work_px(self) -> int:
        """Pixels that its decoder passes over, each scan of a progressive JPEG apart."""
        scans = self.source.scans if isinstance(self.source, JpegHeader) else 1
        return self.height * self.width * scans


def read_picture(data: memoryview, options: DecodeOptions) -> Picture:
    """What is in front of, and around, a picture's pixels.

    Raises:
        DecodeError: the bytes are refused.
    """
    return _read_header(data, options, header_only=False)


def decode_picture(
    data: memoryview, stored: Picture, shape: ImageShape, capacity: int, options: DecodeOptions, deadline: Deadline
) -> Payload:
    """Decodes one picture; a grid beyond `capacity` tokens is made to fit by scaling down, aspect kept, antialiased.

    Raises:
        DecodeError: the bytes are refused.
    """
    from PIL import Image

    # In the orientation of the stored rows: the rule is symmetric in the two sides.
    size = fit_size(stored.height, stored.width, shape.patch_side, capacity)
    source = stored.source
    if isinstance(source, JpegHeader):
        raster = decode_jpeg(data, source, shape.channels, size, options, deadline)
    elif isinstance(source, PngParts):
        raster = decode_png(source)
    else:
        webp = decode_webp(data, source, shape.channels, size) if isinstance(source, WebpHeader) else None
        raster = webp or picture_raster(_load(data, stored))
    # What the inverse DCT has reduced holds no more of what Lanczos is there to cut off; the cubic takes half the time.
    kernel = Image.Resampling.BICUBIC if raster.height < stored.height else Image.Resampling.LANCZOS
    pixels = orient(fill(raster, shape.channels, size, kernel), stored.orientation)
    height, width = pixels.shape[:2]
    grid = (1, grid_side(height, shape.patch_side), grid_side(width, shape.patch_side))
    return Payload(pixels, grid, (1, height, width))


def probe_image(data: memoryview, shape: ImageShape, capacity: int, options: DecodeOptions) -> Probe:
    """The grid that `decode_picture` answers, from the header.

    Raises:
        DecodeError: the header is refused.
    """
    stored = _read_header(data, options, header_only=True)
    height, width = fit_size(stored.height, stored.width, shape.patch_side, capacity)
    if turns_sides(stored.orientation):
        height, width = width, height
    grid = (1, grid_side(height, shape.patch_side), grid_side(width, shape.patch_side))
    return Probe(grid, (1, height, width), True)


def _read_header(data: memoryview, options: DecodeOptions, *, header_only: bool) -> Picture:
    kind = sniff(data)
    if kind is None or kind not in IMAGE_FORMATS:
        raise DecodeError("unsupported", f"not a picture that is read: {describe(data)}")
    if kind == "jpeg":
        jpeg = read_jpeg_header(data, options)
        stored = Picture(jpeg.height, jpeg.width, jpeg.orientation, jpeg)
    elif kind == "png":
        if len(data) >= 33 and bytes(data[12:16]) == b"IHDR":
            # Before any checksum is computed over what a bomb's header goes on to claim.
            check_pixels(int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"), options)
        png = read_png(data, options, header_only=header_only)
        stored = Picture(png.height, png.width, png.orientation, png)
    elif kind == "webp":
        webp = read_webp_header(data, options)
        stored = Picture(webp.height, webp.width, webp.orientation, webp)
    else:
        if kind == "gif":
            _check_gif(data, options)
        picture = _open(data, kind)
        # AVIF states turns as properties of its own, which its reader answers as Exif.
        turned = exif_orientation(picture.info.get("exif", b"")) if kind == "avif" else 1
        stored = Picture(picture.height, picture.width, turned, picture)
    check_pixels(stored.height, stored.width, options)
    return stored


def _check_gif(data: memoryview, options: DecodeOptions) -> None:
    """The library checks a GIF's canvas against a limit of its own, and warns; so ours comes first, and theirs holds."""
    from PIL import Image

    height, width = read_gif_size(data, options)
    check_pixels(height, width, options)
    if height * width > (Image.MAX_IMAGE_PIXELS or options.max_pixels):
        raise DecodeError("too_large", f"a GIF of {width} x {height} pixels is above PIL.Image.MAX_IMAGE_PIXELS {Image.MAX_IMAGE_PIXELS}")


def _open(data: memoryview, kind: Format) -> "Image.Image":
    """Opens by the format's own reader: the library's guess would consult every plugin and warn about sizes."""
    from PIL import BmpImagePlugin, GifImagePlugin, Image, WebPImagePlugin

    # Of bytes this makes no copy.
    source = io.BytesIO(searchable(data))
    try:
        if kind == "gif":
            return GifImagePlugin.GifImageFile(source)
        if kind == "bmp":
            return BmpImagePlugin.BmpImageFile(source)
        if kind == "avif":
            # Turns are properties of the file; an Exif block only repeats them, and the library warns of a damaged one.
            return _open_avif(io.BytesIO(_EXIF_ITEM.sub(rb"\1skip", source.getvalue())))
        return WebPImagePlugin.WebPImageFile(source)
    except Image.DecompressionBombError as error:
        raise DecodeError("too_large", f"{kind} header: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError) as error:
        raise DecodeError("corrupt", f"{kind} header: {error}") from error


def _open_avif(source: io.BytesIO) -> "Image.Image":
    try:
        from PIL import AvifImagePlugin
    except ImportError as error:
        raise DecodeError("unsupported", "this Pillow reads no AVIF") from error
    if not AvifImagePlugin.SUPPORTED:
        raise DecodeError("unsupported", "this Pillow reads no AVIF")
    # The library has no argument for it, and would start a thread per processor for each picture.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    return AvifImagePlugin.AvifImageFile(source)


def _load(data: memoryview, stored: Picture) -> "Image.Image":
    source = stored.source
    assert not isinstance(source, JpegHeader | PngParts)
    picture = _open(data[: source.end], "webp") if isinstance(source, WebpHeader) else source
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        raise DecodeError("unsupported", f"pixels of mode {picture.mode}")
    if picture.size != (stored.width, stored.height):
        raise DecodeError("corrupt", f"{picture.width} x {picture.height} pixels where the header says {stored.width} x {stored.height}")
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, RuntimeError) as error:
        raise DecodeError("truncated" if "truncated" in str(error).lower() else "corrupt", f"pixels: {error}") from error
    return picture
