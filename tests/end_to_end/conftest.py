"""A small four-modality dataset, a smaller one of texts, towers of one block, and ways to run the command line on them."""

import io
import logging
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from treadle.launch.cli import main
from treadle.launch.demo_data import DatasetPlan, write_dataset

CONFIG = """
output = "{output}"
log_every = 1
save_every = 1000
evaluate_every = {evaluate_every}

[trainer]
depth = 1
hidden = 128
objective = "joint"
device = "cpu"

[trainer.batch]
max_rows_per_device = 6
max_segments_per_device = 48
max_columns_per_row = 64
image = {{ patch_side = 32, channels = 3 }}
video = {{ patch_side = 16, tube_frames = 4 }}
audio = {{ chunk_samples = 400, sample_rate = 8000 }}

[trainer.schedule]
steps = {steps}
learning_rate = 1e-3

[data]
sources = "{shards}/train-*.tar"
shuffle = 20
window = 2

[held_out]
sources = "{shards}/held-out-*.tar"
"""

TEXT_CONFIG = """
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
sources = "{folder}/shard-*.tar"
lanes = 4
shuffle = 8
threads = 1
processes = 0
"""


@pytest.fixture(scope="session")
def text_run() -> Callable[[Path, int, str], Path]:
    """`text_run(folder, steps, tables)` writes shards of questions and answers and a run on them that saves every step; answers its TOML file."""

    def write(folder: Path, steps: int, tables: str) -> Path:
        for shard in range(4):
            with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
                for sample in range(40):
                    for field, text in (("a.txt", f"question {sample} of {shard}"), ("b.txt", f"answer {sample * 7} to {shard}")):
                        info = tarfile.TarInfo(f"{sample:03d}.{field}")
                        info.size = len(text)
                        tar.addfile(info, io.BytesIO(text.encode()))
        path = folder / "run.toml"
        path.write_text(TEXT_CONFIG.format(steps=steps, folder=folder) + tables)
        return path

    return write


@pytest.fixture(scope="session")
def check_same_end() -> Callable[[Path, Path, int], None]:
    """`check_same_end(output, other, steps)`: two runs of two ranks ended after so many steps, with the same last checkpoint."""

    def tensors(output: Path, steps: int) -> dict[str, np.ndarray]:
        with safe_open(output / "checkpoints/last.safetensors", "np") as file:
            assert file.metadata()["step"] == str(steps) and file.metadata()["world_size"] == "2"
            return {name: file.get_tensor(name) for name in file.keys()}

    def check(output: Path, other: Path, steps: int) -> None:
        found, expected = tensors(output, steps), tensors(other, steps)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)

    return check


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 4 training shards (60 samples) and 1 held-out one (18 samples)."""
    folder = tmp_path_factory.mktemp("shards")
    plan = DatasetPlan(
        pictures=30,
        clips=14,
        sounds=16,
        held_out_pictures=8,
        held_out_clips=4,
        held_out_sounds=6,
        samples_per_shard=18,
        second_language_share=0.5,
    )
    write_dataset(folder, plan)
    return folder


@pytest.fixture
def config(tmp_path: Path, shards: Path) -> Callable[..., Path]:
    """Writes a configuration: `config(steps=4)` answers its path; the run goes to `tmp_path / "run"`."""

    def write(steps: int = 4, output: str | Path | None = None, evaluate_every: int = 0, extra: str = "") -> Path:
        path = tmp_path / "run.toml"
        text = CONFIG.format(output=output or tmp_path / "run", steps=steps, evaluate_every=evaluate_every, shards=shards)
        path.write_text(text + extra, encoding="utf-8")
        return path

    return write


@pytest.fixture
def environment() -> dict[str, str]:
    """One thread, so that sums come in one order; and none of a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_", "TREADLE_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def treadle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str]
) -> Callable[..., Done]:
    """Runs `treadle ARGUMENTS` in this process, on one thread, in `tmp_path`; `code` is the exit code that is expected."""
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()

    def run(*arguments: object, code: int = 0) -> Done:
        capsys.readouterr()
        torch.set_num_threads(1)
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(argument) for argument in arguments])
        finally:
            torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        assert ended.value.code == code, f"exit {ended.value.code}\n{out}\n{err}"
        return Done(code, out, err)

    return run


@pytest.fixture
def signal_at_step() -> Iterator[Callable[[int, signal.Signals], None]]:
    """`signal_at_step(3, SIGTERM)` sends this process a signal when a run tells of its third step."""
    log = logging.getLogger("treadle.launch.training")
    level, handlers = log.level, list(log.handlers)

    def arrange(step: int, number: signal.Signals) -> None:
        class Sender(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.getMessage().startswith(f"step {step}:"):
                    log.removeHandler(self)
                    signal.raise_signal(number)

        log.setLevel(logging.INFO)
        log.addHandler(Sender())

    yield arrange
    log.setLevel(level)
    log.handlers = handlers


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts `treadle -v ARGUMENTS` as a process of its own and does not wait."""

    def begin(*arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "treadle.launch", "-v", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)

    return begin
