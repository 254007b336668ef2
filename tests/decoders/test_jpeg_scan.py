"""JPEGs of unusual chroma sampling: the walk over their codes accepts what is whole and finds what is damaged."""

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from treadle.decoders import DecodeError
from treadle.decoders.jpeg_scan import check_scans
from treadle.decoders.limits import Deadline

FIELDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "restarts": {"subsampling": 2, "restart_marker_blocks": 3},
    "own tables": {"optimize": True, "quality": 95},
    "coarse": {"quality": 5},
}


def walk(data: bytes) -> None:
    check_scans(memoryview(data), Deadline(60))


def unusual(make: Any, height: int = 48, width: int = 64) -> bytes:
    """Luma of 2 x 2 blocks, one chroma of 2 x 1, the other of 1 x 1: made by relabelling a JPEG whose units hold as many blocks.

    A 4:4:4 picture in units of 1 + 1 + 1 blocks has no such twin, so the scan is encoded by hand: every block is its mean alone.
    """
    sampling = ((2, 2), (2, 1), (1, 1))
    units = (-(-height // 16), -(-width // 16))
    lengths = [0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]  # ITU-T T.81, table K.3
    sizes = list(range(12))
    codes: dict[int, str] = {}
    code = place = 0
    for bits, count in enumerate(lengths, 1):
        for size in sizes[place : place + count]:
            codes[size] = f"{code:0{bits}b}"
            code += 1
        place += count
        code <<= 1
    draw = np.random.default_rng(0)
    last = [0, 0, 0]
    out = ""
    for _ in range(units[0] * units[1]):
        for component, (across, down) in enumerate(sampling):
            for _ in range(across * down):
                value = int(draw.integers(-40, 40))
                step, last[component] = value - last[component], value
                size = abs(step).bit_length()
                out += codes[size] + (f"{step if step > 0 else step + (1 << size) - 1:0{size}b}" if size else "") + "0"
    out += "1" * (-len(out) % 8)
    scan = int(out, 2).to_bytes(len(out) // 8, "big").replace(b"\xff", b"\xff\0")

    def segment(marker: int, body: bytes) -> bytes:
        return bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body

    frame = bytes([8]) + height.to_bytes(2, "big") + width.to_bytes(2, "big") + b"\3"
    frame += b"".join(bytes((number + 1, across << 4 | down, 0)) for number, (across, down) in enumerate(sampling))
    return b"".join(
        [
            b"\xff\xd8",
            segment(0xDB, bytes(1) + bytes([16] * 64)),
            segment(0xC0, frame),
            segment(0xC4, bytes([0x00, *lengths, *sizes])),
            segment(0xC4, bytes([0x10, 1, *[0] * 15, 0])),
            segment(0xDA, bytes([3, 1, 0, 2, 0, 3, 0, 0, 63, 0])),
            scan,
            b"\xff\xd9",
        ]
    )


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_whole_scans_pass(make: Any, fields: str, mode: str) -> None:
    for size in ((61, 83), (8, 8), (1, 1), (16, 48)):
        walk(make.save(Image.fromarray(make.picture(*size)).convert(mode), "JPEG", **FIELDS[fields]))


@pytest.mark.parametrize("fields", ["4:2:0", "restarts", "own tables"])
def test_what_libjpeg_warns_of_is_found(make: Any, fields: str) -> None:
    """The fast path's library reports every warning; the walk must find at least what it reports, and be right beyond that."""
    data = make.save(make.picture(61, 83), "JPEG", **FIELDS[fields])
    start = data.index(b"\xff\xda") + 14
    draw = np.random.default_rng(1)
    told = found = 0
    for _ in range(150):
        damaged = bytearray(data)
        for place in draw.integers(start, len(data) - 2, 3).tolist():
            damaged[place] ^= 1 << int(draw.integers(8))
        try:
            simplejpeg.decode_jpeg(bytes(damaged), "RGB", strict=True)
            warned = False
        except ValueError:
            warned = True
        try:
            walk(bytes(damaged))
            seen = False
        except DecodeError:
            seen = True
        told, found = told + warned, found + seen
        assert seen or not warned
    assert 25 < told <= found


def test_unusual_sampling_is_decoded_and_its_damage_found(make: Any) -> None:
    data = unusual(make)
    with pytest.raises(ValueError, match="subsampling"):
        simplejpeg.decode_jpeg(data, "RGB")
    payload = make.image(data)
    assert payload.extent == (1, 48, 64)
    with Image.open(io.BytesIO(data)) as picture:
        np.testing.assert_array_equal(payload.array, np.asarray(picture.convert("RGB")))
    scan = data.index(b"\xff\xda") + 14
    refusals = 0
    for place in range(scan, len(data) - 2):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        try:
            make.image(bytes(damaged))
        except DecodeError as error:
            assert error.kind in ("corrupt", "truncated")
            refusals += 1
    assert refusals > (len(data) - 2 - scan) * 0.9
    for cut in range(scan, len(data)):
        with pytest.raises(DecodeError):
            make.image(data[:cut])
    with pytest.raises(DecodeError):
        make.image(data[:-12] + data[-2:])
    np.testing.assert_array_equal(make.image(data[:-2], strict=False).array, payload.array)
    small = make.image(data, columns=3)
    assert small.tokens <= 2


def test_unusual_sampling_that_is_progressive_is_not_read(make: Any) -> None:
    data = unusual(make).replace(b"\xff\xc0", b"\xff\xc2")
    with pytest.raises(DecodeError) as caught:
        make.image(data)
    assert caught.value.kind in ("unsupported", "corrupt")


def test_markers_between_and_around(make: Any) -> None:
    data = make.save(make.picture(24, 24), "JPEG")
    place = data.index(b"\xff\xda")
    walk(data[:place] + b"\xff\xff\xff" + data[place + 1 :])
    walk(data[:place] + b"\xff\xfe\0\4hi" + data[place:])
    for damaged in (
        data[:place] + b"\0" + data[place:],
        data.replace(b"\xff\xc4\0", b"\xff\xfe\0"),
        data[:place] + data[place + 14 :],
    ):
        with pytest.raises((DecodeError, KeyError, IndexError)):
            walk(damaged)
