"""A training loop's moment: how it is taken of a model, an optimizer, a scheduler and an accumulator, and how it is put back.

Capturing copies every value at the call, so that training may go on at once; on the CPU the copy is the whole cost, on CUDA the
asynchronous forms copy on the device and fetch later, off the loop's thread.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from treadle.model.accumulate import (
    GradientsAccumulator,
    WeightedAccumulationState,
    WeightedGradientsAccumulator,
    check_gradients,
)
from treadle.model.device import pick_device
from treadle.model.mesh import World
from treadle.model.record_file import PRECISIONS, Form, Snapshot, device_copy, host_copy
from treadle.model.record_parts import (
    Scheduler,
    capture_extra,
    capture_model,
    capture_optimizer,
    capture_scheduler,
    check_parts,
    extra_differences,
    extra_of,
    give_dtypes,
    model_differences,
    model_tensors,
    modules_with_extra,
    optimizer_differences,
    put_values,
    restore_extra,
    restore_optimizer,
    scheduler_differences,
)
from treadle.model.record_ranks import (
    RankPart,
    check_place,
    collect_parts,
    names_of_parts,
    parts_of,
    put_parts,
    ranks_taken,
    same_gradients,
    summed,
)
from treadle.model.record_values import ValueReader, ValueWriter, dtype_name, dtype_of, refuse, tensors_named
from treadle.shape import shown

Kind = Literal["plain", "weighted", "with_dtypes", "weighted_with_dtypes"]
Accumulator = GradientsAccumulator | WeightedGradientsAccumulator
Merge = Callable[[list[Any]], Any]
"""From the states of all recorded ranks to that of this rank, where the world has another size now."""

FORMAT_VERSION = 1
_ROUNDED = re.compile(r"(model|optimizer|ranks\.[0-9]+\.gradients)\.")
_PARTS: dict[str, type] = {"kind": str, "model": dict, "optimizer": dict, "scheduler": dict}
_MODEL_PARTS: dict[str, type] = {"dtypes": dict, "ties": dict, "extra": list}
_OPTIMIZER_PARTS: dict[str, type] = {"class": str, "parameters": list, "shapes": list, "dtypes": list, "stepped": bool, "state": list}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A part of a model, in place of all parameters and buffers."""

    parameters: frozenset[str]
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a restore happens."""

    device: torch.device | str | None = None
    """Where the model goes; None leaves it where it is."""
    rank: int = 0
    world_size: int = 1
    merge: Merge | None = None


def _model_tensors(model: nn.Module, chosen: Chosen | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    return model_tensors(model) if chosen is None else model_tensors(model, chosen.parameters, chosen.buffers)


def _require_components(model: object, optimizer: object, scheduler: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer")
    if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise ValueError(f"scheduler is a {type(scheduler).__name__}: it must have state_dict and load_state_dict, or be None")


def take(
    kind: Kind,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    accumulator: object,
    state: object,
    *,
    chosen: Chosen | None = None,
    blocking: bool = True,
) -> Snapshot:
    """Copies everything at this moment; consumes, clears and steps nothing.

    Args:
        chosen: what to take of the model; None takes all of it.
        blocking: whether the copies are on the host when this returns; otherwise `record_file.land` fetches them.

    Raises:
        ValueError: a component is of another type, the accumulator is of the other kind or holds a gradient of something that is not
            recorded, or a value cannot be held.
    """
    _require_components(model, optimizer, scheduler)
    weighted = kind.startswith("weighted")
    if not isinstance(accumulator, WeightedGradientsAccumulator if weighted else GradientsAccumulator):
        wanted = "WeightedGradientsAccumulator" if weighted else "GradientsAccumulator"
        other = "the form without weights" if weighted else "the weighted form"
        raise ValueError(f"accumulator is a {type(accumulator).__name__}: this capture takes a {wanted}; {other} takes the other")
    parameters = dict(model.named_parameters())
    if chosen is not None:
        frozen = [n for n in accumulator.gradients if n in parameters and n not in chosen.parameters]
        refuse("pending gradients of frozen parameters", frozen)
    check_gradients(accumulator.gradients, parameters)
    copy = host_copy if blocking else device_copy
    tensors: dict[str, Tensor] = {}
    # The caller's state is read first: its refusals should cost nothing.
    part = RankPart(window=_window_of(accumulator), state=ValueWriter("state", tensors, copy).write(state, "state"), state_tensors=tensors)
    part.gradients = {name: copy(gradient) for name, gradient in accumulator.gradients.items()}
    found, ties = _model_tensors(model, chosen)
    tensors = {}
    structure: dict[str, Any] = {
        "kind": kind,
        "model": capture_model(found, ties, tensors, copy),
        "optimizer": capture_optimizer(optimizer, model, tensors, copy),
        "scheduler": capture_scheduler(scheduler, tensors, copy),
    }
    # Of a part of a model, the modules' extra state is the base's, as its other buffers are.
    structure["model"]["extra"] = capture_extra(model, tensors, copy) if chosen is None else ["dict", []]
    snapshot = Snapshot(structure, tensors)
    put_parts(snapshot, [part])
    snapshot.mark()
    return snapshot


def _window_of(accumulator: Accumulator) -> dict[str, Any] | None:
    if isinstance(accumulator, GradientsAccumulator):
        return None
    window = accumulator.state
    return {
        "dtype": dtype_name(window.dtype),
        "loss_scale": window.loss_scale.hex(),
        "total_weight": window.total_weight.hex(),
        "microbatches": window.microbatches,
    }


def _window_state(window: Any) -> WeightedAccumulationState:
    try:
        dtype, scale, weight, count = window["dtype"], window["loss_scale"], window["total_weight"], window["microbatches"]
        return WeightedAccumulationState(dtype_of(dtype), float.fromhex(scale), float.fromhex(weight), int(count))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the record's accumulation window is malformed: {str(window)[:200]}") from error


def gather(snapshot: Snapshot, world: World) -> Snapshot | None:
    """On rank 0 its snapshot with the parts of all ranks, None elsewhere (collective).

    Raises:
        ValueError: ranks captured by different forms, models, optimizers or windows; on every rank.
    """
    shared = {name: part for name, part in snapshot.structure.items() if name != "ranks"}
    for name in ("optimizer", "scheduler"):
        shared[name] = {key: value for key, value in shared[name].items() if key != "state"}
    shared["model"] = {key: value for key, value in shared["model"].items() if key != "extra"}
    mine = parts_of(snapshot)
    if len(mine) != 1:
        raise ValueError(f"this record holds the parts of {len(mine)} ranks already: gather what each rank captured")
    window = mine[0].window
    shared["window"] = None if window is None else {name: window[name] for name in ("dtype", "loss_scale")}
    pending = {name: [dtype_name(g.dtype), list(g.shape)] for name, g in mine[0].gradients.items()}
    everyone = [json.loads(text) for text in world.exchange_bytes(json.dumps([shared, pending], sort_keys=True).encode())]
    differences = [
        f"{name} of rank {r}" for r, (other, _) in enumerate(everyone) for name in other if other[name] != everyone[0][0].get(name)
    ]
    known: dict[str, Any] = {}
    for rank, (_, gradients) in enumerate(everyone):
        differences += [
            f"gradient {name} of rank {rank}" for name, is_here in gradients.items() if known.setdefault(name, is_here) != is_here
        ]
    refuse("ranks captured different things", differences)
    parts = collect_parts(world, mine[0])
    if parts is None:
        return None
    kept = {name: tensor for name, tensor in snapshot.tensors.items() if not name.startswith("ranks.")}
    whole = Snapshot(dict(snapshot.structure), kept)
    put_parts(whole, parts)
    return whole


def read_states(snapshot: Snapshot, device: torch.device | str = "cpu") -> list[Any]:
    """The callers' states of all ranks."""
    return [ValueReader(part.state_tensors, device).read(part.state) for part in parts_of(snapshot)]


def _state_for(parts: Sequence[RankPart], place: Place, device: torch.device) -> Any:
    if len(parts) == place.world_size:
        part = parts[place.rank]
        return ValueReader(part.state_tensors, device).read(part.state)
    if place.merge is None and len(parts) > 1:
        raise ValueError(
            f"the record holds the states of {len(parts)} ranks, this is one of {place.world_size}: give merge=, a function from the list "
            "of their states to this rank's"
        )
    states = [ValueReader(part.state_tensors, device).read(part.state) for part in parts]
    return states[0] if place.merge is None else place.merge(states)


def _accumulator_for(
    parts: Sequence[RankPart], place: Place, weighted: bool, parameters: Mapping[str, Tensor]
) -> Callable[[], Accumulator]:
    """Checks the pending gradients of a place; the answer makes its accumulator."""
    taken = [parts[rank] for rank in ranks_taken(place.rank, place.world_size, len(parts))]
    refuse("ranks hold different gradients", same_gradients(parts))
    gradients = summed([part.gradients for part in taken])
    check_gradients(gradients, parameters)
    states = [_window_state(part.window) for part in parts] if weighted else []
    if weighted:
        refuse("ranks recorded windows of different types or scales", [
            f"rank {rank} has {s.dtype} and {s.loss_scale}, rank 0 {states[0].dtype} and {states[0].loss_scale}"
            for rank, s in enumerate(states)
            if (s.dtype, s.loss_scale) != (states[0].dtype, states[0].loss_scale)
        ])  # fmt: skip
        own = [states[rank] for rank in ranks_taken(place.rank, place.world_size, len(parts))]
        window = WeightedAccumulationState(
            states[0].dtype, states[0].loss_scale, sum(s.total_weight for s in own), sum(s.microbatches for s in own)
        )
        WeightedGradientsAccumulator.holding({}, window)  # refuses what no window can be

        def weighted_one() -> Accumulator:
            return WeightedGradientsAccumulator.holding(_placed(gradients, parameters), window)

        return weighted_one
    return lambda: GradientsAccumulator.holding(_placed(gradients, parameters))


def _placed(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.to(parameters[name].device, copy=True) for name, gradient in gradients.items()}


def put_back(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    place: Place,
    *,
    chosen: Chosen | None = None,
) -> tuple[Accumulator, Any]:
    """Writes a snapshot into the objects given; answers the accumulator and the caller's state. Steps and resets nothing.

    Raises:
        ValueError: something differs from what was captured; nothing was written.
    """
    _require_components(model, optimizer, scheduler)
    check_place(place.rank, place.world_size)
    if place.merge is not None and not callable(place.merge):
        raise ValueError(f"merge is {shown(place.merge)}: it must be called with the list of all ranks' states, or None")
    structure, kind = snapshot.structure, snapshot.structure["kind"]
    recorded = {name: snapshot.tensors[f"model.{name}"] for name in structure["model"]["dtypes"]}
    found, ties = _model_tensors(model, chosen)
    held = next((p.device for p in model.parameters()), torch.device("cpu"))
    where = held if place.device is None else pick_device("device", place.device)
    reader = ValueReader(snapshot.tensors, where)
    extra = reader.read(structure["model"]["extra"])
    differences = model_differences(structure["model"], recorded, found, ties)
    differences += extra_differences(extra, model) if chosen is None else []
    differences += optimizer_differences(structure["optimizer"], optimizer, model)
    differences += scheduler_differences(structure["scheduler"], scheduler)
    refuse("the record does not fit", differences)
    parts = parts_of(snapshot)
    accumulator = _accumulator_for(parts, place, kind.startswith("weighted"), dict(model.named_parameters()))
    state = _state_for(parts, place, where)
    optimizer_state, scheduler_state = (reader.read(structure[part]["state"]) for part in ("optimizer", "scheduler"))

    with _taken_back_on_failure(model, optimizer, scheduler):
        if place.device is not None:
            model.to(where)
        found, _ = _model_tensors(model, chosen)
        if kind.endswith("with_dtypes"):
            give_dtypes(found, structure["model"]["dtypes"])
        restore_optimizer(structure["optimizer"], optimizer_state, optimizer)
        if scheduler is not None:
            scheduler.load_state_dict(scheduler_state)
        if chosen is None:
            restore_extra(extra, model)
    put_values(found, recorded)
    return accumulator(), state


@contextmanager
def _taken_back_on_failure(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> Generator[None]:
    """Leaves everything as it was where a recorded state turns out to be none that an optimizer or a scheduler takes."""
    tensors = [(t, t.data, t.grad) for t in (*model.parameters(), *model.buffers())]
    groups = [dict(group) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    schedule = None if scheduler is None else scheduler.state_dict()
    extra = deepcopy(extra_of(model))
    try:
        yield
    except Exception as error:
        for tensor, data, gradient in tensors:
            tensor.data = data
            tensor.grad = gradient
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(state)
        if scheduler is not None and schedule is not None:
            scheduler.load_state_dict(schedule)
        for name, module in modules_with_extra(model).items():
            with suppress(Exception):  # the one that failed may refuse its own state too
                module.set_extra_state(extra[name])
        raise ValueError(f"the record's optimizer, scheduler or extra state cannot be loaded: {type(error).__name__}: {error}") from error


def rounding(precision: torch.dtype | None) -> Callable[[str, Tensor], torch.dtype | None] | None:
    """What `write_snapshot` rounds: the model's, the optimizer's and the gradients' floating tensors, counters aside.

    Raises:
        ValueError: `precision` is no floating type.
    """
    if precision is None:
        return None
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it must be None or one of {', '.join(map(str, PRECISIONS))}")

    def to(name: str, tensor: Tensor) -> torch.dtype | None:
        return precision if tensor.ndim and tensor.dtype in PRECISIONS and _ROUNDED.match(name) else None

    return to


def named_in_record(structure: dict[str, Any]) -> set[str]:
    """Checks the structure of a record's file and answers the tensors that it names.

    Raises:
        ValueError, KeyError, TypeError: a part of it is missing or malformed.
    """
    check_parts(structure, _PARTS)
    if structure["kind"] not in get_args(Kind):
        raise ValueError(f"captures of kind {structure['kind'][:40]!r} are unknown")
    check_parts(structure["model"], _MODEL_PARTS)
    check_parts(structure["optimizer"], _OPTIMIZER_PARTS)
    check_parts(structure["scheduler"], {"class": str, "state": list})
    for dtype in (*structure["model"]["dtypes"].values(), *structure["optimizer"]["dtypes"]):
        dtype_of(dtype)
    named = {f"model.{name}" for name in structure["model"]["dtypes"]} | names_of_parts(structure)
    for node in (structure["optimizer"]["state"], structure["scheduler"]["state"], structure["model"]["extra"]):
        named |= tensors_named(node)
    return named


def form_of(kind: str) -> Form:
    """The form of a record's file."""
    return Form(kind, FORMAT_VERSION, named_in_record)


def check_dtypes(snapshot: Snapshot) -> None:
    """Checks that the model's tensors have the types that the structure says.

    Raises:
        ValueError: one has another.
    """
    differences = [
        f"{name} is {snapshot.tensors[f'model.{name}'].dtype}, not {dtype}"
        for name, dtype in structure_dtypes(snapshot).items()
        if dtype_name(snapshot.tensors[f"model.{name}"].dtype) != dtype
    ]
    refuse("its tensors have other types than it says", differences)


def structure_dtypes(snapshot: Snapshot) -> dict[str, str]:
    """The recorded types of the model's tensors, by name."""
    dtypes: dict[str, str] = snapshot.structure["model"]["dtypes"]
    return dtypes


__all__ = [
    "Accumulator",
    "Chosen",
    "Kind",
    "Merge",
    "Place",
    "check_dtypes",
    "form_of",
    "gather",
    "put_back",
    "read_states",
    "rounding",
    "structure_dtypes",
    "take",
]
