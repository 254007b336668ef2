"""Clips: every frame counted and in order, upright, in its own colours, scaled and cut as the row asks, damage refused."""

import io
import struct
import tracemalloc
from typing import Any

import av
import av.stream
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders import DecodeError, probe
from treadle.decoders.video import _HELD_BYTES
from treadle.shape import Modality, VideoShape

CONTAINERS = [
    ("libx264", "mp4"),
    ("libx264", "mov"),
    ("libx264", "matroska"),
    ("libx264", "mpegts"),
    ("libx264", "avi"),
    ("libx264", "h264"),
    ("libvpx-vp9", "webm"),
    ("libvpx", "webm"),
    ("libx265", "mp4"),
    ("libsvtav1", "mp4"),
    ("mpeg4", "mp4"),
]


def refused(make: Any, data: bytes, **fields: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        make.video(data, **fields)
    return caught.value.kind


def solid(colour: tuple[int, int, int], height: int = 48, width: int = 64, count: int = 4) -> list[NDArray[np.uint8]]:
    return [np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy() for _ in range(count)]


def with_matrix(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """Writes a display matrix into an MP4's track header (16.16 fixed point)."""
    out = bytearray(data)
    track = out.index(b"tkhd")
    place = track + 4 + 4 + 20 + 8 + 8  # version and flags, five words, reserved, layer to volume
    matrix = [a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30]
    struct.pack_into(">9i", out, place, *matrix)
    return bytes(out)


@pytest.fixture(scope="module")
def base(make: Any) -> bytes:
    """30 frames with B-frames and three key frames."""
    return bytes(make.clip(make.moving(30), options={"g": "10", "bf": "2", "crf": "10"}))


@pytest.fixture(scope="module")
def plain(make: Any, base: bytes) -> NDArray[np.uint8]:
    return np.asarray(make.video(base).array)


@pytest.mark.parametrize("codec, container", CONTAINERS)
def test_containers_and_codecs(make: Any, codec: str, container: str) -> None:
    options = {"libx265": {"x265-params": "log-level=none"}, "libsvtav1": {"svtav1-params": "lp=1"}}.get(codec, {})
    data = make.clip(make.moving(30), codec, container, options=options)
    payload = make.video(data)
    assert (payload.grid, payload.extent, payload.truncated) == ((15, 3, 4), (30, 48, 64), False)
    seen = make.numbers(payload)
    assert np.abs(np.array(seen) - np.arange(30)).max() <= (2 if codec == "libsvtav1" else 1)
    assert seen == sorted(seen)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels(make: Any, base: bytes, plain: NDArray[np.uint8], channels: int) -> None:
    array = make.video(base, channels=channels).array
    assert array.shape == (30, 48, 64, channels)
    if channels == 4:
        assert (array[..., 3] == 255).all()
        np.testing.assert_array_equal(array[..., :3], plain)
    if channels == 1:
        red, green, blue = (plain[..., c].astype(np.float64) for c in range(3))
        assert np.abs(array[..., 0] - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 1


# ---- frames counted by decoding


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 29, 30, 100])
@pytest.mark.parametrize("tube", [1, 2, 3])
def test_strides_and_tubes(make: Any, base: bytes, stride: int, tube: int) -> None:
    payload = make.video(base, frame_stride=stride, tube_frames=tube)
    taken = list(range(0, 30, stride))
    total = -(-len(taken) // tube) * tube
    assert payload.extent[0] == total and payload.grid[0] == total // tube
    assert make.numbers(payload) == taken + [taken[-1]] * (total - len(taken))
    np.testing.assert_array_equal(payload.array[len(taken) :], payload.array[[len(taken) - 1] * (total - len(taken))])


def test_one_frame_is_repeated(make: Any) -> None:
    payload = make.video(make.clip(make.moving(1)), tube_frames=4)
    assert payload.extent == (4, 48, 64)
    assert (payload.array == payload.array[:1]).all()


def test_times_that_vary_or_begin_late(make: Any) -> None:
    frames = make.moving(30)
    late = make.clip(frames, times=[50 + n for n in range(30)])
    varying = make.clip(frames, times=[n if n < 15 else 15 + 5 * (n - 15) for n in range(30)])
    for data in (late, varying):
        assert make.numbers(make.video(data)) == list(range(30))


def test_live_and_fragmented_files_have_no_duration(make: Any) -> None:
    frames = make.moving(30)
    fragmented = make.clip(frames, container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}, options={"g": "10"})
    live = make.clip(frames, "libvpx-vp9", "webm", container_options={"live": "1", "cluster_time_limit": "500"})
    for data in (fragmented, live):
        payload = make.video(data)
        assert payload.extent[0] == 30 and make.numbers(payload) == list(range(30))
        # A writer that stopped mid-way: the last fragment or cluster is cut.
        assert refused(make, data[: len(data) * 9 // 10]) == "truncated"


def test_an_edit_list_hides_the_frames_before_its_start(make: Any, base: bytes) -> None:
    """A copy that starts at the key frame 10 and asks for what is shown from frame 16 on."""
    out = io.BytesIO()
    with av.open(io.BytesIO(base), "r") as source, av.open(out, "w", format="mp4", options={"avoid_negative_ts": "disabled"}) as copy:
        stream: Any = copy.add_stream_from_template(source.streams.video[0])
        source.seek(1_000_000)
        shift = None
        for packet in source.demux(video=0):
            if packet.dts is None or packet.pts is None:
                continue
            if shift is None:
                shift = round(1.6 / packet.time_base)
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            packet.stream = stream
            copy.mux(packet)
    data = out.getvalue()
    assert b"elst" in data
    assert make.numbers(make.video(data)) == list(range(16, 30))


# ---- the picture


@pytest.mark.parametrize(
    "matrix, turned",
    [
        ((1, 0, 0, 1), lambda a: a),
        ((0, 1, -1, 0), lambda a: np.rot90(a, -1)),
        ((0, -1, 1, 0), lambda a: np.rot90(a, 1)),
        ((-1, 0, 0, -1), lambda a: np.rot90(a, 2)),
        ((-1, 0, 0, 1), lambda a: a[:, ::-1]),
        ((1, 0, 0, -1), lambda a: a[::-1]),
        ((0, 1, 1, 0), lambda a: a.swapaxes(0, 1)),
    ],
)
def test_the_display_matrix_is_applied(make: Any, base: bytes, plain: NDArray[np.uint8], matrix: tuple[int, ...], turned: Any) -> None:
    payload = make.video(with_matrix(base, *matrix))
    expected = turned(plain[7])
    assert payload.extent[1:] == expected.shape[:2]
    np.testing.assert_array_equal(payload.array[7], expected)


def test_the_matrix_means_what_the_library_says(make: Any, base: bytes, plain: NDArray[np.uint8]) -> None:
    data = with_matrix(base, 0, 1, -1, 0)
    with av.open(io.BytesIO(data), "r") as container:
        rotation = next(container.decode(video=0)).rotation
    assert rotation % 90 == 0 and rotation != 0
    np.testing.assert_array_equal(make.video(data).array[0], np.rot90(plain[0], rotation // 90))


@pytest.mark.parametrize("matrix, colourspace", [("bt709", 1), ("smpte170m", 6), ("bt2020nc", 9)])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 100, 50), (255, 255, 255), (0, 0, 0)])
def test_the_streams_own_matrix_and_range(make: Any, matrix: str, colourspace: int, full: bool, colour: tuple[int, int, int]) -> None:
    """The planes are made here from the definition, so that no library is trusted twice."""
    kr, kb = {"bt709": (0.2126, 0.0722), "smpte170m": (0.299, 0.114), "bt2020nc": (0.2627, 0.0593)}[matrix]
    red, green, blue = (value / 255 for value in colour)
    y = kr * red + (1 - kr - kb) * green + kb * blue
    cb, cr = (blue - y) / (2 * (1 - kb)), (red - y) / (2 * (1 - kr))
    scale = (255, 255, 0) if full else (219, 224, 16)
    planes = [round(scale[0] * y + scale[2]), round(scale[1] * cb + 128), round(scale[1] * cr + 128)]
    yuv = np.concatenate([np.full(64 * 48, planes[0]), np.full(32 * 24, planes[1]), np.full(32 * 24, planes[2])])
    frame = np.clip(yuv, 0, 255).astype(np.uint8).reshape(72, 64)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("libx264", rate=10, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = colourspace, 2 if full else 1
        picture = av.VideoFrame.from_ndarray(frame, format="yuv420p")
        picture.colorspace, picture.color_range = colourspace, 2 if full else 1
        file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    assert np.abs(make.video(out.getvalue()).array.astype(int) - colour).max() <= 5


@pytest.mark.parametrize(
    "codec, container, pixels",
    [("libx265", "mp4", "yuv420p10le"), ("ffv1", "matroska", "yuv420p10le"), ("ffv1", "matroska", "yuv444p16le")],
)
def test_deep_pixels(make: Any, codec: str, container: str, pixels: str) -> None:
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    array = make.video(make.clip(solid((200, 100, 50)), codec, container, pixels=pixels, options=options)).array
    assert array.dtype == np.uint8 and np.abs(array.astype(int) - (200, 100, 50)).max() <= 4


@pytest.mark.parametrize("codec, container, pixels, within", [("libx264", "mp4", "yuv444p", 2), ("libvpx-vp9", "webm", "yuv420p", 30)])
def test_odd_sizes(make: Any, codec: str, container: str, pixels: str, within: int) -> None:
    payload = make.video(make.clip(solid((200, 100, 50), 49, 65), codec, container, pixels=pixels))
    assert (payload.grid, payload.extent) == ((2, 4, 5), (4, 49, 65))
    difference = np.abs(payload.array.astype(int) - (200, 100, 50))
    assert difference[:, 1:-1, 1:-1].max() <= 3 and difference.max() <= within


def test_rgb_streams(make: Any) -> None:
    array = make.video(make.clip(solid((200, 100, 50)), "libx264rgb", "mp4", pixels="rgb24", options={"qp": "0"})).array
    assert (array == (200, 100, 50)).all()


def test_alpha_is_ignored(make: Any) -> None:
    rgba = np.zeros((48, 64, 4), np.uint8)
    rgba[...] = (253, 0, 0, 0)
    data = make.clip([rgba] * 4, "ffv1", "matroska", pixels="bgra", source="rgba")
    for channels in (3, 4):
        array = make.video(data, channels=channels).array
        assert np.abs(array[..., :3].astype(int) - (253, 0, 0)).max() <= 3
        assert channels == 3 or (array[..., 3] == 255).all()


def test_a_stream_that_changes_size_keeps_the_firsts(make: Any) -> None:
    small, large = make.moving(6, 48, 64), make.moving(6, 96, 128)
    data = b"".join(make.clip(frames, "libx264", "h264", options={"bf": "0"}) for frames in (small, large))
    payload = make.video(data)
    assert payload.extent == (12, 48, 64)
    assert make.numbers(payload) == [*range(6), *range(6)]


# ---- other streams


def test_cover_art_is_no_film(make: Any) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        sound: Any = file.add_stream("aac", rate=44_100, layout="mono")
        cover: Any = file.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        for start in range(0, 44_100, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 44_100, start
            file.mux(sound.encode(frame))
        file.mux(cover.encode(av.VideoFrame.from_ndarray(make.moving(1)[0], format="rgb24")))
        file.mux(cover.encode(None))
        file.mux(sound.encode(None))
    data = out.getvalue()
    with av.open(io.BytesIO(data), "r") as container:
        assert container.streams.video, "the file has a picture stream"
    assert refused(make, data) == "no_stream"
    assert make.audio(data).extent[2] > 16_000


def test_sound_alone_is_no_film(make: Any) -> None:
    for codec, container in (("aac", "mp4"), ("pcm_s16le", "wav"), ("libmp3lame", "mp3"), ("flac", "flac"), ("libopus", "ogg")):
        rate = 48_000 if codec == "libopus" else 44_100
        assert refused(make, make.sound(make.sine(0.2, rate), rate, codec, container)) == "no_stream"


def test_a_film_in_ogg_is_not_called_sound(make: Any) -> None:
    page = b"OggS\0\2" + bytes(20) + b"\x01\x2a\x80theora" + bytes(35)
    assert refused(make, page) == "unsupported"


def test_a_raw_stream_may_begin_with_a_note_of_its_encoder(make: Any) -> None:
    raw = make.clip(make.moving(12), "libx264", "h264")
    note = raw[raw.index(b"\0\0\1\x06") :]
    note = note[: note.index(b"\0\0\1", 3)]
    assert make.video(b"\0" + note + raw).extent == (12, 48, 64)


# ---- damage


def test_an_index_at_the_end_that_is_missing(make: Any, base: bytes) -> None:
    assert base.index(b"mdat") < base.index(b"moov")
    for options in ({}, {"strict": False}):
        assert refused(make, base[: len(base) // 2], options=options) == "truncated"


@pytest.mark.parametrize(
    "codec, container", [("libx264", "mp4"), ("libx264", "matroska"), ("libvpx-vp9", "webm"), ("libx264", "mpegts"), ("libx264", "avi")]
)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_cut_clip_is_refused_or_on_request_kept(make: Any, codec: str, container: str, share: float) -> None:
    frames = [frame + make.picture(48, 64, seed) // 8 for seed, frame in enumerate(make.moving(30))]
    data = make.clip(frames, codec, container, options={"bf": "0", "crf": "20"})
    data = make.index_first(data) if container == "mp4" else data
    cut = data[: int(len(data) * share)]
    if container == "mpegts" and len(cut) % 188 == 0:
        cut = cut[:-1]
    assert refused(make, cut) == "truncated"
    if container != "avi" or share > 0.5:  # half of so small an AVI is its header
        assert 0 < make.video(cut, options={"strict": False}).extent[0] <= 30


def test_a_damaged_frame_is_refused(make: Any) -> None:
    frames = [frame // 2 + make.picture(48, 64, seed) // 3 for seed, frame in enumerate(make.moving(30))]
    data = bytearray(make.clip(frames, options={"bf": "2", "g": "10"}))
    start = data.index(b"mdat")
    middle = start + (data.index(b"moov") - start) // 2
    data[middle : middle + 200] = bytes((37 * n + 11) & 255 for n in range(200))
    assert refused(make, bytes(data)) == "corrupt"
    assert refused(make, bytes(data), options={"strict": False}) == "corrupt"


def test_what_follows_a_container_is_none_of_it(make: Any, base: bytes, plain: NDArray[np.uint8]) -> None:
    for data in (base + bytes(100), base + b"\x07junk behind the last box"):
        np.testing.assert_array_equal(make.video(data).array, plain)
    webm = make.clip(make.moving(5), "libvpx-vp9", "webm")
    np.testing.assert_array_equal(make.video(webm + b"junk" * 20).array, make.video(webm).array)


def test_headers_alone(make: Any, base: bytes) -> None:
    assert refused(make, base[:16]) == "truncated"
    assert refused(make, b"\x1a\x45\xdf\xa3") in ("truncated", "corrupt")
    assert refused(make, b"\0\0\0\1\x67") in ("corrupt", "empty", "truncated", "no_stream")


# ---- limits


def test_sizes_are_checked_before_a_frame_is_decoded(make: Any, base: bytes) -> None:
    for options in ({"max_pixels": 48 * 64 - 1}, {"max_side_px": 63}):
        assert refused(make, base, options=options) == "too_large"
    assert make.video(base, options={"max_pixels": 48 * 64, "max_side_px": 64}).extent == (30, 48, 64)


def test_frames_are_limited(make: Any, base: bytes) -> None:
    assert refused(make, base, options={"max_frames": 29}) == "too_large"
    assert make.video(base, options={"max_frames": 30}).extent[0] == 30
    # Not one frame more is decoded than tells that the row is full: 12 tokens are one tube of two frames.
    assert make.video(base, columns=13, options={"max_frames": 3, "video_min_tubes": 1}).truncated


# ---- the row


@pytest.mark.parametrize("count, least", [(30, 8), (30, 3), (6, 8), (1, 8), (30, 100)])
@pytest.mark.parametrize("tokens", [1, 5, 12, 40, 96, 179, 180])
def test_scale_and_cut(make: Any, count: int, least: int, tokens: int) -> None:
    data = make.clip(make.moving(count))
    payload = make.video(data, columns=tokens + 1, options={"video_min_tubes": least})
    tubes = -(-count // 2)
    wanted = min(tubes, least, tokens)
    t, h, w = payload.grid
    frames, height, width = payload.extent
    assert t * h * w <= tokens and t >= wanted
    assert frames == 2 * t and (h, w) == (-(-height // 16), -(-width // 16))
    # The largest 4:3 size whose grid leaves room for the wanted tubes, by trying all.
    fitting = [
        (max(1, (2 * 48 * longer + 64) // 128), longer)
        for longer in range(1, 65)
        if -(-max(1, (2 * 48 * longer + 64) // 128) // 16) * -(-longer // 16) <= tokens // wanted
    ]
    assert (height, width) == fitting[-1]
    assert t == min(tubes, tokens // (h * w))
    assert payload.truncated == (t < tubes)


def test_frames_too_large_to_wait_are_counted_first(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _HELD_BYTES == 64 << 20
    data = make.clip(make.moving(9))
    waited = make.video(data, columns=21)
    monkeypatch.setattr("treadle.decoders.video._HELD_BYTES", 1)
    counted = make.video(data, columns=21)
    assert waited.extent[1:] != (48, 64)
    assert (counted.grid, counted.extent, counted.truncated) == (waited.grid, waited.extent, waited.truncated)
    np.testing.assert_array_equal(counted.array, waited.array)


def test_scaled_frames_are_antialiased(make: Any) -> None:
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::2] = 255
    data = make.clip([stripes] * 4, "libx264", "mp4", pixels="yuv444p", options={"qp": "0"})
    array = make.video(data, columns=1 + 8).array  # two tubes of at most 4 patches: 32 x 32
    assert array.shape[1:3] == (32, 32)
    assert np.abs(array[:, 4:-4, 4:-4].astype(int) - 127).max() <= 6


def test_memory_stays_near_the_payload(make: Any) -> None:
    data = make.clip(make.moving(100, 240, 320), options={"preset": "ultrafast"})
    make.video(data, columns=100)
    tracemalloc.start()
    payload = make.video(data, columns=1 + 10 * 300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert payload.truncated and payload.array.nbytes == 20 * 240 * 320 * 3
    assert peak < 1.1 * payload.array.nbytes + 2 * 240 * 320 * 4 + (1 << 20)


def test_probing_estimates(make: Any, base: bytes) -> None:
    seen = probe(Modality.VIDEO, base, make.shape(video=VideoShape(patch_side=16, frame_stride=3)))
    assert not seen.exact
    assert (seen.grid, seen.extent) == ((5, 3, 4), (10, 48, 64))


@pytest.mark.parametrize("table", [b"stts", b"stsz", b"stsc", b"stco", b"ctts", b"trun"])
def test_tables_that_state_more_than_they_hold_are_refused_before_the_demuxer_allocates(make: Any, base: bytes, table: bytes) -> None:
    data = make.clip(make.moving(6), container_options={"movflags": "frag_keyframe+empty_moov"}) if table == b"trun" else base
    place = data.index(table) + (12 if table == b"stsz" else 8)
    damaged = data[:place] + struct.pack(">I", 50_000_000) + data[place + 4 :]
    for strict in (True, False):
        with pytest.raises(DecodeError, match="box of 50000000 entries") as caught:
            make.video(damaged, options={"strict": strict})
        assert caught.value.kind == "corrupt"
