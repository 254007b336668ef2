"""Sharded blocks take the steps that one process takes, and their checkpoints are everybody's.

Ranks are processes that run this file as a script; one launch for two ranks that shard, one for four in two groups.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.model.config import MeshOptions, TrainerConfig
from treadle.model.mesh import Mesh, World
from treadle.model.parallel import shard_ranks
from treadle.model.trainer import Trainer


def _scenarios() -> Any:
    spec = importlib.util.spec_from_file_location("rank_scenarios", Path(__file__).with_name("rank_scenarios.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANKS = _scenarios()

SCENARIOS = {
    "shard": {
        "joint_named_none": RANKS.Scenario(RANKS.NAMED_JOINT, [[None, [0, 1, 2, 3]]]),
        "sigmoid_micro_batches": RANKS.Scenario(RANKS.SIGMOID, [[[0, 1], [2, 3]], [[4, 5], None]]),
        "ranked_recomputed": RANKS.Scenario({**RANKS.RANKED, "recompute_blocks": True}, [[[0, 1, 2, 3], [8, 9]]]),
        # Rank 1 has texts alone, then nothing: it runs blocks backward for pictures that it does not have.
        "joint_accumulated": RANKS.Scenario(RANKS.NAMED_JOINT, [[[0, 1], [2, 3]], [[4, 5], None]], texts_only=(1,), accumulated=1),
    },
    "hybrid": {
        "masked_uneven": RANKS.Scenario({"shard_ranks": 2}, [[[0, 1], None, [2, 3, 4], [5]]]),
        "sigmoid_accumulated": RANKS.Scenario(
            {**RANKS.SIGMOID, "shard_ranks": 2}, [[[0, 1], None, [2], [3]], [[4], [5, 6], None, [7]]], accumulated=1
        ),
    },
}
WORLD = {"shard": 2, "hybrid": 4}


def scenario_of(parallel: str, name: str) -> Any:
    scenario = SCENARIOS[parallel][name]
    # Two blocks, so that one is gathered while another runs.
    return replace(scenario, changes={**scenario.changes, "depth": 2})


def take(trainer: Trainer, scenario: Any, batches: list[Any], open_path: Path | None = None) -> list[float]:
    """One step, of which some micro-batches are accumulated; the open window can be saved."""
    for batch in batches[: scenario.accumulated]:
        trainer.accumulate(batch)
    if open_path is not None:
        trainer.save(open_path)
    return end_window(trainer, scenario, batches)


def end_window(trainer: Trainer, scenario: Any, batches: list[Any]) -> list[float]:
    stats = trainer.step([b for b in batches[scenario.accumulated :] if b is not None] or None).stats
    return [
        stats.loss,
        stats.contrastive_loss,
        stats.masked_text_loss,
        stats.masked_image_loss,
        stats.late_interaction_loss,
        stats.choices_loss,
        stats.gradient_norm,
    ]


def main(folder: Path, parallel: str, rank: int) -> None:
    torch.set_num_threads(1)
    options = MeshOptions(directory=folder, host_domain_index=rank, host_domain_count=WORLD[parallel], timeout_s=200)
    out: dict[str, Any] = {}
    with Mesh.bootstrap(options, device="cpu") as mesh:
        for name in SCENARIOS[parallel]:
            scenario = scenario_of(parallel, name)
            config = replace(RANKS.config_of(scenario), mesh=mesh, parallel=parallel)
            batches = RANKS.rank_batches(scenario, rank)
            with Trainer(config) as trainer:
                held = sum(p.to_local().numel() for n, p in trainer.network.named_parameters() if n.startswith("tower.blocks."))  # type: ignore[attr-defined]
                whole = sum(p.numel() for n, p in trainer.network.named_parameters() if n.startswith("tower.blocks."))
                seen = [take(trainer, scenario, batches) for _ in range(2)]
                seen.append(take(trainer, scenario, batches, folder / f"{name}.safetensors"))
            # Its own checkpoint, and a whole run's, go on sharded, in the middle of a window.
            resumed: list[list[float]] = []
            for path in (folder / f"{name}.safetensors", folder / f"one-{name}.safetensors"):
                with Trainer(replace(config, resume=path)) as trainer:
                    resumed.append(end_window(trainer, scenario, batches))
            out[name] = {"seen": seen, "held": held / whole, "resumed": resumed}
        mesh.world.exchange([0])
    (folder / f"out-{rank}.json").write_text(json.dumps(out))


@pytest.mark.parametrize("parallel", ["shard", "hybrid"])
def test_sharded_blocks_take_the_steps_of_one_process(parallel: str, tmp_path: Path) -> None:
    expected: dict[str, list[list[float]]] = {}
    for name in SCENARIOS[parallel]:
        scenario = scenario_of(parallel, name)
        with Trainer(RANKS.config_of(scenario)) as trainer:
            expected[name] = [take(trainer, scenario, RANKS.world_batches(scenario)) for _ in range(2)]
            expected[name].append(take(trainer, scenario, RANKS.world_batches(scenario), tmp_path / f"one-{name}.safetensors"))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), parallel, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD[parallel])
    ]
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    for rank in range(WORLD[parallel]):
        out = json.loads((tmp_path / f"out-{rank}.json").read_text())
        for name, steps in expected.items():
            for ours, theirs in zip(out[name]["seen"], steps, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), name
            for resumed in out[name]["resumed"]:
                assert resumed == pytest.approx(steps[2], rel=1e-5, abs=1e-6), name
            # Of two ranks that share a copy each holds half.
            assert out[name]["held"] == pytest.approx(0.5, abs=0.01)
    for name, steps in expected.items():
        scenario = scenario_of(parallel, name)
        with Trainer(replace(RANKS.config_of(scenario), resume=tmp_path / f"{name}.safetensors")) as trainer:
            assert end_window(trainer, scenario, RANKS.world_batches(scenario)) == pytest.approx(steps[2], rel=1e-5, abs=1e-6)


def test_a_world_that_does_not_divide_is_refused() -> None:
    world = World()
    world.size = 6
    config = RANKS.config_of(RANKS.Scenario({"parallel": "hybrid", "shard_ranks": 4}, []))
    with pytest.raises(ValueError, match="shard_ranks is 4: it must divide the world's 6 ranks"):
        shard_ranks(config, world, 1)
    # Three machines of two ranks each.
    assert shard_ranks(replace(config, shard_ranks=0), world, 3) == 2
    assert shard_ranks(replace(config, parallel="shard"), world, 3) == 6


def test_a_kind_of_parallel_that_is_none_is_refused() -> None:
    config: TrainerConfig = RANKS.config_of(RANKS.Scenario({}, []))
    with pytest.raises(ValueError, match="parallel is 'sliced': it must be 'replicate', 'shard' or 'hybrid'"):
        replace(config, parallel="sliced")  # type: ignore[arg-type]  # what a user may try


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
