"""The plain headers of one chunk of a tar, found and checked all at once.

Plain is a ustar or GNU header of a file, with octal size and checksum, that no extension header comes before: all that most shards
hold. Every block that has the magic is looked at; the headers are those that the sizes lead to, one after the other, so that a tar
within a file is passed over as content. Whatever is not plain is left to the reader that takes every spelling, block by block.

Python pays about 2 us for a header; here a chunk costs some thirty numpy calls, and a member about a third of that.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.tar_header import BLOCK_BYTES

LEAST_HEADERS: Final = 12
"""With fewer in a chunk, the calls cost more than they save."""

_WORDS: Final = BLOCK_BYTES // 8


def _bytes(first: int, **at: int) -> tuple[int, np.uint64]:
    """The word of a header that holds byte `first`, and a pattern of 64 bits over it: `b124=0xF8` says what is at byte 124."""
    pattern = bytearray(8)
    for name, value in at.items():
        pattern[int(name[1:]) - first] = value
    return first // 8, np.uint64(int.from_bytes(pattern, "little"))


_MAGIC: Final = (
    *_bytes(256, **{f"b{257 + i}": 0xFF for i in range(5)}),
    _bytes(256, **{f"b{257 + i}": b for i, b in enumerate(b"ustar")})[1],
)
"""Word, mask and value: `ustar`."""

_DIGIT, _ZERO, _BLANK = 0xF8, 0x30, 0xDF
"""An octal digit is `0` once its last three bits are gone; what ends a number is a zero or a space, nothing without one bit."""

_NUMBERS: Final = (
    (*_bytes(120, b124=_DIGIT, b125=_DIGIT, b126=_DIGIT, b127=_DIGIT), _bytes(120, b124=_ZERO, b125=_ZERO, b126=_ZERO, b127=_ZERO)[1]),
    (*_bytes(128, **{f"b{128 + i}": _DIGIT for i in range(7)}, b135=_BLANK), _bytes(128, **{f"b{128 + i}": _ZERO for i in range(7)})[1]),
    (*_bytes(136), np.uint64(0)),
    (*_bytes(144, b148=_DIGIT, b149=_DIGIT, b150=_DIGIT, b151=_DIGIT), _bytes(144, b148=_ZERO, b149=_ZERO, b150=_ZERO, b151=_ZERO)[1]),
    (*_bytes(152, b152=_DIGIT, b153=_DIGIT, b154=_BLANK, b156=0xFF), _bytes(152, b152=_ZERO, b153=_ZERO, b156=_ZERO)[1]),
)
"""Eleven digits of a size and what ends them; the time, which may be anything; six digits of a checksum and what ends them, then type `0`."""
_NUMBER_WORDS: Final = slice(_NUMBERS[0][0], _NUMBERS[-1][0] + 1)
_NUMBER_MASKS: Final = np.array([mask for _, mask, _ in _NUMBERS])
_NUMBER_VALUES: Final = np.array([value for _, _, value in _NUMBERS])

_PLACES: Final = np.zeros((154 - 124, 2), np.float64)
"""What the digits of bytes 124 to 154 count for in a size and in a checksum; floats hold every such number, and are multiplied faster."""
_PLACES[:11, 0] = 8 ** np.arange(10, -1, -1)
_PLACES[24:, 1] = 8 ** np.arange(5, -1, -1)

_SHORT_NAME: Final = 32
"""Bytes within which most names end: to take all hundred of each takes twice the time."""


class Member(NamedTuple):
    """A regular file of an archive. Offsets are bytes of the (unpacked) stream."""

    name: str
    header_offset: int
    """Where its headers begin, extension headers included."""
    offset: int
    """Where its content begins."""
    size: int
    """Bytes of content."""


class Members:
    """Files of an archive, a column for each of what is known of them: a tuple each would cost as much as its header."""

    __slots__ = ("headers", "names", "sizes", "starts")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.headers: list[int] = []
        """Where the headers of each begin."""
        self.starts: list[int] = []
        """Where the content of each begins."""
        self.sizes: list[int] = []

    def append(self, name: str, header: int, start: int, size: int) -> None:
        """Adds one."""
        self.names.append(name)
        self.headers.append(header)
        self.starts.append(start)
        self.sizes.append(size)

    def rows(self) -> "zip[tuple[str, int, int, int]]":
        """Name, header, start and size of each."""
        return zip(self.names, self.headers, self.starts, self.sizes, strict=True)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> Member:
        return Member(self.names[place], self.headers[place], self.starts[place], self.sizes[place])

    def __iter__(self) -> Iterator[Member]:
        return map(Member._make, self.rows())


class _Files(NamedTuple):
    """The blocks of a buffer that have the magic."""

    places: NDArray[np.intp]
    """Which blocks they are."""
    rows: NDArray[np.uint8]
    """The bytes of each, its checksum blanked."""
    sizes: NDArray[np.int64]
    """The size that each gives, where that is plain."""
    right: NDArray[np.bool_]
    """Whether each is the header of a file, checksum and all."""
    plain: NDArray[np.bool_]
    """Whether each is that and has a plain size."""


def _files(buffer: bytes | memoryview) -> _Files:
    blocks = len(buffer) // BLOCK_BYTES
    words = np.frombuffer(buffer, np.dtype("<u8"), count=blocks * _WORDS).reshape(blocks, _WORDS)
    column, mask, value = _MAGIC
    places = np.flatnonzero((words[:, column] & mask) == value)
    found = words.take(places, axis=0)
    rows = found.view(np.uint8)
    spelt = (found[:, _NUMBER_WORDS] & _NUMBER_MASKS) == _NUMBER_VALUES
    numbers = ((rows[:, 124:154] & 7) @ _PLACES).astype(np.int64)
    rows[:, 148:156] = 0x20
    # Half a header sums to 65,280 at most: sixteen bits hold it, and adding them up takes a third of the time that wider ones do.
    halves = rows.reshape(2 * len(places), BLOCK_BYTES // 2).sum(axis=1, dtype=np.uint16)
    right = spelt[:, 3] & spelt[:, 4] & (np.add(halves[::2], halves[1::2], dtype=np.int64) == numbers[:, 1])
    return _Files(places, rows, numbers[:, 0], right, right & spelt[:, 0] & spelt[:, 1])


def count_files(buffer: bytes) -> int:
    """Headers of files that can still be made out in what follows a damage."""
    return int(_files(buffer).right.sum())


class PlainHeaders:
    """The plain headers in `buffer`, whose first byte is the stream's byte `base`, of files of at most `most` bytes."""

    def __init__(self, buffer: bytes | memoryview, base: int, most: int) -> None:
        self._base = base
        self._count = 0
        if len(buffer) < LEAST_HEADERS * BLOCK_BYTES:
            return
        places, rows, sizes, _, plain = _files(buffer)
        if len(places) < LEAST_HEADERS:
            return
        self._stops = places + 1 + ((sizes + (BLOCK_BYTES - 1)) >> 9)
        plain &= (self._stops <= len(buffer) // BLOCK_BYTES) & (sizes <= most)
        ends = ~plain
        ends[:-1] |= self._stops[:-1] != places[1:]
        ends[-1] = True
        self._count, self._places, self._rows, self._sizes, self._plain = len(places), places, rows, sizes, plain
        self._ends = np.flatnonzero(ends)

    def take(self, position: int, members: Members) -> int:
        """Adds the plain members in a row from byte `position` of the buffer on; answers the byte where they end."""
        if not self._count:
            return position
        first = int(self._places.searchsorted(position // BLOCK_BYTES))
        if first == self._count or int(self._places[first]) * BLOCK_BYTES != position or not self._plain[first]:
            return position
        last = int(self._ends[self._ends.searchsorted(first)])
        stop = last + 1 if self._plain[last] else last
        heads = self._places[first:stop] * BLOCK_BYTES + self._base
        members.names += self._names(first, stop)
        members.headers += heads.tolist()
        members.starts += (heads + BLOCK_BYTES).tolist()
        members.sizes += self._sizes[first:stop].tolist()
        return int(self._stops[stop - 1]) * BLOCK_BYTES

    def _names(self, first: int, stop: int) -> list[str]:
        rows = self._rows[first:stop]
        width = 100 if rows[:, _SHORT_NAME].any() else _SHORT_NAME
        raw: list[bytes] = np.ascontiguousarray(rows[:, :width]).view(f"S{width}")[:, 0].tolist()
        names = str(b"\0".join(raw), "utf-8", "surrogateescape").split("\0")
        if len(names) != len(raw):
            # Something follows the zero that ends a name.
            names = [str(name.split(b"\0", 1)[0], "utf-8", "surrogateescape") for name in raw]
        for place in np.flatnonzero((rows[:, 345] != 0) & (rows[:, 262] == 0)).tolist():
            prefix = bytes(rows[place, 345:500]).split(b"\0", 1)[0]
            names[place] = f"{str(prefix, 'utf-8', 'surrogateescape')}/{names[place]}"
        return names
