"""Damage in VP8: what FFmpeg's decoder leaves out in silence is refused, and what is shown is what libvpx shows."""

import io
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.decoders import DecodeError
from treadle.decoders.media import codecs


def with_decoder(data: bytes, name: str) -> list[NDArray[np.uint8]] | None:
    """The luma of every frame; None where the decoder refuses."""
    context: Any = av.CodecContext.create(name, "r")
    context.thread_count = 1
    try:
        with av.open(io.BytesIO(data), "r", format="matroska") as container:
            return [frame.to_ndarray(format="gray") for packet in container.demux(video=0) for frame in context.decode(packet)]
    except codecs().error.FFmpegError:
        return None


def alike(one: list[NDArray[np.uint8]], other: list[NDArray[np.uint8]]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


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
        one, other = with_decoder(bytes(damaged), "vp8"), with_decoder(bytes(damaged), "libvpx")
        try:
            payload = make.video(bytes(damaged))
        except DecodeError:
            refused += one is not None and (other is None or not alike(one, other))
        else:
            assert one is not None and other is not None and alike(one, other) and payload.extent[0] == len(other)
            shown += 1
    assert refused >= 5 and shown >= 5, (refused, shown)


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
def test_whole_clips_are_the_same_to_both(make: Any, size: tuple[int, int], options: dict[str, str]) -> None:
    data = make.clip(make.moving(12, *size), "libvpx", "webm", options=options)
    assert make.video(data, columns=100_000).extent == (12, *size)


def test_alpha_beside_vp8_is_ignored_by_both(make: Any) -> None:
    frames = [np.full((48, 64, 4), (200, 100, 50, 8 * number), np.uint8) for number in range(4)]
    options = {"auto-alt-ref": "0"}
    data = make.clip(frames, "libvpx", "webm", pixels="yuva420p", options=options, source="rgba")
    payload = make.video(data)
    assert payload.extent == (4, 48, 64)
    assert np.abs(payload.array[..., :3].astype(int) - (200, 100, 50)).max() <= 6


def test_without_libvpx_it_is_not_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make.clip(make.moving(2), "libvpx", "webm")

    def fail(*arguments: object) -> None:
        raise ValueError("unknown codec libvpx")

    monkeypatch.setattr(codecs().codec, "CodecContext", type("Context", (), {"create": fail}))
    with pytest.raises(DecodeError, match="where FFmpeg has libvpx") as caught:
        make.video(data)
    assert caught.value.kind == "unsupported"
