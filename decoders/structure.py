"""Whether a container is whole, read from its own sizes: codec libraries answer what they find of a cut file and say nothing."""

import re
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.boxes import mp4_lack
from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.sniff import Format

_TS_PACKET_BYTES = 188
_TS_NULL = 0x1FFF
_TS_TABLES = 8
"""Packets of tables that may stand before that of the programs."""
_HEAD = 0x1A45DFA3
_SEGMENT, _CLUSTER, _GROUP, _TRACKS, _TRACK, _TRACK_NUMBER = 0x18538067, 0x1F43B675, 0xA0, 0x1654AE6B, 0xAE, 0xD7
_BLOCKS = (0xA3, 0xA1)
_LACING, _LACES = 0x9C, 0x06
_INSIDE = {
    _SEGMENT: {0x114D9B74, 0x1549A966, _TRACKS, _CLUSTER, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, 0xEC, 0xBF},
    _CLUSTER: {0xE7, 0x5854, 0xA7, 0xAB, 0xA3, 0xA0, 0xAF, 0xEC, 0xBF},
    _GROUP: {0xA1, 0xA2, 0x75A1, 0x9B, 0xFA, 0xFB, 0xFD, 0xA4, 0x75A2, 0x8E, 0xC8, 0xEC, 0xBF},
}
"""What RFC 9559 lets stand in a segment, a cluster and a group of blocks: readers pass over others, and so over a damaged block."""
_CHECK_EVERY = 4096
_UNKNOWN_BYTES = 0xFFFFFFFF
_MEDIA_CHUNK = re.compile(rb"[0-9A-Fa-f]{2}[a-z]{2}|ix[0-9A-Fa-f]{2}|LIST|JUNK")
"""What an AVI's media are in: a stream's data or index, a group of such, nothing."""


def check_whole(kind: Format, media: Literal["video", "audio"], data: memoryview, options: DecodeOptions, deadline: Deadline) -> bool:
    """Whether the container's end is there; `media` are those that are wanted of it.

    Raises:
        DecodeError: it is not and the options are strict, nothing can be decoded without it, or the structure is damaged.
    """
    lack = ""
    if kind == "mp4":
        lack = mp4_lack(data, media, options, deadline)
    elif kind == "matroska":
        lack = _matroska_lack(data, options, deadline)
    elif kind == "mpegts":
        lack = _mpegts_lack(data)
    elif kind == "avi":
        lack = _riff_lack(data, options)
    if lack and options.strict:
        raise DecodeError("truncated", lack)
    return not lack


def _matroska_lack(data: memoryview, options: DecodeOptions, deadline: Deadline) -> str:
    """Walks the elements; a segment, its tracks, clusters and groups of blocks are entered, whose parts must fill them.

    Segments and clusters of unknown size, as live writers leave them, end where the next of their kind begins.
    """
    at, size = 0, len(data)
    open_: list[tuple[int, int, bool]] = [(0, size, True)]
    tracks: set[int] = set()
    unlaced: set[int] = set()
    number = 0
    for count in range(options.max_chunks):
        if count % _CHECK_EVERY == 0:
            deadline.check()
        while at == open_[-1][1] and len(open_) > 1:
            if open_.pop()[0] == _SEGMENT:
                # What follows the segment is none of the clip's.
                return ""
        parent, end, endless = open_[-1]
        if at >= end:
            return ""
        identity, id_bytes = _vint(data, at, keep_marker=True)
        length, length_bytes = _vint(data, at + id_bytes, keep_marker=False)
        if id_bytes == 0 or length_bytes == 0:
            if at + 12 > size:
                return "the file ends inside an element's header"
            raise DecodeError("corrupt", f"no Matroska element at byte {at}")
        body = at + id_bytes + length_bytes
        unknown = length == (1 << 7 * length_bytes) - 1
        after = end if unknown else body + length
        if unknown and identity not in (_SEGMENT, _CLUSTER):
            raise DecodeError("corrupt", f"a Matroska element of unknown size at byte {at}")
        if parent == _CLUSTER and endless and identity not in _INSIDE[_CLUSTER]:
            # A cluster of unknown size is over.
            open_.pop()
            continue
        if parent == _SEGMENT and endless and identity == _HEAD:
            # Another file begins.
            open_.pop()
            continue
        if after > size:
            return f"the element at byte {at} needs {after - size} bytes more than the file has"
        if after > end:
            raise DecodeError("corrupt", f"the Matroska element at byte {at} passes the end of the one that holds it")
        if identity not in _INSIDE.get(parent, {identity}):
            raise DecodeError("corrupt", f"a Matroska element {identity:#x} at byte {at} inside one of {parent:#x}")
        if identity in (_SEGMENT, _CLUSTER, _GROUP, _TRACKS) or (identity, parent) == (_TRACK, _TRACKS):
            open_.append((identity, after, unknown))
            at = body
            continue
        if (identity, parent) == (_TRACK_NUMBER, _TRACK):
            number = int.from_bytes(data[body:after], "big")
            tracks.add(number)
        elif (identity, parent) == (_LACING, _TRACK) and after > body:
            unlaced |= set() if data[after - 1] else {number}
        elif identity in _BLOCKS and parent in (_CLUSTER, _GROUP):
            of, of_bytes = _vint(data, body, keep_marker=False)
            if of not in tracks:
                raise DecodeError("corrupt", f"the Matroska block at byte {at} is of no track")
            flags = body + of_bytes + 2
            if of in unlaced and flags < after and data[flags] & _LACES:
                raise DecodeError("corrupt", f"the Matroska block at byte {at} is laced where its track has no laces")
        at = after
    raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} elements")


def _vint(data: memoryview, at: int, *, keep_marker: bool) -> tuple[int, int]:
    """A Matroska variable-length integer and its bytes; 0 bytes where there is none."""
    if at >= len(data) or data[at] == 0:
        return 0, 0
    count = 9 - data[at].bit_length()
    if at + count > len(data):
        return 0, 0
    value = int.from_bytes(data[at : at + count], "big")
    return (value if keep_marker else value & ((1 << 7 * count) - 1)), count


def seamless(kind: Format, data: memoryview) -> memoryview:
    """The same bytes; of transport streams that were joined a copy whose packets are counted through: readers take each join for a loss.

    The packets are known to be whole.
    """
    if kind != "mpegts":
        return data
    packets = _ts_packets(data)
    order, steps, gaps = _ts_steps(packets)
    if not len(gaps):
        return data
    shift = np.zeros(len(order), np.int64)
    shift[gaps] = 1 - steps[gaps - 1]
    streams = _ts_streams(packets)[order]
    shift = np.cumsum(shift)
    begin = np.searchsorted(streams, streams)
    shift -= np.where(begin > 0, shift[begin - 1], 0)
    packets = packets.copy()
    packets[order, 3] = packets[order, 3] & 0xF0 | (packets[order, 3] + shift) & 15
    return memoryview(packets.tobytes())


def _ts_packets(data: memoryview) -> NDArray[np.uint8]:
    whole = len(data) // _TS_PACKET_BYTES
    return np.frombuffer(data, np.uint8, whole * _TS_PACKET_BYTES).reshape(whole, _TS_PACKET_BYTES)


def _ts_streams(packets: NDArray[np.uint8]) -> NDArray[np.int32]:
    return (packets[:, 1].astype(np.int32) & 0x1F) << 8 | packets[:, 2]


def _ts_steps(packets: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Packets stream by stream, the counters' steps between them, and those of them that step too far.

    Packets of one stream with content count up to 15 and round; one may be sent twice, and a mark announces a jump.
    """
    streams = _ts_streams(packets)
    order = np.argsort(streams, kind="stable")
    order = order[streams[order] != _TS_NULL]
    heads = packets[:, :6][order]
    before, after = heads[:-1], heads[1:]
    steps = (after[:, 3].astype(np.int64) - before[:, 3]) & 15
    jumps = (after[:, 3] & 0x20 != 0) & (after[:, 4] > 0) & (after[:, 5] & 0x80 != 0)
    # Without content a packet has the number of the one before, which a writer may have begun with.
    filled = after[:, 3] & 0x10 != 0
    gaps = (streams[order[1:]] == streams[order[:-1]]) & (steps > 1) & filled & ~jumps
    return order, steps, np.flatnonzero(gaps) + 1


def _mpegts_lack(data: memoryview) -> str:
    packets = _ts_packets(data)
    if not (packets[:, 0] == 0x47).all():
        raise DecodeError("corrupt", "a transport packet does not begin with its sync byte")
    order, _, gaps = _ts_steps(packets)
    if len(gaps):
        # Where files were joined, all streams begin again: each at zero, with a whole table or frame, beside the table of programs.
        begins = (packets[:, 3] & 15 == 0) & (packets[:, 1] & 0x40 != 0)
        tables = np.append(np.flatnonzero(begins & (_ts_streams(packets) == 0)), len(packets) + _TS_TABLES)
        following = tables[np.searchsorted(tables, order[gaps - 1], "right")]
        lost = order[gaps][~begins[order[gaps]] | (following > order[gaps] + _TS_TABLES)]
        if len(lost):
            place = int(lost.min())
            raise DecodeError(
                "corrupt", f"packets of stream {_ts_streams(packets)[place]} are missing before byte {place * _TS_PACKET_BYTES}"
            )
    return "the file ends inside a transport packet" if len(data) % _TS_PACKET_BYTES else ""


def _riff_lack(data: memoryview, options: DecodeOptions) -> str:
    at = 0
    for _ in range(options.max_chunks):
        if bytes(data[at : at + 4]) != b"RIFF" or at + 12 > len(data):
            break
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if length == _UNKNOWN_BYTES:
            # What was written to a pipe.
            return ""
        more = at + 8 + length - len(data)
        if more > 8:
            return f"the RIFF form needs {more} bytes more than the file has"
        # Some writers count the form's own header too.
        _check_riff(data, at + 12, at + 8 + length - max(0, more), options)
        at += 8 + length + (length & 1)
    return ""


def _check_riff(data: memoryview, at: int, end: int, options: DecodeOptions) -> None:
    """Checks that an AVI's chunks, and those of its media, follow one another up to the end: readers search on for a next one."""
    ends = [end]
    for _ in range(options.max_chunks):
        while at >= ends[-1] - 1 and len(ends) > 1:
            ends.pop()
        if at + 8 > ends[-1]:
            return
        kind, length = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        after = at + 8 + length
        if after > ends[-1] or (len(ends) > 1 and not _MEDIA_CHUNK.fullmatch(kind)):
            raise DecodeError("corrupt", f"an AVI chunk {kind!r} of {length} bytes at byte {at}")
        if kind == b"LIST" and bytes(data[at + 8 : at + 12]) in (b"movi", b"rec "):
            ends.append(after)
            at += 12
        else:
            # Some writers leave out the byte that pads a chunk.
            at = after + (length & 1 and not _MEDIA_CHUNK.fullmatch(data[after : after + 4]))
    raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} chunks")
