"""Training records: continuing after a restore equals never having stopped, bit for bit; what does not fit is refused by name."""

import asyncio
import copy
import inspect
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from treadle.model.accumulate import GradientsAccumulator, WeightedGradientsAccumulator
from treadle.model.record import ModelStateTrainingRecord, RestoredTraining, RestoredWeightedTraining, TrainingRecord
from treadle.model.storage_errors import DamagedFileError, MissingFileError, NewerFormatError, TruncatedFileError
from treadle.model.storage_file import read_tensors, write_tensors

torch.set_num_threads(1)


class Net(nn.Module):
    """A tied embedding, a buffer that training changes, a norm, dropout, and a parameter that gets no gradient."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = self.norm(self.inner(self.embed(x)).float()).to(self.out.weight.dtype)
        scores: Tensor = self.out(nn.functional.dropout(hidden, 0.1)).float()
        return scores


Scheduler = Any
Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim != 2], "lr": 0.02}]


OPTIMIZERS: Optimizers = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(groups(m), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=torch.tensor(0.01), betas=(0.9, 0.95)),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m), lr=0.02),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Scheduler]] = {
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "multi": lambda o: schedules.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)], optimizer=o),
    "sequential": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, 1.0, 2), schedules.CosineAnnealingLR(o, 6)], [2]),
    "none": lambda o: None,
}


class Loop:
    """A user's loop: windows of three micro-batches of unequal weight, an update after each."""

    def __init__(self, optimizer: str, scheduler: str, weighted: bool, mixed: bool) -> None:
        torch.manual_seed(3)
        self.model = Net()
        if mixed:
            self.model.bfloat16()
            self.model.norm.float()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.weighted = weighted
        self.accumulator: Any = WeightedGradientsAccumulator(torch.float64, 4.0) if weighted else GradientsAccumulator()
        self.micro = 0
        self.losses: list[float] = []

    def run(self, until: int) -> None:
        while self.micro < until:
            x = torch.arange(self.micro % 3 + 2) * 3 % 7
            self.model.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), (x + 1) % 7)
            torch.autograd.backward(loss * 4 if self.weighted else loss)
            if self.weighted:
                self.accumulator.accumulate_mean(self.model, len(x))
            else:
                self.accumulator.accumulate(self.model)
            self.losses.append(loss.item())
            self.micro += 1
            if self.micro % 3 == 0:
                (self.accumulator.finish_mean() if self.weighted else self.accumulator.finish()).assign(self.model)
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"micro": self.micro, "torch": torch.get_rng_state(), "losses": list(self.losses)}

    def take(self, restored: RestoredTraining[Any, Any, Any] | RestoredWeightedTraining[Any, Any, Any]) -> None:
        assert restored.model is self.model and restored.optimizer is self.optimizer and restored.scheduler is self.scheduler
        self.accumulator = restored.accumulator
        self.micro, self.losses = restored.state["micro"], restored.state["losses"]
        torch.set_rng_state(restored.state["torch"])

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {"losses": self.losses, "micro": self.micro, "calls": self.model.calls}
        found |= {f"model.{k}": v for k, v in self.model.state_dict().items()}
        found["optimizer"] = self.optimizer.state_dict()
        found["scheduler"] = None if self.scheduler is None else self.scheduler.state_dict()
        found |= {f"pending.{k}": v for k, v in self.accumulator.gradients.items()}
        found["window"] = self.accumulator.state if self.weighted else None
        return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and type(a) is type(b)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or bool(a != a and b != b)


def method(prefix: str, weighted: bool, dtypes: bool) -> str:
    return prefix + ("_weighted" if weighted else "") + ("_with_dtypes" if dtypes else "")


def test_capturing_consumes_and_clears_nothing_and_a_record_restores_twice() -> None:
    loop = Loop("adam", "step", True, False)
    loop.run(5)
    before = loop.everything()
    record = TrainingRecord.capture_weighted(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, loop.state())
    assert equal(before, loop.everything()) and loop.model.inner.weight.grad is not None
    ends = []
    for _ in range(2):
        fresh = Loop("adam", "step", True, False)
        fresh.take(record.restore_weighted(fresh.model, fresh.optimizer, fresh.scheduler))
        fresh.run(12)
        ends.append(fresh.everything())
    assert equal(*ends)


def test_async_captures_are_coroutines() -> None:
    loop = Loop("sgd", "none", False, False)
    coroutine = TrainingRecord.capture_async(loop.model, loop.optimizer, None, loop.accumulator, None)
    assert inspect.iscoroutine(coroutine)
    assert asyncio.run(coroutine).kind == "plain"


@pytest.mark.parametrize("made", ["plain", "weighted", "with_dtypes", "weighted_with_dtypes"])
def test_a_restore_names_the_one_that_matches(made: str) -> None:
    loop = Loop("sgd", "step", made.startswith("weighted"), False)
    suffix = "" if made == "plain" else f"_{made}"
    record = getattr(TrainingRecord, f"capture{suffix}")(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, 1)
    for other in ("", "_weighted", "_with_dtypes", "_weighted_with_dtypes"):
        restore = getattr(record, f"restore{other}")
        if other == suffix:
            assert restore(loop.model, loop.optimizer, loop.scheduler).state == 1
        else:
            with pytest.raises(ValueError, match=rf"made by capture{suffix}: restore it with restore{suffix}$"):
                restore(loop.model, loop.optimizer, loop.scheduler)
    with pytest.raises(ValueError, match="this capture takes a"):
        wrong = GradientsAccumulator() if made.startswith("weighted") else WeightedGradientsAccumulator()
        getattr(TrainingRecord, f"capture{suffix}")(loop.model, loop.optimizer, loop.scheduler, wrong, 1)


def test_components_of_another_type_are_refused() -> None:
    loop = Loop("sgd", "step", False, False)
    given: dict[str, Any] = {"model": loop.model, "optimizer": loop.optimizer, "scheduler": loop.scheduler}
    record = TrainingRecord.capture(**given, accumulator=loop.accumulator, state=None)
    for name in given:
        wrong: dict[str, Any] = {**given, name: 3}
        with pytest.raises(ValueError, match=f"{name} is a int: it must"):
            TrainingRecord.capture(**wrong, accumulator=loop.accumulator, state=None)
        with pytest.raises(ValueError, match=f"{name} is a int: it must"):
            record.restore(**wrong)


def test_the_module_holds_every_name_of_a_record() -> None:
    from treadle.model import accumulate, record

    for name in ("AccumulatedGradients", "GradientsAccumulator", "WeightedAccumulationState", "WeightedGradientsAccumulator"):
        assert getattr(record, name) is getattr(accumulate, name)
        assert name in record.__all__


def test_restore_keeps_the_targets_types() -> None:
    loop = Loop("adam", "none", False, True)
    loop.run(4)
    record = TrainingRecord.capture(loop.model, loop.optimizer, None, loop.accumulator, None)
    fresh = Loop("adam", "none", False, False)
    record.restore(fresh.model, fresh.optimizer, None)
    assert fresh.model.inner.weight.dtype == torch.float32
    assert torch.equal(fresh.model.inner.weight, loop.model.inner.weight.float())


class WideMoments(torch.optim.Optimizer):
    """Keeps an fp32 sum beside bf16 parameters, which torch's load_state_dict would round."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p].setdefault("sum", torch.zeros_like(p, dtype=torch.float32))
                    total.add_(p.grad.float() * (1 / 3))
                    p.sub_(group["lr"] * total.to(p.dtype))


def test_optimizer_state_keeps_its_own_types() -> None:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = WideMoments(model.parameters())
    torch.autograd.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    optimizer.step()
    record = TrainingRecord.capture_with_dtypes(model, optimizer, None, GradientsAccumulator(), None)
    fresh = nn.Linear(3, 2)
    other = WideMoments(fresh.parameters())
    record.restore_with_dtypes(fresh, other, None)
    assert fresh.weight.dtype == torch.bfloat16
    assert equal(other.state[fresh.weight]["sum"], optimizer.state[model.weight]["sum"])


def test_endless_states_are_refused() -> None:
    loop = Loop("sgd", "none", False, False)
    ring: list[Any] = [1]
    ring.append(ring)
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    for state, message in ((ring, "contains itself"), (deep, "nested deeper than 100")):
        with pytest.raises(ValueError, match=message):
            TrainingRecord.capture(loop.model, loop.optimizer, None, loop.accumulator, state)


def test_differences_are_listed_and_nothing_changes() -> None:
    loop = Loop("adam", "step", False, False)
    loop.run(4)
    record = TrainingRecord.capture(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, None)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 5)
            self.more = nn.Parameter(torch.ones(1))
            del self.unused

    model = Other()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    with pytest.raises(ValueError) as refused:
        record.restore(model, optimizer, schedules.ExponentialLR(optimizer, 0.5))
    text = str(refused.value)
    for part in (
        "unused is recorded, the model lacks it",
        "more is in the model, the record lacks it",
        "inner.weight is recorded with shape (4, 4), the model has (5, 4)",
        "recorded as torch.optim.adam.Adam, given is torch.optim.sgd.SGD",
        "recorded as torch.optim.lr_scheduler.StepLR, given is torch.optim.lr_scheduler.ExponentialLR",
    ):
        assert part in text
    assert equal(dict(model.state_dict()), before)

    untied = Net()
    untied.out.weight = nn.Parameter(untied.out.weight.detach().clone())
    with pytest.raises(ValueError, match=r"out.weight is in the model, the record lacks it"):
        record.restore(untied, OPTIMIZERS["adam"](untied), loop.scheduler)
    regrouped = torch.optim.Adam(loop.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="2 parameter groups are recorded, the optimizer has 1"):
        record.restore(loop.model, regrouped, loop.scheduler)


def test_precision_rounds_values_and_keeps_counters(tmp_path: Path) -> None:
    loop = Loop("adam", "step", False, False)
    loop.run(7)
    state = {"exact": torch.tensor([1 / 3]), "steps": 7}
    record = TrainingRecord.capture(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, state)
    record.save(tmp_path / "whole")
    record.save(tmp_path / "half", precision=torch.bfloat16)
    assert read_tensors(tmp_path / "half")[0]["model.inner.weight"].dtype == torch.bfloat16
    fresh = Loop("adam", "step", False, False)
    restored = TrainingRecord.load(tmp_path / "half", "cpu").restore(fresh.model, fresh.optimizer, fresh.scheduler)
    assert equal(restored.state, state)
    assert torch.equal(fresh.model.inner.weight, loop.model.inner.weight.bfloat16().float())
    steps: list[Tensor] = [s["step"] for s in fresh.optimizer.state.values()]
    assert all(s.item() == 2 and s.dtype == torch.float32 for s in steps)
    for bad in (torch.int8, "bf16"):
        with pytest.raises(ValueError, match="precision is"):
            record.save(tmp_path / "bad", precision=bad)  # type: ignore[arg-type]
    assert not (tmp_path / "bad").exists()


def test_bad_files(tmp_path: Path) -> None:
    loop = Loop("adam", "step", True, False)
    loop.run(4)
    path, bad = tmp_path / "r", tmp_path / "bad"
    TrainingRecord.capture_weighted(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, {"x": torch.ones(2)}).save(path)
    tensors, metadata = read_tensors(path)
    with pytest.raises(MissingFileError):
        TrainingRecord.load(bad, "cpu")
    bad.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TruncatedFileError):
        TrainingRecord.load(bad, "cpu")
    write_tensors(bad, tensors, metadata | {"format_version": "2"})
    with pytest.raises(NewerFormatError, match="update treadle"):
        TrainingRecord.load(bad, "cpu")
    write_tensors(bad, tensors, metadata | {"format": "other"})
    with pytest.raises(ValueError, match=r"holds other: a treadle\.training_record is needed"):
        TrainingRecord.load(bad, "cpu")
    write_tensors(bad, {k: v for k, v in tensors.items() if k != "model.unused"} | {"surplus": torch.ones(1)}, metadata)
    with pytest.raises(DamagedFileError, match=r"model\.unused is missing; surplus is extra"):
        TrainingRecord.load(bad, "cpu")
    structure = json.loads(metadata["record"])
    for key in ("kind", "model", "optimizer", "scheduler", "ranks", "rounded", "bits"):
        values: list[Any] = [None, 3, [], {}, "x", [["tensor"]]]
        for value in values:
            if key in ("rounded", "bits") and value == {}:
                continue  # as it is
            write_tensors(bad, tensors, metadata | {"record": json.dumps(structure | {key: value})})
            with pytest.raises(DamagedFileError):
                TrainingRecord.load(bad, "cpu")
    for text in ("", "{", "[" * 10_000, '{"kind": 1}'):
        write_tensors(bad, tensors, metadata | {"record": text})
        with pytest.raises(DamagedFileError):
            TrainingRecord.load(bad, "cpu")
    for window in (None, {}, {"dtype": "float16", "loss_scale": "0x1p+0", "total_weight": "0x1p+0", "microbatches": 1}):
        part = structure["ranks"][0] | {"window": window}
        write_tensors(bad, tensors, metadata | {"record": json.dumps(structure | {"ranks": [part]})})
        with pytest.raises(ValueError, match=r"window is malformed|dtype is"):
            TrainingRecord.load(bad, "cpu").restore_weighted(loop.model, loop.optimizer, loop.scheduler)


class Stubborn(schedules.StepLR):
    """A scheduler whose class refuses the first state that it is given."""

    refusals: ClassVar[list[str]] = ["gamma"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refusals:
            raise KeyError(self.refusals.pop())
        super().load_state_dict(state_dict)


def test_a_state_that_a_scheduler_does_not_take_changes_nothing() -> None:
    loop = Loop("adam", "none", False, True)
    loop.scheduler = Stubborn(loop.optimizer, 2)
    loop.run(8)
    record = TrainingRecord.capture_with_dtypes(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, None)
    fresh = Loop("adam", "none", False, False)
    fresh.scheduler = Stubborn(fresh.optimizer, 3)
    fresh.run(4)
    before = copy.deepcopy(fresh.everything())
    with pytest.raises(ValueError, match="state cannot be loaded: KeyError: 'gamma'"):
        record.restore_with_dtypes(fresh.model, fresh.optimizer, fresh.scheduler)
    after = fresh.everything()
    assert [k for k in before if not equal(before[k], after[k])] == []
    record.restore_with_dtypes(fresh.model, fresh.optimizer, fresh.scheduler)
    assert equal(fresh.model.inner.weight.detach(), loop.model.inner.weight.detach()) and fresh.scheduler.step_size == 2


def test_a_models_extra_state_must_fit() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return (1, "two")

        def set_extra_state(self, state: Any) -> None:
            assert state == (1, "two")

    def record(model: nn.Module) -> TrainingRecord:
        return TrainingRecord.capture(model, torch.optim.SGD(model.parameters()), None, GradientsAccumulator(), None)

    def restore(record: TrainingRecord, model: nn.Module) -> None:
        record.restore(model, torch.optim.SGD(model.parameters()), None)

    restore(record(Extra(1, 1)), Extra(1, 1))
    with pytest.raises(ValueError, match="the model is recorded with extra state, this one has none"):
        restore(record(Extra(1, 1)), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="0 has extra state, the record lacks it"):
        restore(record(nn.Sequential(nn.Linear(1, 1))), nn.Sequential(Extra(1, 1)))


class Wrapped(Tensor):
    pass


def test_tensors_without_values_of_their_own_are_refused_by_name() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2))
    meta = nn.Linear(1, 1, device="meta")
    sharded = nn.Linear(1, 1)
    sharded.register_buffer("part", torch.ones(2).as_subclass(Wrapped))
    for model, message in (
        (lazy, "0.weight is a lazy tensor: run the model once"),
        (meta, "weight is a meta tensor"),
        (sharded, "part is a Wrapped"),
    ):
        held = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=f"gathered from all ranks: {message}"):
            TrainingRecord.capture(model, torch.optim.SGD(held.parameters()), None, GradientsAccumulator(), None)


def test_buffers_of_whole_numbers_keep_their_type() -> None:
    record = TrainingRecord.capture(net := Net(), torch.optim.SGD(net.parameters()), None, GradientsAccumulator(), None)
    other = Net()
    other.calls = torch.zeros((), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"calls is recorded as torch.int64, the model has torch.float32"):
        record.restore(other, torch.optim.SGD(other.parameters()), None)


@pytest.mark.parametrize("path", [b"run.safetensors", 3, "", None])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (TrainingRecord.load, ModelStateTrainingRecord.load):
        with pytest.raises(ValueError, match=r"record\.path is"):
            call(path)


def test_records_are_of_one_moment_while_a_thread_trains_on(tmp_path: Path) -> None:
    """The training thread captures between updates and goes on; another one lands and saves what it took."""
    taken: queue.Queue[tuple[int, Any] | None] = queue.Queue()
    loop = Loop("adamw", "sequential", True, False)

    def train() -> None:
        for micro in range(1, 60):
            loop.run(micro)
            if micro % 7 == 0:
                taken.put((micro, TrainingRecord.capture_weighted_async(
                    loop.model, loop.optimizer, loop.scheduler, loop.accumulator, loop.state())))  # fmt: skip
        taken.put(None)

    thread = threading.Thread(target=train)
    thread.start()
    files: list[tuple[int, Path]] = []
    while (got := taken.get()) is not None:
        micro, landing = got
        files.append((micro, tmp_path / str(micro)))
        asyncio.run(landing).save(files[-1][1])
    thread.join()
    reference = Loop("adamw", "sequential", True, False)
    assert len(files) == 8
    for micro, path in files:
        reference.run(micro)
        TrainingRecord.capture_weighted(
            reference.model, reference.optimizer, reference.scheduler, reference.accumulator, reference.state()
        ).save(tmp_path / "expected")
        assert path.read_bytes() == (tmp_path / "expected").read_bytes()


def test_no_pickle_is_in_the_file(tmp_path: Path) -> None:
    loop = Loop("adafactor", "sequential", False, False)
    loop.run(4)
    TrainingRecord.capture(loop.model, loop.optimizer, loop.scheduler, loop.accumulator, loop.state()).save(tmp_path / "r")
    assert b"ctorch" not in (tmp_path / "r").read_bytes() and b"cbuiltins" not in (tmp_path / "r").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r"]
