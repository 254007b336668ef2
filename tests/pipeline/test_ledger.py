"""pipeline/ledger.py: which stage limits, from times that are set here; and what a real stream's statistics hold."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.ledger import STAGES, Ledger
from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.stream import ShardStream


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


def test_what_each_stage_did_is_told() -> None:
    ledger = Ledger(
        Quarantine(None), Counter(), samples=30, read_bytes=8000, batches=3, batch_bytes=2000, elapsed_s=4.0, read_s=5.0, storage_s=2.0,
        full_s=1.5, inline_s=0.5, pack_s=0.75, consumer_s=0.25, worked_s=6.0, worker_s=16.0, waited_s=1.25, decoded_bytes=16_000,
    )  # fmt: skip
    stats = ledger.stats(2, 7)
    # Reading took 5 s, 2 of them waiting for storage; while enough was ahead, for 1.5 s, it and both workers waited for room.
    assert stats["read"] == {
        "busy_s": 3.0, "wait_input_s": 2.0, "wait_room_s": 1.5, "samples": 30, "bytes": 8000, "bytes_per_s": 2000.0,
    }  # fmt: skip
    decode = stats["decode"]
    assert (decode["busy_s"], decode["wait_room_s"], decode["wait_input_s"], decode["bytes_per_s"]) == (6.5, 3.0, 7.0, 4000.0)
    pack = stats["pack"]
    assert (pack["busy_s"], pack["wait_input_s"], pack["wait_room_s"], pack["batches"]) == (0.75, 1.25, 0.25, 3)
    assert (pack["bytes"], pack["bytes_per_s"]) == (2000, 500.0)


def test_waits_for_storage_and_for_the_consumer_are_clocked(tars: Any, tmp_path: Path, server: Any) -> None:
    tars.write_texts(tmp_path, [30])
    server.body = (tmp_path / "000.tar").read_bytes()

    def late(handler: Any) -> None:
        time.sleep(0.05)
        handler.serve()

    server.always = late
    with ShardStream(server.url, tars.text_shape, lanes=1, epochs=1, window=1, threads=1) as stream:
        next(stream)
        assert stream.stats()["read"]["wait_input_s"] >= 0.04
        time.sleep(0.05)
        next(stream)
        assert stream.stats()["pack"]["wait_room_s"] >= 0.05
        assert stream.stats()["elapsed_s"] >= 0.1


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
