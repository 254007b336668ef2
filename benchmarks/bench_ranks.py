"""Whether steps of 1 to 4 gloo ranks take what the model of docs/scaling.md says in its shape: compute, plus bytes over a bandwidth.

Ranks are processes of one thread on one machine. They share its cores, caches and memory, as GPUs do not: what a step of compute costs
there is measured by steps that all ranks take at once, each in a world of its own, and of those the slowest counts. The bandwidth of a sum
is measured by itself, at the gradient's size. The claim is the ratio of the predicted step to the measured one. The ratio of the step's
compute among W to that of one process alone, in its share of the cores, is recorded too: it is what sharing costs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORLDS = (1, 2, 3, 4)


def rank_main(folder: Path, size: int, rank: int, steps: int) -> None:
    """Takes steps, of the world and of each rank for itself in turn; rank 0 writes their times, that of a bare sum, and the bytes it sent."""
    import torch

    from treadle.model import Mesh, MeshOptions, Schedule, Trainer, TrainerConfig
    from treadle.model.mesh_traffic import gather_bytes
    from treadle.pipeline import Packer, StepItems
    from treadle.shape import BatchShape, Objective

    torch.set_num_threads(1)
    shape = BatchShape(max_rows_per_device=8, max_segments_per_device=64, max_columns_per_row=256)
    texts = [bytes(97 + (31 * i + j) % 26 for j in range(60)) for i in range(24)]
    batch = Packer(shape).pack(StepItems([0] * len(texts), texts, bags=[i // 2 for i in range(len(texts))]))
    options = MeshOptions(directory=folder, host_domain_index=rank, host_domain_count=size)
    with Mesh.bootstrap(options, device="cpu") as mesh:
        config = TrainerConfig(depth=4, hidden=256, batch=shape, schedule=Schedule(steps=1000), objective=Objective.JOINT, device="cpu")
        with Trainer(replace(config, mesh=mesh)) as trainer, Trainer(config) as alone:

            def timed(which: Trainer) -> float:
                mesh.world.exchange([0])
                begin = time.perf_counter()
                which.step(batch)
                took_us = int(1e6 * (time.perf_counter() - begin))
                return max(row[0] for row in mesh.world.exchange([took_us])) / 1e6

            for which in (trainer, alone, trainer, alone):
                timed(which)
            times: list[float] = []
            apart: list[float] = []
            sent = 0
            for _ in range(steps):
                apart.append(timed(alone))
                before = mesh.world.bytes_sent
                times.append(timed(trainer))
                sent += mesh.world.bytes_sent - before
            flat = torch.zeros(sum(p.numel() for p in trainer.network.parameters()))
            sums: list[float] = []
            for _ in range(steps):
                mesh.world.exchange([0])
                begin = time.perf_counter()
                mesh.world.sum_gradients(flat)
                sums.append(time.perf_counter() - begin)
            if rank == 0:
                # Two exchanges of one number are the clock's, not the step's.
                clock = 2 * gather_bytes(size, 8)
                (folder / "out.json").write_text(json.dumps({"step": times, "apart": apart, "sum": sums, "sent": sent / steps - clock}))


def run(size: int, steps: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", folder, str(size), str(rank), str(steps)], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            for rank in range(size)
        ]
        if any([rank.wait() for rank in ranks]):
            raise RuntimeError(f"a world of {size} failed")
        found: dict[str, list[float]] = json.loads((Path(folder) / "out.json").read_text())
        return found


def main() -> None:
    if "--rank" in sys.argv:
        folder, *numbers = sys.argv[2:]
        rank_main(Path(folder), *map(int, numbers))
        return
    sys.path.insert(0, str(HERE))
    from record import Row, append

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--full", action="store_true", help="40 steps")
    given = parser.parse_args()
    steps = 40 if given.full else given.steps
    cores = len(os.sched_getaffinity(0))
    alone = 0.0
    for size in WORLDS:
        found = run(size, steps)
        apart = statistics.median(found["apart"])
        alone = alone or apart
        # Cores are shared, by the sum's thread too, so that nothing of it hides once they are all busy.
        hidden = 2 / 3 * apart if size < cores else 0.0
        predicted = apart + max(0.0, statistics.median(found["sum"]) - hidden)
        shape = {"ranks": size, "cores": cores, "depth": 4, "hidden": 256}
        append(Row(op="ranks", impl="Trainer.step", shape=shape, metric="time", unit="s", values=found["step"]))
        append(
            Row(
                op="ranks", impl="compute among all", baseline="one process' share of the cores", shape=shape, metric="time ratio", unit="x",
                values=[seconds / (alone * max(1.0, size / cores)) for seconds in found["apart"]],
            )
        )  # fmt: skip
        if size > 1:
            append(Row(op="ranks", impl="sum of the gradient", shape=shape, metric="time", unit="s", values=found["sum"]))
            append(Row(op="ranks", impl="Trainer.step", shape=shape, metric="sent a step", unit="MB", values=[found["sent"] / 1e6]))  # type: ignore[operator]
            append(
                Row(
                    op="ranks", impl="model", baseline="Trainer.step", shape=shape, metric="time ratio", unit="x",
                    values=[predicted / seconds for seconds in found["step"]],
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
