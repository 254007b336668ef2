"""One moment as JSON and tensors, and the one file that holds it: the form of training records and of a trainer's checkpoints.

The JSON structure rides in the metadata under `record`, beside `format` and `format_version`, and names every tensor of the file: one that
is missing or extra is told by its name.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.model.record_values import dtype_name, dtype_of, refuse
from treadle.model.storage_errors import DamagedFileError
from treadle.model.storage_file import OnTensor, read_tensors, tensors_from_bytes, tensors_to_bytes, write_tensors
from treadle.model.storage_header import is_held
from treadle.shape import require_path

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file."""

    kind: str
    """`format` in its metadata."""
    version: int
    """The newest format that is read, and the one that is written."""
    named: Callable[[dict[str, Any]], set[str]]
    """Checks a structure read from a file and answers the tensors that it names; raises ValueError, KeyError or TypeError."""


class Snapshot:
    """What was captured: a JSON-able structure, and tensors that it names."""

    def __init__(self, structure: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.structure = structure
        self.tensors = tensors
        self.queued: list[Any] = []

    def mark(self) -> None:
        """Notes where each device's stream stands, its copies queued: the fetch waits for that, not for what training queues since."""
        devices = {t.device for t in self.tensors.values() if t.device.type == "cuda"}
        self.queued = [torch.cuda.current_stream(device).record_event() for device in devices]


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor's value now, on the host, its dimensions in the same order in memory: a sum over it must round alike."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def device_copy(tensor: Tensor) -> Tensor:
    """The tensor's value now, on its device, laid out as `host_copy` does: the host does not wait."""
    return torch.empty_like(tensor).copy_(tensor)


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


def write_snapshot(
    snapshot: Snapshot,
    path: str | Path,
    form: Form,
    *,
    rounded: Callable[[str, Tensor], torch.dtype | None] | None = None,
    notes: Mapping[str, str] | None = None,
    on_tensor: OnTensor | None = None,
) -> None:
    """Writes one safetensors file, whole or not at all.

    Args:
        rounded: the type that a tensor is rounded to in the file, by its name; None keeps its own.
        notes: metadata for whoever lists files without parsing them; nothing is read back from it.

    Raises:
        ValueError: `path` is no path, the file cannot be written, or a value passes the range of its rounded type.
    """
    path = require_path("record", "path", path)
    tensors, metadata = _stored(snapshot, form, rounded)
    write_tensors(path, tensors, {**(notes or {}), **metadata}, on_tensor=on_tensor)


def snapshot_to_bytes(snapshot: Snapshot, form: Form) -> bytes:
    """The file of a snapshot, for another process."""
    return tensors_to_bytes(*_stored(snapshot, form, None))


def read_snapshot(path: str | Path, form: Form, *, on_tensor: OnTensor | None = None) -> Snapshot:
    """Reads a file of a form and checks that it holds exactly what it names.

    Raises:
        ValueError: `path` is no path, or the file is missing, damaged, newer, of another kind, or does not hold what it names.
    """
    path = require_path("record", "path", path)
    return _taken(path, form, *read_tensors(path, kind=form.kind, version=form.version, on_tensor=on_tensor))


def snapshot_from_bytes(name: str, data: bytes, form: Form) -> Snapshot:
    """What `snapshot_to_bytes` was given; `name` stands for the path in errors."""
    return _taken(name, form, *tensors_from_bytes(name, data, kind=form.kind, version=form.version))


def _stored(
    snapshot: Snapshot, form: Form, rounded: Callable[[str, Tensor], torch.dtype | None] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors, own, bits = dict(snapshot.tensors), dict[str, str](), dict[str, list[Any]]()
    # Files hold values by rows; how a tensor lay in memory (channels last, transposed) is told beside them.
    layouts = {name: list(tensor.dim_order()) for name, tensor in tensors.items() if not tensor.is_contiguous()}
    for name, tensor in snapshot.tensors.items():
        to = None if rounded is None else rounded(name, tensor)
        if to is not None and to != tensor.dtype:
            own[name] = dtype_name(tensor.dtype)
            tensors[name] = _rounded(name, tensor, to)
        elif not is_held(tensor.dtype):
            # The published format has no name for it (complex128, some 8-bit floats): its bytes are kept.
            bits[name] = [dtype_name(tensor.dtype), list(tensor.shape)]
            tensors[name] = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    structure = snapshot.structure | {"rounded": own, "bits": bits, "layouts": layouts}
    record = json.dumps(structure, separators=(",", ":"), allow_nan=False)
    return tensors, {"format": form.kind, "format_version": str(form.version), "record": record}


def _rounded(name: str, tensor: Tensor, to: torch.dtype) -> Tensor:
    value = tensor.to(to)
    if torch.finfo(to).max < torch.finfo(tensor.dtype).max and not torch.equal(value.isinf(), tensor.isinf()):
        raise ValueError(f"{name} passes the range of {to}, {torch.finfo(to).max:g}: save it in a wider type, or as it is")
    return value


def _taken(path: str | Path, form: Form, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Snapshot:
    try:
        structure = json.loads(metadata.get("record", ""))
        if not isinstance(structure, dict):
            raise ValueError("its structure is no JSON object")
        named = form.named(structure)
        refuse(
            "its tensors differ from those it names",
            [f"{n} is missing" for n in sorted(named - tensors.keys())] + [f"{n} is extra" for n in sorted(tensors.keys() - named)],
        )
        for name, dtype in structure.pop("rounded", {}).items():
            if (own := dtype_of(dtype)) not in PRECISIONS:
                raise ValueError(f"{name[:80]!r} cannot have been rounded from {own}")
            tensors[name] = tensors[name].to(own)
        for name, (dtype, shape) in structure.pop("bits", {}).items():
            tensors[name] = _from_bits(name, tensors[name], dtype_of(dtype), shape)
        for name, order in structure.pop("layouts", {}).items():
            tensors[name] = torch.empty_permuted(tensors[name].shape, order, dtype=tensors[name].dtype, device="cpu").copy_(tensors[name])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise DamagedFileError(path, f"is no whole {form.kind.removeprefix('treadle.')}: {error}") from error
    return Snapshot(structure, tensors)


def _from_bits(name: str, stored: Tensor, dtype: torch.dtype, shape: Any) -> Tensor:
    if is_held(dtype) or stored.dtype != torch.uint8 or stored.ndim != 1:
        raise ValueError(f"{name[:80]!r} is not kept as the bytes of a type that the format lacks")
    return stored.view(dtype).reshape(shape)
