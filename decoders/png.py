"""PNG: the chunks are walked and checked here; what the library sees holds only what makes the picture."""

import functools
import itertools
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.bands import Raster, picture_raster
from treadle.decoders.errors import DecodeError
from treadle.decoders.exif import exif_orientation
from treadle.decoders.limits import DecodeOptions

if TYPE_CHECKING:
    from PIL import Image

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_CHANNELS = {_GREY: 1, _RGB: 3, _PALETTE: 1, _GREY_ALPHA: 2, _RGBA: 4}
_DEPTHS = {_GREY: (1, 2, 4, 8, 16), _RGB: (8, 16), _PALETTE: (1, 2, 4, 8), _GREY_ALPHA: (8, 16), _RGBA: (8, 16)}
_KNOWN = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
_BLOCK_BYTES = 1 << 20
_FEED_BYTES = 1 << 16
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class PngParts:
    """The chunks of a PNG that make its default image."""

    height: int
    width: int
    depth: int
    colour: int
    interlaced: bool
    orientation: int = 1
    palette: memoryview = _NOTHING
    transparency: bytes = b""
    header: memoryview = _NOTHING
    """The IHDR chunk as stored."""
    packed: list[memoryview] = field(default_factory=list[memoryview])
    """Bodies of the IDAT chunks."""


def read_png(data: memoryview, options: DecodeOptions, *, header_only: bool = False) -> PngParts:
    """Walks the chunks; a chunk that pixels depend on must be whole and its checksum right, others are passed over.

    With `header_only` the walk stops at the first IDAT where the orientation is known, and goes on over lengths alone
    where it is not.

    Raises:
        DecodeError: a critical chunk is damaged, unknown, misplaced or cut.
    """
    parts: PngParts | None = None
    at, size = len(_SIGNATURE), len(data)
    for _ in range(options.max_chunks):
        if at == size and parts is not None and parts.packed:
            return parts  # Only the end marker is missing: every pixel may still be there.
        if at + 12 > size:
            # Fewer bytes than a chunk's frame after the pixels are as harmless as other bytes after the end.
            if parts is not None and parts.packed and b"IEND".startswith(bytes(data[at + 4 : at + 8])):
                return parts
            raise DecodeError("truncated", "the PNG ends inside a chunk")
        length = int.from_bytes(data[at : at + 4], "big")
        kind = bytes(data[at + 4 : at + 8])
        end = at + 12 + length
        body = data[at + 8 : end - 4]
        if end > size or length >= 2**31:
            raise DecodeError("truncated", f"the PNG ends inside its {kind!r} chunk")
        critical = kind[0] & 0x20 == 0
        wanted = kind in (b"tRNS", b"eXIf")
        if (critical or wanted) and not (header_only and kind == b"IDAT"):
            right = zlib.crc32(data[at + 4 : end - 4]) == int.from_bytes(data[end - 4 : end], "big")
            if not right and (critical or kind == b"tRNS"):
                raise DecodeError("corrupt", f"the checksum of the PNG's {kind!r} chunk at byte {at} is wrong")
            wanted = wanted and right
        if parts is None:
            if kind != b"IHDR":
                raise DecodeError("corrupt", f"the PNG begins with {kind!r}, not IHDR")
            parts = _read_ihdr(body)
            parts.header = data[at:end]
        elif kind == b"IDAT":
            parts.packed.append(body)
            if header_only and parts.orientation != 1:
                return parts
        elif kind == b"IHDR" or (kind == b"PLTE" and (parts.packed or len(parts.palette))):
            raise DecodeError("corrupt", f"the PNG's {kind!r} chunk at byte {at} is out of its place")
        elif kind == b"PLTE":
            if length % 3 or not 3 <= length <= 768:
                raise DecodeError("corrupt", f"a PNG palette of {length} bytes")
            parts.palette = body
        elif kind == b"tRNS" and wanted:
            parts.transparency = bytes(body[:256])
        elif kind == b"eXIf" and wanted:
            parts.orientation = exif_orientation(body)
        elif kind == b"IEND":
            break
        elif critical and kind not in _KNOWN:
            raise DecodeError("corrupt", f"the PNG has an unknown critical chunk {kind!r} at byte {at}")
        at = end
    else:
        raise DecodeError("too_large", f"the PNG has more than max_chunks {options.max_chunks} chunks")
    if not parts.packed:
        raise DecodeError("corrupt", "the PNG has no pixels")
    return parts


def decode_png(parts: PngParts) -> Raster:
    """The default image in bands of mode 1, L, RGB, LA or RGBA.

    Raises:
        DecodeError: the pixels are damaged or some are missing.
    """
    convert: Callable[[Image.Image, int], Image.Image] | None = None
    if parts.colour == _PALETTE:
        convert = functools.partial(_coloured, _palette(parts))
    elif parts.transparency and parts.colour in (_GREY, _RGB):
        convert = _keyed(parts)
    elif parts.depth == 16 and parts.colour == _GREY:
        convert = _upper_bytes
    return picture_raster(_load(parts), convert)


def _read_ihdr(body: memoryview) -> PngParts:
    if len(body) != 13:
        raise DecodeError("corrupt", f"a PNG header of {len(body)} bytes")
    width, height = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
    depth, colour, compression, filters, interlace = body[8:]
    if depth not in _DEPTHS.get(colour, ()) or compression or filters or interlace > 1:
        raise DecodeError("corrupt", f"a PNG header of depth {depth}, colour type {colour}, methods {compression}, {filters}, {interlace}")
    return PngParts(height, width, depth, colour, interlace == 1)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


class _Pieces:
    """Pieces of memory as the file that they make, none of them copied as a whole."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._starts = [0, *itertools.accumulate(map(len, pieces))]
        self._at = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        parts: list[bytes | memoryview] = []
        index = bisect_right(self._starts, self._at) - 1
        while size > 0 and index < len(self._pieces):
            inside = self._at - self._starts[index]
            parts.append(self._pieces[index][inside : inside + size])
            self._at += len(parts[-1])
            size -= len(parts[-1])
            index += 1
        return b"".join(parts)

    def seek(self, offset: int) -> None:
        """Moves to a byte."""
        self._at = offset

    def tell(self) -> int:
        """The current byte."""
        return self._at


def _file(parts: PngParts) -> _Pieces:
    """Header and pixels alone, these in chunks that are neither tiny nor huge: the library takes steps in Python over each, and whole in
    memory the one that its pixels end in. It reads no checksum of theirs, and those of the file have been verified."""
    pieces: list[bytes | memoryview] = [_SIGNATURE, parts.header]
    if parts.colour == _PALETTE:
        pieces.append(_chunk(b"PLTE", bytes(768)))
    begin, size = len(pieces), 0
    for body in itertools.chain.from_iterable(_cut(body, _BLOCK_BYTES) for body in parts.packed):
        if size + len(body) > _BLOCK_BYTES:
            pieces.insert(begin, size.to_bytes(4, "big") + b"IDAT")
            pieces.append(bytes(4))
            begin, size = len(pieces), 0
        pieces.append(body)
        size += len(body)
    pieces.insert(begin, size.to_bytes(4, "big") + b"IDAT")
    return _Pieces([*pieces, bytes(4), _chunk(b"IEND", b"")])


def _cut(body: memoryview, size: int) -> Iterator[memoryview]:
    return (body[at : at + size] for at in range(0, max(1, len(body)), size))


def _load(parts: PngParts, *, low_bytes: bool = False) -> "Image.Image":
    """The library's decode of header and pixels alone; transparency and palette are applied by the caller."""
    from PIL import Image, PngImagePlugin

    source: Any = _file(parts)
    picture = PngImagePlugin.PngImageFile(source)
    # The library says nothing of rows that the stream lacks, and leaves them as they were: those that still are so are looked into.
    before = 0xA5 if picture.mode not in ("1", "I;16") else 0
    picture.im = Image.new(picture.mode, picture.size, (before,) * len(picture.getbands()) if before else 0).im
    if low_bytes:
        # Reading big-endian samples as little-endian ones keeps the byte that an 8-bit picture drops.
        picture.tile = [tile._replace(args="RGB;16L") for tile in picture.tile]
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DecodeError("truncated" if "truncated" in str(error) else "corrupt", f"PNG pixels: {error}") from error
    last_row = picture.crop((0, parts.height - 1, parts.width, parts.height)).tobytes()
    if parts.interlaced or last_row.count(before) == len(last_row):
        _check_length(parts)
    return picture


def _check_length(parts: PngParts) -> None:
    bits = parts.depth * _CHANNELS[parts.colour]
    passes = _ADAM7 if parts.interlaced else ((0, 0, 1, 1),)
    wanted = 0
    for top, left, down, across in passes:
        rows, columns = -(-(parts.height - top) // down), -(-(parts.width - left) // across)
        if rows > 0 and columns > 0:
            wanted += rows * (1 + -(-columns * bits // 8))
    unpacker = zlib.decompressobj()
    found = 0
    for body in itertools.chain.from_iterable(_cut(body, _FEED_BYTES) for body in parts.packed):
        left_over: bytes | memoryview = body
        while left_over and not unpacker.eof and found < wanted:
            try:
                found += len(unpacker.decompress(left_over, _BLOCK_BYTES))
            except zlib.error as error:
                raise DecodeError("corrupt", f"PNG pixels: {error}") from error
            left_over = unpacker.unconsumed_tail
    if found < wanted:
        raise DecodeError("truncated", f"the PNG holds {found} of its {wanted} bytes of pixels")


def _palette(parts: PngParts) -> NDArray[np.uint32]:
    """256 colours as RGBA words; an index beyond the palette shows opaque black."""
    if not len(parts.palette):
        raise DecodeError("corrupt", "the PNG's colours are indices, and it has no palette")
    colours = np.zeros((256, 4), np.uint8)
    colours[:, 3] = 255
    table = np.frombuffer(parts.palette, np.uint8).reshape(-1, 3)
    colours[: len(table), :3] = table
    alpha = np.frombuffer(parts.transparency, np.uint8)
    colours[: len(alpha), 3] = alpha
    return colours.view(np.uint32)[:, 0]


def _coloured(table: NDArray[np.uint32], band: "Image.Image", top: int) -> "Image.Image":
    from PIL import Image

    indices = np.asarray(band)
    return Image.fromarray(np.take(table, indices, axis=0).view(np.uint8).reshape(*indices.shape, 4), "RGBA")


def _upper_bytes(band: "Image.Image", top: int) -> "Image.Image":
    from PIL import Image

    return Image.fromarray((np.asarray(band) >> 8).astype(np.uint8), "L")


def _keyed(parts: PngParts) -> "Callable[[Image.Image, int], Image.Image]":
    """Applies the one transparent colour of a grey or RGB PNG, compared at its full depth."""
    from PIL import Image

    channels = _CHANNELS[parts.colour]
    if len(parts.transparency) < 2 * channels:
        raise DecodeError("corrupt", f"a PNG transparency chunk of {len(parts.transparency)} bytes")
    limit = (1 << parts.depth) - 1
    key = np.frombuffer(parts.transparency[: 2 * channels], ">u2").astype(np.int64) & limit
    if parts.depth < 8:
        key = key * (255 // limit)
    low: NDArray[np.uint8] | None = None
    if parts.depth == 16 and parts.colour == _RGB:
        # One bit a pixel is what stays of the picture's lower bytes while its upper ones are read.
        lower, low = _load(parts, low_bytes=True), np.empty((parts.height, -(-parts.width // 8)), np.uint8)
        for row in range(parts.height):
            alike = np.asarray(lower.crop((0, row, parts.width, row + 1))) == key & 255
            low[row] = np.packbits(alike.all(axis=-1))
        key = key >> 8

    def convert(band: "Image.Image", top: int) -> "Image.Image":
        samples = np.asarray(band.convert("L") if band.mode == "1" else band).reshape(band.height, band.width, channels)
        hidden = (samples == key).all(axis=-1, keepdims=True)
        if low is not None:
            bits = np.unpackbits(low[top : top + band.height], axis=1, count=parts.width)
            hidden &= bits.view(bool)[..., None]
        colours = (samples >> 8).astype(np.uint8) if samples.dtype != np.uint8 else samples
        return Image.fromarray(np.concatenate([colours, ~hidden * np.uint8(255)], axis=-1), "LA" if channels == 1 else "RGBA")

    return convert
