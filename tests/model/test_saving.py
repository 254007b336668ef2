"""Saves are whole and of one moment: killed with SIGKILL at any time, and beside a thread that trains on."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.model.checkpoint import read_checkpoint
from treadle.model.config import Schedule, TrainerConfig
from treadle.model.trainer import Trainer
from treadle.pipeline import PackedBatch, StepItems

KILLS = 100

SCRIPT = """
import os, random, signal, sys
from pathlib import Path

import torch

from treadle.model.checkpoint import CheckpointContent, RankState, read_checkpoint
from treadle.model.config import Schedule, TrainerConfig
from treadle.model.checkpoint_folder import CheckpointFolder, find_checkpoint
from treadle.model.deferred import settled
from treadle.model.mesh import World
from treadle.shape import BatchShape

folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
config = TrainerConfig(depth=1, hidden=128, batch=BatchShape(max_rows_per_device=1, max_segments_per_device=4, max_columns_per_row=64), schedule=Schedule(steps=10), device="cpu")


def content(step: int) -> CheckpointContent:
    def group() -> dict[str, torch.Tensor]:
        return {f"p{i}": torch.full((3000,), float(step)) for i in range(8)}

    return CheckpointContent(
        config, step, group(), group(), group(), torch.tensor(float(step)), torch.zeros(4, dtype=torch.int64), [RankState(b"stream")]
    )


class Writer:
    world = World()
    steps_done = 0
    pipe = -1

    def save(self, path, *, wait=True):
        content(self.steps_done).write(path, on_tensor=lambda done, total: os.write(self.pipe, b"."))
        return settled(None)


def whole(path: Path) -> int:
    # Raises where the file is not whole; all of it is of one step.
    read = read_checkpoint(path)
    for group in (read.weights, read.first, read.second):
        assert len(group) == 8 and all(bool((t == read.step).all()) for t in group.values()), path
    return read.step


writer, chance, newest, changed = Writer(), random.Random(seed), 1, 0
writer.steps_done, writer.pipe = 1, os.open(os.devnull, os.O_WRONLY)
CheckpointFolder(folder, keep=2).save(writer)
for kill in range(kills):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        writer.pipe = writes
        checkpoints = CheckpointFolder(folder, keep=2)
        for writer.steps_done in range(newest + 1, newest + 1000):
            checkpoints.save(writer)
        os._exit(0)
    os.close(writes)
    # 26 tensors a save: the kill falls into the first, between two, or into the second or third.
    for _ in range(chance.randrange(70)):
        assert os.read(reads, 1)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reads)
    for path in folder.glob("*.safetensors"):
        at = whole(path)
        assert not path.name.startswith("step-") or at == int(path.name[5:13])
    step = whole(find_checkpoint(folder))
    assert step >= newest, (step, newest)
    changed += step > newest
    newest = step
writer.steps_done, writer.pipe = newest + 1, os.open(os.devnull, os.O_WRONLY)
CheckpointFolder(folder, keep=2).save(writer)
left = sorted(p.name for p in folder.iterdir())
print(changed, len(left), *left)
"""


def kills(folder: Path, count: int, seed: int) -> tuple[int, list[str]]:
    """Kills a writer `count` times and checks every file after each; answers how many kills met a newer checkpoint, and what is left."""
    command = [sys.executable, "-P", "-c", SCRIPT, str(folder), str(count), str(seed)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    changed, _, *left = ran.stdout.split()
    return int(changed), left


@pytest.mark.parametrize("seed", [0])
def test_a_hundred_kills(seed: int, tmp_path: Path) -> None:
    """Each kill falls on a moment that is counted in tensors written, so all moments of a save come up."""
    changed, left = kills(tmp_path / "checkpoints", KILLS, seed)
    # Both outcomes came up: the old file stayed, the new one was there.
    assert 10 < changed < KILLS - 10
    visible = [name for name in left if not name.startswith(".")]
    assert visible[0] == "LATEST" and visible[1] == "last.safetensors" and len(visible) == 4


def test_files_saved_beside_a_training_thread_are_of_one_step_each(
    tmp_path: Path,
    tiny: Callable[..., TrainerConfig],
    pairs: Callable[[list[int]], StepItems],
    packed: Callable[[StepItems], PackedBatch],
) -> None:
    """One thread trains without a pause, another saves: each file holds the weights, moments and step of one moment."""
    batches = [packed(pairs([i, i + 3])) for i in range(8)]
    config = tiny(schedule=Schedule(steps=1000))
    paths = [tmp_path / f"{i}.safetensors" for i in range(6)]
    with Trainer(config) as trainer:
        saved_all = threading.Event()

        def train() -> None:
            at = 0
            while not saved_all.is_set():
                trainer.step(batches[at % len(batches)])
                at += 1

        thread = threading.Thread(target=train)
        thread.start()
        try:
            for path in paths:
                trainer.save(path, wait=False)
        finally:
            saved_all.set()
            thread.join()
    steps = [read_checkpoint(path).step for path in paths]
    assert steps == sorted(steps)
    with Trainer(config) as reference:
        for path, step in zip(paths, steps, strict=True):
            while reference.steps_done < step:
                reference.step(batches[reference.steps_done % len(batches)])
            again = tmp_path / "again.safetensors"
            reference.save(again)
            assert again.read_bytes() == path.read_bytes()
