"""`treadle train` on real encoded files: from shards to a saved model, stopped and resumed, on one rank and on two."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from treadle.pipeline.ledger import STAGES

Run = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]


def rows(output: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    with safe_open(checkpoint, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(("weights.", "moments.", "ranks."))}


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        # After the name in parentheses: state, parent.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(process):
                found.append(int(entry.name))
    return found


def stop_at(process: "subprocess.Popen[str]", step: int, number: signal.Signals) -> tuple[str, str]:
    """Sends a signal to a run's every process once it tells of a step, as a scheduler does; answers all that it printed."""
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if f"step {step}:" in line:
            for one in (process.pid, *children(process.pid)):
                os.kill(one, number)
            break
    out, err = process.communicate(timeout=240)
    return out, "".join(seen) + err


def test_a_run_leaves_everything_it_promises(
    treadle: Run, config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a terminal progress is told now and then: here, after each step.
    monkeypatch.setattr("treadle.launch.report.Bar.LINE_S", 0.0)
    done = treadle("train", config(steps=4, evaluate_every=2))
    output = tmp_path / "run"
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert {
        "config.toml",
        "metrics.jsonl",
        "checkpoints/LATEST",
        "checkpoints/last.safetensors",
        "checkpoints/best.safetensors",
        "checkpoints/best.json",
        "checkpoints/step-00000004.safetensors",
    } <= names
    assert any(name.startswith("tensorboard/events") for name in names)
    assert not any(".part" in name for name in names)
    assert (output / "checkpoints/LATEST").read_text() == "step-00000004.safetensors\n"

    trained = rows(output)
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    for name in (
        "loss",
        "contrastive_loss",
        "masked_text_loss",
        "masked_image_loss",
        "masked_video_loss",
        "masked_audio_loss",
        "tokens_per_s",
        "step_s",
        "fill",
    ):
        assert sum(row[name] for row in trained) > 0, name  # a batch may lack a modality
    # What the stream's stages do, and which of them the others wait for.
    for row in trained:
        assert row["limiting_stage"] in STAGES and row["in_flight_bytes"] >= 0
        for stage in ("read", "decode", "pack"):
            assert row[f"{stage}_busy_s"] > 0 and row[f"{stage}_bytes_per_s"] > 0
            assert row[f"{stage}_wait_input_s"] >= 0 and row[f"{stage}_wait_room_s"] >= 0
    assert re.search(r"training: 3/4 .* loss .* tokens/s, (reading|decoding|packing|the training step) limits", done.err)
    held_out = rows(output, "held_out")
    assert [row["step"] for row in held_out] == [2, 4]
    assert 0 <= held_out[0]["text_to_image/recall_at_1"] <= 1
    assert "image → text" in done.out and "recall@1" in done.out
    assert f"treadle train --resume {output}" in done.out
    assert "warmup_steps" in (output / "config.toml").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_resumed_is_the_same_run(
    treadle: Run, config: Callable[..., Path], signal_at_step: Callable[[int, signal.Signals], None], tmp_path: Path, number: signal.Signals
) -> None:
    path = config(steps=6)
    treadle("train", path, "--output", tmp_path / "whole", "--auto-resume")  # there is nothing yet to go on from
    signal_at_step(3, number)
    done = treadle("train", path, "--output", tmp_path / "halves")
    command = f"treadle train --resume {tmp_path / 'halves'}"
    assert f"stopped by {number.name} after step 3" in done.out and command in done.out
    assert rows(tmp_path / "halves")[-1]["step"] == 3

    assert "going on after step 3 of 6, from" in treadle(*command.split()[1:]).err
    assert [row["step"] for row in rows(tmp_path / "halves")] == [1, 2, 3, 4, 5, 6]
    whole, halves = weights(tmp_path / "whole/checkpoints/last.safetensors"), weights(tmp_path / "halves/checkpoints/last.safetensors")
    assert whole.keys() == halves.keys()
    assert any(name.startswith("ranks.0.state.") for name in whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, halves[name], err_msg=name)
    for one, other in zip(rows(tmp_path / "whole"), rows(tmp_path / "halves"), strict=True):
        assert one["loss"] == other["loss"]


def test_two_ranks_train_stop_and_resume_sharded(treadle: Run, start: Start, config: Callable[..., Path], tmp_path: Path) -> None:
    process = start("train", config(steps=40), "--workers.processes", 2)
    out, err = stop_at(process, 2, signal.SIGTERM)
    assert process.returncode == 0, out + err
    assert "stopped by SIGTERM after step" in out and "treadle train --resume" in out
    stopped_at = rows(tmp_path / "run")[-1]["step"]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{stopped_at:08d}.safetensors"]
    process = start("train", "--resume", tmp_path / "run", "--steps", stopped_at + 2, "--trainer.parallel", "shard")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, stopped_at + 3))
    with safe_open(tmp_path / "run/checkpoints/last.safetensors", "np") as file:
        assert file.metadata()["world_size"] == "2"
    # Held-out samples ran through a tower of which each rank holds half. One process that holds all of it says the same.
    treadle("train", config(), "--resume", tmp_path / "run", "--output", tmp_path / "one", "--steps", stopped_at + 2)
    [sharded], [whole] = ([row for row in rows(tmp_path / run, "held_out") if row["step"] == stopped_at + 2] for run in ("run", "one"))
    assert sharded.keys() == whole.keys() and "text_to_image/recall_at_1" in whole
    for name in whole.keys() - {"kind", "time_s", "evaluation_s"}:
        assert sharded[name] == pytest.approx(whole[name], rel=1e-5), name


def test_a_restart_goes_on_from_the_newest_checkpoint_whatever_the_first_start_was_given(
    treadle: Run, config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config()
    treadle("train", path, "--steps", 1)
    first = tmp_path / "first.safetensors"
    first.write_bytes((tmp_path / "run/checkpoints/last.safetensors").read_bytes())
    treadle("train", path, "--resume", tmp_path / "run", "--steps", 3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "going on after step 3 of 4" in treadle("train", path, "--resume", first, "--steps", 4).err
    finished = treadle("train", "--resume", tmp_path / "run", "--steps", 2).err
    assert "is at step 4: the run of 2 steps is finished already; to go on, ask for more than that, as with --steps 8" in finished
    assert "going on" not in finished


def test_under_torchrun_it_is_a_rank(config: Callable[..., Path], environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "treadle.launch",
        "train",
        str(config(steps=2)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained to step 2") == 1
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_rank_that_fails_ends_the_run_with_one_line(start: Start, config: Callable[..., Path]) -> None:
    process = start("train", config(), "--workers.processes", 2, "--data.sources", "none-*.tar")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("treadle: rank") and "failed with exit code 1: its message stands above" in last
    assert "none-*.tar" in err


def packed_config(path: Path, folder: Path) -> Path:
    """The configuration of a run that reads packed batches, otherwise the same."""
    packed = path.with_name("packed.toml")
    packed.write_text(path.read_text(encoding="utf-8").split("[data]")[0] + f'[data]\npacked = "{folder}"\n', encoding="utf-8")
    return packed


def test_packed_batches_take_the_same_steps_and_resume(
    treadle: Run, config: Callable[..., Path], signal_at_step: Callable[[int, signal.Signals], None], tmp_path: Path
) -> None:
    path = config(steps=5)
    treadle("train", path, "--output", tmp_path / "from-shards", "--data.epochs", 4)
    done = treadle("pack", "--config", path, "--out", tmp_path / "packed", "--data.epochs", 4, "--batches-per-shard", 2)
    assert "batches to" in done.out and "fill" in done.out
    packed = packed_config(path, tmp_path / "packed")
    signal_at_step(3, signal.SIGTERM)
    treadle("train", packed, "--output", tmp_path / "from-packed")
    treadle("train", "--resume", tmp_path / "from-packed")
    one, other = (
        weights(tmp_path / "from-shards/checkpoints/last.safetensors"),
        weights(tmp_path / "from-packed/checkpoints/last.safetensors"),
    )
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_init_starts_another_run_from_the_weights(treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(steps=2)
    treadle("train", path, "--output", tmp_path / "first")
    treadle(
        "train",
        path,
        "--output",
        tmp_path / "second",
        "--trainer.init",
        tmp_path / "first/checkpoints/last.safetensors",
        "--trainer.objective",
        "contrastive",
    )
    assert [row["step"] for row in rows(tmp_path / "second")] == [1, 2]


def test_a_time_limit_saves_and_ends(treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    done = treadle("train", config(steps=50), "--stop_after_s", "1e-6")
    assert "stopped by stop_after_s 1e-06 after step 1" in done.out
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert len(rows(tmp_path / "run", "held_out")) == 1
    treadle("train", "--resume", tmp_path / "run", "--steps", 2, "--stop-after-s", 0, "--trainer.schedule.warmup_steps", 1)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_run_that_has_moved_resumes_where_it_lies(treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    treadle("train", config(steps=1))
    (tmp_path / "run").rename(tmp_path / "moved")
    treadle("train", "--resume", tmp_path / "moved", "--steps", 2)
    assert not (tmp_path / "run").exists()
    assert [row["step"] for row in rows(tmp_path / "moved")] == [1, 2]


def test_resuming_a_run_that_is_done_says_so(treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
    treadle("train", config(steps=1))
    done = treadle("train", "--resume", tmp_path / "run")
    assert "the run of 1 steps is finished already; to go on, ask for more than that, as with --steps 2" in done.err
    assert "trained to step 1" in done.out


def test_two_nodes_meet_with_one_command_each(start: Start, config: Callable[..., Path], tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = config(steps=2)
    meet = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--workers.processes", 1)
    nodes = [start("train", path, *meet, "--node-rank", node) for node in (0, 1)]
    ended = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    assert sum(out.count("trained to step 2") for out, _ in ended) == 1
    with safe_open(tmp_path / "run/checkpoints/last.safetensors", "np") as file:
        assert file.metadata()["world_size"] == "2"
