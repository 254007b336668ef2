"""Whole steps under `TREADLE_CPU_COMPILE=1`: as near to plain ones as rounding is, and resumed bit for bit by another process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
from treadle import BatchShape, Edges, Modality, Objective, Relations, Schedule, StepItems, Trainer, TrainerConfig

mode, path, start, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
config = TrainerConfig(
    depth=1, hidden=128, batch=BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=64),
    schedule=Schedule(steps=8, learning_rate=1e-3, warmup_steps=1), objective=Objective.JOINT, device="cpu",
    resume=path if mode == "resume" else None,
)
losses = []
with Trainer(config) as trainer:
    for step in range(start, end):
        texts = [bytes(97 + (step + 3 * i + k) % 26 for k in range(20 + i)) for i in range(4)]
        items = StepItems(
            [Modality.TEXT] * 4, texts, ids=[10 * step + i for i in range(4)],
            relations=Relations(attract=Edges([0, 1, 2, 3, 4], [1, 0, 3, 2])),
        )
        losses.append(trainer.step(items).stats.loss)
        if mode == "whole" and step == start + 1:
            trainer.save(path)
    trainer.save(path + ".end")
print(json.dumps(losses))
"""


def run(folder: Path, mode: str, name: str, start: int, end: int, compiled: bool) -> list[float]:
    environment = os.environ | {
        "TREADLE_CPU_COMPILE": str(int(compiled)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, mode, str(folder / name), str(start), str(end)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))), reason="torch.compile needs a C++ compiler on the CPU"
)
def test_steps_and_their_resume(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", "a.safetensors", 0, 4, compiled=True)
    assert any((tmp_path / "inductor").rglob("*.so")), "passes were compiled"
    saved = tmp_path / "a.safetensors"
    shutil.copy(saved, tmp_path / "b.safetensors")
    assert run(tmp_path, "resume", "b.safetensors", 2, 4, compiled=True) == whole[2:]
    ends = [(tmp_path / f"{name}.safetensors.end").read_bytes() for name in "ab"]
    assert ends[0] == ends[1], "weights, moments and counters, bit for bit"
    plain = run(tmp_path, "whole", "c.safetensors", 0, 4, compiled=False)
    # Passes round otherwise (1e-6 of a tensor's largest value, test_compiled.py); four updates of 1e-3 magnify little of it.
    assert whole == pytest.approx(plain, rel=1e-4)
