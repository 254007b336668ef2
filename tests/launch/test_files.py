"""Folders of a run."""

from pathlib import Path

import pytest

from treadle.launch.files import make_folder


def test_a_folder_in_the_way_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/run: cannot write here: Not a directory; choose another folder"):
        make_folder(tmp_path / "file/run")


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    make_folder(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []
