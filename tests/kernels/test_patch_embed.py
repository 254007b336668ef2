"""Patch and tube embedding against a loop over pixels, in float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.kernels.patch_embed import patch_embed
from treadle.kernels.tape_reference import Patches, locate_patches

FRAMES, SIDE, CHANNELS, HIDDEN = 2, 5, 3, 127


def pixel_rows(clip: NDArray[np.uint8], frames: int, side: int) -> NDArray[np.float64]:
    """Every patch of a clip `[T, H, W, ch]` in (t, h, w) order: pixels in [-1, 1], zeros outside."""
    deep, high, wide, channels = clip.shape
    rows: list[NDArray[np.float64]] = []
    for t in range(-(-deep // frames)):
        for h in range(-(-high // side)):
            for w in range(-(-wide // side)):
                patch = np.zeros((frames, side, side, channels))
                for f in range(frames):
                    for y in range(side):
                        for x in range(side):
                            at = t * frames + f, h * side + y, w * side + x
                            if at[1] < high and at[2] < wide:
                                patch[f, y, x] = 2 * clip[at].astype(np.float64) / 255 - 1
                rows.append(patch.ravel())
    return np.stack(rows)


def tape_of(clips: list[NDArray[np.uint8]], frames: int, side: int) -> tuple[Tensor, Patches, NDArray[np.float64]]:
    """A tape of clips with poison between and after them, all their patches, and what these hold."""
    rng = np.random.default_rng(1)
    parts: list[NDArray[np.uint8]] = []
    tokens: list[int] = []
    offsets, extents, grids = [], [], []
    at = 0
    for clip in clips:
        grid = (clip.shape[0] // frames, -(-clip.shape[1] // side), -(-clip.shape[2] // side))
        count = int(np.prod(grid))
        offsets += [at] * count
        extents += [clip.shape[:3]] * count
        grids += [grid] * count
        tokens += range(count)
        poison = rng.integers(1, 256, -clip.size % 16, dtype=np.uint8)
        parts += [clip.ravel(), poison]
        at += clip.size + len(poison)
    patches = locate_patches(
        torch.tensor(offsets), torch.tensor(extents), torch.tensor(grids), torch.tensor(tokens), frames, side, clips[0].shape[3]
    )
    return torch.from_numpy(np.concatenate(parts)), patches, np.concatenate([pixel_rows(clip, frames, side) for clip in clips])


def clips(frames: int, channels: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(frames + channels)
    sizes = [(1, 1), (5, 3), (5, 5), (10, 15), (13, 8), (4, 21)]
    return [rng.integers(0, 256, (frames * (1 + i % 3), high, wide, channels), dtype=np.uint8) for i, (high, wide) in enumerate(sizes)]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_forward_and_weight_gradient(frames: int, channels: int) -> None:
    tape, patches, rows = tape_of(clips(frames, channels), frames, SIDE)
    weight = torch.randn(HIDDEN, patches.values, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours = patch_embed(tape, patches, weight)
    pixels = torch.from_numpy(rows)
    torch.testing.assert_close(ours, pixels @ weight.T, rtol=1e-11, atol=1e-11)
    along = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(ours, weight, along)[0], along.T @ pixels, rtol=1e-11, atol=1e-11)


def test_a_selection_embeds_as_it_does_among_all() -> None:
    tape, patches, _ = tape_of(clips(FRAMES, CHANNELS), FRAMES, SIDE)
    weight = torch.randn(HIDDEN, patches.values, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([3, 0, 17, 11])
    torch.testing.assert_close(patch_embed(tape, patches.select(chosen), weight), patch_embed(tape, patches, weight)[chosen])


def test_pixels_are_exact_in_bf16() -> None:
    tape = torch.arange(256, dtype=torch.uint8)
    count = torch.zeros(1, dtype=torch.int64)
    patches = locate_patches(count, torch.tensor([[1, 16, 16]]), torch.tensor([[1, 1, 1]]), count, 1, 16, 1)
    one = torch.eye(256, dtype=torch.bfloat16)
    # 2 x - 255 has at most 8 significant bits: only the quotient is rounded.
    expected = ((2 * torch.arange(256) - 255) / 255).bfloat16()
    assert torch.equal(patch_embed(tape, patches, one)[0], expected)


def test_no_patches_give_no_rows_and_a_zero_gradient() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    patches = locate_patches(none, torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32), none, 1, 4, 3)
    weight = torch.ones(8, 48, requires_grad=True)
    out = patch_embed(torch.zeros(16, dtype=torch.uint8), patches, weight)
    assert out.shape == (0, 8)
    assert (torch.autograd.grad(out.sum(), weight)[0] == 0).all()
