"""PNG: the chunks are walked and checked here; what the library sees holds only what makes the picture."""

import io
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
    stored: list[memoryview] = field(default_factory=list[memoryview])
    """IHDR and IDAT chunks as stored, their checksums verified."""
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
            parts.stored.append(data[at:end])
        elif kind == b"IDAT":
            parts.stored.append(data[at:end])
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


def decode_png(parts: PngParts) -> "Image.Image":
    """The default image in mode L, RGB, LA or RGBA.

    Raises:
        DecodeError: the pixels are damaged or some are missing.
    """
    from PIL import Image

    if parts.colour == _PALETTE:
        indices = np.asarray(_load(parts))
        return Image.fromarray(np.take(_palette(parts), indices, axis=0).view(np.uint8).reshape(*indices.shape, 4), "RGBA")
    picture = _load(parts)
    if picture.mode == "1":
        picture = picture.convert("L")
    if parts.transparency and parts.colour in (_GREY, _RGB):
        return _with_key(parts, picture)
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8), "L")
    return picture


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


def _load(parts: PngParts, *, low_bytes: bool = False) -> "Image.Image":
    """The library's decode of header and pixels alone; transparency and palette are applied by the caller."""
    from PIL import PngImagePlugin

    middle = [_chunk(b"PLTE", bytes(768))] if parts.colour == _PALETTE else []
    clean = b"".join([_SIGNATURE, parts.stored[0], *middle, *parts.stored[1:], _chunk(b"IEND", b"")])
    picture = PngImagePlugin.PngImageFile(io.BytesIO(clean))
    if low_bytes:
        # Reading big-endian samples as little-endian ones keeps the byte that an 8-bit picture drops.
        picture.tile = [tile._replace(args="RGB;16L") for tile in picture.tile]
    try:
        picture.load()
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DecodeError("truncated" if "truncated" in str(error) else "corrupt", f"PNG pixels: {error}") from error
    # The library answers rows that the stream lacks as zeros and says nothing, so zeros at the end are looked into.
    last_row = picture.crop((0, parts.height - 1, parts.width, parts.height))
    if parts.interlaced or not any(last_row.tobytes()):
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
    for body in parts.packed:
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


def _with_key(parts: PngParts, picture: "Image.Image") -> "Image.Image":
    """Applies the one transparent colour of a grey or RGB PNG, compared at its full depth."""
    from PIL import Image

    channels = _CHANNELS[parts.colour]
    if len(parts.transparency) < 2 * channels:
        raise DecodeError("corrupt", f"a PNG transparency chunk of {len(parts.transparency)} bytes")
    limit = (1 << parts.depth) - 1
    key = np.frombuffer(parts.transparency[: 2 * channels], ">u2").astype(np.int64) & limit
    samples = np.asarray(picture).reshape(parts.height, parts.width, channels)
    if parts.depth < 8:
        key = key * (255 // limit)
    if parts.depth == 16 and parts.colour == _RGB:
        low = np.asarray(_load(parts, low_bytes=True))
        seen = ~((samples == key >> 8) & (low == (key & 255))).all(axis=-1, keepdims=True)
    else:
        seen = ~(samples == key).all(axis=-1, keepdims=True)
    colours = (samples >> 8).astype(np.uint8) if samples.dtype != np.uint8 else samples
    pixels = np.concatenate([colours, seen.astype(np.uint8) * np.uint8(255)], axis=-1)
    return Image.fromarray(pixels, "LA" if channels == 1 else "RGBA")
