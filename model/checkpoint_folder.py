"""The checkpoints of a run in one folder: step files, which is the newest, and which scored best.

step-00001000.safetensors   one per save, the newest `keep` of them
LATEST                      the name of the newest whole one
last.safetensors            the newest, under a name that stays
best.safetensors            the best by the caller's own value, and best.json, which step and how good

The file comes first, whole, and then the names that point at it: killed at any moment, every name means a whole checkpoint.
"""

import json
import math
import os
import re
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Protocol, cast

from treadle.model.deferred import Deferred
from treadle.model.mesh import World
from treadle.model.mesh_errors import raise_together
from treadle.model.storage_errors import UnwritableFileError
from treadle.model.storage_file import BEST_NAME
from treadle.model.storage_header import read_header
from treadle.pipeline.whole_file import link_or_copy, whole_file
from treadle.shape import require_count, require_member, require_path, shown

FOLDER = "checkpoints"
"""The folder's name in a run's output."""
LATEST = "LATEST"
_STEP_FILE = re.compile(r"step-(\d{8,})\.safetensors")


class Saves(Protocol):
    """What a folder needs of a trainer."""

    @property
    def world(self) -> World: ...

    @property
    def steps_done(self) -> int: ...

    def save(self, path: str | Path, *, wait: bool = True) -> Deferred[None]: ...


class CheckpointFolder:
    """Keeps the newest `keep` checkpoints of a run, and its best, and knows which is which.

    Args:
        folder: made when the first checkpoint is saved.
        keep: step files that stay; the best and the last stay whatever their step.

    Raises:
        ValueError: `folder` is no path, or `keep` is below one.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        self._keep = require_count("CheckpointFolder", "keep", keep, 1)
        self.folder = Path(require_path("CheckpointFolder", "folder", folder))
        self._saved_step = -1
        self._saving: Deferred[None] | None = None
        self.best_step: int | None = None
        self.best_value: float | None = None
        self._read_best()

    @property
    def last(self) -> Path:
        """Where the newest checkpoint lies, under a name that stays."""
        return self.folder / "last.safetensors"

    @property
    def latest(self) -> Path | None:
        """The newest step file, by `LATEST`; None where there is none. What `TrainerConfig.resume` takes, as it takes the folder."""
        try:
            return find_checkpoint(self.folder)
        except ValueError:
            return None

    @property
    def best(self) -> Path | None:
        """Where the best checkpoint lies, once there is one."""
        return self.folder / BEST_NAME if self.best_step is not None else None

    def save(self, trainer: Saves, *, wait: bool = True) -> Path:
        """Saves the run (collective); does nothing when this step is saved.

        Args:
            wait: False copies the state and answers; the file is written beside further steps, and what it raises comes with the next
                call of this folder.

        Raises:
            ValueError: an argument is of another type.
            StorageFileError: the folder or the disk refused it; the checkpoints before it are untouched.
        """
        _require_trainer("save", trainer)
        require_member("CheckpointFolder.save", "wait", wait, bool)
        step = trainer.steps_done
        path = self.folder / f"step-{step:08d}.safetensors"
        if step == self._saved_step:
            if wait:
                self._together(trainer.world, self.wait)
            return path

        def make_ready() -> None:
            self.wait()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UnwritableFileError(self.folder, f"cannot be made: {error.strerror or error}; choose another folder") from error

        self._together(trainer.world, make_ready)
        saving = trainer.save(path, wait=wait)
        self._saved_step = step
        if trainer.world.rank == 0:
            self._saving = saving.then(lambda: self._point_at(path))
        if wait:
            self._together(trainer.world, self.wait)
        return path

    def _together(self, world: World, call: Callable[[], None]) -> None:
        """Runs `call` on rank 0, which alone writes, and raises what it raises on every rank (collective)."""
        error: Exception | None = None
        if world.rank == 0:
            try:
                call()
            except Exception as caught:
                error = caught
        try:
            raise_together(world, error)
        except Exception:
            self._saved_step = -1
            raise

    def wait(self) -> None:
        """Waits for the save that is being written, if there is one.

        Raises:
            StorageFileError: as `save`.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except Exception:
                self._saved_step = -1
                raise

    def offer(self, trainer: Saves, value: float) -> bool:
        """Keeps the run of this step as the best where `value` is the highest yet (collective); True where it is.

        Raises:
            ValueError: `value` is no number.
            StorageFileError: as `save`.
        """
        if isinstance(value, bool) or not isinstance(cast(object, value), Real):
            raise ValueError(f"CheckpointFolder.offer.value is {shown(value)}: it must be a number; the highest is the best")
        _require_trainer("offer", trainer)
        # Nothing is above NaN: it would stay the best for good.
        if math.isnan(value) or (self.best_value is not None and not value > self.best_value):
            return False
        path = self.save(trainer)
        self.best_step, self.best_value = trainer.steps_done, value

        def point() -> None:
            link_or_copy(path, self.folder / BEST_NAME)
            self._write("best.json", json.dumps({"step": self.best_step, "value": value}) + "\n")

        self._together(trainer.world, point)
        return True

    def forget_after(self, step: int) -> None:
        """Takes up a run at `step`: a best of a later step belongs to a course that the run has left.

        Raises:
            ValueError: `step` is no step.
        """
        step = require_count("CheckpointFolder.forget_after", "step", step, 0, 2**63 - 1)
        if self.best_step is not None and self.best_step > step:
            self.best_step = self.best_value = None

    def _point_at(self, path: Path) -> None:
        self._write(LATEST, f"{path.name}\n")
        link_or_copy(path, self.last)
        for old in _step_files(self.folder)[: -self._keep]:
            if old != path:
                old.unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        with whole_file(self.folder / name) as file:
            file.write(text.encode("utf-8"))

    def _read_best(self) -> None:
        try:
            record = json.loads((self.folder / "best.json").read_text(encoding="utf-8"))
            step, value = record["step"], record["value"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if isinstance(step, int) and isinstance(value, int | float) and (self.folder / BEST_NAME).is_file():
            self.best_step, self.best_value = step, float(value)


def _require_trainer(method: str, trainer: object) -> None:
    lacking = [name for name in ("world", "steps_done", "save") if not hasattr(trainer, name)]
    if lacking:
        raise ValueError(f"CheckpointFolder.{method}.trainer is {shown(trainer)}: it must be a Trainer; it has no {', '.join(lacking)}")


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: a file itself, a folder of checkpoints or a run's folder its newest one.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path / FOLDER, path):
        if not folder.is_dir():
            continue
        try:
            named = (folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            named = ""
        if _STEP_FILE.fullmatch(named) and (folder / named).is_file():
            return folder / named
        whole = _step_files(folder)
        if whole:
            return whole[-1]
    if path.name == BEST_NAME and path.parent.is_dir():
        raise ValueError(f"{path}: there is none: a run keeps a best only where held-out samples score it; last.safetensors is its newest")
    what = "holds no checkpoint" if path.is_dir() else "no such file or folder"
    raise ValueError(f"{path}: {what}: name a .safetensors checkpoint or the output folder of a run")


def saved_step(path: Path) -> int:
    """The step that a checkpoint's header tells; -1 where it tells none.

    Raises:
        StorageFileError: the file is cut or no safetensors file.
    """
    with path.open("rb") as file:
        _, _, metadata = read_header(path, file, os.fstat(file.fileno()).st_size)
    step = metadata.get("step", "")
    return int(step) if step.isdecimal() else -1


def _step_files(folder: Path) -> list[Path]:
    """By step, which the padding of their names no longer orders past 99,999,999."""
    found = [(int(match[1]), path) for path in folder.glob("step-*.safetensors") if (match := _STEP_FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
