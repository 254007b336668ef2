"""Which device and compute type a run uses when its configuration leaves them open."""

from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


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
    count = torch.cuda.device_count() if picked.type == "cuda" and torch.cuda.is_available() else 0
    if picked.type == "cuda" and (picked.index or 0) >= count:
        raise ValueError(f"{owner} is {str(device)!r}: this process sees {count} CUDA devices")
    if str(picked) == "cuda":
        return torch.device("cuda", torch.cuda.current_device() if local_index is None else local_index % count)
    return picked


def computes_in_bf16(precision: Precision | None, device: torch.device) -> bool:
    """Whether matrix products run in bf16: by choice, or by default on CUDA."""
    return (precision or ("bf16" if device.type == "cuda" else "fp32")) == "bf16"
