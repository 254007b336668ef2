"""Gradients summed over micro-batches of a user's own loop, plain or weighted, apart from the module's `.grad`.

Gradients are read by parameter name from `.grad`, which stays as it is; a parameter without one stays absent. Tied parameters have one
name, the first. Every argument is checked before anything changes.
"""

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.model.mesh import World
from treadle.model.record_values import refuse
from treadle.shape import require_member

WORK_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightedAccumulationState:
    """Where a weighted window stands, its gradients aside."""

    dtype: torch.dtype
    """Type that gradients are summed in."""
    loss_scale: float
    """What the loss was multiplied by; divided out once, at the end."""
    total_weight: float
    """Weight of the window so far."""
    microbatches: int
    """Micro-batches of the window so far, those of weight zero too."""


@dataclass(frozen=True, slots=True, eq=False)
class AccumulatedGradients(Mapping[str, Tensor]):
    """A finished window; also a mapping of parameter names to gradients."""

    gradients: dict[str, Tensor]
    state: WeightedAccumulationState | None
    """The window as it was finished; None without weights."""

    def __getitem__(self, name: str) -> Tensor:
        """The gradient of the parameter of that name, in its shape.

        Raises:
            KeyError: it has none.
        """
        return self.gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        """Parameters that have a gradient."""
        return len(self.gradients)

    def assign(self, module: nn.Module) -> None:
        """Sets every parameter's `.grad` to its gradient here, in the parameter's type, and to None where there is none.

        Raises:
            ValueError: a gradient names no parameter of `module`, or has another shape.
        """
        parameters = dict(module.named_parameters())
        check_gradients(self.gradients, parameters)
        for name, parameter in parameters.items():
            gradient = self.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)


def check_gradients(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Checks that every gradient belongs to a parameter of its shape.

    Raises:
        ValueError: one does not.
    """
    for name, gradient in gradients.items():
        if name not in parameters:
            raise ValueError(f"gradient {name!r} names no parameter of the module")
        if gradient.shape != parameters[name].shape:
            raise ValueError(f"gradient {name!r} has shape {tuple(gradient.shape)}, its parameter {tuple(parameters[name].shape)}")


class _Window:
    """The sums of one window."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """The sums so far, unnormalised, by parameter name."""
        return self._sums

    def _read(self, module: object) -> dict[str, Tensor]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"module is {type(module).__name__}: gradients are read from a torch.nn.Module")
        found: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach()
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            kept = self._sums.get(name)
            if gradient.is_meta or (kept is not None and kept.device != gradient.device):
                raise ValueError(f"gradient {name!r} is on {gradient.device}: a window stays on one device, where gradients have values")
            if kept is not None and kept.shape != gradient.shape:
                raise ValueError(f"gradient {name!r} has shape {tuple(gradient.shape)}: this window holds it with {tuple(kept.shape)}")
            found[name] = gradient
        return found

    def _clear(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums, {}
        return sums

    def _over(self, world: World) -> dict[str, Tensor]:
        """Copies of the sums, summed over ranks (collective); a gradient that few ranks have is the sum of those."""
        mine = {name: [str(total.dtype), list(total.shape), total.device.type] for name, total in self._sums.items()}
        known: dict[str, list[Any]] = {}
        differences: list[str] = []
        for rank, text in enumerate(world.exchange_bytes(json.dumps(mine).encode())):
            for name, is_here in json.loads(text).items():
                if known.setdefault(name, is_here) != is_here:
                    differences.append(f"gradient {name} is {is_here} on rank {rank}, {known[name]} before it")
        if differences:
            raise ValueError(f"ranks hold different gradients: {'; '.join(differences[:8])}")
        totals: dict[str, Tensor] = {}
        # In one order on every rank, whatever each of them has.
        for name in sorted(known):
            dtype, shape, device = known[name]
            own = self._sums.get(name)
            total = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device) if own is None else own.clone()
            totals[name] = world.all_sum(total)
        return totals


class GradientsAccumulator(_Window):
    """Plain sums of gradients, each in its own type."""

    def accumulate(self, module: nn.Module) -> None:
        """Adds the module's gradients.

        Raises:
            ValueError: `module` is no module, a gradient changed its shape within the window, or has a type that the window's sum, or any
                sum, cannot take (complex on real, eight bits); nothing is added.
        """
        found = self._read(module)
        refuse("gradients cannot be summed", [
            f"{name} is {gradient.dtype}, the window holds it as {self._sums[name].dtype}"
            for name, gradient in found.items()
            if name in self._sums and not torch.can_cast(gradient.dtype, self._sums[name].dtype)
        ] + [f"{name} is {g.dtype}: sum it with weights, in a wider type" for name, g in found.items() if g.dtype.itemsize == 1])  # fmt: skip
        for name, gradient in found.items():
            kept = self._sums.get(name)
            if kept is None:
                self._sums[name] = gradient.clone()
            else:
                kept.add_(gradient)

    def finish(self, world: World | None = None) -> AccumulatedGradients:
        """The sums, over the ranks of `world` too where one is given (collective); a new window starts.

        Raises:
            ValueError: ranks hold a gradient of one name in different shapes or types, or `world` is none; nothing is cleared.
        """
        require_member("GradientsAccumulator.finish", "world", world, World, optional=True)
        if world is not None and world.size > 1:
            self._sums = self._over(world)
        return AccumulatedGradients(self._clear(), None)

    @classmethod
    def holding(cls, gradients: Mapping[str, Tensor]) -> "GradientsAccumulator":
        """An accumulator in the middle of a window, with these sums."""
        accumulator = cls()
        accumulator._sums = dict(gradients)
        return accumulator


class WeightedGradientsAccumulator(_Window):
    """Sums of gradients of unequal micro-batches, weighted by their tokens or samples, in fp32 or fp64.

    Raises:
        ValueError: `dtype` is no work type, or `loss_scale` is not finite and positive.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, loss_scale: float = 1.0) -> None:
        super().__init__()
        if dtype not in WORK_DTYPES:
            raise ValueError(f"dtype is {dtype}: gradients are summed in torch.float32 or torch.float64")
        self._dtype = dtype
        self._loss_scale = _number("loss_scale", loss_scale)
        if self._loss_scale <= 0:
            raise ValueError(f"loss_scale is {loss_scale}: it must be positive")
        self._total_weight = 0.0
        self._microbatches = 0

    @property
    def state(self) -> WeightedAccumulationState:
        """Where the window stands."""
        return WeightedAccumulationState(self._dtype, self._loss_scale, self._total_weight, self._microbatches)

    def accumulate_sum(self, module: nn.Module, weight: float) -> None:
        """Adds gradients of a loss that was summed over its micro-batch: `G += grad, W += weight`.

        Raises:
            ValueError: `weight` is negative or not finite, `module` is no module, or a gradient changed its shape; nothing is added.
        """
        self._add(module, weight, 1.0)

    def accumulate_mean(self, module: nn.Module, weight: float) -> None:
        """Adds gradients of a loss that was averaged over its micro-batch: `G += weight * grad, W += weight`.

        Raises:
            ValueError: as `accumulate_sum`.
        """
        self._add(module, weight, _number("weight", weight))

    def _add(self, module: nn.Module, weight: float, factor: float) -> None:
        weight = _number("weight", weight)
        if weight < 0:
            raise ValueError(f"weight is {weight}: it must not be negative")
        total = self._total_weight + weight
        if not math.isfinite(total) or factor > torch.finfo(self._dtype).max:
            raise ValueError(f"weight is {weight}: the window's total, or a weighted gradient, would not be finite")
        found = self._read(module)
        refuse("gradients are summed in real numbers, plain sums hold complex ones", [
            f"{name} is {gradient.dtype}" for name, gradient in found.items() if gradient.is_complex()
        ])  # fmt: skip
        if weight > 0:
            for name, gradient in found.items():
                kept = self._sums.get(name)
                if kept is None:
                    self._sums[name] = gradient.to(self._dtype, copy=True).mul_(factor)
                else:
                    kept.add_(gradient.to(self._dtype), alpha=factor)
        self._total_weight = total
        self._microbatches += 1

    def finish_sums(self, world: World | None = None) -> AccumulatedGradients:
        """`G / loss_scale`, of the sums over the ranks of `world` where one is given (collective); a new window starts.

        Raises:
            ValueError: ranks hold different gradients, types or scales; nothing is cleared.
        """
        return self._finish(world, mean=False)

    def finish_mean(self, world: World | None = None) -> AccumulatedGradients:
        """`G / W / loss_scale`, G and W summed over the ranks of `world` where one is given (collective); a new window starts.

        Raises:
            ValueError: the window has no weight on any rank, or as `finish_sums`; nothing is cleared.
        """
        return self._finish(world, mean=True)

    def _finish(self, world: World | None, *, mean: bool) -> AccumulatedGradients:
        require_member("WeightedGradientsAccumulator", "world", world, World, optional=True)
        state = self.state if world is None or world.size == 1 else self._state_over(world)
        if mean and state.total_weight <= 0:
            raise ValueError(f"the window of {state.microbatches} micro-batches weighs nothing: it has no mean")
        sums = self._sums if world is None or world.size == 1 else self._over(world)
        weight = state.total_weight if mean else 1.0
        plain = (weight, self._loss_scale) == (1.0, 1.0)
        gradients = {name: total if plain else _over(total, weight, self._loss_scale).to(self._dtype) for name, total in sums.items()}
        self._clear()
        self._total_weight, self._microbatches = 0.0, 0
        return AccumulatedGradients(gradients, state)

    def _state_over(self, world: World) -> WeightedAccumulationState:
        mine = [str(self._dtype), self._loss_scale.hex(), self._total_weight.hex(), self._microbatches]
        everyone = [json.loads(text) for text in world.exchange_bytes(json.dumps(mine).encode())]
        for rank, other in enumerate(everyone):
            if other[:2] != everyone[0][:2]:
                raise ValueError(
                    f"rank {rank} sums in {other[0]} at scale {float.fromhex(other[1])}, rank 0 in {everyone[0][0]} at another"
                )
        weight = sum(float.fromhex(other[2]) for other in everyone)
        return WeightedAccumulationState(self._dtype, self._loss_scale, weight, sum(other[3] for other in everyone))

    @classmethod
    def holding(cls, gradients: Mapping[str, Tensor], state: WeightedAccumulationState) -> "WeightedGradientsAccumulator":
        """An accumulator in the middle of a window, with these sums.

        Raises:
            ValueError: `state` is none that a window can be in.
        """
        accumulator = cls(state.dtype, state.loss_scale)
        if not (math.isfinite(state.total_weight) and state.total_weight >= 0 and state.microbatches >= 0):
            raise ValueError(f"a window cannot weigh {state.total_weight} after {state.microbatches} micro-batches")
        accumulator._sums = {name: gradient.to(state.dtype) for name, gradient in gradients.items()}
        accumulator._total_weight, accumulator._microbatches = state.total_weight, state.microbatches
        return accumulator


def _over(total: Tensor, weight: float, scale: float) -> Tensor:
    """`total / weight / scale` in float64, with no zero or infinity half way: powers of two are exact, so they are taken out and put on last."""
    (weight, up), (scale, further) = math.frexp(weight), math.frexp(scale)
    power = up + further - 2
    third = int(power / 3)  # all of one sign, and each in range
    return total.double() / (2 * weight) / (2 * scale) * 2.0**-third * 2.0**-third * 2.0 ** -(power - 2 * third)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r}: it must be a finite number, of Python or numpy (a tensor's is its item())")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value}: it must be a finite number")
    return number
