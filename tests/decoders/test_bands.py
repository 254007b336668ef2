"""Pictures larger than a strip are converted and scaled piece by piece: what comes out is what the library makes of the whole."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import bands
from treadle.decoders.bands import array_raster, fill, picture_raster

HEIGHT, WIDTH = 600, 220


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many strips of a small picture as a large one has."""
    monkeypatch.setattr(bands, "_STRIP_PIXELS", 1 << 13)
    monkeypatch.setattr(bands, "_BAND_PIXELS", 1 << 13)
    monkeypatch.setattr(bands, "_STRIP_MARGINS", 4)


@pytest.fixture(scope="module")
def picture(make: Any) -> Any:
    pixels = make.picture(HEIGHT, WIDTH)
    alpha = np.where(np.indices((HEIGHT, WIDTH)).sum(0) // 40 % 3, 255, pixels[..., 0]).astype(np.uint8)
    return Image.fromarray(np.dstack([pixels, alpha]), "RGBA")


def whole(picture: Image.Image, channels: int, size: tuple[int, int]) -> NDArray[np.int64]:
    """Alpha resolved first, then one resize of all of it."""
    if channels != 4 and picture.mode in ("RGBA", "LA"):
        paper = Image.new("RGB", picture.size, (255, 255, 255))
        paper.paste(picture.convert("RGBA"), mask=picture.getchannel("A"))
        picture = paper
    picture = picture.convert("L" if picture.mode == "L" else "RGBA" if channels == 4 else "RGB")
    scaled = picture.resize((size[1], size[0]), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return np.asarray(scaled.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])).reshape(*size, channels).astype(np.int64)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(599, 220), (600, 219), (400, 147), (301, 111), (120, 44), (40, 15), (3, 1)])
def test_strips_make_the_picture_that_one_resize_makes(picture: Image.Image, mode: str, channels: int, size: tuple[int, int]) -> None:
    source = picture.convert("RGB").quantize(64) if mode == "P" else picture.convert(mode)
    seen = fill(picture_raster(source), channels, size, Image.Resampling.LANCZOS)
    assert seen.shape == (*size, channels) and seen.flags.c_contiguous
    expected, seen = whole(source, channels, size), seen.astype(np.int64)
    if channels == 4:
        # As they are seen: colours of little alpha are the quotients of small numbers.
        expected[..., :3] = expected[..., :3] * expected[..., 3:] // 255
        seen[..., :3] = seen[..., :3] * seen[..., 3:] // 255
    difference = np.abs(seen - expected)
    # The library rounds and clips once between its two passes, whose order it chooses by the sizes; and where rows are first averaged in
    # groups, the groups begin anew in each strip.
    grouped = HEIGHT // size[0] >= 6
    assert difference.mean() < (1.5 if grouped else 0.5)
    assert difference.max() <= (40 if grouped else 16)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_bands_of_the_same_size_are_exact(picture: Image.Image, channels: int) -> None:
    size = (HEIGHT, WIDTH)
    np.testing.assert_array_equal(
        fill(picture_raster(picture), channels, size, Image.Resampling.LANCZOS),
        np.asarray(picture).reshape(*size, 4)
        if channels == 4
        else whole(picture, 3, size)
        if channels == 3
        else np.asarray(Image.fromarray(whole(picture, 3, size).astype(np.uint8)).convert("L"))[..., None],
    )


@pytest.mark.parametrize("mode, channels", [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_what_lies_as_a_payload_is_not_copied(mode: str, channels: int) -> None:
    pixels = np.full((40, 30, channels), 255, np.uint8)
    assert fill(array_raster(pixels, mode), channels, (40, 30), Image.Resampling.LANCZOS) is pixels
