"""Gradient windows: worked sums and means, refusals that change nothing, and what a window leaves alone."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from treadle.model.accumulate import AccumulatedGradients, GradientsAccumulator, WeightedAccumulationState, WeightedGradientsAccumulator

torch.set_num_threads(1)


def module(*gradients: float | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters `0`, `1`, ... of two values, each with that gradient in both; None leaves it without one."""
    made = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for _ in gradients])
    for parameter, gradient in zip(made, gradients, strict=True):
        if gradient is not None:
            parameter.grad = torch.full_like(parameter, gradient)
    return made


def values(finished: AccumulatedGradients) -> dict[str, float]:
    return {name: gradient[0].item() for name, gradient in finished.items()}


def test_plain_sums() -> None:
    accumulator = GradientsAccumulator()
    first, second = module(1.0, None), module(2.0, 5.0)
    accumulator.accumulate(first)
    accumulator.accumulate(second)
    assert first[0].grad.tolist() == [1.0, 1.0] and second[0].grad.tolist() == [2.0, 2.0]  # type: ignore[index]  # ParameterList
    finished = accumulator.finish()
    assert values(finished) == {"0": 3.0, "1": 5.0} and finished.state is None
    assert values(accumulator.finish()) == {}


def test_unequal_micro_batches() -> None:
    """One item with gradient 2 and three with mean gradient 4: (2 + 12) / 4 = 3.5; the mean of means would be 3."""
    accumulator = WeightedGradientsAccumulator(torch.float64, loss_scale=8.0)
    accumulator.accumulate_mean(module(16.0), 1)
    accumulator.accumulate_mean(module(32.0), 3)
    assert accumulator.state == WeightedAccumulationState(torch.float64, 8.0, 4.0, 2)
    finished = accumulator.finish_mean()
    assert values(finished) == {"0": 3.5} and finished.state == WeightedAccumulationState(torch.float64, 8.0, 4.0, 2)
    assert finished.gradients["0"].dtype == torch.float64
    assert accumulator.state == WeightedAccumulationState(torch.float64, 8.0, 0.0, 0)
    accumulator.accumulate_sum(module(16.0), 1)
    accumulator.accumulate_sum(module(96.0), 3)
    assert values(accumulator.finish_sums()) == {"0": 14.0}
    accumulator.accumulate_sum(module(16.0), 1)
    accumulator.accumulate_sum(module(96.0), 3)
    assert values(accumulator.finish_mean()) == {"0": 3.5}


def test_a_weight_of_zero_counts_and_adds_nothing() -> None:
    accumulator = WeightedGradientsAccumulator()
    accumulator.accumulate_sum(module(math.nan), 0)
    accumulator.accumulate_mean(module(math.inf), 0.0)
    assert accumulator.state == WeightedAccumulationState(torch.float32, 1.0, 0.0, 2)
    with pytest.raises(ValueError, match="2 micro-batches weighs nothing"):
        accumulator.finish_mean()
    assert accumulator.state.microbatches == 2
    accumulator.accumulate_mean(module(6.0), 2)
    assert accumulator.state.microbatches == 3 and values(accumulator.finish_mean()) == {"0": 6.0}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf, True, "1", None, 10**400, torch.ones(1)])
def test_bad_weights_change_nothing(weight: object) -> None:
    accumulator = WeightedGradientsAccumulator()
    accumulator.accumulate_sum(module(1.0), 2)
    before = accumulator.state
    for add in (accumulator.accumulate_sum, accumulator.accumulate_mean):
        with pytest.raises(ValueError, match="weight is"):
            add(module(1.0), weight)  # type: ignore[arg-type]
    assert accumulator.state == before and values(accumulator.finish_sums()) == {"0": 1.0}


def test_other_refusals_change_nothing() -> None:
    accumulator = WeightedGradientsAccumulator()
    accumulator.accumulate_sum(module(1.0, 1.0), 1e308)
    with pytest.raises(ValueError, match="would not be finite"):
        accumulator.accumulate_sum(module(1.0, 1.0), 1e308)
    with pytest.raises(ValueError, match="would not be finite"):
        accumulator.accumulate_mean(module(1.0, 1.0), 1e39)
    other = module(1.0, 1.0)
    other[1] = nn.Parameter(torch.ones(3))  # type: ignore[operator]  # ParameterList
    other[1].grad = torch.ones(3)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"gradient '1' has shape \(3,\): this window holds it with \(2,\)"):
        accumulator.accumulate_sum(other, 1)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        accumulator.accumulate_sum([1], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        GradientsAccumulator().accumulate(None)  # type: ignore[arg-type]
    assert accumulator.state.total_weight == 1e308 and values(accumulator.finish_sums()) == {"0": 1.0, "1": 1.0}
    for dtype in (torch.float16, torch.bfloat16, torch.int32, "float32"):
        with pytest.raises(ValueError, match="dtype is"):
            WeightedGradientsAccumulator(dtype)  # type: ignore[arg-type]
    for scale in (0, -1.0, math.nan, math.inf, True, "2"):
        with pytest.raises(ValueError, match="loss_scale is"):
            WeightedGradientsAccumulator(torch.float32, scale)  # type: ignore[arg-type]


def test_scales_beyond_the_work_type_do_not_overflow() -> None:
    """W = 1e30 and a loss scale of 1e30 in fp32: 1e38 / 1e30 / 1e30 = 1e-22, though their product is no fp32 number."""
    accumulator = WeightedGradientsAccumulator(torch.float32, loss_scale=1e30)
    accumulator.accumulate_sum(module(1e38), 1e30)
    assert values(accumulator.finish_mean())["0"] == pytest.approx(1e-22)
    tiny = WeightedGradientsAccumulator(torch.float32, loss_scale=1e-50)
    tiny.accumulate_sum(module(1e-30), 1e-20)
    assert values(tiny.finish_mean())["0"] == math.inf  # 1e40 is beyond fp32 whatever the order
    tiny.accumulate_sum(module(1e-30), 1e20)
    assert values(tiny.finish_mean())["0"] == pytest.approx(1.0)


def test_low_precision_gradients_are_summed_in_the_work_type() -> None:
    """256 additions of 1 to 256 in bf16 would stay at 256."""
    accumulator = WeightedGradientsAccumulator()
    for gradient in [256.0] + [1.0] * 256:
        accumulator.accumulate_sum(module(gradient, dtype=torch.bfloat16), 1)
    assert values(accumulator.finish_sums()) == {"0": 512.0}


def test_tied_sparse_and_frozen_parameters() -> None:
    net = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4, bias=False), nn.Linear(3, 3))
    dense = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dense[1].weight = dense[0].weight
    net[2].requires_grad_(False)
    net[1](net[0](torch.tensor([1, 1]))).sum().backward()
    accumulator = GradientsAccumulator()
    accumulator.accumulate(net)
    assert set(accumulator.gradients) == {"0.weight", "1.weight"} and not accumulator.gradients["0.weight"].is_sparse
    dense[1](dense[0](torch.ones(1, 3))).sum().backward()
    tied = GradientsAccumulator()
    tied.accumulate(dense)
    assert set(tied.gradients) == {"0.weight", "0.bias", "1.bias"}


def test_assign() -> None:
    accumulator = WeightedGradientsAccumulator(torch.float64)
    accumulator.accumulate_sum(module(1.5), 1)
    target = module(None, 7.0, dtype=torch.bfloat16)
    finished = accumulator.finish_sums()
    finished.assign(target)
    gradients = [p.grad for p in target.parameters()]
    assert gradients[0] is not None and gradients[0].dtype == torch.bfloat16 and gradients[0][0] == 1.5 and gradients[1] is None
    with pytest.raises(ValueError, match="names no parameter"):
        finished.assign(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_gradient_of_a_type_that_cannot_be_added_changes_nothing(dtype: torch.dtype) -> None:
    model, plain = nn.ParameterList([torch.ones(2), torch.ones(2)]), GradientsAccumulator()
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    plain.accumulate(model)
    model[1] = nn.Parameter(torch.ones(2).to(dtype))
    model[1].grad = torch.ones(2).to(dtype)
    with pytest.raises(ValueError, match=rf"gradients cannot be summed: 1 is {dtype}"):
        plain.accumulate(model)
    assert all(gradient.tolist() == [1, 1] for gradient in plain.gradients.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("gradient", "weight", "scale"),
    [(1e38, 1e-300, 1e300), (1e-37, 1e300, 1e-300), (1e-30, 5e-324, 1.7e308), (1.0, 1e300, 1e-300), (1.5, 3.0, 8.0)],
)
def test_weights_and_scales_at_the_ends_of_their_range(gradient: float, weight: float, scale: float, dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
    accumulator = WeightedGradientsAccumulator(dtype, scale)
    accumulator.accumulate_sum(model, weight)
    kept = accumulator.gradients["weight"].item()
    expected = torch.tensor(float(Fraction(kept) / Fraction(weight) / Fraction(scale)), dtype=dtype)
    found = accumulator.finish_mean()["weight"]
    torch.testing.assert_close(found, expected.reshape(1, 1), rtol=1e-6, atol=0)


def test_numpy_numbers_are_weights() -> None:
    model, accumulator = nn.Linear(1, 1), WeightedGradientsAccumulator(loss_scale=np.float32(2))  # type: ignore[arg-type]
    for weight in (np.int64(3), np.float32(0.5)):
        accumulator.accumulate_sum(model, weight)  # type: ignore[arg-type]
    assert accumulator.state == WeightedAccumulationState(torch.float32, 2.0, 3.5, 2)
