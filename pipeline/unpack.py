"""Unpacking of gz and zst streams: bounded memory, every byte before a damage delivered, every damage told.

gzip members are unwrapped here, so that the data before a bad CRC is not lost with it; zstd frames are walked block by block
(at most 128 KiB each), so that a few packed bytes cannot become gigabytes in one step.
"""

import zlib
from collections.abc import Iterator
from typing import Protocol

from treadle.pipeline.storage import ByteStream, StorageError

OUTPUT_BYTES = 1 << 20
INPUT_BYTES = 1 << 18
MAX_WINDOW_BYTES = 1 << 27
"""Largest zstd window, what `zstd` itself accepts without --long."""

MAX_HEADER_BYTES = 1 << 20
"""Most bytes of a gzip header: its optional name and comment have no bound of their own."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class UnpackError(Exception):
    """A packed stream that cannot be unpacked past `offset` of the unpacked stream.

    Kinds: `truncated_gzip`, `bad_gzip`, `gzip_crc`, `truncated_zstd`, `bad_zstd`, `zstd_checksum`.
    """

    def __init__(self, kind: str, offset: int, detail: str) -> None:
        super().__init__(kind, offset, detail)
        self.kind = kind
        self.offset = offset
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.offset} of the unpacked stream: {self.detail}"


class _Damage(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class _Input:
    """Packed bytes with a look-ahead."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._held = b""
        self._at = 0
        self._ended = False

    def available(self) -> bytes:
        """Some packed bytes, at least one unless the stream has ended; they stay until `used`."""
        if self._at >= len(self._held) and not self._ended:
            self._held, self._at = self._stream.read(INPUT_BYTES), 0
            self._ended = not self._held
        return self._held[self._at :] if self._at else self._held

    def used(self, n: int) -> None:
        self._at += n

    def peek(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end."""
        while len(self._held) - self._at < n and not self._ended:
            piece = self._stream.read(max(INPUT_BYTES, n))
            self._ended = not piece
            self._held, self._at = self._held[self._at :] + piece, 0
        return self._held[self._at : self._at + n]

    def take(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end, gone from the input."""
        data = self.peek(n)
        self._at += len(data)
        return data


class UnpackedStream(ByteStream):
    """The unpacked bytes of a gz or zst stream, from its start."""

    def __init__(self, packed: ByteStream, pieces: Iterator[bytes]) -> None:
        super().__init__(packed.url, 0)
        self._packed = packed
        self._pieces = pieces
        self._held = b""
        self._at = 0
        self._error: UnpackError | StorageError | None = None

    def read(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end and before a damage.

        Raises:
            UnpackError: there is nothing left before a damage.
            StorageError: the packed stream cannot be read.
        """
        if self._at + n <= len(self._held):
            data = self._held[self._at : self._at + n]
            self._at += n
        else:
            pieces = [self._held[self._at :]]
            have = len(pieces[0])
            self._held, self._at = b"", 0
            while have < n and (piece := self._next(bool(have))):
                pieces.append(piece)
                have += len(piece)
            data = b"".join(pieces)
            if have > n:
                self._held, data = data[n:], data[:n]
        self.position += len(data)
        return data

    def _next(self, holding: bool) -> bytes:
        if self._error is None:
            try:
                return next(self._pieces, b"")
            except _Damage as damage:
                self._error = UnpackError(damage.kind, 0, damage.detail)
            except StorageError as error:
                self._error = error
        if holding:
            return b""
        raise type(self._error)(self._error.kind, self.position, self._error.detail)

    def close(self) -> None:
        self._packed.close()


def unpacked(stream: ByteStream) -> ByteStream:
    """`stream` unpacked if its first bytes say that it is gz or zst, else as it is. It stands at its start."""
    source = Peekable(stream)
    magic = source.peek(4)
    if magic[:2] == _GZIP_MAGIC:
        return UnpackedStream(stream, _gzip_pieces(_Input(source)))
    if magic == _ZSTD_MAGIC or (magic[1:] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F):
        return UnpackedStream(stream, _zstd_pieces(_Input(source)))
    return source


class Peekable(ByteStream):
    """A stream whose first bytes have been looked at."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__(stream.url, stream.position)
        self._stream = stream
        self._held = b""

    @property
    def size(self) -> int | None:
        return self._stream.size

    def peek(self, n: int) -> bytes:
        self._held = self._stream.read(n)
        return self._held

    def read(self, n: int) -> bytes:
        if not self._held:
            return self._stream.read(n)
        held, self._held = self._held, b""
        if len(held) >= n:
            self._held = held[n:]
            return held[:n]
        return held + self._stream.read(n - len(held))

    def skip(self, n: int) -> int:
        used = min(n, len(self._held))
        self._held = self._held[used:]
        return used + (self._stream.skip(n - used) if n > used else 0)

    def back(self, n: int) -> bool:
        return not self._held and self._stream.back(n)

    def close(self) -> None:
        self._stream.close()


class _Inflater(Protocol):
    """What zlib.decompressobj gives; its type has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...
    def copy(self) -> "_Inflater": ...


def _gzip_pieces(source: _Input) -> Iterator[bytes]:
    """The content of every gzip member in a row. Zeros may follow; anything else may not."""
    while True:
        _skip_gzip_header(source)
        inflater: _Inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        crc = length = 0
        while not inflater.eof:
            data = source.available()
            if not data:
                while piece := inflater.decompress(b"", OUTPUT_BYTES):
                    yield piece
                raise _Damage("truncated_gzip", "the packed stream ends within a gzip member")
            before = inflater.copy()
            try:
                piece = inflater.decompress(data, OUTPUT_BYTES)
            except zlib.error as error:
                yield from _salvage(before, data, OUTPUT_BYTES)
                raise _Damage("bad_gzip", str(error)) from None
            # At the end of the data, what follows it is in both places.
            source.used(len(data) - len(inflater.unused_data if inflater.eof else inflater.unconsumed_tail))
            crc = zlib.crc32(piece, crc)
            length += len(piece)
            if piece:
                yield piece
        trailer = source.take(8)
        if len(trailer) < 8:
            raise _Damage("truncated_gzip", "the packed stream ends within a gzip trailer")
        if int.from_bytes(trailer[:4], "little") != crc or int.from_bytes(trailer[4:], "little") != length & 0xFFFFFFFF:
            raise _Damage("gzip_crc", "the unpacked bytes do not sum to what the gzip trailer says; some of them are wrong")
        while (data := source.available()) and not data.strip(b"\0"):
            source.used(len(data))
        if not data:
            return
        source.used(len(data) - len(data.lstrip(b"\0")))
        if source.peek(2) != _GZIP_MAGIC:
            raise _Damage("bad_gzip", f"{source.peek(16)!r} follows the last gzip member")


def _salvage(inflater: _Inflater, data: bytes, step: int) -> Iterator[bytes]:
    """What `inflater` still gives before the error in `data`, to the byte."""
    while data:
        before = inflater.copy()
        try:
            piece = inflater.decompress(data, step)
        except zlib.error:
            if step > 1:
                yield from _salvage(before, data, max(1, step >> 5))
            return
        data = inflater.unconsumed_tail
        if piece:
            yield piece


def _skip_gzip_header(source: _Input) -> None:
    head = source.take(10)
    if len(head) < 10:
        raise _Damage("truncated_gzip", "the packed stream ends within a gzip header")
    flags = head[3]
    if head[2] != 8 or flags & 0xE0:
        raise _Damage("bad_gzip", f"compression method {head[2]}, flags {flags:#x}")
    if flags & 4:
        size = source.take(2)
        source.take(int.from_bytes(size, "little"))
    for flag in (8, 16):
        taken = 0
        while flags & flag:
            byte = source.take(1)
            taken += 1
            if not byte:
                raise _Damage("truncated_gzip", "the packed stream ends within a gzip header")
            if byte == b"\0":
                break
            if taken > MAX_HEADER_BYTES:
                raise _Damage("bad_gzip", f"a gzip header of more than {MAX_HEADER_BYTES} bytes")
    if flags & 2:
        source.take(2)


def _zstd_pieces(source: _Input) -> Iterator[bytes]:
    """The content of every zstd frame in a row, a block at a time."""
    import zstandard

    def exactly(n: int) -> bytes:
        data = source.take(n)
        if len(data) < n:
            raise _Damage("truncated_zstd", "the packed stream ends within a zstd frame")
        return data

    def decompressed(data: bytes, kind: str) -> bytes:
        try:
            return decompressor.decompress(data)
        except zstandard.ZstdError as error:
            raise _Damage(kind, str(error)) from None

    while magic := source.take(4):
        if magic != _ZSTD_MAGIC:
            if not magic.strip(b"\0") and not _rest_is_data(source):
                return
            if magic[1:] != b"\x2a\x4d\x18" or not 0x50 <= magic[0] <= 0x5F:
                raise _Damage("truncated_zstd" if len(magic) < 4 else "bad_zstd", f"{magic!r} is no zstd frame")
            left = int.from_bytes(exactly(4), "little")
            while left:
                left -= len(exactly(min(left, INPUT_BYTES)))
            continue
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        descriptor = exactly(1)
        flags = descriptor[0]
        single = flags >> 5 & 1
        rest = exactly((0 if single else 1) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6])
        decompressed(magic + descriptor + rest, "bad_zstd")
        last = False
        while not last:
            head = exactly(3)
            word = int.from_bytes(head, "little")
            last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
            if kind == 3 or (size > 1 << 17):
                raise _Damage("bad_zstd", f"a block of type {kind} and {size} bytes")
            piece = decompressed(head + exactly(1 if kind == 1 else size), "bad_zstd")
            if piece:
                yield piece
        if flags & 4:
            decompressed(exactly(4), "zstd_checksum")


def _rest_is_data(source: _Input) -> bool:
    """Whether anything but zeros follows."""
    while data := source.available():
        if data.strip(b"\0"):
            return True
        source.used(len(data))
    return False
