"""The largest size of a picture whose grid fits a row: exact integer arithmetic, aspect kept, never larger than stored."""

from treadle.decoders.errors import DecodeError


def grid_side(length: int, patch: int) -> int:
    """Patches that cover `length` pixels."""
    return -(-length // patch)


def scaled_size(height: int, width: int, longer: int) -> tuple[int, int]:
    """The size whose longer side is `longer`, the other rounded half up to keep the aspect, at least one pixel."""
    if height >= width:
        return longer, max(1, (2 * width * longer + height) // (2 * height))
    return max(1, (2 * height * longer + width) // (2 * width)), longer


def fit_size(height: int, width: int, patch: int, capacity: int) -> tuple[int, int]:
    """The largest size, at most `(height, width)`, whose grid has at most `capacity` patches.

    The grid never shrinks as the longer side grows, so bisection over the longer side finds the largest.

    Raises:
        DecodeError: not even one patch fits.
    """
    if capacity < 1:
        raise DecodeError("too_large", "the row has no room for a single patch")
    if grid_side(height, patch) * grid_side(width, patch) <= capacity:
        return height, width
    fits, fails = 1, max(height, width)
    while fails - fits > 1:
        longer = (fits + fails) // 2
        h, w = scaled_size(height, width, longer)
        if grid_side(h, patch) * grid_side(w, patch) <= capacity:
            fits = longer
        else:
            fails = longer
    return scaled_size(height, width, fits)
