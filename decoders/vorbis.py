"""Vorbis in Ogg without the library's demuxer: packets by the lacing values of pages that `ogg.py` has checked, and decoders kept for
the next file with the same headers.

Opening a container, and making the tables of a Vorbis decoder, take a third of the time of a clip of two seconds. Only the plain case
is read here: one stream of whole pages, three headers on pages of their own, and audio from there on. What is anything else is the
demuxer's, whose answer is the same in the plain case, but for a cut-off beginning, which it plays.
"""

import re
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from treadle.decoders.coded import HELD_SAMPLES, mono_of
from treadle.decoders.limits import Deadline
from treadle.decoders.media import codecs, media_errors
from treadle.decoders.resample import Block
from treadle.decoders.spare import Spares

_CONTINUED, _FIRST, _LAST = 1, 2, 4
_IDENTIFICATION = re.compile(rb"\x01vorbis\0{4}[\x01-\x08].{3}[\0-\x7f].{13}\x01", re.DOTALL)
"""Version 0, up to eight channels, a rate, bit rates, the lengths of blocks, and the end's mark."""
_NUM_HEADERS = 3
_MAX_BYTES, _MAX_PACKETS = 1 << 22, 1 << 15
"""What is held at once; longer recordings are read piece by piece."""
_PADDING = bytes(64)
_DECODERS = Spares[tuple[bytes, bytes], Any](8)
"""By the headers that made their tables."""


class NotPlain(Exception):
    """The demuxer is to read this one."""


class _Page(NamedTuple):
    """The audio packets that are complete on a page, and the samples of the stream up to there."""

    packets: list[memoryview]
    position: int


def vorbis_blocks(link: memoryview, deadline: Deadline) -> Generator[Block]:
    """The sound of one link, whose pages are known to be whole, in order, and of one stream.

    Raises:
        NotPlain: it is to be read through the demuxer; raised before the first block.
        DecodeError: the sound is damaged.
    """
    headers, pages = _split(link)
    decoder = _DECODERS.take(headers) or _decoder(headers)
    try:
        with media_errors():
            yield from _decoded(decoder, pages, deadline)
    except Exception:
        decoder = None
        raise
    finally:
        if decoder is not None:
            decoder.flush_buffers()
            _DECODERS.give(headers, decoder)


def _decoded(decoder: Any, pages: list[_Page], deadline: Deadline) -> Iterator[Block]:
    new, decode = codecs().Packet, decoder.decode
    fifo: Any = codecs().AudioFifo()
    write = fifo.write
    taken = begin = before = position = 0
    for number, page in enumerate(pages):
        deadline.check()
        if number == 1 and fifo.samples > position:
            # A recording that was cut between packets: what is before its beginning is decoded for what follows alone.
            fifo.read(fifo.samples - position)
        begin = before = taken + fifo.samples
        # Where packets lack, the demuxer reckons in another way.
        if begin != position and not taken:
            raise NotPlain
        if fifo.samples >= HELD_SAMPLES:
            block = _block(fifo)
            taken += len(block[1])
            yield block
        position = page.position
        try:
            for data in page.packets:
                before = taken + fifo.samples
                for frame in decode(new(data)):
                    write(frame)
        except ValueError as error:
            if taken:
                raise
            raise NotPlain from error
    if not fifo.samples:
        return
    rate_hz, samples = _block(fifo)
    end = taken + len(samples)
    if len(pages) == 1:
        # Nothing tells where it begins, so it begins with the first sample.
        excess = max(0, end - pages[0].position)
    else:
        excess = end - begin - (pages[-1].position - pages[-2].position)
        excess = excess if 0 < excess <= end - before else 0
    yield rate_hz, samples[: len(samples) - excess]


def _block(fifo: Any) -> Block:
    frame = fifo.read()
    return frame.sample_rate, mono_of(frame)


def _split(link: memoryview) -> tuple[tuple[bytes, bytes], list[_Page]]:
    """The headers that a decoder needs, and pages of audio."""
    if len(link) > _MAX_BYTES:
        raise NotPlain
    headers: list[bytes] = []
    pages: list[_Page] = []
    at, count, begun = 0, 0, b""
    last = False
    packets: list[memoryview] = []
    while at < len(link):
        flags, num_lacing = link[at + 5], link[at + 26]
        lacing = bytes(link[at + 27 : at + 27 + num_lacing])
        begin = at + 27 + num_lacing
        at = begin + sum(lacing)
        if last or bool(flags & _CONTINUED) != bool(begun) or (flags & _FIRST and headers):
            raise NotPlain
        last = bool(flags & _LAST)
        body = memoryview(b"".join((begun, link[begin:at])))
        place, end = 0, len(begun)
        packets = []
        for value in lacing:
            end += value
            if value < 255:
                packets.append(body[place:end])
                place = end
        begun = bytes(body[place:end])
        position = int.from_bytes(link[begin - num_lacing - 21 : begin - num_lacing - 13], "little", signed=True)
        if len(headers) < _NUM_HEADERS:
            headers += map(bytes, packets)
            if len(headers) > _NUM_HEADERS or last or (begun and len(headers) == _NUM_HEADERS) or position not in (0, -1):
                raise NotPlain
            continue
        count += len(packets)
        # An odd first byte marks a header; an empty packet has none.
        if (position > 0) != bool(packets) or count > _MAX_PACKETS or not all(packet and packet[0] & 1 == 0 for packet in packets):
            raise NotPlain
        if packets:
            pages.append(_Page(_padded(packets), position))
    if begun or not last or not pages or not packets:
        raise NotPlain
    identification, comments, setup = headers
    if not _IDENTIFICATION.fullmatch(identification) or not comments.startswith(b"\x03vorbis") or not setup.startswith(b"\x05vorbis"):
        raise NotPlain
    short, long = identification[28] & 15, identification[28] >> 4
    if not 6 <= short <= long <= 13:
        raise NotPlain
    return (identification, setup), pages


def _padded(packets: list[memoryview]) -> list[memoryview]:
    """The same, each with zeros behind it: of a packet that ends early, as it may, the library reads on."""
    body = memoryview(_PADDING.join((*packets, b"")))
    padded: list[memoryview] = []
    place = 0
    for packet in packets:
        padded.append(body[place : place + len(packet)])
        place += len(packet) + len(_PADDING)
    return padded


def _decoder(headers: tuple[bytes, bytes]) -> Any:
    """A decoder at the beginning of a stream.

    Raises:
        NotPlain: the library refuses the headers.
    """
    identification, setup = headers
    av = codecs()
    decoder = av.CodecContext.create("vorbis", "r")
    # The number of headers less one, the lengths of all but the last, and the headers: of the comments none is read.
    decoder.extradata = b"".join((b"\x02", bytes((len(identification), 0)), identification, setup))
    decoder.options = {"err_detect": "crccheck+explode"}
    decoder.thread_count = 1
    try:
        decoder.open()
    except av.error.FFmpegError as error:
        raise NotPlain from error
    return decoder
