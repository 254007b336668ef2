"""WAV: linear, float and companded samples straight from the bytes; sizes in the header are claims, not facts."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.resample import Mono, to_mono

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_UNKNOWN = 0xFFFFFFFF
_BLOCK_FRAMES = 1 << 16
_MAX_CHANNELS = 1024
_ORDERS = {b"RIFF": "<", b"RF64": "<", b"BW64": "<", b"RIFX": ">"}
_WIDTHS = {_PCM: (1, 2, 3, 4, 8), _FLOAT: (4, 8), _ALAW: (1,), _MULAW: (1,)}
"""Bytes of a sample that are read here, by format."""


class _Fmt(NamedTuple):
    """What a format chunk says."""

    tag: int
    channels: int
    rate_hz: int
    frame_bytes: int
    bits: int


@dataclass(frozen=True, slots=True)
class WavForm:
    """One RIFF form of a file."""

    fmt: _Fmt
    order: str
    """Of bytes, as `struct` and numpy write it."""
    sound: memoryview
    """The data chunk as far as the file holds it."""
    stated_frames: int
    """Frames that a compressed form says it has; its last block may hold more."""
    start: int
    end: int
    """Bytes of the file that the form takes."""

    @property
    def native(self) -> bool:
        """Whether the samples are read here; the others (ADPCM and its like) go through the codec library."""
        return self.fmt.tag in _WIDTHS

    @property
    def frames(self) -> int:
        """Whole sample frames that the file holds."""
        return len(self.sound) // self.fmt.frame_bytes


def read_wav(data: memoryview, options: DecodeOptions) -> list[WavForm]:
    """Walks a file's forms; concatenated files hold several.

    Raises:
        DecodeError: the header is damaged, or the sound lacks more than one sample frame that both sizes promise.
    """
    forms: list[WavForm] = []
    at = 0
    while at + 12 <= len(data) and bytes(data[at : at + 4]) in _ORDERS and bytes(data[at + 8 : at + 12]) == b"WAVE":
        forms.append(_read_form(data, at, options))
        at = forms[-1].end
        if len(forms) > options.max_chunks:
            raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} forms")
    if not forms:
        raise DecodeError("truncated", "the WAV ends inside its header")
    return forms


def wav_blocks(form: WavForm, deadline: Deadline) -> Iterator[Mono]:
    """The form's samples, channels averaged, block by block."""
    convert = _converter(form)
    for first in range(0, form.frames, _BLOCK_FRAMES):
        deadline.check()
        last = min(first + _BLOCK_FRAMES, form.frames)
        block = form.sound[first * form.fmt.frame_bytes : last * form.fmt.frame_bytes]
        yield to_mono(convert(block), form.fmt.channels, planar=False)


def _read_form(data: memoryview, start: int, options: DecodeOptions) -> WavForm:
    order = _ORDERS[bytes(data[start : start + 4])]
    (claimed,) = struct.unpack_from(order + "I", data, start + 4)
    large: dict[bytes, int] = {}
    fmt: _Fmt | None = None
    at, size, stated = start + 12, len(data), 0
    for _ in range(options.max_chunks):
        if at + 8 > size:
            raise DecodeError("truncated", "the WAV ends before its sound")
        kind = bytes(data[at : at + 4])
        (length,) = struct.unpack_from(order + "I", data, at + 4)
        if kind != b"data" and length > size - at - 8:
            raise DecodeError("truncated", f"the WAV ends inside its {kind!r} chunk")
        body = data[at + 8 : min(at + 8 + length, size)]
        if kind == b"ds64" and len(body) >= 16:
            large = dict(zip((b"RIFF", b"data"), struct.unpack_from(order + "QQ", body), strict=True))
        elif kind == b"fmt ":
            fmt = _read_fmt(body, order)
        elif kind == b"fact" and len(body) >= 4:
            (stated,) = struct.unpack_from(order + "I", body)
        elif kind == b"data":
            if fmt is None:
                raise DecodeError("corrupt", "the WAV's sound comes before its format")
            if length == _UNKNOWN and b"data" in large:
                length = large[b"data"]
            if claimed == _UNKNOWN and b"RIFF" in large:
                claimed = large[b"RIFF"]
            return _with_sound(data, start, at + 8, length, claimed, fmt, stated, order, options)
        at = _after_chunk(data, at + 8 + length, length)
    raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} chunks")


def _read_fmt(body: memoryview, order: str) -> _Fmt:
    if len(body) < 16:
        raise DecodeError("corrupt", f"a WAV format of {len(body)} bytes")
    tag, channels, rate_hz, _, frame_bytes, bits = struct.unpack_from(order + "HHIIHH", body)
    if tag == _EXTENSIBLE and len(body) >= 26:
        (tag,) = struct.unpack_from(order + "H", body, 24)
    if tag in (_ALAW, _MULAW):
        bits = 8
    if not 1 <= channels <= _MAX_CHANNELS:
        raise DecodeError("corrupt" if channels == 0 else "too_large", f"a WAV of {channels} channels")
    if tag in _WIDTHS:
        sample_bytes = -(-bits // 8)
        # A container wider than its samples is stated by the frame's size alone.
        if frame_bytes % channels == 0 and sample_bytes <= frame_bytes // channels <= 8:
            sample_bytes = frame_bytes // channels
        if frame_bytes not in (0, channels * sample_bytes):
            raise DecodeError("corrupt", f"WAV frames of {frame_bytes} bytes for {channels} channels of {bits} bits")
        if sample_bytes not in _WIDTHS[tag]:
            raise DecodeError("unsupported", f"WAV samples of {bits} bits, format {tag}")
        return _Fmt(tag, channels, rate_hz, channels * sample_bytes, 8 * sample_bytes)
    if frame_bytes == 0:
        raise DecodeError("corrupt", "a WAV with blocks of no bytes")
    return _Fmt(tag, channels, rate_hz, frame_bytes, bits)


def _with_sound(
    data: memoryview,
    start: int,
    first: int,
    length: int,
    claimed: int,
    fmt: _Fmt,
    stated: int,
    order: str,
    options: DecodeOptions,
) -> WavForm:
    """Decides where the sound ends: the data chunk's size, unless it was never filled in or the file proves it wrong."""
    size = len(data)
    open_ended = length == _UNKNOWN or (length == 0 and first < size and not _chunks_follow(data, first, order))
    end = size if open_ended else first + length
    if end > size:
        # Writers that stop early leave both sizes as they were planned; one that contradicts the file alone is a slip.
        # A header without one frame of sound is not cut but empty.
        missing = min(end - size, start + 8 + claimed - size)
        # A block of compressed samples is useless in part.
        least = fmt.frame_bytes if fmt.tag in _WIDTHS else 1
        if claimed not in (0, _UNKNOWN) and missing >= least and size - first >= least and options.strict:
            raise DecodeError("truncated", f"the WAV lacks {missing} bytes that its header promises")
        end = size
    after = min(end if open_ended else _after_chunk(data, end, length), size)
    while after + 8 <= size and bytes(data[after : after + 4]) not in _ORDERS:
        (other,) = struct.unpack_from(order + "I", data, after + 4)
        after = min(_after_chunk(data, after + 8 + other, other), size)
    return WavForm(fmt, order, data[first:end], stated, start, after)


def _chunks_follow(data: memoryview, at: int, order: str) -> bool:
    """Whether well-formed chunks fill the file from `at` to its end."""
    for _ in range(64):
        if at + 8 > len(data):
            return at >= len(data)
        if not all(32 <= byte < 127 for byte in data[at : at + 4]):
            return False
        (length,) = struct.unpack_from(order + "I", data, at + 4)
        at += 8 + length + (length & 1)
    return False


def _after_chunk(data: memoryview, end: int, length: int) -> int:
    """Where the next chunk begins: odd chunks are padded, except by writers that forget to."""
    if length & 1 == 0:
        return end
    padded, bare = data[end + 1 : end + 5], data[end : end + 4]
    forgotten = len(bare) == 4 and all(32 <= b < 127 for b in bare) and not (len(padded) == 4 and all(32 <= b < 127 for b in padded))
    return end if forgotten else end + 1


def _converter(form: WavForm) -> Callable[[memoryview], NDArray[np.generic]]:
    order, tag, width = form.order, form.fmt.tag, form.fmt.bits // 8
    if tag in (_ALAW, _MULAW):
        table = _alaw_table() if tag == _ALAW else _mulaw_table()
        return lambda block: table[np.frombuffer(block, np.uint8)]
    if tag == _PCM and width == 3:
        return lambda block: _widened(block, order)
    kind = "u1" if tag == _PCM and width == 1 else f"{order}{'f' if tag == _FLOAT else 'i'}{width}"
    return lambda block: np.frombuffer(block, kind)


def _widened(block: memoryview, order: str) -> NDArray[np.int32]:
    """24-bit samples in the upper bytes of 32-bit ones."""
    triples = np.frombuffer(block, np.uint8).reshape(-1, 3)
    words = np.zeros((len(triples), 4), np.uint8)
    words[:, 1:] = triples if order == "<" else triples[:, ::-1]
    return words.view("<i4")[:, 0]


def _mulaw_table() -> NDArray[np.float32]:
    """ITU-T G.711 mu-law, 14 bits in the upper end of 16."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    level = ((2 * mantissa + 33) << exponent + 2) - 132
    return (np.where(code & 128, -level, level) / 32768).astype(np.float32)


def _alaw_table() -> NDArray[np.float32]:
    """ITU-T G.711 A-law, 13 bits in the upper end of 16."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    level = np.where(exponent == 0, (2 * mantissa + 1) << 3, (2 * mantissa + 33) << np.maximum(exponent, 1) + 2)
    return (np.where(code & 128, level, -level) / 32768).astype(np.float32)
