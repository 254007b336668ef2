"""WebP by libwebp itself: bit for bit what Pillow shows, without the library too, and what of a damaged container would be shown wrong."""

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import DecodeError, webp
from treadle.decoders.errors import DecodeErrorKind


@pytest.fixture(scope="module")
def files(make: Any) -> dict[str, bytes]:
    def pictures(height: int, width: int, *, alpha: bool) -> list[Image.Image]:
        frames = [make.picture(height, width, number) for number in range(3)]
        return [Image.fromarray(np.dstack([frame, frame[..., 0]]) if alpha else frame) for frame in frames]

    found: dict[str, bytes] = {}
    for alpha in (False, True):
        for height, width in ((1, 1), (48, 64), (61, 83)):
            first, *others = pictures(height, width, alpha=alpha)
            for name, fields in (("lossy", {}), ("lossless", {"lossless": True}), ("exact", {"lossless": True, "exact": True})):
                found[f"{name} {height} x {width} {alpha}"] = make.save(first, "WEBP", **fields)
            found[f"tagged {height} x {width} {alpha}"] = make.save(first, "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0", icc_profile=b"none")
            found[f"animated {height} x {width} {alpha}"] = make.save(first, "WEBP", save_all=True, append_images=others)
    # A first frame smaller than its canvas, whose rest is transparent.
    parts = [Image.new("RGBA", (48, 40)) for _ in range(2)]
    parts[0].paste((200, 10, 20, 77), (20, 8, 37, 21))
    parts[1].paste((1, 2, 250, 255), (2, 30, 11, 39))
    found["part"] = make.save(parts[0], "WEBP", save_all=True, append_images=parts[1:], lossless=True, minimize_size=True)
    return found


def seen(make: Any, data: bytes, channels: int, **options: Any) -> NDArray[np.uint8] | DecodeErrorKind:
    try:
        return make.image(data, channels, **options).array  # type: ignore[no-any-return]
    except DecodeError as error:
        return error.kind


def test_the_library_is_found() -> None:
    """On Windows it is inside Pillow."""
    assert sys.platform == "win32" or webp._library() is not None


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_equal_pillows_with_the_library_and_without(
    make: Any, files: dict[str, bytes], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (4097, 1 + 4):
        straight = {name: make.image(data, channels, columns=columns).array for name, data in files.items()}
        with monkeypatch.context() as patch:
            patch.setattr(webp, "_library", lambda: None)
            for name, data in files.items():
                np.testing.assert_array_equal(make.image(data, channels, columns=columns).array, straight[name], err_msg=name)
    assert len(straight) == 31


def test_what_damage_leaves_is_pillows_too(make: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    draw, kinds = np.random.default_rng(4), {}
    for name, data in files.items():
        whole = make.image(data, 4).array
        for _ in range(24):
            damaged = bytearray(data)
            damaged[int(draw.integers(len(data) if draw.random() < 0.5 else min(len(data), 90)))] = int(draw.integers(256))
            straight = seen(make, bytes(damaged), 4)
            with monkeypatch.context() as patch:
                patch.setattr(webp, "_library", lambda: None)
                through = seen(make, bytes(damaged), 4)
            if isinstance(straight, str):
                # Pillow passes over a first frame that it cannot place or read, and shows the second.
                assert (isinstance(through, str) and straight == through) or "animated" in name or name == "part", name
            elif not isinstance(through, str):
                np.testing.assert_array_equal(straight, through, err_msg=name)
            else:
                # Damage to a later frame, or to bytes that say nothing of the picture.
                assert through == "corrupt"
                np.testing.assert_array_equal(straight, whole, err_msg=name)
            kinds[str(straight) if isinstance(straight, str) else "ok"] = True
    assert {"ok", "corrupt", "truncated", "unsupported"} <= kinds.keys()


@pytest.mark.parametrize("name", ["lossy 48 x 64 True", "animated 48 x 64 True"])
def test_alpha_whose_name_is_damaged_is_not_left_out(make: Any, files: dict[str, bytes], name: str) -> None:
    data = bytearray(files[name])
    for bit in range(8):
        for byte in range(4):
            damaged = bytearray(data)
            damaged[data.index(b"ALPH") + byte] ^= 1 << bit
            assert seen(make, bytes(damaged), 4) == "corrupt"


@pytest.mark.parametrize("place", [(b"ANIM", 0), (b"ANMF", 8 + 0), (b"ANMF", 8 + 6), (b"ANMF", 8 + 9)])
def test_a_first_frame_that_does_not_fit_is_refused(make: Any, files: dict[str, bytes], place: tuple[bytes, int]) -> None:
    damaged = bytearray(files["animated 48 x 64 False"])
    damaged[damaged.index(place[0]) + place[1]] ^= 1
    assert seen(make, bytes(damaged), 3) == "corrupt"


def test_a_picture_reads_no_byte_behind_its_chunk(make: Any, files: dict[str, bytes]) -> None:
    """A chunk that says it is shorter than its picture: what follows, another chunk's, is none of it."""
    data = files["tagged 48 x 64 False"]
    at = data.index(b"VP8 ")
    length = int.from_bytes(data[at + 4 : at + 8], "little")
    body = data[at + 8 : at + 8 + length]
    shorter = data[: at + 4] + (length - 40).to_bytes(4, "little") + body[:-40] + b"JUNK" + (32).to_bytes(4, "little") + body[-32:]
    assert seen(make, shorter + data[at + 8 + length + length % 2 :], 3) in ("corrupt", "truncated")
