"""What a decode answers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Extent = tuple[int, int, int]
Array = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One decoded item."""

    array: Array
    """C-contiguous: text uint8 `[n]`, image uint8 `[H, W, channels]`, video uint8 `[T, H, W, channels]`, audio float32 `[n]`."""
    grid: Extent
    """Tokens `(t, h, w)`."""
    extent: Extent
    """`(frames, height, width)` of what the array holds; `(1, 1, n)` for text and audio."""
    truncated: bool = False
    """Whether content was cut at the row's width; scaling a picture is no cut."""

    def __reduce__(self) -> "tuple[type[Payload], tuple[Array, Extent, Extent, bool]]":
        # Frozen classes with slots are pickled field by field in Python, which would double what an answer of small items costs.
        return Payload, (self.array, self.grid, self.extent, self.truncated)

    @property
    def tokens(self) -> int:
        """Tokens of the item: the grid's product."""
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True, slots=True)
class Probe:
    """What a header says a decode would answer: exact for text and images, an estimate for video and audio."""

    grid: Extent
    """Tokens `(t, h, w)`."""
    extent: Extent
    """`(frames, height, width)`; `(1, 1, n)` for text and audio."""
    exact: bool
    """Whether a decode that succeeds answers exactly this."""
