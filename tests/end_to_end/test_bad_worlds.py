"""What can be wrong with the ranks of a run, found before the first step: every rank says so within the time-out, and ends.

Ranks are `treadle train` under the variables that torchrun sets.
"""

import io
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CONFIG = """
output = "{folder}/run"
[trainer]
depth = 1
hidden = 128
device = "cpu"
batch = {{ max_rows_per_device = 1, max_segments_per_device = 4, max_columns_per_row = 64 }}
schedule = {{ steps = 1 }}
[data]
sources = "{folder}/shard.tar"
lanes = 4
threads = 1
processes = 0
[mesh]
timeout_s = 60
"""

NEWER = "import treadle; treadle.__version__ = '99.0'; from treadle.launch.cli import main; main()"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for sample in range(8):
            info = tarfile.TarInfo(f"{sample}.txt")
            info.size = 8
            tar.addfile(info, io.BytesIO(f"sample {sample}".encode()))
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told(config: Path, size: int, ranks: list[tuple[int, list[str]]], program: dict[int, str] | None = None) -> list[str]:
    """What each of these processes says at its end, which is a bad one: the rank that it comes as, and its flags."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", *(["-c", program[place]] if program and place in program else ["-m", "treadle.launch"]), "train", str(config), *flags],
            env={**kept, **shared, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place, (rank, flags) in enumerate(ranks)
    ]  # fmt: skip
    said: list[str] = []
    for process in processes:
        output = process.communicate(timeout=240)[0]
        assert process.returncode in (1, 2), output
        lines = [line for line in output.splitlines() if line.startswith("treadle: ")]
        assert len(lines) == 1 and "Traceback" not in output, output
        said += lines
    assert not list(config.parent.glob("run/checkpoints/*"))
    return said


def test_settings_and_software_that_differ(config: Path) -> None:
    for line in told(config, 2, [(0, []), (1, ["--data.seed", "5", "--save_every", "7"])], {1: NEWER}):
        assert "ranks disagree: data.seed is 5 on rank 1 and 0 on rank 0; save_every is 7 on rank 1 and 1000 on rank 0; " in line
        assert "versions.treadle is '99.0' on rank 1" in line


def test_more_ranks_than_lanes(config: Path) -> None:
    for line in told(config, 2, [(0, ["--data.lanes", "1"]), (1, ["--data.lanes", "1"])]):
        assert "lanes is 1 and world_size is 2" in line


def test_a_rank_that_comes_twice(config: Path) -> None:
    for line in told(config, 3, [(0, []), (1, []), (1, [])]):
        assert "two processes came as rank 1" in line and "start each rank once" in line


def test_ranks_that_do_not_come(config: Path) -> None:
    flags = ["--mesh.timeout_s", "2"]
    [alone] = told(config, 3, [(0, flags)])
    assert "2 of 3 ranks did not come within 2 s: rank 1, 2; check that they run" in alone
    [lost] = told(config, 3, [(2, flags)])
    assert "rank 2 found no store at 127.0.0.1:" in lost and "within 2 s: check that rank 0 runs there" in lost
