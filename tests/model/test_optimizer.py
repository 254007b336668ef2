"""AdamW on a flat buffer: the published update, which parameters decay, refused updates, clipping."""

import math

import pytest
import torch
from torch import nn

from treadle.model.config import OptimizerConfig
from treadle.model.optimizer import AdamW, FlatParameters, is_decayed


class _Scalar(nn.Module):
    def __init__(self, value: float, *, matrix: bool) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((2, 1) if matrix else (1,), value))


def _run(gradients: list[float], *, matrix: bool = True) -> float:
    module = _Scalar(1.0, matrix=matrix)
    flat = FlatParameters(module)
    optimizer = AdamW(flat, OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
    for gradient in gradients:
        flat.gradients.zero_()
        assert module.p.grad is not None
        module.p.grad.fill_(gradient)
        optimizer.step(0.1, torch.tensor(False))
    return float(module.p.detach().reshape(-1)[0])


def test_published_update() -> None:
    # p = 1, rate and decay 0.1, g = 2: p (1 - 0.01) - 0.1 * m_hat / (sqrt(v_hat) + 1e-8) = 0.99 - 0.1 * 2 / (2 + 1e-8).
    assert _run([2.0]) == pytest.approx(0.8900000004999999, abs=1e-7)
    assert _run([2.0, -1.0, 0.0, 3.0]) == pytest.approx(0.760503057691469, abs=1e-6)


def test_a_zero_gradient_still_decays_a_matrix_and_nothing_else() -> None:
    assert _run([0.0]) == pytest.approx(0.99, abs=1e-7)
    assert _run([0.0], matrix=False) == 1.0


def test_what_decays() -> None:
    assert is_decayed(torch.zeros(4, 8))
    assert is_decayed(torch.zeros(256, 8))
    assert not is_decayed(torch.zeros(1, 8))
    assert not is_decayed(torch.zeros(8))
    assert not is_decayed(torch.zeros(()))


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(5, 7)
        self.other = nn.Linear(7, 3, bias=False)


def test_flat_views_keep_names_values_and_order() -> None:
    torch.manual_seed(0)
    module = _Module()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    flat = FlatParameters(module)
    assert [name for name, _ in flat.views(flat.weights)] == ["linear.weight", "other.weight", "scale", "linear.bias"]
    # 35 -> 48, 21 -> 32 elements, at multiples of 16.
    assert flat.num_decayed == 80
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(flat.view(flat.weights, name), before[name])
        assert parameter.grad is not None and not parameter.grad.any()


def test_backward_fills_the_flat_gradient_and_unused_parameters_have_zeros() -> None:
    module = _Module()
    flat = FlatParameters(module)
    module.linear(torch.ones(2, 5)).sum().backward()
    assert torch.equal(flat.view(flat.gradients, "linear.bias"), torch.full((7,), 2.0))
    assert not flat.view(flat.gradients, "other.weight").any()
    total = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))
    assert float(flat.norm()) == pytest.approx(total, rel=1e-6)


def test_matches_torch_step_for_step() -> None:
    torch.manual_seed(1)
    ours, theirs = _Module(), _Module()
    theirs.load_state_dict(ours.state_dict())
    flat = FlatParameters(ours)
    config = OptimizerConfig()
    optimizer = AdamW(flat, config)
    groups = [
        {"params": [p for p in theirs.parameters() if is_decayed(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in theirs.parameters() if not is_decayed(p)], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(config.beta1, config.beta2), eps=config.eps)
    for _ in range(20):
        for (_, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            gradient = torch.randn(a.shape)
            assert a.grad is not None
            a.grad.copy_(gradient)
            b.grad = gradient.clone()
        optimizer.step(1e-2, torch.tensor(False))
        reference.step()
    for (_, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_refused_update_changes_nothing() -> None:
    torch.manual_seed(2)
    module = _Module()
    flat = FlatParameters(module)
    optimizer = AdamW(flat, OptimizerConfig())
    flat.gradients.normal_()
    optimizer.step(1e-2, torch.tensor(False))
    before = [flat.weights.clone(), optimizer.first.clone(), optimizer.second.clone(), optimizer.updates.clone()]
    flat.gradients.fill_(torch.nan)
    optimizer.step(1e-2, torch.tensor(True))
    after = [flat.weights, optimizer.first, optimizer.second, optimizer.updates]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(optimizer.updates) == 1


def test_small_updates_accumulate() -> None:
    # fp32 holds 1 + 1e-4 steps; a bf16 weight (8 bits) would stay at 1.
    module = _Scalar(1.0, matrix=False)
    flat = FlatParameters(module)
    optimizer = AdamW(flat, OptimizerConfig())
    for _ in range(100):
        flat.gradients.fill_(-1.0)
        optimizer.step(1e-4, torch.tensor(False))
    assert float(module.p.detach()[0]) == pytest.approx(1.01, rel=1e-4)


def test_clipping_scales_to_the_bound_and_leaves_small_gradients() -> None:
    flat = FlatParameters(_Scalar(0.0, matrix=True))
    flat.gradients[:2] = torch.tensor([3.0, 4.0])
    flat.clip(flat.norm(), 1.0)
    assert flat.gradients[:2].tolist() == pytest.approx([0.6, 0.8])
    flat.clip(flat.norm(), 10.0)
    assert flat.gradients[:2].tolist() == pytest.approx([0.6, 0.8])
    flat.gradients.zero_()
    flat.clip(flat.norm(), 1.0)
    assert not flat.gradients.any()


def test_the_norm_of_many_elements_is_exact() -> None:
    # 3 M elements of 1e-3, and one that no block holds: 1e-3 sqrt(3e6 + 1). A block rounds its 4096 additions, at most 4096 2^-24 / 2 of it.
    module = nn.Module()
    module.p = nn.Parameter(torch.zeros(3_000_001))
    flat = FlatParameters(module)
    flat.gradients[:3_000_001] = 1e-3
    assert float(flat.norm()) == pytest.approx(1e-3 * math.sqrt(3_000_001), rel=1.3e-4)
    assert flat.norm().dtype == torch.float32


def test_masters_must_be_fp32() -> None:
    with pytest.raises(ValueError, match="master weights are fp32"):
        FlatParameters(nn.Linear(2, 2).to(torch.bfloat16))
