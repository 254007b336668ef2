"""Which implementation of an op runs: the torch reference everywhere, a Triton version where one is registered.

An implementation never changes an op's answer beyond rounding. Each op's dispatcher asks `choose` on every call; a Triton
version enters itself with `register` when its module is imported.
"""

from typing import Literal

import torch

Impl = Literal["auto", "reference", "triton"]

_IMPLS = ("auto", "reference", "triton")
_registered: set[str] = set()


def register(op: str) -> None:
    """Declares that `op` has a Triton version."""
    _registered.add(op)


def choose(op: str, impl: Impl, device: torch.device) -> Literal["reference", "triton"]:
    """The implementation that a call runs: `auto` takes Triton on CUDA where `op` has it, else the reference.

    Raises:
        ValueError: `impl` is not one of the three, or asks for a Triton version that `op` lacks.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl is {impl!r}: it must be one of {', '.join(_IMPLS)}")
    if impl == "triton" and op not in _registered:
        raise ValueError(f"{op} has no Triton version: use impl='reference' or impl='auto'")
    if impl == "auto":
        return "triton" if op in _registered and device.type == "cuda" else "reference"
    return impl
