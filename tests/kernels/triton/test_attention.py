"""Segment attention: the Triton version against the float64 reference, forward and every gradient, and which blocks it visits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels.segment_attention import segment_attention, segment_spans

pytestmark = pytest.mark.usefixtures("guarded")

Compare = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16)

CASES: dict[str, tuple[list[int], int]] = {
    "one position": ([1], 0),
    "one segment of 63": ([63], 0),
    "one segment of 127 and padding": ([127], 9),
    "blocks and single positions": ([64, 1, 63, 65, 2], 0),
    "hundreds": ([1] * 120 + [2] * 5, 5),
    "empty ones between": ([0, 5, 0, 0, 90, 0], 0),
    "padding alone": ([0], 70),
    "no positions": ([], 0),
}
"""Lengths of the segments, and positions of none after them."""
THOROUGH: dict[str, tuple[list[int], int]] = {
    "a row of 1023": ([1023], 1),
    "hundreds a row": ([1 + i % 4 for i in range(400)], 23),
    "all sizes": ([1, 63, 127, 1023, 0, 64, 200], 3),
}


def places(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Where segments lie; every third one is named out of order, as in a batch whose rows are filled in turn."""
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    order = torch.tensor(sorted(range(len(lengths)), key=lambda s: (s % 3, s)), dtype=torch.int64)
    return start[order], length[order]


def check(compare: Compare, lengths: list[int], padding: int, heads: int, dtype: torch.dtype) -> None:
    start, length = places(lengths)

    def op(qkv: Tensor, impl: Any) -> Tensor:
        q, k, v = qkv.unbind(1)
        return segment_attention(q, k, v, start.to(qkv.device), length.to(qkv.device), impl=impl)

    size = (sum(lengths) + padding, 3, heads, 64)
    compare(op, torch.randn(size, generator=torch.Generator().manual_seed(len(lengths))).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention(compare: Compare, name: str, dtype: torch.dtype) -> None:
    check(compare, *CASES[name], 1 if "hundreds" in name else 2, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", THOROUGH)
def test_attention_at_length(compare: Compare, name: str, dtype: torch.dtype) -> None:
    check(compare, *THOROUGH[name], 3, dtype)


def test_spans_say_where_each_position_s_segment_is(device: torch.device) -> None:
    start, length = torch.tensor([5, 0, 140, 9], device=device), torch.tensor([4, 5, 0, 131], device=device)
    first, last = segment_spans(start, length, 150)
    want = [(0, 5)] * 5 + [(5, 9)] * 4 + [(9, 140)] * 131 + [(0, 0)] * 10
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == want


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_keys_of_other_segments_are_never_read(device: torch.device) -> None:
    """Blocks that share no segment with a query's are not visited: what stands there, NaN included, changes nothing."""
    start, length = torch.tensor([0, 64, 192], device=device), torch.tensor([64, 128, 64], device=device)
    q, k, v = torch.randn(3, 256, 1, 64, generator=torch.Generator().manual_seed(0)).to(device)
    whole = segment_attention(q, k, v, start, length, impl="triton")
    spoilt_k, spoilt_v = k.clone(), v.clone()
    spoilt_k[64:192] = spoilt_v[64:192] = float("nan")
    found = segment_attention(q, spoilt_k, spoilt_v, start, length, impl="triton")
    outside = torch.cat([torch.arange(64), torch.arange(192, 256)]).to(device)
    assert torch.equal(found[outside], whole[outside])
    assert found[64:192].isnan().all()


def test_spans_of_a_caller_are_taken(device: torch.device) -> None:
    start, length = torch.tensor([0], device=device), torch.tensor([9], device=device)
    q = torch.randn(9, 1, 64, generator=torch.Generator().manual_seed(0)).to(device)
    halves = segment_spans(torch.tensor([0, 4], device=device), torch.tensor([4, 5], device=device), 9)
    found = segment_attention(q, q, q, start, length, spans_2P=halves, impl="triton")
    want = segment_attention(q, q, q, torch.tensor([0, 4], device=device), torch.tensor([4, 5], device=device), impl="triton")
    assert torch.equal(found, want)


def test_a_head_width_without_a_kernel_is_refused(device: torch.device) -> None:
    x = torch.zeros(2, 1, 24, device=device)
    one = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match=r"head width is 24: the Triton version has \(16, 32, 64, 128\); use impl='reference'"):
        segment_attention(x, x, x, one, one, impl="triton")
