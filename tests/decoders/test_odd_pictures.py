"""Pictures made byte by byte: forms that encoders seldom write, with the pixels that the formats' definitions give them."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from PIL import Image

from treadle.decoders import DecodeError

RED, GREEN, BLUE, DARK, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9), (255, 255, 255)
COLOURS = [RED, GREEN, BLUE, DARK]


def gif(
    canvas: tuple[int, int],
    frame: ArrayLike,
    place: tuple[int, int] = (0, 0),
    *,
    colours: list[tuple[int, int, int]] = COLOURS,
    local: list[tuple[int, int, int]] | None = None,
    transparent: int | None = None,
    interlaced: bool = False,
) -> bytes:
    """One frame of two-bit indices; the code table is cleared before every pixel, so that no code grows."""
    indices = np.asarray(frame, np.uint8)
    out = b"GIF89a" + struct.pack("<HHBBB", *canvas, 0x80 | len(colours).bit_length() - 2, 0, 0) + bytes(sum(colours, ()))
    if transparent is not None:
        out += bytes([0x21, 0xF9, 4, 1, 0, 0, transparent, 0])
    flags = (0x81 if local else 0) | (0x40 if interlaced else 0)
    out += b"," + struct.pack("<HHHHB", *place, indices.shape[1], indices.shape[0], flags) + bytes(sum(local or [], ()))
    bits = "".join(f"{code:03b}"[::-1] for index in indices.ravel().tolist() for code in (4, index)) + f"{5:03b}"[::-1]
    packed = bytes(int(bits[at : at + 8].ljust(8, "0")[::-1], 2) for at in range(0, len(bits), 8))
    return out + b"\2" + bytes([len(packed)]) + packed + b"\0;"


def bmp(width: int, height: int, bits: int, rows: bytes, *, packing: int = 0, colours: bytes = b"", masks: bytes = b"") -> bytes:
    """A bitmap with the header of Windows 3."""
    first = 14 + 40 + len(masks) + len(colours)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, packing, len(rows), 0, 0, len(colours) // 4, 0)
    return b"BM" + struct.pack("<IHHI", first + len(rows), 0, 0, first) + header + masks + colours + rows


REDGREEN = bytes([0, 0, 255, 0, 0, 255, 0, 0])
BITMAPS = {
    "top row first": (bmp(2, -2, 24, bytes([0, 0, 255] * 2) + bytes(2) + bytes([255, 0, 0] * 2) + bytes(2)), [[RED, RED], [BLUE, BLUE]]),
    "bottom row first": (bmp(2, 2, 24, bytes([0, 0, 255] * 2) + bytes(2) + bytes([255, 0, 0] * 2) + bytes(2)), [[BLUE, BLUE], [RED, RED]]),
    "a fourth byte that is no alpha": (bmp(1, 1, 32, bytes([0, 0, 255, 0])), [[RED]]),
    "5, 5 and 5 bits": (bmp(2, 1, 16, struct.pack("<HH", 31 << 10, 31)), [[RED, BLUE]]),
    "5, 6 and 5 bits": (
        bmp(2, 1, 16, struct.pack("<HH", 31 << 11, 63 << 5), packing=3, masks=struct.pack("<III", 31 << 11, 63 << 5, 31)),
        [[RED, GREEN]],
    ),
    "runs of bytes": (
        bmp(4, 2, 8, bytes([4, 1, 0, 0, 2, 0, 2, 1, 0, 1]), packing=1, colours=REDGREEN),
        [[RED, RED, GREEN, GREEN], [GREEN] * 4],
    ),
    "one bit": (bmp(8, 1, 1, bytes([0b10100000, 0, 0, 0]), colours=REDGREEN), [[GREEN, RED, GREEN] + [RED] * 5]),
}
GIFS = {
    "a local table": (gif((2, 1), [[1, 3]], local=[WHITE, DARK, RED, BLUE]), [[DARK, BLUE]]),
    "a frame beyond its canvas": (gif((1, 1), [[1, 2]]), [[GREEN, BLUE]]),
    "a see-through index": (gif((2, 1), [[1, 2]], transparent=1), [[WHITE, BLUE]]),
    # Rows are stored 0, 8 / 4 / 2, 6 / 1, 3, 5, 7.
    "interlaced rows": (gif((1, 8), [[0], [1], [2], [3], [0], [1], [2], [3]], interlaced=True), [[COLOURS[i]] for i in (0, 0, 2, 1, 1, 2, 3, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BITMAPS, *GIFS])
def test_bitmaps_and_gifs(make: Any, name: str) -> None:
    data, pixels = {**BITMAPS, **GIFS}[name]
    np.testing.assert_array_equal(make.image(data).array, np.array(pixels))


def test_bitmaps_that_end_early(make: Any) -> None:
    for data in (bmp(4, 2, 8, bytes([4, 1, 0, 0, 2]), packing=1, colours=REDGREEN), bmp(2, 2, 24, bytes(9))):
        with pytest.raises(DecodeError) as caught:
            make.image(data)
        assert caught.value.kind in ("corrupt", "truncated")


SIGNATURE = b"\x89PNG\r\n\x1a\n"
ROWS = zlib.compress(b"\0\1\2\0\3\4")
GREY = [[(1,) * 3, (2,) * 3], [(3,) * 3, (4,) * 3]]


def chunks(make: Any, *parts: tuple[bytes, bytes], colour: int = 0) -> bytes:
    """A PNG of 2 x 2 pixels of eight bits from its chunks; IHDR and IEND are added."""
    header = make.png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, colour, 0, 0, 0))
    middle: list[bytes] = [make.png_chunk(*part) for part in parts]
    return b"".join([SIGNATURE, header, *middle, make.png_chunk(b"IEND", b"")])


@pytest.mark.parametrize(
    "parts",
    [
        [(b"IDAT", b""), (b"IDAT", ROWS)],
        [(b"IDAT", ROWS[at : at + 1]) for at in range(len(ROWS))],
        [(b"IDAT", ROWS[:5]), (b"tEXt", b"a\0b"), (b"IDAT", ROWS[5:])],
        [(b"IDAT", ROWS + b"more")],
        [(b"gAMA", struct.pack(">I", 45455)), (b"sRGB", b"\0"), (b"IDAT", ROWS)],
        [(b"zTXt", b"\xff" * 20), (b"sPLT", b"x"), (b"IDAT", ROWS), (b"tIME", b"?")],
    ],
)
def test_png_chunks_that_change_no_pixel(make: Any, parts: list[tuple[bytes, bytes]]) -> None:
    np.testing.assert_array_equal(make.image(chunks(make, *parts)).array, np.array(GREY))


@pytest.mark.parametrize(
    "colour, parts, what",
    [
        (0, [(b"IHDR", bytes(13)), (b"IDAT", ROWS)], "out of its place"),
        (3, [(b"IDAT", ROWS), (b"PLTE", bytes(15))], "out of its place"),
        (3, [(b"PLTE", bytes(15)), (b"PLTE", bytes(15)), (b"IDAT", ROWS)], "out of its place"),
        (3, [(b"IDAT", ROWS)], "no palette"),
        (0, [(b"IDAT", zlib.compress(b"\5\1\2\0\3\4"))], "PNG pixels"),
        (0, [(b"IDAT", ROWS[:-1] + b"\xff")], "PNG pixels"),
        (0, [(b"IDAT", ROWS), (b"NEED", b"")], "unknown critical"),
    ],
)
def test_png_chunks_that_cannot_be(make: Any, colour: int, parts: list[tuple[bytes, bytes]], what: str) -> None:
    with pytest.raises(DecodeError, match=what) as caught:
        make.image(chunks(make, *parts, colour=colour))
    assert caught.value.kind == "corrupt"


def test_an_iphones_own_png_is_told(make: Any) -> None:
    """CgBI: Apple's build tools write it into applications; its deflate streams are bare and its colours swapped."""
    data = SIGNATURE + make.png_chunk(b"CgBI", b"\0\0\0\2") + chunks(make, (b"IDAT", ROWS))[8:]
    with pytest.raises(DecodeError, match="CgBI") as caught:
        make.image(data)
    assert caught.value.kind == "corrupt"


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def test_jpegs_with_more_than_a_picture(make: Any) -> None:
    picture = Image.fromarray(make.picture(40, 56))
    plain, small = make.save(picture, "JPEG"), make.save(picture.resize((8, 8)), "JPEG")
    expected = make.image(plain).array
    for data in (
        plain + b"\xff\xd9",
        plain + plain[:200],
        plain[:2] + b"\xff\xff\xff" + plain[2:],
        plain[:2] + segment(0xE1, b"Exif\0\0" + small) + plain[2:],
        plain[:2] + segment(0xFE, b"\xff\xd9\xff\xda\xff\xc0") + plain[2:],
        plain[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(9)) + plain[2:],
        make.save(picture, "JPEG", restart_marker_blocks=3),
    ):
        np.testing.assert_array_equal(make.image(data).array, expected)


def test_jpegs_with_less_than_they_say(make: Any) -> None:
    data = make.save(make.picture(40, 56), "JPEG", restart_marker_blocks=3)
    frame, restart, table = data.index(b"\xff\xc0"), data.index(b"\xff\xd1"), data.index(b"\xff\xdb")
    table_bytes = 2 + int.from_bytes(data[table + 2 : table + 4], "big")
    for damaged in (
        data[: frame + 5] + struct.pack(">H", 64) + data[frame + 7 :],
        data[: frame + 5] + struct.pack(">H", 24) + data[frame + 7 :],
        data[: frame + 7] + struct.pack(">H", 24) + data[frame + 9 :],
        data[:restart] + data[restart + 2 :],
        data[: restart + 1] + b"\xd5" + data[restart + 2 :],
        data[:table] + data[table + table_bytes :],
        data[:20] + b"junk" + data[20:],
    ):
        with pytest.raises(DecodeError) as caught:
            make.image(damaged)
        assert caught.value.kind == "corrupt"
    for process in (0xC3, 0xC5, 0xC7):
        with pytest.raises(DecodeError) as caught:
            make.image(data[: frame + 1] + bytes([process]) + data[frame + 2 :])
        assert caught.value.kind == "unsupported"


def test_an_avif_that_ends_early_is_truncated(make: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        make.image(make.save(make.picture(40, 56), "AVIF")[:-100])
    assert caught.value.kind == "truncated"


def test_a_large_picture_is_what_the_library_makes_of_it(make: Any) -> None:
    """Beyond a quarter of a million pixels the answer is gathered in bands."""
    draw = np.random.default_rng(2)
    rgba = draw.integers(0, 256, (700, 611, 4), dtype=np.uint8)
    for source in (
        Image.fromarray(rgba),
        Image.fromarray(rgba[..., :3]),
        Image.fromarray(rgba[..., 0]),
        Image.fromarray(rgba[..., :3]).quantize(50),
    ):
        for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            paper = Image.alpha_composite(Image.new("RGBA", source.size, "white"), source.convert("RGBA"))
            expected = np.asarray((source.convert("RGBA") if channels == 4 else paper.convert("RGB")).convert(mode)).reshape(
                700, 611, channels
            )
            seen = make.image(make.save(source, "PNG"), channels, columns=10_000).array
            assert np.abs(seen.astype(int) - expected).max() <= (1 if source.mode == "RGBA" and channels != 4 else 0)


@pytest.mark.parametrize(
    "head, name",
    [
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"MM\0*\0\0\0\x08", "TIFF"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "gzip"),
        (b"P6\n64 64\n255\n", "it begins"),
    ],
)
def test_a_refusal_names_the_format(make: Any, head: bytes, name: str) -> None:
    with pytest.raises(DecodeError, match=f"not a picture that is read: {name}") as caught:
        make.image(head + bytes(100))
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    "head, name", [(b"FORM\0\0\0\x20AIFF", "AIFF"), (b"caff\0\1\0\0desc", "CAF"), (b"riff.\x91\xcf\x11", "Wave64"), (b"wvpk", "WavPack")]
)
def test_a_sounds_refusal_names_the_format(make: Any, head: bytes, name: str) -> None:
    with pytest.raises(DecodeError, match=f"not a recording that is read: {name}") as caught:
        make.audio(head + bytes(100))
    assert caught.value.kind == "unsupported"


def test_a_clips_refusal_names_the_format(make: Any) -> None:
    gif_file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(gif_file, "GIF")
    for data, name in ((b"FLV\x01\x05\0\0\0\x09", "FLV"), (b"\0\0\1\xbaD\0\4\0", "an MPEG program stream"), (gif_file.getvalue(), "gif")):
        with pytest.raises(DecodeError, match=f"not a clip that is read: {name}") as caught:
            make.video(data)
        assert caught.value.kind == "unsupported"
