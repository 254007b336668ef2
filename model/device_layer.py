"""What the step on CUDA asks of a device: buffers, streams, events, work queued on streams, and recording it once to queue it again.

The step is written against `DeviceLayer`, so that the order of its copies, its events and the reuse of its buffers can be shown without a
GPU: a test's layer runs queued work as late as the events allow, and a buffer written too early shows in the numbers.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Stream = Any
Event = Any


class DeviceLayer(Protocol):
    """A device that works through streams: work on one stream runs in order, streams wait for each other by events."""

    device: torch.device
    captures: bool
    """Whether `capture` is there."""

    def pinned(self, num_bytes: int) -> Tensor:
        """A uint8 buffer of the host that copies read while the host goes on."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """A uint8 buffer of the device, its address a multiple of 256."""
        ...

    def compute_stream(self) -> Stream:
        """The stream that the step computes on."""
        ...

    def side_stream(self) -> Stream:
        """A new stream beside it."""
        ...

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queues what `work` does on a stream; nothing that it writes may be read by the host before an event says so."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that happens when what the stream holds now is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on waits for the event."""
        ...

    def synchronize(self, event: Event) -> None:
        """Holds the host until the event has happened."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` queues, without running it; answers what queues all of it again.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        ...


class CudaLayer:
    """Streams, events and graphs of CUDA."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def side_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: those of NCCL's watchdog and of who reads statistics ask for events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            raise
        return graph.replay


class HostLayer:
    """A device without streams: work runs as it is queued. The fixed-shape step runs on it where there is no CUDA."""

    captures = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def compute_stream(self) -> Stream:
        return None

    def side_stream(self) -> Stream:
        return None

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        work()

    def record(self, stream: Stream) -> Event:
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def synchronize(self, event: Event) -> None:
        return None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("a host records nothing")


def layer_of(device: torch.device) -> DeviceLayer:
    """The layer of a device."""
    return CudaLayer(device) if device.type == "cuda" else HostLayer(device)
