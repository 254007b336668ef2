"""Rings between host and device, on a device that runs what it is given as late as the events allow.

A slot overwritten too early, or read before it has arrived, shows in the numbers; a host that never waits too long shows in the counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.model.device_ring import COPY_STEP_BYTES, ReadBackRing, UploadRing


@dataclass(eq=False)
class FakeEvent:
    """Happens when its stream has run everything before it."""

    stream: "FakeStream"
    place: int

    def happened(self) -> bool:
        return self.stream.done >= self.place


@dataclass(eq=False)
class FakeStream:
    """Queued work, and how much of it has run."""

    queue: list[Callable[[], None] | FakeEvent] = field(default_factory=list[Callable[[], None] | FakeEvent])
    done: int = 0

    def run_to(self, place: int) -> None:
        while self.done < place:
            entry = self.queue[self.done]
            if isinstance(entry, FakeEvent):
                entry.stream.run_to(entry.place)
            else:
                entry()
            self.done += 1


class LazyLayer:
    """A device layer whose work waits until the host waits for it."""

    captures = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute = FakeStream()
        self.streams = [self.compute]
        self.waits = 0
        """Times that the host had to wait."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("rings are filled outside of graphs")

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def compute_stream(self) -> FakeStream:
        return self.compute

    def side_stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def run(self, stream: FakeStream, work: Callable[[], None]) -> None:
        stream.queue.append(work)

    def record(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(stream, len(stream.queue))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.queue.append(event)

    def synchronize(self, event: FakeEvent) -> None:
        if not event.happened():
            self.waits += 1
            event.stream.run_to(event.place)

    def finish(self) -> None:
        for stream in self.streams:
            stream.run_to(len(stream.queue))


SIZE = 1000


def content(step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(step).integers(0, 256, SIZE, dtype=np.uint8)


def upload(layer: LazyLayer, ring: UploadRing, steps: range, seen: dict[int, bytes]) -> None:
    """Sends a batch per step; the queued step reads its whole buffer twice, at its beginning and at its end."""
    for step in steps:
        host = ring.stage()
        host[:SIZE].copy_(torch.from_numpy(content(step)))
        arrived = ring.send(SIZE)

        def work(step: int = step, arrived: Tensor = arrived) -> None:
            seen[step] = arrived[:SIZE].numpy().tobytes()

        def again(step: int = step, arrived: Tensor = arrived) -> None:
            assert arrived[:SIZE].numpy().tobytes() == seen[step], "overwritten while the step ran"

        layer.run(layer.compute, work)
        layer.run(layer.compute, again)
        ring.release()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_step_sees_its_own_batch(slots: int) -> None:
    layer, seen = LazyLayer(), dict[int, bytes]()
    upload(layer, UploadRing(layer, 4096, slots), range(20), seen)
    layer.finish()
    assert seen == {step: content(step).tobytes() for step in range(20)}


def test_the_host_waits_only_when_it_is_a_ring_ahead() -> None:
    layer, seen = LazyLayer(), dict[int, bytes]()
    ring = UploadRing(layer, 4096, 3)
    upload(layer, ring, range(3), seen)
    assert layer.waits == 0 and not seen
    upload(layer, ring, range(3, 4), seen)
    # Only the copy of step 0 had to leave its pinned slot; no step has run.
    assert layer.waits == 1 and not seen


def test_a_copy_waits_for_the_step_that_reads_its_target() -> None:
    """Without the event that `release` records, the fourth copy would overwrite what the first step has yet to read."""
    layer, seen = LazyLayer(), dict[int, bytes]()
    ring = UploadRing(layer, 4096, 3)
    upload(layer, ring, range(3), seen)
    upload(layer, ring, range(3, 4), seen)
    copies = layer.streams[1]
    copies.run_to(len(copies.queue))
    assert 0 in seen and 1 not in seen, "the fourth copy runs after the first step and needs no other"


def test_only_the_used_prefix_is_copied() -> None:
    layer = LazyLayer()
    ring = UploadRing(layer, 3 * COPY_STEP_BYTES, 1)
    ring.stage().zero_()
    arrived = ring.send(COPY_STEP_BYTES + 1)
    layer.finish()
    assert not arrived[: 2 * COPY_STEP_BYTES].any() and bool((arrived[2 * COPY_STEP_BYTES :] == 255).all())


def test_calls_out_of_order_are_refused() -> None:
    ring = UploadRing(LazyLayer(), 16)
    with pytest.raises(AssertionError, match="send follows stage"):
        ring.send(1)
    with pytest.raises(AssertionError, match="release follows send"):
        ring.release()


def test_rows_are_read_late_and_never_lost() -> None:
    layer = LazyLayer()
    ring = ReadBackRing(layer, 2, rows=4)
    row = torch.zeros(2, dtype=torch.float64)
    readings = []
    for step in range(10):

        def write(step: int = step) -> None:
            row.copy_(torch.tensor([step, step * step], dtype=torch.float64))

        layer.run(layer.compute, write)
        readings.append(ring.write(row))
        # The host has waited only for rows that the ring was about to overwrite.
        assert layer.waits <= max(0, step - 3)
    assert layer.waits == 6
    assert [r.values() for r in reversed(readings)] == [[s, s * s] for s in reversed(range(10))]
    assert readings[0].values() == [0, 0]


def test_writing_a_row_waits_for_nothing() -> None:
    layer = LazyLayer()
    ring = ReadBackRing(layer, 1, rows=64)
    row = torch.ones(1, dtype=torch.float64)
    reading = [ring.write(row) for _ in range(64)][-1]
    assert layer.waits == 0
    assert reading.values() == [1.0] and layer.waits == 1
