"""Damage to a clip's times and headers: an edit list drops frames whose times are damaged, demuxers pass over what has no name they know,
and decoders over pictures that they cannot read, all without a word. One bit turned is refused, or changes no number of frames."""

import io
import struct
from typing import Any

import av
import pytest

from treadle.decoders import DecodeError

FRAMES = 24
PARENTS = {b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl"}


@pytest.fixture(scope="module")
def clip(make: Any) -> bytes:
    return bytes(make.clip(make.moving(FRAMES), options={"bf": "2"}))


@pytest.mark.parametrize(
    "kind, most",
    [(b"stts", 1), (b"ctts", 4), (b"stsc", 0), (b"stsz", 0), (b"tkhd", 0), (b"mdhd", 3), (b"elst", 2)],
)
def test_damage_to_a_table_is_seen(make: Any, clip: bytes, kind: bytes, most: int) -> None:
    """A few bits leave a file that is as good as another, a shorter one: a track that begins later, or has more ticks a second."""
    [(start, end)] = [(start, end) for name, start, end in make.boxes(clip, PARENTS) if name == kind]
    counts = [make.turned(clip, place, bit) for place in range(start, min(end, start + 96)) for bit in range(8)]
    silent = [count for count in counts if count not in (-1, FRAMES)]
    assert len(silent) <= most, silent
    assert counts.count(-1) >= 32


@pytest.mark.parametrize("kind", [b"mvhd", b"tkhd", b"mdhd"])
def test_a_header_that_is_missing_is_missed(make: Any, clip: bytes, kind: bytes) -> None:
    place = next(start for name, start, _ in make.boxes(clip, PARENTS) if name == kind)
    assert all(make.turned(clip, place + byte, bit) == -1 for byte in range(4, 9) for bit in range(7))


def test_the_first_fragment_is_not_passed_over(make: Any) -> None:
    data = make.clip(make.moving(FRAMES), options={"g": "8"}, container_options={"movflags": "frag_keyframe+empty_moov"})
    place = data.index(b"moof")
    assert data.count(b"moof") == 3
    assert all(make.turned(data, place + byte, bit) == -1 for byte in range(4) for bit in range(8))


def packets(data: bytes) -> list[tuple[int, int]]:
    """Where each packet stands, and its bytes."""
    container: Any
    with av.open(io.BytesIO(data)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(container.streams[0]) if packet.size]


def test_a_vp9_frame_is_not_hidden(make: Any) -> None:
    options = {"lag-in-frames": "12", "auto-alt-ref": "1", "deadline": "good", "cpu-used": "5", "b": "100k"}
    data = make.clip([make.picture(48, 64, number // 3) for number in range(FRAMES)], "libvpx-vp9", "webm", options=options)
    assert make.video(data, columns=100_000).extent[0] == FRAMES
    refused = 0
    for place, size in packets(data):
        # The packet is what the block ends with.
        length = size + 4
        size_bytes = next(count for count in range(1, 5) if length < (1 << 7 * count) - 1)
        header = b"\xa3" + (length | 1 << 7 * size_bytes).to_bytes(size_bytes, "big") + b"\x81"
        at = data.find(header, place - 16, place + 16)
        if at < 0:
            continue
        first = at + len(header) + 3
        assert data[first] >> 6 == 2, "a VP9 frame begins with its marker"
        # The bits that say: shown already, and to be shown.
        for bit in (3, 1):
            count = make.turned(data, first, bit)
            assert count in (-1, FRAMES), (first, bit)
            refused += count < 0
    assert refused >= FRAMES


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_an_hevc_picture_is_not_left_out(make: Any, container: str) -> None:
    data = make.clip(make.moving(FRAMES), "libx265", container, options={"x265-params": "log-level=none:keyint=8:bframes=2"})
    assert make.video(data, columns=100_000).extent[0] == FRAMES
    refused = 0
    for place, size in packets(data)[1::4]:
        begin = place if container == "mp4" else data.index(struct.pack(">I", size - 4), place)
        for byte in range(begin + 4, begin + 7):
            for bit in range(8):
                count = make.turned(data, byte, bit)
                assert count in (-1, FRAMES), (byte, bit)
                refused += count < 0
    assert refused >= 40


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
@pytest.mark.parametrize("options", [{}, {"bf": "3"}])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_editlist": "0"},
        {"video_track_timescale": "90000"},
        {"movie_timescale": "48000"},
        {"movflags": "negative_cts_offsets"},
        {"movflags": "frag_keyframe"},
        {"movflags": "frag_every_frame+empty_moov"},
        {"movflags": "frag_keyframe+delay_moov"},
    ],
)
@pytest.mark.parametrize("times", ["even", "late", "two rates", "uneven"])
def test_what_writers_do_is_no_damage(make: Any, codec: str, options: dict[str, str], fields: dict[str, str], times: str) -> None:
    if (codec != "libx264" and fields) or (codec == "mpeg4" and options):
        # One codec stands for all in the containers' own choices.
        return
    at = {
        "even": list(range(FRAMES)),
        "late": [50 + number for number in range(FRAMES)],
        "two rates": [number if number < 12 else 11 + 5 * (number - 11) for number in range(FRAMES)],
        "uneven": [3 * number + number * number % 3 for number in range(FRAMES)],
    }[times]
    extra = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    data = make.clip(make.moving(FRAMES), codec, options={"g": "8", **options, **extra}, container_options=fields, times=at)
    assert make.video(data, columns=100_000).extent[0] == FRAMES


def heard(make: Any, data: bytes, place: int, bit: int) -> int:
    """Samples of the recording with one bit turned; -1 where it is refused."""
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    try:
        return int(make.audio(bytes(damaged)).extent[2])
    except DecodeError:
        return -1


@pytest.mark.parametrize("frame_ms", ["2.5", "20", "60"])
def test_how_long_an_opus_packet_lasts_is_said_twice(make: Any, frame_ms: str) -> None:
    data = make.sound(make.sine(1.0, 48_000), 48_000, "libopus", "mp4", options={"frame_duration": frame_ms})
    places = [place for place, _ in packets(data)]
    counts = [heard(make, data, place, bit) for place in places[:-1:5] for bit in range(8)]
    # The bandwidth and the channels change no length.
    assert set(counts) == {-1, 16_000} and counts.count(-1) >= len(counts) // 3


@pytest.mark.parametrize("frame_ms", ["2.5", "5", "10", "20", "40", "60"])
@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_steady_opus_is_no_damage(make: Any, frame_ms: str, container: str) -> None:
    data = make.sound(make.sine(1.0, 48_000), 48_000, "libopus", container, options={"frame_duration": frame_ms})
    assert make.audio(data).extent[2] == 16_000


def test_a_block_is_not_laced_where_its_track_has_no_laces(make: Any) -> None:
    data = make.sound(make.sine(1.0, 48_000), 48_000, "libopus", "webm")
    places = [place for place, _ in packets(data)]
    for place in places[1:-1:6]:
        track = data.index(b"\x81", place, place + 6)
        assert all(heard(make, data, track + 3, bit) == -1 for bit in (1, 2))


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
def test_an_avi_chunk_is_as_long_as_it_says(make: Any, codec: str) -> None:
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    data = make.clip(make.moving(FRAMES), codec, "avi", pixels=pixels)
    assert make.video(data, columns=100_000).extent[0] == FRAMES
    movi, index = data.index(b"movi") - 8, data.index(b"idx1")
    places = [place for place in range(movi + 12, index - 8) if data[place : place + 4] == b"00dc"]
    assert len(places) == FRAMES
    counts = [make.turned(data, start + byte, bit) for start in (movi, *places[1::6]) for byte in range(4, 8) for bit in range(8)]
    # A byte more or less ends at, or in, what pads a chunk or is too short to be one.
    assert set(counts) <= {-1, FRAMES} and counts.count(FRAMES) <= 8
