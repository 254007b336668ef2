"""`treadle pack`: killed at any moment and started again it leaves the same folder, for one rank and for several."""

import io
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.launch.cli import main
from treadle.launch.inspect import shape_toml
from treadle.launch.pack import packing_tree
from treadle.launch.packing import pack_part
from treadle.launch.settings import DataSettings, PackSettings, SourceSettings
from treadle.pipeline import PackedReader, ShardStream
from treadle.shape import BatchShape, ImageShape

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48)
ARGUMENTS = [
    "--batch.max-rows-per-device", "2", "--batch.max-segments-per-device", "24", "--batch.max-columns-per-row", "48",
    "--batches-per-shard", "40", "--data.lanes", "4", "--data.shuffle", "20",
]  # fmt: skip


def write_texts(folder: Path, shards: int, samples: int) -> str:
    rng = random.Random(0)
    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for index in range(samples):
                data = f"{shard}.{index} ".encode() + rng.randbytes(rng.randint(1, 30))
                member = tarfile.TarInfo(f"k{index}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return str(folder / "*.tar")


def command(pattern: str, out: Path | str, *more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "treadle.launch", "pack", pattern, "--out", str(out), *ARGUMENTS, *more]


def run(pattern: str, out: Path | str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(pattern, out, *more), capture_output=True, text=True, timeout=300, check=False)


def files(folder: Path) -> dict[str, bytes]:
    """What a folder holds for good."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_when(pattern: str, out: Path, moment: Callable[[list[str]], bool], wait_s: float, *more: str) -> bool:
    """Starts packing, and kills all of it with SIGKILL once the folder looks so; answers whether it was still at work."""
    process = subprocess.Popen(command(pattern, out, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not (out.exists() and moment(os.listdir(out))):
        time.sleep(0.002)
    time.sleep(wait_s)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def shards_of(names: list[str]) -> int:
    return sum(name.startswith("batches-") for name in names)


def hidden_of(names: list[str]) -> int:
    return sum(name.startswith(".batches-") for name in names)


def test_killed_at_several_moments_it_loses_and_doubles_nothing(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "texts", 6, 500)
    assert run(pattern, tmp_path / "whole").returncode == 0
    whole = files(tmp_path / "whole")
    out = tmp_path / "killed"
    moments: list[Callable[[list[str]], bool]] = [
        lambda names: True,
        lambda names: hidden_of(names) > 0,
        lambda names: shards_of(names) > 0,
        lambda names: shards_of(names) > 3,
        lambda names: shards_of(names) > 6,
    ]
    rng = random.Random(1)
    hit = 0
    for moment in moments:
        hit += killed_when(pattern, out, moment, rng.uniform(0, 0.05))
    # Packing is over in a moment on a fast machine: most of the kills must have met it at work.
    assert hit >= 3 and 'complete": true' not in (out / "index.json").read_text()
    done = run(pattern, out)
    assert done.returncode == 0, done.stderr
    assert "batches: going on after them" in done.stderr
    assert files(out) == whole
    with ShardStream(pattern, SHAPE, lanes=4, shuffle=20, epochs=1) as stream:
        assert [batch.buffer[: batch.used_bytes].tobytes() for batch in stream] == [
            batch.buffer[: batch.used_bytes].tobytes() for batch in PackedReader(out)
        ]
    again = run(pattern, out)
    assert again.returncode == 1 and "is packed to its end" in again.stderr and files(out) == whole


def test_ranks_are_packed_by_processes_and_go_on_after_kills(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "texts", 4, 300)
    out = tmp_path / "packed"
    assert killed_when(pattern, out, lambda names: {"part-000.json", "part-001.json"} <= {*names}, 0.0, "--ranks", "2", "--workers", "2")
    with pytest.raises(ValueError, match="is not packed to its end: run the same `treadle pack` again"):
        PackedReader(out)
    done = run(pattern, out, "--ranks", "2", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(name for name in os.listdir(out) if not name.startswith("batches-")) == ["index.json", "part-000.json", "part-001.json"]
    # Killed between the end of the last rank and the joining: nothing to pack is left, and the joining is.
    whole = files(out)
    (out / "index.json").unlink()
    done = run(pattern, out, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert files(out) == whole
    again = run(pattern, out, "--ranks", "2")
    assert again.returncode == 1 and "is packed to its end" in again.stderr
    texts: list[bytes] = []
    for rank in range(2):
        with ShardStream(pattern, SHAPE, lanes=4, shuffle=20, epochs=1, rank=rank, world_size=2) as stream:
            streamed = list(stream)
        read = list(PackedReader(out, rank=rank, world_size=2))
        assert read == streamed and [batch.state for batch in read] == [batch.state for batch in streamed]
        texts += [batch.payload(segment).tobytes() for batch in read for segment in range(batch.segments)]
    assert len(texts) == len(set(texts)) == 1200


def test_a_rank_that_fails_ends_the_others_with_one_line(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "texts", 2, 20)
    (tmp_path / "texts" / "000.tar").write_bytes(b"x" * 700)
    done = run(pattern, tmp_path / "packed", "--ranks", "2", "--data.on_error", "raise")
    assert done.returncode == 1
    assert re.fullmatch(r"treadle: rank [01]: not_a_tar at byte 0: .*", done.stderr.splitlines()[-1])


def test_other_settings_do_not_go_on_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = write_texts(tmp_path / "texts", 2, 200)
    out = str(tmp_path / "packed")

    def pack(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["pack", pattern, "--out", out, *ARGUMENTS, *more])
        code = ended.value.code
        assert isinstance(code, int)
        return code, capsys.readouterr().err

    # Whole shards of a part, without its end: the state of a killed run.
    settings = PackSettings(batch=SHAPE, data=packing_data(pattern), batches_per_shard=5)
    done = pack_part(settings, out, 0, tell=lambda done: None, stopped=iter([False] * 7 + [True] * 99).__next__)
    assert done.batches == 8 and not done.complete
    code, err = pack("--data.seed", "4")
    assert code == 1 and "the state belongs to another stream" in err and "seed: 4 is not 0" in err
    code, err = pack("--data.max_edges", "3")
    assert code == 1 and "this batch has shape and capacities" in err
    code, err = pack("--ranks", "2")
    assert code == 1 and "holds index.json, of 1 parts" in err
    half = str(tmp_path / "half")
    pack_part(replace(settings, ranks=2), half, 0, tell=lambda done: None, stopped=lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["pack", pattern, "--out", half, *ARGUMENTS, "--ranks", "2", "--data.seed", "4"])
    assert ended.value.code == 1 and "was packed from other shards, or with other settings" in capsys.readouterr().err
    code, err = pack()
    assert code == 0 and "holds 8 batches: going on after them" in err


def packing_data(pattern: str) -> DataSettings:
    return DataSettings(sources=(SourceSettings(urls=(pattern,)),), lanes=4, shuffle=20, epochs=1)


def test_mistakes_in_a_configuration_are_told_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[trainer.batch]\nmax_rows_per_device = 2\nmax_segments_per_device = 0\nmax_columns_per_row = 48\n[data]\nsources = "x.tar"\nlanes = -1\n'
    )

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--out", str(tmp_path / "packed"), "--config", str(config)])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert f"--config {config}:1: batch: BatchShape.max_segments_per_device is 0" in refused("pack") and not (tmp_path / "packed").exists()
    config.write_text(config.read_text().replace("device = 0", "device = 9"))
    assert f"--config {config}" in refused("pack") and "lanes" in refused("pack")
    assert "--config" not in refused("pack", "--data.lanes", "-2")
    config.write_text("[trainer]\n")
    assert f"--config {config}" in refused("pack", "y.tar")


def test_the_trainers_edge_capacity_is_packed_for(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[trainer.contrastive]\nmax_edges_per_device = 77\n")
    assert packing_tree(config, ())["data"]["max_edges"] == 77  # type: ignore[index]
    config.write_text("[trainer.contrastive]\nmax_edges_per_device = 77\n[data]\nmax_edges = 5\n")
    assert packing_tree(config, ())["data"]["max_edges"] == 5  # type: ignore[index]


def test_inspect_suggests_a_shape_that_pastes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = write_texts(tmp_path / "texts", 1, 50)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", pattern, "--toml"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    table = tomllib.loads(text)["trainer"]["batch"]
    # No derived zeros, no slices of modalities that are not there.
    assert table.keys() == {"max_rows_per_device", "max_segments_per_device", "max_columns_per_row"} and all(table.values())
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["pack", pattern, "--config", str(config), "--out", str(tmp_path / "packed")])
    assert ended.value.code == 0
    assert PackedReader(tmp_path / "packed").index is not None and sum(batch.bags for batch in PackedReader(tmp_path / "packed")) == 50
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=2, max_columns_per_row=8, image=ImageShape(patch_side=4))
    assert shape_toml(shape) == (
        "[trainer.batch]\nmax_rows_per_device = 1\nmax_segments_per_device = 2\nmax_columns_per_row = 8\n\n[trainer.batch.image]\npatch_side = 4\n"
    )


def test_packed_batches_and_samples_at_once_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('output = "run"\n[data]\nsources = "x.tar"\n')
    with pytest.raises(SystemExit) as ended:
        main(["train", str(config), "--data.packed", "folder"])
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "sources and packed are both set (packed is 'folder')" in err
        and "take data.sources out of the configuration" in err
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_into_an_object_store_and_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real S3 protocol: packed by ranks, interrupted, gone on with, and read back."""
    import s3fs
    from moto.server import ThreadedMotoServer

    for name, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem.clear_instance_cache()  # kept ones know an earlier test's endpoint
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        pattern = write_texts(tmp_path / "texts", 2, 150)
        out = "s3://bucket/packed"
        settings = PackSettings(batch=SHAPE, data=packing_data(pattern), batches_per_shard=5, ranks=2)
        # The first rank is interrupted, the other has not begun.
        pack_part(settings, out, 0, tell=lambda done: None, stopped=iter([False] * 12 + [True] * 99).__next__)
        with pytest.raises(ValueError, match="is not packed to its end"):
            PackedReader(out)
        done = run(pattern, out, "--ranks", "2")
        assert done.returncode == 0 and "holds 13 batches: going on after them" in done.stderr, done.stderr
        for rank in range(2):
            with ShardStream(pattern, SHAPE, lanes=4, shuffle=20, epochs=1, rank=rank, world_size=2) as stream:
                assert list(PackedReader(out, rank=rank, world_size=2)) == list(stream)
        names = {path.rsplit("/", 1)[1] for path in s3fs.S3FileSystem(skip_instance_cache=True).ls("bucket/packed")}
        assert {"index.json", "part-000.json", "part-001.json"} < names and not any(name.endswith(".tmp") for name in names)
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
