"""Rings between host and device: batches go up through pinned slots on a stream of their own, statistics come back and are read late.

A slot is written again only when the event that its last user recorded has happened, so the host waits only when it is a whole ring ahead.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.model.device_layer import DeviceLayer, Event

COPY_STEP_BYTES = 2**20
"""Copies end at multiples of this, so that few lengths occur."""


@dataclass(slots=True)
class _Slot:
    host: Tensor
    device: Tensor
    arrived: Event = None
    """The copy to the device is done: the host side may be written again."""
    consumed: Event = None
    """The step has read the device side: the next copy may overwrite it."""


class UploadRing:
    """A ring of pinned and device buffers with one copy per batch, which runs beside the step before it.

    `stage`, fill what it answers, `send`, compute, `release`, in this order for each batch.
    """

    def __init__(self, layer: DeviceLayer, num_bytes: int, slots: int = 3) -> None:
        self._layer = layer
        self._stream = layer.side_stream()
        self._slots = [_Slot(layer.pinned(num_bytes), layer.buffer(num_bytes)) for _ in range(slots)]
        # Buffers are cleared where the step computes: the first copies must come after that.
        cleared = layer.record(layer.compute_stream())
        for slot in self._slots:
            slot.consumed = cleared
        self._next = 0
        self._current: _Slot | None = None

    def stage(self) -> Tensor:
        """The next host buffer, uint8; waits until its last copy has left it."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.arrived is not None:
            self._layer.synchronize(slot.arrived)
        self._current = slot
        return slot.host

    def send(self, used_bytes: int) -> Tensor:
        """Copies the staged prefix on the ring's stream; what computes from now on finds it in the buffer answered."""
        slot = self._current
        assert slot is not None, "send follows stage"
        end = min(-(-used_bytes // COPY_STEP_BYTES) * COPY_STEP_BYTES, slot.host.numel())
        if slot.consumed is not None:
            self._layer.wait(self._stream, slot.consumed)

        def copy() -> None:
            slot.device[:end].copy_(slot.host[:end], non_blocking=True)

        self._layer.run(self._stream, copy)
        slot.arrived = self._layer.record(self._stream)
        self._layer.wait(self._layer.compute_stream(), slot.arrived)
        return slot.device

    def release(self) -> None:
        """Says that what was queued for computing so far is all that reads the last batch."""
        assert self._current is not None, "release follows send"
        self._current.consumed = self._layer.record(self._layer.compute_stream())
        self._current = None


class Reading:
    """A row on its way to the host."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch: Callable[[], Tensor] | None = fetch
        self._values: list[float] = []
        self._lock = threading.Lock()

    def values(self) -> list[float]:
        """The row; the first call waits for it. Readers and the ring may be on different threads."""
        with self._lock:
            if self._fetch is not None:
                self._values, self._fetch = self._fetch().tolist(), None
            return self._values


class ReadBackRing:
    """Rows of fp64 that the device writes and the host reads when it wants to, up to a ring's length later; older ones are kept by value."""

    def __init__(self, layer: DeviceLayer, width: int, rows: int = 64) -> None:
        self._layer = layer
        self._host = layer.pinned(8 * width * rows).view(torch.float64).view(rows, width)
        self._staged = layer.buffer(8 * width * rows).view(torch.float64).view(rows, width)
        self._open: list[Reading | None] = [None] * rows
        self._next = 0

    def write(self, row: Tensor) -> Reading:
        """Queues the copy of a device row, fp64, to the host; `row` may be overwritten by what is queued later."""
        place = self._next
        self._next = (place + 1) % len(self._open)
        before = self._open[place]
        if before is not None:
            before.values()
        stream, host = self._layer.compute_stream(), self._host[place]

        def copy() -> None:
            self._staged[place].copy_(row)
            host.copy_(self._staged[place], non_blocking=True)

        self._layer.run(stream, copy)
        written = self._layer.record(stream)

        def fetch() -> Tensor:
            self._layer.synchronize(written)
            return host.clone()

        reading = self._open[place] = Reading(fetch)
        return reading
