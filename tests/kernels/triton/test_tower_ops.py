"""RMSNorm, rotary, SwiGLU, pooled mean and Philox: Triton versions against the float64 references, forward and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels.mean_pool import mean_pool
from treadle.kernels.philox import philox4x32
from treadle.kernels.rms_norm import rms_norm
from treadle.kernels.rotary import rotary
from treadle.kernels.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("guarded")

Compare = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "width"), [(0, 8), (1, 1), (7, 127), (3, 1023), (130, 63)])
def test_rms_norm(compare: Compare, positions: int, width: int, dtype: torch.dtype) -> None:
    def op(x: Tensor, gain: Tensor, impl: Any) -> Tensor:
        return rms_norm(x, gain, impl=impl)[0]

    compare(op, draw(positions, width, dtype=dtype), draw(width, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "width"), [(0, 8), (1, 1), (63, 127), (3, 1023)])
def test_rms_norm_with_residual(compare: Compare, positions: int, width: int, dtype: torch.dtype) -> None:
    """The tower's own mix: a change in the compute dtype, the residual stream in fp32, the norm in the compute dtype again."""

    def op(x: Tensor, gain: Tensor, residual: Tensor, impl: Any) -> tuple[Tensor, Tensor]:
        return rms_norm(x, gain, residual, out_dtype=dtype if impl == "triton" else None, impl=impl)

    compare(op, draw(positions, width, dtype=dtype), draw(width, seed=1), draw(positions, width, seed=2))


@pytest.mark.parametrize("used", ["norm", "sum"])
def test_rms_norm_whose_other_output_is_unused(compare: Compare, used: str) -> None:
    def op(x: Tensor, residual: Tensor, impl: Any) -> Tensor:
        return rms_norm(x, x.new_ones(24), residual, impl=impl)[0 if used == "norm" else 1]

    compare(op, draw(9, 24), draw(9, 24, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "heads", "width"), [(0, 2, 64), (1, 1, 64), (63, 3, 64), (127, 1, 64), (33, 5, 16)])
def test_rotary(compare: Compare, positions: int, heads: int, width: int, dtype: torch.dtype) -> None:
    angle = draw(positions, width // 2, seed=3).double()

    def op(qkv: Tensor, q_gain: Tensor, k_gain: Tensor, impl: Any) -> tuple[Tensor, ...]:
        turn = torch.polar(torch.ones_like(angle), angle).to(qkv.device)
        return rotary(qkv, q_gain, k_gain, turn.to(torch.complex64) if impl == "triton" else turn, impl=impl)

    compare(op, draw(positions, 3, heads, width, dtype=dtype), draw(width, seed=1), draw(width, seed=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("positions", "inner"), [(0, 8), (1, 1), (3, 127), (17, 63), (2, 1023), (1, 2000)])
def test_swiglu(compare: Compare, positions: int, inner: int, dtype: torch.dtype) -> None:
    compare(swiglu, draw(positions, 2 * inner, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens", [[], [0], [1], [62], [126, 0, 0, 31], [1 + i % 5 for i in range(40)]], ids=["none", "empty", "one", "63", "mixed", "many"]
)
def test_mean_pool(compare: Compare, tokens: list[int], dtype: torch.dtype) -> None:
    """Each segment has its prefix before and, every other one, a mask after its tokens."""
    length = [1 + n + i % 2 for i, n in enumerate(tokens)]
    start = torch.tensor([sum(length[:i]) for i in range(len(length))], dtype=torch.int64)
    count = torch.tensor(tokens, dtype=torch.int64)

    def op(states: Tensor, impl: Any) -> Tensor:
        return mean_pool(states, start.to(states.device), count.to(states.device), impl=impl)

    compare(op, draw(sum(length) + 3, 127, dtype=dtype))


VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)
"""The published vectors of Random123 for philox4x32-10: counter, key, words."""


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...], device: torch.device) -> None:
    found = philox4x32(key, *(torch.tensor([c], device=device) for c in counter), impl="triton")
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("count", [0, 1, 63, 1023])
def test_philox_equals_the_reference_bit_for_bit(count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    # Wider than 32 bits and negative: counters are taken modulo 2^32.
    c0, c1, c2 = (torch.randint(-(2**40), 2**40, (count,), generator=generator).to(device) for _ in range(3))
    for key in ((0, 0), (2**32 - 1, 2**31), (5, 7)):
        found = philox4x32(key, c0, c1, c2, torch.tensor(12345, device=device), impl="triton")
        for one, other in zip(found, philox4x32(key, c0, c1, c2, torch.tensor(12345, device=device), impl="reference"), strict=True):
            assert torch.equal(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_positions(compare: Compare, dtype: torch.dtype) -> None:
    """1023 rows: several programs of every backward pass, and partial sums of more than one block."""
    compare(swiglu, draw(1023, 2 * 63, dtype=dtype))
    compare(lambda x, gain, impl: rms_norm(x, gain, impl=impl)[0], draw(1023, 63, dtype=dtype), draw(63, seed=1))
    start, tokens = torch.tensor([0]), torch.tensor([1022])
    compare(lambda x, impl: mean_pool(x, start.to(x.device), tokens.to(x.device), impl=impl), draw(1023, 63, dtype=dtype))
    turn = torch.polar(torch.ones(1023, 32), draw(1023, 32))
    compare(lambda x, g, h, impl: rotary(x, g, h, turn.to(x.device), impl=impl), draw(1023, 3, 2, 64, dtype=dtype), draw(64), draw(64))
