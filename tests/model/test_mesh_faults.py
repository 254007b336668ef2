"""What ends badly on one rank is told to all: hangs, saves that fail, ranks that are missing or come twice; and restarts with other counts.

Ranks are processes that run this file as a script.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treadle.model.checkpoint_folder import CheckpointFolder
from treadle.model.config import MeshOptions, Schedule, TrainerConfig
from treadle.model.mesh import Mesh
from treadle.model.mesh_rendezvous import FolderRefusedError, PeersMissingError, RendezvousError, arrive, meet
from treadle.model.mesh_watch import EXIT_CODE, Watch
from treadle.model.storage_errors import UnwritableFileError
from treadle.model.trainer import Trainer
from treadle.pipeline import PackedBatch, Packer, ShardStream, StepItems
from treadle.shape import BatchShape

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=4, max_columns_per_row=64)
SAMPLES, SHARDS = 12, 4


def config_of(mesh: Mesh | None) -> TrainerConfig:
    return TrainerConfig(depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=100), device="cpu", mesh=mesh)


def stuck_here() -> None:
    time.sleep(600)


def hang(mesh: Mesh, folder: Path) -> None:
    """Rank 1 never comes to the second exchange."""
    del folder
    mesh.world.exchange([1])
    if mesh.rank == 1:
        stuck_here()
    mesh.world.exchange([2])


def hang_sharded(mesh: Mesh, folder: Path) -> None:
    """Rank 1 never comes to the blocks, which wait for it in PyTorch's collectives."""
    del folder
    batch = Packer(SHAPE).pack(StepItems([0], [b"some text"]))
    with Trainer(replace(config_of(mesh), parallel="shard")) as trainer:
        trainer.step(batch)
        if mesh.rank == 1:
            trainer.network.tower.register_forward_pre_hook(lambda *_: stuck_here())
        trainer.step(batch)


def save(mesh: Mesh, folder: Path) -> None:
    """Rank 0 cannot write; then it can."""
    batch = Packer(SHAPE).pack(StepItems([0], [b"some text"]))
    told: list[str] = []
    with Trainer(config_of(mesh)) as trainer:
        trainer.step(batch)
        blocked = folder / "blocked"
        if mesh.rank == 0:
            blocked.write_text("a file where a folder should be")
        calls: list[Callable[[], object]] = [
            lambda: trainer.save(blocked / "x.safetensors"),
            lambda: CheckpointFolder(blocked / "checkpoints").save(trainer),
            lambda: CheckpointFolder(folder).save(trainer),
            lambda: trainer.save(folder / "stopped", progress=lambda done, total: False),
        ]
        for call in calls:
            try:
                call()
                told.append("")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        # All ranks are still in step.
        told.append(str(trainer.step(batch).step))
    (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))


def deal(mesh: Mesh, folder: Path) -> None:
    """Two ranks take two steps of one epoch and save."""
    with ShardStream(
        str(folder / "*.tar"), SHAPE, rank=mesh.rank, world_size=mesh.world_size, lanes=4, epochs=1, shuffle=5, threads=1
    ) as stream:
        taken: list[int] = []
        with Trainer(config_of(mesh)) as trainer:
            for batch, _ in zip(stream, range(2), strict=False):
                taken += ids_of(batch)
                trainer.step(batch)
            trainer.save(folder / "two.safetensors")
    (folder / f"taken-{mesh.rank}.json").write_text(json.dumps(taken))


def ids_of(batch: PackedBatch) -> list[int]:
    return [int(i) for i in batch.id[: batch.segments]]


def main(job: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    options = MeshOptions(
        directory=folder,
        host_domain_index=rank,
        host_domain_count=2,
        job=job,
        timeout_s=100,
        collective_timeout_s={"hang": 2, "hang_sharded": 20}.get(job, 300),
    )
    with Mesh.bootstrap(options, device="cpu") as mesh:
        {"hang": hang, "hang_sharded": hang_sharded, "save": save, "deal": deal}[job](mesh, folder)
        mesh.world.exchange([0])


def run(job: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of both ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, job, str(folder), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_a_rank_that_hangs_is_named_and_all_end_with_their_stacks(tmp_path: Path) -> None:
    (first_code, first), (second_code, second) = run("hang", tmp_path)
    assert (first_code, second_code) == (EXIT_CODE, EXIT_CODE), first + second
    for output in (first, second):
        assert "rank 0 has waited 2 s in an exchange of counts" in output and "hanging: rank 1;" in output
    assert "in stuck_here" in second and "in exchange" in first


def test_a_rank_that_hangs_outside_sharded_blocks_is_named(tmp_path: Path) -> None:
    (first_code, first), (second_code, second) = run("hang_sharded", tmp_path)
    assert (first_code, second_code) == (EXIT_CODE, EXIT_CODE), first + second
    assert "has waited 20 s in a step of sharded blocks" in first and "hanging: rank 1;" in first
    assert "in stuck_here" in second


def test_a_save_that_rank_0_cannot_write_fails_on_every_rank(tmp_path: Path) -> None:
    for code, output in run("save", tmp_path):
        assert code == 0, output
    first, second = (json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0].startswith("UnwritableFileError") and "blocked" in first[0]
    assert first[1].startswith("UnwritableFileError") and "cannot be made" in first[1]
    assert first[2] == "" and first[3].startswith("Stopped") and first[4] == "2"


def test_another_number_of_ranks_goes_on_from_the_same_position(tmp_path: Path) -> None:
    for shard in range(SHARDS):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for sample in range(SAMPLES):
                info = tarfile.TarInfo(f"{sample}.txt")
                data = f"shard {shard}, sample {sample}".encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    for code, output in run("deal", tmp_path):
        assert code == 0, output
    taken = [i for rank in range(2) for i in json.loads((tmp_path / f"taken-{rank}.json").read_text())]
    # Two steps of at most four segments on two ranks: something is left.
    assert 0 < len(taken) <= 16
    trainer_config = TrainerConfig(
        depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=100), device="cpu", resume=tmp_path / "two.safetensors"
    )
    with (
        Trainer(trainer_config) as trainer,
        ShardStream(str(tmp_path / "*.tar"), SHAPE, lanes=4, epochs=1, shuffle=5, threads=1) as stream,
    ):
        assert trainer.steps_done == 2 and trainer.stream_state is not None
        stream.load_state(trainer.stream_state)
        for batch in stream:
            taken += ids_of(batch)
    assert len(taken) == len(set(taken)) == SHARDS * SAMPLES


class Shelf:
    """A key-value store for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total


def arrive_all(parties: list[tuple[int, int]], timeout_s: float = 20.0, store: Shelf | None = None) -> list[Exception | None]:
    store, answers = store or Shelf(), list[Exception | None]([None] * len(parties))

    def party(place: int, rank: int, size: int) -> None:
        try:
            arrive(store, rank, size, timeout_s)
        except (ValueError, TimeoutError) as error:
            answers[place] = error

    threads = [threading.Thread(target=party, args=(place, *who)) for place, who in enumerate(parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_ranks_arrive_and_arrive_again_in_one_store() -> None:
    store = Shelf()
    for _ in range(2):
        assert arrive_all([(0, 3), (2, 3), (1, 3)], store=store) == [None, None, None]


def test_a_second_rank_0_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Shelf()
    store.set("treadle/call", "0")
    monkeypatch.setattr(Shelf, "get", lambda self, key: b"another")
    with pytest.raises(RendezvousError, match="two processes came as rank 0"):
        arrive(store, 0, 2, 5.0)


def test_a_rank_that_comes_twice_is_refused_by_all_that_wait() -> None:
    # Four of them for a world of four: the fourth place is taken twice.
    for answer in arrive_all([(0, 4), (1, 4), (1, 4), (2, 4)]):
        assert isinstance(answer, RendezvousError) and "two processes came as rank 1" in str(answer)


def test_another_world_size_is_refused_by_all_that_wait() -> None:
    for answer in arrive_all([(0, 3), (1, 4), (2, 3)]):
        assert isinstance(answer, RendezvousError) and "WORLD_SIZE" in str(answer)


def test_a_rank_that_comes_after_another_has_taken_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.mesh_rendezvous.REFUSAL_GRACE_S", 0.0)
    store = Shelf()
    assert arrive_all([(0, 2), (1, 2)], store=store) == [None, None]
    [late] = arrive_all([(1, 2)], timeout_s=0.2, store=store)
    assert isinstance(late, RendezvousError) and "another process came as rank 1, or rank 0 has ended" in str(late)


def test_ranks_that_do_not_come_are_named() -> None:
    for answer in arrive_all([(0, 4), (2, 4)], timeout_s=0.2):
        assert isinstance(answer, PeersMissingError) and "2 of 4 ranks did not come within 0.2 s: rank 1, 3;" in str(answer)


def test_a_folder_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(FolderRefusedError, match=r"process 0 cannot write .* \(No space left on device\): free space in it"):
        meet(tmp_path, "job", 0, 2, 5.0, lambda hosts: ("here", 1))


def meet_all(folder: Path, timeout_s: float) -> list[Exception | None]:
    """Two processes meet, as threads."""
    answers: list[Exception | None] = [None, None]

    def party(index: int) -> None:
        try:
            meet(folder, "job", index, 2, timeout_s, lambda hosts: ("here", 1))
        except (ValueError, OSError) as error:
            answers[index] = error

    threads = [threading.Thread(target=party, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_folder_that_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, seen = os.replace, Path.glob

    def slowly(*paths: Path) -> None:
        time.sleep(0.3)
        replace(*paths)

    def late(self: Path, pattern: str) -> list[Path]:
        # A listing as it was a while ago, which network file systems give.
        found = list(seen(self, pattern))
        time.sleep(0.1)
        return found

    monkeypatch.setattr("treadle.model.mesh_rendezvous.os.replace", slowly)
    monkeypatch.setattr(Path, "glob", late)
    assert meet_all(tmp_path, 30.0) == [None, None]


def test_a_folder_that_does_not_answer_is_told_by_every_process_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.mesh_rendezvous.REFUSAL_GRACE_S", 0.1)
    monkeypatch.setattr("treadle.model.mesh_rendezvous.BLOCKED_GRACE_S", 0.1)
    released = threading.Event()

    def blocked(self: Path, pattern: str) -> list[Path]:
        released.wait()
        return []

    monkeypatch.setattr(Path, "glob", blocked)
    for index, answer in enumerate(meet_all(tmp_path, 0.2)):
        assert isinstance(answer, FolderRefusedError)
        assert f"has not answered process {index} within 0.2 s: the file system is blocked or far too slow" in str(answer)
    released.set()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderRefusedError, match="process 1 cannot write"):
        meet(tmp_path / "file", "job", 1, 2, 5.0, lambda hosts: ("here", 1))


def test_a_watch_names_who_is_behind(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    store, ended = Shelf(), list[int]()
    watches = [Watch(store, rank, 3, 0.3, end=ended.append) for rank in range(3)]
    for watch in watches:
        with watch.waiting("a sum"):
            pass
    with watches[0].waiting("a sum"), watches[2].waiting("a sum"):
        while len(ended) < 3:
            time.sleep(0.01)
    for watch in watches:
        watch.close()
    assert ended == [EXIT_CODE] * 3
    assert "hanging: rank 1;" in caplog.text
    # Every thread's stack, this test's among them.
    assert "test_a_watch_names_who_is_behind" in capfd.readouterr().err


def test_a_watch_whose_store_does_not_answer_ends_its_rank(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.mesh_watch.MIN_SILENCE_S", 0.1)
    cut, ended = threading.Event(), list[int]()

    class Unreachable(Shelf):
        def check(self, keys: list[str]) -> bool:
            cut.wait()
            return super().check(keys)

    watch = Watch(Unreachable(), 1, 2, 0.2, end=ended.append)
    with watch.waiting("a gather of rows"):
        while not ended:
            time.sleep(0.01)
    cut.set()
    watch.close()
    assert ended == [EXIT_CODE]
    assert "rank 1 has waited 0.2 s in a gather of rows (collective 1), and rank 0's store does not answer" in caplog.text


def test_a_watch_that_is_closed_says_nothing() -> None:
    ended: list[int] = []
    watch = Watch(Shelf(), 0, 2, 60.0, end=ended.append)
    with watch.waiting("a sum"):
        pass
    watch.close()
    assert not ended


def test_an_error_alone_is_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Trainer(config_of(None)) as trainer, pytest.raises(UnwritableFileError, match="cannot be made"):
        CheckpointFolder(tmp_path / "file" / "checkpoints").save(trainer)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
