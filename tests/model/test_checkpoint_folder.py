"""Step files, the names that point at them, and which checkpoint a path means."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from treadle.model.checkpoint_folder import CheckpointFolder, find_checkpoint
from treadle.model.deferred import Deferred, settled
from treadle.model.mesh import World
from treadle.model.storage_errors import UnwritableFileError


class Saver:
    """A trainer, as far as a folder of checkpoints knows one; a save that is not waited for ends when `land` is called."""

    def __init__(self) -> None:
        self.world = World()
        self.steps_done = 0
        self.saves = 0
        self.landing: list[Callable[[], None]] = []

    def save(self, path: str | Path, *, wait: bool = True) -> Deferred[None]:
        self.saves += 1
        content = f"weights of step {self.steps_done}"
        if wait:
            Path(path).write_text(content)
            return settled(None)
        future: Future[None] = Future()

        def land() -> None:
            if Path(path).parent.is_dir():
                Path(path).write_text(content)
                future.set_result(None)
            else:
                future.set_exception(UnwritableFileError(path, "there is no folder"))

        self.landing.append(land)
        return Deferred(future)

    def land(self) -> None:
        for call in self.landing:
            call()
        self.landing.clear()


def at_step(saver: Saver, step: int) -> Saver:
    saver.steps_done = step
    return saver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_the_newest_are_kept_and_named(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=2), Saver()
    for step in (5, 10, 15):
        checkpoints.save(at_step(saver, step))
    assert names(folder) == {"step-00000010.safetensors", "step-00000015.safetensors", "last.safetensors", "LATEST"}
    assert checkpoints.last.read_text() == "weights of step 15"
    assert (folder / "checkpoints/LATEST").read_text() == "step-00000015.safetensors\n"


def test_a_step_is_saved_once(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=2), Saver()
    checkpoints.save(at_step(saver, 5))
    checkpoints.save(at_step(saver, 5))
    assert saver.saves == 1


def test_the_best_stays_when_its_step_file_goes(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=1), Saver()
    assert checkpoints.best is None
    assert checkpoints.offer(at_step(saver, 5), 0.5)
    assert not checkpoints.offer(at_step(saver, 10), 0.5)
    assert not checkpoints.offer(at_step(saver, 10), float("nan"))
    assert not CheckpointFolder(folder / "other").offer(at_step(saver, 10), float("nan"))
    for step in (10, 15):
        checkpoints.save(at_step(saver, step))
    assert "step-00000005.safetensors" not in names(folder)
    assert checkpoints.best is not None and checkpoints.best.read_text() == "weights of step 5"
    assert json.loads((folder / "checkpoints/best.json").read_text()) == {"step": 5, "value": 0.5}


def test_the_best_is_known_after_a_resume(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=2), Saver()
    checkpoints.offer(at_step(saver, 5), 0.5)
    again = CheckpointFolder(folder / "checkpoints", keep=2)
    assert (again.best_step, again.best_value) == (5, 0.5)
    assert not again.offer(at_step(saver, 10), 0.4)
    again.forget_after(4)
    assert again.offer(at_step(saver, 10), 0.4)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x", "value": 1}', '{"step": 1}'])
def test_a_garbled_record_of_the_best_is_forgotten(folder: Path, content: str) -> None:
    (folder / "checkpoints/best.json").write_text(content)
    assert CheckpointFolder(folder / "checkpoints", keep=1).best_value is None


def test_a_save_beside_further_steps_is_pointed_at_once_it_is_whole(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=2), Saver()
    checkpoints.save(at_step(saver, 5))
    checkpoints.save(at_step(saver, 10), wait=False)
    assert checkpoints.latest == folder / "checkpoints/step-00000005.safetensors"
    saver.land()
    assert checkpoints.latest == folder / "checkpoints/step-00000010.safetensors"
    assert checkpoints.last.read_text() == "weights of step 10"
    checkpoints.save(at_step(saver, 10), wait=True)
    assert saver.saves == 2


def test_what_a_save_beside_further_steps_raises_comes_with_the_next_call(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=2), Saver()
    checkpoints.save(at_step(saver, 5), wait=False)
    (folder / "checkpoints").rmdir()
    saver.land()
    with pytest.raises(UnwritableFileError, match="there is no folder"):
        checkpoints.save(at_step(saver, 5))
    assert checkpoints.latest is None
    checkpoints.save(at_step(saver, 5))
    assert checkpoints.latest == folder / "checkpoints/step-00000005.safetensors"


def test_steps_of_nine_digits_are_newer_than_those_of_eight(folder: Path) -> None:
    checkpoints, saver = CheckpointFolder(folder / "checkpoints", keep=1), Saver()
    for step in (99_999_999, 100_000_000):
        checkpoints.save(at_step(saver, step))
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-100000000.safetensors"]


@pytest.mark.parametrize("keep", [0, -1, True])
def test_one_checkpoint_at_least_is_kept(folder: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=f"CheckpointFolder.keep is {keep}: it must .* 1 "):
        CheckpointFolder(folder, keep=keep)


class TestFind:
    def test_a_file_is_itself(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").touch()
        assert find_checkpoint(tmp_path / "a.safetensors") == tmp_path / "a.safetensors"

    def test_a_run_is_its_latest(self, folder: Path) -> None:
        for step in (5, 10):
            (folder / f"checkpoints/step-{step:08d}.safetensors").touch()
        (folder / "checkpoints/LATEST").write_text("step-00000005.safetensors\n")
        for path in (folder, folder / "checkpoints"):
            assert find_checkpoint(path).name == "step-00000005.safetensors"

    @pytest.mark.parametrize("latest", ["", "step-00000099.safetensors", "../../etc/passwd", "\x00", None])
    def test_a_garbled_pointer_falls_back_on_the_newest(self, folder: Path, latest: str | None) -> None:
        for step in (5, 10):
            (folder / f"checkpoints/step-{step:08d}.safetensors").touch()
        if latest is not None:
            (folder / "checkpoints/LATEST").write_text(latest)
        assert find_checkpoint(folder).name == "step-00000010.safetensors"

    def test_a_best_that_is_none_is_explained(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="a run keeps a best only where held-out samples score it"):
            find_checkpoint(folder / "checkpoints/best.safetensors")

    def test_nothing_there(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="holds no checkpoint"):
            find_checkpoint(folder)
        with pytest.raises(ValueError, match=r"no such file or folder: name a \.safetensors checkpoint"):
            find_checkpoint(folder / "none")
