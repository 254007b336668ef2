"""Ranks killed at random moments: a launcher starts all again, and the run ends with the same weights.

`TREADLE_KILLS` sets how many kills one run takes; `make soak` sets 20, under Treadle's own launcher and under `torchrun --max-restarts`.
"""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

KILLS = int(os.environ.get("TREADLE_KILLS", "2"))
STEPS = 6 + 2 * KILLS

CONFIG = """
save_every = 1
keep = 2
log_every = 1
[trainer]
depth = 1
hidden = 128
device = "cpu"
objective = "joint"
batch = {{ max_rows_per_device = 2, max_segments_per_device = 8, max_columns_per_row = 64 }}
schedule = {{ steps = {steps}, learning_rate = 0.001, warmup_steps = 1 }}
[data]
sources = "{shards}"
lanes = 4
shuffle = 8
threads = 1
processes = 0
[workers]
processes = 2
max_restarts = {restarts}
"""


def write_shards(folder: Path) -> str:
    for shard in range(4):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for sample in range(40):
                for field, text in (("a.txt", f"question {sample} of {shard}"), ("b.txt", f"answer {sample * 7} to {shard}")):
                    info = tarfile.TarInfo(f"{sample:03d}.{field}")
                    data = text.encode()
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return str(folder / "shard-{0..3}.tar")


OWN = ["-m", "treadle.launch"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(2 * KILLS + 2), *OWN]


def start(launcher: list[str], config: Path, output: Path, log: Path) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", *launcher, "train", str(config), "--output", str(output)],
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def ranks_of(launcher: int) -> list[int]:
    """The processes that the launcher has started as ranks."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            # After the name in parentheses: state, parent.
            is_child = entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(launcher)
            if is_child and b"\0RANK=" in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def tensors(output: Path) -> dict[str, np.ndarray]:
    with safe_open(output / "checkpoints/last.safetensors", "np") as file:
        assert file.metadata()["step"] == str(STEPS) and file.metadata()["world_size"] == "2"
        return {name: file.get_tensor(name) for name in file.keys()}


def latest(output: Path) -> str:
    try:
        return (output / "checkpoints/LATEST").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("launcher", [OWN, *([TORCHRUN] if KILLS > 2 else [])], ids=lambda launcher: str(launcher[1]))
def test_a_run_whose_ranks_are_killed_ends_with_the_same_weights(tmp_path: Path, launcher: list[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(steps=STEPS, shards=write_shards(tmp_path), restarts=2 * KILLS + 2))
    undisturbed = start(OWN, config, tmp_path / "whole", tmp_path / "whole.log")
    assert undisturbed.wait(timeout=280) == 0, (tmp_path / "whole.log").read_text()

    draw = random.Random(8)
    process = start(launcher, config, tmp_path / "killed", tmp_path / "killed.log")
    killed: set[int] = set()
    seen = ""
    while len(killed) < KILLS and process.poll() is None:
        # After something new was saved, so that the run gets on; then at any moment of a step or a save.
        while process.poll() is None and latest(tmp_path / "killed") == seen:
            time.sleep(0.01)
        seen = latest(tmp_path / "killed")
        time.sleep(draw.random() * 0.3)
        ranks = [rank for rank in ranks_of(process.pid) if rank not in killed]
        if ranks:
            victim = draw.choice(sorted(ranks))
            # It may have ended meanwhile, with the one that was killed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
    code = process.wait(timeout=280 + 60 * KILLS)
    log = (tmp_path / "killed.log").read_text()
    assert code == 0, log
    assert len(killed) == KILLS and log.count("going on after step") >= 1
    expected, found = tensors(tmp_path / "whole"), tensors(tmp_path / "killed")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
