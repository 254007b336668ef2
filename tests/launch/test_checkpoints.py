"""Step files, the names that point at them, and which checkpoint a path means."""

import json
from pathlib import Path
from typing import cast

import pytest

from treadle.launch.checkpoints import Checkpoints, find_checkpoint
from treadle.launch.files import link_or_copy, make_folder
from treadle.model import Trainer
from treadle.model.mesh import World


class Saver:
    """A trainer, as far as checkpoints know one."""

    def __init__(self) -> None:
        self.world = World()
        self.steps_done = 0
        self.saves = 0

    def save(self, path: Path) -> None:
        self.saves += 1
        path.write_text(f"weights of step {self.steps_done}")


def at_step(saver: Saver, step: int) -> Trainer:
    saver.steps_done = step
    return cast("Trainer", saver)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_the_newest_are_kept_and_named(folder: Path) -> None:
    checkpoints, saver = Checkpoints(folder, keep=2), Saver()
    for step in (5, 10, 15):
        checkpoints.save(at_step(saver, step))
    assert names(folder) == {"step-00000010.safetensors", "step-00000015.safetensors", "last.safetensors", "LATEST"}
    assert checkpoints.last.read_text() == "weights of step 15"
    assert (folder / "checkpoints/LATEST").read_text() == "step-00000015.safetensors\n"


def test_a_step_is_saved_once(folder: Path) -> None:
    checkpoints, saver = Checkpoints(folder, keep=2), Saver()
    checkpoints.save(at_step(saver, 5))
    checkpoints.save(at_step(saver, 5))
    assert saver.saves == 1


def test_the_best_stays_when_its_step_file_goes(folder: Path) -> None:
    checkpoints, saver = Checkpoints(folder, keep=1), Saver()
    assert checkpoints.best is None
    assert checkpoints.offer(at_step(saver, 5), 0.5)
    assert not checkpoints.offer(at_step(saver, 10), 0.5)
    assert not checkpoints.offer(at_step(saver, 10), float("nan"))
    for step in (10, 15):
        checkpoints.save(at_step(saver, step))
    assert "step-00000005.safetensors" not in names(folder)
    assert checkpoints.best is not None and checkpoints.best.read_text() == "weights of step 5"
    assert json.loads((folder / "checkpoints/best.json").read_text()) == {"step": 5, "value": 0.5}


def test_the_best_is_known_after_a_resume(folder: Path) -> None:
    checkpoints, saver = Checkpoints(folder, keep=2), Saver()
    checkpoints.offer(at_step(saver, 5), 0.5)
    again = Checkpoints(folder, keep=2)
    assert (again.best_step, again.best_value) == (5, 0.5)
    assert not again.offer(at_step(saver, 10), 0.4)
    again.forget_after(4)
    assert again.offer(at_step(saver, 10), 0.4)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x", "value": 1}', '{"step": 1}'])
def test_a_garbled_record_of_the_best_is_forgotten(folder: Path, content: str) -> None:
    (folder / "checkpoints/best.json").write_text(content)
    assert Checkpoints(folder, keep=1).best_value is None


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

    def test_nothing_there(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="holds no checkpoint"):
            find_checkpoint(folder)
        with pytest.raises(ValueError, match=r"no such file or folder: name a \.safetensors checkpoint"):
            find_checkpoint(folder / "none")


class TestFiles:
    def test_a_second_name(self, tmp_path: Path) -> None:
        one, other = tmp_path / "one", tmp_path / "other"
        one.write_text("new")
        other.write_text("old")
        link_or_copy(one, other)
        assert other.read_text() == "new"
        one.unlink()
        assert other.read_text() == "new"

    def test_a_copy_where_links_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*names: object) -> None:
            raise PermissionError("no links here")

        monkeypatch.setattr("os.link", refuse)
        (tmp_path / "one").write_text("new")
        link_or_copy(tmp_path / "one", tmp_path / "other")
        assert (tmp_path / "other").read_text() == "new"

    def test_a_folder_in_the_way_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=r"file/run: cannot write here: Not a directory; choose another folder"):
            make_folder(tmp_path / "file/run")

    def test_a_folder_is_made_and_left_empty(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "a/b")
        assert list((tmp_path / "a/b").iterdir()) == []
