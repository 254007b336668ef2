"""Ranks killed at random moments: a launcher starts all again, and the run ends with the same weights.

`TREADLE_KILLS` sets how many kills one run takes; `make soak` sets 20, under Treadle's own launcher and under `torchrun --max-restarts`.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

KILLS = int(os.environ.get("TREADLE_KILLS", "2"))
STEPS = 6 + 2 * KILLS

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


def latest(output: Path) -> str:
    try:
        return (output / "checkpoints/LATEST").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("launcher", [OWN, *([TORCHRUN] if KILLS > 2 else [])], ids=lambda launcher: str(launcher[1]))
def test_a_run_whose_ranks_are_killed_ends_with_the_same_weights(
    tmp_path: Path,
    launcher: list[str],
    text_run: Callable[[Path, int, str], Path],
    check_same_end: Callable[[Path, Path, int], None],
) -> None:
    config = text_run(tmp_path, STEPS, f"[workers]\nprocesses = 2\nmax_restarts = {2 * KILLS + 2}\n")
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
    check_same_end(tmp_path / "killed", tmp_path / "whole", STEPS)
