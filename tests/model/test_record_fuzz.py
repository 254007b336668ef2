"""Hostile files: whatever a record's file says, loading and restoring it answers or raises `ValueError`, and nothing is executed."""

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from treadle.model.accumulate import WeightedGradientsAccumulator
from treadle.model.record import TrainingRecord
from treadle.model.storage_file import read_tensors, write_tensors

ODD: list[Any] = [
    None, True, -1, 0, 2**70, 1.5, "", "x", "float32", "int8", "__class__", [], {}, [[]], {"": 0}, ["tensor", "state.0", [0, 1, 1]],
    ["array", "|O8", [1], "state.0"], ["array", "<U99999999", [2**40], "state.0"], ["scalar", "|V8", "00" * 8], ["int", "z"], ["float", "nan"],
    ["tensor", "model.weight", [1, 1, 0]], ["dict", [[["list", []], ["none"]]]], ["bytes", "optimizer.0"], ["list"], "9" * 400,
]  # fmt: skip


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=9)
        self.accumulator = WeightedGradientsAccumulator()

    def step(self) -> None:
        torch.autograd.backward(self.model(torch.randn(4, 3)).square().sum())
        self.accumulator.accumulate_sum(self.model, 4)
        self.accumulator.finish_mean().assign(self.model)
        self.optimizer.step()
        self.scheduler.step()
        self.accumulator.accumulate_sum(self.model, 2)

    def record(self) -> TrainingRecord:
        state = {"a": [1, 2.5, b"x", torch.arange(3), None], ("k", 1): "text", "n": torch.ones(2).numpy()}
        return TrainingRecord.capture_weighted_with_dtypes(self.model, self.optimizer, self.scheduler, self.accumulator, state)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a structure."""
    found = [path] if path else []
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return found + [place for key, value in inner for place in places(value, (*path, key))]


def mutated(structure: Any, chance: random.Random) -> Any:
    """The structure with a few of its places replaced, removed, doubled or swapped."""
    copy = json.loads(json.dumps(structure))
    for _ in range(chance.randint(1, 3)):
        found = places(copy)
        *above, last = chance.choice(found)
        parent: Any = copy
        for key in above:
            parent = parent[key]
        how = chance.randrange(4)
        if how == 0:
            del parent[last]
        elif how == 1 and isinstance(parent, list):
            parent.append(parent[last])
        elif how == 2:
            source: Any = copy
            for key in chance.choice(found):
                source = source[key]
            parent[last] = json.loads(json.dumps(source))
        else:
            parent[last] = chance.choice(ODD)
    return copy


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    loop = Loop()
    loop.step()
    loop.record().save(tmp_path / "good")
    return tmp_path / "good"


def attempt(path: Path) -> str:
    """What loading and restoring a file comes to; anything but a value or a `ValueError` fails the test."""
    loop = Loop()
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    groups = [dict(group) for group in loop.optimizer.param_groups]
    try:
        TrainingRecord.load(path).restore_weighted_with_dtypes(loop.model, loop.optimizer, loop.scheduler)
    except ValueError:
        # Refused: nothing was changed.
        assert all(torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
        assert all(value.dtype == before[name].dtype for name, value in loop.model.state_dict().items())
        assert [g["lr"] for g in loop.optimizer.param_groups] == [g["lr"] for g in groups] and not loop.optimizer.state
        return "refused"
    return "restored"


@pytest.mark.parametrize("seed", range(4))
def test_mutated_structures(seed: int, saved: Path, tmp_path: Path) -> None:
    """Checksums are right: whoever writes a file to do harm computes them."""
    chance = random.Random(seed)
    tensors, metadata = read_tensors(saved)
    structure = json.loads(metadata["record"])
    modules = set(sys.modules)
    outcomes = []
    for _ in range(150):
        metadata["record"] = json.dumps(mutated(structure, chance))
        write_tensors(tmp_path / "bad", tensors, metadata)
        outcomes.append(attempt(tmp_path / "bad"))
    # Most mutations are noticed; a learning rate that became another number cannot be.
    assert outcomes.count("refused") > 100
    assert set(sys.modules) == modules  # nothing in a file makes Python import anything
    assert attempt(saved) == "restored"


def test_mutated_bytes(saved: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    whole = saved.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            how = chance.randrange(3)
            if how == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif how == 1:
                del data[at : at + chance.randint(1, 40)]
            else:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        if bytes(data) != whole:
            (tmp_path / "bad").write_bytes(data)
            assert attempt(tmp_path / "bad") == "refused"


def test_tensors_swapped_between_names(saved: Path, tmp_path: Path) -> None:
    tensors, metadata = read_tensors(saved)
    names = sorted(tensors)
    for one, other in itertools.pairwise(names):
        write_tensors(tmp_path / "bad", tensors | {one: tensors[other], other: tensors[one]}, metadata)
        attempt(tmp_path / "bad")
