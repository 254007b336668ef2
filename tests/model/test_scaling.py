"""The paper model of a step on many GPUs: its page, and how its parts grow."""

from pathlib import Path

import pytest

from treadle.kernels.registry import Workload
from treadle.kernels.roofline import CHIPS
from treadle.model.scaling import BEGIN, END, Cluster, StepTime, gather_seconds, step_time, sum_seconds, tables

PAGE = Path(__file__).parents[2] / "docs/scaling.md"


def at(gpus: int) -> StepTime:
    return step_time(gpus, Workload(), CHIPS[-1], Cluster())


def test_the_page_holds_the_tables() -> None:
    generated = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert generated.strip() == tables(), "run python -m treadle.model.scaling"


def test_alone_nothing_is_sent() -> None:
    alone = at(1)
    assert (alone.gather, alone.reduce, alone.exposed, alone.host) == (0, 0, 0, 0)
    assert alone.efficiency == pytest.approx(1, rel=1e-3)


def test_pairs_and_gather_are_linear_and_the_sum_is_not() -> None:
    few, many = at(512), at(4096)
    assert many.pairs / few.pairs == pytest.approx(8)
    assert many.gather / few.gather == pytest.approx(8, rel=0.05)
    # Bytes have all but stopped growing; eight times the machines are three more rounds.
    assert many.reduce / few.reduce < 1.2
    assert many.host - few.host == pytest.approx(2 * 3 * Cluster().host_latency_s)


def test_a_sum_and_a_gather_take_their_bytes_over_the_narrowest_link() -> None:
    cluster = Cluster(node_latency_s=0, network_latency_s=0, node_bytes_per_s=8e9, network_bytes_per_s=1e9)
    # Inside: 2 * 7/8 of 8 GB at 8 GB/s = 1.75 s; between two machines 2 * 1/2 of an eighth of it at 1 GB/s = 1 s.
    assert sum_seconds(cluster, 8, 8e9) == pytest.approx(1.75)
    assert sum_seconds(cluster, 16, 8e9) == pytest.approx(2.75)
    # Eight parts of 1 GB from the other machine, an eighth by each port: 1 s; 15 GB inside at 8 GB/s: 1.875 s.
    assert gather_seconds(cluster, 16, 1e9) == pytest.approx(1.875)
    assert gather_seconds(cluster, 32, 1e9) == pytest.approx(31 / 8)


def test_a_short_step_does_not_hide_the_sum() -> None:
    tiny = step_time(64, Workload(positions=2048), CHIPS[-1], Cluster())
    assert tiny.exposed == pytest.approx(tiny.reduce - 2 / 3 * tiny.compute)
    assert at(64).exposed < at(64).reduce / 10
