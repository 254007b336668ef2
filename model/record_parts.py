"""What a record takes of a model, an optimizer and a scheduler at one moment, and how it is put back.

Restoring compares everything first and lists every difference; only then does it write, into the objects that it was given: parameters
stay the same objects, so an optimizer that holds them still does.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treadle.model.record_values import Copy, ValueWriter, dtype_name, dtype_of, refuse


class Scheduler(Protocol):
    """What a record needs of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Its position, as plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a position over."""
        ...


def model_tensors(
    model: nn.Module, names: Iterable[str] | None = None, buffers: Iterable[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers of a module by name, each once, and for every other name of a tied one its first name.

    Args:
        names: the parameters to take, and with them `buffers`, in place of all parameters and buffers.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    parameters: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    others: list[tuple[str, Tensor]] = list(model.named_buffers(remove_duplicate=False))
    if names is not None:
        parameters = [(name, tensor) for name, tensor in parameters if name in names]
        others = [(name, tensor) for name, tensor in others if name in buffers]
    for name, tensor in parameters + others:
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, ties


def capture_model(found: Mapping[str, Tensor], ties: dict[str, str], tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the model's tensors under `model.<name>`; answers their types and ties.

    Raises:
        ValueError: a tensor holds no dense values of its own.
    """
    unheld = [f"{name} is a {_what(t)}" for name, t in found.items() if _what(t)]
    refuse("a record holds dense tensors that have values, gathered from all ranks", unheld)
    for name, tensor in found.items():
        tensors[f"model.{name}"] = copy(tensor.detach())
    return {"dtypes": {name: dtype_name(t.dtype) for name, t in found.items()}, "ties": ties}


def _what(tensor: Tensor) -> str:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "lazy tensor: run the model once"
    if type(tensor.detach()) is not Tensor:
        return type(tensor.detach()).__name__
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{tensor.device.type} tensor of {tensor.layout} and {tensor.dtype}"
    return ""


def capture_extra(model: nn.Module, tensors: dict[str, Tensor], copy: Copy) -> list[Any]:
    """What modules keep beside parameters and buffers, by `get_extra_state`; tensors go under `extra.<number>`."""
    return ValueWriter("extra", tensors, copy).write(extra_of(model), "the model's extra state")


def extra_of(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside parameters and buffers, by their names."""
    return {name: module.get_extra_state() for name, module in modules_with_extra(model).items()}


def extra_differences(extra: Mapping[str, Any], model: nn.Module) -> list[str]:
    """What keeps recorded extra state from being put into a module."""
    here = modules_with_extra(model)
    return [f"{name or 'the model'} is recorded with extra state, this one has none" for name in extra if name not in here] + [
        f"{name or 'the model'} has extra state, the record lacks it" for name in here if name not in extra
    ]


def restore_extra(extra: Mapping[str, Any], model: nn.Module) -> None:
    """Hands recorded extra state back to the modules it is of."""
    for name, module in modules_with_extra(model).items():
        module.set_extra_state(extra[name])


def modules_with_extra(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that have a state of their own beside parameters and buffers, by name."""
    return {name: m for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}


def model_differences(
    part: Mapping[str, Any], recorded: Mapping[str, Tensor], found: Mapping[str, Tensor], ties: Mapping[str, str]
) -> list[str]:
    """What keeps recorded tensors from being put into a module that has these."""
    differences = [f"{name} is recorded, the model lacks it" for name in recorded if name not in found]
    differences += [f"{name} is in the model, the record lacks it" for name in found if name not in recorded]
    for name in found:
        if name not in recorded:
            continue
        if what := _what(found[name]):
            differences.append(f"{name} is a {what} in the model: values can be put into dense tensors")
        elif found[name].is_inference():
            differences.append(f"{name} is an inference tensor in the model: build the model outside torch.inference_mode")
        elif found[name].shape != recorded[name].shape:
            differences.append(f"{name} is recorded with shape {tuple(recorded[name].shape)}, the model has {tuple(found[name].shape)}")
        elif _family(found[name]) != _family(recorded[name]):
            differences.append(f"{name} is recorded as {recorded[name].dtype}, the model has {found[name].dtype}")
    if ties != part["ties"]:
        differences.append(f"tied names are recorded as {part['ties']}, the model has {dict(ties)}")
    return differences


def _family(tensor: Tensor) -> str:
    """Types among which a restore may convert; whole numbers are kept in their own."""
    return "floating" if tensor.is_floating_point() else "complex" if tensor.is_complex() else str(tensor.dtype)


@torch.no_grad()
def put_values(found: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> None:
    """Copies recorded values into a module's tensors, which `model_differences` found nothing against."""
    for name, tensor in found.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            # Expanded: its elements share memory, and nothing can be written into it.
            tensor.data = recorded[name].to(tensor.device, tensor.dtype, copy=True)
        else:
            tensor.copy_(recorded[name])


@torch.no_grad()
def give_dtypes(found: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> None:
    """Gives a module's tensors their recorded types; a tensor of another type loses its gradient."""
    for name, tensor in found.items():
        if tensor.dtype != (dtype := dtype_of(dtypes[name])):
            # Through `.data`, so that the parameter stays the object that optimizers, hooks and ties hold.
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None


def class_name(value: object) -> str:
    """The full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the optimizer's parameters, group by group; none for one that is not the model's."""
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def capture_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the optimizer's state under `optimizer.<number>`.

    Raises:
        ValueError: it updates a parameter that the model lacks, whose value would be lost, or its state cannot be held.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = _parameter_names(optimizer, model)
    strangers = [f"parameter {at} of group {i}" for i, group in enumerate(names) for at, name in enumerate(group) if not name]
    refuse("the optimizer updates what the model lacks (capture one module that holds all, such as an nn.ModuleList)", strangers)
    return {
        "class": class_name(optimizer),
        "parameters": names,
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
            if key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = _with_dtypes(optimizer.state[parameter][key], value)
    if part["stepped"]:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own flag, see capture_optimizer


def _with_dtypes(loaded: Any, recorded: Any) -> Any:
    """What an optimizer loaded, every tensor in it in its recorded type."""
    if isinstance(loaded, Tensor) and isinstance(recorded, Tensor):
        return loaded if loaded.dtype == recorded.dtype else recorded.to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(recorded, dict):
        return type(loaded)({key: _with_dtypes(value, recorded.get(key)) for key, value in loaded.items()})
    if isinstance(loaded, list | tuple) and isinstance(recorded, list | tuple) and len(loaded) == len(recorded):
        return type(loaded)(_with_dtypes(*pair) for pair in zip(loaded, recorded, strict=True))
    return loaded


def capture_scheduler(scheduler: Scheduler | None, tensors: dict[str, Tensor], copy: Copy) -> dict[str, Any]:
    """Copies the scheduler's state under `scheduler.<number>`."""
    state = None if scheduler is None else scheduler.state_dict()
    return {"class": _scheduler_name(scheduler), "state": ValueWriter("scheduler", tensors, copy).write(state, "the scheduler's state")}


def scheduler_differences(part: Mapping[str, Any], scheduler: Scheduler | None) -> list[str]:
    """What keeps a recorded scheduler from being put into this one."""
    if part["class"] != (name := _scheduler_name(scheduler)):
        return [f"the scheduler is recorded as {part['class']}, given is {name}"]
    return []


def _scheduler_name(scheduler: object) -> str:
    """The full name of a scheduler's class, and of those that it is made of, which loading a state does not compare."""
    inner = getattr(scheduler, "_schedulers", None)
    parts = [_scheduler_name(one) for one in inner] if isinstance(inner, list | tuple) else []
    return f"{class_name(scheduler)}({', '.join(parts)})" if parts else class_name(scheduler)


def check_parts(structure: Any, keys: Mapping[str, type]) -> None:
    """Checks the outer form of what a file holds.

    Raises:
        ValueError: a part is missing or of another type.
    """
    if not isinstance(structure, dict):
        raise ValueError("a part of the record is no JSON object")
    for key, kind in keys.items():
        if type(structure.get(key)) is not kind:
            raise ValueError(f"the record's {key!r} is missing or malformed")
