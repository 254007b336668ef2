"""Which implementation of an op runs, and what is refused."""

import subprocess
import sys

import pytest
import torch

from treadle.kernels import dispatch
from treadle.kernels.dispatch import choose, compute_dtype
from treadle.kernels.swiglu import swiglu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    """An op that has a Triton version."""
    monkeypatch.setattr(dispatch, "_registered", {"some_op"})
    return "some_op"


def test_auto_takes_the_reference_where_there_is_nothing_else() -> None:
    assert choose("plain_op", "auto", CPU) == "reference"
    assert choose("plain_op", "auto", CUDA) == "reference"


def test_auto_takes_triton_on_cuda_alone(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(registered, "auto", CUDA, torch.bfloat16, torch.float32) == "triton"
    assert choose(registered, "auto", CPU) == "reference"
    assert choose(registered, "reference", CUDA) == "reference"
    assert choose(registered, "triton", CUDA) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(registered, "triton", CPU) == "triton"
    assert choose(registered, "auto", CPU) == "reference"


def test_auto_takes_the_reference_in_float64_and_without_triton(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(registered, "auto", CUDA, torch.float32, torch.float64) == "reference"
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert choose(registered, "auto", CUDA) == "reference"
    with pytest.raises(ValueError, match="some_op: impl is 'triton', and triton is not installed: install it, or use impl='reference'"):
        choose(registered, "triton", CUDA)


def test_a_triton_version_that_cannot_run_is_refused(registered: str) -> None:
    with pytest.raises(ValueError, match="plain_op has no Triton version: use impl='reference' or impl='auto'"):
        choose("plain_op", "triton", CUDA)
    with pytest.raises(ValueError, match=r"some_op: impl is 'triton' and a tensor is torch\.float64: kernels take fp32, bf16 and fp16"):
        choose(registered, "triton", CUDA, torch.float64)


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="swiglu: impl is 'triton' and the tensors are on cpu: move them to cuda, use impl='reference'"):
        swiglu(torch.zeros(1, 2), impl="triton")


def test_an_unknown_impl_is_refused() -> None:
    with pytest.raises(ValueError, match="impl is 'cuda': it must be one of auto, reference, triton"):
        choose("swiglu", "cuda", CPU)  # type: ignore[arg-type]  # the refusal is the test


def test_products_follow_autocast() -> None:
    x = torch.zeros(1)
    assert compute_dtype(x) is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compute_dtype(x) is torch.bfloat16


def test_the_cpu_path_never_imports_triton() -> None:
    code = (
        "import sys, torch\n"
        "from treadle.kernels.rms_norm import rms_norm\n"
        "from treadle.kernels.segment_attention import segment_attention\n"
        "import treadle.kernels.patch_embed, treadle.kernels.pair_loss, treadle.kernels.maxsim, treadle.model\n"
        "rms_norm(torch.ones(2, 4), torch.ones(4))\n"
        "x = torch.ones(3, 1, 64)\n"
        "segment_attention(x, x, x, torch.tensor([0]), torch.tensor([3]))\n"
        "print('triton.language' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
