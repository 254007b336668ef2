"""A catalogue of files that decoders in the field get wrong, each with its right value.

One test per kind of file, its id first in the test's id: I is a picture, V a clip, A a recording, X a text. Numbers that are
missing are kinds that this project has no answer of its own to. `pytest -k "I5-"` runs one of them.
"""

import io
import struct
import warnings
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode
from treadle.shape import Modality

Right = Callable[[Payload], bool]
RATE = 44_100
COLOUR = (200, 100, 50)


class Refused:
    """The kinds of refusal that are right, and no other."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds


def near(payload: Payload, colour: tuple[int, ...], within: int = 2) -> bool:
    return bool((np.abs(payload.array.astype(int) - colour) <= within).all())


def solid(kind: str, **fields: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 48), COLOUR).save(out, kind, **fields)
    return out.getvalue()


def sine_is(samples: int, peak: float = 0.125, within: float = 0.001) -> Right:
    """So many samples, of that peak."""
    return lambda payload: payload.extent == (1, 1, samples) and abs(float(np.abs(payload.array).max()) - peak) <= within


# ---- pictures: (id, bytes, channels, options, right)


def pictures(make: Any) -> dict[str, tuple[bytes, int, dict[str, Any], Right | Refused]]:
    jpeg = make.save(make.picture(), "JPEG", quality=90)
    png = make.save(make.picture(), "PNG")
    expected = make.image(jpeg).array
    flipped = bytearray(jpeg)
    flipped[len(jpeg) // 2 : len(jpeg) // 2 + 64] = np.random.default_rng(0).integers(0, 255, 64, dtype=np.uint8).tobytes()
    idat = bytearray(png)
    idat[png.index(b"IDAT") + 400] ^= 0xFF
    ramp = (np.arange(48 * 64).reshape(48, 64) * 21).astype(np.uint16)
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "lime", "blue")]
    moving = {"save_all": True, "append_images": frames[1:]}
    palette = Image.new("P", (64, 48))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.paste(1, (32, 0, 64, 48))
    red = Image.new("RGB", (64, 48), "red")
    grey = Image.new("L", (64, 48), 90)
    key = struct.pack(">HHH", 255, 0, 0)
    keyed = make.png(1, 2, 8, 2, b"\0\xff\0\0\0\xff\0", make.png_chunk(b"tRNS", key))
    first = lambda p: p.array.shape == (48, 64, 3) and near(p, (255, 0, 0), 0)  # noqa: E731
    same = lambda p: bool((p.array == expected).all())  # noqa: E731
    whole = make.save(make.picture(), "PNG")
    return {
        "I1-half a JPEG": (jpeg[: len(jpeg) // 2], 3, {}, Refused("truncated")),
        "I2-end marker missing": (jpeg[:-2], 3, {}, Refused("truncated")),
        "I2-end marker missing, allowed": (jpeg[:-2], 3, {"strict": False}, same),
        "I3-bits flipped in a scan": (bytes(flipped), 3, {}, Refused("corrupt")),
        "I4-garbage behind": (jpeg + bytes(100) + b"junk", 3, {}, same),
        "I5-CMYK": (
            make.save(Image.new("CMYK", (64, 48), (0, 255, 255, 0)), "JPEG", quality=95), 3, {}, lambda p: near(p, (255, 0, 0)),
        ),
        "I7-16-bit grey": (
            make.save(Image.fromarray(ramp), "PNG"), 3, {}, lambda p: (p.array[47, 63, 0], p.array[0, 12, 0]) == (251, 0),
        ),
        "I8-16-bit RGB": (
            make.png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 64491, 256, 255)), 3, {}, lambda p: p.array[0, 0].tolist() == [251, 1, 0],
        ),
        "I9-hidden colour over white": (
            make.save(Image.new("RGBA", (4, 4), (255, 0, 255, 0)), "PNG"), 3, {}, lambda p: near(p, (255, 255, 255), 0),
        ),
        "I9-hidden colour kept": (
            make.save(Image.new("RGBA", (4, 4), (255, 0, 255, 0)), "PNG"), 4, {}, lambda p: near(p, (255, 0, 255, 0), 0),
        ),
        "I9-palette with transparency": (
            make.save(palette, "PNG", transparency=bytes([0, 128])), 3, {},
            lambda p: p.array[0, 0].tolist() == [255, 255, 255] and np.abs(p.array[0, 63].astype(int) - (127, 255, 127)).max() <= 1,
        ),
        "I9-RGB with a key": (keyed, 3, {}, lambda p: p.array[0].tolist() == [[255, 255, 255], [0, 255, 0]]),
        "I9-grey with alpha": (make.save(Image.new("LA", (4, 4), (9, 0)), "PNG"), 3, {}, lambda p: near(p, (255, 255, 255), 0)),
        "I10-animated WebP": (make.save(frames[0], "WEBP", lossless=True, **moving), 3, {}, first),
        "I10-animated GIF": (make.save(frames[0], "GIF", **moving), 3, {}, first),
        "I10-APNG": (make.save(frames[0], "PNG", **moving), 3, {}, first),
        "I12-two pictures of a phone": (
            make.save(Image.new("RGB", (64, 48), COLOUR), "MPO", save_all=True, append_images=[red]), 3, {}, lambda p: near(p, COLOUR),
        ),
        "I13-HTML": (b"<html><body>404</body></html>", 3, {}, Refused("unsupported")),
        **{f"I13-{kind}, whatever its name": (solid(kind), 3, {}, lambda p: near(p, COLOUR, 3)) for kind in ("PNG", "WEBP", "BMP", "GIF")},
        "I14-no bytes": (b"", 3, {}, Refused("empty")),
        "I14-first marker alone": (b"\xff\xd8", 3, {}, Refused("truncated")),
        "I14-header alone": (jpeg[:300], 3, {}, Refused("truncated")),
        "I15-bomb by its header": (make.png(30_000, 30_000, 8, 2, b""), 3, {}, Refused("too_large")),
        "I15-no width": (make.png(10, 0, 8, 2, b""), 3, {}, Refused("corrupt")),
        "I15-a line of 20000": (
            make.save(Image.new("RGB", (20_000, 1)), "PNG"), 3, {}, lambda p: p.extent == (1, 1, 20_000),
        ),
        "I15-a line of 20000 beyond a limit": (make.save(Image.new("RGB", (20_000, 1)), "PNG"), 3, {"max_side_px": 16_384}, Refused("too_large")),
        "I17-garbage colour profile": (
            png[:33] + make.png_chunk(b"iCCP", b"p\0\0not zlib") + png[33:], 3, {}, lambda p: bool((p.array == make.picture()).all()),
        ),
        "I18-byte flipped in IDAT": (bytes(idat), 3, {}, Refused("corrupt")),
        "I20-IEND missing": (whole[:-12], 3, {}, lambda p: bool((p.array == make.picture()).all())),
        "I21-progressive": (make.save(red, "JPEG", progressive=True, quality=95), 3, {}, lambda p: near(p, (254, 0, 0))),
        "I21-grey JPEG": (make.save(grey, "JPEG"), 3, {}, lambda p: near(p, (90, 90, 90))),
        "I21-one bit": (make.save(Image.new("1", (64, 48), 1), "PNG"), 3, {}, lambda p: near(p, (255, 255, 255), 0)),
        "I21-newline first": (b"\n" + jpeg, 3, {}, Refused("unsupported")),
    }  # fmt: skip


PICTURES = [
    "I1-half a JPEG", "I2-end marker missing", "I2-end marker missing, allowed", "I3-bits flipped in a scan", "I4-garbage behind",
    "I5-CMYK", "I7-16-bit grey", "I8-16-bit RGB", "I9-hidden colour over white", "I9-hidden colour kept", "I9-palette with transparency",
    "I9-RGB with a key", "I9-grey with alpha", "I10-animated WebP", "I10-animated GIF", "I10-APNG", "I12-two pictures of a phone",
    "I13-HTML", "I13-PNG, whatever its name", "I13-WEBP, whatever its name", "I13-BMP, whatever its name", "I13-GIF, whatever its name",
    "I14-no bytes", "I14-first marker alone", "I14-header alone", "I15-bomb by its header", "I15-no width", "I15-a line of 20000",
    "I15-a line of 20000 beyond a limit", "I17-garbage colour profile", "I18-byte flipped in IDAT", "I20-IEND missing",
    "I21-progressive", "I21-grey JPEG", "I21-one bit", "I21-newline first",
]  # fmt: skip


@pytest.fixture(scope="module")
def shelf(make: Any) -> dict[str, tuple[bytes, int, dict[str, Any], Right | Refused]]:
    """The catalogue's pictures."""
    return pictures(make)


def test_the_catalogue_is_whole(shelf: dict[str, Any]) -> None:
    assert sorted(shelf) == sorted(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_picture(make: Any, shelf: dict[str, Any], name: str) -> None:
    data, channels, options, right = shelf[name]
    judge(lambda: make.image(data, channels, columns=1 << 15, **options), right)


@pytest.mark.parametrize("orientation, seen", list(enumerate("- RGBW GRWB WBGR BWRG RBGW BRWG WGBR GWRB RGBW".split()))[1:])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_picture_i6_orientation(make: Any, kind: str, orientation: int, seen: str) -> None:
    """I6: corners as they must be seen: top left, top right, bottom left, bottom right."""
    quarters = np.zeros((16, 32, 3), np.uint8)
    quarters[:8, :16], quarters[:8, 16:], quarters[8:, :16], quarters[8:, 16:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    all_fields: dict[str, dict[str, Any]] = {
        "WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}, "AVIF": {"quality": 95}, "PNG": {},
    }  # fmt: skip
    fields = all_fields[kind]
    pixels = make.image(make.save(quarters, kind, exif=exif.tobytes(), **fields)).array
    height, width = (32, 16) if 5 <= orientation <= 8 else (16, 32)
    assert pixels.shape == (height, width, 3)
    names = {(True, False, False): "R", (False, True, False): "G", (False, False, True): "B", (True, True, True): "W"}
    corners = [pixels[y, x] > 127 for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    assert "".join(names[bool(r), bool(g), bool(b)] for r, g, b in corners) == seen


def test_picture_i6_a_damaged_exif_block_of_an_avif_brings_no_warning(make: Any) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    data = bytearray(make.save(Image.new("RGB", (32, 16), COLOUR), "AVIF", exif=exif.tobytes(), quality=95))
    place = data.index(b"MM\0*")
    assert make.image(bytes(data)).extent == (1, 32, 16)
    data[place + 8 : place + 10] = b"\xff\xff"  # entries of the directory
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make.image(bytes(data)).extent == (1, 32, 16)


def judge(run: Callable[[], Payload], right: Right | Refused) -> None:
    if isinstance(right, Refused):
        with pytest.raises(DecodeError) as caught:
            run()
        assert caught.value.kind in right.kinds
    else:
        assert right(run())


# ---- clips


@pytest.fixture(scope="module")
def film(make: Any) -> bytes:
    """30 frames at 10 per second, a key frame every 10, B-frames between."""
    return bytes(make.clip(make.moving(30), options={"g": "10", "bf": "2", "crf": "10"}))


def recut(data: bytes, container: str, first_s: float, shift_s: float, **options: str) -> bytes:
    """The packets from a key frame on, copied, their times moved."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(out, "w", format=container, options=options) as copy:
        stream: Any = copy.add_stream_from_template(source.streams.video[0])
        source.seek(round(first_s * 1_000_000))
        for packet in source.demux(video=0):
            if packet.dts is not None and packet.pts is not None:
                shift = round(shift_s / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                copy.mux(packet)
    return out.getvalue()


def test_clip_v2_copied_from_the_middle(make: Any, film: bytes) -> None:
    payload = make.video(recut(film, "mp4", 1.0, 0.0, avoid_negative_ts="make_zero"))
    assert payload.extent == (20, 48, 64) and make.numbers(payload) == list(range(10, 30))


@pytest.mark.parametrize("degrees, turns", [(90, 1), (180, 2), (270, 3)])
def test_clip_v3_rotation(make: Any, film: bytes, degrees: int, turns: int) -> None:
    out = io.BytesIO()
    with av.open(io.BytesIO(film), "r") as source, av.open(out, "w", format="mov") as copy:
        stream: Any = copy.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    data = bytearray(out.getvalue())
    matrix = {90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), 270: (0, 1, -1, 0)}[degrees]
    a, b, c, d = (value << 16 for value in matrix)
    struct.pack_into(">9i", data, data.index(b"tkhd") + 44, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    with av.open(io.BytesIO(data), "r") as container:
        assert next(container.decode(video=0)).rotation % 360 == degrees
    array = make.video(bytes(data)).array
    np.testing.assert_array_equal(array, np.rot90(make.video(film).array, turns, axes=(1, 2)))


def test_clip_v4_varying_times(make: Any) -> None:
    times = [n if n < 15 else 15 + 5 * (n - 15) for n in range(30)]
    payload = make.video(make.clip(make.moving(30), times=times))
    assert make.numbers(payload) == list(range(30))


def test_clip_v5_sound_alone(make: Any) -> None:
    data = make.sound(make.sine(), RATE, "aac", "mp4")
    judge(lambda: make.video(data), Refused("no_stream"))
    assert make.audio(data, RATE).extent == (1, 1, RATE)


def test_clip_v6_half_a_file_without_its_index(make: Any, film: bytes) -> None:
    judge(lambda: make.video(film[: len(film) // 2]), Refused("truncated"))


def test_clip_v7_cut_with_its_index_first(make: Any) -> None:
    frames = [frame // 2 * 2 | make.picture(48, 64, seed) % 2 for seed, frame in enumerate(make.moving(30))]
    fast = make.index_first(make.clip(frames, options={"g": "10", "bf": "0", "qp": "10"}))
    assert fast.index(b"moov") < fast.index(b"mdat")
    cut = fast[: len(fast) * 6 // 10]
    judge(lambda: make.video(cut), Refused("truncated"))
    lenient = make.video(cut, options={"strict": False})
    seen = lenient.extent[0] - lenient.extent[0] % 2
    assert 0 < seen < 30 and make.numbers(lenient)[: seen - 1] == list(range(seen - 1))


def test_clip_v8_damaged_in_the_middle(make: Any) -> None:
    frames = [frame // 2 + make.picture(48, 64, seed) // 3 for seed, frame in enumerate(make.moving(30))]
    data = bytearray(make.clip(frames, options={"bf": "2", "g": "10"}))
    start = data.index(b"mdat")
    middle = start + (data.index(b"moov") - start) // 2
    data[middle : middle + 200] = bytes((37 * n + 11) & 255 for n in range(200))
    judge(lambda: make.video(bytes(data)), Refused("corrupt"))


def painted(colour: tuple[int, int, int], height: int = 48, width: int = 64, count: int = 4) -> list[NDArray[np.uint8]]:
    return [np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy() for _ in range(count)]


def test_clip_v11_alpha_is_ignored(make: Any) -> None:
    """The plane of a WebM's alpha lies beside its pictures; what they show opaque counts."""
    rgba = np.zeros((48, 64, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 253, 0
    for codec, container, pixels in (("libvpx-vp9", "webm", "yuva420p"), ("libvpx", "webm", "yuva420p"), ("ffv1", "matroska", "bgra")):
        options = {"auto-alt-ref": "0"} if codec.startswith("libvpx") else {}
        array = make.video(make.clip([rgba] * 4, codec, container, pixels=pixels, source="rgba", options=options), channels=4).array
        assert np.abs(array[..., :3].astype(int) - (253, 0, 0)).max() <= 4 and (array[..., 3] == 255).all()


@pytest.mark.parametrize(
    "codec, container, pixels, inner, outer", [("libvpx-vp9", "webm", "yuv420p", 3, 30), ("libx264", "mp4", "yuv444p", 2, 2)]
)
def test_clip_v12_odd_size(make: Any, codec: str, container: str, pixels: str, inner: int, outer: int) -> None:
    options = {"qp": "0"} if codec == "libx264" else {"lossless": "1"}
    array = make.video(make.clip(painted(COLOUR, 49, 65), codec, container, pixels=pixels, options=options)).array
    assert array.shape == (4, 49, 65, 3)
    off = np.abs(array.astype(int) - COLOUR)
    assert off[:, 1:-1, 1:-1].max() <= inner and off.max() <= outer


def test_clip_v13_ten_bits(make: Any) -> None:
    data = make.clip(painted(COLOUR), "libx265", "mp4", pixels="yuv420p10le", options={"x265-params": "log-level=none"})
    array = make.video(data).array
    assert array.dtype == np.uint8 and np.abs(array.astype(int) - COLOUR).max() <= 4


@pytest.mark.parametrize("full", [False, True])
def test_clip_v14_matrix_and_range(make: Any, full: bool) -> None:
    """Red by ITU-R 709: Y = 0.2126, Cb = -0.2126 / 1.8556, Cr = 0.5."""
    scale, foot = (255, 0) if full else (219, 16)
    values = (0.2126 * scale + foot, -0.2126 / 1.8556 * (255 if full else 224) + 128, 0.5 * (255 if full else 224) + 128)
    y, cb, cr = (min(255, round(value)) for value in values)
    frame = np.concatenate([np.full(64 * 48, y), np.full(32 * 24, cb), np.full(32 * 24, cr)]).astype(np.uint8).reshape(72, 64)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("libx264", rate=10, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = 1, 2 if full else 1
        picture = av.VideoFrame.from_ndarray(frame, format="yuv420p")
        picture.colorspace, picture.color_range = 1, 2 if full else 1
        file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    assert np.abs(make.video(out.getvalue()).array.astype(int) - (255, 0, 0)).max() <= 5


def test_clip_v15_pixels_keep_their_stored_shape(make: Any) -> None:
    from fractions import Fraction

    data = make.clip(make.moving(4), context={"sample_aspect_ratio": Fraction(2, 1)})
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].sample_aspect_ratio == 2
    assert make.video(data).extent == (4, 48, 64)


def test_clip_v18_one_frame_late_starts_and_streams_cut_anywhere(make: Any, film: bytes) -> None:
    assert make.video(make.clip(make.moving(1)), tube_frames=1).extent == (1, 48, 64)
    late = make.video(recut(film, "mp4", 0.0, 5.0))
    assert make.numbers(late) == list(range(30))
    cut = make.video(recut(film, "mpegts", 1.0, 0.6))
    assert make.numbers(cut) == list(range(10, 30))


@pytest.mark.parametrize("lost", [5, 8, 30, 40, 60])
def test_clip_v18_a_broadcast_joined_between_key_frames_begins_at_the_next(make: Any, lost: int) -> None:
    data = make.clip(make.moving(30), "libx264", "mpegts", options={"g": "10", "bf": "2"})
    seen = make.numbers(make.video(data[188 * lost :]))
    assert seen in (list(range(10, 30)), list(range(20, 30)))


def test_clip_v19_no_times_at_all(make: Any) -> None:
    for codec, container in (("libx264", "h264"), ("libx265", "hevc")):
        options = {"bf": "2"} if codec == "libx264" else {"x265-params": "log-level=none:bframes=2"}
        payload = make.video(make.clip(make.moving(30), codec, container, options=options))
        seen = make.numbers(payload)
        assert len(seen) == 30 and np.abs(np.array(seen) - np.arange(30)).max() <= 1


# ---- texts


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfmark", b"a\r\nb", b"a\0b", b"caf\xe9", "utf-16".encode("utf-16"), b"\xed\xa0\x80",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467".encode(), b"\0", bytes(range(256)),
    ],
    ids=["mark", "line ends", "NUL", "Latin-1", "UTF-16", "lone surrogate", "family", "one NUL", "every byte"],
)  # fmt: skip
def test_text_x1_bytes_pass_unchanged(make: Any, data: bytes) -> None:
    payload = decode(Modality.TEXT, data, make.shape())
    assert payload.array.tobytes() == data and payload.grid == (len(data), 1, 1) and not payload.truncated
    if data.startswith("\U0001f469".encode()):
        assert len(data) == 18


@pytest.mark.parametrize("cut", ["tail", "head"])
@pytest.mark.parametrize("room", range(4, 18))
def test_text_x2_a_cut_falls_between_code_points_of_valid_text_alone(make: Any, room: int, cut: Any) -> None:
    valid = "\U0001f469é\U0001f469aé\U0001f467".encode()
    shape = make.shape(room + (2 if cut == "head" else 1))
    seen = decode(Modality.TEXT, valid, shape, DecodeOptions(), cut).array.tobytes()
    seen.decode()
    assert valid.startswith(seen) if cut == "tail" else valid.endswith(seen)
    assert min(room, len(valid)) - 3 <= len(seen) <= room
    broken = valid[:-1]
    seen = decode(Modality.TEXT, broken, shape, DecodeOptions(), cut).array.tobytes()
    assert len(seen) == min(room, len(broken))


def test_text_x3_no_bytes(make: Any) -> None:
    judge(lambda: decode(Modality.TEXT, b"", make.shape()), Refused("empty"))
