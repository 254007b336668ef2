"""Clips of every kind that the containers and codecs allow: the same moving grey, every frame once and in order."""

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders import DecodeError

QUIET = "log-level=none"
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "H.264 interlaced": ("libx264", "mp4", {"options": {"flags": "+ildct+ilme", "x264-params": "interlaced=1"}}),
    "H.264 open groups": ("libx264", "mp4", {"options": {"x264-params": "open-gop=1:keyint=10:bframes=3"}}),
    "H.264 refreshed bit by bit": ("libx264", "mp4", {"options": {"x264-params": "intra-refresh=1:keyint=10"}}),
    "H.264 negative offsets": ("libx264", "mp4", {"options": {"bf": "3"}, "container_options": {"movflags": "negative_cts_offsets"}}),
    "H.264 4:2:2 10 bits": ("libx264", "mkv", {"pixels": "yuv422p10le"}),
    "H.264 raw, B-frames": ("libx264", "h264", {"options": {"bf": "3"}}),
    "H.264 in AVI, B-frames": ("libx264", "avi", {"options": {"bf": "3"}}),
    "H.264 BGR": ("libx264rgb", "mp4", {"pixels": "bgr24"}),
    "H.264 full range": ("libx264", "mp4", {"pixels": "yuvj420p"}),
    "HEVC open groups": ("libx265", "mp4", {"options": {"x265-params": f"{QUIET}:open-gop=1:keyint=10:bframes=3"}}),
    "HEVC pyramid": ("libx265", "mkv", {"options": {"x265-params": f"{QUIET}:b-pyramid=1:bframes=4"}}),
    "HEVC broadcast": ("libx265", "mpegts", {"options": {"x265-params": QUIET}}),
    "VP9 hidden frames": ("libvpx-vp9", "webm", {"options": {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "30"}}),
    "VP8 hidden frames": ("libvpx", "webm", {"options": {"auto-alt-ref": "1", "lag-in-frames": "16"}}),
    "VP9 4:4:4": ("libvpx-vp9", "webm", {"pixels": "yuv444p"}),
    "AV1 WebM": ("libsvtav1", "webm", {"options": {"svtav1-params": "lp=1"}}),
    "AV1 10 bits": ("libsvtav1", "mp4", {"pixels": "yuv420p10le", "options": {"svtav1-params": "lp=1"}}),
    "MPEG-4 B-frames": ("mpeg4", "mp4", {"options": {"bf": "2", "qmax": "2"}}),
    "MPEG-4 in AVI, B-frames": ("mpeg4", "avi", {"options": {"bf": "2", "qmax": "2"}}),
    "MPEG-4 3GP": ("mpeg4", "3gp", {}),
    "MPEG-2 interlaced": ("mpeg2video", "mpegts", {"options": {"flags": "+ildct+ilme"}, "rate": 25}),
    "ProRes with alpha": ("prores_ks", "mov", {"pixels": "yuva444p10le"}),
    "Motion JPEG": ("mjpeg", "mov", {"pixels": "yuvj420p"}),
    "Motion JPEG 4:4:4": ("mjpeg", "avi", {"pixels": "yuvj444p"}),
    "FFV1 grey": ("ffv1", "mkv", {"pixels": "gray"}),
    "FFV1 grey 16 bits": ("ffv1", "mkv", {"pixels": "gray16le"}),
    "raw BGR": ("rawvideo", "avi", {"pixels": "bgr24"}),
    "raw UYVY": ("rawvideo", "mov", {"pixels": "uyvy422"}),
    "PNG in MOV": ("png", "mov", {"pixels": "rgb24"}),
    "fragments of one frame": ("libx264", "mp4", {"container_options": {"movflags": "cmaf+frag_every_frame+empty_moov"}}),
    "fragments with an index each": (
        "libx264", "mp4", {"container_options": {"movflags": "dash+frag_keyframe+empty_moov+default_base_moof"}, "options": {"g": "10"}},
    ),
    "live Matroska": ("libx264", "mkv", {"container_options": {"live": "1", "cluster_time_limit": "400"}}),
    "Matroska with room for an index": ("libx264", "mkv", {"container_options": {"reserve_index_space": "2000"}}),
    "WebM with its index first": ("libvpx-vp9", "webm", {"container_options": {"cues_to_front": "1", "reserve_index_space": "2000"}}),
    "25 per second, times in 90 kHz": ("libx264", "mp4", {"rate": 25, "container_options": {"video_track_timescale": "90000"}}),
}  # fmt: skip
GREY_WITHIN = 8
"""One step of the moving grey: what a coarse quantiser may be off."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_once_and_in_order(make: Any, kind: str) -> None:
    codec, container, fields = KINDS[kind]
    data = make.clip(make.moving(24), codec, {"mkv": "matroska"}.get(container, container), **fields)
    payload = make.video(data)
    assert (payload.extent, payload.truncated) == ((24, 48, 64), False)
    left = payload.array[:, 6:-6, 6:26, :].astype(float).mean(axis=(1, 2, 3))
    assert np.abs(left - 8.0 * np.arange(24)).max() <= GREY_WITHIN
    assert (np.diff(left) > 0).sum() >= 20, "no frame twice, none out of order"
    right = payload.array[..., 40:-4, 0].astype(float).mean(axis=(0, 2))
    assert np.abs(right - np.linspace(0, 255, 48))[2:-2].max() <= 12


@pytest.mark.parametrize("kind, phrase", [("flv", "FLV"), ("vob", "an MPEG program stream")])
def test_containers_that_are_not_read_say_so(make: Any, kind: str, phrase: str) -> None:
    codec, rate = ("libx264", 10) if kind == "flv" else ("mpeg2video", 25)
    with pytest.raises(DecodeError, match=phrase) as caught:
        make.video(make.clip(make.moving(3), codec, kind, rate=rate))
    assert caught.value.kind == "unsupported"


X265 = {"x265-params": f"{QUIET}:pools=none:frame-threads=1:qp=2"}
COLOURED = {
    "H.264 Matroska": ("libx264", "matroska", 8, {"qp": "0"}),
    "H.264 broadcast": ("libx264", "mpegts", 8, {"qp": "0"}),
    "H.264 MOV": ("libx264", "mov", 8, {"qp": "0"}),
    "VP8 WebM": ("libvpx", "webm", 8, {"crf": "4", "b": "5M"}),
    "VP9 WebM": ("libvpx-vp9", "webm", 8, {"crf": "4", "b": "0"}),
    "VP9 MP4": ("libvpx-vp9", "mp4", 8, {"crf": "4", "b": "0"}),
    "HEVC Matroska": ("libx265", "matroska", 8, X265),
    "HEVC MP4": ("libx265", "mp4", 8, X265),
    "AV1 WebM": ("libsvtav1", "webm", 8, {"crf": "5", "svtav1-params": "lp=1"}),
    "AV1 MP4, 10 bits": ("libsvtav1", "mp4", 10, {"crf": "5", "svtav1-params": "lp=1"}),
    "FFV1 Matroska": ("ffv1", "matroska", 8, {}),
    "FFV1 Matroska, 10 bits": ("ffv1", "matroska", 10, {}),
}
MATRICES = {"BT.709": (1, 1, 0.2126, 0.0722), "BT.601": (6, 6, 0.299, 0.114), "BT.2020": (9, 14, 0.2627, 0.0593)}
"""H.273's number of the matrix (of the primaries, too) and of the transfer; weights of red and blue in luma."""


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("kind", COLOURED)
def test_the_matrix_and_range_that_container_or_codec_state(make: Any, kind: str, matrix: str, full: bool) -> None:
    """The planes are made here from the definition; VP8 has no words for it but its container's."""
    codec, container, bits, options = COLOURED[kind]
    number, transfer, kr, kb = MATRICES[matrix]
    colour = (200, 40, 20)
    red, green, blue = (value / 255 for value in colour)
    y = kr * red + (1 - kr - kb) * green + kb * blue
    differences = (blue - y) / (2 * (1 - kb)), (red - y) / (2 * (1 - kr))
    step, top = 1 << bits - 8, (1 << bits) - 1
    luma_scale, chroma_scale, black = (top, top, 0) if full else (219 * step, 224 * step, 16 * step)
    levels = [round(luma_scale * y + black), *(round(chroma_scale * value + 128 * step) for value in differences)]
    planes = [np.full(48 * 64, levels[0]), np.full(24 * 32, levels[1]), np.full(24 * 32, levels[2])]
    pixels = "yuv420p" if bits == 8 else "yuv420p10le"
    array: NDArray[Any] = np.concatenate(planes).astype(np.uint8 if bits == 8 else np.uint16).reshape(72, 64)
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=10, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        context = stream.codec_context
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = number, number, transfer, 2 if full else 1
        for time in range(2):
            frame = av.VideoFrame.from_ndarray(array, format=pixels)
            frame.pts, frame.time_base = time, Fraction(1, 10)
            frame.colorspace, frame.color_range = number, 2 if full else 1
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    assert np.abs(make.video(out.getvalue()).array.astype(int) - colour).max() <= 5


class Bits:
    """A bit string that reads Exp-Golomb codes (ITU-T H.264, 9.1)."""

    def __init__(self, data: bytes) -> None:
        self.text = "".join(f"{byte:08b}" for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        self.at += count
        return int(self.text[self.at - count : self.at], 2)

    def golomb(self) -> int:
        zeros = self.text.index("1", self.at) - self.at
        self.at += zeros
        return self.take(zeros + 1) - 1


def without_usability(stream: bytes) -> bytes:
    """A main-profile H.264 stream whose parameter set no longer says how far frames are reordered."""
    start = stream.index(b"\0\0\1\x67") + 4
    end = stream.index(b"\0\0\0\1", start)
    bits = Bits(stream[start:end].replace(b"\0\0\3", b"\0\0"))
    assert bits.take(8) == 77, "main profile"
    bits.take(16)
    identity, counter, order = (bits.golomb() for _ in range(3))
    assert (identity, order) == (0, 0) and counter <= 12
    sizes = [bits.golomb(), bits.golomb(), bits.take(1), bits.golomb(), bits.golomb()]
    assert sizes[3:] == [3, 2], "macroblocks across and down, less one"
    assert bits.take(1) == 1, "frames only"
    bits.take(1)
    if bits.take(1):
        cropped = [bits.golomb() for _ in range(4)]
        assert max(cropped) < 8
    place = bits.at
    assert bits.take(1) == 1, "usability information is there"
    text = bits.text[:place] + "0" + "1"
    text += "0" * (-len(text) % 8)
    parameters = int(text, 2).to_bytes(len(text) // 8, "big")
    return stream[:start] + parameters + stream[end:]


def test_reordering_that_no_header_states_is_worked_out(make: Any) -> None:
    """Without it the decoder would guess that nothing is reordered, and answer the first B-frames too late."""
    options = {"profile": "main", "bf": "3", "x264-params": "b-adapt=0:b-pyramid=strict:ref=4"}
    stream = make.clip(make.moving(24), "libx264", "h264", options=options)
    bare = without_usability(stream)
    assert len(bare) < len(stream)
    assert make.numbers(make.video(bare)) == make.numbers(make.video(stream)) == list(range(24))


def mixed(make: Any, order: str, *, without: str = "") -> bytes:
    """An MP4 of a sound (a), the moving grey (v) and a larger, upside-down one (w), in that order of streams."""
    out, streams, frames = io.BytesIO(), dict[str, Any](), make.moving(12)
    with av.open(out, "w", format="mp4") as file:
        for name in order:
            if name == "a":
                streams[name] = file.add_stream("aac", rate=44_100, layout="mono")
                continue
            streams[name] = stream = file.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = (64, 48, "yuv420p") if name == "v" else (128, 96, "yuv420p")
        for number, picture in enumerate(frames):
            for name, stream in streams.items():
                if name in without:
                    continue
                if name == "a":
                    sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                    sound.sample_rate, sound.pts = 44_100, number * 1024
                    file.mux(stream.encode(sound))
                    continue
                view: NDArray[np.uint8] = picture if name == "v" else np.repeat(np.repeat(picture[::-1], 2, 0), 2, 1)
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(view), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 10)
                file.mux(stream.encode(frame))
        for stream in streams.values():
            file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("order, extent", [("av", (12, 48, 64)), ("va", (12, 48, 64)), ("vw", (12, 48, 64)), ("wv", (12, 96, 128)), ("awv", (12, 96, 128))])  # fmt: skip
def test_the_film_of_several_that_is_marked(make: Any, order: str, extent: tuple[int, int, int]) -> None:
    """An MP4 marks the first of each kind as the one to show."""
    payload = make.video(mixed(make, order))
    assert payload.extent == extent and make.numbers(payload) == list(range(12))
    if "a" in order:
        assert make.audio(mixed(make, order), 44_100).extent[2] > 11_000


def test_a_film_without_frames(make: Any) -> None:
    with pytest.raises(DecodeError) as caught:
        make.video(mixed(make, "va", without="v"))
    assert caught.value.kind in ("no_stream", "empty")


@pytest.mark.parametrize("codec, container, pixels, size", [("libx264", "mp4", "yuv420p", (2, 2)), ("libx264", "mp4", "yuv444p", (1, 1)), ("libvpx-vp9", "webm", "yuv420p", (1, 1)), ("libx264", "mp4", "yuv444p", (1, 97))])  # fmt: skip
def test_very_small_frames(make: Any, codec: str, container: str, pixels: str, size: tuple[int, int]) -> None:
    frames = [np.full((*size, 3), 16 * number, np.uint8) for number in range(5)]
    array = make.video(make.clip(frames, codec, container, pixels=pixels), tube_frames=1).array
    assert array.shape == (5, *size, 3)
    assert np.abs(array.astype(int) - np.arange(5)[:, None, None, None] * 16).max() <= 6


def test_a_broadcast_with_a_packet_lost_is_refused(make: Any) -> None:
    data = make.clip(make.moving(12), "libx264", "mpegts", options={"bf": "0"})
    film = [at for at in range(0, len(data), 188) if (data[at + 1] & 0x1F, data[at + 2]) == (1, 0)]
    for strict in (True, False):
        for lost in film[1:-1:3]:
            with pytest.raises(DecodeError, match=r"packets of stream [0-9]+ are missing before byte") as caught:
                make.video(data[:lost] + data[lost + 188 :], options={"strict": strict})
            assert caught.value.kind == "corrupt"
    # Sent twice, a packet is no loss.
    assert make.numbers(make.video(data[:940] + data[752:])) == list(range(12))


def test_codecs_that_are_not_listed_are_never_opened(make: Any) -> None:
    """Not even to find out what a file holds: opening it must not decode a thing."""
    from treadle.decoders.limits import Deadline, DecodeOptions
    from treadle.decoders.media import opened

    data = make.clip(make.moving(4), "qtrle", "mov", pixels="rgb24")
    with pytest.raises(DecodeError, match="video codec qtrle") as caught:
        make.video(data)
    assert caught.value.kind == "unsupported"
    clip = make.clip(make.moving(4))
    with opened("mp4", memoryview(clip), DecodeOptions(), Deadline(60)) as container:
        # Decoding tells a stream's pixel format; the header of an H.264 file does not.
        assert container.streams.video[0].codec_context.pix_fmt is None
