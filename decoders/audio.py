"""Recordings: any stored form to float32 mono at one rate, exact in length, read to the row's end and no further."""

from collections.abc import Generator, Iterator
from contextlib import closing
from fractions import Fraction
from itertools import islice
from typing import Any

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.media import codecs, find_stream, opened
from treadle.decoders.mpeg import read_adts, read_mpeg
from treadle.decoders.ogg import read_ogg
from treadle.decoders.payload import Payload, Probe
from treadle.decoders.resample import Mono, gather, resampled_count, to_mono
from treadle.decoders.sniff import AUDIO_FORMATS, VIDEO_FORMATS, Format, skip_id3, sniff
from treadle.decoders.structure import check_whole
from treadle.decoders.wav import read_wav, wav_blocks
from treadle.shape import AudioShape

Block = tuple[int, Mono]
_HELD_SAMPLES = 1 << 17
_MAX_CHANNELS = 255
_MAX_PADDING = 8192
_SKIP_MANUAL = 1 << 29
_FLAC_HEAD = b"fLaC\0\0\0\x22"


def decode_audio(data: memoryview, shape: AudioShape, capacity: int, options: DecodeOptions, deadline: Deadline) -> Payload:
    """Decodes one recording until the row is full.

    Raises:
        DecodeError: the bytes are refused.
    """
    if capacity < 1:
        raise DecodeError("too_large", "the row has no room for a single chunk")
    with closing(_limited(_blocks(_kind(data), data, options, deadline), options)) as blocks:
        array, truncated = gather(blocks, shape.sample_rate, capacity * shape.chunk_samples)
    count = len(array)
    if count == 0:
        raise DecodeError("empty", "the recording has no sample")
    return Payload(array, (-(-count // shape.chunk_samples), 1, 1), (1, 1, count), truncated)


def probe_audio(data: memoryview, shape: AudioShape, capacity: int, options: DecodeOptions, deadline: Deadline) -> Probe:
    """What the header's own counts suggest; nothing is decoded.

    Raises:
        DecodeError: the header is refused.
    """
    kind = _kind(data)
    forms = read_wav(data, options) if kind == "wav" else []
    if forms and all(form.native for form in forms):
        count = sum(resampled_count(form.frames, max(form.rate_hz, 1), shape.sample_rate) for form in forms)
    else:
        with opened(kind, data, options, deadline) as container:
            stream = find_stream(container, "audio")
            seconds = Fraction(container.duration or 0, 1_000_000)
            if stream.duration and stream.time_base:
                seconds = stream.duration * stream.time_base
            count = max(0, int(seconds * shape.sample_rate))
    count = max(1, min(count, capacity * shape.chunk_samples))
    return Probe((-(-count // shape.chunk_samples), 1, 1), (1, 1, count), False)


def _kind(data: memoryview) -> Format:
    kind = sniff(data)
    if kind is None or kind not in AUDIO_FORMATS:
        if kind in VIDEO_FORMATS:
            raise DecodeError("no_stream", f"a file of format {kind} is read for its video only")
        raise DecodeError("unsupported", f"not a recording that is read: {kind or f'begins {bytes(data[:16])!r}'}")
    return kind


def _limited(blocks: Iterator[Block], options: DecodeOptions) -> Generator[Block]:
    seconds = 0.0
    for rate_hz, block in blocks:
        seconds += len(block) / max(rate_hz, 1)
        if seconds > options.max_audio_s:
            raise DecodeError("too_large", f"more than max_audio_s {options.max_audio_s:g} s of sound")
        yield rate_hz, block


def _blocks(kind: Format, data: memoryview, options: DecodeOptions, deadline: Deadline) -> Iterator[Block]:
    """The recording in blocks of `(rate, mono samples)`; joined files are read one after the other."""
    if kind == "wav":
        for form in read_wav(data, options):
            if form.native:
                yield from ((form.rate_hz, block) for block in wav_blocks(form, deadline))
            else:
                part = data[form.start : form.end]
                yield from _without_padding(_decoded("wav", part, options, deadline, whole=True), form.stated_frames)
    elif kind == "flac":
        yield from _flac_blocks(data, options, deadline)
    elif kind == "ogg":
        links, whole = read_ogg(data, options, deadline)
        for link in links:
            part = data[link.start : link.end]
            lone = link.samples if link.sound_pages == 1 and len(link.pages) == 1 and whole else 0
            yield from _decoded("ogg", part, options, deadline, whole=whole, lone_page_samples=lone)
    elif kind == "mp3":
        runs, whole = read_mpeg(data, options, deadline)
        for run in runs:
            yield from _decoded("mp3", data[run.start : run.end], options, deadline, whole=whole)
    elif kind == "aac":
        first, last = read_adts(data, options, deadline)
        yield from _decoded("aac", data[first:last], options, deadline, whole=True)
    else:
        yield from _decoded(kind, data, options, deadline, whole=check_whole(kind, data, options, deadline))


def _without_padding(blocks: Iterator[Block], stated: int) -> Iterator[Block]:
    """Drops what a last compressed block holds beyond the stated count; a count far off is no count."""
    count = 0
    for rate_hz, block in blocks:
        count += len(block)
        excess = count - stated
        yield rate_hz, block[:-excess] if stated and 0 < excess < min(_MAX_PADDING, len(block)) else block


def _flac_blocks(data: memoryview, options: DecodeOptions, deadline: Deadline) -> Iterator[Block]:
    """Each joined file apart; one that states its samples must give them all."""
    raw = bytes(data)
    starts = [skip_id3(data, 0)]
    while (at := raw.find(_FLAC_HEAD, starts[-1] + 42)) >= 0:
        starts.append(at)
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        if len(raw) < start + 42 or raw[start + 4] & 0x7F != 0:
            raise DecodeError("truncated", "the FLAC ends inside its header")
        stated = int.from_bytes(raw[start + 21 : start + 26], "big") & (1 << 36) - 1
        count = 0
        for rate_hz, block in _decoded("flac", data[start:end], options, deadline, whole=options.strict):
            count += len(block)
            yield rate_hz, block
        if stated and count < stated and options.strict:
            raise DecodeError("truncated", f"{count} of {stated} FLAC samples are there")


def _decoded(
    kind: Format, data: memoryview, options: DecodeOptions, deadline: Deadline, *, whole: bool, lone_page_samples: int = 0
) -> Iterator[Block]:
    """One stream through the codec library, its frames gathered so that Python takes few steps over them.

    `lone_page_samples` is the length of an Ogg link whose sound lies on one page.
    """
    fifo: Any = None
    described: tuple[int, int] | None = None
    excess = taken = 0
    with opened(kind, data, options, deadline) as container:
        stream = find_stream(container, "audio")
        context = stream.codec_context
        context.options = {"err_detect": "crccheck+explode"}
        new_fifo = codecs().AudioFifo
        packets = container.demux(stream)
        seen = False
        # From one page the library takes the first Vorbis packet, which has no sound of its own, for sound, and cuts as
        # much too much off the end; so it is told to leave both ends to us.
        lone = lone_page_samples if context.name == "vorbis" else 0
        if lone:
            context.flags2 |= _SKIP_MANUAL
        try:
            for packet in packets:
                if packet.is_corrupt and kind != "wav":
                    raise DecodeError("truncated", "the last packet is cut")
                duration = packet.duration
                for frame in packet.decode():
                    if lone and packet.pts == 0:
                        continue
                    described_now = (frame.sample_rate, frame.layout.nb_channels)
                    if fifo is not None and (described_now != described or fifo.samples >= _HELD_SAMPLES):
                        deadline.check()
                        rate_hz, block = _drained(fifo, described)
                        taken += len(block)
                        yield rate_hz, block
                        fifo = None
                    if fifo is None:
                        fifo, described = new_fifo(), described_now
                        if not 1 <= described_now[1] <= _MAX_CHANNELS:
                            raise DecodeError("too_large", f"{described_now[1]} channels")
                    # The last packet of an MP4 states how much of its frame is sound, and the library plays all of it.
                    excess = 0
                    if kind == "mp4" and duration and frame.pts == packet.pts:
                        excess = max(0, frame.samples - round(duration * stream.time_base * frame.sample_rate))
                    frame.pts = None
                    fifo.write(frame)
                    seen = True
        except (ValueError, DecodeError) as error:
            if kind == "flac" and isinstance(error, ValueError) and not any(packet.size for packet in islice(packets, 2)):
                error = DecodeError("truncated", "the last FLAC frame is cut")
                if whole:
                    raise error from None
            if whole or not seen or (isinstance(error, DecodeError) and error.kind in ("too_large", "timeout")):
                raise
            excess = 0
        if fifo is not None:
            rate_hz, block = _drained(fifo, described)
            taken += len(block)
            excess = max(0, taken - lone) if lone else excess
            yield rate_hz, block[: len(block) - excess]


def _drained(fifo: Any, described: tuple[int, int] | None) -> Block:
    assert described is not None
    rate_hz, channels = described
    frame = fifo.read()
    return rate_hz, to_mono(frame.to_ndarray(), channels, planar=frame.format.is_planar)
