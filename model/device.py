"""Which device and compute type a run uses when its configuration leaves them open, and how the host's memory is kept for it."""

import ctypes
import os
import sys
from functools import cache
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]

_MALLOPT = {-1: (2**31 - 1,), -3: (2**30, 2**25), -8: (1,)}
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX (malloc.h), with the values to try in turn: older ones refuse a map threshold above
32 MiB."""


def pick_device(owner: str, device: str | torch.device | None, local_index: int | None = None) -> torch.device:
    """`device`, or CUDA where there is one, else the CPU; a CUDA device always with its number, which selecting it for a thread needs.

    Args:
        owner: what refusals call it.
        local_index: this process's number on its machine, which picks among the CUDA devices where none is named; None takes the current one.

    Raises:
        ValueError: there is no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, str | torch.device):
        raise ValueError(f"{owner} is {device!r}: it must be a device such as 'cpu', 'cuda' or 'cuda:1'")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{owner} is {str(device)!r}: it must be a device such as 'cpu', 'cuda' or 'cuda:1'") from error
    if picked.type == "meta":
        raise ValueError(f"{owner} is {str(device)!r}, which holds no values: it must be a device such as 'cpu', 'cuda' or 'cuda:1'")
    count = torch.cuda.device_count() if picked.type == "cuda" and torch.cuda.is_available() else 0
    if picked.type == "cuda" and (picked.index or 0) >= count:
        raise ValueError(f"{owner} is {str(device)!r}: this process sees {count} CUDA devices")
    if str(picked) == "cuda":
        return torch.device("cuda", torch.cuda.current_device() if local_index is None else local_index % count)
    return picked


def computes_in_bf16(precision: Precision | None, device: torch.device) -> bool:
    """Whether matrix products run in bf16: by choice, or by default on CUDA."""
    return (precision or ("bf16" if device.type == "cuda" else "fp32")) == "bf16"


@cache
def keep_freed_memory() -> bool:
    """Tells glibc's allocator to keep what is freed for what comes next; once, whatever the calls. Answers whether it was told.

    Otherwise it hands tensors of 32 MiB and more, and in a thread smaller ones, back to the system each time: to fault such a tensor's pages
    in again takes nine times as long as to fill it, and a step in fp32 on the CPU 12 to 17 % longer. Nothing is done where the environment
    already says how to allocate (`MALLOC_*`, `GLIBC_TUNABLES`), or where the C library is another.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([any(mallopt(parameter, value) for value in values) for parameter, values in _MALLOPT.items()])
