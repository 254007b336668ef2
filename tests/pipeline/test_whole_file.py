"""A file is whole or not there, whatever happens while it is written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.pipeline.whole_file import link_or_copy, start_write_back, whole_file


def test_it_takes_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a [1].bin"
    target.write_bytes(b"old")
    with whole_file(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_parts_sent_ahead_to_the_disk_are_the_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [bytes([value]) * 9_999 for value in range(5)]
    for hints in (True, False):
        if not hints:
            monkeypatch.delattr(os, "posix_fadvise", raising=False)
        ends = [0]
        with whole_file(tmp_path / "a") as file:
            for part in parts:
                file.write(part)
                ends.append(start_write_back(file, ends[-1]))
        assert ends == [9_999 * count for count in range(6)]
        assert (tmp_path / "a").read_bytes() == b"".join(parts)


def test_its_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    with whole_file(tmp_path / "whole") as file:
        file.write(b"x")
    with open(tmp_path / "plain", "wb") as file:
        file.write(b"x")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="half way"), whole_file(target) as file:
        file.write(b"half")
        raise RuntimeError("half way")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    target = tmp_path / "a"
    code = (
        "import sys, time\n"
        "from treadle.pipeline.whole_file import whole_file\n"
        "with whole_file(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
    )
    writer = subprocess.Popen([sys.executable, "-P", "-c", code, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    with whole_file(target) as file:
        file.write(b"mine")
    assert len(list(tmp_path.glob(".a.*.tmp"))) == 1, "the living writer's file must stay"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert target.read_bytes() == b"mine"
    with whole_file(target) as file:
        file.write(b"again")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_second_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("new")
    other.write_text("old")
    (tmp_path / ".other.123.part").write_text("left by a killed process")
    link_or_copy(one, other)
    assert other.read_text() == "new" and sorted(os.listdir(tmp_path)) == ["one", "other"]
    one.unlink()
    assert other.read_text() == "new"


def test_a_copy_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "one").write_text("new")
    link_or_copy(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other").read_text() == "new"
