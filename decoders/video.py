"""Clips: frames counted by decoding, in presentation order, upright, as large as the row allows, cut at the tail."""

import math
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.colour import luma
from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions, check_pixels
from treadle.decoders.media import check_packets, codecs, find_stream, media_errors, opened
from treadle.decoders.payload import Payload, Probe
from treadle.decoders.scale import fit_size, grid_side
from treadle.decoders.sniff import AUDIO_FORMATS, VIDEO_FORMATS, Format, describe, searchable, sniff
from treadle.decoders.structure import check_whole, seamless
from treadle.decoders.vp8 import Vp8Decoder
from treadle.shape import VideoShape

_HELD_BYTES = 64 << 20
"""Decoded frames may wait up to this for the clip's scale to be known; larger ones are counted first and decoded again."""
_LEAST_FRAMES = 16
_POSE_ROLLS = (b"\x76\x75\x84", b"\x76\x75\x88")
"""A Matroska track's ProjectionPoseRoll, of four or eight bytes."""
_ONE_EACH = {"hevc", "libdav1d", "av1", "libaom-av1"}
"""Decoders that hold frames back, of codecs whose packets in MP4 and Matroska show one each."""
_RASL, _IRAP = range(8, 10), range(16, 24)
"""HEVC's pictures that precede a random access point but are predicted from behind it, and those points."""
_OGG_HEAD_BYTES = 4096
"""In these an Ogg file's streams begin: a page for the header of each."""
_Frame = Any


class _Clip:
    """One file as an iterable of its frames; iterating again decodes again."""

    def __init__(self, data: memoryview, shape: VideoShape, options: DecodeOptions, deadline: Deadline) -> None:
        kind = sniff(data)
        if kind == "ogg" and b"\x80theora" in bytes(data[:_OGG_HEAD_BYTES]):
            raise DecodeError("unsupported", "not a clip that is read: Ogg")
        if kind in AUDIO_FORMATS - VIDEO_FORMATS:
            raise DecodeError("no_stream", f"a {kind} file holds sound alone")
        if kind is None or kind not in VIDEO_FORMATS:
            raise DecodeError("unsupported", f"not a clip that is read: {describe(data)}")
        self.kind: Format = kind
        self._stride, self._options, self._deadline = shape.frame_stride, options, deadline
        self.whole = check_whole(kind, "video", data, options, deadline)
        self._data = seamless(kind, data)
        self.stated_frames = 0
        """Source frames that the container counts; 0 where it does not. A hint: frames are counted by decoding."""
        self._model: _Frame = None
        self._turns: dict[int, _Turn] = {}

    def turn(self, frame: _Frame) -> "_Turn":
        """How the frame is turned, as the first one of the same angle is."""
        told = self._model or frame
        # A frame whose side data was looked at stays in memory until Python's next collection of cycles.
        if told.rotation not in self._turns:
            self._turns[told.rotation] = _turn(told)
        return self._turns[told.rotation]

    def _may_turn(self) -> bool:
        """Whether the container has words for a turn; of a Matroska it is asked of the bytes, as decoding a frame to see takes longer."""
        return self.kind != "matroska" or any(searchable(self._data).find(roll) >= 0 for roll in _POSE_ROLLS)

    def frames(self) -> Generator[_Frame]:
        """Every `frame_stride`-th frame."""
        with closing(self._decoded()) as decoded:
            yield from islice(decoded, 0, None, self._stride)

    def _decoded(self) -> Generator[_Frame]:
        options, count = self._options, 0
        with opened(self.kind, self._data, options, self._deadline) as container:
            stream = find_stream(container, "video")
            context = stream.codec_context
            self.stated_frames = _stated_frames(container, stream)
            if context.width and context.height:
                check_pixels(context.height, context.width, options)
            # Strictly by the standard, H.264 that does not say how far it reorders frames is given room for all it may.
            context.options = {"max_pixels": str(options.max_pixels), **({"strict": "1"} if context.name == "h264" else {})}
            vp8 = Vp8Decoder(context, options, turned=self._may_turn()) if context.name == "vp8" else None
            decoder, packets, unseen, points = vp8 or context, 0, 0, 0
            try:
                for packet in container.demux(stream):
                    self._deadline.check()
                    packets += packet.size > 0
                    picture = _hevc_picture(packet) if context.name == "hevc" and packet.size else -1
                    points += picture in _IRAP
                    # Where decoding begins at such a point, they cannot be shown.
                    unseen += packet.is_discard or (points < 2 and picture in _RASL)
                    cut = packet.is_corrupt
                    if cut and self.whole:
                        raise DecodeError("truncated", f"the packet after frame {count} is cut")
                    # Decoding nothing asks for the frames that wait for their turn.
                    frames = decoder.decode(None if cut else packet)
                    if not frames and packet.size and context.name == "vp9" and not (cut or packet.is_discard):
                        # Frames that are not shown share a packet with one that is.
                        raise DecodeError("corrupt", f"the packet after frame {count} shows none")
                    for frame in frames:
                        if frame.is_corrupt:
                            raise DecodeError("corrupt", f"frame {count} is damaged")
                        count += 1
                        if count > options.max_frames:
                            raise DecodeError("too_large", f"more than max_frames {options.max_frames} frames")
                        check_pixels(frame.height, frame.width, options)
                        self._model = vp8 and vp8.model
                        yield frame
                    if cut:
                        break
                else:
                    check_packets(self.kind, stream, packets)
                    if self.kind in ("mp4", "matroska") and context.name in _ONE_EACH and count + unseen < packets:
                        raise DecodeError("corrupt", f"{packets} packets show {count} frames")
            except codecs().error.ArgumentError as error:
                # The codec's answer to a frame above `max_pixels`, whatever the container said.
                raise DecodeError("too_large", f"a frame above max_pixels {options.max_pixels}: {error}") from error
            except (ValueError, DecodeError) as error:
                # Without its end a clip may stop where the damage begins, if that was asked for.
                if self.whole or count == 0 or (isinstance(error, DecodeError) and error.kind in ("too_large", "timeout")):
                    raise
        if count == 0:
            raise DecodeError("empty", "the video stream has no frame")


def _hevc_picture(packet: Any) -> int:
    """The kind of the picture in a packet whose units stand behind their lengths; -1 where it is none."""
    data, at = memoryview(packet), 0
    while at + 6 <= len(data):
        kind = data[at + 4] >> 1 & 63
        if kind < 32:
            return kind
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return -1


def decode_video(data: memoryview, shape: VideoShape, capacity: int, options: DecodeOptions, deadline: Deadline) -> Payload:
    """Decodes one clip until the row is full.

    Raises:
        DecodeError: the bytes are refused.
    """
    clip = _Clip(data, shape, options, deadline)
    with closing(clip.frames()) as frames:
        held, first = _hold(frames, shape, capacity, options)
        stored = (first.width, first.height) if clip.turn(first).swap else (first.height, first.width)
        tubes = -(-max(len(held), 1) // shape.tube_frames)
        if not held:
            with closing(clip.frames()) as again:
                wanted = _least_tubes(options, capacity) * shape.tube_frames
                tubes = -(-sum(1 for _ in islice(again, wanted)) // shape.tube_frames)
        size = _clip_size(stored, shape, capacity, min(tubes, _least_tubes(options, capacity)))
        grid_h, grid_w = grid_side(size[0], shape.patch_side), grid_side(size[1], shape.patch_side)
        most = capacity // (grid_h * grid_w) * shape.tube_frames
        if held:
            return _gather(clip, held, frames, shape, size, most)
    with closing(clip.frames()) as again:
        return _gather(clip, [], again, shape, size, most)


def probe_video(data: memoryview, shape: VideoShape, capacity: int, options: DecodeOptions, deadline: Deadline) -> Probe:
    """What the container's own counts suggest; nothing is decoded.

    Raises:
        DecodeError: the header is refused.
    """
    clip = _Clip(data, shape, options, deadline)
    with opened(clip.kind, data, options, deadline) as container:
        stream = find_stream(container, "video")
        height, width = stream.codec_context.height, stream.codec_context.width
        check_pixels(height, width, options)
        count = _stated_frames(container, stream)
    tubes = -(-max(1, -(-count // shape.frame_stride)) // shape.tube_frames)
    size = _clip_size((height, width), shape, capacity, min(tubes, _least_tubes(options, capacity)))
    grid_h, grid_w = grid_side(size[0], shape.patch_side), grid_side(size[1], shape.patch_side)
    tubes = min(tubes, capacity // (grid_h * grid_w))
    return Probe((tubes, grid_h, grid_w), (tubes * shape.tube_frames, *size), False)


def _stated_frames(container: Any, stream: Any) -> int:
    count = stream.frames or 0
    if not count and container.duration and stream.average_rate:
        count = math.ceil(container.duration / 1_000_000 * float(stream.average_rate))
    return max(0, min(count, 1 << 40))


def _hold(frames: Iterator[_Frame], shape: VideoShape, capacity: int, options: DecodeOptions) -> tuple[list[_Frame], _Frame]:
    """The first frame, and the frames that must be counted before the scale is known; no frames where they are too large."""
    first = next(frames, None)
    if first is None:
        raise DecodeError("empty", "the video stream has no frame")
    least = _least_tubes(options, capacity)
    patches = grid_side(first.height, shape.patch_side) * grid_side(first.width, shape.patch_side)
    # Where the least number of tubes fits unscaled, no count can change the scale.
    wanted = 1 if patches * least <= capacity else least * shape.tube_frames
    frame_bytes = 4 * first.height * first.width
    if wanted * frame_bytes > _HELD_BYTES and wanted > 1:
        return [], first
    return [first, *islice(frames, wanted - 1)], first


def _least_tubes(options: DecodeOptions, capacity: int) -> int:
    """Tubes that must fit the row: no row holds more tubes than tokens."""
    return max(1, min(options.video_min_tubes, capacity))


def _clip_size(stored: tuple[int, int], shape: VideoShape, capacity: int, tubes: int) -> tuple[int, int]:
    return fit_size(*stored, shape.patch_side, capacity // tubes)


def _gather(clip: _Clip, held: list[_Frame], rest: Iterator[_Frame], shape: VideoShape, size: tuple[int, int], most: int) -> Payload:
    """Converts frame by frame into one array, so that at most one frame stands beside it."""
    picture = _Converter(shape.channels, size, clip.turn)
    stated = max(len(held), -(-clip.stated_frames // shape.frame_stride)) + shape.tube_frames - 1
    out: NDArray[np.uint8] = np.empty((min(most, stated), *size, shape.channels), np.uint8)
    count, truncated = 0, False
    held.reverse()
    while True:
        frame = held.pop() if held else next(rest, None)
        if frame is None:
            break
        if count == most:
            truncated = True
            break
        if count == len(out):
            larger = np.empty((min(most, max(_LEAST_FRAMES, 2 * count)), *out.shape[1:]), np.uint8)
            larger[:count] = out
            out = larger
        picture.convert(frame, out[count])
        count += 1
    total = -(-count // shape.tube_frames) * shape.tube_frames
    # Shrinks in place, so that the clip never stands in memory twice.
    if total < len(out):
        out.resize((total, *out.shape[1:]), refcheck=False)
    elif total > len(out):
        out = np.concatenate([out, np.empty((total - len(out), *out.shape[1:]), np.uint8)])
    out[count:] = out[count - 1]
    grid = (total // shape.tube_frames, grid_side(size[0], shape.patch_side), grid_side(size[1], shape.patch_side))
    return Payload(out, grid, (total, *size), truncated)


class _Turn(NamedTuple):
    """What the display matrix asks for: first the sides swapped, then the rows or columns turned round."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False


def _turn(frame: _Frame) -> _Turn:
    """The display matrix to the nearest quarter turn, mirrored where it mirrors."""
    side_data = frame.side_data
    matrix = side_data.get("DISPLAYMATRIX") if len(side_data) else None
    if matrix is None or len(bytes(matrix)) < 20:
        return _Turn()
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return _Turn(False, d < 0, a < 0)
    return _Turn(True, b < 0, c < 0)


class _Converter:
    """Frames to upright pixels of one size."""

    def __init__(self, channels: int, size: tuple[int, int], turn: "Callable[[_Frame], _Turn]") -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self._channels, self._size, self._turn = channels, size, turn
        self._reformatter = VideoReformatter()
        # Exact arithmetic costs ten times the fast path's on a frame that keeps its size, whose error stays below 5 of 255.
        self._exact = int(Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT)
        self._fast = int(Interpolation.BILINEAR)

    def convert(self, frame: _Frame, out_HWC: NDArray[np.uint8]) -> None:
        """Writes the frame, converted by its own colour matrix and range, into `out_HWC`."""
        turn = self._turn(frame)
        height, width = self._size[::-1] if turn.swap else self._size
        same = (frame.height, frame.width) == (height, width)
        plain = same and all(component.bits <= 8 for component in frame.format.components)
        with media_errors():
            pixels = self._reformatter.reformat(
                frame,
                width=width,
                height=height,
                format="rgba" if self._channels == 4 else "rgb24",
                interpolation=self._fast if plain else self._exact,
                threads=1,
            )
        depth = 4 if self._channels == 4 else 3
        plane: Any = pixels.planes[0]
        rows = np.frombuffer(plane, np.uint8, plane.line_size * height).reshape(height, plane.line_size)
        upright = rows[:, : width * depth].reshape(height, width, depth)
        if turn.swap:
            upright = upright.swapaxes(0, 1)
        if turn.flip_rows:
            upright = upright[::-1]
        if turn.flip_columns:
            upright = upright[:, ::-1]
        if self._channels == 1:
            out_HWC[:] = luma(upright)
            return
        out_HWC[:] = upright
        if self._channels == 4:
            out_HWC[..., 3] = 255
