"""Records of an adapter over a frozen base, under the contract of what trains."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.model.accumulate import GradientsAccumulator, WeightedGradientsAccumulator
from treadle.model.record import ModelStateTrainingRecord, TrainableParameterContract, TrainingRecord
from treadle.model.record_contract import digest_of_base
from treadle.model.storage_file import read_tensors, write_tensors

torch.set_num_threads(1)


class Adapted(nn.Module):
    """A frozen linear map with a trained low-rank one beside it."""

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, rank, bias=False)
        self.up = nn.Linear(rank, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.base(x) + self.up(self.down(x))
        return mapped


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, accumulator: Any, first: int, end: int) -> None:
    for micro in range(first, end):
        model.zero_grad()
        torch.autograd.backward(model(torch.full((2, 6), micro / 7)).square().mean())
        if isinstance(accumulator, WeightedGradientsAccumulator):
            accumulator.accumulate_mean(model, micro + 1)
        else:
            accumulator.accumulate(model)
        if micro % 2:
            (accumulator.finish_mean() if isinstance(accumulator, WeightedGradientsAccumulator) else accumulator.finish()).assign(model)
            optimizer.step()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stop", [0, 3, 4])
def test_continuing_an_adapter(tmp_path: Path, weighted: bool, asynchronous: bool, stop: int) -> None:
    model = Adapted()
    optimizer, accumulator = trained(model), WeightedGradientsAccumulator() if weighted else GradientsAccumulator()
    contract = TrainableParameterContract.capture(model)
    assert contract.names == ("down.weight", "up.weight") and contract.shapes["up.weight"] == (6, 2)
    run(model, optimizer, accumulator, 0, stop)
    capture = getattr(ModelStateTrainingRecord, f"capture{'_weighted' if weighted else ''}{'_async' if asynchronous else ''}")
    record = capture(model, optimizer, None, accumulator, contract, {"next": stop})
    run(model, optimizer, accumulator, stop, 8)
    record = asyncio.run(record) if asynchronous else record
    record.save(tmp_path / "adapter")
    assert not [n for n in read_tensors(tmp_path / "adapter")[0] if "base" in n]
    record = ModelStateTrainingRecord.load(tmp_path / "adapter", "cpu")
    assert record.contract == contract and record.contract.base_digest == digest_of_base(Adapted(), contract.names)
    fresh = Adapted()
    with torch.no_grad():
        fresh.up.weight.zero_()
    restored = getattr(record, "restore_weighted" if weighted else "restore")(fresh, trained(fresh), None, "cpu")
    run(restored.model, restored.optimizer, restored.accumulator, restored.state["next"], 8)
    for (name, a), b in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_base_is_told_apart() -> None:
    assert digest_of_base(Adapted(seed=0), ["down.weight", "up.weight"]) != digest_of_base(Adapted(seed=1), ["down.weight", "up.weight"])


def test_contracts_list_their_differences() -> None:
    contract = TrainableParameterContract.capture(Adapted())
    contract.validate(Adapted(seed=5))
    with pytest.raises(ValueError, match=r"down.weight has shape \(3, 6\), the contract says \(2, 6\); up.weight has shape"):
        contract.validate(Adapted(rank=3))
    wrong = Adapted()
    wrong.base.bias.requires_grad_(True)
    wrong.up.weight.requires_grad_(False)
    wrong.down.bfloat16()
    with pytest.raises(ValueError) as refused:
        contract.validate(wrong)
    for part in ("base.bias trains", "up.weight is named, but frozen", "down.weight is torch.bfloat16, the contract says torch.float32"):
        assert part in str(refused.value)
    with pytest.raises(ValueError, match=r"up.weight is named, the model lacks it"):
        contract.validate(nn.ModuleDict({"down": nn.Linear(6, 2, bias=False)}))
    with pytest.raises(ValueError, match="no such parameters: nothing"):
        TrainableParameterContract.capture(Adapted(), ["nothing"])
    assert TrainableParameterContract.capture(Adapted(), ["up.weight"]).names == ("up.weight",)


def test_mismatches_are_refused(tmp_path: Path) -> None:
    model = Adapted()
    contract, optimizer = TrainableParameterContract.capture(model), trained(model)
    model.base.requires_grad_(True)
    accumulator = GradientsAccumulator()
    run(model, optimizer, accumulator, 0, 1)
    with pytest.raises(ValueError, match=r"base.weight trains"):
        ModelStateTrainingRecord.capture(model, optimizer, None, accumulator, contract, None)
    model.base.requires_grad_(False)
    with pytest.raises(ValueError, match=r"pending gradients of frozen parameters: base.weight; base.bias"):
        ModelStateTrainingRecord.capture(model, optimizer, None, accumulator, contract, None)
    record = ModelStateTrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), contract, None)
    other = Adapted(rank=3)
    with pytest.raises(ValueError, match="does not fit its contract"):
        record.restore(other, trained(other), None)
    with pytest.raises(ValueError, match=r"restore it with restore$"):
        record.restore_weighted(model, optimizer, None)
    record.save(tmp_path / "r")
    with pytest.raises(ValueError, match=r"a treadle\.training_record is needed"):
        TrainingRecord.load(tmp_path / "r", "cpu")


class Normed(nn.Module):
    """An adapter with a batch norm that trains, over a base with one that does not, and a cache."""

    cache: Tensor
    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False).eval()
        self.adapter = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.register_buffer("cache", torch.rand(3), persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.adapter(self.base(x))
        return mapped


def test_buffers_that_train_are_recorded_and_the_bases_are_not(tmp_path: Path) -> None:
    model = Normed()
    contract = TrainableParameterContract.capture(model)
    assert set(contract.buffers) == {f"adapter.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    optimizer, accumulator = trained(model), GradientsAccumulator()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
        model.zero_grad()
        torch.autograd.backward(model(torch.sin(torch.arange(24.0) * at).reshape(4, 6)).square().mean())
        optimizer.step()

    step(model, optimizer, 1)
    ModelStateTrainingRecord.capture(model, optimizer, None, accumulator, contract, None).save(tmp_path / "r")
    step(model, optimizer, 2)
    assert not [n for n in read_tensors(tmp_path / "r")[0] if "base" in n or "cache" in n or "scale" in n]
    record = ModelStateTrainingRecord.load(tmp_path / "r")
    assert record.contract == contract
    fresh = Normed()
    with torch.no_grad():
        for tensor in (*fresh.adapter.parameters(), *fresh.adapter.buffers()):
            tensor.add_(1)
    record.contract.check_base(fresh)
    other = trained(fresh)
    record.restore(fresh, other, None)
    step(fresh, other, 2)
    for (name, a), b in zip(model.adapter.state_dict().items(), fresh.adapter.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_caller_chooses_which_buffers_train() -> None:
    contract = TrainableParameterContract.capture(Normed(), buffers=["scale"])
    assert dict(contract.buffers) == {"scale": (1,)}
    with pytest.raises(ValueError, match="no such buffers: nothing"):
        TrainableParameterContract.capture(Normed(), buffers=["nothing"])
    wrong = Normed()
    wrong.scale = torch.ones(2)
    with pytest.raises(ValueError, match=r"buffer scale has shape \(2,\), the contract says \(1,\)"):
        contract.validate(wrong)
    del wrong.scale
    with pytest.raises(ValueError, match="buffer scale is named, the model lacks it"):
        contract.validate(wrong)


def test_another_base_is_told_by_its_tensors() -> None:
    contract = TrainableParameterContract.capture(Normed())
    contract.check_base(Normed())
    moved = Normed()
    with torch.no_grad():
        moved.get_parameter("base.0.bias")[2] += 1e-7
        moved.get_buffer("base.1.running_mean").add_(1)
        moved.get_parameter("adapter.0.weight").add_(1)  # trains: not the base's
        moved.cache.add_(1)  # computed anew by whoever builds the model
    with pytest.raises(ValueError, match=r"stands on another base: base\.0\.bias differs; base\.1\.running_mean differs$"):
        contract.check_base(moved)
    half = Normed()
    half.base[0].bfloat16()
    with pytest.raises(ValueError, match=r"base\.0\.weight differs; base\.0\.bias differs$"):
        contract.check_base(half)
    more = Normed()
    more.register_parameter("extra", nn.Parameter(torch.ones(1), requires_grad=False))
    del more.scale
    with pytest.raises(
        ValueError, match=r"scale is in the contract's base, the model lacks it; extra is in the model, the contract's base"
    ):
        contract.check_base(more)


@pytest.mark.parametrize(
    "edit", [{"shapes": 3}, {"dtypes": {}}, {"base": []}, {"buffers": None}, {"base_digest": None, "shapes": {"x": [1]}}]
)
def test_malformed_contracts_are_refused(tmp_path: Path, edit: dict[str, Any]) -> None:
    model = Adapted()
    contract = TrainableParameterContract.capture(model)
    path = tmp_path / "r"
    ModelStateTrainingRecord.capture(model, trained(model), None, GradientsAccumulator(), contract, None).save(path)
    tensors, metadata = read_tensors(path)
    structure = json.loads(metadata["record"])
    structure["contract"] |= edit
    write_tensors(path, tensors, metadata | {"record": json.dumps(structure)})
    with pytest.raises(ValueError, match=r"contract is malformed|other parameters than its contract"):
        ModelStateTrainingRecord.load(path)
