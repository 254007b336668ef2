"""Triton versions against the float64 references: in Triton's interpreter on the CPU, or on a CUDA device where there is one.

TRITON_INTERPRET=1 must be set before triton is imported, so these files are collected only by a pytest of their own:
`tests/kernels/test_interpreted.py` starts it, `make kernels` starts it with the thorough cases, and
`TRITON_INTERPRET=1 pytest tests/kernels/triton` runs it by hand. On a machine with CUDA they are collected like any other test.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"

collect_ignore_glob = [] if INTERPRETING or torch.cuda.is_available() else ["test_*.py"]

GUARD = 64
"""Values on either side of every buffer that an op allocates."""

# fp32: sums of up to a thousand products in another order. bf16: inputs are exact, products and sums are fp32, weights inside the op and
# the result are each rounded to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3 * 2**-8}

Op = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.set_num_threads(1)
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every buffer from `torch.empty` is full of NaN and lies between guard bands, which must be whole afterwards."""
    empty = torch.empty
    bands: list[Tensor] = []

    def between_guards(*shape: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        size = tuple(shape[0]) if shape and not isinstance(shape[0], int) else tuple(int(n) for n in shape if isinstance(n, int))
        count = torch.Size(size).numel()
        dtype = dtype or torch.get_default_dtype()
        # A multiple of 16 bytes on either side keeps the buffer aligned.
        whole = empty(count + 2 * GUARD, dtype=dtype, device=device).fill_(float("nan") if dtype.is_floating_point else -(2**30) - 7)
        bands.extend((whole[:GUARD], whole[GUARD + count :]))
        return whole[GUARD : GUARD + count].view(size)

    monkeypatch.setattr(torch, "empty", between_guards)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: between_guards(x.shape, dtype=x.dtype, device=x.device))
    yield
    for band in bands:
        assert (band.isnan() if band.is_floating_point() else band == -(2**30) - 7).all(), "an op wrote outside its buffer"


def spread(x: Tensor) -> Tensor:
    """The same values in rows that lie 8 values apart, NaN between them."""
    if x.ndim < 2 or not x.is_floating_point():
        return x
    whole = x.new_full((*x.shape[:-1], x.shape[-1] + 8), float("nan"))
    whole[..., : x.shape[-1]] = x
    return whole[..., : x.shape[-1]]


class Comparison:
    """Runs an op's Triton version twice and its reference in float64: forward and every gradient."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, op: Op, *inputs: Tensor, tolerance: float | None = None) -> None:
        """`op(*inputs, impl=...)`; the first input's dtype sets the tolerance."""
        tolerance = tolerance or TOLERANCE[inputs[0].dtype]
        ours = [spread(x).to(self.device).detach().requires_grad_() for x in inputs]
        along: list[Tensor] = []
        first, second = self._run(op, ours, along, "triton"), self._run(op, ours, along, "triton")
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, msg=lambda text: f"another run answers other bits: {text}")
        wide = [x.double().to(self.device).detach().requires_grad_() for x in inputs]
        for mine, want in zip(first, self._run(op, wide, [x.double() for x in along], "reference"), strict=True):
            assert mine.shape == want.shape
            scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            torch.testing.assert_close(mine.double(), want, rtol=tolerance, atol=tolerance * scale)

    def _run(self, op: Op, inputs: list[Tensor], along: list[Tensor], impl: str) -> list[Tensor]:
        """Outputs and gradients; `along` is drawn where it is empty, in the outputs' dtypes."""
        outputs = op(*inputs, impl=impl)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not along:
            generator = torch.Generator().manual_seed(1)
            along += [spread(torch.randn(out.shape, generator=generator).to(out.dtype)).to(self.device) for out in outputs]
        gradients = torch.autograd.grad(outputs, inputs, along)
        for x, gradient in zip(inputs, gradients, strict=True):
            assert gradient.dtype == x.dtype and gradient.shape == x.shape
        return [*(out.detach() for out in outputs), *gradients]


@pytest.fixture
def compare(device: torch.device) -> Comparison:
    return Comparison(device)
