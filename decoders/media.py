"""Video and audio containers through PyAV: opened by a format that was told, never guessed, with everything bounded."""

import errno
import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions
from treadle.decoders.sniff import Format

_DEMUXERS: dict[Format, str] = {
    "mp4": "mov",
    "matroska": "matroska",
    "mpegts": "mpegts",
    "avi": "avi",
    "h264": "h264",
    "hevc": "hevc",
    "wav": "wav",
    "flac": "flac",
    "mp3": "mp3",
    "ogg": "ogg",
    "aac": "aac",
}

_CODECS = frozenset(
    "h264 hevc vp8 vp9 av1 libdav1d libaom-av1 mpeg4 mpeg1video mpeg2video h263 mjpeg theora prores ffv1 rawvideo "
    "msmpeg4 msmpeg4v2 wmv1 wmv2 flv dvvideo huffyuv ffvhuff utvideo png "
    "aac aac_latm mp1float mp1 mp2float mp2 mp3float mp3 ac3 eac3 flac alac vorbis libvorbis opus libopus "
    "adpcm_ms adpcm_ima_wav adpcm_ima_qt g726 adpcm_swf adpcm_yamaha gsm gsm_ms "
    "pcm_u8 pcm_s8 pcm_s16le pcm_s16be pcm_s24le pcm_s24be pcm_s32le pcm_s32be pcm_s64le pcm_s64be "
    "pcm_f32le pcm_f32be pcm_f64le pcm_f64be pcm_mulaw pcm_alaw".split()
)
"""Codecs that are read: the library's several hundred others are where decoders crash."""


class Reader:
    """The item's bytes as the file that a demuxer reads.

    The wall clock is looked at on every read: past it the file seems to end, which stops a demuxer wherever it is. Nothing
    is raised into the library, which can hold one exception and prints the others.
    """

    def __init__(self, data: memoryview, deadline: Deadline) -> None:
        self._data = data
        self._deadline = deadline
        self._at = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        if self._deadline.passed:
            return b""
        block = bytes(self._data[self._at : self._at + size])
        self._at += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves, as `io.IOBase.seek`."""
        at = offset + (0, self._at, len(self._data))[whence]
        if at < 0:
            return -errno.EINVAL
        self._at = at
        return at

    def tell(self) -> int:
        """The current byte."""
        return self._at


@functools.cache
def codecs() -> Any:
    """The PyAV module, imported on first use, its log switched off: with Python's logging it can deadlock between threads."""
    import av
    import av.logging

    av.logging.set_level(None)
    return av


@contextmanager
def media_errors() -> Generator[None]:
    """Turns what PyAV raises into the kinds of `DecodeError`."""
    av = codecs()
    try:
        yield
    except DecodeError:
        raise
    except (MemoryError, OverflowError) as error:
        raise DecodeError("too_large", f"codec: {error}") from error
    except (av.error.PatchWelcomeError, av.error.NotImplementedError, av.error.LookupError) as error:
        raise DecodeError("unsupported", f"codec: {error}") from error
    except av.error.EOFError as error:
        raise DecodeError("truncated", f"codec: {error}") from error
    except (av.error.FFmpegError, ValueError, OSError, RuntimeError, IndexError) as error:
        if getattr(error, "errno", None) == errno.EOPNOTSUPP:
            raise DecodeError("unsupported", f"codec: {error}") from error
        raise DecodeError("corrupt", f"codec: {error}") from error


@contextmanager
def opened(kind: Format, data: memoryview, options: DecodeOptions, deadline: Deadline) -> Generator[Any]:
    """The container, closed on the way out even when decoding is left early.

    Raises:
        DecodeError: its header is refused.
    """
    # Opening would decode the first frames to look at them, a whole key frame of a large clip, and with whatever codec the
    # file names; with no codec allowed it reads headers alone, and ours are opened afterwards.
    limits = {"max_pixels": str(options.max_pixels), "threads": "1", "codec_whitelist": "none"}
    with media_errors():
        container: Any = None
        try:
            container = codecs().open(Reader(data, deadline), "r", format=_DEMUXERS[kind], options=limits, metadata_errors="ignore")
            yield container
        except DecodeError:
            raise
        except Exception:
            deadline.check()
            raise
        else:
            deadline.check()
        finally:
            if container is not None:
                container.close()


def find_stream(container: Any, kind: str) -> Any:
    """The stream of `kind` that players choose, ready to decode with one thread: of those marked as default, or of all, the
    largest, and of several such the first; cover art is none.

    Raises:
        DecodeError: there is no such stream, or its codec is not read.
    """
    marks = codecs().stream.Disposition
    streams = [stream for stream in getattr(container.streams, kind) if not stream.disposition & marks.attached_pic]
    if not streams:
        raise DecodeError("no_stream", f"the file has no {kind} stream")

    def rank(stream: Any) -> tuple[bool, int]:
        context = stream.codec_context
        size = 0 if context is None else context.width * context.height if kind == "video" else context.channels
        return bool(stream.disposition & marks.default), size

    stream = max(streams, key=rank)
    context = stream.codec_context
    if context is None or context.name not in _CODECS:
        name = "none" if context is None else context.name
        raise DecodeError("unsupported", f"{kind} codec {name}")
    context.thread_count = 1
    return stream


def check_packets(kind: Format, stream: Any, count: int) -> None:
    """Checks that a demuxer which came to its end has given all of the `count` packets that its index names: of an MP4 it passes over what
    it cannot read, and says nothing.

    Raises:
        DecodeError: some are missing.
    """
    if kind == "mp4" and count < len(stream.index_entries):
        raise DecodeError("corrupt", f"{count} of the {len(stream.index_entries)} packets that the index names can be read")
