"""The passes that torch.compile fuses: the same answers as the reference's, whatever the number of positions, and only where asked for.

The functions are plain torch, so most of it runs them as they are; one test compiles one of them in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels import compiled
from treadle.kernels.rms_norm import rms_norm
from treadle.kernels.rotary import rotary
from treadle.kernels.swiglu import swiglu


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Asked for, with the functions run as they are; the names of those that ran."""
    ran: list[str] = []

    def run(function: Any, *arguments: Any) -> Any:
        ran.append(function.__name__)
        return function(*arguments)

    monkeypatch.setattr(compiled, "is_asked", lambda: True)
    monkeypatch.setattr(compiled, "run", run)
    yield ran


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def both(op: Any, inputs: list[Tensor], fused: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Answers of an op and gradients of its inputs along fixed directions."""
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(compiled, "is_asked", lambda: False)
        outputs = op(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        along = [random(*o.shape, dtype=o.dtype, seed=70 + i).detach() for i, o in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, inputs, along)]


def assert_alike(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    """Alike to `relative` of each tensor's largest value: both round once, fp32 sums differ by their order."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        largest = float(other.detach().double().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=relative * largest)


RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
"""A few units of the last place: in fp32 of sums over 600 rows, in bf16 of values that the eager passes round once more on their way."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 63, 600])
def test_swiglu(rows: int, dtype: torch.dtype, uncompiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [random(rows, 256, dtype=dtype, seed=1)]
    assert_alike(both(swiglu, inputs, True, monkeypatch), both(swiglu, inputs, False, monkeypatch), RELATIVE[dtype])
    assert uncompiled == ["swiglu_forward", "swiglu_backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [2, 63, 600])
def test_rms_norm(rows: int, residual: bool, dtype: torch.dtype, uncompiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [random(rows, 128, dtype=dtype, seed=1), random(128, dtype=torch.float32, seed=2)]
    if residual:
        inputs.append(random(rows, 128, dtype=torch.float32, seed=3))

    def op(x: Tensor, gain: Tensor, *rest: Tensor) -> Any:
        normed, total = rms_norm(x, gain, *rest, out_dtype=dtype)
        return (normed, total) if rest else normed

    assert_alike(both(op, inputs, True, monkeypatch), both(op, inputs, False, monkeypatch), RELATIVE[dtype])
    assert uncompiled == ["rms_norm_forward", "rms_norm_backward"]


@pytest.mark.parametrize("rows", [2, 63, 600])
def test_rotary(rows: int, uncompiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    angle = torch.randn(rows, 32, generator=torch.Generator().manual_seed(9)) * 10
    turn = torch.polar(torch.ones_like(angle), angle)
    inputs = [random(rows, 3, 2, 64, dtype=torch.bfloat16, seed=1), *(random(64, dtype=torch.float32, seed=s) for s in (2, 3))]

    def op(qkv: Tensor, q_gain: Tensor, k_gain: Tensor) -> Any:
        return rotary(qkv, q_gain, k_gain, turn)

    assert_alike(both(op, inputs, True, monkeypatch), both(op, inputs, False, monkeypatch), RELATIVE[torch.bfloat16])
    assert uncompiled == ["rotary_forward", "rotary_backward"]


def test_a_pair_of_channels_survives_its_word() -> None:
    """Every bf16 but the NaNs, in both places of a word, and rounding that ties to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    pairs = torch.stack([every, every.flip(0)], 1)
    words = compiled.words(pairs)[:, 0]
    packed = compiled._packed(compiled._even(words), compiled._odd(words))
    assert torch.equal(packed.view(torch.int16), pairs.view(torch.int16).reshape(-1, 2).view(torch.int32)[:, 0].view(torch.int16))
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    # 1 + 2^-8 lies half way between two bf16 numbers, and so does 1 + 3 * 2^-8: the even mantissas are 1 and 1 + 2^-6.
    values = torch.cat([values, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, torch.nan])])
    rounded = compiled._packed(values, values).view(torch.bfloat16).view(-1, 2)
    torch.testing.assert_close(rounded, values.bfloat16()[:, None].expand(-1, 2), rtol=0, atol=0, equal_nan=True)


def test_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 4)
    assert not compiled.fuses(x)
    monkeypatch.setattr(compiled, "is_asked", lambda: True)
    assert compiled.fuses(x) and compiled.fuses(x, x.bfloat16())
    assert not compiled.fuses(x.double()), "float64 is the oracle's"
    assert not compiled.fuses(x[:1]) and not compiled.fuses(x[:0]), "compiled code would be specialised to so few positions"


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ("yes", None, "TREADLE_CPU_COMPILE is 'yes': it must be 0 or 1"),
        ("1", "", r"TREADLE_CPU_COMPILE is 1 and there is no C\+\+ compiler: install g\+\+, name one in CXX"),
    ],
)
def test_refusals(value: str, path: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.is_asked.cache_clear()
    monkeypatch.setenv("TREADLE_CPU_COMPILE", value)
    monkeypatch.delenv("CXX", raising=False)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    with pytest.raises(ValueError, match=message):
        compiled.is_asked()
    compiled.is_asked.cache_clear()


COMPILED = """
import torch
from treadle.kernels import compiled
from treadle.kernels.swiglu import swiglu
torch.set_num_threads(1)
asked = compiled.is_asked
for rows in (7, 300):
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16()
    compiled.is_asked = asked
    first, again = swiglu(x), swiglu(x)
    compiled.is_asked = lambda: False
    assert torch.equal(first, again)
    torch.testing.assert_close(first, swiglu(x), rtol=2**-6, atol=2**-8)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_compiled_for_any_number_of_positions(tmp_path: Any) -> None:
    """Compiled for real: one graph serves 7 rows and 300, twice the same bits."""
    environment = os.environ | {"TREADLE_CPU_COMPILE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
