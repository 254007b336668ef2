"""MPEG audio frames, MP3 above all, walked header by header: what is between them, what is missing, where files were joined."""

import functools
from dataclasses import dataclass
from mmap import mmap

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.sniff import searchable, skip_id3

_CHECK_EVERY = 4096
_KBITS = {
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_FREE = -1


@dataclass(slots=True)
class MpegRun:
    """Back-to-back frames of one stream: a file, or one of several that were joined."""

    start: int
    kind: int
    """Version, layer and rate as the header holds them."""
    end: int = 0
    frames: int = 0
    stated_frames: int = 0
    """Frames that the encoder's tag counts; 0 where there is none."""
    padding: int = -1
    """Samples before and behind the sound, by the same tag; -1 where it does not say."""

    @property
    def stated_samples(self) -> int:
        """Samples that the encoder was given; 0 where its tag does not say."""
        version, layer = self.kind >> 11 & 3, 4 - (self.kind >> 9 & 3)
        samples = self.stated_frames * (384 if layer == 1 else 576 if layer == 3 and version != 3 else 1152) - self.padding
        return max(0, samples) if self.stated_frames and self.padding >= 0 else 0


def read_mpeg(data: memoryview, options: DecodeOptions, deadline: Deadline) -> tuple[list[MpegRun], bool]:
    """The runs of frames of a file, and whether its end is there.

    Raises:
        DecodeError: the bytes between frames are damage, or the format is not read; in strict mode also a missing end.
    """
    raw, forms = searchable(data), _frame_forms()
    tags = _tag_suspects(raw)
    at, size = skip_id3(data, 0), len(data)
    runs: list[MpegRun] = []
    run: MpegRun | None = None
    lack = ""
    for count in range(options.max_chunks):
        if count % _CHECK_EVERY == 0:
            deadline.check()
        form = forms.get(raw[at : at + 3])
        if form is None:
            after = _skip_tags(data, raw, at)
            if after > at:
                at, run = after, None
                continue
            if at < size and _frames_follow(raw, at):
                raise DecodeError("corrupt", f"no MPEG frame at byte {at}, and more frames after it")
            break
        length, kind = form
        if length == _FREE:
            raise DecodeError("unsupported", "free-format MPEG audio")
        tag = _tag_at(raw, at) if at in tags else 0
        if run is None or tag or kind != run.kind:
            run = MpegRun(at, kind, 0, 0, *(_read_tag(raw, tag) if tag else (0, -1)))
            runs.append(run)
        if at + length > size:
            lack = f"the last MPEG frame needs {at + length - size} bytes more than the file has"
            break
        if not tag:
            run.frames += 1
        at += length
        run.end = at
    else:
        raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} frames")
    for run in runs:
        if run.frames < run.stated_frames:
            lack = lack or f"{run.frames} of {run.stated_frames} MPEG frames are there"
    if lack and options.strict:
        raise DecodeError("truncated", lack)
    runs = [run for run in runs if run.frames]
    if not runs:
        raise DecodeError("truncated" if lack else "corrupt", lack or "no MPEG frame")
    return runs, not lack


def read_adts(data: memoryview, options: DecodeOptions, deadline: Deadline) -> tuple[int, int]:
    """The range of an AAC file's frames.

    Raises:
        DecodeError: the bytes between frames are damage; in strict mode also a missing end.
    """
    first = at = skip_id3(data, 0)
    for count in range(options.max_chunks):
        if count % _CHECK_EVERY == 0:
            deadline.check()
        if at + 7 > len(data) or data[at] != 0xFF or data[at + 1] & 0xF6 != 0xF0:
            left = bytes(data[at:])
            if 0 < len(left) < 7 and left[0] == 0xFF and options.strict:
                raise DecodeError("truncated", "the AAC ends inside a frame")
            if left.strip(b"\0") and not left.startswith((b"TAG", b"APETAGEX")):
                raise DecodeError("corrupt", f"no AAC frame at byte {at}")
            break
        length = (data[at + 3] & 3) << 11 | data[at + 4] << 3 | data[at + 5] >> 5
        if length < 7:
            raise DecodeError("corrupt", f"an AAC frame of {length} bytes at byte {at}")
        if at + length > len(data):
            if options.strict:
                raise DecodeError("truncated", "the AAC ends inside a frame")
            break
        at += length
    else:
        raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} frames")
    return first, at


def _frame_bytes(second: int, third: int) -> int:
    """Bytes of the frame whose header continues with these; 0 for no header, `_FREE` for one that states no bit rate."""
    version, layer = second >> 3 & 3, 4 - (second >> 1 & 3)
    if second & 0xE0 != 0xE0 or version == 1 or layer == 4 or third >> 4 == 15 or third >> 2 & 3 == 3:
        return 0
    kbits = _KBITS[1 if version == 3 else 2, layer][third >> 4]
    rate_hz = _RATES_HZ[version][third >> 2 & 3]
    padding = third >> 1 & 1
    if kbits == 0:
        return _FREE
    if layer == 1:
        return (12_000 * kbits // rate_hz + padding) * 4
    return (72_000 if layer == 3 and version != 3 else 144_000) * kbits // rate_hz + padding


@functools.cache
def _frame_forms() -> dict[bytes, tuple[int, int]]:
    """`_frame_bytes` and the run's kind by three header bytes: a file is walked at a third of a microsecond a frame."""
    headers = ((second, third) for second in range(0xE0, 256) for third in range(256))
    return {
        bytes((0xFF, second, third)): (length, (second & 0xFE) << 8 | third & 0x0C)
        for second, third in headers
        if (length := _frame_bytes(second, third))
    }


def _tag_suspects(raw: bytes | mmap) -> set[int]:
    """Where frames would begin that hold what looks like an encoder's tag."""
    starts: set[int] = set()
    for name in (b"Xing", b"Info"):
        place = raw.find(name)
        while place >= 0:
            starts.update(place - 4 - side for side in (9, 17, 32))
            place = raw.find(name, place + 1)
    return starts


def _tag_at(raw: bytes | mmap, at: int) -> int:
    """Where the encoder's tag stands in the frame at `at`; 0 where it has none."""
    if raw[at + 1] & 6 != 2:
        return 0
    mono = raw[at + 3 : at + 4] >= b"\xc0"
    side = (17 if mono else 32) if raw[at + 1] & 8 else (9 if mono else 17)
    place = at + 4 + side
    return place if raw[place : place + 4] in (b"Xing", b"Info") else 0


def _read_tag(raw: bytes | mmap, tag: int) -> tuple[int, int]:
    """Frames that the encoder's tag at `tag` counts, and the samples it says are none of the sound; 0 and -1 where it does not say."""
    flags = int.from_bytes(raw[tag + 4 : tag + 8], "big")
    frames = int.from_bytes(raw[tag + 8 : tag + 12], "big") if flags & 1 else 0
    encoder = tag + 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1)
    if raw[encoder : encoder + 4] not in (b"LAME", b"Lavf", b"Lavc") or len(raw) < encoder + 24:
        return frames, -1
    both = int.from_bytes(raw[encoder + 21 : encoder + 24], "big")
    return frames, (both >> 12) + (both & 0xFFF)


def _skip_tags(data: memoryview, raw: bytes | mmap, at: int) -> int:
    """Where the bytes after tags and zeros at `at` begin; `at` where there are none."""
    if raw[at : at + 3] == b"TAG":
        return min(at + 128, len(raw))
    if raw[at : at + 8] == b"APETAGEX" and at + 32 <= len(raw):
        size = int.from_bytes(raw[at + 12 : at + 16], "little")
        return min(at + 32 + size, len(raw))
    if raw[at : at + 11] == b"LYRICSBEGIN":
        end = raw.find(b"LYRICS200", at)
        return at if end < 0 else end + 9
    return min(skip_id3(data, at), len(raw)) if at < len(raw) else at


def _frames_follow(raw: bytes | mmap, at: int) -> bool:
    """Whether three frames in a row stand somewhere after `at`."""
    forms = _frame_forms()
    while (at := raw.find(b"\xff", at + 1)) >= 0:
        place = at
        for _ in range(3):
            length, _ = forms.get(raw[place : place + 3], (0, 0))
            if length <= 0:
                break
            place += length
        else:
            return True
    return False
