"""What a user can get wrong, end to end: one clear line, the right exit code, and nothing half-written."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def clear(err: str) -> str:
    """The one line that a failure prints, checked to be one."""
    lines = [line for line in err.splitlines() if line.startswith("treadle: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def add(path: Path, files: dict[str, bytes]) -> Path:
    """A tar of these files."""
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            source = path.with_name("member")
            source.write_bytes(data)
            with source.open("rb") as content:
                tar.addfile(member, content)
            source.unlink()
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and its checkpoint."""
    from treadle.launch.settings import DataSettings, RunSettings, SourceSettings
    from treadle.launch.training import Run as TrainingRun
    from treadle.model.config import Schedule, TrainerConfig
    from treadle.shape import BatchShape

    folder = tmp_path_factory.mktemp("checkpoint")
    shard = add(folder / "a.tar", {f"{n}.txt": f"text number {n}".encode() for n in range(8)})
    batch = BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=64)
    trainer = TrainerConfig(depth=1, hidden=128, batch=batch, schedule=Schedule(steps=1), device="cpu")
    data = DataSettings(sources=(SourceSettings(urls=(str(shard),)),), epochs=1)
    TrainingRun(RunSettings(output=folder / "run", trainer=trainer, data=data), quiet=True).run()
    return folder / "run/checkpoints/last.safetensors"


class TestSources:
    @pytest.mark.parametrize(
        ("sources", "message"),
        [
            ("none.tar", "none.tar"),
            ("none-*.tar", "matches nothing"),
            (".", "folder"),
            ("pipe:cat a.tar", "pipe"),
            ("ftps3://x/a.tar", "ftps3"),
            ("part-{000..003}.tar", "not there"),
        ],
    )
    def test_what_names_no_shard(self, treadle: Run, config: Callable[..., Path], tmp_path: Path, sources: str, message: str) -> None:
        done = treadle("train", config(), "--data.sources", sources, code=1)
        assert message in clear(done.err)
        assert not (tmp_path / "run/checkpoints/last.safetensors").exists()

    def test_held_out_shards_are_looked_at_first(self, treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
        done = treadle("train", config(), "--held_out.sources", "none.tar", code=1)
        assert "none.tar" in clear(done.err)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("damage", ["empty", "zeros", "text", "cut"])
    def test_damaged_shards_leave_nothing_to_train_on(self, treadle: Run, config: Callable[..., Path], tmp_path: Path, damage: str) -> None:
        content = {
            "empty": b"",
            "zeros": bytes(10240),
            "text": b"this is no tar\n" * 100,
            "cut": add(tmp_path / "t.tar", {"a.txt": b"x" * 900}).read_bytes()[:700],
        }
        (tmp_path / "bad.tar").write_bytes(content[damage])
        done = treadle("evaluate", "--help")
        done = treadle("inspect", "bad.tar", code=1)
        assert "bad.tar" in clear(done.err) and "no sample could be read" in done.err

    def test_bad_items_are_skipped_counted_and_told(self, treadle: Run, config: Callable[..., Path], shards: Path, tmp_path: Path) -> None:
        with tarfile.open(next(shards.glob("train-*.tar"))) as tar:
            picture = next(member for member in tar if member.name.endswith(".png"))
            data = tar.extractfile(picture)
            assert data is not None
            pixels = data.read()
        add(
            tmp_path / "odd.tar",
            {
                "a.txt": b"a picture that says it is a sound",
                "a.mp3": pixels,
                "b.txt": b"a sound of no bytes",
                "b.wav": b"",
                "c.txt": b"half a picture",
                "c.png": pixels[: len(pixels) // 2],
                "d.txt": b"a whole picture",
                "d.png": pixels,
                "e.xyz": b"what is this",
                "e.txt": b"a text beside something unknown",
            },
        )
        quarantine = tmp_path / "skipped.jsonl"
        path = config(steps=2)
        treadle("train", path, "--data.sources", "odd.tar", "--data.quarantine", quarantine, "--held_out.sources", "odd.tar")
        told = quarantine.read_text(encoding="utf-8")
        for member in ("a.mp3", "b.wav", "c.png"):
            assert member in told
        done = treadle("inspect", "odd.tar")
        assert "unknown_extension" in done.out
        done = treadle("train", path, "--output", "strict", "--data.sources", "odd.tar", "--data.on_error", "raise", code=1)
        assert re.search(r"in shard .*odd\.tar, sample '[abc]', member '(a\.mp3|b\.wav|c\.png)', at byte", clear(done.err))

    def test_a_truncated_shard_gives_what_is_whole(self, treadle: Run, config: Callable[..., Path], shards: Path, tmp_path: Path) -> None:
        whole = sorted(shards.glob("train-*.tar"))[0].read_bytes()
        (tmp_path / "cut.tar").write_bytes(whole[: len(whole) * 2 // 3])
        quarantine = tmp_path / "skipped.jsonl"
        treadle("train", config(steps=2), "--data.sources", "cut.tar", "--data.quarantine", quarantine)
        assert "cut.tar" in quarantine.read_text(encoding="utf-8")


class TestCheckpoints:
    def test_a_corrupt_one(self, treadle: Run, config: Callable[..., Path], checkpoint: Path, tmp_path: Path) -> None:
        whole = checkpoint.read_bytes()
        bad = tmp_path / "bad.safetensors"
        for content in (b"", whole[:7], whole[: len(whole) // 2], b"\xff" * 100, bytes(8) + whole):
            bad.write_bytes(content)
            for command in (
                ("train", config(), "--resume", bad),
                ("train", config(), "--trainer.init", bad),
                ("evaluate", bad, "s.tar"),
                ("encode", bad, "--text", "x", "--out", "v.npy"),
            ):
                done = treadle(*command, code=1)
                assert "bad.safetensors" in clear(done.err)
        assert not (tmp_path / "v.npy").exists()
        assert not (tmp_path / "run/checkpoints/last.safetensors").exists()

    def test_another_geometry(self, treadle: Run, config: Callable[..., Path], checkpoint: Path) -> None:
        done = treadle("train", config(), "--resume", checkpoint, code=1)
        message = clear(done.err)
        assert "last.safetensors" in message and "image" in message and "the checkpoint has" in message
        done = treadle("train", config(), "--trainer.init", checkpoint, "--trainer.depth", 2, code=1)
        assert "depth is 2, the checkpoint has 1" in clear(done.err)

    def test_a_folder_that_holds_a_run_is_not_overwritten(self, treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
        treadle("train", config(steps=1))
        before = (tmp_path / "run/checkpoints/last.safetensors").read_bytes()
        done = treadle("train", config(steps=1), code=2)
        assert re.search(r"holds a run already: go on with `treadle train --resume .*/run`, or choose another --output", clear(done.err))
        assert (tmp_path / "run/checkpoints/last.safetensors").read_bytes() == before

    def test_an_unknown_modality_for_the_checkpoint(self, treadle: Run, checkpoint: Path, shards: Path, tmp_path: Path) -> None:
        done = treadle("evaluate", checkpoint, shards / "held-out-000.tar", "--schema.fields", "txt", code=1)
        assert "there is nothing to look for" in clear(done.err)
        picture = tmp_path / "a.png"
        picture.write_bytes(b"no picture")
        done = treadle("encode", checkpoint, picture, "--out", "v.npy", code=1)
        assert "image is not encoded here: the run trained text" in done.err
        assert not (tmp_path / "v.npy").exists()


class TestCapacities:
    def test_a_batch_that_the_host_cannot_hold(
        self, treadle: Run, config: Callable[..., Path], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("treadle.pipeline.memory.host_bytes", lambda: 2**32)
        edges = config(extra="[trainer.contrastive]\nmax_edges_per_device = 2147483647\n")
        # 24 bytes an edge in the three sets; no field of its shape comes near.
        told = (
            r"a batch takes 48.0 GiB \([\d,]+ bytes\), the host has 4.0 GiB: most of it, 48.0 GiB, is for max_edges, 2147483647; lower it"
        )
        for command in (("train", edges), ("pack", "--config", edges, "--out", tmp_path / "packed")):
            assert re.search(told, clear(treadle(*command, code=2).err))
        assert not (tmp_path / "run").exists() and not (tmp_path / "packed").exists()
        rows = ("--batch.max_rows_per_device", 2**20, "--batch.max_columns_per_row", 1024, "--batch.max_segments_per_device", 8)
        told = "most of it, 5.0 GiB, is for BatchShape.max_rows_per_device x max_columns_per_row, 1048576 x 1024; lower it"
        assert told in clear(treadle("inspect", shards / "train-000000.tar", *rows, code=2).err)


class TestOutputs:
    @pytest.mark.parametrize("place", ["file/run", "/proc/run", "/dev/null/run"])
    def test_a_folder_that_cannot_be_written(self, treadle: Run, config: Callable[..., Path], tmp_path: Path, place: str) -> None:
        (tmp_path / "file").write_text("in the way")
        output = place if place.startswith("/") else tmp_path / place
        done = treadle("train", config(output=output), code=1)
        message = clear(done.err)
        assert str(output) in message and "cannot write here" in message and "choose another folder" in message

    def test_demo_into_a_folder_that_cannot_be_written(self, treadle: Run, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        done = treadle("demo", "--out", tmp_path / "file/demo", code=1)
        assert "cannot write here" in clear(done.err)

    def test_encode_into_a_folder_that_cannot_be_written(self, treadle: Run, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        done = treadle("encode", checkpoint, "--text", "x", "--out", tmp_path / "file/v.npy", code=1)
        assert "cannot write here" in clear(done.err)

    def test_pack_over_packed_shards(self, treadle: Run, config: Callable[..., Path], tmp_path: Path) -> None:
        treadle("pack", "--config", config(), "--out", "packed", "--max-batches", 1)
        before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "packed").iterdir())
        done = treadle("pack", "--config", config(), "--out", "packed", "--max-batches", 1, code=1)
        assert "packed" in clear(done.err)
        assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "packed").iterdir()) == before

    def test_a_disk_that_fills_up_leaves_the_last_whole_checkpoint(
        self, config: Callable[..., Path], environment: dict[str, str], tmp_path: Path
    ) -> None:
        # A limit on the size of files stands in for a full disk: every write past it fails as one past the disk's end does.
        script = (
            "import resource, signal, sys\nfrom treadle.launch.cli import main\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))\n"
            "main(sys.argv[2:])\n"
        )

        def run(limit_bytes: int, *arguments: object) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-P", "-c", script, str(limit_bytes), *map(str, arguments)]
            return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)

        done = run(2**40, "train", config(steps=2))
        assert done.returncode == 0, done.stderr
        last = tmp_path / "run/checkpoints/last.safetensors"
        before = last.read_bytes()
        assert len(before) > 200_000

        done = run(100_000, "train", "--resume", tmp_path / "run", "--steps", 3)
        assert done.returncode == 1, done.stdout + done.stderr
        message = clear(done.stderr)
        assert "step-00000003.safetensors" in message
        assert last.read_bytes() == before
        assert (tmp_path / "run/checkpoints/LATEST").read_text() == "step-00000002.safetensors\n"
        assert [path.name for path in (tmp_path / "run/checkpoints").iterdir() if "step-00000003" in path.name] == []

        shutil.rmtree(tmp_path / "run")
        done = run(20_000, "demo", "--out", tmp_path / "demo", "--pictures", 40, "--clips", 4, "--sounds", 4, "--samples-per-shard", 100)
        assert done.returncode == 1
        assert "train-000.tar" in clear(done.stderr) or "File too large" in done.stderr
        assert os.listdir(tmp_path / "demo/shards") == []
