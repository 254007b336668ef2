"""pipeline/ledger.py: which stage limits, from times that are set here; and what a real stream's statistics hold."""

import json
from collections import Counter
from typing import Any

import pytest

from treadle.pipeline.ledger import STAGES, Ledger
from treadle.pipeline.quarantine import Quarantine


@pytest.mark.parametrize(
    ("times", "stage"),
    [
        ({}, "read"),
        ({"read_s": 5.0, "pack_s": 1.0}, "read"),
        ({"read_s": 1.0, "pack_s": 3.0, "consumer_s": 2.0}, "pack"),
        ({"read_s": 1.0, "consumer_s": 9.0, "waited_s": 2.0, "worked_s": 4.0, "worker_s": 24.0}, "consumer"),
        # The head is waited for: two workers of 10 s each, busy for 18 of 20, are too slow.
        ({"read_s": 1.0, "pack_s": 1.0, "waited_s": 8.0, "worked_s": 18.0, "worker_s": 20.0}, "decode"),
        # The same wait with workers that had next to nothing to do: the samples came too late.
        ({"read_s": 1.0, "pack_s": 1.0, "waited_s": 8.0, "worked_s": 3.0, "worker_s": 20.0}, "read"),
        # Idle because enough was ahead, for 8 s each: what they are there for is the 4 s that are left.
        ({"read_s": 0.5, "waited_s": 3.0, "worked_s": 3.0, "worker_s": 20.0, "full_s": 8.0}, "decode"),
        ({"inline_s": 3.0, "read_s": 1.0}, "decode"),
    ],
)
def test_the_stage_that_the_others_wait_for_is_named(times: dict[str, float], stage: str) -> None:
    ledger = Ledger(Quarantine(None), Counter(), batches=1)
    for name, seconds in times.items():
        setattr(ledger, name, seconds)
    assert ledger.stats(2, 0)["limiting_stage"] == stage
    assert stage in STAGES


def test_nothing_limits_before_the_first_batch() -> None:
    assert Ledger(Quarantine(None), Counter(), read_s=3.0).stats(2, 0)["limiting_stage"] == ""


def test_idle_workers_wait_for_room_or_for_input() -> None:
    decode = Ledger(Quarantine(None), Counter(), worked_s=5.0, worker_s=20.0, full_s=4.0).stats(2, 7)["decode"]
    # 20 s of two workers, 5 of them busy: of the 15 idle ones 2 * 4 passed while enough was ahead.
    assert (decode["busy_s"], decode["wait_room_s"], decode["wait_input_s"], decode["in_flight_bytes"]) == (5.0, 8.0, 7.0, 7)


def test_a_streams_statistics_are_whole(tars: Any, mixed: Any) -> None:
    with mixed() as stream:
        next(stream)
        running = stream.stats()
        assert running["limiting_stage"] in STAGES
        assert running["decode"]["workers"] == 2
        rest = list(stream)
        stats = stream.stats()
    json.dumps(stats)
    for stage in ("read", "decode", "pack"):
        assert {"busy_s", "wait_input_s", "wait_room_s", "bytes", "bytes_per_s"} <= set(stats[stage])
        assert all(stats[stage][name] >= running[stage][name] >= 0 for name in ("busy_s", "bytes"))
    assert stats["pack"]["batches"] == 1 + len(rest)
    assert stats["elapsed_s"] > 0
    # Two epochs of 45 samples; payloads of pictures and sounds are larger than their files.
    assert stats["read"]["samples"] == 90
    assert stats["decode"]["bytes"] > 0
