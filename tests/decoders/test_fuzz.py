"""Damaged files of every format: only DecodeError comes out, and what decodes fits its row.

The mutations are drawn from a fixed seed, so that a failure is found again by its number. `make fuzz` goes on for hours, guided by
the coverage of the decoders' own code (fuzz_decoders.py), from the same seeds.
"""

import random
import resource
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode, probe
from treadle.shape import AudioShape, ImageShape, Modality, VideoShape

MUTATIONS = 100
"""For each of the seeds below."""
LEAST_INPUTS = 3000
"""Over all of them."""
FORMATS = {
    "picture": "jpeg progressive grey restarts cmyk png palette apng webp lossless animated gif bmp avif",
    "clip": "mp4 fragmented mov webm vp8 mkv ts hevc avi raw av1",
    "sound": "wav float rf64 alaw adpcm flac oggflac mp3 baremp3 opus eight vorbis m4a alac adts weba",
}

BITS, CUT, REMOVED, INSERTED, HEADER, SIZES, COPIED = range(7)


def mutated(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    kind = draw.randrange(7)
    place = draw.randrange(len(out))
    if kind == BITS:
        for _ in range(draw.randint(1, 8)):
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    elif kind == CUT:
        del out[max(1, place) :]
    elif kind == REMOVED:
        del out[place : place + draw.randint(1, 64)]
    elif kind == INSERTED:
        out[place:place] = draw.randbytes(draw.randint(1, 64))
    elif kind == HEADER:
        for _ in range(draw.randint(1, 6)):
            out[draw.randrange(min(len(out), 512))] = draw.choice((0, 255, 127, 128, draw.randrange(256)))
    elif kind == SIZES:
        out[place : place + 4] = draw.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\0\0\1", b"\1\0\0\0"))
    else:
        source, count = draw.randrange(len(out)), draw.randint(1, 256)
        out[place : place + count] = out[source : source + count]
    return bytes(out) or b"\0"


def picture_seeds(make: Any) -> dict[str, bytes]:
    rgb = make.picture(40, 56)
    rgba = np.dstack([rgb, rgb[..., :1]])
    frames = [Image.fromarray(make.picture(24, 24, seed)) for seed in range(3)]
    return {
        "jpeg": make.save(rgb, "JPEG", quality=85),
        "progressive": make.save(rgb, "JPEG", progressive=True),
        "grey": make.save(Image.fromarray(rgb).convert("L"), "JPEG"),
        "restarts": make.save(rgb, "JPEG", restart_marker_blocks=2),
        "cmyk": make.save(Image.fromarray(rgb).convert("CMYK"), "JPEG"),
        "png": make.save(rgba, "PNG"),
        "palette": make.save(Image.fromarray(rgb).quantize(), "PNG"),
        "apng": make.save(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "webp": make.save(rgba, "WEBP"),
        "lossless": make.save(rgba, "WEBP", lossless=True),
        "animated": make.save(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": make.save(frames[0].quantize(), "GIF", save_all=True, append_images=[f.quantize() for f in frames[1:]]),
        "bmp": make.save(rgb, "BMP"),
        "avif": make.save(rgb, "AVIF"),
    }


def clip_seeds(make: Any) -> dict[str, bytes]:
    frames = [frame // 2 + make.picture(48, 64, seed) // 2 for seed, frame in enumerate(make.moving(6))]
    return {
        "mp4": make.clip(frames),
        "fragmented": make.clip(frames, container_options={"movflags": "frag_keyframe+empty_moov"}, options={"g": "3"}),
        "mov": make.clip(frames, "mpeg4", "mov"),
        "webm": make.clip(frames, "libvpx-vp9", "webm"),
        "vp8": make.clip(frames, "libvpx", "webm"),
        "mkv": make.clip(frames, "mpeg4", "matroska"),
        "ts": make.clip(frames, "libx264", "mpegts"),
        "hevc": make.clip(frames, "libx265", "mp4", options={"x265-params": "log-level=none"}),
        "avi": make.clip(frames, "mpeg4", "avi"),
        "raw": make.clip(frames, "libx264", "h264"),
        "av1": make.clip(frames, "libsvtav1", "mp4", options={"svtav1-params": "lp=1"}),
    }


def sound_seeds(make: Any) -> dict[str, bytes]:
    samples = make.sine(0.4)
    return {
        "wav": make.wav((samples * 32767).astype("<i2").tobytes()),
        "float": make.wav(samples.astype("<f4").tobytes(), tag=3, bits=32),
        "rf64": make.sound(samples, 44_100, "pcm_s16le", "wav", container_options={"rf64": "always"}),
        "alaw": make.sound(samples, 44_100, "pcm_alaw", "wav"),
        "adpcm": make.sound(samples, 44_100, "adpcm_ms", "wav"),
        "flac": make.sound(samples, 44_100, "flac", "flac"),
        "oggflac": make.sound(samples, 44_100, "flac", "ogg"),
        "baremp3": make.sound(samples, 44_100, "libmp3lame", "mp3", container_options={"write_xing": "0"}),
        "eight": make.sound([make.sine(0.1, 48_000)] * 8, 48_000, "libopus", "ogg", layout="7.1"),
        "mp3": make.sound(samples, 44_100, "libmp3lame", "mp3"),
        "opus": make.sound(make.sine(0.4, 48_000), 48_000, "libopus", "ogg"),
        "vorbis": make.sound([samples, samples], 44_100, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"}),
        "m4a": make.sound(samples, 44_100, "aac", "ipod"),
        "alac": make.sound(samples, 44_100, "alac", "ipod"),
        "adts": make.sound(samples, 44_100, "aac", "adts"),
        "weba": make.sound(make.sine(0.4, 48_000), 48_000, "libopus", "webm"),
    }


@pytest.mark.parametrize("family", ["picture", "clip", "sound"])
def test_damage_raises_decode_errors_alone(make: Any, family: str) -> None:
    seeds = {"picture": picture_seeds, "clip": clip_seeds, "sound": sound_seeds}[family](make)
    assert sorted(seeds) == sorted(FORMATS[family].split())
    assert MUTATIONS * sum(len(names.split()) for names in FORMATS.values()) >= LEAST_INPUTS
    modality = {"picture": Modality.IMAGE, "clip": Modality.VIDEO, "sound": Modality.AUDIO}[family]
    shape = make.shape(129, image=ImageShape(patch_side=8), video=VideoShape(patch_side=8, channels=3), audio=AudioShape(chunk_samples=160))
    outcomes: dict[str, int] = {}
    decode(modality, next(iter(seeds.values())), shape)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, data in seeds.items():
        draw = random.Random(f"{family} {name}")
        for number in range(MUTATIONS):
            damaged = mutated(data, draw)
            options = DecodeOptions(isolate=False, strict=number % 4 != 0, max_pixels=1 << 22, max_wall_s=120)
            try:
                payload = decode(modality, damaged, shape, options)
            except DecodeError as error:
                assert error.kind != "timeout", (name, number)
                outcomes[error.kind] = outcomes.get(error.kind, 0) + 1
            else:
                check(payload, modality)
                outcomes["decoded"] = outcomes.get("decoded", 0) + 1
            try:
                seen = probe(modality, damaged, shape, options)
                assert min(seen.grid) >= 1 and np.prod(seen.grid) <= 128
            except DecodeError:
                pass
    assert {"decoded", "corrupt", "truncated"} <= outcomes.keys(), outcomes
    # A picture of 2**22 pixels, the most allowed here, takes 16 MiB of RGBA and a few such beside it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 << 10


def check(payload: Payload, modality: Modality) -> None:
    assert 1 <= payload.tokens <= 128
    frames, height, width = payload.extent
    wanted = {Modality.IMAGE: (height, width, 4), Modality.VIDEO: (frames, height, width, 3), Modality.AUDIO: (width,)}[modality]
    assert payload.array.shape == wanted
    if modality is Modality.AUDIO:
        assert np.isfinite(payload.array).all() and np.abs(payload.array).max() <= 1
