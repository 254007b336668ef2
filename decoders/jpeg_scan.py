"""Walks a sequential JPEG's Huffman codes without making pixels: libjpeg only warns of damage, and not every way to it passes the
warning on. A microsecond or two a code, for the rare files that the fast path has no name for."""

from dataclasses import dataclass, field
from mmap import mmap

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline
from treadle.decoders.sniff import searchable

_SEQUENTIAL = {0xC0, 0xC1}
_CHECK_EVERY = 1024
_Table = list[tuple[int, int]]
"""Bits and symbol of the code that each 16-bit window begins with; 0 bits for none."""


@dataclass(slots=True)
class _State:
    """What the markers so far have said."""

    height: int = 0
    width: int = 0
    sampling: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Horizontal and vertical factor by component."""
    tables: dict[int, _Table] = field(default_factory=dict[int, _Table])
    """By class and destination, as DHT states them."""
    restart: int = 0
    scanned: set[int] = field(default_factory=set[int])


def check_scans(data: memoryview, deadline: Deadline) -> None:
    """Checks that every scan holds exactly the codes of its blocks.

    Raises:
        DecodeError: it does not, or the JPEG is not sequential.
    """
    raw, at, state = searchable(data), 2, _State()
    while at + 4 <= len(raw):
        marker = raw[at + 1]
        if raw[at] != 0xFF:
            raise DecodeError("corrupt", f"no JPEG marker at byte {at}")
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xD9:
            break
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        length = int.from_bytes(raw[at + 2 : at + 4], "big")
        body = raw[at + 4 : at + 2 + length]
        at += 2 + length
        if marker in _SEQUENTIAL:
            state.height, state.width = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
            state.sampling = {body[i]: (body[i + 1] >> 4, body[i + 1] & 15) for i in range(6, 6 + 3 * body[5], 3)}
            if not all(1 <= factor <= 4 for pair in state.sampling.values() for factor in pair):
                raise DecodeError("corrupt", "a JPEG sampling factor outside 1 to 4")
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            raise DecodeError("unsupported", "a progressive or arithmetic JPEG of unusual chroma sampling")
        elif marker == 0xC4:
            _read_tables(body, state)
        elif marker == 0xDD:
            state.restart = int.from_bytes(body[:2], "big")
        elif marker == 0xDA:
            at = _check_scan(raw, at, body, state, deadline)
    if state.scanned != set(state.sampling):
        raise DecodeError("corrupt", "a JPEG component without a scan")


def _read_tables(body: bytes, state: _State) -> None:
    at = 0
    while at + 17 <= len(body):
        counts = body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        table: _Table = []
        place = 0
        for bits, count in enumerate(counts, 1):
            for symbol in symbols[place : place + count]:
                table += [(bits, symbol)] * (1 << 16 - bits)
            place += count
        if len(table) > 1 << 16 or len(symbols) < sum(counts):
            raise DecodeError("corrupt", "an impossible JPEG Huffman table")
        state.tables[body[at]] = table + [(0, 0)] * ((1 << 16) - len(table))
        at += 17 + sum(counts)


def _check_scan(raw: bytes | mmap, start: int, body: bytes, state: _State, deadline: Deadline) -> int:
    """Checks one scan; answers where the marker behind it stands."""
    most = [max(factors[side] for factors in state.sampling.values()) for side in (0, 1)]
    parts: list[tuple[int, _Table, _Table]] = []
    units = (-(-state.width // (8 * most[0])), -(-state.height // (8 * most[1])))
    for i in range(1, 1 + 2 * body[0], 2):
        across, down = state.sampling[body[i]]
        if body[0] == 1:
            # A lone component is scanned by its own blocks, those beyond the picture's edge left out.
            units = (-(-state.width * across // (8 * most[0])), -(-state.height * down // (8 * most[1])))
            across = down = 1
        parts.append((across * down, state.tables[body[i + 1] >> 4], state.tables[0x10 | body[i + 1] & 15]))
        state.scanned.add(body[i])
    left = units[0] * units[1]
    at, number = start, 0
    while left:
        end = _segment_end(raw, at)
        count = min(left, state.restart or left)
        _check_segment(raw[at:end].replace(b"\xff\0", b"\xff"), count, parts, deadline)
        left -= count
        at = end
        if left:
            if raw[end : end + 2] != bytes((0xFF, 0xD0 + number % 8)):
                raise DecodeError("corrupt", f"no JPEG restart marker {number % 8} at byte {end}")
            at, number = end + 2, number + 1
    return at


def _segment_end(raw: bytes | mmap, at: int) -> int:
    while True:
        at = raw.find(b"\xff", at)
        if at < 0 or at + 1 >= len(raw):
            return len(raw)
        if raw[at + 1] != 0:
            return at
        at += 2


def _check_segment(segment: bytes, count: int, parts: list[tuple[int, _Table, _Table]], deadline: Deadline) -> None:
    bits = 8 * len(segment)
    padded = segment + bytes(8)
    place = 0
    for unit in range(count):
        if unit % _CHECK_EVERY == 0:
            deadline.check()
        for blocks, dc, ac in parts:
            for _ in range(blocks):
                byte = place >> 3
                size, symbol = dc[int.from_bytes(padded[byte : byte + 3], "big") >> 8 - (place & 7) & 0xFFFF]
                if size == 0 or place > bits:
                    raise DecodeError("corrupt", "the JPEG's codes do not fill its picture")
                place += size + symbol
                index = 1
                while index < 64:
                    byte = place >> 3
                    size, symbol = ac[int.from_bytes(padded[byte : byte + 3], "big") >> 8 - (place & 7) & 0xFFFF]
                    if size == 0:
                        raise DecodeError("corrupt", "a JPEG code that its table does not hold")
                    run, extra = symbol >> 4, symbol & 15
                    place += size + extra
                    if extra == 0 and run != 15:
                        break
                    index += run + 1
                if index > 64:
                    raise DecodeError("corrupt", "a JPEG block of more than 64 coefficients")
    if not 0 <= bits - place < 8:
        raise DecodeError("corrupt", f"{bits - place} bits of a JPEG scan are left over")
