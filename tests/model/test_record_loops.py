"""Any loop goes on from a record as if it had never stopped, bit for bit: random models, optimizers, schedulers and moments.

A loop is drawn (layers with ties, buffers, frozen and unused parts, types; an optimizer of torch; a scheduler; weights of micro-batches),
run to its end, and run again with interruptions, each of which builds everything anew with other values and restores.
"""

import asyncio
import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from treadle.model.accumulate import GradientsAccumulator, WeightedGradientsAccumulator
from treadle.model.record import TrainingRecord

WIDTH = 6
MICRO_BATCHES = 11
TYPES = ("fp32", "bf16", "norms fp32", "autocast")


class Counting(nn.Module):
    """Buffers that training changes: one persistent, one not; and a state of its own beside them."""

    seen: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.seen.add_(x.detach().float().mean(0).to(self.seen.dtype))
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return x + self.seen.to(x.dtype) * 0.01

    def get_extra_state(self) -> dict[str, Any]:
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bare": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "counting": Counting,
    "prelu": lambda: nn.PReLU(WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}


class Model(nn.Module):
    def __init__(self, layers: Sequence[str], tied: bool, types: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        if types in ("bf16", "norms fp32"):
            self.bfloat16()
        if types == "norms fp32":
            for module in self.layers:
                if isinstance(module, nn.BatchNorm1d | nn.LayerNorm):
                    module.float()
        self.types = types

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.types == "autocast"):
            for module in (self.first, *self.layers, self.last):
                own = next(module.parameters(recurse=False), None)
                x = module(x if own is None or self.types == "autocast" else x.to(own.dtype))
        return x.float()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim != 2], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=0.05),
    "sgd momentum": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, dampening=0.1),
    "adam": lambda m: torch.optim.Adam(groups(m), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01, betas=(0.9, 0.95)),
    "adamw, lr a tensor": lambda m: torch.optim.AdamW(groups(m), lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m), lr=0.02),
    "nadam": lambda m: torch.optim.NAdam(groups(m), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(groups(m), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m), lr=0.05),
    "adamax": lambda m: torch.optim.Adamax(groups(m), lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2 and p.requires_grad], lr=0.01)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "multi": lambda o: schedules.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "polynomial": lambda o: schedules.PolynomialLR(o, 5, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 4),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.001, 0.1, 2, mode="triangular2", cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)], optimizer=o),
    "sequential": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, 1.0, 2), schedules.CosineAnnealingLR(o, 6)], [2]),
}


class Loop:
    """A user's loop: windows of three micro-batches, weighted by their rows or plain, an update after each."""

    def __init__(self, layers: Sequence[str], tied: bool, types: str, optimizer: str, scheduler: str, weighted: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model(layers, tied, types)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.weighted = weighted
        self.accumulator: Any = WeightedGradientsAccumulator(torch.float64, 8.0) if weighted else GradientsAccumulator()
        self.micro = 0
        self.losses: list[float] = []

    def run(self, until: int) -> None:
        while self.micro < until:
            rows = 2 + self.micro * 5 % 4
            x = torch.sin(torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH) * (1 + self.micro))
            self.model.zero_grad()
            loss = (self.model(x) - x.flip(1)).square().mean()
            torch.autograd.backward(loss * 8 if self.weighted else loss)
            if self.weighted:
                self.accumulator.accumulate_mean(self.model, rows)
            else:
                self.accumulator.accumulate(self.model)
            self.losses.append(loss.item())
            self.micro += 1
            if self.micro % 3 == 0:
                (self.accumulator.finish_mean() if self.weighted else self.accumulator.finish()).assign(self.model)
                self.optimizer.step()
                if isinstance(self.scheduler, schedules.ReduceLROnPlateau):
                    self.scheduler.step(loss.item())
                elif self.scheduler is not None:
                    self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"micro": self.micro, "random": torch.get_rng_state(), "losses": list(self.losses)}

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {"losses": self.losses, "optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state()}
        found |= {f"parameter {k}": v.detach() for k, v in self.model.named_parameters()}
        found |= {f"buffer {k}": v for k, v in self.model.named_buffers()}
        found["extra"] = [m.largest for m in self.model.modules() if isinstance(m, Counting)]
        found["scheduler"] = None if self.scheduler is None else self.scheduler.state_dict()
        found |= {f"pending {k}": v for k, v in self.accumulator.gradients.items()}
        found["window"] = self.accumulator.state if self.weighted else None
        return copy.deepcopy(found)


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two values differ in a bit or a type; NaN equals itself."""
    if type(a) is not type(b):
        return [f"{place}: {type(a)} and {type(b)}"]
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
        return [] if same else [f"{place}: {a} and {b}"]
    if isinstance(a, dict):
        found = [] if list(a) == list(b) else [f"{place}: {list(a)} and {list(b)}"]
        return found + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{place}[{k!r}]")]
    if isinstance(a, list | tuple):
        found = [] if len(a) == len(b) else [f"{place}: {len(a)} and {len(b)} long"]
        return found + [d for i, (x, y) in enumerate(zip(a, b, strict=False)) for d in differences(x, y, f"{place}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{place}: {a} and {b}"]


@pytest.fixture(autouse=True)
def quiet_schedulers() -> Any:
    """Chained and sequential schedulers step their parts before the optimizer has stepped."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_going_on_equals_never_having_stopped(tmp_path: Path, data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=4), "layers")
    tied, weighted = data.draw(st.booleans(), "tied"), data.draw(st.booleans(), "weighted")
    types = data.draw(st.sampled_from(TYPES), "types")
    optimizer, scheduler = data.draw(st.sampled_from(sorted(OPTIMIZERS))), data.draw(st.sampled_from(sorted(SCHEDULERS)))
    stops = sorted(data.draw(st.lists(st.integers(0, MICRO_BATCHES - 1), min_size=1, max_size=2), "stops"))
    with_dtypes, asynchronous, through_file = (data.draw(st.booleans()) for _ in range(3))

    def build(seed: int, types: str = types) -> Loop:
        return Loop(layers, tied, types, optimizer, scheduler, weighted, seed)

    whole = build(1)
    whole.run(MICRO_BATCHES)
    expected = whole.everything()
    form = ("_weighted" if weighted else "") + ("_with_dtypes" if with_dtypes else "")
    loop = build(1)
    for stop in stops:
        loop.run(stop)
        before = loop.everything()
        capture = getattr(TrainingRecord, f"capture{form}" + ("_async" if asynchronous else ""))
        record = capture(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, loop.state())
        assert differences(loop.everything(), before) == []
        loop.run(min(stop + 2, MICRO_BATCHES))  # the record is of the moment of the call, whatever happens since
        record = asyncio.run(record) if asynchronous else record
        if through_file:
            record.save(tmp_path / "record")
            record = TrainingRecord.load(tmp_path / "record")
        # Other values; and where types are recorded, other types, except for autocast, which is no type of a tensor.
        fresh = build(2, "fp32" if with_dtypes and types != "autocast" else types)
        fresh.model.types = types
        restored = getattr(record, f"restore{form}")(fresh.model, fresh.optimizer, fresh.scheduler)
        assert restored.model is fresh.model and restored.optimizer is fresh.optimizer and restored.scheduler is fresh.scheduler
        fresh.accumulator, fresh.micro, fresh.losses = restored.accumulator, restored.state["micro"], restored.state["losses"]
        torch.set_rng_state(restored.state["random"])
        assert differences(fresh.everything(), before) == []
        loop = fresh
    loop.run(MICRO_BATCHES)
    assert differences(loop.everything(), expected) == []
