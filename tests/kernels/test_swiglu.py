"""SwiGLU against its formula in float64."""

import pytest
import torch

from treadle.kernels.swiglu import swiglu


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (63, 254), (2100, 254)])
def test_forward_and_gradient(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gate, up = x[:, : shape[1] // 2], x[:, shape[1] // 2 :]
    expected = gate / (1 + torch.exp(-gate)) * up
    ours = swiglu(x)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    along = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(ours, x, along)[0], torch.autograd.grad(expected, x, along)[0], rtol=1e-11, atol=1e-12)


def test_gradcheck() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_extreme_gates_stay_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, -90.0, 2.0, 3.0, 4.0]], requires_grad=True)
    out = swiglu(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    # silu(-1e4) = 0, silu(1e4) = 1e4, silu(-90) is below fp32's smallest normal number
    torch.testing.assert_close(out, torch.tensor([[0.0, 3e4, 0.0]]), rtol=0, atol=1e-30)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 3.0, 0.0, 0.0, 1e4, 0.0]]), rtol=0, atol=1e-30)


def test_bf16() -> None:
    x = torch.randn(63, 128, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    ours, theirs = swiglu(x), swiglu(wide)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), theirs, rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), x)[0].double(), torch.autograd.grad(theirs.sum(), wide)[0], rtol=2**-6, atol=2**-8
    )
