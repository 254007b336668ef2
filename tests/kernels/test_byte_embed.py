"""Byte embedding against a product with one-hot rows."""

import pytest
import torch

from treadle.kernels.byte_embed import byte_embed


@pytest.mark.parametrize("count", [0, 1, 63, 1023])
def test_forward_and_gradient_equal_one_hot_products(count: int) -> None:
    table = torch.randn(257, 127, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    shown = torch.randint(0, 257, (count,), generator=torch.Generator().manual_seed(count))
    ours = byte_embed(table, shown)
    one_hot = torch.nn.functional.one_hot(shown, 257).double()
    theirs = one_hot @ table
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    along = torch.randn(count, 127, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(ours, table, along)[0], one_hot.T @ along, rtol=1e-12, atol=1e-12)
