"""Where a recording begins and ends when a tag, and not the container, says so; AAC that plays at twice its stated rate."""

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders.coded import without_padding

RATE = 44_100
LOW_RATE = 22_050
PRIMING, REST = 1024, 956
"""Of FFmpeg's AAC encoder for 44,100 samples: (1024 + 44100 + 956) / 1024 = 45 frames."""


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + kind + body


def without_edits(data: bytes) -> bytes:
    """The file without its edit list, its last packet as long as the others."""
    out = bytearray(data)
    edits, times = data.index(b"edts"), data.index(b"stts")
    out[edits : edits + 4] = b"free"
    count, *entries = struct.unpack_from(">5I", data, times + 8)
    assert (count, entries) == (2, [44, 1024, 1, 1024 - REST])
    struct.pack_into(">5I", out, times + 8, 2, 44, 1024, 1, 1024)
    return bytes(out)


def with_itunes_tag(data: bytes, priming: int, rest: int, count: int) -> bytes:
    """The tag that iTunes writes, in the place of the metadata that FFmpeg wrote behind the media."""
    text = f" 00000000 {priming:08X} {rest:08X} {count:016X}" + " 00000000" * 8
    fields = [(b"mean", b"com.apple.iTunes"), (b"name", b"iTunSMPB"), (b"data", bytes(4) + text.encode())]
    item = box(b"----", b"".join(box(kind, (b"\0\0\0\1" if kind == b"data" else bytes(4)) + body) for kind, body in fields))
    listed = box(b"meta", bytes(4) + box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9)) + box(b"ilst", item))
    index, old = data.index(b"moov") - 4, data.index(b"udta") - 4
    assert data.index(b"mdat") < index
    user = box(b"udta", listed)
    (index_bytes,), (old_bytes,) = struct.unpack_from(">I", data, index), struct.unpack_from(">I", data, old)
    return data[:index] + struct.pack(">I", index_bytes - old_bytes + len(user)) + data[index + 4 : old] + user + data[old + old_bytes :]


def is_sine(array: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Whether they are the same but for what a lossy codec does."""
    return len(array) == len(expected) and float(np.sqrt(np.mean((array[500:-500] - expected[500:-500]) ** 2))) < 0.01


def test_itunes_states_what_no_edit_list_does(make: Any) -> None:
    sine = make.sine()
    bare = without_edits(make.sound(sine, RATE, "aac", "ipod"))
    # Nothing says what is padding, and all of it is kept.
    assert make.audio(bare, RATE).extent == (1, 1, PRIMING + 44_100 + REST)
    assert is_sine(make.audio(with_itunes_tag(bare, PRIMING, REST, 44_100), RATE).array, sine)
    # A sound that ends earlier than its last frame by nearly two frames.
    assert is_sine(make.audio(with_itunes_tag(bare, PRIMING, REST + 900, 43_200), RATE).array, sine[:43_200])


def test_itunes_and_an_edit_list_that_say_the_same(make: Any) -> None:
    sine = make.sine()
    data = with_itunes_tag(make.sound(sine, RATE, "aac", "ipod"), PRIMING, REST, 44_100)
    assert is_sine(make.audio(data, RATE).array, sine)


@pytest.mark.parametrize("count", [1, 20_000, 10**6])
def test_an_itunes_count_that_cannot_be_is_none(make: Any, count: int) -> None:
    """Tags are copied to files that were cut or joined since."""
    bare = without_edits(make.sound(make.sine(), RATE, "aac", "ipod"))
    assert make.audio(with_itunes_tag(bare, PRIMING, REST, count), RATE).extent == (1, 1, 44_100 + REST)


@pytest.mark.parametrize("text", [b"", b" 00000000", b" zzzzzzzz 00000400 000003BC 000000000000AC44"])
def test_a_damaged_itunes_tag_is_none(make: Any, text: bytes) -> None:
    data = with_itunes_tag(make.sound(make.sine(), RATE, "aac", "ipod"), PRIMING, REST, 44_100)
    place = data.index(b" 00000000 00000400")
    assert make.audio(data[:place] + text.ljust(60) + data[place + 60 :], RATE).extent == (1, 1, 44_100)


def test_a_count_in_the_middle_of_the_sound_takes_nothing_away() -> None:
    """A tag that counts a part of what follows, in any place of a block."""
    sound = np.arange(40_000, dtype=np.float32)
    blocks = [(RATE, sound[start : start + 10_000]) for start in range(0, 40_000, 10_000)]
    for stated in (0, 1, 9_999, 10_000, 15_000, 29_000, 29_999, 30_000, 31_807):
        np.testing.assert_array_equal(np.concatenate([block for _, block in without_padding(iter(blocks), stated)]), sound)
    for stated in (31_808, 39_000, 39_999, 40_000, 50_000):
        np.testing.assert_array_equal(np.concatenate([block for _, block in without_padding(iter(blocks), stated)]), sound[:stated])


def test_an_mp3_joined_to_one_without_a_tag_is_whole(make: Any) -> None:
    """The first one's tag counts its own frames; the sum is far beyond it, wherever a block of the decoder ends."""
    whole = make.sound(make.sine(), RATE, "libmp3lame", "mp3", container_options={"write_xing": "0", "id3v2_version": "0"})
    frames = 46_080  # 40 frames of 1152: the encoder's delay and padding stay
    for seconds in (2.85, 2.95, 3.0):
        tagged = make.sound(make.sine(seconds), RATE, "libmp3lame", "mp3", container_options={"id3v2_version": "0"})
        alone = make.audio(tagged, RATE).extent[2]
        assert alone == round(seconds * RATE)
        assert make.audio(tagged + whole, RATE).extent[2] >= alone + frames - 1152


SIGNALS = {
    "backward compatible": "00010" + "0111" + "0001" + "000" + "01010110111" + "00101" + "1" + "0100",
    "explicit": "00101" + "0111" + "0001" + "0100" + "00010" + "000",
    "with parametric stereo": "11101" + "0111" + "0001" + "0100" + "00010" + "000",
}
"""What ISO/IEC 14496-3 calls the AudioSpecificConfig: AAC of one channel at 22,050 Hz (index 7), its spectrum replicated up to
44,100 Hz (index 4): object type 2, then the extension; or the extension's type 5, or 29, first."""


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("rate", [44_100, 22_050, 16_000])
def test_aac_at_twice_its_rate_keeps_its_length(make: Any, signal: str, rate: int) -> None:
    """The decoder answers twice the samples that the container's time counts, in two channels where stereo may be replicated."""
    data = make.sound(make.sine(1.0, LOW_RATE), LOW_RATE, "aac", "ipod")
    plain = bytes.fromhex("138856e500")
    assert data.count(plain) == 1
    bits = SIGNALS[signal].ljust(40, "0")
    high = data.replace(plain, int(bits, 2).to_bytes(5, "big"))
    payload = make.audio(high, rate)
    assert payload.extent == (1, 1, rate)
    middle = payload.array[rate // 4 : rate // 4 * 3]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * rate / len(middle) - 440) <= 2
    assert abs(np.abs(middle).max() - 0.125) < 0.01
