"""Two ranks take the same steps, bit for bit, from what two ranks packed as from the samples."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]


def weights(run: Path) -> dict[str, np.ndarray]:
    with safe_open(run / "checkpoints/last.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(("weights.", "moments.", "ranks."))}


def test_two_ranks(start: Start, treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(steps=3)
    treadle("pack", "--config", path, "--out", tmp_path / "packed", "--ranks", 2, "--data.epochs", 2, "--max-batches", 4)
    packed = path.with_name("packed.toml")
    packed.write_text(path.read_text(encoding="utf-8").split("[data]")[0] + f'[data]\npacked = "{tmp_path / "packed"}"\n', encoding="utf-8")
    for settings, output, more in ((path, "from-shards", ["--data.epochs", 2]), (packed, "from-packed", [])):
        process = start("train", settings, "--output", tmp_path / output, "--workers.processes", 2, *more)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
    one, other = weights(tmp_path / "from-shards"), weights(tmp_path / "from-packed")
    # Positions of both ranks' streams are among them.
    assert one.keys() == other.keys() and all(any(name.startswith(f"ranks.{rank}.") for name in one) for rank in range(2))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
