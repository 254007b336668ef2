"""VP8 through libvpx itself, the copy that PyAV brings: FFmpeg's decoders of VP8 leave out what damage took away and say nothing.

Of a frame whose data ends early FFmpeg's own decoder keeps a part as its memory was; its libvpx decoder shows what the library
made of it without asking whether that is whole. The library knows: a read beyond a partition's end marks the frame, and every
frame that is predicted from it.
"""

import ctypes
import ctypes.util
import functools
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import DecodeOptions, check_pixels
from treadle.decoders.media import codecs

_ABI_VERSION = 12
"""Of the library's decoder interface; another one's structures may differ, and it refuses to begin."""
_GET_FRAME_CORRUPTED = 257
_I420 = 0x102
_KEY_HEADER_BYTES = 10
_START_CODE = b"\x9d\x01\x2a"


class _Context(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("interface", ctypes.c_void_p),
        ("error", ctypes.c_int),
        ("detail", ctypes.c_char_p),
        ("flags", ctypes.c_long),
        ("config", ctypes.c_void_p),
        ("private", ctypes.c_void_p),
    )


class _Config(ctypes.Structure):
    _fields_ = (("threads", ctypes.c_uint), ("width", ctypes.c_uint), ("height", ctypes.c_uint))


class _Image(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int),
        ("colour_space", ctypes.c_int),
        ("range", ctypes.c_int),
        ("stored", ctypes.c_uint * 3),
        ("width", ctypes.c_uint),
        ("height", ctypes.c_uint),
        ("render", ctypes.c_uint * 2),
        ("chroma_shifts", ctypes.c_uint * 2),
        ("planes", ctypes.c_void_p * 4),
        ("strides", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The libvpx that PyAV loaded: a wheel's own, the environment's or the system's.

    Raises:
        DecodeError: there is none of the known interface.
    """
    home = Path(codecs().__file__).parent
    folders = ((home.parent, "av.libs/libvpx*"), (home, ".dylibs/libvpx*"), (Path(sys.prefix), "lib/libvpx*"))
    paths = [str(path) for folder, pattern in folders for path in sorted(folder.glob(pattern))]
    for path in [*paths, ""]:
        # The system's is asked for last: to find it starts processes.
        path = path or ctypes.util.find_library("vpx") or "libvpx"
        try:
            library = ctypes.CDLL(path)
            library.vpx_codec_vp8_dx.restype = ctypes.c_void_p
            library.vpx_codec_dec_init_ver.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_long, ctypes.c_int]
            library.vpx_codec_decode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_long]
            library.vpx_codec_get_frame.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            library.vpx_codec_get_frame.restype = ctypes.POINTER(_Image)
            library.vpx_codec_control_.argtypes = [ctypes.c_void_p, ctypes.c_int]
            library.vpx_codec_error_detail.argtypes = library.vpx_codec_destroy.argtypes = [ctypes.c_void_p]
            library.vpx_codec_error_detail.restype = ctypes.c_char_p
            context = _Context()
            if _begin(library, context) == 0:
                library.vpx_codec_destroy(ctypes.byref(context))
                return library
        except (OSError, AttributeError):
            continue
    raise DecodeError("unsupported", "VP8 is read where PyAV brings libvpx, to tell damage; none was found beside it")


def _begin(library: ctypes.CDLL, context: _Context) -> int:
    config = _Config(threads=1)
    return int(library.vpx_codec_dec_init_ver(ctypes.byref(context), library.vpx_codec_vp8_dx(), ctypes.byref(config), 0, _ABI_VERSION))


class Vp8Decoder:
    """The decoder of one stream; where it may be `turned`, FFmpeg's, `told`, decodes its first frame too, to tell how."""

    def __init__(self, told: Any, options: DecodeOptions, *, turned: bool) -> None:
        self._told, self._options, self._ask = told, options, turned
        # The container's, before FFmpeg decodes: it takes the bit that says no sum needs clamping for one of full range, and
        # ITU-R 601 for the matrix whatever the container says, which holds where that says nothing.
        self._colour = told.colorspace, told.color_range
        self.model: Any = None
        """The first frame as FFmpeg shows it, where it was asked."""
        self._library, self._context = _library(), _Context()
        if _begin(self._library, self._context):
            raise DecodeError("too_large", "libvpx has no memory for a decoder")
        weakref.finalize(self, self._library.vpx_codec_destroy, ctypes.byref(self._context))

    def decode(self, packet: Any) -> list[Any]:
        """The packet's frame, if it shows one; no packet, or an empty one, asks for frames that wait, which VP8 has none of.

        Raises:
            DecodeError: its data is damaged or ends early, or that of a frame that it is predicted from.
        """
        data = b"" if packet is None else bytes(packet)
        if not data:
            return []
        if self._ask and self.model is None:
            self.model = next(iter(self._told.decode(packet)), None)
        if data[0] & 1 == 0:
            if len(data) < _KEY_HEADER_BYTES or data[3:6] != _START_CODE:
                raise DecodeError("corrupt", "a VP8 key frame does not begin with its start code")
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (6, 8))
            check_pixels(height, width, self._options)
        context = ctypes.byref(self._context)
        if self._library.vpx_codec_decode(context, data, len(data), None, 0):
            detail = self._library.vpx_codec_error_detail(context) or b"no detail"
            raise DecodeError("corrupt", f"libvpx: {detail.decode(errors='replace')}")
        marked = ctypes.c_int(0)
        if self._library.vpx_codec_control_(context, _GET_FRAME_CORRUPTED, ctypes.byref(marked)) or marked.value:
            raise DecodeError("corrupt", "a VP8 frame's data ends before the frame does")
        place = ctypes.c_void_p()
        image = self._library.vpx_codec_get_frame(context, ctypes.byref(place))
        return [self._frame(image.contents)] if image else []

    def _frame(self, image: _Image) -> Any:
        if image.format != _I420:
            raise DecodeError("unsupported", f"VP8 pixels of libvpx's format {image.format}")
        frame = codecs().VideoFrame(image.width, image.height, "yuv420p")
        frame.colorspace, frame.color_range = self._colour
        for plane, address, stride in zip(frame.planes, image.planes, image.strides, strict=False):
            memory = (ctypes.c_uint8 * (stride * (plane.height - 1) + plane.width)).from_address(address)
            seen = np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), (plane.height, plane.width), (stride, 1))
            np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width] = seen
        return frame
