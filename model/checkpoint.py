"""A trainer's checkpoint: one safetensors file with everything a run needs to go on, and the checks that refuse a wrong one.

Keys (`<p>` a parameter's name, `<r>` a rank, `<term>` one of `objectives.TERMS`):

- `weights.<p>`, `moments.first.<p>`, `moments.second.<p>`: float32, the parameter's shape.
- `updates`: float32 `[]`, updates applied, which Adam's bias corrections count (refused ones are no updates).
- `counters`: int64 `[4]`: segments dropped and updates refused in the whole run, and how many of each a reader was told of.
- `ranks.<r>.stream`: uint8 `[n]`, that rank's stream position (`StreamState.to_bytes`); absent where no stream was used.
- `ranks.<r>.pending.<term>.<p>`: float32, unnormalised gradients of an open accumulation window, of the terms and parameters touched.
- `ranks.<r>.counts`, `ranks.<r>.sums`: float64 `[7]`, that window's denominators and numerators by term, of that rank alone.
- `ranks.<r>.window`: int64 `[3]`: micro-batches in the window, items truncated and segments dropped in them.

Metadata: `format`, `format_version`, `config` (JSON), `step` (steps taken), `world_size`, `versions` (JSON).
Nothing in it grows with the steps taken.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from treadle.model.config import TrainerConfig
from treadle.model.config_json import to_json, trainer_config_from_json
from treadle.model.storage_errors import DamagedFileError, require_format
from treadle.model.storage_file import OnTensor, read_tensors, write_tensors

KIND = "treadle.checkpoint"
VERSION = 1
MAX_STEP = 2**60
MAX_WORLD_SIZE = 2**17


class CheckpointMismatchError(ValueError):
    """A whole checkpoint that does not fit the run; the message names what differs."""


@dataclass(slots=True)
class RankState:
    """What one rank alone knows: its stream's position and its open accumulation window."""

    stream: bytes = b""
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Gradients by term and parameter."""
    counts: Tensor | None = None
    sums: Tensor | None = None
    micro_batches: int = 0
    truncated: int = 0
    dropped: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """This state as named tensors, without the rank's prefix."""
        out: dict[str, Tensor] = {}
        if self.stream:
            out["stream"] = torch.frombuffer(bytearray(self.stream), dtype=torch.uint8)
        if self.micro_batches:
            assert self.counts is not None and self.sums is not None
            out["counts"], out["sums"] = self.counts, self.sums
            out["window"] = torch.tensor([self.micro_batches, self.truncated, self.dropped], dtype=torch.int64)
            for term, gradients in self.pending.items():
                for name, gradient in gradients.items():
                    out[f"pending.{term}.{name}"] = gradient
        return out

    @classmethod
    def from_tensors(cls, path: str | Path, tensors: Mapping[str, Tensor]) -> "RankState":
        """The state that `tensors()` named.

        Raises:
            DamagedFileError: a name, type or shape is not one of ours.
        """
        state = cls()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "stream" and tensor.dtype == torch.uint8 and tensor.ndim == 1:
                state.stream = tensor.numpy().tobytes()
            elif kind in ("counts", "sums") and tensor.dtype == torch.float64 and tensor.ndim == 1:
                setattr(state, kind, tensor)
            elif kind == "window" and tensor.dtype == torch.int64 and tensor.shape == (3,):
                state.micro_batches, state.truncated, state.dropped = map(int, tensor.tolist())
            elif kind == "pending" and tensor.dtype == torch.float32:
                term, _, parameter = rest.partition(".")
                state.pending.setdefault(term, {})[parameter] = tensor
            else:
                raise DamagedFileError(path, f"entry {name[:80]!r} of a rank has an unknown name, type or shape")
        if state.micro_batches and (state.counts is None or state.sums is None):
            raise DamagedFileError(path, "an open accumulation window lacks its counts or sums")
        return state


@dataclass(slots=True)
class CheckpointContent:
    """A checkpoint's content, on the host or on a device."""

    config: TrainerConfig
    step: int
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    updates: Tensor
    counters: Tensor
    ranks: list[RankState]

    def write(self, path: str | Path, *, on_tensor: OnTensor | None = None) -> None:
        """Writes the file whole: beside the target, fsync, rename.

        Raises:
            StorageFileError: the folder or the disk refused it; the old file is untouched.
        """
        tensors: dict[str, Tensor] = {"updates": self.updates, "counters": self.counters}
        for prefix, group in (("weights", self.weights), ("moments.first", self.first), ("moments.second", self.second)):
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in group.items()}
        for rank, state in enumerate(self.ranks):
            tensors |= {f"ranks.{rank}.{name}": tensor for name, tensor in state.tensors().items()}
        metadata = {
            "format": KIND,
            "format_version": str(VERSION),
            "config": json.dumps(to_json(self.config), sort_keys=True),
            "step": str(self.step),
            "world_size": str(len(self.ranks)),
            "versions": json.dumps(versions(), sort_keys=True),
        }
        write_tensors(path, tensors, metadata, on_tensor=on_tensor)


def read_checkpoint(path: str | Path, *, on_tensor: OnTensor | None = None) -> CheckpointContent:
    """Reads and checks a checkpoint, onto the host.

    Raises:
        StorageFileError: the file is missing, truncated, damaged, of a newer format or of another kind.
    """
    tensors, metadata = read_tensors(path, on_tensor=on_tensor)
    require_format(path, metadata, KIND, VERSION)
    step, world_size = _number(path, metadata, "step", MAX_STEP), _number(path, metadata, "world_size", MAX_WORLD_SIZE)
    if not world_size:
        raise DamagedFileError(path, "its world_size is '0': a run has at least one rank")
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "moments.first": {}, "moments.second": {}}
    ranks: list[dict[str, Tensor]] = [{} for _ in range(min(world_size, len(tensors)))]
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = next((p for p in groups if name.startswith(p + ".")), None)
        if prefix is not None:
            if tensor.dtype != torch.float32:
                raise DamagedFileError(path, f"entry {name[:80]!r} is {tensor.dtype}: it must be float32")
            groups[prefix][name[len(prefix) + 1 :]] = tensor
        elif name.startswith("ranks."):
            number, _, rest = name[len("ranks.") :].partition(".")
            if not (number.isascii() and number.isdigit() and int(number) < len(ranks)):
                raise DamagedFileError(path, f"entry {name[:80]!r} is of no rank among {world_size}")
            ranks[int(number)][rest] = tensor
        elif name in ("updates", "counters"):
            single[name] = tensor
        else:
            raise DamagedFileError(path, f"entry {name[:80]!r} has no meaning in a checkpoint")
    _require(path, single, "updates", torch.float32, ())
    _require(path, single, "counters", torch.int64, (4,))
    try:
        config = trainer_config_from_json(json.loads(metadata.get("config", "")))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"its configuration cannot be read: {error}") from error
    states = [RankState.from_tensors(path, rank) for rank in ranks]
    states += [RankState() for _ in range(world_size - len(states))]
    return CheckpointContent(
        config=config,
        step=step,
        weights=groups["weights"],
        first=groups["moments.first"],
        second=groups["moments.second"],
        updates=single["updates"],
        counters=single["counters"],
        ranks=states,
    )


def require_entries(
    path: str | Path, what: str, found: Mapping[str, Tensor], wanted: Iterable[tuple[str, Tensor]], *, optional: str = ""
) -> None:
    """Checks that a group of entries has exactly the wanted names and shapes; names starting with `optional` may be missing or extra.

    Raises:
        CheckpointMismatchError: it does not; the message lists the differences.
    """
    shapes = {name: tensor.shape for name, tensor in wanted}
    problems: list[str] = []
    for name, shape in shapes.items():
        if name not in found:
            if not (optional and name.startswith(optional)):
                problems.append(f"{what}.{name} is missing")
        elif found[name].shape != shape:
            problems.append(f"{what}.{name} has shape {list(found[name].shape)}, this run's has {list(shape)}")
    problems += [
        f"{what}.{name} is of no use here" for name in found if name not in shapes and not (optional and name.startswith(optional))
    ]
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointMismatchError(f"{path}: {'; '.join(problems[:8])}{more}")


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    from treadle import __version__

    return {"treadle": __version__, "torch": str(torch.__version__)}


def fold_ranks(states: list[RankState], rank: int, world_size: int) -> RankState:
    """The state of `rank` in a world of `world_size`, from the states of another world.

    The window's gradients are sums, so rank 0 takes their total and the finished gradient stays the same; a stream's position is dealt
    by whoever loads it, from the merged state.
    """
    if len(states) == world_size:
        return states[rank]
    merged = RankState(stream=_merge_streams([s.stream for s in states if s.stream]))
    merged.micro_batches = max(s.micro_batches for s in states)
    if not merged.micro_batches:
        return merged
    like = next(s for s in states if s.counts is not None and s.sums is not None)
    assert like.counts is not None and like.sums is not None
    merged.counts, merged.sums = torch.zeros_like(like.counts), torch.zeros_like(like.sums)
    if rank == 0:
        for state in states:
            if state.counts is not None and state.sums is not None:
                merged.counts += state.counts
                merged.sums += state.sums
            merged.truncated += state.truncated
            merged.dropped += state.dropped
            for term, gradients in state.pending.items():
                into = merged.pending.setdefault(term, {})
                for name, gradient in gradients.items():
                    into[name] = into[name] + gradient if name in into else gradient.clone()
    return merged


def _merge_streams(streams: list[bytes]) -> bytes:
    if not streams:
        return b""
    from treadle.pipeline.state import StreamState

    return StreamState.merge([StreamState.from_bytes(s) for s in streams]).to_bytes()


def _number(path: str | Path, metadata: Mapping[str, str], name: str, most: int) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise DamagedFileError(path, f"its {name} is {text[:40]!r}: it must be a whole number up to {most}")
    return int(text)


def _require(path: str | Path, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise DamagedFileError(path, f"entry {name!r} is missing or of another type or shape")
