"""Bringing what each rank alone knows to the rank that writes the checkpoint."""

from safetensors.torch import load, save

from treadle.model.checkpoint import RankState
from treadle.model.mesh import World


def collect_ranks(world: World, mine: RankState) -> list[RankState] | None:
    """Every rank's state, by rank, on rank 0; None elsewhere (collective)."""
    if world.size == 1:
        return [mine]
    parts = world.collect_bytes(save(mine.tensors()))
    if parts is None:
        return None
    return [mine, *(RankState.from_tensors(f"rank {rank}", load(part)) for rank, part in enumerate(parts[1:], 1))]
