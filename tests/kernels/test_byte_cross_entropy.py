"""Byte cross-entropy against its formula in float64."""

import math

import pytest
import torch

from treadle.kernels.byte_cross_entropy import byte_cross_entropy


@pytest.mark.parametrize("count", [0, 1, 63, 127])
def test_forward_and_gradient(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, 256, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randint(0, 256, (count,), generator=generator)
    ours = byte_cross_entropy(logits, target)
    exponentials = torch.exp(logits)
    probability = exponentials / exponentials.sum(-1, keepdim=True)
    expected = -torch.log(probability[torch.arange(count), target]).sum()
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    slope = probability - torch.nn.functional.one_hot(target, 256)
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], slope, rtol=1e-11, atol=1e-12)


def test_equal_logits_cost_log_256_each() -> None:
    assert float(byte_cross_entropy(torch.zeros(3, 256), torch.tensor([0, 128, 255]))) == pytest.approx(3 * math.log(256), rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.zeros(2, 256)
    logits[0, 7], logits[1, 7] = 1e30, -1e30
    logits.requires_grad_()
    loss = byte_cross_entropy(logits, torch.tensor([7, 8]))
    # 0 for the certain one, log 255 for the other
    assert loss.item() == pytest.approx(math.log(255), rel=1e-6)
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_bf16_logits_are_widened() -> None:
    loss = byte_cross_entropy(torch.zeros(1, 256, dtype=torch.bfloat16), torch.tensor([3]))
    assert loss.dtype == torch.float32
