"""Damage in VP8: what FFmpeg's decoders leave out in silence is refused, and what is shown is what libvpx makes of the bytes."""

import ctypes
import io
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders import DecodeError
from treadle.decoders import vp8 as vp8_module
from treadle.decoders.media import codecs


def with_decoder(data: bytes, name: str) -> list[NDArray[np.uint8]] | None:
    """Every frame; None where the decoder refuses."""
    context: Any = av.CodecContext.create(name, "r")
    context.thread_count = 1
    try:
        with av.open(io.BytesIO(data), "r", format="matroska") as container:
            return [frame.to_ndarray(format="rgb24") for packet in container.demux(video=0) for frame in context.decode(packet)]
    except codecs().error.FFmpegError:
        return None


def alike(one: list[NDArray[np.uint8]], other: list[NDArray[np.uint8]]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def rewritten(data: bytes, change: Callable[[int, bytes], bytes]) -> bytes:
    """The clip with every packet's bytes replaced, in a container that fits them."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(out, "w", format="webm") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.dts is None:
                continue
            changed = av.Packet(change(number, bytes(packet)))
            changed.pts, changed.dts, changed.time_base, changed.stream = packet.pts, packet.dts, packet.time_base, stream
            changed.is_keyframe = packet.is_keyframe
            target.mux(changed)
    return out.getvalue()


@pytest.fixture(name="fresh_library")
def fixture_fresh_library() -> Iterator[None]:
    """The library is looked for anew, and once more afterwards."""
    vp8_module._library.cache_clear()
    yield
    vp8_module._library.cache_clear()


def test_damage_that_ffmpeg_does_not_tell_is_refused(make: Any) -> None:
    whole = make.clip([make.picture(48, 64, seed) for seed in range(4)], "libvpx", "webm")
    expected = with_decoder(whole, "libvpx")
    assert expected is not None and alike(expected, with_decoder(whole, "vp8") or [])
    make.video(whole)
    draw = np.random.default_rng(8)
    refused = shown = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[int(draw.integers(len(whole) // 4, len(whole) - 60))] ^= int(draw.integers(1, 256))
        seen = with_decoder(bytes(damaged), "libvpx")
        try:
            payload = make.video(bytes(damaged))
        except DecodeError as error:
            assert error.kind == "corrupt"
            refused += with_decoder(bytes(damaged), "vp8") is not None and seen is not None
        else:
            assert seen is not None and alike(list(payload.array), seen)
            shown += 1
    # Both of FFmpeg's decoders show these.
    assert refused >= 10 and shown >= 5, (refused, shown)


@pytest.mark.parametrize("options", [{}, {"slices": "4"}, {"error-resilient": "default+partitions", "slices": "8"}])
@pytest.mark.parametrize("number", [0, 5, 11])
def test_a_packet_that_ends_early_is_refused(make: Any, options: dict[str, str], number: int) -> None:
    """The container is whole; a frame's last partition lacks its end, which FFmpeg's decoders show without a word."""
    data = make.clip((make.picture(96, 128, seed) for seed in range(12)), "libvpx", "webm", options=options)
    assert rewritten(data, lambda _, packet: packet) and make.video(rewritten(data, lambda _, packet: packet)).extent[0] == 12
    shown = 0
    for lost in (16, 64, 256):

        def shorten(place: int, packet: bytes, lost: int = lost) -> bytes:
            return packet[: -min(lost, len(packet) - 16)] if place == number else packet

        cut = rewritten(data, shorten)
        with pytest.raises(DecodeError) as caught:
            make.video(cut)
        assert caught.value.kind == "corrupt"
        shown += with_decoder(cut, "vp8") is not None
    assert shown or options, "FFmpeg refuses it too"


@pytest.mark.parametrize(
    "size, options",
    [
        ((49, 65), {}),
        ((2, 2), {}),
        ((64, 96), {"profile": "1"}),
        ((64, 96), {"profile": "3"}),
        ((144, 176), {"slices": "8"}),
        ((64, 96), {"error-resilient": "default+partitions"}),
        ((64, 96), {"auto-alt-ref": "1", "lag-in-frames": "20", "arnr-maxframes": "7", "arnr-strength": "5"}),
    ],
)
def test_whole_clips_are_what_ffmpeg_shows(make: Any, size: tuple[int, int], options: dict[str, str]) -> None:
    data = make.clip(make.moving(12, *size), "libvpx", "webm", options=options)
    payload = make.video(data, columns=100_000)
    assert payload.extent == (12, *size)
    assert alike(list(payload.array), with_decoder(data, "vp8") or [])


def test_a_size_that_changes_half_way(make: Any) -> None:
    small, large = (make.clip(make.moving(4, *size), "libvpx", "webm") for size in ((48, 64), (96, 128)))
    with av.open(io.BytesIO(large), "r") as container:
        packets = [bytes(packet) for packet in container.demux(video=0)]
    joined = rewritten(small, lambda number, packet: packets[number - 2] if number >= 2 else packet)
    payload = make.video(joined)
    assert payload.extent == (4, 48, 64)
    assert make.numbers(payload) == [0, 1, 0, 1]


def test_a_size_beyond_the_limit_is_refused_before_its_memory(make: Any) -> None:
    def grown(number: int, packet: bytes) -> bytes:
        return packet[:6] + b"\xff\x3f\xff\x3f" + packet[10:] if packet[0] & 1 == 0 and number else packet

    # A key frame every second frame; the third one claims 16,383 x 16,383 pixels.
    data = rewritten(make.clip(make.moving(4), "libvpx", "webm", options={"g": "2"}), grown)
    with pytest.raises(DecodeError, match="16383 x 16383") as caught:
        make.video(data)
    assert caught.value.kind == "too_large"


def test_packets_that_are_no_frames(make: Any) -> None:
    data = make.clip(make.moving(6), "libvpx", "webm", options={"g": "3"})
    for content in (bytes(12), b"\0", b"\xff" * 40):

        def replace(number: int, packet: bytes, content: bytes = content) -> bytes:
            return content if number == 3 else packet

        with pytest.raises(DecodeError) as caught:
            make.video(rewritten(data, replace))
        assert caught.value.kind == "corrupt"


def test_alpha_beside_vp8_is_ignored(make: Any) -> None:
    frames = [np.full((48, 64, 4), (200, 100, 50, 8 * number), np.uint8) for number in range(4)]
    options = {"auto-alt-ref": "0"}
    data = make.clip(frames, "libvpx", "webm", pixels="yuva420p", options=options, source="rgba")
    payload = make.video(data)
    assert payload.extent == (4, 48, 64)
    assert np.abs(payload.array[..., :3].astype(int) - (200, 100, 50)).max() <= 6


def test_a_turned_clip_is_turned(make: Any) -> None:
    out = io.BytesIO()
    data = make.clip(make.moving(4, 48, 64), "libvpx", "webm")
    with av.open(io.BytesIO(data), "r") as source, av.open(out, "w", format="matroska") as target:
        stream: Any = target.add_stream_from_template(source.streams.video[0])
        stream.set_display_rotation(90)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    assert make.video(out.getvalue()).extent == (4, 64, 48)


@pytest.mark.usefixtures("fresh_library")
def test_without_libvpx_it_is_not_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make.clip(make.moving(2), "libvpx", "webm")

    def fail(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(DecodeError, match="none was found beside it") as caught:
        make.video(data)
    assert caught.value.kind == "unsupported"


@pytest.mark.usefixtures("fresh_library")
def test_a_libvpx_of_another_interface_is_not_called(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make.clip(make.moving(2), "libvpx", "webm")
    monkeypatch.setattr(vp8_module, "_ABI_VERSION", 99)
    with pytest.raises(DecodeError, match="none was found beside it"):
        make.video(data)
