"""The catalogue's recordings: one second of 440 Hz at 44.1 kHz, peak 0.125, unless a row says otherwise."""

import struct
from typing import Any

import numpy as np
import pytest

from treadle.decoders import DecodeError, Payload

RATE = 44_100


def refused(make: Any, data: bytes, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        make.audio(data, **options)
    return caught.value.kind


def is_sine(payload: Payload, samples: int, within: float = 0.001, length: int = 0, rate: int = RATE) -> None:
    assert abs(payload.extent[2] - samples) <= length
    middle = payload.array[2000:-2000]
    assert abs(float(np.abs(middle).max()) - 0.125) <= within
    assert abs(float(np.sqrt((middle.astype(np.float64) ** 2).mean())) - 0.125 / np.sqrt(2)) <= within
    crossings = np.count_nonzero(np.diff(np.signbit(middle)))
    assert abs(crossings - 880 * len(middle) / rate) <= 3, "440 periods a second"


@pytest.fixture(scope="module")
def wav(make: Any) -> bytes:
    return bytes(make.sound(make.sine(), RATE, "pcm_s16le", "wav"))


@pytest.mark.parametrize(
    "codec, within",
    [
        ("pcm_u8", 0.01), ("pcm_s16le", 1e-4), ("pcm_s24le", 1e-4), ("pcm_s32le", 1e-4), ("pcm_f32le", 1e-4),
        ("pcm_f64le", 1e-4), ("pcm_mulaw", 0.004), ("pcm_alaw", 0.004),
    ],
)  # fmt: skip
def test_a1_sample_formats(make: Any, codec: str, within: float) -> None:
    is_sine(make.audio(make.sound(make.sine(), RATE, codec, "wav"), RATE), RATE, within)


def test_a1_64_bits(make: Any) -> None:
    data = np.round(make.sine() * 2.0**62 * 2).astype("<i8").tobytes()
    is_sine(make.audio(make.wav(data, bits=64), RATE), RATE, 1e-4)


def test_a1_extensible_and_rf64(make: Any) -> None:
    six = make.sound([make.sine()] * 6, RATE, "pcm_s24le", "wav", layout="5.1")
    assert six[20:22] == b"\xfe\xff"
    is_sine(make.audio(six, RATE), RATE, 1e-4)
    rf64 = make.sound(make.sine(), RATE, "pcm_s16le", "wav", container_options={"rf64": "always"})
    assert rf64[:4] == b"RF64"
    is_sine(make.audio(rf64, RATE), RATE, 1e-4)


def test_a2_packed_stereo_is_not_twice_as_long(make: Any) -> None:
    is_sine(make.audio(make.sound([make.sine()] * 2, RATE, "pcm_s16le", "wav", layout="stereo"), RATE), RATE, 1e-4)


def with_data_size(wav: bytes, size: int, riff: int | None = None) -> bytes:
    out, place = bytearray(wav), wav.index(b"data") + 4
    struct.pack_into("<I", out, place, size)
    if riff is not None:
        struct.pack_into("<I", out, 4, riff)
    return bytes(out)


def test_a3_piped_sizes(make: Any, wav: bytes) -> None:
    is_sine(make.audio(with_data_size(wav, 0xFFFFFFFF, 0xFFFFFFFF), RATE), RATE)
    is_sine(make.audio(with_data_size(wav, 0, 0), RATE), RATE)


def test_a5_sizes_that_lie(make: Any, wav: bytes) -> None:
    is_sine(make.audio(with_data_size(wav, 4 * RATE), RATE), RATE)
    is_sine(make.audio(wav[:-1], RATE), RATE - 1)
    half = wav[: wav.index(b"data") + 8 + RATE]
    assert refused(make, half) == "truncated"
    is_sine(make.audio(half, RATE, strict=False), RATE // 2)


def test_a6_nothing_in_it(make: Any, wav: bytes) -> None:
    assert refused(make, wav[: wav.index(b"data") + 8]) == "empty"
    assert refused(make, b"") == "empty"


def test_a7_chunks_around(make: Any, wav: bytes) -> None:
    for data in (
        wav + b"id3 " + struct.pack("<I", 10) + b"ID3\3\0\0\0\0\0\0",
        wav[:12] + b"JUNK" + struct.pack("<I", 28) + bytes(28) + wav[12:],
        wav[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + wav[12:],
        wav[:12] + b"LIST" + struct.pack("<I", 3) + b"abc" + wav[12:],
    ):
        is_sine(make.audio(data, RATE), RATE)


def test_a9_beyond_one_and_beyond_numbers(make: Any) -> None:
    loud = make.sine(peak=2.5).astype("<f4")
    assert float(np.abs(make.audio(make.wav(loud.tobytes(), tag=3, bits=32), RATE).array).max()) == 1.0
    for value in (np.nan, np.inf, -np.inf):
        loud[1000] = value
        assert refused(make, make.wav(loud.tobytes(), tag=3, bits=32)) == "corrupt"


def test_a10_mp3_with_its_encoders_tag(make: Any) -> None:
    is_sine(make.audio(make.sound(make.sine(), RATE, "libmp3lame", "mp3", bit_rate=128_000), RATE), RATE, 0.01)


def test_a11_mp3_without_it_keeps_delay_and_padding(make: Any) -> None:
    data = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"write_xing": "0", "id3v2_version": "0"})
    assert make.audio(data, RATE).extent == (1, 1, 46_080) and 46_080 == 40 * 1152


def test_a12_a_mebibyte_of_tag(make: Any) -> None:
    data = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"write_xing": "0", "id3v2_version": "0"})
    size = 1 << 20
    tag = b"ID3\3\0\0" + bytes(size >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(size)
    assert make.audio(tag + data, RATE).extent == (1, 1, 46_080)


def test_a13_album_art(make: Any) -> None:
    picture = make.save(make.picture(64, 64), "JPEG")
    frame = b"\0image/jpeg\0\3\0" + picture
    body = b"APIC" + struct.pack(">I", len(frame)) + b"\0\0" + frame
    tag = b"ID3\3\0\0" + bytes(len(body) >> shift & 127 for shift in (21, 14, 7, 0)) + body
    mp3 = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"id3v2_version": "0"})
    is_sine(make.audio(tag + mp3, RATE), RATE, 0.01)
    flac = make.sound(make.sine(), RATE, "flac", "flac")
    block = struct.pack(">II", 3, 10) + b"image/jpeg" + struct.pack(">6I", 0, 64, 64, 24, 0, len(picture)) + picture
    is_sine(make.audio(flac[:42] + b"\6" + len(block).to_bytes(3, "big") + block + flac[42:], RATE), RATE)


def test_a14_free_format(make: Any) -> None:
    assert refused(make, b"\xff\xfb\x00\x44" + bytes(2000)) == "unsupported"


def test_a16_half_an_mp3(make: Any) -> None:
    data = make.sound(make.sine(), RATE, "libmp3lame", "mp3", bit_rate=128_000)
    assert refused(make, data[: len(data) // 2]) == "truncated"
    assert make.audio(data[: len(data) // 2], RATE, strict=False).extent[2] >= 20_000


def test_a17_flac_without_a_total(make: Any) -> None:
    data = bytearray(make.sound(make.sine(), RATE, "flac", "flac"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    is_sine(make.audio(bytes(data), RATE), RATE)


@pytest.mark.parametrize("rate", [48_000, 16_000])
def test_a19_opus_pre_skip(make: Any, rate: int) -> None:
    data = make.sound(make.sine(1.0, rate), rate, "libopus", "ogg")
    is_sine(make.audio(data, 48_000), 48_000, 0.01, rate=48_000)


def test_a20_priming(make: Any) -> None:
    vorbis = make.sound([make.sine()] * 2, RATE, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"})
    is_sine(make.audio(vorbis, RATE), RATE, 0.02, length=1152)
    is_sine(make.audio(make.sound(make.sine(), RATE, "aac", "ipod"), RATE), RATE, 0.02)


def test_a21_ten_seconds_stay_ten(make: Any) -> None:
    data = make.sound(make.sine(10.0), RATE, "pcm_s16le", "wav")
    assert make.audio(data, 16_000).extent == (1, 1, 160_000)


def test_a22_downmix_is_the_plain_average(make: Any) -> None:
    samples = make.sine(rate=16_000)
    silence = np.zeros_like(samples)
    centre = make.sound([silence, silence, samples, silence, silence, silence], 16_000, "pcm_s24le", "wav", layout="5.1")
    assert np.abs(make.audio(centre).array - samples / 6).max() < 1e-4
    antiphase = make.sound([samples, -samples], 16_000, "pcm_s16le", "wav", layout="stereo")
    assert np.abs(make.audio(antiphase).array).max() <= 1 / 32768
