"""Files that are whole though their headers disagree, as other writers leave them: none is refused, each is counted by decoding."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

FRAMES = 24
PARENTS = {b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl"}
TS_PACKET_BYTES = 188


def place_of(make: Any, data: bytes, wanted: bytes) -> int:
    return int(next(place for kind, place, _ in make.boxes(data, PARENTS) if kind == wanted))


def frames(make: Any, data: bytes) -> int:
    return int(make.video(data, columns=100_000, tube_frames=1).extent[0])


def late_clip(make: Any, first: int) -> bytes:
    """A clip whose edit begins with frame `first`, and lasts up to the end of the media."""
    data = bytearray(make.clip(make.moving(FRAMES), options={"bf": "2", "g": "48"}))
    edit = place_of(make, bytes(data), b"elst") + 16
    duration, begin = struct.unpack_from(">Ii", data, edit)
    step = duration // FRAMES
    media_hz = struct.unpack_from(">I", data, place_of(make, bytes(data), b"mdhd") + 20)[0]
    struct.pack_into(">Ii", data, edit, duration - first * step, begin + first * media_hz // 10)
    return bytes(data)


@pytest.mark.parametrize("change", [lambda value: 0, lambda value: 10 * value, lambda value: value + 7, lambda value: 0xFFFFFFFF])
@pytest.mark.parametrize("fields", [{b"mvhd": 24}, {b"tkhd": 28}, {b"mdhd": 24}, {b"mvhd": 24, b"tkhd": 28, b"mdhd": 24}])
@pytest.mark.parametrize("first", [0, 5])
def test_a_duration_in_a_header_counts_no_frames(make: Any, change: Callable[[int], int], fields: dict[bytes, int], first: int) -> None:
    data = bytearray(late_clip(make, first))
    for kind, offset in fields.items():
        at = place_of(make, bytes(data), kind) + offset
        value = int.from_bytes(data[at : at + 4], "big")
        data[at : at + 4] = change(value).to_bytes(4, "big")
    assert frames(make, bytes(data)) == FRAMES - first


@pytest.mark.parametrize("factor", [10, 100])
def test_an_edit_may_pass_the_end(make: Any, factor: int) -> None:
    data = bytearray(late_clip(make, 5))
    edit = place_of(make, bytes(data), b"elst") + 16
    data[edit : edit + 4] = (factor * int.from_bytes(data[edit : edit + 4], "big")).to_bytes(4, "big")
    assert frames(make, bytes(data)) == FRAMES - 5


def test_an_edit_may_end_early_whatever_the_header_says(make: Any) -> None:
    data = bytearray(late_clip(make, 0))
    edit = place_of(make, bytes(data), b"elst") + 16
    data[edit : edit + 4] = (int.from_bytes(data[edit : edit + 4], "big") // 2).to_bytes(4, "big")
    assert frames(make, bytes(data)) == FRAMES // 2


def test_a_header_may_not_count_leading_pictures(make: Any) -> None:
    """A clip cut at a key frame that others, shown before it, follow: its writer counts from the key frame."""
    data = bytearray(late_clip(make, 5))
    at = place_of(make, bytes(data), b"mdhd") + 24
    times = place_of(make, bytes(data), b"ctts") + 16
    counts, shift = struct.unpack_from(">II", data, times)
    assert counts == 1
    # The first frame is shown as late as five later ones.
    hz = int.from_bytes(data[at - 4 : at], "big")
    end = int.from_bytes(data[at : at + 4], "big")
    data[at : at + 4] = (end - 5 * hz // 10 - shift + 2 * hz // 10).to_bytes(4, "big")
    assert frames(make, bytes(data)) == FRAMES - 5


def test_a_box_of_another_name_is_passed_over(make: Any) -> None:
    data = make.index_first(make.clip(make.moving(FRAMES)))
    extra = b"\0\0\0\x0cabcd\1\2\3\4"
    table = place_of(make, data, b"stsd")
    grown = bytearray(data[:table] + extra + data[table:])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = place_of(make, data, kind)
        grown[at : at + 4] = (int.from_bytes(data[at : at + 4], "big") + len(extra)).to_bytes(4, "big")
    at = place_of(make, bytes(grown), b"stco") + 12
    for place in range(at + 4, at + 4 + 4 * int.from_bytes(grown[at : at + 4], "big"), 4):
        grown[place : place + 4] = (int.from_bytes(grown[place : place + 4], "big") + len(extra)).to_bytes(4, "big")
    assert frames(make, bytes(grown)) == FRAMES


def test_another_track_may_be_odd(make: Any) -> None:
    """A clip is not refused for the times of a sound track that it does not show."""
    data = make.clip(make.moving(FRAMES))
    movie, track = place_of(make, data, b"moov"), place_of(make, data, b"trak")
    length = int.from_bytes(data[track : track + 4], "big")
    copy = bytearray(data[track : track + length])
    copy[copy.index(b"vide") : copy.index(b"vide") + 4] = b"soun"
    copy[copy.index(b"tkhd") + 16 : copy.index(b"tkhd") + 20] = (2).to_bytes(4, "big")
    # Its chunks hold more samples than there are.
    chunks = copy.index(b"stsc") + 4 + 8 + 4
    copy[chunks : chunks + 4] = (10**6).to_bytes(4, "big")
    size = int.from_bytes(data[movie : movie + 4], "big") + length
    joined = data[:movie] + size.to_bytes(4, "big") + data[movie + 4 : track + length] + bytes(copy) + data[track + length :]
    assert frames(make, joined) == FRAMES


def test_joined_transport_streams_are_one(make: Any) -> None:
    parts = [make.clip(make.moving(FRAMES), container="mpegts") for _ in range(2)]
    assert frames(make, parts[0] + parts[1] + parts[0]) == 3 * FRAMES
    sound = make.sound(make.sine(1.0, 48_000), 48_000, "mp2", "mpegts")
    assert abs(make.audio(sound + sound).extent[2] - 2 * make.audio(sound).extent[2]) <= 1


def test_a_packet_lost_behind_a_join_is_missed(make: Any) -> None:
    from treadle.decoders import DecodeError

    noise = [make.picture(96, 128, number) for number in range(8)]
    part = make.clip(noise, container="mpegts")
    packets = np.frombuffer(part, np.uint8).reshape(-1, TS_PACKET_BYTES)
    place = next(place for place in range(len(packets) // 2, len(packets)) if packets[place + 1, 1] & 0x40 == 0)
    assert (packets[place : place + 2, 2] == packets[place, 2]).all()
    damaged = part + part[: place * TS_PACKET_BYTES] + part[(place + 1) * TS_PACKET_BYTES :]
    with pytest.raises(DecodeError, match="missing"):
        make.video(damaged)


def test_live_matroska_files_may_be_joined(make: Any) -> None:
    part = make.clip(make.moving(FRAMES), "libvpx", "webm", container_options={"live": "1"})
    assert frames(make, part + part) == 2 * FRAMES


@pytest.mark.parametrize("length", ["unknown", "with its header"])
def test_an_avi_may_misstate_its_form(make: Any, length: str) -> None:
    data = make.clip(make.moving(FRAMES), "mpeg4", "avi")
    form = 0xFFFFFFFF if length == "unknown" else len(data)
    assert frames(make, data[:4] + form.to_bytes(4, "little") + data[8:]) == FRAMES


def test_an_avi_may_leave_out_padding(make: Any) -> None:
    data = make.clip(make.moving(FRAMES), "mpeg4", "avi")
    movi, index = data.index(b"movi"), data.index(b"idx1")
    media, at = bytearray(b"movi"), movi + 4
    while at < index:
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        media += data[at : at + 8 + length]
        at += 8 + length + length % 2
    assert len(media) < index - movi
    body = data[12 : movi - 4] + len(media).to_bytes(4, "little") + bytes(media)
    assert frames(make, b"RIFF" + (4 + len(body)).to_bytes(4, "little") + b"AVI " + body) == FRAMES


def test_sound_without_loss_keeps_what_an_edit_rounds_away(make: Any) -> None:
    """An edit in the movie's ticks is up to one of them shorter than the samples."""
    data = bytearray(make.sound(make.sine(1.0, 48_000)[:47_999], 48_000, "pcm_s16le", "mov"))
    edit = place_of(make, bytes(data), b"elst") + 16
    ticks = int.from_bytes(data[edit : edit + 4], "big")
    assert ticks == 1000
    data[edit : edit + 4] = (ticks - 1).to_bytes(4, "big")
    assert make.audio(bytes(data), 48_000).extent[2] == 47_999
