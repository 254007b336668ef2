"""Records of models, optimizers and values off the beaten path."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from treadle.model.accumulate import GradientsAccumulator, WeightedGradientsAccumulator
from treadle.model.record import ModelStateTrainingRecord, TrainableParameterContract, TrainingRecord
from treadle.model.storage_errors import UnwritableFileError

torch.set_num_threads(1)


def laid_out() -> nn.Module:
    """Channels last, and a transposed parameter: sums over both round by their order in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 9, 2), nn.Flatten(), nn.Linear(36, 33, bias=False)).to(
        memory_format=torch.channels_last
    )
    linear = model[3]
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return model


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, accumulator: WeightedGradientsAccumulator, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        accumulator.accumulate_mean(model, 1 + number % 3)
        if number % 3 == 2:
            accumulator.finish_mean().assign(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_layouts_in_memory_come_back(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = laid_out()
        return model, torch.optim.SGD(model.parameters(), 0.1, 0.9) if kind == "sgd" else torch.optim.Adafactor(model.parameters())

    whole, optimizer = start()
    go_on(whole, optimizer, WeightedGradientsAccumulator(), range(12))
    for stop in (4, 7):
        model, optimizer = start()
        accumulator = WeightedGradientsAccumulator()
        go_on(model, optimizer, accumulator, range(stop))
        state = torch.ones(2, 3, 4).permute(2, 0, 1)
        if asynchronous:
            record = asyncio.run(TrainingRecord.capture_weighted_async(model, optimizer, None, accumulator, state))
        else:
            record = TrainingRecord.capture_weighted(model, optimizer, None, accumulator, state)
        record.save(tmp_path / "record")
        other, resumed = start()
        restored = TrainingRecord.load(tmp_path / "record").restore_weighted(other, resumed, None)
        assert restored.state.stride() == state.stride()
        assert {n: g.stride() for n, g in restored.accumulator.gradients.items()} == {
            n: g.stride() for n, g in accumulator.gradients.items()
        }
        go_on(other, resumed, restored.accumulator, range(stop, 12))
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))


class Nested(torch.optim.Optimizer):
    """Keeps lists and dicts of fp32 and fp64 sums beside bf16 parameters, which torch's load_state_dict would round."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"sums": [torch.full((2,), 1 / 3), {"squares": (torch.full((2,), 1 / 3, dtype=torch.float64),)}]}


def test_nested_optimizer_state_keeps_its_own_types() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    optimizer = Nested(model.parameters())
    optimizer.step()
    record = TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), None)
    other = Nested(model.parameters())
    record.restore(model, other, None)
    first, second = other.state[model[0]]["sums"]
    assert torch.equal(first, torch.full((2,), 1 / 3))
    assert torch.equal(second["squares"][0], torch.full((2,), 1 / 3, dtype=torch.float64))


class Expanded(nn.Module):
    """A buffer whose rows share memory, and lazily conjugated and negated ones."""

    rows: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("rows", torch.full((1, 4), value).expand(3, 4))
        self.register_buffer("conjugated", torch.full((2,), complex(value, value)).conj())
        self.register_buffer("negated", torch.full((2,), complex(value, value)).conj().imag)


def test_buffers_that_share_memory(tmp_path: Path) -> None:
    model, other = Expanded(1.0), Expanded(2.0)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    asyncio.run(TrainingRecord.capture_async(model, optimizers[0], None, GradientsAccumulator(), None)).save(tmp_path / "record")
    TrainingRecord.load(tmp_path / "record").restore(other, optimizers[1], None)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    contract = TrainableParameterContract.capture(model, buffers=[])
    contract.check_base(other)
    other.get_buffer("conjugated").mul_(2)
    with pytest.raises(ValueError, match="conjugated differs"):
        contract.check_base(other)


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 2)


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: nn.Linear(3, 2, device="meta"), "weight is a meta tensor"),
        (lambda: nn.LazyLinear(2), "weight is a lazy tensor"),
        (in_inference_mode, "weight is an inference tensor"),
    ],
)
def test_models_that_values_cannot_be_put_into(make: Callable[[], nn.Module], what: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record = TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), None)
    with pytest.raises(ValueError, match=what):
        record.restore(make(), optimizer, None)


def test_schedulers_within_a_scheduler_must_be_the_same() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def scheduler(*inner: Callable[[torch.optim.Optimizer], Any]) -> schedules.SequentialLR:
        return schedules.SequentialLR(optimizer, [make(optimizer) for make in inner], list(range(1, len(inner))))

    def constant(o: torch.optim.Optimizer) -> Any:
        return schedules.ConstantLR(o)

    def steps(o: torch.optim.Optimizer) -> Any:
        return schedules.StepLR(o, 2)

    record = TrainingRecord.capture(model, optimizer, scheduler(constant, steps), GradientsAccumulator(), None)
    record.restore(model, optimizer, scheduler(constant, steps))
    for others in ((steps, constant), (constant, steps, steps), (constant,)):
        with pytest.raises(ValueError, match=r"SequentialLR\(torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.StepLR\)"):
            record.restore(model, optimizer, scheduler(*others))


def test_an_optimizer_of_parameters_outside_the_model_is_refused() -> None:
    model, beside = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [beside]}]
    optimizer = torch.optim.SGD(groups, 0.1)
    with pytest.raises(ValueError, match=r"what the model lacks.*parameter 0 of group 1"):
        TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), None)
    both = nn.ModuleDict({"model": model, "beside": nn.ParameterList([beside])})
    assert TrainingRecord.capture(both, optimizer, None, GradientsAccumulator(), None).kind == "plain"


@pytest.mark.parametrize("value", ["\ud83d\ude00", "\ud800", np.str_(""), np.bytes_(b""), np.str_("a\0"), np.bytes_(b"a\0"), np.str_("é")])
def test_odd_strings(value: Any, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), {"value": value, value: 1}).save(tmp_path / "record")
    back = TrainingRecord.load(tmp_path / "record").states[0]
    assert list(back) == ["value", value]
    assert type(back["value"]) is type(value)
    assert back["value"] == value
    assert len(back["value"]) == len(value)


def test_gradients_that_cannot_be_summed_change_nothing() -> None:
    model, complex_one, meta = nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(3, 2, device="meta")
    for module in (model, complex_one, meta):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    weighted, plain = WeightedGradientsAccumulator(), GradientsAccumulator()
    with pytest.raises(ValueError, match=r"weight is torch\.complex64"):
        weighted.accumulate_mean(complex_one, 1)
    with pytest.raises(ValueError, match="is on meta"):
        weighted.accumulate_sum(meta, 1)
    with pytest.raises(ValueError, match="is on meta"):
        plain.accumulate(meta)
    assert weighted.state.microbatches == 0
    assert not weighted.gradients
    assert not plain.gradients


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    record = TrainingRecord.capture(model, torch.optim.SGD(model.parameters(), 0.1), None, GradientsAccumulator(), None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnwritableFileError, match="is a device, a pipe or a socket"):
        record.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_state_that_a_module_does_not_take_changes_no_other_module() -> None:
    class Counter(nn.Linear):
        def __init__(self, count: int, takes: bool = True) -> None:
            super().__init__(2, 2)
            self.counted, self.takes = {"count": count}, takes

        def get_extra_state(self) -> dict[str, int]:
            return self.counted

        def set_extra_state(self, state: dict[str, int]) -> None:
            if not self.takes:
                raise RuntimeError("not this one")
            self.counted.update(state)

    def recorded(*modules: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*modules)
        return model, torch.optim.SGD(model.parameters())

    record = TrainingRecord.capture(*recorded(Counter(1), Counter(2)), None, GradientsAccumulator(), None)
    first, last = Counter(3), Counter(4, takes=False)
    with pytest.raises(ValueError, match="extra state cannot be loaded: RuntimeError: not this one"):
        record.restore(*recorded(first, last), None)
    assert (first.counted, last.counted) == ({"count": 3}, {"count": 4})


def test_what_is_no_contract_is_refused() -> None:
    model = nn.Linear(2, 2)
    contract: Any = None
    with pytest.raises(ValueError, match=r"contract is a NoneType: TrainableParameterContract\.capture"):
        ModelStateTrainingRecord.capture(model, torch.optim.SGD(model.parameters()), None, GradientsAccumulator(), contract, None)


@pytest.mark.parametrize("device", ["meta", "tpu", "cuda:99"])
def test_a_device_without_values_or_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    record = TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), None)
    record.save(tmp_path / "a")
    with pytest.raises(ValueError, match=f"^device is '{device}'"):
        record.restore(model, optimizer, None, device)
    with pytest.raises(ValueError, match=f"^device is '{device}'"):
        TrainingRecord.load(tmp_path / "a", device)
    assert model.weight.device.type == "cpu"


def test_files_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turned", torch.rand(3, 2).t())
    optimizer = torch.optim.SGD(model.parameters())
    state = {"bytes": b"x", "none": b"", "array": np.arange(3)}
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), state).save(tmp_path / "record")
        restored = TrainingRecord.load(tmp_path / "record").restore(model, optimizer, None)
    assert (restored.state["bytes"], restored.state["none"], restored.state["array"].tolist()) == (b"x", b"", [0, 1, 2])


def test_a_precision_that_values_pass_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 65536.0)
    accumulator = GradientsAccumulator()
    accumulator.accumulate(model)
    record = TrainingRecord.capture(model, optimizer, None, accumulator, None)
    with pytest.raises(ValueError, match=r"ranks\.0\.gradients\.weight passes the range of torch\.float16"):
        record.save(tmp_path / "record", torch.float16)
    assert not list(tmp_path.iterdir())
    record.save(tmp_path / "record", torch.bfloat16)
