"""MP4 and MOV: boxes are walked for what is missing, and tables for entries that cannot be, since demuxers allocate by count."""

import struct
from collections.abc import Iterator
from typing import Literal

import numpy as np

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.sniff import searchable
from treadle.decoders.tables import check_tracks, has_samples

_PARENTS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf"}
_FREE = {b"free", b"skip", b"uuid", b"wide"}
_TOP = _FREE | set(b"ftyp styp moov moof mdat sidx ssix prft emsg mfra meta meco pdin pnot".split())
_SAMPLE_TABLES = set(
    b"stsd stts ctts cslg stsc stsz stz2 stco co64 stss stps stsh padb stdp sdtp sbgp csgp sgpd subs saiz saio senc".split()
)
_INSIDE = {
    b"stbl": _FREE | _SAMPLE_TABLES,
    b"moof": _FREE | {b"mfhd", b"meta", b"traf", b"pssh"},
    b"traf": _FREE | {b"tfhd", b"tfdt", b"trun", b"meta", b"udta"} | _SAMPLE_TABLES,
}
"""What ISO/IEC 14496-12 and its neighbours know there. Demuxers pass over others, and so over a table whose name is damaged."""
_REPEATED = {b"traf", b"trun"}
_NEEDED = {b"moof": {b"mfhd", b"traf"}, b"traf": {b"tfhd"}, b"stbl": {b"stsd", b"stts", b"stsc"}}
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"stps": 4}
_TRUN_OFFSET, _TRUN_FIRST_FLAGS, _TRUN_PER_SAMPLE = 0x1, 0x4, 0xF00
_MAX_DEPTH = 10
_CHECK_EVERY = 4096


class _Budget:
    """Boxes that may still be looked at."""

    def __init__(self, options: DecodeOptions, deadline: Deadline) -> None:
        self._left = self._most = options.max_chunks
        self._deadline = deadline

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise DecodeError("too_large", f"more than max_chunks {self._most} boxes")
        if self._left % _CHECK_EVERY == 0:
            self._deadline.check()


def mp4_lack(data: memoryview, media: Literal["video", "audio"], options: DecodeOptions, deadline: Deadline) -> str:
    """What the file lacks at its end, in words; empty where it is whole.

    Bytes after the index and the media that are no box are none of the clip's. What the tables of other than the wanted media say is not
    looked at.

    Raises:
        DecodeError: the index is missing, or a box contradicts its own size.
    """
    at, size = 0, len(data)
    index = found = fragments = indexed = waits = used = False
    budget = _Budget(options, deadline)
    lack = ""
    while at + 8 <= size:
        budget.spend()
        length, header, kind = _box(data, at)
        if length < header or not all(32 <= byte < 127 for byte in kind):
            if index and found and not any(searchable(data).find(more, at) >= 0 for more in (b"moof", b"mdat")):
                break
            raise DecodeError("corrupt", f"box {kind!r} of {length} bytes at byte {at}")
        if at + length > size:
            if not (index and found) or kind in (b"mdat", b"moof", b"moov"):
                lack = f"box {kind!r} at byte {at} needs {at + length - size} bytes more than the file has"
            break
        if kind in (b"moov", b"moof"):
            _check_tables(kind, data[at + header : at + length], size, budget, 0)
        if kind == b"moov":
            check_tracks(data[at + header : at + length], size, b"vide" if media == "video" else b"soun")
            # Where the index names no samples, all media are in fragments.
            waits = not has_samples(data[at + header : at + length])
        if kind == b"mdat" and ((fragments and found) or waits) and not indexed:
            raise DecodeError("corrupt", f"the media at byte {at} are of no fragment")
        # Whatever they are in, media of a file in fragments stand behind their own index; more of them may follow, but nothing between that
        # could have been an index.
        indexed = kind == b"moof" or (indexed and (kind in _TOP or not used))
        used = kind == b"mdat" or (used and kind != b"moof")
        fragments = fragments or kind == b"moof"
        index = index or kind == b"moov"
        found = found or kind == b"mdat"
        at += length
    else:
        if at < size and not (index and found):
            lack = "the file ends inside a box"
    if not index:
        raise DecodeError("truncated", lack or "the file has no index (moov)")
    return lack


def _box(data: memoryview, at: int) -> tuple[int, int, bytes]:
    """Length, header bytes and kind of the box at `at`; a length of zero means up to the end."""
    length, header = int.from_bytes(data[at : at + 4], "big"), 8
    if length == 1:
        length, header = int.from_bytes(data[at + 8 : at + 16], "big"), 16
    elif length == 0:
        length = len(data) - at
    return length, header, bytes(data[at + 4 : at + 8])


def _children(parent: bytes, body: memoryview, budget: _Budget) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(body):
        budget.spend()
        length, header, kind = _box(body, at)
        if length < header and not any(body[at:]):
            return
        if length < header or at + length > len(body):
            raise DecodeError("corrupt", f"a {kind!r} box of {length} bytes does not fit the {parent!r} box that holds it")
        yield kind, body[at + header : at + length]
        at += length


def _check_tables(parent: bytes, body: memoryview, file_bytes: int, budget: _Budget, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise DecodeError("corrupt", "boxes are nested too deep")
    seen: set[bytes] = set()
    strange: set[bytes] = set()
    timed = sized = 0
    for kind, inner in _children(parent, body, budget):
        if kind in seen and kind in _ENTRY_BYTES:
            raise DecodeError("corrupt", f"two {kind!r} boxes in one {parent!r} box")
        seen.add(kind)
        if kind not in _INSIDE.get(parent, {kind}):
            strange.add(kind)
        if kind in _PARENTS:
            _check_tables(kind, inner, file_bytes, budget, depth + 1)
            continue
        count, most = _entries(kind, inner, file_bytes)
        if count > most:
            raise DecodeError("corrupt", f"a {kind!r} box of {count} entries where {most} may be")
        if kind == b"stts":
            timed = int(np.frombuffer(inner, ">u4", 2 * count, 8)[::2].sum(dtype=np.uint64))
        elif kind in (b"stsz", b"stz2") and len(inner) >= 12:
            sized = int.from_bytes(inner[8:12], "big")
    for kind in strange:
        for known in _INSIDE[parent] - (seen - _REPEATED):
            if (int.from_bytes(kind, "big") ^ int.from_bytes(known, "big")).bit_count() == 1:
                raise DecodeError("corrupt", f"a {kind!r} box in a {parent!r} box, where {known!r} may be meant")
    if missing := _NEEDED.get(parent, set()) - seen:
        raise DecodeError("corrupt", f"a {parent!r} box without its {min(missing)!r} box")
    if sized < timed:
        raise DecodeError("corrupt", f"sizes of {sized} samples where there are times of {timed}")


def _entries(kind: bytes, body: memoryview, file_bytes: int) -> tuple[int, int]:
    """Entries that a table states, and the most that its bytes, or the file's, can back."""
    if len(body) < 8:
        return 0, 0
    flags, first = struct.unpack_from(">II", body)
    if kind in _ENTRY_BYTES:
        return first, (len(body) - 8) // _ENTRY_BYTES[kind]
    if kind == b"elst":
        return first, (len(body) - 8) // (20 if flags >> 24 == 1 else 12)
    if kind == b"stsz" and len(body) >= 12:
        (count,) = struct.unpack_from(">I", body, 8)
        return count, (file_bytes // first if first else (len(body) - 12) // 4)
    if kind == b"stz2" and len(body) >= 12:
        (count,) = struct.unpack_from(">I", body, 8)
        return count, (len(body) - 12) * 8 // max(first & 0xFF, 4)
    if kind == b"trun":
        entry = 4 * (flags & _TRUN_PER_SAMPLE).bit_count()
        header = 8 + 4 * bool(flags & _TRUN_OFFSET) + 4 * bool(flags & _TRUN_FIRST_FLAGS)
        return first, min((len(body) - header) // entry, file_bytes) if entry else file_bytes
    return 0, 0
