"""Masked payload error against its definition in float64, and the worked numbers of the field."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.kernels.payload_error import payload_error
from treadle.kernels.tape_reference import Chunks, Patches, locate_chunks, locate_patches


def definition(prediction: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Mean squared error over the values that exist (NaN marks the others)."""
    real = ~np.isnan(values)
    x = values[real]
    target = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
    return float(((prediction[real] - target) ** 2).mean())


def one_patch(values: list[int], side: int) -> tuple[Tensor, Patches]:
    """A tape that holds one whole luma patch."""
    zero = torch.zeros(1, dtype=torch.int64)
    places = locate_patches(zero, torch.tensor([[1, side, side]]), torch.tensor([[1, 1, 1]]), zero, 1, side, 1)
    return torch.tensor(values, dtype=torch.uint8), places


def pictures() -> tuple[Tensor, Patches, NDArray[np.float64]]:
    """Two pictures of 4 px patches and what each patch holds, NaN outside."""
    rng = np.random.default_rng(0)
    sizes, side = [(7, 9), (4, 4)], 4
    images = [rng.integers(0, 256, (high, wide, 3), dtype=np.uint8) for high, wide in sizes]
    images[1][:] = 77
    rows: list[NDArray[np.float64]] = []
    tokens: list[int] = []
    offsets, extents, grids = [], [], []
    tape, at = bytearray(), 0
    for image in images:
        high, wide, _ = image.shape
        grid = (1, -(-high // side), -(-wide // side))
        canvas = np.full((grid[1] * side, grid[2] * side, 3), np.nan)
        canvas[:high, :wide] = image
        for h in range(grid[1]):
            for w in range(grid[2]):
                rows.append(canvas[h * side : (h + 1) * side, w * side : (w + 1) * side].ravel())
        count = grid[1] * grid[2]
        offsets += [at] * count
        extents += [(1, high, wide)] * count
        grids += [grid] * count
        tokens += range(count)
        tape += image.tobytes() + bytes(-image.size % 16)
        at = len(tape)
    places = locate_patches(torch.tensor(offsets), torch.tensor(extents), torch.tensor(grids), torch.tensor(tokens), 1, side, 3)
    return torch.frombuffer(tape, dtype=torch.uint8), places, np.stack(rows)


def recordings() -> tuple[Tensor, Chunks, NDArray[np.float64]]:
    """Two recordings in chunks of 5 samples and what each chunk holds, NaN past the end."""
    rng = np.random.default_rng(1)
    samples = rng.standard_normal(20).astype(np.float32) * 0.1
    rows = np.full((4, 5), np.nan)
    rows[0], rows[1], rows[2, :1], rows[3] = samples[0:5], samples[5:10], samples[10:11], samples[12:17]
    offset, extent = torch.tensor([0, 0, 0, 48]), torch.tensor([[1, 1, 11]] * 3 + [[1, 1, 5]])
    return torch.from_numpy(samples).view(torch.uint8), locate_chunks(offset, extent, torch.tensor([0, 1, 2, 0]), 5), rows


@pytest.mark.parametrize("make", [pictures, recordings])
def test_forward_and_gradient_equal_the_definition(make: Callable[[], tuple[Tensor, Patches | Chunks, NDArray[np.float64]]]) -> None:
    tape, places, rows = make()
    prediction = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ours = payload_error(prediction, tape, places)
    expected = sum(definition(p, v) for p, v in zip(prediction.detach().numpy(), rows, strict=True))
    assert ours.item() == pytest.approx(expected, rel=1e-12)
    (slope,) = torch.autograd.grad(3 * ours, prediction)
    assert (slope[torch.from_numpy(np.isnan(rows))] == 0).all()
    step = 1e-6
    for place in [(0, 0), (1, 2), (3, 4)]:
        moved = prediction.detach().numpy().copy()
        moved[place] += step
        up = sum(definition(p, v) for p, v in zip(moved, rows, strict=True))
        moved[place] -= 2 * step
        down = sum(definition(p, v) for p, v in zip(moved, rows, strict=True))
        assert slope[place].item() == pytest.approx(3 * (up - down) / (2 * step), rel=1e-6, abs=1e-8)


def test_worked_number() -> None:
    # Bytes 0, 1, 2, 3: population variance 1.25, so a guess of zeros errs by 1.25 / (1.25 + 1e-6) on average.
    tape, places = one_patch([0, 1, 2, 3], 2)
    loss = payload_error(torch.zeros(1, 4, dtype=torch.float64), tape, places)
    assert loss.item() == pytest.approx(0.9999992000006401, rel=1e-14)


def test_a_constant_patch_has_target_zero() -> None:
    tape, places = one_patch([200] * 4, 2)
    prediction = torch.zeros(1, 4, requires_grad=True)
    loss = payload_error(prediction, tape, places)
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, prediction)[0] == 0).all()


def test_brightness_and_contrast_do_not_change_the_target() -> None:
    prediction = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses = [payload_error(prediction, *one_patch(values, 2)).item() for values in ([10, 40, 20, 90], [25, 85, 45, 185])]
    # 2 x + 5; the variances are 937.5 and 3750, beside which 1e-6 changes the ninth digit.
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)


def test_bf16_predictions_keep_fp32_targets() -> None:
    tape, places, rows = pictures()
    loss = payload_error(torch.zeros(rows.shape, dtype=torch.bfloat16, requires_grad=True), tape, places)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum(definition(np.zeros(48), v) for v in rows), rel=1e-6)


def test_nothing_masked() -> None:
    tape, places, rows = pictures()
    prediction = torch.zeros(0, rows.shape[1], requires_grad=True)
    loss = payload_error(prediction, tape, places.select(torch.zeros(0, dtype=torch.int64)))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, prediction)[0].shape == (0, 48)
