"""GIF: the blocks up to the first frame are walked here, for the size that its canvas takes, before the library opens it."""

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import DecodeOptions

_EXTENSION, _FRAME = 0x21, 0x2C


def read_gif_size(data: memoryview, options: DecodeOptions) -> tuple[int, int]:
    """Height and width of the canvas, which a first frame may widen.

    Raises:
        DecodeError: the file ends before its first frame, or holds none.
    """
    size = len(data)
    if size < 13:
        raise DecodeError("truncated", "the GIF ends inside its header")
    width, height = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    for _ in range(options.max_chunks):
        if at >= size:
            break
        if data[at] == _FRAME:
            left, top, across, down = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (1, 3, 5, 7))
            if at + 10 > size:
                break
            return max(height, top + down), max(width, left + across)
        if data[at] != _EXTENSION:
            raise DecodeError("corrupt", f"GIF block {data[at]:#x} at byte {at}")
        at += 2
        while at < size and data[at]:
            at += 1 + data[at]
        at += 1
    raise DecodeError("truncated", "the GIF ends before its first frame")
