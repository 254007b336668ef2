"""Pixels and samples of the demo to real files: every image, video and audio format that a stream reads.

The same input gives the same bytes: one codec thread, no clock and no random serial number in a header.
"""

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.launch.demo_captions import Kind
from treadle.launch.demo_scenes import CLIP_RATE_FPS, SOUND_RATE_HZ, Pixels, Samples

FORMATS: dict[Kind, tuple[str, ...]] = {
    Kind.PICTURE: ("jpg", "png", "webp"),
    Kind.CLIP: ("mp4", "webm"),
    Kind.SOUND: ("wav", "flac", "mp3", "opus"),
}
"""File extensions, which are the fields of a sample."""

_VIDEO = {
    "mp4": ("mp4", ("libx264", "mpeg4"), {"preset": "ultrafast", "crf": "16", "threads": "1"}),
    "webm": ("webm", ("libvpx", "libvpx-vp9"), {"deadline": "realtime", "cpu-used": "8", "crf": "8", "b": "400k", "threads": "1"}),
}
_AUDIO = {"wav": ("wav", "pcm_s16le"), "flac": ("flac", "flac"), "mp3": ("mp3", "libmp3lame"), "opus": ("ogg", "libopus")}


def encode_picture(pixels: Pixels, extension: str) -> bytes:
    """A picture `[H, W, 3]` as a JPEG, PNG or WebP file."""
    from PIL import Image

    out = io.BytesIO()
    image = Image.fromarray(pixels)
    if extension == "jpg":
        image.save(out, "JPEG", quality=92)
    elif extension == "png":
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "WEBP", quality=90, method=0)
    return out.getvalue()


def _available(codecs: tuple[str, ...]) -> str:
    """The first of the encoders that this build of FFmpeg has."""
    import av

    for name in codecs:
        if name in av.codecs_available:
            return name
    raise ValueError(f"PyAV was built without {' and '.join(codecs)}: install the `av` wheel from PyPI, which has them")


def encode_clip(frames: Pixels, extension: str) -> bytes:
    """A clip `[T, H, W, 3]` as an MP4 or WebM file."""
    import av
    from av.codec.context import Flags

    container_name, codecs, options = _VIDEO[extension]
    out = io.BytesIO()
    with av.open(out, "w", format=container_name, options={"fflags": "+bitexact"}) as container:
        # Any: its type follows the codec's name, which is no literal here.
        stream: Any = container.add_stream(_available(codecs), rate=CLIP_RATE_FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.bit_rate = 400_000
        stream.codec_context.flags |= Flags.bitexact
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, CLIP_RATE_FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def encode_sound(samples: Samples, extension: str) -> bytes:
    """A mono recording `[n]` as a WAV, FLAC, MP3 or Ogg Opus file."""
    import av
    from av.codec.context import Flags

    container_name, codec = _AUDIO[extension]
    out = io.BytesIO()
    pcm: npt.NDArray[np.int16] = np.rint(samples * 32767).astype(np.int16)[None, :]
    with av.open(out, "w", format=container_name, options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(_available((codec,)), rate=SOUND_RATE_HZ, layout="mono")
        context = stream.codec_context
        context.bit_rate = 64_000
        context.flags |= Flags.bitexact
        resampler = av.AudioResampler(format=context.format, layout="mono", rate=SOUND_RATE_HZ)
        context.open(strict=False)
        size = context.frame_size or 4096
        for first in range(0, pcm.shape[1], size):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm[:, first : first + size]), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = SOUND_RATE_HZ, first, Fraction(1, SOUND_RATE_HZ)
            for converted in resampler.resample(frame):
                container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return out.getvalue()


ENCODERS: dict[Kind, Callable[..., bytes]] = {Kind.PICTURE: encode_picture, Kind.CLIP: encode_clip, Kind.SOUND: encode_sound}
