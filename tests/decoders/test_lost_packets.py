"""Damage to what holds the packets, not to them: demuxers pass over a block or a fragment that they cannot read, and say nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from treadle.decoders import DecodeError

FRAMES = 24


def vint(data: bytes, at: int, *, marker: bool) -> tuple[int, int]:
    """A Matroska number and its bytes."""
    count = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + count], "big")
    return value if marker else value & (1 << 7 * count) - 1, count


def blocks(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Where each SimpleBlock's identity, size and track number stand."""
    at = 0
    while at < len(data):
        identity, id_bytes = vint(data, at, marker=True)
        length, length_bytes = vint(data, at + id_bytes, marker=False)
        body = at + id_bytes + length_bytes
        if identity == 0xA3:
            yield at, at + id_bytes, body
        at = body if identity in (0x18538067, 0x1F43B675) else body + length


@pytest.mark.parametrize("codec", ["libvpx", "libx264"])
@pytest.mark.parametrize("live", ["0", "1"])
def test_a_block_of_a_matroska_file_is_read_or_missed(make: Any, codec: str, live: str) -> None:
    options = {"live": live, "cluster_time_limit": "500"}
    data = make.clip(make.moving(FRAMES), codec, "matroska", container_options=options)
    places = list(blocks(data)) if live == "0" else []
    if live == "1":
        first = data.index(b"\x1f\x43\xb6\x75")
        places = [
            (at, at + 1, at + 2) for at in range(first, len(data) - 3) if data[at] == 0xA3 and data[at + 1] & 0x80 and data[at + 2] == 0x81
        ]
    assert len(places) >= FRAMES - 4
    refused = 0
    for parts in places[1::3]:
        for place in parts:
            for bit in range(8):
                count = make.turned(data, place, bit)
                assert count in (-1, FRAMES), (place, bit)
                refused += count < 0
    assert refused >= 100


def test_a_fragment_of_an_mp4_is_read_or_missed(make: Any) -> None:
    options = {"movflags": "frag_keyframe+empty_moov"}
    data = make.clip(make.moving(FRAMES), options={"g": "8"}, container_options=options)
    places = [
        place for kind, place, _ in make.boxes(data, (b"moof", b"traf")) if kind in (b"moof", b"mfhd", b"traf", b"tfhd", b"tfdt", b"trun")
    ]
    assert len(places) == 3 * 6
    refused = 0
    for place in places[6:]:
        for byte in range(8):
            for bit in range(8):
                count = make.turned(data, place + byte, bit)
                assert count in (-1, FRAMES), (place, byte, bit)
                refused += count < 0
    assert refused >= 600


def test_a_table_of_an_mp4_is_read_or_missed(make: Any) -> None:
    data = make.clip(make.moving(FRAMES))
    parents = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
    tables = (b"stts", b"ctts", b"stsc", b"stsz", b"stco")
    places = {kind: place for kind, place, _ in make.boxes(data, parents) if kind in tables}
    assert set(places) == set(tables)
    for kind, place in places.items():
        for byte in range(8):
            for bit in range(8):
                assert make.turned(data, place + byte, bit) in (-1, FRAMES), (kind, byte, bit)
    # The low byte of the number of samples.
    for bit in range(8):
        assert make.turned(data, places[b"stsz"] + 19, bit) == -1, bit


def test_a_packet_beyond_the_file_is_missed(make: Any) -> None:
    """An offset of the index that points behind the end: the demuxer stops there, as at a whole file's end."""
    data = bytearray(make.clip(make.moving(FRAMES), options={"g": "8"}))
    place = data.index(b"stsz") + 16 + 4 * (FRAMES // 2)
    data[place : place + 4] = (10**8).to_bytes(4, "big")
    with pytest.raises(DecodeError) as caught:
        make.video(bytes(data), columns=100_000)
    assert caught.value.kind in ("corrupt", "truncated")
