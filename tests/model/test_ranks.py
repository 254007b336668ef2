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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.model.config import Choices, Contrastive, LateInteraction, MeshOptions, OptimizerConfig, Schedule, TrainerConfig
from treadle.model.mesh import Mesh
from treadle.model.mesh_traffic import step_bytes
from treadle.model.objectives import TERMS
from treadle.model.reduction import GradientReduction
from treadle.model.trainer import PeerRefusedError, Trainer
from treadle.pipeline import PackedBatch, Packer, StepItems
from treadle.shape import Negatives, Objective, PairLossForm

STEPS = 3

Deal = list[list[list[int] | None]]
"""Micro-batches; in each, the seeds of every rank, or None."""


def _conftest() -> Any:
    spec = importlib.util.spec_from_file_location("sample_items", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLES = _conftest()


@dataclass(frozen=True)
class Scenario:
    changes: dict[str, Any]
    deal: Deal
    texts_only: tuple[int, ...] = ()
    """Ranks that get no pictures; dealt to one process, the same items have none either."""
    accumulated: int = 0
    """Micro-batches given to `accumulate` before the step."""


def config_of(scenario: Scenario) -> TrainerConfig:
    base = TrainerConfig(
        depth=1,
        hidden=128,
        batch=SAMPLES.SHAPE,
        schedule=Schedule(steps=50, learning_rate=2e-4, warmup_steps=1),
        optimizer=OptimizerConfig(eps=1e-6),
        device="cpu",
    )
    return replace(base, **scenario.changes)


NAMED_JOINT = {
    "objective": Objective.JOINT,
    "contrastive": Contrastive(negatives=Negatives.NAMED, matryoshka_dimensions=(32, 128)),
    "late_interaction": LateInteraction(weight=0.5, width=16),
    "choices": Choices(weight=1.0),
}
RANKED = {"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.RANKED)}
BALANCED = {"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.BALANCED, inverse_temperature=8.0)}
SIGMOID = {"objective": Objective.JOINT, "contrastive": Contrastive(matryoshka_dimensions=(64,))}

WORLDS: dict[int, dict[str, Scenario]] = {
    2: {
        "masked_uneven": Scenario({}, [[[0, 1], [2, 3, 4, 5]]]),
        "masked_none": Scenario({}, [[[0, 1, 2, 3], None]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1, 2, 3], [4, 5]]]),
        "joint_named_none": Scenario(NAMED_JOINT, [[None, [0, 1, 2, 3]]]),
        "joint_named_texts_only": Scenario(NAMED_JOINT, [[[0, 1], [2, 3]]], texts_only=(0,)),
        "ranked": Scenario(RANKED, [[[0, 1, 2, 3], [8, 9]]]),
        "ranked_none": Scenario(RANKED, [[None, [0, 1, 2, 3]]]),
        "balanced_micro_batches": Scenario(BALANCED, [[[0, 1], [2, 3]], [[4, 5], None]]),
        "sigmoid_groups_across_ranks": Scenario(SIGMOID, [[[0, 1], [8, 9, 2, 3]]]),
        "joint_accumulated": Scenario(SIGMOID, [[[0, 1], [2, 3]], [[4, 5], None], [[6, 7], [10, 11]]], accumulated=2),
    },
    3: {
        "masked_micro_batches": Scenario({}, [[[0, 1], None, [2, 3]], [None, [4, 5], [6, 7]]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1], None, [2, 3, 4, 5]]]),
        "ranked": Scenario(RANKED, [[[0, 1], [8, 9], [2, 3]]]),
        "sigmoid_accumulated": Scenario(SIGMOID, [[[0, 1], None, [2, 3]], [None, [4, 5], [6, 7]]], accumulated=1),
    },
    4: {
        "masked_even": Scenario({}, [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1, 2], None, [3, 4], [5]]], texts_only=(2,)),
        "joint_named_micro_batches": Scenario(NAMED_JOINT, [[[0, 1], [2, 3], [4], None], [[6, 7], None, None, None]]),
        "ranked": Scenario(RANKED, [[[0, 1], [8, 9], None, [2, 3, 4]]]),
        "balanced": Scenario(BALANCED, [[[0, 1], [2], [8, 3], [4, 5]]]),
        "sigmoid_groups_across_ranks": Scenario(SIGMOID, [[[0], [8, 1], [16, 9], [2, 3, 24]]]),
        "sigmoid_accumulated": Scenario(SIGMOID, [[[0, 1], None, [2], [3]], [[4], [5, 6], None, [7]]], accumulated=1),
    },
}


def choices_of(ids: list[int]) -> dict[str, Any]:
    """The captions of even seeds make a choice."""
    chooses = [i % 2000 == 1 for i in ids]
    return {
        "choices": [b"AB" if c else None for c in chooses],
        "choice_targets": [[0.75, 0.25] if c else None for c in chooses],
    }


def items_of(seeds: list[int], *, texts_only: bool) -> StepItems:
    """Captions and pictures, some captions making a choice; or the captions alone, without relations."""
    if texts_only:
        ids = [1000 * s + 1 for s in seeds]
        return StepItems([0] * len(seeds), [SAMPLES.caption(s) for s in seeds], ids=ids, sides=[3] * len(seeds), **choices_of(ids))
    items: StepItems = SAMPLES.caption_pairs(seeds)
    assert items.ids is not None
    return StepItems(
        items.modalities,
        items.contents,
        items.bags,
        ids=items.ids,
        groups=items.groups,
        sides=items.sides,
        relations=items.relations,
        **choices_of(items.ids.tolist()),
    )


def joined(parts: list[StepItems]) -> StepItems:
    """The items of several ranks as one rank's."""
    offset, bag = 0, 0
    columns: dict[str, list[int]] = {"modalities": [], "bags": [], "ids": [], "groups": [], "sides": []}
    contents: list[Any] = []
    sets: dict[str, tuple[list[int], list[int], list[float]]] = {"attract": ([0], [], []), "repel": ([0], [], [])}
    for part in parts:
        count = len(part)
        columns["modalities"] += part.modalities.tolist()
        columns["bags"] += [bag + b for b in (part.bags.tolist() if part.bags is not None else range(count))]
        columns["ids"] += part.ids.tolist() if part.ids is not None else []
        columns["groups"] += part.groups.tolist() if part.groups is not None else [0] * count
        columns["sides"] += part.sides.tolist() if part.sides is not None else [0] * count
        contents += [part.content(i) for i in range(count)]
        for name, (offsets, ids, weights) in sets.items():
            edges = getattr(part.relations, name)
            starts = edges.offsets.tolist() if len(edges.offsets) else [0] * (count + 1)
            offsets += [offsets[-1] + o for o in starts[1:]]
            ids += [offset + i for i in edges.ids.tolist()]
            weights += edges.weights_or_ones().tolist()
        offset += count
        bag += count
    relations = SAMPLES.Relations(**{name: SAMPLES.Edges(*lists) for name, lists in sets.items()})
    return StepItems(
        columns["modalities"],
        contents,
        columns["bags"],
        ids=columns["ids"],
        groups=columns["groups"],
        sides=columns["sides"],
        relations=relations,
        **choices_of(columns["ids"]),
    )


def run(scenario: Scenario, mesh: Mesh | None, batches: list[PackedBatch | None]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Takes the steps; answers their numbers, the weights after them and the first step's gradients, clipped."""
    numbers: list[list[float]] = []
    tensors: dict[str, torch.Tensor] = {}
    with Trainer(replace(config_of(scenario), mesh=mesh)) as trainer:
        for _ in range(STEPS):
            for batch in batches[: scenario.accumulated]:
                trainer.accumulate(batch)
            rest = [b for b in batches[scenario.accumulated :] if b is not None]
            stats = trainer.step(rest if rest else None).stats
            numbers.append(
                [
                    stats.loss,
                    stats.contrastive_loss,
                    stats.masked_text_loss,
                    stats.masked_image_loss,
                    stats.late_interaction_loss,
                    stats.choices_loss,
                    stats.gradient_norm,
                    float(stats.truncated),
                ]
            )
            if not tensors:
                tensors |= {f"gradient.{name}": p.grad.clone() for name, p in trainer.network.named_parameters() if p.grad is not None}
        return numbers, tensors | {name: p.detach().clone() for name, p in trainer.network.named_parameters()}


def rank_batches(scenario: Scenario, rank: int) -> list[PackedBatch | None]:
    packer = Packer(SAMPLES.SHAPE)
    batches: list[PackedBatch | None] = []
    for micro_batch in scenario.deal:
        seeds = micro_batch[rank]
        batches.append(None if seeds is None else packer.pack(items_of(seeds, texts_only=rank in scenario.texts_only)))
    return batches


def world_batches(scenario: Scenario) -> list[PackedBatch | None]:
    packer = Packer(SAMPLES.SHAPE)
    return [
        packer.pack(joined([items_of(s, texts_only=r in scenario.texts_only) for r, s in enumerate(micro) if s is not None]))
        for micro in scenario.deal
    ]


def _stop_by_one_rank(mesh: Mesh, batch: PackedBatch) -> list[int | None]:
    config = config_of(Scenario({}, []))
    with Trainer(replace(config, mesh=mesh)) as trainer:
        # Rank 0's stream has three batches, rank 1's one: both take three steps and end together.
        last = trainer.fit([batch] * (3 if mesh.rank == 0 else 1))
        taken = [last.step if last is not None else None]
    with Trainer(replace(config, mesh=mesh)) as trainer:
        last = trainer.fit([batch] * 9, on_step=lambda result: not (mesh.rank == 1 and result.step == 2))
        return [*taken, last.step if last is not None else None]


def _refusals(mesh: Mesh, batch: PackedBatch) -> list[str]:
    told: list[str] = []
    config = replace(config_of(Scenario({}, [])), mesh=mesh)
    try:
        Trainer(replace(config, hidden=128 * (1 + mesh.rank)))
    except ValueError as error:
        told.append(str(error))
    with Trainer(config) as trainer:
        too_large = Packer(replace(SAMPLES.SHAPE, max_rows_per_device=5)).pack(StepItems([0], [b"x"]))
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
    scenario = WORLDS[2]["joint_accumulated"]
    config = replace(config_of(scenario), mesh=mesh)
    batches = rank_batches(scenario, mesh.rank)
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
    scenario = WORLDS[2]["balanced_micro_batches"]
    config = replace(config_of(scenario), mesh=mesh, depth=2)
    batches = [b for b in rank_batches(scenario, mesh.rank) if b is not None]
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


def main(folder: Path, world_size: int, rank: int) -> None:
    torch.set_num_threads(1)
    options = MeshOptions(directory=folder, host_domain_index=rank, host_domain_count=world_size, timeout_s=100)
    with Mesh.bootstrap(options, device="cpu") as mesh:
        out: dict[str, Any] = {}
        for name, scenario in WORLDS[world_size].items():
            numbers, weights = run(scenario, mesh, rank_batches(scenario, rank))
            out[name] = numbers
            torch.save(weights, folder / f"{name}-{rank}.pt")
        batch = Packer(SAMPLES.SHAPE).pack(items_of([0, 1], texts_only=False))
        if world_size != 3:
            out["factors"] = gradient_factors(mesh)
        if world_size == 2:
            out["sent"] = sent_in_a_step(mesh)
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


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, found in WORLDS.items() for name in found])
def test_a_world_takes_the_steps_of_one_process(world_size: int, name: str, launched: Callable[[int], Path]) -> None:
    folder = launched(world_size)
    scenario = WORLDS[world_size][name]
    expected, expected_tensors = run(scenario, None, world_batches(scenario))
    assert expected[0][-2] > 0
    # Late interaction and choices.
    assert min(expected[0][4:6]) > 0 or scenario.changes is not NAMED_JOINT
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


def test_ranks_end_together(launched: Callable[[int], Path]) -> None:
    folder = launched(2)
    # Streams of three and one batches: three steps. Rank 1 asks to stop after step 2: no rank takes a third.
    assert [_out(folder, rank, "fit") for rank in range(2)] == [[3, 2], [3, 2]]


def test_what_one_rank_cannot_take_is_told_to_all(launched: Callable[[int], Path]) -> None:
    first, second = (_out(launched(2), rank, "refusals") for rank in range(2))
    for told in (first, second):
        assert "config.hidden is 256 on rank 1 and 128 on rank 0" in told[0]
        assert told[2] == "1"
    assert "rank 1 could not take its batch" in first[1]
    assert "max_rows_per_device is 5, the trainer's 4" in second[1]


def test_a_checkpoint_that_one_rank_cannot_read_starts_no_rank(launched: Callable[[int], Path]) -> None:
    first, second = (_out(launched(2), rank, "resume")["missing"] for rank in range(2))
    assert first == "rank 1 could not read its checkpoint, see its own error: no rank starts"
    assert "nowhere: there is no such file; its folder holds" in second


def test_a_world_resumes_bit_for_bit_and_another_world_size_takes_the_window_over(launched: Callable[[int], Path]) -> None:
    folder = launched(2)
    seen = [_out(folder, rank, "resume") for rank in range(2)]
    assert all(s["same"] and s["equal"] for s in seen)
    # One process resumes what two saved in the middle of a window; ambient pairs of the open window were already scored.
    scenario = WORLDS[2]["joint_accumulated"]
    batch = world_batches(scenario)[2]
    assert batch is not None
    with Trainer(replace(config_of(scenario), resume=folder / "world.safetensors")) as trainer:
        stats = trainer.step(batch).stats
    assert stats.loss == pytest.approx(seen[0]["loss"], rel=1e-5)
    assert stats.gradient_norm == pytest.approx(seen[0]["norm"], rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
