"""What a record takes of a model, an optimizer and a scheduler at one moment, and how it is put back.

Restoring compares everything first and lists every difference; only then does it write, into the objects that it was given: parameters
stay the same objects, so an optimizer that holds them still does.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treadle.model.record_values import Copy, ValueWriter

MAX_LISTED = 12
"""Differences that a refusal lists."""


class Scheduler(Protocol):
    """What a record needs of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Its position, as plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a position over."""
        ...


def refuse(what: str, differences: list[str]) -> None:
    """Raises a `ValueError` that lists the differences, if there are any."""
    if differences:
        more = f" (and {len(differences) - MAX_LISTED} more)" if len(differences) > MAX_LISTED else ""
        raise ValueError(f"{what}: " + "; ".join(differences[:MAX_LISTED]) + more)


def model_tensors(model: nn.Module, names: Iterable[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers of a module by name, each once, and for every other name of a tied one its first name.

    Args:
        names: the parameters to take, in place of all parameters and buffers.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    everything: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    if names is None:
        everything += list(model.named_buffers(remove_duplicate=False))
    else:
        wanted = set(names)
        everything = [(name, tensor) for name, tensor in everything if name in wanted]
    for name, tensor in everything:
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, ties


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The type of that name.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is no tensor type")
    return dtype


def capture_model(model: nn.Module, names: Iterable[str] | None, tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the model's tensors under `model.<name>`; answers their types and ties."""
    found, ties = model_tensors(model, names)
    for name, tensor in found.items():
        tensors[f"model.{name}"] = copy(tensor.detach())
    return {"dtypes": {name: dtype_name(t.dtype) for name, t in found.items()}, "ties": ties}


def model_differences(part: Mapping[str, Any], recorded: Mapping[str, Tensor], model: nn.Module, names: Iterable[str] | None) -> list[str]:
    """What keeps recorded tensors from being put into a module."""
    found, ties = model_tensors(model, names)
    differences = [f"{name} is recorded, the model lacks it" for name in recorded if name not in found]
    differences += [f"{name} is in the model, the record lacks it" for name in found if name not in recorded]
    for name in found.keys() & recorded.keys():
        if found[name].shape != recorded[name].shape:
            differences.append(f"{name} is recorded with shape {tuple(recorded[name].shape)}, the model has {tuple(found[name].shape)}")
        elif found[name].is_floating_point() != recorded[name].is_floating_point():
            differences.append(f"{name} is recorded as {recorded[name].dtype}, the model has {found[name].dtype}")
    if ties != part["ties"]:
        differences.append(f"tied names are recorded as {part['ties']}, the model has {ties}")
    return differences


@torch.no_grad()
def restore_model(recorded: Mapping[str, Tensor], model: nn.Module, names: Iterable[str] | None, dtypes: Mapping[str, str] | None) -> None:
    """Copies recorded values into a module that `model_differences` found nothing against.

    Args:
        dtypes: types to give the tensors first; None keeps the module's.
    """
    found, _ = model_tensors(model, names)
    for name, tensor in found.items():
        if dtypes is not None and tensor.dtype != (dtype := dtype_of(dtypes[name])):
            # Through `.data`, so that the parameter stays the object that optimizers, hooks and ties hold.
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None
        tensor.copy_(recorded[name])


def class_name(value: object) -> str:
    """The full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the optimizer's parameters, group by group; empty for one that is not the model's."""
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def capture_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the optimizer's state under `optimizer.<number>`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "class": class_name(optimizer),
        "parameters": _parameter_names(optimizer, model),
        "shapes": [list(p.shape) for p in parameters],
        "dtypes": [dtype_name(p.dtype) for p in parameters],
        # torch's schedulers warn when they step before the optimizer; after a restore it has stepped, though this object has not.
        "stepped": bool(getattr(optimizer, "_opt_called", False)),
        "state": ValueWriter("optimizer", tensors, copy).write(optimizer.state_dict(), "the optimizer's state"),
    }


def optimizer_differences(part: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """What keeps a recorded optimizer from being put into this one."""
    differences: list[str] = []
    if part["class"] != class_name(optimizer):
        differences.append(f"the optimizer is recorded as {part['class']}, given is {class_name(optimizer)}")
    names = _parameter_names(optimizer, model)
    if len(names) != len(part["parameters"]):
        differences.append(f"{len(part['parameters'])} parameter groups are recorded, the optimizer has {len(names)}")
    elif names != part["parameters"]:
        for i, (now, then) in enumerate(zip(names, part["parameters"], strict=True)):
            if now != then:
                differences.append(f"parameter group {i} is recorded with {then}, the optimizer has {now}")
    elif (shapes := [list(p.shape) for group in optimizer.param_groups for p in group["params"]]) != part["shapes"]:
        differences.append(f"the optimizer's parameters are recorded with shapes {part['shapes']}, given are {shapes}")
    return differences


def restore_optimizer(part: Mapping[str, Any], state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Puts a recorded state into an optimizer that `optimizer_differences` found nothing against."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, (parameter, dtype) in enumerate(zip(parameters, part["dtypes"], strict=True)):
        if parameter.dtype != dtype_of(dtype):
            continue
        # load_state_dict casts moments to their parameter's type; an optimizer may keep them in another, and they come back as they were.
        for key, value in state["state"].get(i, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
    if part["stepped"]:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own flag, see capture_optimizer


def capture_scheduler(scheduler: Scheduler | None, tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the scheduler's state under `scheduler.<number>`."""
    state = None if scheduler is None else scheduler.state_dict()
    return {"class": class_name(scheduler), "state": ValueWriter("scheduler", tensors, copy).write(state, "the scheduler's state")}


def scheduler_differences(part: Mapping[str, Any], scheduler: Scheduler | None) -> list[str]:
    """What keeps a recorded scheduler from being put into this one."""
    if part["class"] != class_name(scheduler):
        return [f"the scheduler is recorded as {part['class']}, given is {class_name(scheduler)}"]
    return []


def check_parts(structure: Any, keys: Mapping[str, type]) -> None:
    """Checks the outer form of what a file holds.

    Raises:
        ValueError: a part is missing or of another type.
    """
    if not isinstance(structure, dict):
        raise ValueError("the record is no JSON object")
    for key, kind in keys.items():
        if not isinstance(structure.get(key), kind):
            raise ValueError(f"the record's {key!r} is missing or malformed")
