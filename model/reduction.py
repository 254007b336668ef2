"""Summing the flat gradient over ranks while the backward pass still runs.

The buffer is cut into fixed slices (`mesh.BUCKET_BYTES`), at the same places in every step and on every rank. In a step's last backward pass
a slice is sent off once every parameter in it has its gradient, but never before the slices ahead of it: all ranks send in one order, the
reverse of the forward pass, whatever modalities each of them got. What has not been sent when the pass ends, because a rank had nothing to
run or no pictures, goes then. Sums are of the same slices either way, so overlap changes no bit.

Where pairs are scored, the backward pass itself begins with a collective, the gather's; slices wait for it, so that every rank calls its
collectives in one order.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from treadle.model.mesh import BUCKET_BYTES, World


class Layout(Protocol):
    """What a reduction needs of flat parameters."""

    gradients: Tensor

    def regions(self) -> Sequence[tuple[int, int]]:
        """The spans of the buffer that ranks sum."""
        ...


class GradientReduction:
    """The slices of one flat gradient and where each stands in the current step.

    Args:
        module: whose parameters' gradients are views of the buffer.
        bucket_bytes: size of a slice.
    """

    def __init__(self, world: World, parameters: Layout, module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._world = world
        self._gradients = parameters.gradients
        step = max(1, bucket_bytes // self._gradients.element_size())
        slices = [(at, min(at + step, end)) for begin, end in parameters.regions() for at in range(begin, end, step)]
        self.sent_early = 0
        """Slices of the last step that were on their way before its backward pass had ended."""
        self._armed = self._open = False
        self._sent = 0
        self._missing: list[int] = []
        if world.size == 1:
            self._slices: list[tuple[int, int]] = []
            return
        inside: list[list[int]] = [[] for _ in slices]
        places: list[list[int]] = []
        for number, parameter in enumerate(module.parameters()):
            begin = self._begin(parameter)
            end = begin + parameter.numel()
            places.append([] if begin < 0 else [k for k, (a, b) in enumerate(slices) if a < end and begin < b])
            for k in places[-1]:
                inside[k].append(number)
        # Gradients come in the reverse of the forward pass, which names parameters in order: a slice waits for its first.
        order = sorted(range(len(slices)), key=lambda k: (-min(inside[k], default=0), -k))
        rank_of = {k: place for place, k in enumerate(order)}
        self._slices = [slices[k] for k in order]
        self._holds = [len(inside[k]) for k in order]
        for parameter, found in zip(module.parameters(), places, strict=True):
            if found:
                hook = _Hook(self, [rank_of[k] for k in found])
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._works: list[object] = []

    @property
    def slices(self) -> list[tuple[int, int]]:
        """The slices, in the order in which they are sent."""
        return list(self._slices)

    def arm(self, *, after_rows: bool) -> None:
        """Says that the next backward pass is the step's last: from now on slices go as they are done.

        Args:
            after_rows: the pass begins with the gradient of gathered rows, which goes first.
        """
        if self._world.size == 1:
            return
        self._missing = list(self._holds)
        self._sent, self._armed, self._open = 0, True, not after_rows
        self._works.clear()
        self._world.after_rows = self._release if after_rows else None

    def finish(self) -> None:
        """Sends what is left and waits for all of it (collective)."""
        if self._world.size == 1:
            return
        self._world.after_rows = None
        self.sent_early = self._sent if self._armed else 0
        if not self._armed:
            self._sent = 0
            self._works.clear()
        self._armed = False
        while self._sent < len(self._slices):
            self._send()
        for work in self._works:
            self._world.wait_for(work)
        self._works.clear()

    def _begin(self, parameter: nn.Parameter) -> int:
        """Where a parameter's gradient lies in the buffer, negative where it lies elsewhere."""
        gradient = parameter.grad
        if gradient is None or gradient.untyped_storage().data_ptr() != self._gradients.untyped_storage().data_ptr():
            return -1
        return int(gradient.storage_offset() - self._gradients.storage_offset())

    def done(self, found: list[int]) -> None:
        """A parameter in these slices has its gradient."""
        if not self._armed:
            return
        for place in found:
            self._missing[place] -= 1
        if self._open:
            self._send_done()

    def _release(self) -> None:
        self._open = True
        self._send_done()

    def _send_done(self) -> None:
        while self._sent < len(self._slices) and self._missing[self._sent] <= 0:
            self._send()

    def _send(self) -> None:
        begin, end = self._slices[self._sent]
        self._works.append(self._world.begin_sum(self._gradients[begin:end]))
        self._sent += 1


class _Hook:
    def __init__(self, reduction: GradientReduction, found: list[int]) -> None:
        self._reduction, self._found = reduction, found

    def __call__(self, parameter: Tensor) -> None:
        self._reduction.done(self._found)
