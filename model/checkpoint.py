"""A trainer's checkpoint: a record (`record_file`) with everything a run needs to go on, and the checks that refuse a wrong one.

Tensors (`<p>` a parameter's name, `<r>` a rank, `<term>` one of `objectives.TERMS`):

- `weights.<p>`, `moments.first.<p>`, `moments.second.<p>`: float32, the parameter's shape.
- `updates`: float32 `[]`, updates applied, which Adam's bias corrections count (refused ones are no updates).
- `counters`: int64 `[4]`: segments dropped and updates refused in the whole run, and how many of each a reader was told of.
- `ranks.<r>.gradients.<term>.<p>`: float32, unnormalised gradients of an open accumulation window, of the terms and parameters touched.
- `ranks.<r>.state.<n>`: what the rank's state in the structure names: its stream position, uint8 (`StreamState.to_bytes`).

Structure (JSON, metadata `record`): `config`, `step` (steps taken), `versions`, `groups` (names of weights and moments), and `ranks`: for each
the names of its gradients, its state, and its open window: `micro_batches` in it, items `truncated` and segments `dropped` in them,
and `counts` and `sums`, that rank's denominators and numerators by term. Nothing in it grows with the steps taken.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.model.checkpoint_folder import find_checkpoint
from treadle.model.config import TrainerConfig
from treadle.model.config_json import to_json, trainer_config_from_json
from treadle.model.record_file import Form, Snapshot, read_snapshot, write_snapshot
from treadle.model.record_ranks import RankPart, names_of_parts, parts_of, put_parts, ranks_taken, summed
from treadle.model.record_values import ValueReader, ValueWriter
from treadle.model.storage_errors import DamagedFileError
from treadle.model.storage_file import OnTensor

KIND = "treadle.checkpoint"
VERSION = 1
GROUPS = ("weights", "moments.first", "moments.second")
MAX_COUNT = 2**60


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

    def part(self) -> RankPart:
        """This state as a record's part of a rank."""
        part = RankPart()
        part.state = ValueWriter("state", part.state_tensors, lambda tensor: tensor).write({"stream": self.stream}, "state")
        if self.micro_batches:
            assert self.counts is not None and self.sums is not None
            part.window = {
                "micro_batches": self.micro_batches,
                "truncated": self.truncated,
                "dropped": self.dropped,
                "counts": [count.hex() for count in self.counts.tolist()],
                "sums": [value.hex() for value in self.sums.tolist()],
            }
            part.gradients = {f"{term}.{name}": g for term, gradients in self.pending.items() for name, g in gradients.items()}
        return part

    @classmethod
    def of_part(cls, part: RankPart) -> "RankState":
        """The state that `part()` wrote.

        Raises:
            ValueError: a value is not one of ours.
        """
        state = cls()
        known: Any = ValueReader(part.state_tensors).read(part.state)
        if not isinstance(known, dict) or not isinstance(known.get("stream"), bytes):
            raise ValueError("a rank's state lacks its stream's position")
        state.stream = known["stream"]
        if part.window is None:
            if part.gradients:
                raise ValueError("a rank holds pending gradients without a window")
            return state
        state.micro_batches, state.truncated, state.dropped = (
            _count(part.window, name) for name in ("micro_batches", "truncated", "dropped")
        )
        state.counts, state.sums = (_numbers(part.window, name) for name in ("counts", "sums"))
        for name, gradient in part.gradients.items():
            if gradient.dtype != torch.float32:
                raise ValueError(f"pending gradient {name[:80]!r} is {gradient.dtype}: it must be float32")
            term, _, parameter = name.partition(".")
            state.pending.setdefault(term, {})[parameter] = gradient
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
        for prefix, group in zip(GROUPS, (self.weights, self.first, self.second), strict=True):
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in group.items()}
        structure = {
            "config": to_json(self.config),
            "step": self.step,
            "versions": versions(),
            "groups": {prefix: list(group) for prefix, group in zip(GROUPS, (self.weights, self.first, self.second), strict=True)},
        }
        snapshot = Snapshot(structure, tensors)
        put_parts(snapshot, [state.part() for state in self.ranks])
        notes = {"step": str(self.step), "world_size": str(len(self.ranks)), "config": json.dumps(structure["config"], sort_keys=True)}
        write_snapshot(snapshot, path, FORM, notes=notes, on_tensor=on_tensor)


def read_checkpoint(path: str | Path, *, on_tensor: OnTensor | None = None) -> CheckpointContent:
    """Reads and checks a checkpoint, onto the host.

    Args:
        path: the file, or a folder of checkpoints, which means its newest.

    Raises:
        StorageFileError: the file is missing, truncated, damaged, of a newer format or of another kind.
    """
    path = find_checkpoint(Path(path)) if Path(path).is_dir() else path
    snapshot = read_snapshot(path, FORM, on_tensor=on_tensor)
    structure, tensors = snapshot.structure, snapshot.tensors
    try:
        for name, dtype, shape in (("updates", torch.float32, ()), ("counters", torch.int64, (4,))):
            if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
                raise ValueError(f"entry {name!r} is {tensors[name].dtype} {list(tensors[name].shape)}: it must be {dtype} {list(shape)}")
        groups = {prefix: {name: tensors[f"{prefix}.{name}"] for name in structure["groups"][prefix]} for prefix in GROUPS}
        for prefix, group in groups.items():
            for name, tensor in group.items():
                if tensor.dtype != torch.float32:
                    raise ValueError(f"entry '{prefix}.{name[:80]}' is {tensor.dtype}: it must be float32")
        ranks = [RankState.of_part(part) for part in parts_of(snapshot)]
        step = _count(structure, "step")
    except ValueError as error:
        raise DamagedFileError(path, f"is no whole checkpoint: {error}") from error
    try:
        config = trainer_config_from_json(structure["config"])
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"its configuration cannot be read: {error}") from error
    return CheckpointContent(
        config=config,
        step=step,
        weights=groups["weights"],
        first=groups["moments.first"],
        second=groups["moments.second"],
        updates=tensors["updates"],
        counters=tensors["counters"],
        ranks=ranks,
    )


def _named(structure: dict[str, Any]) -> set[str]:
    groups = structure["groups"]
    if not isinstance(groups, dict) or sorted(groups) != sorted(GROUPS) or not all(isinstance(names, list) for names in groups.values()):
        raise ValueError("its 'groups' is malformed: it names weights and moments")
    if not isinstance(structure["config"], dict):
        raise ValueError("its 'config' is malformed")
    named = {f"{prefix}.{name}" for prefix, names in groups.items() for name in names}
    return named | {"updates", "counters"} | names_of_parts(structure)


FORM = Form(KIND, VERSION, _named)


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

    The window's gradients are sums, dealt as a record's are, so that the finished gradient stays the same; a stream's position is dealt by
    whoever loads it, from the merged state.
    """
    if len(states) == world_size:
        return states[rank]
    merged = RankState(stream=_merge_streams([s.stream for s in states if s.stream]))
    # Windows are opened and ended by all ranks together, so one without gradients has as many micro-batches.
    merged.micro_batches = max(s.micro_batches for s in states)
    if not merged.micro_batches:
        return merged
    like = next(s for s in states if s.counts is not None and s.sums is not None)
    assert like.counts is not None and like.sums is not None
    taken = [states[r] for r in ranks_taken(rank, world_size, len(states))]
    merged.counts = sum((s.counts for s in taken if s.counts is not None), torch.zeros_like(like.counts))
    merged.sums = sum((s.sums for s in taken if s.sums is not None), torch.zeros_like(like.sums))
    merged.truncated, merged.dropped = sum(s.truncated for s in taken), sum(s.dropped for s in taken)
    terms = sorted({term for s in taken for term in s.pending})
    merged.pending = {term: summed([s.pending[term] for s in taken if term in s.pending]) for term in terms}
    return merged


def _merge_streams(streams: list[bytes]) -> bytes:
    if not streams:
        return b""
    from treadle.pipeline.state import StreamState

    return StreamState.merge([StreamState.from_bytes(s) for s in streams]).to_bytes()


def _count(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name!r} is {str(value)[:40]}: it must be a whole number up to {MAX_COUNT}")
    return value


def _numbers(table: Mapping[str, Any], name: str) -> Tensor:
    values = table.get(name)
    try:
        if not isinstance(values, list) or len(values) > 100:
            raise TypeError("no short list")
        return torch.tensor([float.fromhex(value) for value in values], dtype=torch.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an open accumulation window's {name!r} is malformed ({error})") from error
