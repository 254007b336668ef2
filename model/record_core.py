"""One moment of a training loop as JSON and tensors, and the file that holds it.

Capturing copies every value at the call, so that training may go on at once; on the CPU the copy is the whole cost, on CUDA the
asynchronous forms copy on the device and fetch later, off the loop's thread.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from treadle.model.accumulate import (
    GradientsAccumulator,
    WeightedAccumulationState,
    WeightedGradientsAccumulator,
    check_gradients,
)
from treadle.model.record_parts import (
    Scheduler,
    capture_model,
    capture_optimizer,
    capture_scheduler,
    check_parts,
    dtype_name,
    dtype_of,
    model_differences,
    optimizer_differences,
    refuse,
    restore_model,
    restore_optimizer,
    scheduler_differences,
)
from treadle.model.record_values import ValueReader, ValueWriter, tensors_named
from treadle.model.storage_errors import DamagedFileError, require_format
from treadle.model.storage_file import read_tensors, write_tensors

Kind = Literal["plain", "weighted", "with_dtypes", "weighted_with_dtypes"]
Accumulator = GradientsAccumulator | WeightedGradientsAccumulator

FORMAT_VERSION = 1
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_PARTS: dict[str, type] = {"kind": str, "model": dict, "optimizer": dict, "scheduler": dict, "gradients": list, "state": list}
_MODEL_PARTS: dict[str, type] = {"dtypes": dict, "ties": dict}
_OPTIMIZER_PARTS: dict[str, type] = {"class": str, "parameters": list, "shapes": list, "dtypes": list, "stepped": bool, "state": list}


class Snapshot:
    """What was captured: a JSON-able structure, and tensors on the host that it names."""

    def __init__(self, structure: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.structure = structure
        self.tensors = tensors
        # Where each device's stream stood once its copies were queued: the fetch waits for that, not for what training queued since.
        devices = {t.device for t in tensors.values() if t.device.type == "cuda"}
        self.queued = [torch.cuda.current_stream(device).record_event() for device in devices]

    def model_tensors(self) -> dict[str, Tensor]:
        """Recorded parameters and buffers by name."""
        return {name: self.tensors[f"model.{name}"] for name in self.structure["model"]["dtypes"]}

    def gradients(self, device_of: Mapping[str, torch.device]) -> dict[str, Tensor]:
        """Recorded pending gradients by name, each copied to its parameter's device."""
        return {name: self.tensors[f"gradients.{name}"].to(device_of[name], copy=True) for name in self.structure["gradients"]}

    def weighted_state(self) -> WeightedAccumulationState:
        """The recorded window of a weighted capture.

        Raises:
            ValueError: it is malformed.
        """
        window: Any = self.structure.get("window")
        try:
            dtype, scale, weight, count = window["dtype"], window["loss_scale"], window["total_weight"], window["microbatches"]
            return WeightedAccumulationState(dtype_of(dtype), float.fromhex(scale), float.fromhex(weight), int(count))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the record's accumulation window is malformed: {window!r}"[:200]) from error


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor's value now, on the host."""
    return tensor.to("cpu", copy=True).contiguous()


def device_copy(tensor: Tensor) -> Tensor:
    """The tensor's value now, on its device: the host does not wait."""
    return tensor.clone(memory_format=torch.contiguous_format)


def require_components(model: object, optimizer: object, scheduler: object) -> None:
    """Checks what a capture or a restore was given.

    Raises:
        ValueError: one is of another type.
    """
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
    names: Iterable[str] | None = None,
    blocking: bool = True,
) -> Snapshot:
    """Copies everything at this moment; consumes, clears and steps nothing.

    Args:
        names: parameters to take, in place of all parameters and buffers.
        blocking: whether the copies are on the host when this returns; otherwise `land` fetches them.

    Raises:
        ValueError: a component is of another type, the accumulator is of the other kind or holds a gradient of something that is not
            recorded, or a value cannot be held.
    """
    require_components(model, optimizer, scheduler)
    weighted = kind.startswith("weighted")
    if not isinstance(accumulator, WeightedGradientsAccumulator if weighted else GradientsAccumulator):
        wanted = "WeightedGradientsAccumulator" if weighted else "GradientsAccumulator"
        other = "the form without weights" if weighted else "the weighted form"
        raise ValueError(f"accumulator is a {type(accumulator).__name__}: this capture takes a {wanted}; {other} takes the other")
    copy = host_copy if blocking else device_copy
    tensors: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    if names is not None:
        names = set(names)
        refuse("pending gradients of frozen parameters", [n for n in accumulator.gradients if n in parameters and n not in names])
    check_gradients(accumulator.gradients, parameters)
    structure: dict[str, Any] = {
        "kind": kind,
        "model": capture_model(model, names, tensors, copy),
        "optimizer": capture_optimizer(optimizer, model, tensors, copy),
        "scheduler": capture_scheduler(scheduler, tensors, copy),
        "gradients": list(accumulator.gradients),
        "state": ValueWriter("state", tensors, copy).write(state, "state"),
    }
    for name, gradient in accumulator.gradients.items():
        tensors[f"gradients.{name}"] = copy(gradient)
    if isinstance(accumulator, WeightedGradientsAccumulator):
        window = accumulator.state
        structure["window"] = {
            "dtype": dtype_name(window.dtype),
            "loss_scale": window.loss_scale.hex(),
            "total_weight": window.total_weight.hex(),
            "microbatches": window.microbatches,
        }
    return Snapshot(structure, tensors)


async def land(snapshot: Snapshot) -> Snapshot:
    """Brings a snapshot's device copies to the host without holding up the caller's thread."""

    def fetch() -> None:
        for event in snapshot.queued:
            event.synchronize()
        for name, tensor in snapshot.tensors.items():
            snapshot.tensors[name] = tensor.cpu()

    if snapshot.queued:
        await asyncio.to_thread(fetch)
    return snapshot


def put_back(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    device: torch.device | str | None,
    *,
    names: Iterable[str] | None = None,
) -> tuple[Accumulator, Any]:
    """Writes a snapshot into the objects given; answers the accumulator and the caller's state. Steps and resets nothing.

    Raises:
        ValueError: something differs from what was captured; nothing was written.
    """
    require_components(model, optimizer, scheduler)
    structure, kind = snapshot.structure, snapshot.structure["kind"]
    recorded = snapshot.model_tensors()
    differences = model_differences(structure["model"], recorded, model, names)
    differences += optimizer_differences(structure["optimizer"], optimizer, model)
    differences += scheduler_differences(structure["scheduler"], scheduler)
    refuse("the record does not fit", differences)
    where = next((p.device for p in model.parameters()), torch.device("cpu")) if device is None else torch.device(device)
    reader = ValueReader(snapshot.tensors, where)
    optimizer_state, scheduler_state = (reader.read(structure[part]["state"]) for part in ("optimizer", "scheduler"))
    state = reader.read(structure["state"])
    window = snapshot.weighted_state() if kind.startswith("weighted") else None
    parameters = dict(model.named_parameters())
    check_gradients({name: snapshot.tensors[f"gradients.{name}"] for name in structure["gradients"]}, parameters)

    model.to(where)
    restore_model(recorded, model, names, structure["model"]["dtypes"] if kind.endswith("with_dtypes") else None)
    restore_optimizer(structure["optimizer"], optimizer_state, optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    gradients = snapshot.gradients({name: p.device for name, p in model.named_parameters()})
    if window is None:
        return GradientsAccumulator.holding(gradients), state
    return WeightedGradientsAccumulator.holding(gradients, window), state


def write_file(snapshot: Snapshot, path: str | Path, form: str, precision: torch.dtype | None) -> None:
    """Writes one safetensors file, whole or not at all.

    Args:
        form: the file's kind, in its metadata.
        precision: floating type that the model's, the optimizer's and the gradients' tensors are rounded to in the file, counters aside;
            None keeps each in its own, which exact continuation needs. The caller's state is kept as it is.

    Raises:
        ValueError: `precision` is no floating type, or the file cannot be written.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it must be None or one of {', '.join(map(str, PRECISIONS))}")
    tensors, rounded = dict(snapshot.tensors), {}
    if precision is not None:
        for name, tensor in snapshot.tensors.items():
            if tensor.is_floating_point() and tensor.ndim and tensor.dtype != precision and not name.startswith("state."):
                rounded[name] = dtype_name(tensor.dtype)
                tensors[name] = tensor.to(precision)
    structure = snapshot.structure | {"rounded": rounded}
    record = json.dumps(structure, separators=(",", ":"), allow_nan=False)
    write_tensors(path, tensors, {"format": form, "format_version": str(FORMAT_VERSION), "record": record})


def read_file(path: str | Path, form: str) -> Snapshot:
    """Reads a record's file and checks its form and that it holds exactly what it names.

    Raises:
        ValueError: the file is missing, damaged, newer, of another kind, or does not hold what it names.
    """
    tensors, metadata = read_tensors(path)
    require_format(path, metadata, form, FORMAT_VERSION)
    try:
        structure = json.loads(metadata.get("record", ""))
        check_parts(structure, _PARTS)
        if structure["kind"] not in get_args(Kind):
            raise ValueError(f"captures of kind {structure['kind'][:40]!r} are unknown")
        check_parts(structure["model"], _MODEL_PARTS)
        check_parts(structure["optimizer"], _OPTIMIZER_PARTS)
        check_parts(structure["scheduler"], {"class": str, "state": list})
        named = {f"model.{name}" for name in structure["model"]["dtypes"]} | {f"gradients.{name}" for name in structure["gradients"]}
        for part in (structure["optimizer"]["state"], structure["scheduler"]["state"], structure["state"]):
            named |= tensors_named(part)
        refuse(
            "its tensors differ from those it names",
            [f"{n} is missing" for n in sorted(named - tensors.keys())] + [f"{n} is extra" for n in sorted(tensors.keys() - named)],
        )
        for name, dtype in structure.get("rounded", {}).items():
            tensors[name] = tensors[name].to(dtype_of(dtype))
        for dtype in (*structure["model"]["dtypes"].values(), *structure["optimizer"]["dtypes"]):
            dtype_of(dtype)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(path, f"is no whole record: {error}") from error
    return Snapshot(structure, tensors)
