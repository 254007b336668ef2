"""Bringing what each rank alone knows to the rank that writes the checkpoint."""

from treadle.model.checkpoint import RankState
from treadle.model.mesh import World
from treadle.model.record_ranks import collect_parts


def collect_ranks(world: World, mine: RankState) -> list[RankState] | None:
    """Every rank's state, by rank, on rank 0; None elsewhere (collective)."""
    if world.size == 1:
        return [mine]
    parts = collect_parts(world, mine.part())
    return None if parts is None else [mine, *(RankState.of_part(part) for part in parts[1:])]
