"""What trains in a model whose rest is frozen: names, shapes and types, and a digest by which the frozen rest is known again."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treadle.model.record_parts import dtype_name, dtype_of, refuse


@dataclass(frozen=True, slots=True)
class TrainableParameterContract:
    """The parameters of a model that train."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each, by name; tied parameters once, by their first name."""
    dtypes: Mapping[str, torch.dtype]
    """Type of each."""
    base_digest: str
    """SHA-256 of the frozen parameters, by `digest_of_base`; for the caller to compare, since a base may be large."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what trains, in the model's order."""
        return tuple(self.shapes)

    @classmethod
    def capture(cls, model: nn.Module, names: Iterable[str] | None = None) -> "TrainableParameterContract":
        """The contract of a model as it stands.

        Args:
            names: what trains; None takes every parameter that requires a gradient.

        Raises:
            ValueError: a name is no parameter's.
        """
        parameters = dict(model.named_parameters())
        chosen = {n for n, p in parameters.items() if p.requires_grad} if names is None else set(names)
        refuse("no such parameters", [n for n in sorted(chosen) if n not in parameters])
        kept = {n: p for n, p in parameters.items() if n in chosen}
        shapes = {n: tuple(p.shape) for n, p in kept.items()}
        return cls(shapes, {n: p.dtype for n, p in kept.items()}, digest_of_base(model, chosen))

    def validate(self, model: nn.Module) -> None:
        """Checks that these parameters of `model`, and no others, require gradients, in these shapes and types.

        Raises:
            ValueError: they do not; every difference is listed.
        """
        parameters = dict(model.named_parameters())
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
        refuse("the model does not fit its contract", differences)

    def to_json(self) -> dict[str, Any]:
        """The contract as JSON."""
        dtypes = {n: dtype_name(d) for n, d in self.dtypes.items()}
        return {"shapes": {n: list(s) for n, s in self.shapes.items()}, "dtypes": dtypes, "base_digest": self.base_digest}

    @classmethod
    def from_json(cls, value: object) -> "TrainableParameterContract":
        """The contract that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            table: Any = value
            shapes = {str(n): tuple(int(k) for k in s) for n, s in table["shapes"].items()}
            return cls(shapes, {n: dtype_of(table["dtypes"][n]) for n in shapes}, str(table["base_digest"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the record's contract is malformed ({error})") from error


def digest_of_base(model: nn.Module, trainable: Iterable[str]) -> str:
    """SHA-256 over name, type, shape and bytes of every parameter that is not in `trainable`, in the order of names."""
    left_out = set(trainable)
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name in left_out:
            continue
        digest.update(f"{name}\0{parameter.dtype}\0{tuple(parameter.shape)}\0".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
