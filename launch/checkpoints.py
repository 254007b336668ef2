"""The checkpoints of a run: step files, which is the newest, and which scored best.

checkpoints/step-00001000.safetensors   one per save, the newest `keep` of them
checkpoints/LATEST                      the name of the newest whole one
checkpoints/last.safetensors            the newest, under a name that stays
checkpoints/best.safetensors            the best on the held-out samples, and best.json, which step and how good
"""

import json
import re
from pathlib import Path

from treadle.launch.files import link_or_copy, write_text
from treadle.model import Trainer

FOLDER = "checkpoints"
LATEST = "LATEST"
_STEP_FILE = re.compile(r"step-(\d{8,})\.safetensors")


class Checkpoints:
    """The checkpoints in the folder of a run."""

    def __init__(self, output: Path, keep: int) -> None:
        self.folder = output / FOLDER
        self._keep = keep
        self._saved_step = -1
        self.best_step: int | None = None
        self.best_value: float | None = None
        self._read_best()

    @property
    def last(self) -> Path:
        """Where the newest checkpoint lies."""
        return self.folder / "last.safetensors"

    @property
    def best(self) -> Path | None:
        """Where the best checkpoint lies, once there is one."""
        path = self.folder / "best.safetensors"
        return path if self.best_step is not None else None

    def save(self, trainer: Trainer) -> Path:
        """Saves the run (collective): the step file first, whole, then the names that point at it; does nothing when this step is saved.

        Raises:
            StorageFileError: the folder or the disk refused it; the checkpoints before it are untouched.
        """
        step = trainer.steps_done
        path = self.folder / f"step-{step:08d}.safetensors"
        if step == self._saved_step:
            return path
        trainer.save(path)
        self._saved_step = step
        if trainer.world.rank == 0:
            write_text(self.folder / LATEST, f"{path.name}\n")
            link_or_copy(path, self.last)
            for old in self._step_files()[: -self._keep]:
                old.unlink(missing_ok=True)
        return path

    def offer(self, trainer: Trainer, value: float) -> bool:
        """Keeps the run of this step as the best where `value` is the highest yet (collective); True where it is."""
        if self.best_value is not None and not value > self.best_value:
            return False
        path = self.save(trainer)
        self.best_step, self.best_value = trainer.steps_done, value
        if trainer.world.rank == 0:
            link_or_copy(path, self.folder / "best.safetensors")
            write_text(self.folder / "best.json", json.dumps({"step": self.best_step, "value": value}) + "\n")
        return True

    def forget_after(self, step: int) -> None:
        """Takes up a run at `step`: a best of a later step belongs to a course that the run has left."""
        if self.best_step is not None and self.best_step > step:
            self.best_step = self.best_value = None

    def _step_files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*.safetensors") if _STEP_FILE.fullmatch(path.name))

    def _read_best(self) -> None:
        try:
            record = json.loads((self.folder / "best.json").read_text(encoding="utf-8"))
            step, value = record["step"], record["value"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if isinstance(step, int) and isinstance(value, int | float) and (self.folder / "best.safetensors").is_file():
            self.best_step, self.best_value = step, float(value)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: a file itself, a run's folder its newest one.

    Raises:
        ValueError: there is none.
    """
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
        whole = sorted(file for file in folder.glob("step-*.safetensors") if _STEP_FILE.fullmatch(file.name))
        if whole:
            return whole[-1]
    what = "holds no checkpoint" if path.is_dir() else "no such file or folder"
    raise ValueError(f"{path}: {what}: name a .safetensors checkpoint or the output folder of a run")
