"""Sound through the codec library: every frame of one stream, gathered so that Python takes few steps over them."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.media import check_packets, codecs, find_stream, opened
from treadle.decoders.opus import SteadyPackets
from treadle.decoders.resample import Block, Mono, to_mono
from treadle.decoders.sniff import Format

_DTYPES: dict[str, tuple[str, bool]] = {
    name + planar: (dtype, bool(planar))
    for name, dtype in (("u8", "u1"), ("s16", "i2"), ("s32", "i4"), ("s64", "i8"), ("flt", "f4"), ("dbl", "f8"))
    for planar in ("", "p")
}
"""Type of a sample, and whether each channel has a plane, by the library's name."""
HELD_SAMPLES = 1 << 17
_MAX_CHANNELS = 255
_MAX_PLANES = 8
"""Planes of which the library knows the number."""
_SKIP_MANUAL = 1 << 29
_MAX_PADDING = 8192
_LEAST_MOVIE_HZ = 600
_ITUNES_TAG = re.compile(r" ?[0-9A-Fa-f]{8} [0-9A-Fa-f]{8} ([0-9A-Fa-f]{8}) ([0-9A-Fa-f]{16})")
"""Nothing, samples in front, samples behind, and samples of the sound."""


def coded_blocks(
    kind: Format, data: memoryview, options: DecodeOptions, deadline: Deadline, *, whole: bool, lone_page_samples: int = 0
) -> Iterator[Block]:
    """The best sound stream of a file in blocks of one rate each.

    A file that is not `whole` may stop where its damage begins. `lone_page_samples` is the length of an Ogg link whose
    sound lies on one page.

    Raises:
        DecodeError: there is no such stream, or it is damaged.
    """
    with opened(kind, data, options, deadline) as container:
        blocks = _stream_blocks(container, kind, deadline, whole, lone_page_samples)
        yield from without_padding(blocks, *_itunes_count(container.metadata)) if kind == "mp4" else blocks


def without_padding(blocks: Iterator[Block], stated: int, most: int = _MAX_PADDING) -> Iterator[Block]:
    """Drops what the last frames hold beyond the stated count; where there are more than `most` samples, it is no count."""
    count = 0
    beyond: list[Block] = []
    for rate_hz, block in blocks:
        room = min(max(0, stated - count), len(block)) if stated else len(block)
        count += len(block)
        if stated and count - stated > most:
            yield from beyond
            beyond, room = [], len(block)
        if room:
            yield rate_hz, block[:room]
        if room < len(block):
            beyond.append((rate_hz, block[room:]))


def _itunes_count(metadata: Mapping[str, str]) -> tuple[int, int]:
    """Samples of the sound, and those of padding behind it, by the tag that stands for an edit list in files from iTunes; 0 and 0
    where there is none."""
    match = _ITUNES_TAG.match(metadata.get("iTunSMPB", ""))
    return (int(match[2], 16), int(match[1], 16)) if match else (0, 0)


def _stream_blocks(container: Any, kind: Format, deadline: Deadline, whole: bool, lone_page_samples: int) -> Iterator[Block]:
    held = _Held()
    excess = taken = 0
    last_seen: tuple[Any, Any, Any] | None = None
    stream = find_stream(container, "audio")
    context = stream.codec_context
    context.options = {"err_detect": "crccheck+explode"}
    # From one page the library takes the first Vorbis packet, which has no sound of its own, for sound, and cuts as
    # much too much off the end; so it is told to leave both ends to us.
    lone = lone_page_samples if context.name == "vorbis" else 0
    if lone:
        context.flags2 |= _SKIP_MANUAL
    packets = container.demux(stream)
    # An Ogg page's checksum has told of damage to its packets.
    steady = SteadyPackets(stream.time_base) if context.name in ("opus", "libopus") and kind in ("mp4", "matroska") else None
    count = 0
    try:
        for packet in packets:
            count += packet.size > 0
            # Of a WAV the header has told what is missing.
            if packet.is_corrupt and kind != "wav":
                raise DecodeError("truncated", "the last packet is cut")
            if steady is not None:
                steady.add(packet)
            for frame in packet.decode():
                if lone and packet.pts == 0:
                    continue
                if kind == "mp4":
                    last_seen = packet, frame, frame.pts
                full = held.add(frame)
                if full is not None:
                    deadline.check()
                    taken += len(full[1])
                    yield full
        check_packets(kind, stream, count)
    except (ValueError, DecodeError) as error:
        refusal: Exception = error
        if kind == "flac" and not isinstance(error, DecodeError) and not any(packet.size for packet in islice(packets, 2)):
            refusal = DecodeError("truncated", "the last FLAC frame is cut")
        fatal = isinstance(error, DecodeError) and error.kind in ("too_large", "timeout")
        if whole or held.empty or fatal:
            raise refusal from error
        last_seen = None
    if last_seen is not None:
        excess = _padding(*last_seen, stream.time_base, lossless=context.name.startswith(("pcm_", "alac", "flac")))
    last = held.drain()
    if last is not None:
        rate_hz, block = last
        excess = max(0, taken + len(block) - lone) if lone else excess
        yield rate_hz, block[: len(block) - excess]


def _padding(packet: Any, frame: Any, frame_pts: int | None, time_base: Any, *, lossless: bool) -> int:
    """Samples of an MP4's last frame beyond what its packet says it lasts: the library plays all of them."""
    duration = packet.duration
    if not duration or frame_pts != packet.pts:
        return 0
    # Rounded half up.
    stated: int = (2 * duration * time_base.numerator * frame.sample_rate + time_base.denominator) // (2 * time_base.denominator)
    held: int = frame.samples
    # Without loss nothing is padded; an edit list in the movie's ticks may say a little less.
    rounding = frame.sample_rate // _LEAST_MOVIE_HZ if lossless else 0
    return held - stated if held - stated > rounding else 0


class _Held:
    """Frames of one rate and layout, waiting to be converted together."""

    def __init__(self) -> None:
        self._new = codecs().AudioFifo
        self._fifo: Any = None
        self._rate_hz = self._channels = 0

    @property
    def empty(self) -> bool:
        """Whether no frame waits."""
        return self._fifo is None or self._fifo.samples == 0

    def add(self, frame: Any) -> Block | None:
        """Takes a frame; answers those before it where they are enough, or of another form."""
        # The library's queue looks at neither the rate nor the number of channels before it copies.
        rate_hz, channels = frame.sample_rate, frame.layout.nb_channels
        full: Block | None = None
        changed = rate_hz != self._rate_hz or channels != self._channels
        if self._fifo is not None and (changed or self._fifo.samples >= HELD_SAMPLES):
            full = self.drain()
        if self._fifo is None or changed:
            if not 1 <= channels <= _MAX_CHANNELS:
                raise DecodeError("too_large", f"{channels} channels")
            self._fifo, self._rate_hz, self._channels = self._new(), rate_hz, channels
        frame.pts = None
        self._fifo.write(frame)
        return full

    def drain(self) -> Block | None:
        """All that waits."""
        frame = None if self._fifo is None else self._fifo.read()
        return None if frame is None else (self._rate_hz, mono_of(frame))


def mono_of(frame: Any) -> Mono:
    """A frame's samples, its channels averaged."""
    channels: int = frame.layout.nb_channels
    dtype, planar = _DTYPES[frame.format.name]
    if planar and channels > _MAX_PLANES:
        frame, planar = _packed(frame), False
    count = frame.samples * (1 if planar else channels)
    # Straight from the planes: the library's own conversion would copy them once more. Of eight it answers nine, the last
    # one nowhere in memory.
    rows = [np.frombuffer(plane, dtype, count) for plane in frame.planes[: channels if planar else 1]]
    return to_mono(rows if planar else rows[0], channels, planar=planar)


def _packed(frame: Any) -> Any:
    """The frame in one plane: where there are more than eight, the library does not know where they end."""
    resampler = codecs().AudioResampler(format=frame.format.name.removesuffix("p"), layout=frame.layout, rate=frame.sample_rate)
    converted = [*resampler.resample(frame), *resampler.resample(None)]
    if len(converted) != 1 or converted[0].samples != frame.samples or converted[0].layout.nb_channels != frame.layout.nb_channels:
        raise DecodeError("unsupported", f"{frame.layout.nb_channels} channels of {frame.format.name}")
    return converted[0]
