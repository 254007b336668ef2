"""The quarantine: counts, and whole lines."""

import json
import pickle
import threading
from pathlib import Path

import pytest

from treadle.pipeline.quarantine import MAX_TEXT, Quarantine


def test_lines_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "quarantine.jsonl"
    with Quarantine(path) as quarantine:
        quarantine.record(url="a.tar", key="0001", member="0001.jpg", offset=512, kind="corrupt", reason="cut\nhere \udcff")
        quarantine.record(url="b.tar", offset=2048, kind="bad_checksum", reason="a header")
        quarantine.record(url="b.tar", key="0002", kind="corrupt", reason="x")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"url": "a.tar", "key": "0001", "member": "0001.jpg", "offset": 512, "kind": "corrupt", "reason": "cut\nhere \udcff"}
    assert lines[1] == {"url": "b.tar", "key": "", "member": "", "offset": 2048, "kind": "bad_checksum", "reason": "a header"}
    assert len(lines) == 3
    assert quarantine.counts == {"corrupt": 2, "bad_checksum": 1}
    assert quarantine.total == 3
    assert quarantine.summary() == f"3 quarantined: 2 corrupt, 1 bad_checksum (see {path})"


def test_counts_alone() -> None:
    quarantine = Quarantine()
    assert quarantine.summary() == "nothing was quarantined"
    quarantine.record(kind="empty", reason="")
    quarantine.close()
    quarantine.close()
    quarantine.record(kind="empty", reason="")
    assert quarantine.summary() == "2 quarantined: 2 empty"


def test_it_appends(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for _ in range(2):
        with Quarantine(str(path)) as quarantine:
            quarantine.record(kind="empty", reason="")
    assert len(path.read_text().splitlines()) == 2


def test_lines_stay_whole_among_threads(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    with Quarantine(path) as quarantine, Quarantine(path) as other:
        threads = [
            threading.Thread(target=lambda log=log: [log.record(key="k" * 500, kind="corrupt", reason="r" * 400) for _ in range(100)])
            for log in (quarantine, other, quarantine, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert quarantine.total == other.total == 200
    assert {json.loads(line)["key"] for line in path.read_text().splitlines()} == {"k" * 500}
    assert len(path.read_text().splitlines()) == 400


def test_a_line_is_bounded_and_shows_no_credentials(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    with Quarantine(path) as quarantine:
        quarantine.record(
            url="https://me:hunter2@host/a.tar?sig=s3cr3t",
            key="k" * 10**6,
            member="m" * 10**6,
            kind="corrupt",
            reason="https://me:hunter2@host/a.tar?sig=s3cr3t " + "r" * 10**6,
        )
    text = path.read_text()
    assert len(text) < 4 * MAX_TEXT
    assert "hunter2" not in text and "s3cr3t" not in text
    assert json.loads(text)["url"] == "https://host/a.tar"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "q.jsonl", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be opened for appending .* name one in a folder that can be written"):
            Quarantine(path)


def test_a_full_disk_is_told_once_and_counting_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine("/dev/full")
    for _ in range(3):
        quarantine.record(kind="corrupt", reason="")
    quarantine.close()
    assert quarantine.counts["corrupt"] == 3
    assert len(caplog.records) == 1


def test_it_pickles(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    with Quarantine(path) as quarantine:
        quarantine.record(kind="empty", reason="")
        with pickle.loads(pickle.dumps(quarantine)) as again:
            assert again.total == 0
            again.record(kind="empty", reason="")
    assert len(path.read_text().splitlines()) == 2
    assert pickle.loads(pickle.dumps(Quarantine())).path is None
