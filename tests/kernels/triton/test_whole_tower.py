"""A tower whose every op is its Triton version, on a batch of all modalities, against the same tower in float64."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.model.config import Masking
from treadle.model.corruption import Corruption, corrupt
from treadle.model.layout import BatchLayout
from treadle.model.tower import Tower

OPS = (
    "byte_embed",
    "chunk_embed",
    "cover_spans",
    "mean_pool",
    "patch_embed",
    "philox",
    "rms_norm",
    "rotary",
    "segment_attention",
    "swiglu",
)

# Ten roundings to 8 bits, one after another, of values that are summed with others.
NORM_ERROR = {torch.float32: 2e-5, torch.bfloat16: 0.03}


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every op of the tower take its Triton version for all dtypes that kernels take; answers which ops did."""
    taken: list[str] = []

    def choose(op: str, impl: str, device: torch.device, *dtypes: torch.dtype) -> str:
        if torch.float64 in dtypes or impl == "reference":
            return "reference"
        taken.append(op)
        return "triton"

    for name in ("treadle.model.tower", *(f"treadle.kernels.{op}" for op in OPS)):
        monkeypatch.setattr(importlib.import_module(name), "choose", choose)
    return taken


def outcome(tower: Tower, layout: BatchLayout, corruption: Corruption) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """States, pooled vectors and every parameter's gradient of their weighted sums."""
    states_PD = tower(layout, corruption)
    pooled_SD = tower.pool(states_PD, layout)
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64, device=states_PD.device)
    for out in (states_PD, pooled_SD):
        total = total + (out * torch.randn(out.shape, generator=generator).to(out)).sum().double()
    names, parameters = zip(*tower.named_parameters(), strict=True)
    return states_PD.detach(), pooled_SD.detach(), dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_all_modalities_in_one_batch(triton_everywhere: list[str], handmade: Any, device: torch.device, dtype: torch.dtype) -> None:
    layout = BatchLayout.from_batch(handmade.batch(handmade.mixed()[:-1]), device)
    corruption = corrupt(layout, Masking(), seed=5, step=3)
    tower = Tower(1, 128, layout.shape, seed=1).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        states, pooled, gradients = outcome(tower, layout, corruption)
    assert set(triton_everywhere) == set(OPS)
    want_states, want_pooled, want_gradients = outcome(copy.deepcopy(tower).double(), layout, corruption)
    assert error(states, want_states) < NORM_ERROR[dtype]
    assert error(pooled, want_pooled) < NORM_ERROR[dtype]
    for name, want in want_gradients.items():
        assert error(gradients[name], want) < 3 * NORM_ERROR[dtype], name


def test_a_batch_of_nothing(triton_everywhere: list[str], handmade: Any, device: torch.device) -> None:
    layout = BatchLayout.empty(handmade.shape, device)
    tower = Tower(1, 128, layout.shape, seed=1).to(device)
    states, pooled, gradients = outcome(tower, layout, corrupt(layout, Masking(), seed=5, step=3))
    assert states.shape == (0, 128)
    assert pooled.shape == (0, 128)
    assert all((gradient == 0).all() for gradient in gradients.values())
