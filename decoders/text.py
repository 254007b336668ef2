"""Text: a byte per token, the bytes as they are."""

import codecs
from typing import Literal

import numpy as np

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline
from treadle.decoders.payload import Payload, Probe

_BLOCK_BYTES = 1 << 20


def text_span(data: memoryview, capacity: int, cut: Literal["tail", "head"], deadline: Deadline) -> tuple[int, int]:
    """The range of `data` that a row of `capacity` tokens shows.

    Raises:
        DecodeError: not one code point fits.
    """
    size = len(data)
    if size <= capacity:
        return 0, size
    start, stop = (0, capacity) if cut == "tail" else (size - capacity, size)
    # A cut before anything but a continuation byte falls between code points, valid text or not.
    edge = stop if cut == "tail" else start
    if not _continues(data[edge]) or not _is_utf8(data, deadline):
        return start, stop
    step = -1 if cut == "tail" else 1
    while 0 < edge < size and _continues(data[edge]):
        edge += step
    start, stop = (0, edge) if cut == "tail" else (edge, size)
    if start == stop:
        raise DecodeError("too_large", f"a row of {capacity} tokens holds no whole code point of the text")
    return start, stop


def decode_text(data: memoryview, capacity: int, cut: Literal["tail", "head"], deadline: Deadline) -> Payload:
    """The text's bytes, cut on a whole code point where the text is valid UTF-8."""
    start, stop = text_span(data, capacity, cut, deadline)
    array = np.frombuffer(data[start:stop], np.uint8).copy()
    count = stop - start
    return Payload(array, (count, 1, 1), (1, 1, count), count < len(data))


def probe_text(data: memoryview, capacity: int, cut: Literal["tail", "head"], deadline: Deadline) -> Probe:
    """The grid of `decode_text`."""
    start, stop = text_span(data, capacity, cut, deadline)
    return Probe((stop - start, 1, 1), (1, 1, stop - start), True)


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _is_utf8(data: memoryview, deadline: Deadline) -> bool:
    # In blocks, so that a long text is not held a second time as a string of up to four bytes a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _BLOCK_BYTES):
            deadline.check()
            decoder.decode(data[start : start + _BLOCK_BYTES])
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True
