"""Resident memory of a decode, in a process of its own: the payload, one decoded frame and a constant, whatever the file's length."""

import json
import struct
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image

CONSTANT_MIB = 14
"""Codec libraries, their tables, reference frames of small pictures, blocks of samples and allocator slack."""
HELD_MIB = 64
"""What frames may take that wait for their clip's scale."""
SCRIPT = """
import json, pathlib, sys
from treadle.decoders import DecodeOptions, decode
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape
def peak():
    # Not getrusage's: there a process inherits the peak of the one that started it.
    return next(int(line.split()[1]) for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
modality, warm, file, tokens = Modality[sys.argv[1]], sys.argv[2], sys.argv[3], int(sys.argv[4])
def shape(columns):
    return BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=columns, image=ImageShape(patch_side=16, channels=3),
        video=VideoShape(patch_side=16), audio=AudioShape(chunk_samples=160))
here = DecodeOptions(isolate=False)
decode(modality, pathlib.Path(warm).read_bytes(), shape(99), here)
data = pathlib.Path(file).read_bytes()
before = peak()
payload = decode(modality, data, shape(tokens + 1), here)
after = peak()
sys.stdout.write(json.dumps({"grown": (after - before) / 1024, "payload": payload.array.nbytes / 2**20, "extent": payload.extent}))
"""

REFUSED = """
from treadle.decoders import DecodeError
try:
    decode(modality, data, shape(tokens), here)
except DecodeError as error:
    kind = error.kind
after = peak()
sys.stdout.write(json.dumps({"grown": (after - before) / 1024, "kind": kind}))
"""


def grown(tmp_path: Any, modality: str, warm: bytes, data: bytes, tokens: int) -> dict[str, Any]:
    return run(SCRIPT, tmp_path, modality, warm, data, tokens)


def refused(tmp_path: Any, modality: str, warm: bytes, data: bytes) -> dict[str, Any]:
    return run(SCRIPT.split("payload = ")[0] + REFUSED, tmp_path, modality, warm, data, 999)


def run(script: str, tmp_path: Any, modality: str, warm: bytes, data: bytes, tokens: int) -> dict[str, Any]:
    files = [tmp_path / "warm", tmp_path / "data"]
    for file, content in zip(files, (warm, data), strict=True):
        file.write_bytes(content)
    command = [sys.executable, "-P", "-c", script, modality, *map(str, files), str(tokens)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer


@pytest.mark.parametrize("codec, container", [("libx264", "mp4"), ("libvpx", "webm")])
def test_a_long_clip_takes_its_payload_and_no_more(make: Any, tmp_path: Any, codec: str, container: str) -> None:
    noise = [make.picture(360, 640, number) for number in range(2)]
    options = {"preset": "ultrafast"} if codec == "libx264" else {"deadline": "realtime", "cpu-used": "8"}
    data = make.clip((noise[number % 2] for number in range(120)), codec, container, options=options)
    warm = make.clip(make.moving(2), codec, container)
    frame_mib = 640 * 360 * 1.5 / 2**20
    # 120 frames of 640 x 360 are 79 MiB; a row may hold them all, or 20 of them.
    for frames in (20, 120):
        seen = grown(tmp_path, "VIDEO", warm, data, frames // 2 * 40 * 23)
        assert seen["extent"] == [frames, 360, 640]
        assert seen["grown"] < seen["payload"] + frame_mib + CONSTANT_MIB
    # Scaled to a small row the payload is nothing, and 16 frames wait undecided for their scale.
    small = grown(tmp_path, "VIDEO", warm, data, 64)
    assert small["grown"] < min(16 * frame_mib, HELD_MIB) + CONSTANT_MIB


PICTURES: dict[str, dict[str, Any]] = {
    "JPEG": {"format": "JPEG"},
    "JPEG of inks": {"format": "JPEG", "mode": "CMYK"},
    "PNG": {"format": "PNG"},
    "PNG with alpha": {"format": "PNG", "mode": "RGBA"},
    "PNG with a palette": {"format": "PNG", "mode": "P"},
    "PNG with a transparent colour": {"format": "PNG", "transparency": (1, 2, 3)},
    "GIF": {"format": "GIF", "mode": "P"},
    "BMP": {"format": "BMP"},
    "WebP": {"format": "WEBP"},
    "WebP without loss": {"format": "WEBP", "lossless": True, "method": 0, "quality": 0},
    "WebP with alpha": {"format": "WEBP", "mode": "RGBA"},
}


@pytest.mark.parametrize("tokens", [96 * 128, 48 * 80])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_takes_itself_decoded_once(make: Any, tmp_path: Any, name: str, tokens: int) -> None:
    """At its size and scaled down; straight to the payload where it is decoded as that lies."""
    fields = dict(PICTURES[name])
    kind, mode = fields.pop("format"), fields.pop("mode", "RGB")
    fields |= {"compress_level": 1} if kind == "PNG" else {}
    picture = Image.fromarray(make.picture(1536, 2048)).convert(mode)
    data = make.save(picture, kind, **fields)
    seen = grown(tmp_path, "IMAGE", make.save(make.picture(16, 16), kind), data, tokens)
    full = tokens == 96 * 128
    assert (seen["extent"] == [1, 1536, 2048]) == full
    # The library holds RGB in four bytes; libwebp holds all of a picture without loss, and of one with alpha its alpha.
    frames = 0 if full and name in ("JPEG", "WebP") else 1 if full or kind != "WEBP" or name == "WebP" else 2
    assert seen["grown"] < seen["payload"] + frames * 1536 * 2048 * 4 / 2**20 + CONSTANT_MIB


@pytest.mark.parametrize(
    "codec, container, rate",
    [
        ("pcm_s16le", "wav", 8_000),
        ("pcm_s16le", "wav", 16_000),
        ("pcm_s16le", "mov", 16_000),
        ("adpcm_ms", "wav", 8_000),
        ("flac", "flac", 8_000),
        ("libmp3lame", "mp3", 8_000),
        ("libopus", "ogg", 8_000),
    ],
)
def test_a_long_recording_takes_its_payload_and_no_more(make: Any, tmp_path: Any, codec: str, container: str, rate: int) -> None:
    # Ten minutes are 37 MiB of float32 at 16 kHz: twice that is far beyond the constant.
    data = make.sound(make.sine(600.0, rate), rate, codec, container)
    seen = grown(tmp_path, "AUDIO", make.sound(make.sine(0.5, rate), rate, codec, container), data, 60_500)
    assert abs(seen["extent"][2] - 600 * 16_000) < 4_000
    assert seen["grown"] < seen["payload"] + CONSTANT_MIB


@pytest.mark.parametrize("table", [b"stsz", b"stz2"])
def test_samples_without_bytes_take_nothing(make: Any, tmp_path: Any, table: bytes) -> None:
    """Times of four billion samples, whose sizes are said to be there."""
    clip = make.clip(make.moving(24))
    data = bytearray(clip)
    struct.pack_into(">I", data, data.index(b"stts") + 12, 2**32 - 1)
    at = data.index(b"stsz")
    data[at : at + 4] = table
    struct.pack_into(">II", data, at + 8, 16 if table == b"stz2" else 1, 2**32 - 1)
    seen = refused(tmp_path, "VIDEO", clip, bytes(data))
    assert seen["kind"] == "corrupt" and seen["grown"] < 4


def test_a_bomb_takes_nothing(make: Any, tmp_path: Any) -> None:
    """A picture of 20,000 x 20,000 pixels in 389 KB, refused by its header."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + make.png_chunk(b"IHDR", header) + make.png_chunk(b"IDAT", bytes(389_000)) + make.png_chunk(b"IEND", b"")
    seen = refused(tmp_path, "IMAGE", make.save(make.picture(16, 16), "PNG"), data)
    assert seen["kind"] == "too_large" and seen["grown"] < 4
