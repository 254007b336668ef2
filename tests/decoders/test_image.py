"""Every stored form of a picture to its right pixels, and every damage refused."""

import io
import struct
import tracemalloc
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from treadle.decoders import DecodeError, decode, probe
from treadle.shape import ImageShape, Modality

QUADRANTS = np.zeros((16, 32, 3), np.uint8)
QUADRANTS[:8, :16], QUADRANTS[:8, 16:], QUADRANTS[8:, :16], QUADRANTS[8:, 16:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), 255
LETTERS = {(1, 0, 0): "R", (0, 1, 0): "G", (0, 0, 1): "B", (1, 1, 1): "W"}
# Top left, top right, bottom left, bottom right as they must be seen, by Exif orientation.
SEEN = {0: "RGBW", 1: "RGBW", 2: "GRWB", 3: "WBGR", 4: "BWRG", 5: "RBGW", 6: "BRWG", 7: "WGBR", 8: "GWRB", 9: "RGBW"}


def refused(make: Any, data: bytes, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        make.image(data, **options)
    return caught.value.kind


def oriented(make: Any, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    kinds: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100, "subsampling": 0}, "PNG": {}, "WEBP": {"lossless": True}}
    fields = kinds[kind]
    return bytes(make.save(QUADRANTS, kind, exif=exif.tobytes(), **fields))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", SEEN)
def test_orientation_is_applied(make: Any, kind: str, orientation: int) -> None:
    pixels = make.image(oriented(make, kind, orientation)).array
    assert pixels.shape == ((32, 16, 3) if 5 <= orientation <= 8 else (16, 32, 3))
    h, w = pixels.shape[:2]
    corners = [pixels[y, x] for y in (h // 4, 3 * h // 4) for x in (w // 4, 3 * w // 4)]
    assert "".join(LETTERS[(int(r > 127), int(g > 127), int(b > 127))] for r, g, b in corners) == SEEN[orientation]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"])
def test_formats_are_told_by_content(make: Any, kind: str) -> None:
    solid = Image.new("RGB", (64, 48), (200, 100, 50))
    payload = make.image(make.save(solid, kind))
    assert (payload.grid, payload.extent, payload.truncated) == ((1, 3, 4), (1, 48, 64), False)
    assert np.abs(payload.array.astype(int) - (200, 100, 50)).max() <= (0 if kind in ("PNG", "GIF", "BMP") else 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_pixels_equal_pillows(make: Any, kind: str) -> None:
    data = make.save(Image.fromarray(make.picture(61, 83)).quantize() if kind == "GIF" else make.picture(61, 83), kind)
    with Image.open(io.BytesIO(data)) as picture:
        for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            expected = np.asarray(picture.convert(mode)).reshape(61, 83, channels)
            # Pillow makes grey of a JPEG from its RGB; the luma plane that the file holds differs by rounding.
            within = 2 if kind == "JPEG" and channels == 1 else 0
            assert np.abs(make.image(data, channels).array.astype(int) - expected).max() <= within


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_fast_jpeg_path_equals_pillow(make: Any, subsampling: int, progressive: bool, mode: str) -> None:
    picture = Image.fromarray(make.picture(77, 99)).convert(mode)
    data = make.save(picture, "JPEG", subsampling=subsampling, progressive=progressive, quality=88)
    with Image.open(io.BytesIO(data)) as again:
        np.testing.assert_array_equal(make.image(data).array, np.asarray(again.convert("RGB")))


# ---- transparency


def test_alpha_is_kept_composited_or_made(make: Any) -> None:
    hidden = make.save(Image.new("RGBA", (4, 4), (255, 0, 255, 0)), "PNG")
    assert make.image(hidden, 4).array[0, 0].tolist() == [255, 0, 255, 0]
    assert make.image(hidden, 3).array[0, 0].tolist() == [255, 255, 255]
    assert make.image(hidden, 1).array[0, 0].tolist() == [255]
    half = make.save(Image.new("RGBA", (4, 4), (0, 0, 255, 128)), "PNG")
    # (0 x 128 + 255 x 127) / 255 = 127, and blue stays 255.
    assert make.image(half, 3).array[0, 0].tolist() == [127, 127, 255]
    assert make.image(make.save(Image.new("RGB", (4, 4)), "PNG"), 4).array[0, 0].tolist() == [0, 0, 0, 255]
    assert make.image(make.save(Image.new("L", (4, 4), 9), "JPEG"), 4).array[0, 0].tolist() == [9, 9, 9, 255]
    assert make.image(make.save(Image.new("LA", (4, 4), (200, 0)), "PNG"), 4).array[0, 0].tolist() == [200, 200, 200, 0]
    assert make.image(make.save(Image.new("LA", (4, 4), (200, 0)), "PNG"), 3).array[0, 0].tolist() == [255, 255, 255]


def test_palette_with_transparency(make: Any) -> None:
    picture = Image.new("P", (64, 48))
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    indices = np.zeros((48, 64), np.uint8)
    indices[:, 32:] = 1
    picture.frombytes(indices.tobytes())
    data = make.save(picture, "PNG", transparency=bytes([0, 128, 255]))
    assert make.image(data, 4).array[0, [0, 63]].tolist() == [[255, 0, 0, 0], [0, 255, 0, 128]]
    assert make.image(data, 3).array[0, [0, 63]].tolist() == [[255, 255, 255], [127, 255, 127]]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_small_palettes_and_greys(make: Any, depth: int) -> None:
    top = (1 << depth) - 1
    bits = "".join(f"{value:0{depth}b}" for value in (0, top, top, 0))
    size = -(-4 * depth // 8)
    row = b"\0" + int(bits.ljust(8 * size, "0"), 2).to_bytes(size, "big")
    grey = make.png(1, 4, depth, 0, row)
    assert make.image(grey, 1).array[0, :, 0].tolist() == [0, 255, 255, 0]
    keyed = make.png(1, 4, depth, 0, row, make.png_chunk(b"tRNS", struct.pack(">H", top)))
    assert make.image(keyed, 4).array[0, :, 3].tolist() == [255, 0, 0, 255]
    palette = make.png_chunk(b"PLTE", bytes([9, 8, 7] + [1, 2, 3] * top))
    indexed = make.png(1, 4, depth, 3, row, palette)
    assert make.image(indexed, 3).array[0].tolist() == [[9, 8, 7], [1, 2, 3], [1, 2, 3], [9, 8, 7]]


def test_an_index_beyond_the_palette_shows_black(make: Any) -> None:
    data = make.png(1, 2, 8, 3, b"\0\0\5", make.png_chunk(b"PLTE", bytes([9, 8, 7])))
    assert make.image(data, 4).array[0].tolist() == [[9, 8, 7, 255], [0, 0, 0, 255]]


def test_rgb_key_is_compared_at_full_depth(make: Any) -> None:
    key = make.png_chunk(b"tRNS", struct.pack(">HHH", 0x1234, 0x5678, 0x9ABC))
    row = b"\0" + struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0x1234, 0x5678, 0x9ABD)
    pixels = make.image(make.png(1, 2, 16, 2, row, key), 4).array
    assert pixels[0].tolist() == [[0x12, 0x56, 0x9A, 0], [0x12, 0x56, 0x9A, 255]]
    grey = make.png(1, 2, 16, 0, b"\0" + struct.pack(">2H", 0x1234, 0x1235), make.png_chunk(b"tRNS", struct.pack(">H", 0x1234)))
    assert make.image(grey, 4).array[0].tolist() == [[0x12, 0x12, 0x12, 0], [0x12, 0x12, 0x12, 255]]
    eight = make.png(1, 2, 8, 2, b"\0" + bytes([1, 2, 3, 1, 2, 4]), make.png_chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)))
    assert make.image(eight, 4).array[0, :, 3].tolist() == [0, 255]


# ---- depths and inks


def test_sixteen_bits_lose_their_low_byte(make: Any) -> None:
    ramp = (np.arange(48 * 64).reshape(48, 64) * 21).astype(np.uint16)
    pixels = make.image(make.save(Image.fromarray(ramp), "PNG"), 3).array
    np.testing.assert_array_equal(pixels[..., 0], ramp >> 8)
    assert (pixels[47, 63, 0], pixels[0, 12, 0]) == (64491 >> 8, 252 >> 8) == (251, 0)
    rgb = make.png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 64491, 256, 255))
    assert make.image(rgb).array[0, 0].tolist() == [251, 1, 0]
    rgba = make.png(1, 1, 16, 6, b"\0" + struct.pack(">4H", 64491, 256, 255, 0x80FF))
    assert make.image(rgba, 4).array[0, 0].tolist() == [251, 1, 0, 128]
    la = make.png(1, 1, 16, 4, b"\0" + struct.pack(">2H", 64491, 0x80FF))
    assert make.image(la, 4).array[0, 0].tolist() == [251, 251, 251, 128]


@pytest.mark.parametrize(
    "ink, seen",
    [((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0)), ((255, 0, 0, 0), (0, 255, 255)), ((0, 0, 0, 127), (128, 128, 128))],
)
def test_cmyk(make: Any, ink: tuple[int, ...], seen: tuple[int, ...]) -> None:
    data = make.save(Image.new("CMYK", (64, 48), ink), "JPEG", quality=95)
    assert np.abs(make.image(data).array.astype(int) - seen).max() <= 2
    assert make.image(data, 4).array[..., 3].min() == 255
    assert np.abs(make.image(data, 1).array.astype(int) - (299 * seen[0] + 587 * seen[1] + 114 * seen[2]) / 1000).max() <= 2


def test_ycck(make: Any) -> None:
    """Adobe's transform 2: the inverted inks as luma and chroma beside black."""
    inks = np.broadcast_to(np.array([255, 0, 0, 255], np.uint8), (16, 16, 4))  # inverted C0 M255 Y255 K0
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(inks), quality=95, colorspace="CMYK")
    adobe = data.index(b"Adobe")
    assert data[adobe + 11] == 2, "the encoder writes YCCK"
    assert np.abs(make.image(data).array.astype(int) - (255, 0, 0)).max() <= 3


# ---- animations and containers


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_the_first_frame_of_an_animation(make: Any, kind: str) -> None:
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "lime", "blue")]
    fields = {"WEBP": {"lossless": True}}.get(kind, {})
    data = make.save(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **fields)
    pixels = make.image(data).array
    assert pixels.shape == (48, 64, 3)
    assert (pixels == (255, 0, 0)).all()


def test_an_apngs_default_image_counts_even_where_it_is_no_frame(make: Any) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = make.save(frames[0], "PNG", save_all=True, append_images=frames[1:], default_image=True)
    assert (make.image(data).array == (255, 0, 0)).all()


def test_a_phones_picture_pair_shows_the_first(make: Any) -> None:
    first, second = Image.new("RGB", (64, 48), (200, 100, 50)), Image.new("RGB", (32, 32), "blue")
    pixels = make.image(make.save(first, "MPO", save_all=True, append_images=[second])).array
    assert pixels.shape == (48, 64, 3) and np.abs(pixels.astype(int) - (200, 100, 50)).max() <= 2


# ---- damage


@pytest.fixture(scope="module")
def jpeg(make: Any) -> bytes:
    return bytes(make.save(make.picture(), "JPEG", quality=90))


@pytest.fixture(scope="module")
def png(make: Any) -> bytes:
    return bytes(make.save(make.picture(), "PNG"))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_cut_jpeg_is_refused(make: Any, share: float, progressive: bool) -> None:
    data = make.save(make.picture(), "JPEG", quality=90, progressive=progressive)
    cut = data[: max(2, int(len(data) * share))]
    assert refused(make, cut) == "truncated"
    assert refused(make, cut, strict=False) in ("truncated", "corrupt")


def test_a_missing_end_marker_is_accepted_on_request_alone(make: Any, jpeg: bytes) -> None:
    for cut in (jpeg[:-2], jpeg[:-1]):
        assert refused(make, cut) == "truncated"
        np.testing.assert_array_equal(make.image(cut, strict=False).array, make.image(jpeg).array)


def test_flipped_bits_in_a_scan_are_refused(make: Any, jpeg: bytes) -> None:
    damaged = bytearray(jpeg)
    middle = len(damaged) // 2
    damaged[middle : middle + 64] = np.random.default_rng(0).integers(0, 255, 64, dtype=np.uint8).tobytes()
    with Image.open(io.BytesIO(damaged)) as picture:
        picture.load()  # Pillow says nothing
    assert refused(make, bytes(damaged)) == "corrupt"
    assert refused(make, bytes(damaged), strict=False) == "corrupt"


def test_what_stands_before_and_behind(make: Any, jpeg: bytes, png: bytes) -> None:
    for data in (jpeg, png, make.save(make.picture(32, 32), "WEBP")):
        np.testing.assert_array_equal(make.image(data + bytes(100) + b"junk").array, make.image(data).array)
        assert refused(make, b"\n" + data) == "unsupported"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "AVIF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_cut_file_is_refused(make: Any, kind: str, share: float) -> None:
    picture = Image.fromarray(make.picture())
    data = make.save(picture.quantize() if kind == "GIF" else picture, kind)
    assert refused(make, data[: int(len(data) * share)]) in ("truncated", "corrupt")


def test_png_checksums(make: Any, png: bytes) -> None:
    for kind in (b"IHDR", b"IDAT", b"IEND"):
        damaged = bytearray(png)
        at = png.index(kind)
        damaged[at + 4 + int.from_bytes(png[at - 4 : at], "big")] ^= 1  # first byte of the checksum
        assert refused(make, bytes(damaged)) == "corrupt"
    flipped = bytearray(png)
    flipped[png.index(b"IDAT") + 40] ^= 0xFF
    assert refused(make, bytes(flipped)) == "corrupt"


def test_chunks_that_no_pixel_depends_on_are_passed_over(make: Any, png: bytes) -> None:
    expected = make.image(png).array
    garbage = make.png_chunk(b"iCCP", b"p\0\0not zlib")
    wrong = bytearray(make.png_chunk(b"tEXt", b"a\0b"))
    wrong[-1] ^= 1
    bomb = make.png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 22)))
    for chunk in (garbage, bytes(wrong), bomb):
        np.testing.assert_array_equal(make.image(png[:33] + chunk + png[33:]).array, expected)
    assert refused(make, png[:33] + make.png_chunk(b"ABCD", b"") + png[33:]) == "corrupt"


def test_a_missing_png_end_is_accepted(make: Any, png: bytes) -> None:
    for lost in (12, 8, 4, 1):
        np.testing.assert_array_equal(make.image(png[:-lost]).array, make.image(png).array)


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 10, 47])
def test_missing_png_rows_are_refused_though_every_checksum_is_right(make: Any, rows: int, interlace: int) -> None:
    data = make.png(48, 64, 8, 2, (b"\0" + bytes([200] * 192)) * rows, interlace=interlace)
    assert refused(make, data) in ("truncated", "corrupt")


def test_black_rows_are_no_missing_rows(make: Any) -> None:
    black = make.png(48, 64, 8, 2, (b"\0" + bytes(192)) * 48)
    assert not make.image(black).array.any()
    picture = Image.new("RGB", (37, 29))
    assert not make.image(make.save(picture, "PNG")).array.any()


def test_interlaced_png(make: Any) -> None:
    """Seven passes of one known grey each; the first covers every eighth pixel of every eighth row."""
    starts = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    expected, rows = np.zeros((21, 13), np.uint8), b""
    for number, (top, left, down, across) in enumerate(starts):
        part = expected[top::down, left::across]
        part[:] = 10 * (number + 1)
        rows += b"".join(b"\0" + row.tobytes() for row in part)
    data = make.png(21, 13, 8, 0, rows, interlace=1)
    np.testing.assert_array_equal(make.image(data, 1).array[..., 0], expected)
    assert refused(make, make.png(21, 13, 8, 0, rows[:-13], interlace=1)) == "truncated"


@pytest.mark.parametrize("header", [(0, 10, 8, 0), (10, 0, 8, 0), (10, 10, 3, 0), (10, 10, 8, 5), (10, 10, 16, 3)])
def test_impossible_png_headers(make: Any, header: tuple[int, ...]) -> None:
    assert refused(make, make.png(*header, b"")) == "corrupt"


def test_headers_alone(make: Any, jpeg: bytes, png: bytes) -> None:
    assert refused(make, jpeg[:300]) == "truncated"
    assert refused(make, jpeg[:2]) == "truncated"
    assert refused(make, png[:33]) == "truncated"
    assert refused(make, png[:8]) == "truncated"
    assert refused(make, b"RIFF\x10\0\0\0WEBP") == "truncated"
    assert refused(make, b"GIF89a") in ("truncated", "corrupt")


def test_webp_sizes_are_checked(make: Any) -> None:
    data = make.save(make.picture(), "WEBP")
    assert refused(make, data[: len(data) // 2]) == "truncated"
    short = bytearray(data[: len(data) // 2])
    short[4:8] = struct.pack("<I", len(short) - 8)
    assert refused(make, bytes(short)) == "truncated"


# ---- limits


def test_bombs_are_refused_by_their_headers(make: Any) -> None:
    bombs = [
        make.png(30_000, 30_000, 8, 2, b""),
        b"GIF89a"
        + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0)
        + b"\x08\x01\0\0;",
        b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\xff\x7f" * 2 + bytes(8),
        b"\xff\xd8\xff\xc0\x00\x11\x08"
        + struct.pack(">HH", 60_000, 60_000)
        + b"\3\1\x11\0\2\x11\0\3\x11\0"
        + b"\xff\xda\x00\x0c\3\1\0\2\0\3\0\0\x3f\0",
        b"BM" + struct.pack("<IHHIIiiHH", 100, 0, 0, 54, 40, 50_000, 50_000, 1, 24) + bytes(24),
    ]
    make.image(make.save(make.picture(8, 8), "GIF"))  # the libraries' own imports are no part of a bomb's cost
    for data in bombs:
        for call in (decode, probe):
            tracemalloc.start()
            with pytest.raises(DecodeError) as caught:
                call(Modality.IMAGE, data, make.shape())
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert caught.value.kind == "too_large"
            assert peak < 1 << 20


def test_sides_and_pixels_have_limits_of_their_own(make: Any) -> None:
    data = make.save(Image.new("RGB", (300, 20)), "PNG")
    assert refused(make, data, max_side_px=299) == "too_large"
    assert refused(make, data, max_pixels=5999) == "too_large"
    assert make.image(data, max_side_px=300, max_pixels=6000).extent == (1, 20, 300)


def test_a_large_limit_brings_no_warning_of_the_library(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for kind in ("PNG", "WEBP", "GIF", "BMP", "JPEG", "AVIF"):
        data = make.save(Image.new("RGB", (64, 64)), kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if kind == "GIF":  # its reader has no way round its own limit
                assert refused(make, data) == "too_large"
            else:
                assert make.image(data).extent == (1, 64, 64)


def test_a_progressive_jpeg_of_very_many_scans_is_refused(make: Any) -> None:
    data = make.save(make.picture(64, 64), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    assert refused(make, data[:start] + data[start:-2] * 600 + b"\xff\xd9") == "too_large"
    scans = data.count(b"\xff\xda")
    assert refused(make, data, max_pixels=64 * 64 * scans // 16 - 1) == "too_large"


# ---- fitting the row


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("size", [(300, 200), (200, 300), (1, 4000), (257, 255)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 100])
def test_the_grid_fits_and_the_next_larger_size_would_not(make: Any, kind: str, size: tuple[int, int], tokens: int) -> None:
    height, width = size
    fields = {"lossless": True} if kind == "WEBP" else {}
    data = make.save(Image.new("RGB", (width, height), (10, 200, 90)), kind, **fields)
    payload = make.image(data, columns=tokens + 1)
    h, w = payload.extent[1:]
    assert payload.array.shape == (h, w, 3) and not payload.truncated
    assert payload.grid == (1, -(-h // 16), -(-w // 16)) and payload.tokens <= tokens
    seen = probe(Modality.IMAGE, data, make.shape(tokens + 1, image=ImageShape(patch_side=16, channels=3)))
    assert seen.exact and (seen.grid, seen.extent) == (payload.grid, payload.extent)
    assert np.abs(payload.array.astype(int) - (10, 200, 90)).max() <= 3
    if (h, w) != size:
        longer = max(h, w) + 1
        shorter = max(1, (2 * min(size) * longer + max(size)) // (2 * max(size)))
        assert -(-longer // 16) * -(-shorter // 16) > tokens
        assert abs(min(h, w) - max(1.0, min(size) * max(h, w) / max(size))) <= 0.5


def test_pictures_are_never_scaled_up(make: Any) -> None:
    assert make.image(make.save(make.picture(17, 3), "PNG")).extent == (1, 17, 3)


@pytest.mark.parametrize("orientation", [1, 6])
def test_probe_sees_the_orientation(make: Any, orientation: int) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = oriented(make, kind, orientation)
        payload = make.image(data)
        seen = probe(Modality.IMAGE, data, make.shape(image=ImageShape(patch_side=16, channels=3)))
        assert (seen.grid, seen.extent) == (payload.grid, payload.extent)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_scaling_removes_what_it_cannot_show(make: Any, kind: str) -> None:
    """Stripes one pixel wide become their mean, not stripes of another width."""
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    data = make.save(stripes, kind, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    pixels = make.image(data, columns=1 + 64).array  # 8 x 8 patches of 16: 128 x 128 pixels
    assert pixels.shape == (128, 128, 3)
    assert np.abs(pixels[8:-8, 8:-8].astype(int) - 127).max() <= 4


def test_scaling_does_not_let_hidden_colours_bleed(make: Any) -> None:
    pixels = np.zeros((256, 256, 4), np.uint8)
    pixels[..., :3] = (255, 0, 255)
    pixels[:, :128] = (0, 255, 0, 255)
    small = make.image(make.save(pixels, "PNG"), 4, columns=1 + 16).array
    opaque = small[..., 3] > 16
    assert np.abs(small[opaque][:, :3].astype(int) - (0, 255, 0)).max() <= 16
    flat = make.image(make.save(pixels, "PNG"), 3, columns=1 + 16).array.astype(int)
    # From green to white, red and blue rise together and green never falls.
    assert flat[..., 1].min() >= 240 and np.abs(flat[..., 0] - flat[..., 2]).max() <= 1


@pytest.mark.parametrize("tokens, divisor", [(16 * 16, 2), (8 * 8, 4), (4 * 4, 8)])
def test_a_reduced_jpeg_decode_stays_close_to_the_full_one(make: Any, tokens: int, divisor: int) -> None:
    y, x = np.mgrid[0:1024, 0:1024]
    scene = np.stack([127 + 100 * np.sin(x / 37) * np.cos(y / 53), 127 + 90 * np.sin((x + y) / 71), (x * y / 4113) % 256], -1)
    data = make.save(scene.astype(np.uint8), "JPEG", quality=92)
    pixels = make.image(data, columns=1 + tokens).array
    side = pixels.shape[0]
    assert 1024 // side >= 2 * divisor, "the inverse DCT may reduce"
    full = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB")).resize((side, side), Image.Resampling.LANCZOS)
    difference = np.abs(pixels.astype(int) - np.asarray(full))
    assert difference.mean() < 1.0
