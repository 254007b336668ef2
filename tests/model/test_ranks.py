"""A world of ranks takes the steps that one process takes: every objective, dealt evenly, unevenly, or to some ranks alone.

Ranks are processes that run this file as a script and write what they saw; the test compares that with one process. One launch runs
all of a world size's scenarios.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treadle.kernels.pair_loss import NamedPairs, PairRows, pair_loss
from treadle.kernels.pair_loss_reference import SLAB_ELEMENTS
from treadle.model.config import MeshOptions
from treadle.model.mesh import Mesh
from treadle.model.mesh_traffic import step_bytes
from treadle.model.objectives import TERMS
from treadle.model.reduction import GradientReduction
from treadle.model.trainer import PeerRefusedError, Trainer
from treadle.pipeline import PackedBatch, Packer, StepItems


def _scenarios() -> Any:
    spec = importlib.util.spec_from_file_location("rank_scenarios", Path(__file__).with_name("rank_scenarios.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANKS = _scenarios()


def _stop_by_one_rank(mesh: Mesh, batch: PackedBatch) -> list[int | None]:
    config = RANKS.config_of(RANKS.Scenario({}, []))
    with Trainer(replace(config, mesh=mesh)) as trainer:
        # Rank 0's stream has three batches, rank 1's one: both take three steps and end together.
        last = trainer.fit([batch] * (3 if mesh.rank == 0 else 1))
        taken = [last.step if last is not None else None]
    with Trainer(replace(config, mesh=mesh)) as trainer:
        last = trainer.fit([batch] * 9, on_step=lambda result: not (mesh.rank == 1 and result.step == 2))
        return [*taken, last.step if last is not None else None]


def edited_code(rank: int) -> Any:
    """Rank 1 runs code that somebody has edited."""
    return patch("treadle.model.trainer.code_digest", lambda: "edited") if rank == 1 else nullcontext()


def _refusals(mesh: Mesh, batch: PackedBatch) -> list[str]:
    told: list[str] = []
    config = replace(RANKS.config_of(RANKS.Scenario({}, [])), mesh=mesh)
    try:
        Trainer(replace(config, hidden=128 * (1 + mesh.rank)))
    except ValueError as error:
        told.append(str(error))
    with Trainer(config) as trainer:
        with edited_code(mesh.rank):
            try:
                Trainer(config)
            except ValueError as error:
                told.append(str(error))
        too_large = Packer(replace(RANKS.SAMPLES.SHAPE, max_rows_per_device=5)).pack(StepItems([0], [b"x"]))
        try:
            trainer.step(too_large if mesh.rank == 1 else batch)
        except (ValueError, PeerRefusedError) as error:
            told.append(str(error))
        if mesh.rank == 0:
            trainer.accumulate(batch)
        else:
            trainer.accumulate(None)
        told.append(str(trainer.step(batch).step))
    return told


def _save_and_resume(mesh: Mesh, folder: Path) -> dict[str, Any]:
    scenario = RANKS.WORLDS[2]["joint_accumulated"]
    config = replace(RANKS.config_of(scenario), mesh=mesh)
    batches = RANKS.rank_batches(scenario, mesh.rank)
    first, second, third = batches
    assert first is not None and third is not None
    path = folder / "world.safetensors"
    with Trainer(config) as trainer:
        trainer.step(first)
        trainer.accumulate(second)
        trainer.save(path)
        expected = trainer.step(third).stats
        weights = {name: p.detach().clone() for name, p in trainer.network.named_parameters()}
    mesh.world.exchange([0])
    with Trainer(replace(config, resume=path)) as trainer:
        resumed = trainer.step(third).stats
        same = all(torch.equal(p, weights[name]) for name, p in trainer.network.named_parameters())
    try:
        Trainer(replace(config, resume=path if mesh.rank == 0 else folder / "nowhere"))
        told = ""
    except (ValueError, PeerRefusedError) as error:
        told = str(error)
    return {"same": same, "equal": resumed == expected, "loss": resumed.loss, "norm": resumed.gradient_norm, "missing": told}


Scheme = tuple[bool, bool, int]
"""Whether the gather has a gradient, whether a rank's rows alone are anchors, and what multiplies the loss: 0 the world's size."""

SCHEMES: dict[str, Scheme] = {
    "own slot restored, global loss": (False, False, 1),
    "own slot restored, global loss, times W": (False, False, 0),
    "differentiable gather, global loss": (True, False, 1),
    "differentiable gather, local rows": (True, True, 1),
    "differentiable gather, local rows, times W": (True, True, 0),
    "own slot restored, local rows": (False, True, 1),
}
BATCH = 8


def info_nce(x_BD: torch.Tensor, y_BD: torch.Tensor, log_scale: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Mean over the anchors first .. first + count, both ways."""
    logits = log_scale.exp() * x_BD @ y_BD.T
    anchors = torch.arange(first, first + count)
    one, other = (torch.nn.functional.cross_entropy(part[anchors], anchors) for part in (logits, logits.T))
    return (one + other) / 2


def gradient_factors(mesh: Mesh) -> dict[str, list[float]]:
    """How each scheme's gradient, averaged over ranks, compares with one process': the encoder's, the temperature's, and its error."""
    world, local = mesh.world, BATCH // mesh.world_size
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(2, BATCH, 6, dtype=torch.float64, generator=draw)
    start = torch.randn(6, 4, dtype=torch.float64, generator=draw)

    def gradients(loss_of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight, log_scale = start.clone().requires_grad_(), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        loss_of(weight, log_scale).backward()
        assert weight.grad is not None and log_scale.grad is not None
        return weight.grad, log_scale.grad

    def unit(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=1)

    expected = gradients(lambda w, t: info_nce(unit(inputs[0] @ w), unit(inputs[1] @ w), t, 0, BATCH))
    first = world.rank * local
    factors: dict[str, list[float]] = {}
    for name, (differentiable, own_rows, times) in SCHEMES.items():

        def loss_of(
            w: torch.Tensor, t: torch.Tensor, differentiable: bool = differentiable, own_rows: bool = own_rows, times: int = times
        ) -> torch.Tensor:
            sides: list[torch.Tensor] = []
            for side in inputs:
                mine = unit(side[first : first + local] @ w)
                everyone = world.gather(mine if differentiable else mine.detach(), [local] * world.size)
                if not differentiable:
                    everyone = torch.cat([everyone[:first], mine, everyone[first + local :]])
                sides.append(everyone)
            loss = info_nce(sides[0], sides[1], t, first, local) if own_rows else info_nce(sides[0], sides[1], t, 0, BATCH)
            return loss * (times or world.size)

        weight, log_scale = (world.all_sum(g.clone()) / world.size for g in gradients(loss_of))
        size = float(weight.norm() / expected[0].norm())
        error = float((weight / size - expected[0]).norm() / expected[0].norm())
        factors[name] = [size, float(log_scale / expected[1]), error]
    return factors


def sent_in_a_step(mesh: Mesh) -> dict[str, Any]:
    """What a step sends, counted and by formula, and how many slices of the gradient went before the backward pass was over."""
    scenario = RANKS.WORLDS[2]["balanced_micro_batches"]
    config = replace(RANKS.config_of(scenario), mesh=mesh, depth=2)
    batches = [b for b in RANKS.rank_batches(scenario, mesh.rank) if b is not None]
    with Trainer(config) as trainer:
        runner = trainer._runner  # pyright: ignore[reportPrivateUsage]
        runner.reduction = GradientReduction(mesh.world, runner.parameters, trainer.network, bucket_bytes=2**16)
        before = replace(mesh.world.traffic)
        trainer.step(batches)
        counted = {name: value - asdict(before)[name] for name, value in asdict(mesh.world.traffic).items()}
        expected = step_bytes(
            2,
            parameters=runner.parameters.gradients.numel(),
            hidden=config.hidden,
            # Two items a seed: four segments on each rank, then four and none.
            segments=[[4, 4], [4, 0]],
            terms=len(TERMS),
            scores_pairs=True,
            host_words=7,
        )
        return {"counted": counted, "expected": asdict(expected), "early": runner.reduction.sent_early, "of": len(runner.reduction.slices)}


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Remembers the elements of the largest tensor that any operation takes or makes, collectives too."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


ROWS, WIDTH = (2048, 1500), 64


def largest_in_scoring(mesh: Mesh) -> int:
    """Rows gathered, scored and given their gradients, between ranks that hold unequally many."""
    sizes, first = list(ROWS), sum(ROWS[: mesh.rank])
    own, count = ROWS[mesh.rank], sum(ROWS)
    pooled = torch.randn(own, WIDTH, generator=torch.Generator().manual_seed(mesh.rank)).requires_grad_()
    group = torch.zeros(count, dtype=torch.int64)
    named = NamedPairs(torch.arange(own + 1), first + (torch.arange(own) ^ 1), torch.ones(own), torch.zeros(own))
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        pairs = PairRows(first + torch.arange(own), group[:own], group, named, 1.0)
        everyone = mesh.world.gather(pooled, sizes)
        value = pair_loss(pooled, everyone, torch.ones(1), torch.zeros(1), group[:own], pairs, form="sigmoid", widths=(WIDTH,))
        torch.autograd.backward(value)
    assert pooled.grad is not None and bool(pooled.grad.any())
    return int(largest.elements)


def main(folder: Path, world_size: int, rank: int) -> None:
    torch.set_num_threads(1)
    options = MeshOptions(directory=folder, host_domain_index=rank, host_domain_count=world_size, timeout_s=100)
    with Mesh.bootstrap(options, device="cpu") as mesh:
        out: dict[str, Any] = {}
        for name, scenario in RANKS.WORLDS[world_size].items():
            numbers, weights = RANKS.run(scenario, mesh, RANKS.rank_batches(scenario, rank))
            out[name] = numbers
            torch.save(weights, folder / f"{name}-{rank}.pt")
        batch = Packer(RANKS.SAMPLES.SHAPE).pack(RANKS.items_of([0, 1], texts_only=False))
        if world_size != 3:
            out["factors"] = gradient_factors(mesh)
        if world_size == 2:
            out["sent"] = sent_in_a_step(mesh)
            out["largest"] = largest_in_scoring(mesh)
            out["fit"] = _stop_by_one_rank(mesh, batch)
            out["refusals"] = _refusals(mesh, batch)
            out["resume"] = _save_and_resume(mesh, folder)
    (folder / f"out-{rank}.json").write_text(json.dumps(out))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Runs a world once and answers the folder of its output."""
    done: dict[int, Path] = {}

    def launch(world_size: int) -> Path:
        if world_size not in done:
            folder = tmp_path_factory.mktemp(f"world-{world_size}")
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, str(folder), str(world_size), str(rank)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(world_size)
            ]
            outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
            assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
            done[world_size] = folder
        return done[world_size]

    yield launch


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, found in RANKS.WORLDS.items() for name in found])
def test_a_world_takes_the_steps_of_one_process(world_size: int, name: str, launched: Callable[[int], Path]) -> None:
    folder = launched(world_size)
    scenario = RANKS.WORLDS[world_size][name]
    expected, expected_tensors = RANKS.run(scenario, None, RANKS.world_batches(scenario))
    assert expected[0][-2] > 0
    # Late interaction and choices.
    assert min(expected[0][4:6]) > 0 or scenario.changes is not RANKS.NAMED_JOINT
    assert min(expected[0][:8]) > 0 or scenario.changes is not RANKS.ALL
    for rank in range(world_size):
        seen = json.loads((folder / f"out-{rank}.json").read_text())[name]
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        tensors = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
        assert tensors.keys() == expected_tensors.keys()
        for key, value in expected_tensors.items():
            # Adam forgives a gradient that is W times too large, the learned temperature's above all: compare gradients themselves.
            # Clipped gradients have norm 1; what is zero in exact arithmetic (the bias under RANKED) is rounding far below that.
            most = 1e-5 * float(value.abs().max()) + 1e-8 if key.startswith("gradient.") else 1e-5
            assert float((tensors[key] - value).abs().max()) <= most, key
    first = torch.load(folder / f"{name}-0.pt", weights_only=True)
    last = torch.load(folder / f"{name}-{world_size - 1}.pt", weights_only=True)
    assert all(torch.equal(first[key], last[key]) for key in first)


def _out(folder: Path, rank: int, key: str) -> Any:
    return json.loads((folder / f"out-{rank}.json").read_text())[key]


@pytest.mark.parametrize("world_size", [2, 4])
def test_which_gathers_have_the_gradient_of_one_process(world_size: int, launched: Callable[[int], Path]) -> None:
    w = float(world_size)
    # Factors of the encoder's and of the temperature's gradient against one process, averaged over ranks as data-parallel wrappers do.
    # "Own slot, global loss" sees each anchor once in W ranks' copies: 1 / W. Times W mends the encoder and breaks the temperature, which
    # every rank had whole. Ours is the third and fourth, with a sum in place of the mean and the world's count in place of the batch's.
    expected = {
        "own slot restored, global loss": (1 / w, 1.0),
        "own slot restored, global loss, times W": (1.0, w),
        "differentiable gather, global loss": (1.0, 1.0),
        "differentiable gather, local rows": (1.0, 1.0),
        "differentiable gather, local rows, times W": (w, w),
    }
    for rank in range(world_size):
        seen = _out(launched(world_size), rank, "factors")
        for name, factors in expected.items():
            assert seen[name][:2] == pytest.approx(factors, rel=1e-12), name
            assert seen[name][2] < 1e-12, name
        # The gradient that reaches others through a rank's rows is lost: no factor mends it.
        _, temperature, error = seen["own slot restored, local rows"]
        assert temperature == pytest.approx(1.0, rel=1e-12) and error > 0.01


def test_a_step_sends_what_the_formula_says(launched: Callable[[int], Path]) -> None:
    for rank in range(2):
        seen = _out(launched(2), rank, "sent")
        assert seen["counted"] == seen["expected"]
        assert min(seen["expected"].values()) > 0
        # Whoever ran the last micro-batch had sent most slices before its end; the other had none of it to run.
        assert seen["early"] > seen["of"] // 2 if rank == 0 else seen["early"] == 0


def test_scoring_between_ranks_holds_no_more_than_everybody_s_rows(launched: Callable[[int], Path]) -> None:
    # The gather's buffer, padded to the larger rank, or one slab of scores: nothing is anchors by candidates.
    assert ROWS[1] * sum(ROWS) > 10 * SLAB_ELEMENTS
    for rank in range(2):
        assert 2 * ROWS[0] * WIDTH <= _out(launched(2), rank, "largest") <= max(2 * ROWS[0] * WIDTH, SLAB_ELEMENTS)


def test_ranks_end_together(launched: Callable[[int], Path]) -> None:
    folder = launched(2)
    # Streams of three and one batches: three steps. Rank 1 asks to stop after step 2: no rank takes a third.
    assert [_out(folder, rank, "fit") for rank in range(2)] == [[3, 2], [3, 2]]


def test_what_one_rank_cannot_take_is_told_to_all(launched: Callable[[int], Path]) -> None:
    first, second = (_out(launched(2), rank, "refusals") for rank in range(2))
    for told in (first, second):
        assert "config.hidden is 256 on rank 1 and 128 on rank 0" in told[0]
        assert "code is 'edited' on rank 1 and" in told[1]
        assert told[3] == "1"
    assert "rank 1 could not take its batch" in first[2]
    assert "max_rows_per_device is 5, the trainer's 4" in second[2]


def test_a_checkpoint_that_one_rank_cannot_read_starts_no_rank(launched: Callable[[int], Path]) -> None:
    first, second = (_out(launched(2), rank, "resume")["missing"] for rank in range(2))
    assert first == "rank 1 could not read its checkpoint, see its own error: no rank starts"
    assert "nowhere: there is no such file; its folder holds" in second


def test_a_world_resumes_bit_for_bit_and_another_world_size_takes_the_window_over(launched: Callable[[int], Path]) -> None:
    folder = launched(2)
    seen = [_out(folder, rank, "resume") for rank in range(2)]
    assert all(s["same"] and s["equal"] for s in seen)
    # One process resumes what two saved in the middle of a window; ambient pairs of the open window were already scored.
    scenario = RANKS.WORLDS[2]["joint_accumulated"]
    batch = RANKS.world_batches(scenario)[2]
    assert batch is not None
    with Trainer(replace(RANKS.config_of(scenario), resume=folder / "world.safetensors")) as trainer:
        stats = trainer.step(batch).stats
    assert stats.loss == pytest.approx(seen[0]["loss"], rel=1e-5)
    assert stats.gradient_norm == pytest.approx(seen[0]["norm"], rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
