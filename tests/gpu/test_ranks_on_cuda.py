"""Two ranks on two GPUs: the step with its NCCL collectives captured in a graph, against the same launched call by call.

As a script, `test_ranks_on_cuda.py FOLDER RANK DEVICE`, one rank. On the CPU the ranks talk by gloo and nothing is captured: this shows that the
script runs where two GPUs are not at hand; the order of collectives in a graph is tested in `tests/kernels/triton/test_fixed_step.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.model.config import MeshOptions, Schedule, TrainerConfig
from treadle.model.device_step import VARIABLE
from treadle.model.mesh import Mesh
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, Modality, Objective

SHAPE = BatchShape(max_rows_per_device=4, max_segments_per_device=32, max_columns_per_row=128)
STEPS = 8

pytestmark = pytest.mark.gpu


def batch_of(step: int, rank: int) -> PackedBatch | None:
    """Texts in attracting pairs, another number on each rank; rank 1 has none in step 5."""
    if (step, rank) == (5, 1):
        return None
    count = 8 + 4 * rank
    texts = [bytes((3 * step + 5 * i + j * j + rank) % 200 for j in range(9 + (7 * i) % 30)) for i in range(count)]
    items = StepItems(
        [Modality.TEXT] * count,
        texts,
        ids=[1000 * step + 100 * rank + i for i in range(count)],
        relations=Relations(attract=Edges(list(range(count + 1)), [i ^ 1 for i in range(count)])),
    )
    return Packer(SHAPE).pack(items)


def run(mode: str, mesh: Mesh) -> dict[str, Any]:
    os.environ[VARIABLE] = mode
    config = TrainerConfig(
        depth=2,
        hidden=256,
        batch=SHAPE,
        schedule=Schedule(steps=100, learning_rate=1e-3, warmup_steps=2),
        objective=Objective.JOINT,
        precision="bf16" if mesh.device.type == "cuda" else "fp32",
        mesh=mesh,
    )
    with Trainer(config) as trainer:
        before = trainer.world.bytes_sent
        losses = [trainer.step(batch_of(step, mesh.rank)).stats.loss for step in range(STEPS)]
        fixed = trainer._runner._fixed
        weights = trainer._runner.parameters.weights.view(torch.int32).long().sum()
        return {
            "losses": losses,
            "weights": int(weights),
            "captured": fixed is not None and fixed._graph is not None,
            "sent": trainer.world.bytes_sent - before,
        }


def main(folder: Path, rank: int, device: str) -> None:
    torch.set_num_threads(1)
    options = MeshOptions(host_domain_index=rank, host_domain_count=2, directory=folder / "meet", timeout_s=120, collective_timeout_s=60)
    with Mesh.bootstrap(options, device=None if device == "cuda" else device) as mesh:
        found = [run(mode, mesh) for mode in ("graph", "eager")]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"))],
)
def test_ranks_capture_their_collectives(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", __file__, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), device], **pipes) for rank in range(2)]  # type: ignore[call-overload]
    told = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert [seen["captured"] for seen in (*one, *other)] == [device == "cuda", False] * 2
    # A sum of two ranks is the same whatever the order, so graph and eager agree to the last bit.
    assert one[0]["losses"] == other[0]["losses"] == one[1]["losses"] and len(set(one[0]["losses"])) == STEPS
    assert one[0]["weights"] == other[0]["weights"] == one[1]["weights"]
    assert one[0]["sent"] == one[1]["sent"] > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
