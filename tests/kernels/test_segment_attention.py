"""Segment attention against softmax over the whole batch under a mask of blocks, in float64."""

import math

import pytest
import torch
from torch import Tensor

from treadle.kernels.segment_attention import segment_attention
from treadle.kernels.segment_attention_reference import attend_by_autograd, segment_groups

K = 64

Triple = tuple[Tensor, Tensor, Tensor]


def dense(q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Every score of every pair, those of two segments masked away; zeros where no segment is."""
    positions = q.shape[0]
    owner = torch.full((positions,), -1)
    for s, (first, count) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        owner[first : first + count] = s
    same = (owner[:, None] == owner[None, :]) & (owner >= 0)[:, None]
    scores = torch.einsum("qhk,phk->hqp", q, k) / math.sqrt(q.shape[-1])
    weights = torch.where(same, torch.softmax(scores.masked_fill(~same, -1e300), -1), 0.0)
    return torch.einsum("hqp,phk->qhk", weights, v)


def case(lengths: list[int], heads: int, gap: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Triple, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    positions = int(length.sum()) + gap
    q, k, v = (torch.randn(positions, heads, K, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3))
    return (q, k, v), start, length


CASES = {
    "one segment": [63],
    "one position": [1],
    "equal": [17] * 5,
    "scattered": [1, 63, 127, 62, 2, 61, 60, 1, 33, 126],
    "hundreds of short ones": [1 + i % 7 for i in range(300)],
    "empty ones between": [0, 5, 0, 0, 9, 0],
    "only empty ones": [0, 0],
    "none": [],
}


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_equal_the_dense_oracle(name: str, heads: int) -> None:
    qkv, start, length = case(CASES[name], heads)
    ours = segment_attention(*qkv, start, length)
    theirs = dense(*qkv, start, length)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    along = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(ours, qkv, along)
    expected = torch.autograd.grad(theirs, qkv, along)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_positions_of_no_segment_answer_zeros_and_get_no_gradient() -> None:
    qkv, _, _ = case([40], 2)
    start, length = torch.tensor([25, 3]), torch.tensor([9, 11])
    ours = segment_attention(*qkv, start, length)
    torch.testing.assert_close(ours, dense(*qkv, start, length), rtol=1e-12, atol=1e-12)
    free = torch.ones(40, dtype=torch.bool)
    free[25:34] = free[3:14] = False
    assert (ours[free] == 0).all()
    for gradient in torch.autograd.grad(ours.sum(), qkv):
        assert (gradient[free] == 0).all()
        assert gradient.isfinite().all()


def test_strided_inputs() -> None:
    qkv = torch.randn(50, 3, 2, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    start, length = torch.tensor([0, 20]), torch.tensor([20, 30])
    q, k, v = qkv.unbind(1)
    torch.testing.assert_close(segment_attention(q, k, v, start, length), dense(q, k, v, start, length), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_path_of_other_devices_answers_the_same(name: str) -> None:
    (q, k, v), start, length = case(CASES[name], 2, gap=3)
    groups = segment_groups(start, length, q.shape[0], 2)
    # The groups' own order: what the reference puts positions in before it attends.
    order = torch.arange(q.shape[0]) if groups.order_P is None else groups.order_P
    ours = attend_by_autograd(q[order], k[order], v[order], groups.groups)
    expected = dense(q, k, v, start, length)[order]
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, expected))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


# One rounding of the inputs, one of the weights and one of the result, each 2^-8 of values of order one.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3 * 2**-8)])
def test_low_precision(dtype: torch.dtype, tolerance: float) -> None:
    qkv, start, length = case([63, 20, 19, 1, 127], 2, dtype=dtype)
    a, b, c = (x.detach().double().requires_grad_() for x in qkv)
    wide = (a, b, c)
    ours, theirs = segment_attention(*qkv, start, length), dense(*wide, start, length)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(ours.float().square().sum(), qkv)
    expected = torch.autograd.grad(theirs.square().sum(), wide)
    for mine, other in zip(got, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance * scale)


def test_groups_hold_every_segment_once_and_pad_only_where_it_pays() -> None:
    length = torch.tensor([3, 0, 5, 3, 500, 4, 499])
    start = length.cumsum(0) - length
    groups = segment_groups(start, length, int(length.sum()), heads=8)
    # Lengths 5, 4, 3 and 3 are cheaper to pad than to call for; 499 beside 500 is not, moving it costs more than a call.
    assert [(g.count, g.longest, g.gather is None) for g in groups.groups] == [(1, 500, True), (1, 499, True), (4, 5, False)]
    assert [(g.first, g.end) for g in groups.groups] == [(0, 500), (500, 999), (999, 1014)]
    assert groups.order_P is not None
    assert groups.inverse_P is not None
    assert torch.equal(groups.order_P.sort().values, torch.arange(1014))
    assert torch.equal(groups.order_P[groups.inverse_P], torch.arange(1014))


def test_positions_already_in_order_are_not_moved() -> None:
    groups = segment_groups(torch.tensor([0, 9, 14]), torch.tensor([9, 5, 0]), 14, heads=2)
    assert groups.order_P is None
