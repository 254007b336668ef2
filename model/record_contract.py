"""What trains in a model whose rest is frozen: names, shapes and types, and digests by which the frozen rest is known again."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from treadle.model.record_values import dtype_name, dtype_of, refuse
from treadle.shape import require_member, shown


@dataclass(frozen=True, slots=True)
class TrainableParameterContract:
    """The parameters of a model that train, and the buffers that go with them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter, by name; tied ones once, by their first name."""
    dtypes: Mapping[str, torch.dtype]
    """Type of each."""
    base_digest: str
    """SHA-256 of the frozen rest, by `digest_of_base`; compared by the caller, with `check_base`, since a base may be large."""
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the buffers that are recorded beside the parameters, by name."""
    base: Mapping[str, str] = field(default_factory=dict)
    """A short digest of each tensor of the frozen rest, by name, to tell which differs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what trains, in the model's order."""
        return tuple(self.shapes)

    @classmethod
    def capture(
        cls, model: nn.Module, names: Iterable[str] | None = None, buffers: Iterable[str] | None = None
    ) -> "TrainableParameterContract":
        """The contract of a model as it stands. Reads all of the base once, for its digest.

        Args:
            names: what trains; None takes every parameter that requires a gradient.
            buffers: what else changes in training; None takes the buffers that a module holds beside parameters of `names`, such as the
                statistics of a batch norm that trains.

        Raises:
            ValueError: a name is no parameter's, or no buffer's; or an argument is of another type.
        """
        require_member("TrainableParameterContract.capture", "model", model, nn.Module)
        for what, listed in (("names", names), ("buffers", buffers)):
            if listed is not None and (isinstance(listed, str | bytes) or not isinstance(cast(object, listed), Iterable)):
                raise ValueError(f"TrainableParameterContract.capture.{what} is {shown(listed)}: it must be a list of names, or None")
        parameters, others = dict(model.named_parameters()), dict(model.named_buffers())
        chosen = {n for n, p in parameters.items() if p.requires_grad} if names is None else set(names)
        refuse("names: no such parameters", [str(n) for n in sorted(chosen, key=str) if n not in parameters])
        kept = {n: p for n, p in parameters.items() if n in chosen}
        beside = _beside(model, {id(p) for p in kept.values()}, others) if buffers is None else set(buffers)
        refuse("buffers: no such buffers", [str(n) for n in sorted(beside, key=str) if n not in others])
        base = _digests(model, chosen, beside)
        return cls(
            shapes={n: tuple(p.shape) for n, p in kept.items()},
            dtypes={n: p.dtype for n, p in kept.items()},
            base_digest=_together(base),
            buffers={n: tuple(b.shape) for n, b in others.items() if n in beside},
            base=base,
        )

    def validate(self, model: nn.Module) -> None:
        """Checks that these parameters of `model`, and no others, require gradients, in these shapes and types.

        Raises:
            ValueError: they do not; every difference is listed.
        """
        require_member("TrainableParameterContract.validate", "model", model, nn.Module)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        differences = [f"{n} is named, the model lacks it" for n in self.shapes if n not in parameters]
        for name, parameter in parameters.items():
            if name not in self.shapes:
                if parameter.requires_grad:
                    differences.append(f"{name} trains, the contract does not name it")
            elif not parameter.requires_grad:
                differences.append(f"{name} is named, but frozen in the model")
            elif tuple(parameter.shape) != self.shapes[name]:
                differences.append(f"{name} has shape {tuple(parameter.shape)}, the contract says {self.shapes[name]}")
            elif parameter.dtype != self.dtypes[name]:
                differences.append(f"{name} is {parameter.dtype}, the contract says {self.dtypes[name]}")
        for name, shape in self.buffers.items():
            if name not in buffers:
                differences.append(f"buffer {name} is named, the model lacks it")
            elif tuple(buffers[name].shape) != shape:
                differences.append(f"buffer {name} has shape {tuple(buffers[name].shape)}, the contract says {shape}")
        refuse("the model does not fit its contract", differences)

    def check_base(self, model: nn.Module) -> None:
        """Checks that the frozen rest of `model` is the one that the contract was made with, to the bit. Reads all of it.

        Raises:
            ValueError: it is another; the tensors that differ are listed.
        """
        require_member("TrainableParameterContract.check_base", "model", model, nn.Module)
        here = _digests(model, self.shapes, self.buffers)
        if _together(here) == self.base_digest:
            return
        differences = [f"{n} is in the contract's base, the model lacks it" for n in self.base if n not in here]
        differences += [f"{n} is in the model, the contract's base lacks it" for n in here if n not in self.base]
        differences += [f"{n} differs" for n in here if n in self.base and here[n] != self.base[n]]
        refuse("the model stands on another base", differences or ["their digests differ"])

    def to_json(self) -> dict[str, Any]:
        """The contract as JSON."""
        return {
            "shapes": {n: list(s) for n, s in self.shapes.items()},
            "dtypes": {n: dtype_name(d) for n, d in self.dtypes.items()},
            "base_digest": self.base_digest,
            "buffers": {n: list(s) for n, s in self.buffers.items()},
            "base": dict(self.base),
        }

    @classmethod
    def from_json(cls, value: object) -> "TrainableParameterContract":
        """The contract that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            table: Any = value
            shapes, buffers = ({str(n): tuple(int(k) for k in s) for n, s in table[part].items()} for part in ("shapes", "buffers"))
            dtypes = {n: dtype_of(table["dtypes"][n]) for n in shapes}
            return cls(shapes, dtypes, str(table["base_digest"]), buffers, {str(n): str(d) for n, d in table["base"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the record's contract is malformed ({error})") from error


def digest_of_base(model: nn.Module, trainable: Iterable[str], buffers: Iterable[str] = ()) -> str:
    """SHA-256 over name, type, shape and bytes of every parameter not in `trainable` and every persistent buffer not in `buffers`."""
    return _together(_digests(model, set(trainable), set(buffers)))


def _together(digests: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{digests[name]} {name}" for name in sorted(digests)).encode()).hexdigest()


def _digests(model: nn.Module, trainable: Collection[str], buffers: Collection[str]) -> dict[str, str]:
    rest: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n not in trainable}
    # Buffers that are not persistent are caches: whoever builds the model computes them anew.
    caches = {f"{path}.{n}" if path else n for path, m in model.named_modules() for n in m._non_persistent_buffers_set}
    rest |= {n: b for n, b in model.named_buffers() if n not in buffers and n not in caches}
    return {name: _digest(tensor) for name, tensor in rest.items()}


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    values = tensor.detach().resolve_conj().resolve_neg()
    digest.update(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _beside(model: nn.Module, trainable: Collection[int], buffers: Mapping[str, Tensor]) -> set[str]:
    """Buffers of the modules that hold one of these parameters themselves."""
    holders = [m for m in model.modules() if any(id(p) in trainable for p in m.parameters(recurse=False))]
    held = {id(b) for m in holders for b in m.buffers(recurse=False)}
    return {name for name, buffer in buffers.items() if id(buffer) in held}
