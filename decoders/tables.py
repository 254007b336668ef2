"""MP4 and MOV: what a track says twice. A damaged time makes an edit list drop frames, and demuxers say nothing; but sums, ends and orders
then contradict each other."""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.errors import DecodeError

_PARENTS = {b"edts", b"mdia", b"minf", b"stbl"}
_HEADER_BYTES = {b"mvhd": (100, 112), b"tkhd": (84, 96), b"mdhd": (24, 36)}
"""Least bytes of these boxes without their own header, by version."""
_UNKNOWN = {0, 2**32 - 1, 2**64 - 1}
_MAX_REORDER = 32
"""Places that a frame may be shown before or after its turn: 16 frames by the standards, of two fields each."""
_LEAST_SAMPLES, _FEW = 8, 3
_MOST_SAMPLES = 1 << 20
"""Of whose times there is a look at each: hours of any clip. Each sample of PCM is one, and millions would take more memory than they hold."""
Boxes = dict[bytes, memoryview]


class _Edit(NamedTuple):
    duration: int
    media_time: int


def check_tracks(moov: memoryview, file_bytes: int, handler: bytes) -> None:
    """Checks the headers, edits and tables of the tracks of one handler, of an index whose boxes are known to be whole.

    Raises:
        DecodeError: two of its numbers cannot both be right.
    """
    boxes = list(_boxes(moov))
    movie = next((body for kind, body in boxes if kind == b"mvhd"), None)
    if movie is None:
        raise DecodeError("corrupt", "a 'moov' box without its 'mvhd' box")
    fragments = any(kind == b"mvex" for kind, _ in boxes)
    movie_hz, _ = _scale(b"mvhd", movie, 12, 20)
    _check_matrix(movie[-64:-28])
    tracks = [_flat(body) for kind, body in boxes if kind == b"trak"]
    lengths_s = [_length_s(track) for track in tracks]
    for number, track in enumerate(tracks):
        if bytes(track.get(b"hdlr", b"")[8:12]) != handler:
            continue
        if b"tkhd" in track and b"mdhd" in track:
            others_s = max(lengths_s[:number] + lengths_s[number + 1 :], default=0.0)
            _check_track(track, movie_hz, file_bytes, others_s, fragments=fragments)
        elif b"stbl" in track:
            raise DecodeError("corrupt", "a 'trak' box without its 'tkhd' or 'mdhd' box")


def has_samples(moov: memoryview) -> bool:
    """Whether the index names samples itself, beside those that fragments may bring."""
    for kind, body in _boxes(moov):
        times = _flat(body).get(b"stts") if kind == b"trak" else None
        if times is not None and len(times) >= 8 and int.from_bytes(times[4:8], "big"):
            return True
    return False


def _boxes(body: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(body):
        length, header = int.from_bytes(body[at : at + 4], "big"), 8
        if length == 1:
            length, header = int.from_bytes(body[at + 8 : at + 16], "big"), 16
        length = length or len(body) - at
        if length < header:
            return
        yield bytes(body[at + 4 : at + 8]), body[at + header : at + length]
        at += length


def _flat(track: memoryview) -> Boxes:
    """The boxes of one track by kind, those inside others too."""
    found: Boxes = {}
    waiting = [track]
    while waiting:
        for kind, body in _boxes(waiting.pop()):
            found.setdefault(kind, body)
            if kind in _PARENTS:
                waiting.append(body)
    return found


def _length_s(track: Boxes) -> float:
    """Seconds of a track's samples; 0 where its header or times lack."""
    header = track.get(b"mdhd", b"")
    if len(header) < _HEADER_BYTES[b"mdhd"][0]:
        return 0.0
    (hz,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    counts, deltas = _pairs(track, b"stts")
    return int((counts * deltas).sum()) / hz if hz else 0.0


def _scale(kind: bytes, body: memoryview, place: int, long_place: int) -> tuple[int, int]:
    """Ticks a second, and the duration behind them, of a movie's or media's header."""
    _check_size(kind, body)
    if body[0] == 1:
        hz, duration = struct.unpack_from(">IQ", body, long_place)
    else:
        hz, duration = struct.unpack_from(">II", body, place)
    if hz == 0:
        raise DecodeError("corrupt", f"a {kind!r} box of no ticks a second")
    return hz, duration


def _check_size(kind: bytes, body: memoryview) -> None:
    if len(body) < 4 or body[0] > 1 or len(body) < _HEADER_BYTES[kind][body[0]]:
        raise DecodeError("corrupt", f"a {kind!r} box of {len(body)} bytes, version {bytes(body[:1])!r}")


def _check_matrix(matrix: memoryview) -> None:
    """A display matrix turns, mirrors or stretches; one that shears is damaged."""
    a, b, _, c, d = struct.unpack_from(">5i", matrix)
    if (a or d) and (b or c) and (abs(abs(a) - abs(d)) > 1 << 10 or abs(abs(b) - abs(c)) > 1 << 10):
        raise DecodeError("corrupt", f"a display matrix of {a / 65536:g}, {b / 65536:g}, {c / 65536:g}, {d / 65536:g}")


def _check_track(track: Boxes, movie_hz: int, file_bytes: int, others_s: float, *, fragments: bool) -> None:
    header = track[b"tkhd"]
    _check_size(b"tkhd", header)
    (shown,) = struct.unpack_from(">Q" if header[0] == 1 else ">I", header, 28 if header[0] == 1 else 20)
    _check_matrix(header[-44:-8])
    media_hz, stated = _scale(b"mdhd", track[b"mdhd"], 12, 20)
    counts, deltas = _pairs(track, b"stts")
    total = int(counts.sum())
    if total == 0:
        return
    _check_sizes(track, total, file_bytes)
    if total > _MOST_SAMPLES:
        return
    steps = np.repeat(deltas, counts)
    shown_at = np.cumsum(steps) - steps
    offsets, shifts = _pairs(track, b"ctts")
    if len(offsets):
        if int(offsets.sum()) != total:
            raise DecodeError("corrupt", f"times to show {int(offsets.sum())} samples of {total}")
        shown_at = shown_at + np.repeat(shifts.astype(np.int32).astype(np.int64), offsets)
        if np.abs(np.argsort(shown_at, kind="stable") - np.arange(total)).max() > _MAX_REORDER:
            raise DecodeError("corrupt", "a frame that is shown far from its turn")
    edits = _edits(track)
    # Headers may lie where nothing goes by them: only what edits leave out is lost by a damaged time.
    if fragments or not _leaves_out(edits, shown_at, media_hz, movie_hz):
        return
    end, longest = int((shown_at + steps).max()), int(deltas.max())
    edited = sum(edit.duration for edit in edits)
    # Where edits end as the samples do, it is the header that lies, if one does.
    agree = _reach(edits, end, longest, media_hz, movie_hz)
    lost = shown - edited
    if not agree and shown not in _UNKNOWN and edited not in _UNKNOWN and lost > movie_hz // 100 and _is_bit(lost, len(edits) + 2):
        raise DecodeError("corrupt", f"edits of {edited} ticks in a track of {shown}")
    if len(offsets):
        _check_order(shown_at, steps)
        # A track may end before the edit that many writers give all of them alike; sound often does.
        if max(edit.duration for edit in edits) > others_s * movie_hz + 2:
            _check_ends(edits, end, longest, media_hz, movie_hz)
    if not agree:
        _check_duration(counts, deltas, shown_at, edits, stated)


def _reach(edits: list[_Edit], end: int, slack: int, media_hz: int, movie_hz: int) -> bool:
    """Whether the last edit ends where the samples do."""
    last = edits[-1]
    if last.media_time < 0 or last.duration in _UNKNOWN:
        return False
    return abs(last.media_time + last.duration * media_hz // movie_hz - end) <= slack + 2 * media_hz // movie_hz


def _leaves_out(edits: list[_Edit], shown_at: NDArray[np.int64], media_hz: int, movie_hz: int) -> bool:
    """Whether some sample begins in no edit."""
    kept = np.zeros(len(shown_at), bool)
    parts = [edit for edit in edits if edit.media_time >= 0]
    for edit in parts:
        kept |= shown_at >= edit.media_time if edit.duration in _UNKNOWN else _inside(edit, shown_at, media_hz, movie_hz)
    return bool(parts) and not kept.all()


def _inside(edit: _Edit, shown_at: NDArray[np.int64], media_hz: int, movie_hz: int) -> NDArray[np.bool_]:
    return (shown_at >= edit.media_time) & ((shown_at - edit.media_time) * movie_hz < edit.duration * media_hz)


def _is_bit(difference: int, rounding: int) -> bool:
    """Whether one bit of a number makes the difference. Headers and edits that only disagree are no damage: few tools set them all."""
    nearest = 1 << max(0, round(math.log2(max(1, difference))))
    return abs(difference - nearest) <= rounding


def _check_ends(edits: list[_Edit], end: int, slack: int, media_hz: int, movie_hz: int) -> None:
    for edit in edits:
        passed = edit.media_time + edit.duration * media_hz // movie_hz - end
        rounding = 2 * media_hz // movie_hz
        if edit.media_time < 0 or edit.duration in _UNKNOWN or passed <= slack + rounding:
            continue
        if passed <= edit.media_time + rounding and _is_bit(passed, rounding + 2):
            raise DecodeError("corrupt", f"an edit that leaves out samples and passes the end of its media by {passed} ticks")


def _check_duration(
    counts: NDArray[np.int64], deltas: NDArray[np.int64], shown_at: NDArray[np.int64], edits: list[_Edit], stated: int
) -> None:
    """Samples last as long as their track's header says, by one of the ways in which writers count."""
    usual = int(deltas[np.argmax(counts)])
    slack = 2 * usual
    if len(counts) > 1:
        # At several rates the ends of decoding and showing lie a few of the longer steps apart; a step that comes once may be damage.
        slack += 4 * max(int(deltas[counts > 1].max(initial=0)), int(np.partition(deltas, -2)[-2]))
    duration = int((counts * deltas).sum())
    last = int(np.argmax(shown_at))
    end = int(shown_at[last] + np.repeat(deltas, counts)[last])
    # Of pictures that are shown before the first some writers know nothing.
    ends = [duration, end, end - int(shown_at.min()), end - int(shown_at[0])]
    # What stands before the first edit is counted by some writers, and by others not.
    ends += [each - edit.media_time for edit in edits[:2] if edit.media_time > 0 for each in ends[:2]]
    if stated not in _UNKNOWN and min(abs(each - stated) for each in ends) > slack + stated // 500:
        raise DecodeError("corrupt", f"samples of {duration} ticks in a track of {stated}")


def _check_order(shown_at: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
    """Where frames come at one rate, a few that do not are damaged, except for gaps near the end, where a clip was cut before frames that
    others were kept for."""
    order = np.argsort(shown_at, kind="stable")
    step = int(steps[0])
    if len(order) >= _LEAST_SAMPLES and (steps[:-1] == step).all():
        gaps = np.diff(shown_at[order])
        odd = (gaps == 0) | (gaps % max(step, 1) != 0) | (gaps > _MAX_REORDER // 2 * step)
        odd[:-_MAX_REORDER] |= gaps[:-_MAX_REORDER] != step
        if 0 < int(odd.sum()) <= _FEW:
            raise DecodeError("corrupt", "a frame that is shown out of its turn")


def _check_sizes(track: Boxes, total: int, file_bytes: int) -> None:
    sizes = track.get(b"stsz")
    if sizes is not None and len(sizes) >= 12 and not any(sizes[4:8]):
        largest = int(np.frombuffer(sizes, ">u4", int.from_bytes(sizes[8:12], "big"), 12).max(initial=0))
        if largest > file_bytes:
            raise DecodeError("corrupt", f"a sample of {largest} bytes in a file of {file_bytes}")
    chunks, runs = next((track[kind] for kind in (b"stco", b"co64") if kind in track), None), track.get(b"stsc")
    if chunks is None or runs is None or len(runs) < 8:
        return
    num_chunks = int.from_bytes(chunks[4:8], "big")
    table = np.frombuffer(runs, ">u4", 3 * int.from_bytes(runs[4:8], "big"), 8).reshape(-1, 3).astype(np.int64)
    if not len(table):
        return
    spans = np.diff(np.append(table[:, 0], num_chunks + 1))
    held = int((spans * table[:, 1]).sum())
    # The last chunk may hold fewer than its run says.
    if (spans < 0).any() or int(table[:, 1].max()) > total or not 0 <= held - total < max(1, int(table[-1, 1])):
        raise DecodeError("corrupt", f"chunks of {held} samples where there are {total}")


def _pairs(track: Boxes, kind: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Counts and values of a table of such pairs."""
    body = track.get(kind)
    if body is None or len(body) < 8:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    table = np.frombuffer(body, ">u4", 2 * int.from_bytes(body[4:8], "big"), 8).astype(np.int64)
    return table[::2], table[1::2]


def _edits(track: Boxes) -> list[_Edit]:
    body = track.get(b"elst")
    if body is None or len(body) < 8:
        return []
    form = ">QqI" if body[0] == 1 else ">IiI"
    size = struct.calcsize(form)
    return [_Edit(*struct.unpack_from(form, body, 8 + size * i)[:2]) for i in range(int.from_bytes(body[4:8], "big"))]
