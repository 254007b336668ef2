"""Small files and folders of a run."""

import os
import shutil
from pathlib import Path

from treadle.pipeline.whole_file import whole_file


def write_text(path: Path, text: str) -> None:
    """Writes a whole text file, UTF-8.

    Raises:
        OSError: the folder or the disk refused it.
    """
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, replacing what had it: a link where the file system has them, else a copy.

    Raises:
        OSError: the folder or the disk refused it.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        try:
            os.link(source, part)
        except OSError:
            shutil.copyfile(source, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


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
