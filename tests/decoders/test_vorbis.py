"""Vorbis in Ogg without the demuxer: the same samples and the same refusals as through it, and what is not plain goes through it."""

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from treadle.decoders import DecodeError, audio, vorbis
from treadle.decoders.limits import Deadline
from treadle.decoders.ogg import page_checksum

RATE = 44_100
Outcome = tuple[Any, ...]


@dataclass(frozen=True)
class Page:
    """One page, its checksum aside."""

    flags: int
    position: int
    serial: int
    number: int
    lacing: bytes
    body: bytes

    def data(self) -> bytes:
        head = b"OggS\0" + struct.pack("<BqIIIB", self.flags, self.position, self.serial, self.number, 0, len(self.lacing))
        page = head + self.lacing + self.body
        return page[:22] + struct.pack("<I", page_checksum(page)) + page[26:]


def pages_of(data: bytes) -> list[Page]:
    pages: list[Page] = []
    at = 0
    while at < len(data):
        flags, position, serial, number, _, count = struct.unpack_from("<BqIIIB", data, at + 5)
        lacing = data[at + 27 : at + 27 + count]
        begin = at + 27 + count
        at = begin + sum(lacing)
        pages.append(Page(flags, position, serial, number, lacing, data[begin:at]))
    return pages


def joined(pages: list[Page]) -> bytes:
    """The pages, numbered anew."""
    return b"".join(replace(page, number=number).data() for number, page in enumerate(pages))


def vorbis_file(seconds: float, *, channels: int = 2, rate: int = RATE, quality: float = 0.5, seed: int = 0) -> bytes:
    """Noise that comes and goes, for blocks of both lengths, by libvorbis."""
    count = round(seconds * rate)
    noise = np.random.default_rng(seed).normal(0, 0.1, (count, channels))
    noise *= (np.arange(count) // 3000 % 2)[:, None]
    out = io.BytesIO()
    soundfile.write(out, noise, rate, format="OGG", subtype="VORBIS", compression_level=1 - quality)
    return out.getvalue()


def outcome(make: Any, data: bytes, **options: Any) -> Outcome:
    try:
        payload = make.audio(data, RATE, **options)
    except DecodeError as error:
        return error.kind, error.detail
    return payload.array.tobytes(), payload.grid, payload.extent, payload.truncated


@pytest.fixture
def both(make: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, bool]]:
    """What a file decodes to, and whether without the demuxer; with it it must be the same."""

    def run(data: bytes, **options: Any) -> tuple[Outcome, bool]:
        plain: list[bool] = []

        def watched(link: memoryview, deadline: Deadline) -> Iterator[Any]:
            try:
                yield from vorbis.vorbis_blocks(link, deadline)
            except vorbis.NotPlain:
                plain.append(False)
                raise
            except DecodeError:
                plain.append(True)
                raise
            plain.append(True)

        def never(link: memoryview, deadline: Deadline) -> Iterator[Any]:
            raise vorbis.NotPlain
            yield

        monkeypatch.setattr(audio, "vorbis_blocks", watched)
        found = outcome(make, data, **options)
        monkeypatch.setattr(audio, "vorbis_blocks", never)
        assert outcome(make, data, **options) == found
        return found, bool(plain) and all(plain)

    return run


@pytest.mark.parametrize(
    "channels, rate, quality", [(1, 8_000, 0.1), (1, 44_100, 0.5), (2, 44_100, 0.9), (2, 48_000, 0.0), (6, 44_100, 0.4)]
)
@pytest.mark.parametrize("seconds", [0.01, 0.2, 1.3, 5.0])
def test_plain_files(both: Any, channels: int, rate: int, quality: float, seconds: float) -> None:
    found, plain = both(vorbis_file(seconds, channels=channels, rate=rate, quality=quality))
    assert plain
    # The time that went in, at the rate that was asked for, rounded up to a whole sample.
    assert found[2] == (1, 1, -(-round(seconds * rate) * RATE // rate))


def test_another_encoder(both: Any, make: Any) -> None:
    samples = make.sine(2.0)
    for duration in ("1", "1000000"):
        data = make.sound(
            [samples, samples], RATE, "vorbis", "ogg", layout="stereo",
            options={"strict": "experimental"}, container_options={"page_duration": duration},
        )  # fmt: skip
        # A first packet alone on its page ends at position zero, as headers do.
        assert both(data)[1] == (duration != "1")


def test_chained_files_are_plain_link_by_link(both: Any, make: Any) -> None:
    one, other = vorbis_file(0.7), vorbis_file(0.5, channels=1, seed=1)
    found, plain = both(one + other + one)
    assert plain and found[2] == (1, 1, round((0.7 + 0.5 + 0.7) * RATE))


def test_packets_that_go_on_on_the_next_page(both: Any) -> None:
    """The same packets on pages of eight lacing values, wherever a packet ends."""
    source = pages_of(vorbis_file(1.0))
    headers = [page for page in source if page.position == 0]
    sound = source[len(headers) :]
    lacing, body = b"".join(page.lacing for page in sound), b"".join(page.body for page in sound)
    file: Any = av.open(io.BytesIO(joined(source)), "r")
    with file:
        lengths = [sum(frame.samples for frame in packet.decode()) for packet in file.demux() if packet.size]
    ends = np.cumsum(lengths).tolist()
    pages, at, begun, count = list(headers), 0, False, 0
    starts = range(0, len(lacing), 8)
    for start in starts:
        part = lacing[start : start + 8]
        size = sum(part)
        complete = any(value < 255 for value in part)
        last = start == starts[-1]
        count += sum(value < 255 for value in part)
        position = sound[-1].position if last else ends[count - 1] if complete else -1
        pages.append(Page(begun * 1 + last * 4, position, source[0].serial, 0, part, body[at : at + size]))
        at += size
        begun = part[-1] == 255
    assert any(page.flags & 1 for page in pages[len(headers) :])
    assert both(joined(pages))[1]


@pytest.mark.parametrize("missing", [1, 700])
def test_a_beginning_that_was_cut_off_is_not_heard(make: Any, missing: int) -> None:
    """Of a recording that was cut between two packets the first page says less than its packets hold (Vorbis I, A.2)."""
    whole = vorbis_file(3.0)
    pages = [replace(page, position=page.position - missing) if page.position > 0 else page for page in pages_of(whole)]
    found, full = make.audio(joined(pages), 44_100).array, make.audio(whole, 44_100).array
    assert np.array_equal(found, full[missing:])


@pytest.mark.parametrize("shift", [1, 12_345])
def test_positions_that_do_not_begin_at_zero(both: Any, shift: int) -> None:
    pages = [replace(page, position=page.position + shift) if page.position > 0 else page for page in pages_of(vorbis_file(3.0))]
    assert sum(page.position > 0 for page in pages) > 2
    assert not both(joined(pages))[1]


@pytest.mark.parametrize("cut", [1, 64, 500, 1023, 1024, 1500, 9000])
def test_the_last_position_cuts_the_last_packet_alone(both: Any, cut: int) -> None:
    pages = pages_of(vorbis_file(3.0))
    found, plain = both(joined([*pages[:-1], replace(pages[-1], position=pages[-1].position - cut)]))
    assert plain == (pages[-1].position > cut)
    whole = pages[-1].position
    if cut <= 64:
        assert found[2] == (1, 1, whole - cut)


def test_one_page_of_sound_is_cut_at_its_position(both: Any) -> None:
    pages = pages_of(vorbis_file(0.1))
    assert sum(page.position > 0 for page in pages) == 1
    for stated in (1, 300, 4000):
        found, plain = both(joined([*pages[:-1], replace(pages[-1], position=stated)]))
        assert plain and found[2] == (1, 1, stated)


def _noise(page: Page) -> Page:
    """Random bytes in packets that say they are sound."""
    body = bytearray(np.random.default_rng(0).bytes(len(page.body)))
    at = 0
    for value in page.lacing:
        body[at] &= 0xFE
        at += value
    return replace(page, body=bytes(body))


def _damaged(name: str) -> bytes:
    data = vorbis_file(1.5)
    pages = pages_of(data)
    sound = next(number for number, page in enumerate(pages) if page.position > 0)
    first, last = pages[sound], pages[-1]
    changes: dict[str, Callable[[], list[Page]]] = {
        "no last page": lambda: pages[:-1],
        "last page that is not marked": lambda: [*pages[:-1], replace(last, flags=0)],
        "page after the last": lambda: [*pages, replace(last, flags=0, position=last.position + 64)],
        "no position": lambda: [*pages[:sound], replace(first, position=-1), *pages[sound + 1 :]],
        "position of zero": lambda: [*pages[:sound], replace(first, position=0), *pages[sound + 1 :]],
        "continued from nothing": lambda: [*pages[:sound], replace(first, flags=1), *pages[sound + 1 :]],
        "header among the sound": lambda: [*pages[:-1], replace(last, lacing=b"\x08" + last.lacing, body=b"\x01vorbis\0" + last.body)],
        "empty packet": lambda: [*pages[:-1], replace(last, lacing=b"\0" + last.lacing)],
        "packet of another type": lambda: [*pages[:-1], replace(last, body=bytes([last.body[0] | 1]) + last.body[1:])],
        "random packets": lambda: [*pages[:-1], _noise(last)],
        "cut setup": lambda: [pages[0], *(replace(page, body=page.body[:-40] + bytes(40)) for page in pages[1:sound]), *pages[sound:]],
        "no comments": lambda: [pages[0], *pages[2:]],
        "sound beside the setup": lambda: [
            *pages[: sound - 1],
            replace(pages[sound - 1], lacing=pages[sound - 1].lacing + first.lacing, body=pages[sound - 1].body + first.body,
                    position=first.position),
            *pages[sound + 1 :],
        ],
        "no sound": lambda: [*pages[: sound - 1], replace(pages[sound - 1], flags=4)],
        "another version": lambda: [replace(pages[0], body=pages[0].body[:7] + b"\1" + pages[0].body[8:]), *pages[1:]],
    }  # fmt: skip
    return joined(changes[name]())


DAMAGES = (
    "no last page,last page that is not marked,page after the last,no position,position of zero,continued from nothing,"
    "header among the sound,empty packet,packet of another type,random packets,cut setup,no comments,sound beside the setup,no sound,"
    "another version"
).split(",")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_plain_is_the_demuxers(both: Any, name: str, strict: bool) -> None:
    both(_damaged(name), strict=strict)


def test_a_cut_end_is_the_demuxers(both: Any) -> None:
    data = vorbis_file(2.0)
    for size in (len(data) - 1, len(data) - 300, len(data) // 2):
        assert not both(data[:size], strict=False)[1]
        assert both(data[:size])[0][0] == "truncated"


def test_two_streams_side_by_side_are_the_demuxers(both: Any) -> None:
    one, other = pages_of(vorbis_file(0.5)), pages_of(vorbis_file(0.4, channels=1))
    other = [replace(page, serial=one[0].serial ^ 1) for page in other]
    mixed = [one[0], other[0], *one[1:], *other[1:]]
    assert not both(b"".join(page.data() for page in mixed))[1]


def test_long_recordings_are_the_demuxers(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = vorbis_file(1.0)
    for name, most in (("_MAX_BYTES", len(data) - 1), ("_MAX_PACKETS", 20)):
        with monkeypatch.context() as patch:
            patch.setattr(vorbis, name, most)
            assert not both(data)[1]
    assert both(data)[1]


def test_a_kept_decoder_begins_anew(make: Any) -> None:
    """Of another file, of one that ended early, and of one that was refused nothing is left."""
    files = [vorbis_file(0.6, seed=seed) for seed in range(3)]
    headers = {vorbis._split(memoryview(data))[0] for data in files}
    assert len(headers) == 1
    (key,) = headers
    expected = []
    for data in files:
        vorbis._DECODERS.take(key)
        expected.append(outcome(make, data))
    kept = vorbis._DECODERS.take(key)
    assert kept is not None
    vorbis._DECODERS.give(key, kept)
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        for number in order:
            assert outcome(make, files[number]) == expected[number]
            again = vorbis._DECODERS.take(key)
            assert again is kept
            vorbis._DECODERS.give(key, again)
    # Left in the middle: the row is full.
    blocks = vorbis.vorbis_blocks(memoryview(vorbis_file(20.0)), Deadline(60.0))
    next(blocks)
    blocks.close()
    assert outcome(make, files[0]) == expected[0]


@pytest.mark.parametrize("seconds, packets, plain", [(1.0, 5, False), (20.0, 700, True)])
def test_a_decoder_that_refuses_a_packet_is_not_used_again(seconds: float, packets: int, plain: bool) -> None:
    """Before the first block the demuxer has a say in what is wrong, after it the file is refused."""
    data = vorbis_file(seconds)
    key = vorbis._split(memoryview(data))[0]
    decoder = vorbis._DECODERS.take(key) or vorbis._decoder(key)

    class Refusing:
        count = 0

        def decode(self, packet: Any) -> Any:
            self.count += 1
            if self.count > packets:
                raise ValueError("damaged")
            return decoder.decode(packet)

    vorbis._DECODERS.give(key, Refusing())
    blocks = vorbis.vorbis_blocks(memoryview(data), Deadline(60.0))
    with pytest.raises(DecodeError if plain else vorbis.NotPlain) as caught:
        list(blocks)
    assert not plain or str(caught.value).startswith("corrupt")
    assert vorbis._DECODERS.take(key) is None


def test_the_wall_clock_is_looked_at(make: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        make.audio(vorbis_file(5.0), RATE, max_wall_s=1e-9)
    assert caught.value.kind == "timeout"


def test_a_full_row_stops_a_long_recording(make: Any) -> None:
    data = vorbis_file(20.0)
    payload = make.audio(data, RATE, columns=401)
    samples: NDArray[np.float32] = payload.array
    assert payload.truncated and len(samples) == 400 * 100
    whole = make.audio(data, RATE).array
    np.testing.assert_array_equal(samples, whole[: len(samples)])
