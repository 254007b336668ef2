"""Small files and folders of a run."""

import os
from pathlib import Path

from treadle.pipeline.whole_file import whole_file


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a whole text file, UTF-8; a private one is for its owner's eyes alone.

    Raises:
        OSError: the folder or the disk refused it.
    """
    with whole_file(path) as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Makes a folder and sees that it can be written to.

    Raises:
        ValueError: it cannot; the message says why.
    """
    probe = path / f".treadle.{os.getpid()}.probe"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{path}: cannot write here: {error.strerror or error}; choose another folder") from error
