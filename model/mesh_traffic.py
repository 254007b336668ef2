"""What a rank sends: bytes counted as its collectives are called, by the formulas that docs/scaling.md builds on.

A collective of a world of `W` is counted as a ring sends it, which no algorithm on point-to-point links does with less: every rank passes
on `W - 1` parts of a gather or a reduce-scatter, and both of a sum. Backends may choose a tree or a switch; the payload stays the same.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields


def gather_bytes(world_size: int, part_bytes: int) -> int:
    """Sent by each rank when all ranks receive `part_bytes` from each: `(W - 1) part`. A reduce-scatter to such parts sends the same."""
    return (world_size - 1) * part_bytes


def sum_bytes(world_size: int, total_bytes: int) -> int:
    """Sent by each rank when `total_bytes` are summed onto all: a reduce-scatter and a gather of `1 / W` each, `2 (W - 1) total / W`."""
    return 2 * (world_size - 1) * total_bytes // world_size


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent, by kind, since the world was joined."""

    host: int = 0
    """Counts, flags and messages among hosts."""
    rows: int = 0
    """Rows gathered: pooled vectors and groups."""
    rows_back: int = 0
    """Their gradients, reduce-scattered."""
    sums: int = 0
    """Counts and statistics summed on the device."""
    gradients: int = 0
    """The flat gradient, summed slice by slice."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.host + self.rows + self.rows_back + self.sums + self.gradients

    def since(self, before: "Traffic") -> "Traffic":
        """What has been sent beside what had been `before`."""
        return Traffic(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def add(self, more: "Traffic") -> None:
        """Counts `more` as sent: a captured graph sends without calling."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))


def step_bytes(
    world_size: int, *, parameters: int, hidden: int, segments: Sequence[Sequence[int]], terms: int, scores_pairs: bool, host_words: int
) -> Traffic:
    """What one step of replicated weights sends from each rank.

    Args:
        parameters: elements of the flat gradient, gaps included.
        segments: for each micro-batch, the segments of each rank; parts of a gather are padded to the largest.
        terms: statistics that are summed, twice: counts before the backward pass, numerators after it.
        host_words: int64 values of the first exchange.
    """
    most = [max(sizes) for sizes in segments]
    host = gather_bytes(world_size, 8 * host_words)
    rows = rows_back = 0
    if scores_pairs:
        host += gather_bytes(world_size, 8 * len(most))
        # A group of 8 bytes and a vector in fp32 for every segment; the gradient of the vector comes back.
        rows = sum(gather_bytes(world_size, 8 * n) + gather_bytes(world_size, 4 * hidden * n) for n in most)
        rows_back = sum(gather_bytes(world_size, 4 * hidden * n) for n in most)
    return Traffic(
        host=host,
        rows=rows,
        rows_back=rows_back,
        sums=2 * sum_bytes(world_size, 8 * terms),
        gradients=sum_bytes(world_size, 4 * parameters),
    )
