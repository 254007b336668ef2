"""Every stored form of a recording to the same sine, exact in length, and every damage refused."""

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders import DecodeError, decode, probe
from treadle.decoders.ogg import page_checksum
from treadle.shape import AudioShape, Modality

RATE = 44_100


def refused(make: Any, data: bytes, **options: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        make.audio(data, **options)
    return caught.value.kind


def rms(samples: NDArray[Any]) -> float:
    return float(np.sqrt((samples.astype(np.float64) ** 2).mean()))


def pcm(samples: NDArray[np.float64], kind: str) -> bytes:
    if kind == "u1":
        return np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    if kind[-2] == "f":
        return bytes(samples.astype(kind).tobytes())
    if kind[-2:] == "i3":
        words = np.round(samples * (2**23 - 1)).astype(np.int64)
        return np.stack([words & 255, words >> 8 & 255, words >> 16 & 255], -1).astype(np.uint8).tobytes()
    return bytes(np.round(samples * (2 ** (8 * int(kind[-1]) - 1) - 1)).astype(kind).tobytes())


@pytest.mark.parametrize(
    "kind, tag, bits, within",
    [("u1", 1, 8, 0.01), ("<i2", 1, 16, 1e-4), ("<i3", 1, 24, 1e-6), ("<i4", 1, 32, 1e-6), ("<f4", 3, 32, 1e-7), ("<f8", 3, 64, 1e-7)],
)
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_wav_sample_formats(make: Any, kind: str, tag: int, bits: int, within: float, channels: int) -> None:
    samples = make.sine()
    data = make.wav(pcm(np.repeat(samples, channels), kind), tag=tag, bits=bits, channels=channels)
    payload = make.audio(data, RATE)
    assert (payload.grid, payload.extent, payload.truncated) == ((441, 1, 1), (1, 1, RATE), False)
    assert payload.array.dtype == np.float32
    assert np.abs(payload.array - samples).max() <= within


def test_big_endian_wav(make: Any) -> None:
    samples = make.sine(0.1)
    for kind, tag, bits in ((">i2", 1, 16), (">f4", 3, 32)):
        assert np.abs(make.audio(make.wav(pcm(samples, kind), tag=tag, bits=bits, order=">"), RATE).array - samples).max() < 1e-4


@pytest.mark.parametrize("codec", ["pcm_mulaw", "pcm_alaw"])
def test_companded_wav_equals_the_codec_librarys(make: Any, codec: str) -> None:
    samples = make.sine(peak=0.9)
    data = make.sound(samples, RATE, codec, "wav")
    ours = make.audio(data, RATE).array
    assert np.abs(ours - samples).max() < 0.03
    # The same codes in a container that goes through the codec library.
    theirs = make.audio(make.sound(samples, RATE, codec, "mov"), RATE).array
    np.testing.assert_array_equal(ours, theirs)


def test_extensible_wav(make: Any) -> None:
    extra = struct.pack("<HHI", 22, 16, 0) + struct.pack("<H", 1) + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    samples = make.sine(0.1)
    assert np.abs(make.audio(make.wav(pcm(samples, "<i2"), tag=0xFFFE, extra=extra), RATE).array - samples).max() < 1e-4


def test_a_container_wider_than_its_samples(make: Any) -> None:
    """12 bits in 16: the frame's size says how wide a sample lies."""
    samples = make.sine(0.1)
    data = bytearray(make.wav(pcm(samples, "<i2")))
    data[34:36] = struct.pack("<H", 12)
    assert np.abs(make.audio(bytes(data), RATE).array - samples).max() < 1e-4


@pytest.mark.parametrize("codec", ["adpcm_ms", "adpcm_ima_wav"])
def test_adpcm_is_read_to_its_end(make: Any, codec: str) -> None:
    samples = make.sine()
    data = make.sound(samples, RATE, codec, "wav")
    array = make.audio(data, RATE).array
    assert RATE <= len(array) <= RATE + 2048 and np.abs(array[:RATE] - samples).max() < 0.05
    fact = data.index(b"fact") + 8
    stated = data[:fact] + struct.pack("<I", RATE) + data[fact + 4 :]
    assert len(make.audio(stated, RATE).array) == RATE


# ---- sizes in a WAV's header


def test_sizes_are_claims(make: Any) -> None:
    sound = pcm(make.sine(), "<i2")
    size = len(sound)
    chunk = b"LIST" + struct.pack("<I", 4) + b"INFO"
    for name, data, count in (
        ("piped", make.wav(sound, data_size=0xFFFFFFFF, riff_size=0xFFFFFFFF), RATE),
        ("never filled in", make.wav(sound, data_size=0, riff_size=0), RATE),
        ("data size zero, other size right", make.wav(sound, data_size=0), RATE),
        ("data size doubled", make.wav(sound, data_size=2 * size), RATE),
        ("last byte lost", make.wav(sound)[:-1], RATE - 1),
        ("junk before", make.wav(sound, before=b"JUNK" + struct.pack("<I", 28) + bytes(28)), RATE),
        ("odd chunk, padded", make.wav(sound, before=b"LIST" + struct.pack("<I", 3) + b"abc\0"), RATE),
        ("odd chunk, not padded", make.wav(sound, before=b"LIST" + struct.pack("<I", 3) + b"abc"), RATE),
        ("chunk behind", make.wav(sound, after=chunk), RATE),
        ("ID3 behind", make.wav(sound, after=b"id3 " + struct.pack("<I", 10) + b"ID3\3\0\0\0\0\0\0"), RATE),
        ("garbage behind", make.wav(sound) + b"\x07garbage", RATE),
        ("half a frame at the end", make.wav(sound + b"\0"), RATE),
    ):
        payload = make.audio(data, RATE)
        assert payload.extent == (1, 1, count), name
        assert np.abs(payload.array - make.sine()[:count]).max() < 1e-4, name


def test_rf64(make: Any) -> None:
    sound = pcm(make.sine(), "<i2")
    sizes = struct.pack("<QQQI", 36 + 36 + len(sound), len(sound), RATE, 0)
    plain = make.wav(sound, data_size=0xFFFFFFFF)
    data = b"RF64\xff\xff\xff\xffWAVE" + b"ds64" + struct.pack("<I", 28) + sizes + plain[12:] + b"LIST" + struct.pack("<I", 4) + b"INFO"
    assert make.audio(data, RATE).extent == (1, 1, RATE)
    assert refused(make, data[: len(data) // 2]) == "truncated"


def test_half_a_wav_is_refused_or_on_request_kept(make: Any) -> None:
    data = make.wav(pcm(make.sine(), "<i2"))
    half = data[: 44 + RATE]
    assert refused(make, half) == "truncated"
    assert make.audio(half, RATE, strict=False).extent == (1, 1, RATE // 2)


def test_no_sound_is_empty(make: Any) -> None:
    data = make.wav(pcm(make.sine(), "<i2"))
    assert refused(make, data[:44]) == "empty"
    assert refused(make, make.wav(b"")) == "empty"
    assert refused(make, make.wav(b"", after=b"LIST" + struct.pack("<I", 4) + b"INFO")) == "empty"
    assert refused(make, data[:40]) == "truncated"
    assert refused(make, data[:20]) == "truncated"


@pytest.mark.parametrize(
    "field, value, kind",
    [
        ("channels", 0, "corrupt"),
        ("rate", 0, "unsupported"),
        ("rate", 4_000_000, "unsupported"),
        ("bits", 0, "unsupported"),
        ("tag", 0x1234, "unsupported"),
    ],
)
def test_impossible_wav_headers(make: Any, field: str, value: int, kind: str) -> None:
    data = bytearray(make.wav(pcm(make.sine(0.1), "<i2")))
    place, form = {"tag": (20, "<H"), "channels": (22, "<H"), "rate": (24, "<I"), "bits": (34, "<H")}[field]
    struct.pack_into(form, data, place, value)
    if field == "bits":
        struct.pack_into("<H", data, 32, 0)
    with pytest.raises(DecodeError) as caught:
        make.audio(bytes(data))
    assert caught.value.kind in (kind, "corrupt")


# ---- values


def test_channels_are_averaged(make: Any) -> None:
    samples = make.sine(rate=16_000)
    antiphase = np.stack([samples, -samples], -1).ravel()
    assert not make.audio(make.wav(pcm(antiphase, "<i2"), channels=2, rate=16_000)).array.any()
    centre = np.zeros((len(samples), 6))
    centre[:, 2] = samples
    array = make.audio(make.wav(pcm(centre.ravel(), "<i2"), channels=6, rate=16_000)).array
    assert np.abs(array - samples / 6).max() < 1e-4


def test_loud_samples_are_clipped_and_none_may_be_infinite(make: Any) -> None:
    loud = make.audio(make.wav(pcm(make.sine(peak=2.5), "<f4"), tag=3, bits=32), RATE).array
    assert (loud.min(), loud.max()) == (-1.0, 1.0)
    for kind, bits in (("<f4", 32), ("<f8", 64)):
        for value in (np.nan, np.inf, -np.inf):
            samples = make.sine()
            samples[31_000] = value
            assert refused(make, make.wav(pcm(samples, kind), tag=3, bits=bits)) == "corrupt"
            assert refused(make, make.wav(pcm(np.repeat(samples, 2), kind), tag=3, bits=bits, channels=2)) == "corrupt"
            if kind == "<f4":
                assert refused(make, make.sound(samples, RATE, "pcm_f32le", "matroska")) == "corrupt"
    huge = make.sine()
    huge[5] = 1e300
    assert make.audio(make.wav(pcm(huge, "<f8"), tag=3, bits=64), RATE).array[5] == 1.0


# ---- codecs: lengths are exact, delays trimmed

CODED = [
    ("flac", "flac", RATE, 0),
    ("flac", "ogg", RATE, 0),
    ("alac", "ipod", RATE, 0),
    ("pcm_s16le", "matroska", RATE, 0),
    ("pcm_s16be", "mov", RATE, 0),
    ("libmp3lame", "mp3", RATE, 0.02),
    ("libopus", "ogg", 48_000, 0.02),
    ("libopus", "webm", 48_000, 0.02),
    ("libopus", "mp4", 48_000, 0.02),
    ("aac", "ipod", RATE, 0.02),
    ("aac", "mp4", RATE, 0.02),
]


@pytest.mark.parametrize("codec, container, rate, within", CODED)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_codecs(make: Any, codec: str, container: str, rate: int, within: float, layout: str) -> None:
    samples = make.sine(0.77, rate)
    count = len(samples)
    data = make.sound([samples] * (1 if layout == "mono" else 2), rate, codec, container, layout=layout)
    payload = make.audio(data, rate)
    slack = 312 if codec == "libopus" and container != "ogg" else 0
    assert abs(payload.extent[2] - count) <= slack
    seen = payload.array[:count]
    assert np.abs(seen - samples[: len(seen)])[2000:-2000].max() <= max(within, 1e-4)
    assert abs(rms(seen) - 0.125 / np.sqrt(2)) < 0.005
    estimate = probe(Modality.AUDIO, data, make.shape(100_000, audio=AudioShape(chunk_samples=100, sample_rate=rate)))
    assert not estimate.exact and (container == "flac" or abs(estimate.extent[2] - count) < 3000)


def test_vorbis(make: Any) -> None:
    samples = make.sine(3.0)
    array = make.audio(
        make.sound([samples, samples], RATE, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"}), RATE
    ).array
    # The encoder ends on whole blocks; what it made is read to the last position that the pages state.
    assert 0 <= len(array) - len(samples) < 1152
    assert np.abs(array[1000:-2000] - samples[1000 : len(array) - 2000]).max() < 0.03


def test_vorbis_on_one_page_keeps_its_last_samples(make: Any) -> None:
    samples = make.sine(0.2)
    data = make.sound([samples, samples], RATE, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"})
    assert data.count(b"OggS") <= 3
    (stated,) = struct.unpack_from("<q", data, data.rindex(b"OggS") + 6)
    assert make.audio(data, RATE).extent == (1, 1, stated)


def test_mp3_without_the_encoders_tag_keeps_its_delay(make: Any) -> None:
    data = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"write_xing": "0", "id3v2_version": "0"})
    count = make.audio(data, RATE).extent[2]
    assert count % 1152 == 0 and count >= RATE + 1105


def test_opus_header_gain_is_applied(make: Any) -> None:
    data = make.sound(make.sine(1.0, 48_000), 48_000, "libopus", "ogg")
    page = bytearray(data[: data.index(b"OggS", 4)])
    head = page.index(b"OpusHead")
    struct.pack_into("<h", page, head + 16, -6 * 256 * 1)
    page[22:26] = bytes(4)
    page[22:26] = struct.pack("<I", page_checksum(bytes(page)))
    quieter = make.audio(bytes(page) + data[len(page) :], 48_000).array
    # -6 dB is a factor of 10 ** (-6 / 20).
    assert abs(rms(quieter) / rms(make.audio(data, 48_000).array) - 10 ** (-6 / 20)) < 0.01


# ---- joined and chained files


@pytest.mark.parametrize(
    "codec, container, rate, chained",
    [
        ("flac", "flac", RATE, RATE),
        ("flac", "ogg", RATE, RATE),
        ("libmp3lame", "mp3", RATE, RATE),
        ("libopus", "ogg", 48_000, 48_000),
        ("pcm_s16le", "wav", RATE, RATE),
    ],
)
def test_joined_files_are_read_to_their_end(make: Any, codec: str, container: str, rate: int, chained: int) -> None:
    first, second = make.sine(0.6, rate, 440), make.sine(0.4, rate, 880)
    parts = [make.sound(samples, rate, codec, container) for samples in (first, second, first)]
    payload = make.audio(b"".join(parts), rate)
    assert payload.extent[2] == 2 * len(first) + len(second)
    joined = np.concatenate([make.audio(part, rate).array for part in parts])
    np.testing.assert_array_equal(payload.array, joined)


def test_rates_and_channels_may_change_between_links(make: Any) -> None:
    for codec, container in (("flac", "ogg"), ("flac", "flac"), ("libmp3lame", "mp3"), ("pcm_s16le", "wav")):
        slow = make.sine(0.5, 22_050)
        parts = [
            make.sound(make.sine(0.5), RATE, codec, container),
            make.sound([slow, slow], 22_050, codec, container, layout="stereo"),
            make.sound(make.sine(0.5), RATE, codec, container),
        ]
        payload = make.audio(b"".join(parts), 16_000)
        assert payload.extent[2] == 24_000, codec
        assert abs(rms(payload.array) - 0.125 / np.sqrt(2)) < 0.006


def test_tags_around_mp3_are_passed_over(make: Any) -> None:
    plain = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"id3v2_version": "0"})
    expected = make.audio(plain, RATE).array
    size = 1 << 20
    tag = b"ID3\3\0\0" + bytes(size >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(size)
    ape = b"APETAGEX" + struct.pack("<IIII", 2000, 32 + 10, 1, 0) + bytes(8) + bytes(10) + bytes(32)
    for data in (tag + plain, tag + tag + plain, plain + b"TAG" + bytes(125), plain + ape, plain + bytes(500), bytes(500) + plain):
        np.testing.assert_array_equal(make.audio(data, RATE).array, expected)


def test_cover_art_is_no_sound(make: Any) -> None:
    picture = make.save(make.picture(32, 32), "JPEG")
    block = struct.pack(">I", 3) + struct.pack(">I", 10) + b"image/jpeg" + struct.pack(">I", 0) + struct.pack(">4I", 32, 32, 24, 0)
    block += struct.pack(">I", len(picture)) + picture
    flac = make.sound(make.sine(), RATE, "flac", "flac")
    art = flac[:42] + b"\6" + len(block).to_bytes(3, "big") + block + flac[42:]
    np.testing.assert_array_equal(make.audio(art, RATE).array, make.audio(flac, RATE).array)


def test_a_film_has_sound_and_a_silent_film_none(make: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        make.audio(make.clip(make.moving(3)))
    assert caught.value.kind == "no_stream"


# ---- damage


@pytest.mark.parametrize("codec, container, rate, within", CODED)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_a_cut_recording_is_refused(make: Any, codec: str, container: str, rate: int, within: float, share: float) -> None:
    data = make.sound(make.sine(2.0, rate), rate, codec, container)
    assert refused(make, data[: int(len(data) * share)]) == "truncated"


@pytest.mark.parametrize("codec, container, rate", [("flac", "flac", RATE), ("libmp3lame", "mp3", RATE), ("pcm_s16le", "wav", RATE)])
def test_a_cut_recording_is_kept_on_request(make: Any, codec: str, container: str, rate: int) -> None:
    data = make.sound(make.sine(2.0, rate), rate, codec, container)
    payload = make.audio(data[: len(data) * 6 // 10], rate, strict=False)
    assert 0.8 * rate < payload.extent[2] < 1.3 * rate


def test_damage_that_checksums_tell_is_refused(make: Any) -> None:
    for codec, container, rate in (("flac", "flac", RATE), ("libopus", "ogg", 48_000), ("flac", "ogg", RATE)):
        data = bytearray(make.sound(make.sine(1.0, rate), rate, codec, container))
        data[len(data) // 2] ^= 0x55
        assert refused(make, bytes(data)) == "corrupt"


def test_lost_frames_and_pages_are_refused(make: Any) -> None:
    mp3 = make.sound(make.sine(2.0), RATE, "libmp3lame", "mp3")
    assert refused(make, mp3[: len(mp3) // 2] + mp3[len(mp3) // 2 + 100 :]) == "corrupt"
    # Opus pages of 20 ms packets: one in the middle goes.
    opus = make.sound(make.sine(5.0, 48_000), 48_000, "libopus", "ogg", container_options={"page_duration": "200000"})
    pages = [at for at in range(len(opus)) if opus.startswith(b"OggS", at)]
    assert len(pages) > 6
    assert refused(make, opus[: pages[3]] + opus[pages[4] :]) == "corrupt"
    # Without its last page the stream has no end.
    assert refused(make, opus[: pages[-1]]) == "truncated"
    assert make.audio(opus[: pages[-1]], strict=False).extent[2] > 16_000 * 4


def test_free_format_mp3_is_unsupported(make: Any) -> None:
    # A header of layer III with bit-rate index 0.
    assert refused(make, b"\xff\xfb\x00\x44" + bytes(2000)) == "unsupported"


def test_a_flac_that_states_more_samples_than_it_holds_is_refused(make: Any) -> None:
    data = bytearray(make.sound(make.sine(), RATE, "flac", "flac"))
    count = int.from_bytes(data[21:26], "big")
    data[21:26] = (count + 1).to_bytes(5, "big")
    assert refused(make, bytes(data)) == "truncated"
    data[21:26] = (count >> 36 << 36).to_bytes(5, "big")  # unknown
    assert make.audio(bytes(data), RATE).extent == (1, 1, RATE)


# ---- the row


@pytest.mark.parametrize("codec, container", [("pcm_s16le", "wav"), ("flac", "flac"), ("libmp3lame", "mp3")])
@pytest.mark.parametrize("tokens", [1, 7, 159, 160, 161])
def test_the_tail_is_cut_and_the_start_is_that_of_the_whole(make: Any, codec: str, container: str, tokens: int) -> None:
    data = make.sound(make.sine(1.0), RATE, codec, container)
    whole = make.audio(data, 16_000).array
    payload = make.audio(data, 16_000, columns=tokens + 1)
    count = min(16_000, 100 * tokens)
    assert (payload.extent, payload.truncated) == ((1, 1, count), count < 16_000)
    assert payload.grid == (-(-count // 100), 1, 1)
    np.testing.assert_array_equal(payload.array, whole[:count])


def test_a_long_recording_is_read_no_further_than_the_row(make: Any) -> None:
    """Damage behind what the row shows is not looked at, so an hour costs a second."""
    flac = bytearray(make.sound(make.sine(60.0), RATE, "flac", "flac"))
    flac[-1000] ^= 0x55
    payload = make.audio(bytes(flac), 16_000, columns=11)
    assert payload.truncated and payload.extent == (1, 1, 1000)


def test_seconds_are_limited(make: Any) -> None:
    data = make.wav(pcm(make.sine(2.0), "<i2"))
    assert refused(make, data, max_audio_s=1.9) == "too_large"
    assert make.audio(data, max_audio_s=2.0).extent == (1, 1, 32_000)
    assert make.audio(data, columns=11, max_audio_s=1.9).truncated


@pytest.mark.parametrize("forms", [1, 3])
def test_probing_a_wav_counts_its_samples(make: Any, forms: int) -> None:
    data = make.wav(pcm(make.sine(), "<i2")) * forms
    seen = probe(Modality.AUDIO, data, make.shape(100_000))
    assert seen.extent == make.audio(data).extent == (1, 1, 16_000 * forms)


def test_decode_answers_what_the_grid_says(make: Any) -> None:
    payload = decode(Modality.AUDIO, make.wav(pcm(make.sine(0.123), "<i2")), make.shape())
    assert payload.grid == (-(-payload.extent[2] // 100), 1, 1)
