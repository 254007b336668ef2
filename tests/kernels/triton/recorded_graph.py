"""A graph on the CPU: every operation that a step queues is recorded once and run again on the same memory, as a CUDA graph does.

What Python decided while recording is frozen: a number that went into an operation, a branch, a size. A replay whose batch, step or rate
differ from the recorded ones shows it in the numbers. What would wait for the device is refused outright.

Kernels in Triton's interpreter and collectives of gloo are recorded as what they are.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from treadle.kernels.registry import Kernel
from treadle.model.device_layer import HostLayer
from treadle.model.mesh import ProcessWorld, World

READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.equal",
    "aten.is_nonzero",
)
"""What waits for the device: values that the host reads, and shapes that follow from values."""


def refuse_reading(name: str, args: Any, kwargs: Any) -> None:
    """Raises AssertionError for an operation that waits for the device."""
    assert not name.startswith(READS), f"{name} waits for the device"
    if name.startswith("aten.index.Tensor") or name.startswith("aten.index_put"):
        assert all(i is None or i.dtype is not torch.bool for i in args[1]), f"{name} by a mask waits for the device"
    if name.startswith("aten.repeat_interleave"):
        assert (kwargs or {}).get("output_size") is not None, f"{name} without output_size waits for the device"


class NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no dispatch modes
    """Refuses what would wait for the device; kernels are launched outside of it, as the interpreter reads its arguments."""

    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            refuse_reading(name_of(func), args, kwargs)
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    return str(func.name() if hasattr(func, "name") else func).replace("::", ".")


class Recorder(NoReading):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Callable[[], object]] = []
        self.names: list[str] = []

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Lists of an operation may be changed by who called it.
        args = tuple(list(a) if isinstance(a, list) else a for a in args)
        answer = func(*args, **kwargs)
        if not self.paused:
            self.names.append(name_of(func))
            self.nodes.append(lambda: refill(func(*args, **kwargs), answer))
        return answer

    def whole(self, name: str, run: Callable[[], object]) -> None:
        """A launch of a kernel, or a collective that copies when it is waited for: it writes to tensors that are there already."""
        self.paused = True
        try:
            run()
        finally:
            self.paused = False
        self.names.append(name)
        self.nodes.append(run)


def refill(again: Any, answer: Any) -> None:
    """Puts what an operation answers now where it answered before; views and changes in place are there already."""
    for new, old in zip(tree_leaves(again), tree_leaves(answer), strict=True):
        if isinstance(new, Tensor):
            if new.data_ptr() != old.data_ptr():
                old.copy_(new)
        elif hasattr(new, "wait"):
            new.wait()


class RecordingLayer(HostLayer):
    """A host whose work can be captured. Keeps what was captured and how often it ran again."""

    captures = True

    def __init__(self, device: torch.device, monkeypatch: Any, world: World | None = None) -> None:
        super().__init__(device)
        self._world = world
        self.recorder: Recorder | None = None
        self.replays = 0
        self._patch = monkeypatch

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records `work`, leaving memory as it was: a real capture runs nothing."""
        self.recorder = recorder = Recorder()
        before = {
            t.untyped_storage().data_ptr(): (t, t.untyped_storage().clone()) for t in gc.get_objects() if type(t) in (Tensor, Parameter)
        }
        launch = Kernel.launch

        def recorded(kernel: Kernel, *args: Any, **kwargs: Any) -> None:
            recorder.whole(f"kernel.{kernel.name}", lambda: launch(kernel, *args, **kwargs))

        with self._patch.context() as patch:
            patch.setattr(Kernel, "launch", recorded)
            if isinstance(self._world, ProcessWorld):
                scatter = self._world._scatter
                patch.setattr(self._world, "_scatter", lambda *args: recorder.whole("c10d.reduce_scatter", lambda: scatter(*args)))
            with recorder:
                work()
        for tensor, storage in before.values():
            tensor.untyped_storage().copy_(storage)

        def replay() -> None:
            self.replays += 1
            # Operations were recorded below autograd.
            with torch._C._AutoDispatchBelowAutograd():
                for node in recorder.nodes:
                    node()

        return replay

    def refuse(self, work: Callable[[], None]) -> Callable[[], None]:
        """A capture that fails at its end: until then it is the others' partner, whose recording really sends."""
        RecordingLayer.capture(self, work)
        raise RuntimeError("operation not permitted when stream is capturing")
