"""The budget of what may be left out: a run past it stops and says so; and what a stream sums up at its end."""

import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.quarantine import Budget, Quarantine, QuarantineFullError
from treadle.pipeline.stream import ShardStream


@pytest.fixture(name="pattern")
def pattern_fixture(tars: Any, tmp_path: Path) -> Iterator[str]:
    """A shard of 100 samples with a text each; every tenth has a picture too, that is none."""
    samples = [(f"k{number:03d}", {"txt": b"text"} | ({"png": b"no picture"} if number % 10 == 9 else {})) for number in range(100)]
    tars.write_shard(tmp_path / "0.tar", samples)
    yield str(tmp_path / "0.tar")


def run(pattern: Any, tars: Any, **given: Any) -> tuple[int, QuarantineFullError | None]:
    """Texts packed, and what stopped the run."""
    packed = 0
    given = {"epochs": 1, "shuffle": 0, "lanes": 1, "window": 1, "threads": 1, **given}
    with ShardStream(pattern, tars.shape, **given) as stream:
        try:
            for batch in stream:
                packed += batch.segments
        except QuarantineFullError as error:
            # A stream that was stopped stays so.
            with pytest.raises(QuarantineFullError):
                next(stream)
            return packed, error
    return packed, None


@pytest.mark.parametrize("most", [None, 10, 11, 0.11, 0.999])
def test_within_the_budget(pattern: str, tars: Any, most: float | None) -> None:
    assert run(pattern, tars, max_quarantined=most, quarantine_probation=0) == (100, None)


@pytest.mark.parametrize("most", [0, 3, 9])
def test_past_a_count(pattern: str, tars: Any, most: int) -> None:
    packed, error = run(pattern, tars, max_quarantined=most)
    assert error is not None
    # The one too many is found in the sample of that number, every tenth.
    assert f"{most + 1} quarantined" in str(error)
    assert f"after {10 * (most + 1)} samples" in str(error)
    assert f"max_quarantined={most}" in str(error)
    assert packed <= 10 * (most + 1)


def test_past_a_share_after_the_probation(pattern: str, tars: Any) -> None:
    # Nine of a hundred are a tenth from the tenth sample on; before the fiftieth nobody judges.
    _, error = run(pattern, tars, max_quarantined=0.09, quarantine_probation=45)
    assert error is not None
    assert "5 quarantined: 5 unsupported, after 50 samples; max_quarantined=0.09" in str(error)


def test_a_share_is_judged_at_the_end_whatever_the_probation(pattern: str, tars: Any) -> None:
    packed, error = run(pattern, tars, max_quarantined=0.09, quarantine_probation=1000)
    assert packed == 100
    assert error is not None and "after 100 samples" in str(error)


def test_a_count_counts_the_same_thing_once(pattern: str, tars: Any) -> None:
    assert run(pattern, tars, max_quarantined=10, epochs=3) == (300, None)
    _, error = run(pattern, tars, max_quarantined=9, epochs=3)
    assert error is not None


def test_whole_shards_count(tars: Any, tmp_path: Path) -> None:
    tars.write_texts(tmp_path / "good", [5])
    for number in range(4):
        (tmp_path / f"bad{number}.tar").write_bytes(b"no tar" * 200)
    urls = [str(tmp_path / "good" / "000.tar"), str(tmp_path / "bad?.tar")]
    assert run(urls, tars, max_quarantined=0.8)[1] is None
    _, error = run(urls, tars, max_quarantined=0.79)
    assert error is not None and "4 quarantined: 4 not_a_tar" in str(error)


def test_the_log_is_named(pattern: str, tars: Any, tmp_path: Path) -> None:
    log = tmp_path / "quarantine.jsonl"
    _, error = run(pattern, tars, max_quarantined=1, quarantine=log)
    assert error is not None and str(log) in str(error)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["key"], line["member"], line["kind"]) for line in lines] == [
        ("k009", "k009.png", "unsupported"),
        ("k019", "k019.png", "unsupported"),
    ]


@pytest.mark.parametrize("most", [-1, 1.0, 0.0, 2.5, True, "all", float("nan")])
def test_a_budget_is_checked(pattern: str, tars: Any, most: Any) -> None:
    with pytest.raises(ValueError, match="max_quarantined"):
        Budget(max_quarantined=most)
    with pytest.raises(ValueError, match="max_quarantined"):
        ShardStream(pattern, tars.shape, max_quarantined=most)


def test_the_error_crosses_processes() -> None:
    quarantine = Quarantine()
    quarantine.record(kind="corrupt", reason="because")
    with pytest.raises(QuarantineFullError) as raised:
        quarantine.check(Budget(max_quarantined=0), 7, "x")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_the_end_is_summed_up_once(pattern: str, tars: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treadle.pipeline.stream"):
        run(pattern, tars)
    told = [record.message for record in caplog.records if record.name == "treadle.pipeline.stream"]
    assert len(told) == 1
    assert told[0].startswith("end of the data:")
    assert "of 100 samples; 10 quarantined: 10 unsupported" in told[0]


def test_a_stream_that_is_closed_early_is_summed_up(pattern: str, tars: Any, caplog: pytest.LogCaptureFixture) -> None:
    stream = ShardStream(pattern, tars.shape, shuffle=0, lanes=1, window=1, threads=1)
    next(stream)
    with caplog.at_level(logging.INFO, "treadle.pipeline.stream"):
        stream.close()
        stream.close()
    (record,) = [record for record in caplog.records if record.name == "treadle.pipeline.stream"]
    assert record.message.startswith("closed before the end of the data: 1 batches of ")
