"""Recordings of every layout, rate and codec: the same sine, its level kept, its length exact where the format states it."""

import struct
from typing import Any

import numpy as np
import pytest

from treadle.decoders import DecodeError, Payload

LAYOUTS = {"mono": 1, "stereo": 2, "2.1": 3, "quad": 4, "5.0": 5, "5.1": 6, "6.1": 7, "7.1": 8}


def level(payload: Payload) -> float:
    """Peak of the sine, by its mean square away from the ends."""
    middle = payload.array[2000:-2000].astype(np.float64)
    return float(np.sqrt(2 * (middle**2).mean()))


def refused(make: Any, data: bytes, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        make.audio(data, **options)
    return caught.value.kind


# ---- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "codec, container, rate",
    [("flac", "flac", 44_100), ("pcm_s24le", "wav", 44_100), ("pcm_s16le", "mov", 44_100), ("pcm_f32le", "matroska", 44_100), ("flac", "matroska", 48_000)],
)  # fmt: skip
def test_layouts_average_to_what_each_channel_holds(make: Any, codec: str, container: str, rate: int, layout: str) -> None:
    payload = make.audio(make.sound([make.sine(1.0, rate)] * LAYOUTS[layout], rate, codec, container, layout=layout), rate)
    assert payload.extent == (1, 1, rate) and abs(level(payload) - 0.125) < 1e-4


@pytest.mark.parametrize("layout", ["mono", "stereo", "quad", "5.0", "5.1", "6.1", "7.1"])
@pytest.mark.parametrize("container", ["ogg", "webm"])
def test_opus_layouts(make: Any, container: str, layout: str) -> None:
    """Eight planes are what the codec library answers nine of."""
    data = make.sound([make.sine(1.0, 48_000)] * LAYOUTS[layout], 48_000, "libopus", container, layout=layout)
    payload = make.audio(data, 48_000)
    # The encoder low-passes the subwoofer of these layouts: one of the channels may be lost.
    least = 0.125 * (1 - (layout in ("5.1", "6.1", "7.1")) / LAYOUTS[layout])
    assert abs(payload.extent[2] - 48_000) <= 312 and least - 0.005 < level(payload) < 0.13


@pytest.mark.parametrize("layout, channels", [("9 channels", 9), ("hexadecagonal", 16), ("22.2", 24)])
@pytest.mark.parametrize("codec, container", [("libopus", "ogg"), ("pcm_s16le", "matroska")])
def test_more_channels_than_planes(make: Any, codec: str, container: str, layout: str, channels: int) -> None:
    options = {"mapping_family": "255"} if codec == "libopus" else {}
    data = make.sound([make.sine(1.0, 48_000)] * channels, 48_000, codec, container, layout=layout, options=options)
    payload = make.audio(data, 48_000)
    assert payload.extent == (1, 1, 48_000) and abs(level(payload) - 0.125) < 0.003


def test_a_wav_of_very_many_channels(make: Any) -> None:
    samples = (make.sine(0.01, 16_000) * 32767).astype("<i2")
    data = make.wav(np.repeat(samples, 300).tobytes(), channels=300, rate=16_000)
    assert np.abs(make.audio(data).array - samples / 32768).max() < 1e-6
    assert refused(make, make.wav(bytes(8000), channels=2000)) == "too_large"


# ---- rates and codecs


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_mp3_of_every_version(make: Any, rate: int, layout: str) -> None:
    samples = [make.sine(1.0, rate)] * LAYOUTS[layout]
    payload = make.audio(make.sound(samples, rate, "libmp3lame", "mp3", layout=layout), rate)
    assert payload.extent == (1, 1, rate) and 0.11 < level(payload) < 0.13


@pytest.mark.parametrize("samples", [47, 100, 575, 576, 577, 1151, 1152, 2000, 9999])
def test_a_short_mp3_holds_what_was_encoded(make: Any, samples: int) -> None:
    assert make.audio(make.sound(make.sine()[:samples], 44_100, "libmp3lame", "mp3"), 44_100).extent == (1, 1, samples)


@pytest.mark.parametrize("samples", [1, 46, 47, 500, 1152])
def test_padding_of_more_than_a_frame_is_dropped_whole(make: Any, samples: int) -> None:
    """What a tag of LAME's says of a very short recording: 576 samples before, and up to two frames' worth behind."""
    data = bytearray(make.sound(make.sine()[:500], 44_100, "libmp3lame", "mp3"))
    tag = data.index(b"Info")
    frames = int.from_bytes(data[tag + 8 : tag + 12], "big")
    place = data.index(b"Lav", tag) + 21
    assert int.from_bytes(data[place : place + 3], "big") == 576 << 12 | frames * 1152 - 576 - 500
    data[place : place + 3] = (576 << 12 | frames * 1152 - 576 - samples).to_bytes(3, "big")
    assert make.audio(bytes(data), 44_100).extent == (1, 1, samples)


def test_a_tag_of_variable_bit_rate_with_a_table_and_without(make: Any) -> None:
    data = make.sound(make.sine(), 44_100, "libmp3lame", "mp3", options={"qscale": "4", "flags": "+qscale", "global_quality": "472"})
    assert make.audio(data, 44_100).extent == (1, 1, 44_100)
    plain = bytearray(data)
    tag = max(plain.find(b"Xing"), plain.find(b"Info"))
    plain[tag + 4 : tag + 8] = bytes(4)  # says nothing: no frames, no bytes, no table, no quality
    assert make.audio(bytes(plain), 44_100).extent[2] >= 44_100


@pytest.mark.parametrize("codec, container, rate, slack", [("aac", "ipod", 8_000, 0), ("aac", "ipod", 96_000, 0), ("aac", "adts", 44_100, 2048), ("aac", "mpegts", 44_100, 2048), ("aac", "matroska", 44_100, 1024), ("alac", "ipod", 44_100, 0), ("ac3", "matroska", 48_000, 1536), ("eac3", "mpegts", 48_000, 1536), ("mp2", "mpegts", 44_100, 1152), ("mp2", "wav", 44_100, 1152), ("libmp3lame", "wav", 44_100, 1152), ("libmp3lame", "matroska", 44_100, 0), ("libmp3lame", "avi", 44_100, 2304), ("flac", "flac", 655_350, 0), ("flac", "ogg", 96_000, 0), ("flac", "avi", 44_100, 0), ("adpcm_ima_wav", "wav", 44_100, 2048), ("adpcm_ms", "avi", 44_100, 2048), ("adpcm_yamaha", "wav", 44_100, 2048), ("adpcm_swf", "wav", 44_100, 4096), ("g726", "wav", 8_000, 0), ("pcm_alaw", "mov", 44_100, 0), ("pcm_mulaw", "avi", 44_100, 0), ("pcm_s16be", "mov", 44_100, 0), ("pcm_s8", "mov", 44_100, 0), ("pcm_f64le", "matroska", 44_100, 0), ("libopus", "mp4", 48_000, 312), ("libopus", "mpegts", 48_000, 960)])  # fmt: skip
def test_codecs_in_every_container(make: Any, codec: str, container: str, rate: int, slack: int) -> None:
    payload = make.audio(make.sound(make.sine(1.0, rate), rate, codec, container), rate)
    assert 0 <= payload.extent[2] - rate + (slack if codec.startswith("libopus") else 0) <= 2 * slack
    assert 0.115 < level(payload) < 0.13


@pytest.mark.parametrize("rate", [8_000, 12_000, 16_000, 24_000, 48_000])
def test_opus_plays_at_48_khz_whatever_went_in(make: Any, rate: int) -> None:
    payload = make.audio(make.sound(make.sine(1.0, rate), rate, "libopus", "ogg"), 16_000)
    assert payload.extent == (1, 1, 16_000) and abs(level(payload) - 0.125) < 0.005


@pytest.mark.parametrize("kind, container", [("pcm_s16le", "w64"), ("pcm_s16be", "aiff"), ("pcm_s16be", "au"), ("pcm_s16le", "caf")])
def test_containers_that_are_not_read_say_so(make: Any, kind: str, container: str) -> None:
    assert refused(make, make.sound(make.sine(0.1), 44_100, kind, container)) == "unsupported"


# ---- WAV headers


@pytest.mark.parametrize("bits, stored", [(20, 24), (12, 16), (4, 8), (24, 32), (18, 24)])
def test_samples_narrower_than_their_place_lie_at_its_upper_end(make: Any, bits: int, stored: int) -> None:
    """As the format's definition says: the container's size counts, unused lower bits are zero."""
    words = np.round(make.sine(0.1) * 2.0 ** (stored - 1)).astype(np.int64) >> stored - bits << stored - bits
    if stored == 8:
        sound = (words + 128).astype("u1").tobytes()
    else:
        sound = b"".join(int(word).to_bytes(stored // 8, "little", signed=True) for word in words)
    data = bytearray(make.wav(sound, bits=stored))
    data[34:36] = struct.pack("<H", bits)
    assert np.abs(make.audio(bytes(data), 44_100).array - words / 2.0 ** (stored - 1)).max() < 1e-6


@pytest.mark.parametrize("tag, kind, bits", [(1, "<i2", 16), (3, "<f4", 32), (6, "u1", 8), (7, "u1", 8)])
def test_the_extensible_header_names_the_same_formats(make: Any, tag: int, kind: str, bits: int) -> None:
    samples = make.sine(0.1)
    coded = {"<i2": samples * 32767, "<f4": samples, "u1": np.arange(len(samples)) % 256}[kind].astype(kind).tobytes()
    guid = struct.pack("<H", tag) + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    plain = make.wav(coded, tag=tag, bits=bits)
    extensible = make.wav(coded, tag=0xFFFE, bits=bits, extra=struct.pack("<HHI", 22, bits, 4) + guid)
    np.testing.assert_array_equal(make.audio(extensible, 44_100).array, make.audio(plain, 44_100).array)


def test_a_stated_average_rate_of_nonsense_is_not_believed(make: Any) -> None:
    data = bytearray(make.wav((make.sine(0.1) * 32767).astype("<i2").tobytes()))
    data[28:32] = struct.pack("<I", 1)
    assert make.audio(bytes(data), 44_100).extent == (1, 1, 4410)


def test_a_bw64_is_an_rf64(make: Any) -> None:
    data = make.sound(make.sine(), 44_100, "pcm_s16le", "wav", container_options={"rf64": "always"})
    assert make.audio(b"BW64" + data[4:], 44_100).extent == (1, 1, 44_100)


def test_block_formats_lack_nothing(make: Any) -> None:
    data = make.sound(make.sine(), 44_100, "adpcm_ms", "wav")
    for cut in (1, 100, 1024, len(data) // 2, len(data) - 100):
        assert refused(make, data[:-cut]) == "truncated"


# ---- headers that lie, streams that are not there


def test_a_flac_whose_md5_is_wrong_is_judged_by_its_frames(make: Any) -> None:
    data = bytearray(make.sound(make.sine(), 44_100, "flac", "flac"))
    data[26:42] = bytes(range(16))
    assert make.audio(bytes(data), 44_100).extent == (1, 1, 44_100)


def test_a_flac_frame_that_is_gone_is_missed(make: Any) -> None:
    data = make.sound(make.sine(), 44_100, "flac", "flac")
    starts = [at for at in range(42, len(data) - 1) if data[at : at + 2] == b"\xff\xf8"]
    gone = data[: starts[2]] + data[starts[3] :]
    assert refused(make, gone) in ("truncated", "corrupt")


@pytest.mark.parametrize("gain_db", [-12.0, -0.5, 6.0, 20.0])
def test_opus_gain_is_applied_and_clipped(make: Any, gain_db: float) -> None:
    from treadle.decoders.ogg import page_checksum

    data = bytearray(make.sound(make.sine(1.0, 48_000), 48_000, "libopus", "ogg"))
    end = data.index(b"OggS", 4)
    head = data.index(b"OpusHead")
    data[head + 16 : head + 18] = struct.pack("<h", round(gain_db * 256))
    data[22:26] = bytes(4)
    data[22:26] = struct.pack("<I", page_checksum(bytes(data[:end])))
    payload = make.audio(bytes(data), 48_000)
    if gain_db == 20.0:
        assert float(np.abs(payload.array).max()) == 1.0, "ten times 0.125 is more than there is"
    else:
        assert abs(level(payload) / (0.125 * 10 ** (gain_db / 20)) - 1) < 0.02


def test_a_stream_without_packets_is_empty(make: Any) -> None:
    data = make.sound(make.sine()[:0], 44_100, "pcm_s16le", "wav")
    assert refused(make, data) == "empty"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_sound_of_several_that_is_marked(make: Any, order: tuple[int, int]) -> None:
    import io
    from fractions import Fraction

    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        streams: list[Any] = [file.add_stream("aac", rate=44_100, layout=("mono", "stereo")[which]) for which in order]
        for number in range(20):
            for which, stream in zip(order, streams, strict=True):
                peak = 0.1 * (1 + which)
                row = peak * np.sin(2 * np.pi * 440 * (np.arange(1024) + 1024 * number) / 44_100)
                block = np.tile(row.astype(np.float32), (1 + which, 1))
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=("mono", "stereo")[which])
                frame.sample_rate, frame.pts, frame.time_base = 44_100, 1024 * number, Fraction(1, 44_100)
                file.mux(stream.encode(frame))
        for stream in streams:
            file.mux(stream.encode(None))
    assert abs(level(make.audio(out.getvalue(), 44_100)) - 0.1 * (1 + order[0])) < 0.01
