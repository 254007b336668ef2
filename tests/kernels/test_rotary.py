"""q/k-norm and rotary against two-by-two rotations in float64."""

import pytest
import torch
from torch import Tensor

from treadle.kernels.rotary import rotary

K = 64


def formula(x: Tensor, gain: Tensor, angle: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 of the normalised vector, turned by angle i."""
    normed = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * gain
    even, odd = normed[..., 0::2], normed[..., 1::2]
    cosine, sine = torch.cos(angle)[:, None, :], torch.sin(angle)[:, None, :]
    turned = torch.empty_like(normed)
    turned[..., 0::2] = even * cosine - odd * sine
    turned[..., 1::2] = even * sine + odd * cosine
    return turned


def inputs(positions: int, heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(positions, 3, heads, K, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    q_gain, k_gain = (torch.rand(K, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    angle = torch.randn(positions, K // 2, generator=generator, dtype=torch.float64) * 10
    return qkv, q_gain, k_gain, angle


@pytest.mark.parametrize(("positions", "heads"), [(0, 2), (1, 2), (63, 8), (127, 2), (2500, 2)])
def test_forward_and_gradients(positions: int, heads: int) -> None:
    qkv, q_gain, k_gain, angle = inputs(positions, heads)
    ours = rotary(qkv, q_gain, k_gain, torch.polar(torch.ones_like(angle), angle))
    theirs = (formula(qkv[:, 0], q_gain, angle), formula(qkv[:, 1], k_gain, angle), qkv[:, 2])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    along = [torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(ours)]
    got = torch.autograd.grad(ours, (qkv, q_gain, k_gain), along)
    want = torch.autograd.grad(theirs, (qkv, q_gain, k_gain), along)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_scores_depend_on_the_difference_of_coordinates_alone() -> None:
    qkv, q_gain, k_gain, _ = inputs(1, 1)
    frequency = torch.linspace(0.01, 1, K // 2, dtype=torch.float64)

    def score(q_at: int, k_at: int) -> Tensor:
        turns = [torch.polar(torch.ones_like(frequency), frequency * at)[None] for at in (q_at, k_at)]
        return (rotary(qkv, q_gain, k_gain, turns[0])[0] * rotary(qkv, q_gain, k_gain, turns[1])[1]).sum()

    torch.testing.assert_close(score(3, 10), score(103, 110), rtol=1e-12, atol=1e-12)


def test_bf16_is_computed_in_fp32() -> None:
    qkv, q_gain, k_gain, angle = inputs(63, 2, torch.bfloat16)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    q, k, v = rotary(qkv, q_gain.float(), k_gain.float(), turn)
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    # One rounding, 2^-9 of the value: nothing before it is rounded to bf16.
    torch.testing.assert_close(q.double(), formula(qkv[:, 0].double(), q_gain, angle), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(k.double(), formula(qkv[:, 1].double(), k_gain, angle), rtol=2**-8, atol=1e-5)
    (gradient,) = torch.autograd.grad(q.float().sum() + v.float().sum(), qkv)
    assert gradient.dtype == torch.bfloat16
    assert gradient.isfinite().all()
