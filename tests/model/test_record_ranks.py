"""Records of several ranks: each rank's part apart, and at another world size the finished gradient stays the same.

Ranks are threads that meet at a barrier; one test runs processes of gloo.
"""

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.model.accumulate import GradientsAccumulator, WeightedGradientsAccumulator
from treadle.model.mesh import World
from treadle.model.record import RestoredTraining, RestoredWeightedTraining, TrainingRecord
from treadle.model.record_ranks import ranks_taken


class Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class ThreadWorld(World):
    """A rank among threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def _all(self, value: Any) -> list[Any]:
        self._meeting.slots[self.rank] = value
        self._meeting.barrier.wait(60)
        found = list(self._meeting.slots)
        self._meeting.barrier.wait(60)
        return found

    def all_sum(self, x: Tensor) -> Tensor:
        parts = self._all(x.clone())
        return x.copy_(torch.stack(parts).sum(0))

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return self._all(data)

    def collect_bytes(self, data: bytes) -> list[bytes] | None:
        found = self._all(data)
        return found if self.rank == 0 else None


def in_ranks(size: int, call: Callable[[World], Any]) -> list[Any]:
    """What `call` answers on each rank."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        try:
            return call(ThreadWorld(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]


class Loop:
    """A rank's own copy of the model, and micro-batches that differ by rank; every gradient a whole number, so that sums are exact."""

    def __init__(self, weighted: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1), "rare": nn.Linear(1, 1)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accumulator: Any = WeightedGradientsAccumulator(torch.float64, 2.0) if weighted else GradientsAccumulator()

    def add(self, number: int, rare: bool = False) -> None:
        for name, parameter in self.model.named_parameters():
            used = rare or not name.startswith("rare")
            parameter.grad = torch.full_like(parameter, float(number)) if used else None
        if isinstance(self.accumulator, WeightedGradientsAccumulator):
            self.accumulator.accumulate_sum(self.model, number)
        else:
            self.accumulator.accumulate(self.model)

    def finish(self, world: World | None) -> dict[str, Tensor]:
        accumulator = self.accumulator
        finished = accumulator.finish_mean(world) if isinstance(accumulator, WeightedGradientsAccumulator) else accumulator.finish(world)
        return dict(finished.gradients)


def first_of(states: list[Any]) -> Any:
    return {"rank": -1, "seen": [state["rank"] for state in states]}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_window_goes_on_at_any_world_size(weighted: bool, size: int, tmp_path: Path) -> None:
    """The finished gradient is that of the world that was never interrupted, in every bit of it."""
    path = tmp_path / "record"
    form = "_weighted" if weighted else ""

    def start(world: World) -> tuple[dict[str, Tensor], bool]:
        loop = Loop(weighted)
        loop.add(world.rank + 1)
        loop.add(10 * (world.rank + 1), rare=world.rank == 1)
        capture = getattr(TrainingRecord, f"capture{form}")
        record = capture(loop.model, loop.optimizer, None, loop.accumulator, {"rank": world.rank, "random": torch.get_rng_state()})
        whole = record.gather(world)
        if whole is not None:
            assert whole.world_size == size and [state["rank"] for state in whole.states] == list(range(size))
            whole.save(path)
        loop.add(100)
        return loop.finish(world), whole is None

    started = in_ranks(size, start)
    expected = started[0][0]
    assert [absent for _, absent in started] == [False] + [True] * (size - 1)
    assert "rare.weight" in expected and all(started[0][0][name].equal(other[name]) for other, _ in started for name in expected)
    record = TrainingRecord.load(path)
    for now in (1, 2, 3, 5):

        def go_on(world: World, now: int = now) -> tuple[dict[str, Tensor], Any, set[str]]:
            loop = Loop(weighted)
            restored: RestoredTraining[Any, Any, Any] | RestoredWeightedTraining[Any, Any, Any] = getattr(record, f"restore{form}")(
                loop.model, loop.optimizer, None, rank=world.rank, world_size=now, merge=None if now == size else first_of
            )
            loop.accumulator = restored.accumulator
            held = set(loop.accumulator.gradients)
            # As much is added as before, by however many ranks there are now.
            loop.add(100 * size if world.rank == 0 else 0)
            if isinstance(loop.accumulator, WeightedGradientsAccumulator):
                assert loop.accumulator.state.dtype == torch.float64 and loop.accumulator.state.loss_scale == 2.0
            return loop.finish(world), restored.state, held

        for rank, (gradients, state, held) in enumerate(in_ranks(now, go_on)):
            assert gradients.keys() == expected.keys()
            assert all(gradients[name].equal(expected[name]) for name in expected), (now, rank)
            assert state["rank"] == (rank if now == size else -1)
            # A parameter that a rank did not use stays absent there.
            assert ("rare.weight" in held) == (1 in ranks_taken(rank, now, size))
            assert bool(held) == (rank < size)


def test_another_world_size_asks_how_states_become_one() -> None:
    def capture(world: World) -> TrainingRecord | None:
        loop = Loop(False)
        return TrainingRecord.capture(loop.model, loop.optimizer, None, loop.accumulator, world.rank).gather(world)

    record = in_ranks(3, capture)[0]
    loop = Loop(False)
    with pytest.raises(ValueError, match="holds the states of 3 ranks, this is one of 2: give merge="):
        record.restore(loop.model, loop.optimizer, None, rank=0, world_size=2)
    assert record.restore(loop.model, loop.optimizer, None, rank=1, world_size=2, merge=sum).state == 3
    assert record.restore(loop.model, loop.optimizer, None, rank=2, world_size=3).state == 2
    for rank, size in ((2, 2), (-1, 2), (0, 0), (True, 2), (0, 2**20)):
        with pytest.raises(ValueError, match=r"(it must be an integer from|it must lie between)"):
            record.restore(loop.model, loop.optimizer, None, rank=rank, world_size=size, merge=sum)
    with pytest.raises(ValueError, match="holds the parts of 3 ranks already"):
        record.gather(World())


def test_ranks_that_captured_different_things_are_told() -> None:
    def lopsided(world: World) -> str:
        loop = Loop(True)
        if world.rank == 1:
            loop.accumulator = WeightedGradientsAccumulator(torch.float32, 2.0)
        record = TrainingRecord.capture_weighted(loop.model, loop.optimizer, None, loop.accumulator, None)
        with pytest.raises(ValueError) as refused:
            record.gather(world)
        return str(refused.value)

    assert in_ranks(2, lopsided) == ["ranks captured different things: window of rank 1"] * 2

    def mistyped(world: World) -> str:
        loop = Loop(False)
        if world.rank == 1:
            loop.model.double()
        loop.add(1)
        with pytest.raises(ValueError) as refused:
            loop.accumulator.finish(world)
        assert loop.accumulator.gradients  # nothing was cleared
        return str(refused.value)

    assert all("gradient a.weight is ['torch.float64', [2, 2], 'cpu'] on rank 1" in text for text in in_ranks(2, mistyped))


def test_a_mean_over_a_world_without_weight_clears_nothing() -> None:
    def weightless(world: World) -> int:
        loop = Loop(True)
        loop.add(0)
        with pytest.raises(ValueError, match="the window of 2 micro-batches weighs nothing"):
            loop.accumulator.finish_mean(world)
        return int(loop.accumulator.state.microbatches)

    assert in_ranks(2, weightless) == [1, 1]


def test_ranks_are_dealt_once_each() -> None:
    chance = random.Random(0)
    for _ in range(200):
        recorded, now = chance.randint(1, 40), chance.randint(1, 40)
        dealt = [rank for r in range(now) for rank in ranks_taken(r, now, recorded)]
        assert sorted(dealt) == list(range(recorded))


PROCESSES = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from treadle.model.accumulate import WeightedGradientsAccumulator
from treadle.model.mesh import ProcessWorld
from treadle.model.record import TrainingRecord

path, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}.meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulator = WeightedGradientsAccumulator()
for parameter in model.parameters():
    parameter.grad = torch.full_like(parameter, 2.0 + rank)
accumulator.accumulate_sum(model, 1 + rank)
whole = TrainingRecord.capture_weighted(model, optimizer, None, accumulator, {"rank": rank}).gather()
if whole is not None:
    whole.save(path)
dist.barrier()
record = TrainingRecord.load(path)
restored = record.restore_weighted(model, optimizer, None, rank=rank, world_size=2)
assert restored.state == {"rank": rank} and restored.accumulator.state.total_weight == 1 + rank
finished = restored.accumulator.finish_mean(ProcessWorld())
# (2 + 3) / (1 + 2)
assert all(torch.equal(g, torch.full_like(g, 5 / 3)) for g in finished.values()), finished.gradients
dist.destroy_process_group()
"""


def test_processes_of_gloo(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    ranks = [subprocess.Popen([sys.executable, "-P", "-c", PROCESSES, path, str(rank)]) for rank in range(2)]
    assert [process.wait(240) for process in ranks] == [0, 0]
    loop = nn.Linear(2, 1)
    alone = TrainingRecord.load(path).restore_weighted(loop, torch.optim.SGD(loop.parameters(), lr=0.1), None, merge=lambda s: s)
    assert alone.accumulator.state.total_weight == 3 and alone.state == [{"rank": 0}, {"rank": 1}]
    assert all(torch.equal(g, torch.full_like(g, 5 / 3)) for g in alone.accumulator.finish_mean().values())
