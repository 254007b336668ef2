"""WebP: the container is walked here for size, orientation and missing bytes, before the library allocates a canvas."""

from dataclasses import dataclass

from treadle.decoders.errors import DecodeError
from treadle.decoders.exif import exif_orientation
from treadle.decoders.limits import DecodeOptions


@dataclass(frozen=True, slots=True)
class WebpHeader:
    """What a WebP's container says."""

    height: int
    width: int
    orientation: int
    end: int
    """Where the container ends; what follows is not its own."""


def read_webp_header(data: memoryview, options: DecodeOptions) -> WebpHeader:
    """Walks the RIFF chunks.

    Raises:
        DecodeError: a chunk is cut, or there is no picture.
    """
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise DecodeError("truncated", f"the WebP has {len(data)} of its {end} bytes")
    size: tuple[int, int] | None = None
    orientation, at = 1, 12
    for _ in range(options.max_chunks):
        if at + 8 > end:
            break
        kind = bytes(data[at : at + 4])
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        body = data[at + 8 : at + 8 + length]
        if at + 8 + length > end:
            raise DecodeError("truncated", f"the WebP's {kind!r} chunk passes its end")
        if size is None and kind in (b"VP8X", b"VP8 ", b"VP8L"):
            size = _canvas(kind, body)
        elif kind == b"EXIF":
            orientation = exif_orientation(body)
        at += 8 + length + (length & 1)
    else:
        raise DecodeError("too_large", f"the WebP has more than max_chunks {options.max_chunks} chunks")
    if size is None:
        raise DecodeError("corrupt", "the WebP has no picture")
    return WebpHeader(*size, orientation, end)


def _canvas(kind: bytes, body: memoryview) -> tuple[int, int]:
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8 " and len(body) >= 10 and bytes(body[3:6]) == b"\x9d\x01\x2a":
        return int.from_bytes(body[8:10], "little") & 0x3FFF, int.from_bytes(body[6:8], "little") & 0x3FFF
    if kind == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    raise DecodeError("corrupt", f"the WebP's {kind!r} chunk has no size")
