"""What each rank alone knows at one moment: its pending gradients, where its window stands, and its state.

A record, and a trainer's checkpoint, hold one part a rank, apart. Gradients are sums over ranks, so at another world size rank r of W takes
the recorded ranks r, r + W, r + 2 W ... together: the sum over the world, and with it the finished gradient, stays the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treadle.model.mesh import World
from treadle.model.record_file import Form, Snapshot, snapshot_from_bytes, snapshot_to_bytes
from treadle.model.record_values import tensors_named
from treadle.shape import require_count

MAX_WORLD_SIZE = 2**17


@dataclass(slots=True)
class RankPart:
    """One rank's part of a moment."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Pending sums by name."""
    window: dict[str, Any] | None = None
    """Where the window stands, as JSON."""
    state: list[Any] = field(default_factory=lambda: ["none"])
    """A value of `record_values`, whose tensors are `state.<number>`."""
    state_tensors: dict[str, Tensor] = field(default_factory=dict)


def put_parts(snapshot: Snapshot, parts: Sequence[RankPart]) -> None:
    """Puts the parts of all ranks into a snapshot, as `ranks` and tensors `ranks.<r>.`."""
    listed: list[dict[str, Any]] = []
    for rank, part in enumerate(parts):
        listed.append({"gradients": list(part.gradients), "window": part.window, "state": part.state})
        snapshot.tensors |= {f"ranks.{rank}.gradients.{name}": tensor for name, tensor in part.gradients.items()}
        snapshot.tensors |= {f"ranks.{rank}.{name}": tensor for name, tensor in part.state_tensors.items()}
    snapshot.structure["ranks"] = listed


def names_of_parts(structure: Mapping[str, Any]) -> set[str]:
    """The tensors that the parts of a structure name.

    Raises:
        ValueError: a part is malformed, or there is none.
    """
    parts = structure.get("ranks")
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_WORLD_SIZE:
        raise ValueError("its 'ranks' is missing or malformed: it holds a part for each rank")
    named: set[str] = set()
    for rank, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("gradients"), list) or not isinstance(part.get("state"), list):
            raise ValueError(f"the part of rank {rank} is malformed")
        if not isinstance(part.get("window"), dict | None):
            raise ValueError(f"the accumulation window of rank {rank} is malformed")
        named |= {f"ranks.{rank}.gradients.{name}" for name in part["gradients"]}
        named |= {f"ranks.{rank}.{name}" for name in tensors_named(part["state"])}
    return named


def parts_of(snapshot: Snapshot) -> list[RankPart]:
    """The parts that `put_parts` put."""
    parts: list[RankPart] = []
    for rank, part in enumerate(snapshot.structure["ranks"]):
        gradients = {name: snapshot.tensors[f"ranks.{rank}.gradients.{name}"] for name in part["gradients"]}
        state_tensors = {name: snapshot.tensors[f"ranks.{rank}.{name}"] for name in tensors_named(part["state"])}
        parts.append(RankPart(gradients, part["window"], part["state"], state_tensors))
    return parts


def ranks_taken(rank: int, world_size: int, recorded: int) -> range:
    """The recorded ranks whose pending gradients `rank` of `world_size` takes over."""
    return range(rank, rank + 1) if world_size == recorded else range(rank, recorded, world_size)


def summed(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by name, in the order given; a name that few have is the sum of those; tensors of one mapping alone are not copied."""
    total: dict[str, Tensor] = {}
    for one in gradients:
        for name, gradient in one.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


_PART_FORM = Form("treadle.rank_part", 1, names_of_parts)


def collect_parts(world: World, mine: RankPart) -> list[RankPart] | None:
    """Every rank's part, by rank, on rank 0; None elsewhere (collective)."""
    if world.size == 1:
        return [mine]
    snapshot = Snapshot({}, {})
    put_parts(snapshot, [mine])
    data = snapshot_to_bytes(snapshot, _PART_FORM) if world.rank else b""
    received = world.collect_bytes(data)
    if received is None:
        return None
    return [mine, *(parts_of(snapshot_from_bytes(f"rank {rank}", part, _PART_FORM))[0] for rank, part in enumerate(received[1:], 1))]


def check_place(rank: int, world_size: int) -> None:
    """Checks a rank's number and its world's size.

    Raises:
        ValueError: one is out of range.
    """
    world_size = require_count("restore", "world_size", world_size, 1, MAX_WORLD_SIZE)
    require_count("restore", "rank", rank, 0, world_size - 1)


def same_gradients(parts: Sequence[RankPart]) -> list[str]:
    """Where ranks hold a gradient of one name in different shapes or types."""
    seen: dict[str, tuple[torch.Size, torch.dtype]] = {}
    differences: list[str] = []
    for rank, part in enumerate(parts):
        for name, gradient in part.gradients.items():
            is_here = (gradient.shape, gradient.dtype)
            if seen.setdefault(name, is_here) != is_here:
                differences.append(f"gradient {name} is {gradient.dtype} {tuple(gradient.shape)} on rank {rank}, {seen[name]} before it")
    return differences
