"""Files cut at every offset, and every critical byte of a checksum damaged: the whole content or a refusal, never a part of it.

Formats that state no total and end between two frames like a whole file (a broadcast, a raw stream) answer what is there: whole
frames of the whole file, in order.
"""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode
from treadle.decoders.ogg import page_checksum
from treadle.shape import AudioShape, ImageShape, Modality, VideoShape

OFFSETS = 250
"""At most so many cuts of one file, spread evenly, beside the 40 first and last ones."""
HERE = DecodeOptions(isolate=False, max_pixels=1 << 22)


def stills(make: Any) -> dict[str, bytes]:
    rgb = make.picture(24, 40)
    rgba = np.dstack([rgb, rgb[..., :1]])
    frames = [Image.fromarray(make.picture(16, 16, seed)) for seed in range(2)]
    return {
        "jpeg": make.save(rgb, "JPEG", quality=80),
        "progressive": make.save(rgb, "JPEG", progressive=True),
        "restarts": make.save(rgb, "JPEG", restart_marker_blocks=2),
        "grey jpeg": make.save(Image.fromarray(rgb).convert("L"), "JPEG"),
        "cmyk": make.save(Image.fromarray(rgb).convert("CMYK"), "JPEG"),
        "png": make.save(rgba, "PNG"),
        "black png": make.save(Image.new("RGB", (40, 24)), "PNG"),
        "palette": make.save(Image.fromarray(rgb).quantize(16), "PNG"),
        "apng": make.save(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "webp": make.save(rgba, "WEBP"),
        "lossless": make.save(rgba, "WEBP", lossless=True),
        "animated": make.save(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": make.save(frames[0].quantize(), "GIF", save_all=True, append_images=[frames[1].quantize()]),
        "bmp": make.save(rgb[:8], "BMP"),
        "avif": make.save(rgb, "AVIF"),
    }


def clips(make: Any) -> dict[str, bytes]:
    frames = [frame // 2 + make.picture(32, 32, seed) // 4 for seed, frame in enumerate(make.moving(5, 32, 32))]
    quiet = {"x265-params": "log-level=none"}
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    return {
        "mp4": make.clip(frames),
        "index first": make.index_first(make.clip(frames)),
        "fragmented": make.clip(frames, container_options=fragments, options={"g": "2"}),
        "mov": make.clip(frames, "mpeg4", "mov"),
        "hevc": make.clip(frames, "libx265", "mp4", options=quiet),
        "webm": make.clip(frames, "libvpx-vp9", "webm"),
        "mkv": make.clip(frames, "libx264", "matroska"),
        "live": make.clip(frames, "libvpx", "webm", container_options={"live": "1", "cluster_time_limit": "200"}),
        "ts": make.clip(frames, "libx264", "mpegts"),
        "avi": make.clip(frames, "mpeg4", "avi"),
        "raw": make.clip(frames, "libx264", "h264", options={"bf": "0"}),
    }


def sounds(make: Any) -> dict[str, bytes]:
    samples, wide = make.sine(0.2), make.sine(0.2, 48_000)
    return {
        "wav": make.wav((samples * 32767).astype("<i2").tobytes()),
        "adpcm": make.sound(samples, 44_100, "adpcm_ms", "wav"),
        "flac": make.sound(samples, 44_100, "flac", "flac"),
        "flac in ogg": make.sound(samples, 44_100, "flac", "ogg"),
        "mp3": make.sound(samples, 44_100, "libmp3lame", "mp3"),
        "bare mp3": make.sound(samples, 44_100, "libmp3lame", "mp3", container_options={"write_xing": "0"}),
        "opus": make.sound(wide, 48_000, "libopus", "ogg"),
        "vorbis": make.sound([samples] * 2, 44_100, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"}),
        "m4a": make.sound(samples, 44_100, "aac", "ipod"),
        "alac": make.sound(samples, 44_100, "alac", "ipod"),
        "adts": make.sound(samples, 44_100, "aac", "adts"),
        "weba": make.sound(wide, 48_000, "libopus", "webm"),
    }


NAMES = {
    Modality.IMAGE: (stills, "jpeg progressive restarts,grey jpeg,cmyk png,black png,palette apng webp lossless animated gif bmp avif"),
    Modality.VIDEO: (clips, "mp4,index first,fragmented mov hevc webm mkv live ts avi raw"),
    Modality.AUDIO: (sounds, "wav adpcm flac,flac in ogg,mp3,bare mp3,opus vorbis m4a alac adts weba"),
}
NO_TOTAL = {"live", "ts", "raw", "bare mp3", "adts", "fragmented"}
"""End between frames like a whole file."""
CASES = [
    (modality, name)
    for modality, (_, names) in NAMES.items()
    for part in names.split(",")
    for name in ([part] if part in ("grey jpeg", "black png", "index first", "flac in ogg", "bare mp3") else part.split())
]


@pytest.fixture(scope="module")
def files(make: Any) -> dict[tuple[Modality, str], bytes]:
    return {(modality, name): data for modality, (build, _) in NAMES.items() for name, data in build(make).items()}


def test_every_file_is_cut(files: dict[tuple[Modality, str], bytes]) -> None:
    assert sorted(files) == sorted(CASES)


@pytest.mark.parametrize("modality, name", CASES)
def test_cut_anywhere(make: Any, files: dict[tuple[Modality, str], bytes], modality: Modality, name: str) -> None:
    data = files[modality, name]
    shape = make.shape(4001, image=ImageShape(patch_side=8), video=VideoShape(patch_side=8), audio=AudioShape(chunk_samples=160))
    whole = decode(modality, data, shape, HERE)
    size = len(data)
    cuts = {*range(min(40, size)), *range(max(0, size - 40), size), *np.linspace(0, size - 1, OFFSETS).astype(int).tolist()}
    if name == "ts":
        cuts |= set(range(0, size, 188))
    refusals: dict[str, int] = {}
    for cut in sorted(cuts):
        try:
            payload = decode(modality, data[:cut], shape, HERE)
        except DecodeError as error:
            assert error.kind in ("empty", "truncated", "corrupt", "unsupported"), (cut, error)
            refusals[error.kind] = refusals.get(error.kind, 0) + 1
            continue
        if name in NO_TOTAL:
            assert_begins(payload, whole)
        elif name == "wav":
            # Less than a sample's two bytes may lack; resampled, that is one sample at most.
            assert size - cut < 2 and whole.extent[2] - payload.extent[2] <= 1
        else:
            assert payload.extent == whole.extent, cut
            np.testing.assert_array_equal(payload.array, whole.array, err_msg=f"cut at {cut} of {size}")
    assert refusals.get("truncated", 0) + refusals.get("corrupt", 0) > len(cuts) // 3, refusals


def assert_begins(part: Payload, whole: Payload) -> None:
    if part.array.ndim == 1:
        # The resampler has not seen what follows.
        count = max(0, len(part.array) - 40)
        np.testing.assert_allclose(part.array[:count], whole.array[:count], atol=1e-4)
        return
    # Frames in between may lack, which come later in the file than those that they lie between; each one is whole. Of a raw
    # stream's last frame the last byte may lack, which nothing tells, and the one behind it may repeat it.
    places = [[n for n, other in enumerate(whole.array) if np.array_equal(frame, other)] for frame in part.array[:-2]]
    assert all(places) and [min(place) for place in places] == sorted(min(place) for place in places)


@pytest.mark.parametrize("name", ["png", "palette", "apng"])
def test_every_bit_of_a_critical_chunk_counts(make: Any, files: dict[tuple[Modality, str], bytes], name: str) -> None:
    """Length, name, body and checksum of IHDR, PLTE and IDAT; an APNG's later frames are none of its default image."""
    data = files[Modality.IMAGE, name]
    expected = make.image(data, 4).array
    at = 8
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in (b"IHDR", b"PLTE", b"IDAT", b"tRNS"):
            for place in {*range(at, at + 16), *range(at + length, at + length + 12), at + 8 + length // 2}:
                damaged = bytearray(data)
                damaged[place] ^= 1 << place % 8
                with pytest.raises(DecodeError):
                    # A name whose fifth bit is flipped is another chunk, which may be passed over only where nothing is lost.
                    payload = make.image(bytes(damaged), 4)
                    assert not np.array_equal(payload.array, expected), (kind, place)
        at += 12 + length


def test_every_byte_of_an_ogg_page_counts(make: Any, files: dict[tuple[Modality, str], bytes]) -> None:
    data = files[Modality.AUDIO, "opus"]
    assert page_checksum(data[:22] + bytes(4) + data[26 : data.index(b"OggS", 4)]) == int.from_bytes(data[22:26], "little")
    last = data.rindex(b"OggS")
    for place in {*range(28), *range(last, last + 27), *range(last + 27, len(data), 97)}:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DecodeError):
            make.audio(bytes(damaged))


def test_every_byte_of_a_flac_frame_counts(make: Any, files: dict[tuple[Modality, str], bytes]) -> None:
    """Frame headers have a CRC-8 and frames a CRC-16; the description block is believed where it is possible."""
    data = files[Modality.AUDIO, "flac"]
    first = data.index(b"\xff\xf8", 42)
    expected = make.audio(data).array
    for place in range(first, len(data), max(1, (len(data) - first) // 200)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        try:
            seen = make.audio(bytes(damaged)).array
        except DecodeError:
            continue
        np.testing.assert_array_equal(seen, expected)
