"""Which implementation of an op runs: its Triton version on CUDA, the torch reference everywhere else.

An implementation never changes an op's answer beyond rounding. An op that has a Triton version says so with `register` when its
module is imported, without importing triton, and asks `choose` on every call.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from treadle.kernels.registry import interpreting

Impl = Literal["auto", "reference", "triton"]

_IMPLS = ("auto", "reference", "triton")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_registered: set[str] = set()


def register(op: str) -> None:
    """Declares that `op` has a Triton version."""
    _registered.add(op)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def choose(op: str, impl: Impl, device: torch.device, *dtypes: torch.dtype) -> Literal["reference", "triton"]:
    """The implementation that a call runs: `auto` takes Triton on CUDA where `op` has it, else the reference.

    Args:
        dtypes: of the call's floating tensors; in float64 there is the reference alone.

    Raises:
        ValueError: `impl` is not one of the three, or asks for a Triton version that cannot run: `op` has none, triton is not
            installed, a dtype is not fp32, bf16 or fp16, or the tensors are on the CPU and kernels are not interpreted.
    """
    if impl not in _IMPLS:
        raise ValueError(f"impl is {impl!r}: it must be one of {', '.join(_IMPLS)}")
    other = next((dtype for dtype in dtypes if dtype not in _DTYPES), None)
    if impl == "auto":
        return "triton" if op in _registered and device.type == "cuda" and other is None and _has_triton() else "reference"
    if impl == "triton":
        if op not in _registered:
            raise ValueError(f"{op} has no Triton version: use impl='reference' or impl='auto'")
        if not _has_triton():
            raise ValueError(f"{op}: impl is 'triton', and triton is not installed: install it, or use impl='reference'")
        if other is not None:
            raise ValueError(f"{op}: impl is 'triton' and a tensor is {other}: kernels take fp32, bf16 and fp16; use impl='reference'")
        if device.type != "cuda" and not interpreting():
            raise ValueError(
                f"{op}: impl is 'triton' and the tensors are on {device.type}: move them to cuda, use impl='reference', "
                "or set TRITON_INTERPRET=1 before triton is imported to interpret kernels"
            )
    return impl


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What a matrix product with `x` runs in: autocast's type where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` with the values of its last dimension side by side, as kernels read them: itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
