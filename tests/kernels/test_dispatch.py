"""Which implementation of an op runs, and what is refused."""

import pytest
import torch

from treadle.kernels import dispatch
from treadle.kernels.dispatch import choose
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


def test_auto_takes_triton_on_cuda_alone(registered: str) -> None:
    assert choose(registered, "auto", CUDA) == "triton"
    assert choose(registered, "auto", CPU) == "reference"
    assert choose(registered, "reference", CUDA) == "reference"
    assert choose(registered, "triton", CPU) == "triton"


def test_a_missing_triton_version_is_refused_by_every_op() -> None:
    with pytest.raises(ValueError, match="swiglu has no Triton version: use impl='reference' or impl='auto'"):
        swiglu(torch.zeros(1, 2), impl="triton")


def test_an_unknown_impl_is_refused() -> None:
    with pytest.raises(ValueError, match="impl is 'cuda': it must be one of auto, reference, triton"):
        choose("swiglu", "cuda", CPU)  # type: ignore[arg-type]  # the refusal is the test
