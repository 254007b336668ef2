"""VP8 by two decoders. Where damage makes a frame's data end early, FFmpeg's own decoder leaves the rest of the frame as it found it
and says nothing; libvpx goes on as the standard says. On a whole stream the standard leaves no choice: both give the same pixels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.errors import DecodeError
from treadle.decoders.media import codecs

_COLOUR_PLANES = 3


class SecondOpinion:
    """A second decoder that is given every packet of the stream."""

    def __init__(self, max_pixels: int) -> None:
        av = codecs()
        try:
            self._context: Any = av.codec.CodecContext.create("libvpx", "r")
        except (ValueError, av.error.FFmpegError) as error:
            raise DecodeError("unsupported", f"VP8 is read where FFmpeg has libvpx, to tell damage: {error}") from error
        self._context.thread_count = 1
        self._context.options = {"max_pixels": str(max_pixels)}

    def check(self, packet: Any, frames: list[Any], before: int) -> None:
        """Compares what this decoder makes of the packet with `frames`, which `before` others preceded.

        Raises:
            DecodeError: it is something else.
        """
        seen = self._context.decode(packet)
        if len(seen) != len(frames) or not all(_alike(one, other) for one, other in zip(seen, frames, strict=True)):
            raise DecodeError("corrupt", f"frame {before} is damaged: two decoders make different pixels of it")


def _alike(one: Any, other: Any) -> bool:
    if (one.height, one.width) != (other.height, other.width):
        return False
    # A transparent clip's fourth plane is libvpx's alone.
    planes = zip(one.planes[:_COLOUR_PLANES], other.planes[:_COLOUR_PLANES], strict=True)
    return all(np.array_equal(_pixels(a), _pixels(b)) for a, b in planes)


def _pixels(plane: Any) -> NDArray[np.uint8]:
    rows = np.frombuffer(plane, np.uint8, plane.line_size * plane.height).reshape(plane.height, plane.line_size)
    return rows[:, : plane.width]
