"""RMSNorm with a residual against its formula in float64."""

import pytest
import torch
from torch import Tensor

from treadle.kernels.rms_norm import rms_norm

SHAPES = [(0, 128), (1, 1), (63, 127), (127, 64), (3000, 128)]


def formula(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * gain


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradients(shape: tuple[int, int], with_residual: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gain = torch.randn(shape[1], generator=generator, dtype=torch.float64, requires_grad=True)
    y, total = rms_norm(x, gain, residual if with_residual else None)
    expected_total = x + residual if with_residual else x
    expected = formula(expected_total, gain)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, gain, residual] if with_residual else [x, gain]
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    got = torch.autograd.grad((y * a + total * b).sum(), inputs)
    want = torch.autograd.grad((expected * a + expected_total * b).sum(), inputs)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gain = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain)[0], (x, gain))


def test_a_row_of_zeros_stays_zeros() -> None:
    x = torch.zeros(2, 64, requires_grad=True)
    y, _ = rms_norm(x, torch.ones(64))
    assert (y == 0).all()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()


def test_bf16_statistics_are_fp32() -> None:
    x = torch.full((4, 4096), 3.0, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    y, total = rms_norm(x, torch.ones(4096), out_dtype=torch.float32)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)
    # mean square (9 * 4095 + 1) / 4096: a bf16 sum would stall long before
    torch.testing.assert_close(y[0, 1], torch.tensor(3 / ((9 * 4095 + 1) / 4096) ** 0.5), rtol=1e-6, atol=0)


def test_mixed_types_of_a_block_under_autocast() -> None:
    x, gain = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64, requires_grad=True)
    change = x.bfloat16().requires_grad_()
    y, total = rms_norm(change, gain, x, out_dtype=torch.bfloat16)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(y.float().sum(), (change, gain))
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]
