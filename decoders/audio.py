"""Recordings: any stored form to float32 mono at one rate, exact in length, read to the row's end and no further."""

import re
from collections.abc import Generator, Iterator
from contextlib import closing
from fractions import Fraction

from treadle.decoders.coded import coded_blocks, without_padding
from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.media import find_stream, opened
from treadle.decoders.mpeg import read_adts, read_mpeg
from treadle.decoders.ogg import OggLink, read_ogg
from treadle.decoders.payload import Payload, Probe
from treadle.decoders.resample import Block, gather, resampled_count
from treadle.decoders.sniff import AUDIO_FORMATS, VIDEO_FORMATS, Format, describe, searchable, skip_id3, sniff
from treadle.decoders.structure import check_whole, seamless
from treadle.decoders.vorbis import NotPlain, vorbis_blocks
from treadle.decoders.wav import read_wav, wav_blocks
from treadle.shape import AudioShape

_FLAC_HEAD = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
_FLAC_HEAD_BYTES = 42


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
        count = sum(resampled_count(form.frames, max(form.fmt.rate_hz, 1), shape.sample_rate) for form in forms)
    else:
        check_whole(kind, "audio", data, options, deadline)
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
        raise DecodeError("unsupported", f"not a recording that is read: {describe(data)}")
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
                yield from ((form.fmt.rate_hz, block) for block in wav_blocks(form, deadline))
            else:
                part = data[form.start : form.end]
                yield from without_padding(coded_blocks("wav", part, options, deadline, whole=True), form.stated_frames)
    elif kind == "flac":
        yield from _flac_blocks(data, options, deadline)
    elif kind == "ogg":
        links, whole = read_ogg(data, options, deadline)
        for link in links:
            yield from _ogg_blocks(link, data[link.start : link.end], options, deadline, whole=whole)
    elif kind == "mp3":
        runs, whole = read_mpeg(data, options, deadline)
        for run in runs:
            # The library drops the encoder's padding from the last frame alone, and there may be more of it.
            yield from without_padding(coded_blocks("mp3", data[run.start : run.end], options, deadline, whole=whole), run.stated_samples)
    elif kind == "aac":
        first, last = read_adts(data, options, deadline)
        yield from coded_blocks("aac", data[first:last], options, deadline, whole=True)
    else:
        whole = check_whole(kind, "audio", data, options, deadline)
        yield from coded_blocks(kind, seamless(kind, data), options, deadline, whole=whole)


def _ogg_blocks(link: OggLink, part: memoryview, options: DecodeOptions, deadline: Deadline, *, whole: bool) -> Iterator[Block]:
    alone = len(link.pages) == 1 and whole
    if alone:
        try:
            yield from vorbis_blocks(part, deadline)
            return
        except NotPlain:
            pass
    lone = link.samples if link.sound_pages == 1 and alone else 0
    yield from coded_blocks("ogg", part, options, deadline, whole=whole, lone_page_samples=lone)


def _flac_blocks(data: memoryview, options: DecodeOptions, deadline: Deadline) -> Iterator[Block]:
    """Each joined file apart; one that states its samples must give them all."""
    raw, starts = searchable(data), [skip_id3(data, 0)]
    place = raw.find(b"fLaC", starts[0] + _FLAC_HEAD_BYTES)
    while place >= 0:
        if _FLAC_HEAD.match(raw, place):
            starts.append(place)
        place = raw.find(b"fLaC", place + 4)
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        if end - start < _FLAC_HEAD_BYTES or data[start + 4] & 0x7F != 0:
            raise DecodeError("truncated", "the FLAC ends inside its header")
        stated = int.from_bytes(data[start + 21 : start + 26], "big") & (1 << 36) - 1
        count = 0
        for rate_hz, block in coded_blocks("flac", data[start:end], options, deadline, whole=options.strict):
            count += len(block)
            yield rate_hz, block
        if stated and count < stated and options.strict:
            raise DecodeError("truncated", f"{count} of {stated} FLAC samples are there")
