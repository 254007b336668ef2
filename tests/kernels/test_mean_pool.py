"""Pooled means against a loop over segments in float64."""

import torch

from treadle.kernels.mean_pool import mean_pool


def test_forward_and_gradient_equal_a_loop() -> None:
    states = torch.randn(200, 63, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    # Segments out of order, one of a single token, one with a mask position after its tokens (7 + 1 of 9), one without tokens.
    start, tokens = torch.tensor([100, 0, 40, 198, 60]), torch.tensor([90, 7, 1, 0, 33])
    ours = mean_pool(states, start, tokens)
    theirs = torch.stack(
        [
            states[s + 1 : s + 1 + n].mean(0) if n else torch.zeros(63, dtype=torch.float64)
            for s, n in zip(start.tolist(), tokens.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    along = torch.randn(5, 63, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(ours, states, along)[0], torch.autograd.grad(theirs, states, along)[0])


def test_no_segments_and_no_positions() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    states = torch.zeros(0, 8, requires_grad=True)
    pooled = mean_pool(states, none, none)
    assert pooled.shape == (0, 8)
    assert torch.autograd.grad(pooled.sum(), states)[0].shape == (0, 8)
    assert mean_pool(torch.ones(3, 8), none, none).shape == (0, 8)


def test_bf16_states_are_averaged_in_fp32() -> None:
    states = torch.ones(4097, 2, dtype=torch.bfloat16, requires_grad=True)
    pooled = mean_pool(states, torch.tensor([0]), torch.tensor([4096]))
    assert pooled.dtype == torch.float32
    assert pooled.tolist() == [[1.0, 1.0]]
    (gradient,) = torch.autograd.grad(pooled.sum(), states)
    assert gradient.dtype == torch.bfloat16
    assert gradient[0].tolist() == [0.0, 0.0]
    assert gradient[1].tolist() == [1 / 4096, 1 / 4096]
