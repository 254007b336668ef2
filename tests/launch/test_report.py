"""Rows, curves, bars and tables of a run."""

import io
import json
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from treadle.launch.report import Bar, RunLog, console, recall_table
from treadle.model.evaluate import retrieve_between


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder), size_guidance={"scalars": 0}
    )
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class TestRunLog:
    def test_rows_and_curves(self, tmp_path: Path) -> None:
        with RunLog(tmp_path) as log:
            log.row(1, "train", {"loss": 2.5, "dropped": 0})
            log.row(2, "train", {"loss": math.nan, "dropped": 1})
            log.row(2, "held_out", {"a/recall_at_1": 0.5})
        found = read(log.path)
        assert [(row["step"], row["kind"]) for row in found] == [(1, "train"), (2, "train"), (2, "held_out")]
        assert found[0]["loss"] == 2.5 and found[1]["loss"] is None and found[2]["a/recall_at_1"] == 0.5
        assert scalars(log.tensorboard) == {
            "train/loss": [(1, 2.5)],
            "train/dropped": [(1, 0.0), (2, 1.0)],
            "held_out/a/recall_at_1": [(2, 0.5)],
        }

    def test_a_resumed_run_drops_what_it_takes_again(self, tmp_path: Path) -> None:
        with RunLog(tmp_path) as log:
            for step in (1, 2, 3, 4):
                log.row(step, "train", {"loss": float(step)})
        with log.path.open("a", encoding="utf-8") as file:
            file.write('{"step": 5, "kind": "tra')  # cut short by a crash
        with RunLog(tmp_path, after_step=2) as log:
            log.row(3, "train", {"loss": 30.0})
        assert [row["loss"] for row in read(log.path)] == [1.0, 2.0, 30.0]
        assert scalars(log.tensorboard)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]

    def test_a_new_run_starts_a_new_file(self, tmp_path: Path) -> None:
        for _ in range(2):
            with RunLog(tmp_path) as log:
                log.row(1, "train", {"loss": 1.0})
        assert len(read(tmp_path / "metrics.jsonl")) == 1

    def test_a_folder_that_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="metrics"):
            RunLog(tmp_path / "none")


class TestBar:
    def test_without_a_terminal_it_says_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Bar("packing", 10) as bar:
            bar.at(3, "fill 0.9")
            bar.say("something happened")
            bar.at(10)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[0] == "something happened"
        assert err.splitlines()[-1].startswith("packing: 10/10 after ")

    def test_quiet_says_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Bar("packing", None, quiet=True) as bar:
            bar.at(3)
            bar.say("something happened")
        assert capsys.readouterr() == ("", "")

    def test_an_error_gets_no_last_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ValueError, match="no"), Bar("packing", None) as bar:
            bar.at(3)
            raise ValueError("no")
        assert capsys.readouterr().err == ""


def test_the_recall_table_says_chance_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1, 3, 2]]
    found = retrieve_between(vectors, ["text"] * 4 + ["image"] * 4, [0, 1, 2, 3] * 2)
    recall_table(found, "a title")
    out = capsys.readouterr().out
    # Two of four found first: 50 %, sqrt(0.25 / 4) = 25 %, chance 1 / 4.
    assert "50.0 ± 25.0 (25.0)" in out
    assert "text → image" in out and "image → text" in out and "a title" in out


def test_tables_are_wide_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console(io.StringIO()).width == 120
