"""What one item may cost: `DecodeOptions`, and the clock that decode loops look at."""

import math
from dataclasses import dataclass
from time import monotonic

from treadle.decoders.errors import DecodeError
from treadle.shape import require_count, settle_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """Limits and choices of a decode; an item beyond a limit is refused, its size before memory is touched.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    max_input_bytes: int = 2**30
    """Bytes of one item as stored."""
    max_pixels: int = 2**26
    """Pixels of a picture, or of a video's frame, as stored."""
    max_side_px: int = 65_535
    """Height and width of a picture or frame, pixels."""
    max_frames: int = 100_000
    """Source frames of one video that are decoded, those between strides included."""
    max_audio_s: float = 4 * 3600.0
    """Seconds of sound of one recording that are decoded."""
    max_chunks: int = 1_000_000
    """Chunks, boxes, pages or frames that a file's structure may have."""
    max_wall_s: float = 60.0
    """Seconds of wall clock that one item may take; beyond it the item is refused as `timeout`."""
    strict: bool = True
    """Refuses a JPEG that only lacks its end marker, and a recording or clip that only lacks its end; False accepts them."""
    video_min_tubes: int = 8
    """Tubes of a clip that must fit the row before frames keep their size."""
    isolate: bool = True
    """Decodes what could crash or stall a process (video, coded sound, AVIF, large pictures) in worker processes: a crash costs one
    item, and `max_wall_s` is kept by force. False decodes everything here, and looks at the clock between packets alone."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name in ("max_input_bytes", "max_pixels", "max_side_px", "max_frames", "max_chunks", "video_min_tubes"):
            require_count("DecodeOptions", name, getattr(self, name), 1, 2**31 - 1 if name == "max_pixels" else 2**62)
        for name in ("max_audio_s", "max_wall_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isnan(value):
                raise ValueError(f"DecodeOptions.{name} is {value!r}: it must be a positive number of seconds")
        for name in ("strict", "isolate"):
            flag: object = getattr(self, name)
            if not isinstance(flag, bool):
                raise ValueError(f"DecodeOptions.{name} is {flag!r}: it must be True or False")


class Deadline:
    """The wall clock of one decode."""

    __slots__ = ("_end_s", "_limit_s")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end_s = monotonic() + limit_s

    @property
    def passed(self) -> bool:
        """Whether the limit has passed."""
        return monotonic() > self._end_s

    def check(self) -> None:
        """Raises the `timeout` of a decode that has run too long.

        Raises:
            DecodeError: the limit has passed.
        """
        if self.passed:
            raise DecodeError("timeout", f"decoding took more than {self._limit_s:g} s (DecodeOptions.max_wall_s)")


def check_pixels(height: int, width: int, options: DecodeOptions) -> None:
    """Checks a picture's stated size.

    Raises:
        DecodeError: a side is zero, or the size is beyond the options.
    """
    if height < 1 or width < 1:
        raise DecodeError("corrupt", f"the header says {width} x {height} pixels")
    if height > options.max_side_px or width > options.max_side_px:
        raise DecodeError("too_large", f"{width} x {height} pixels: a side is above max_side_px {options.max_side_px}")
    if height * width > options.max_pixels:
        raise DecodeError("too_large", f"{width} x {height} pixels are above max_pixels {options.max_pixels}")
