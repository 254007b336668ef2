"""How one pass of a stream is built."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from treadle.decoders import DecodeOptions
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.layout import LateInteractionCapacities
from treadle.pipeline.order_plan import OrderPlan
from treadle.pipeline.quarantine import Budget
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import Schema
from treadle.shape import BatchShape, Modality

OnStreamError = Literal["quarantine", "raise"]

PROCESSES_AFTER_S: Final = 2.0
"""Decoding, in seconds of work, after which derived processes are started: they take half a second to come up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """How one pass is built; all but the workers is the same for every rank."""

    plan: OrderPlan
    urls: Sequence[Sequence[str]]
    """Each source's shards, in the manifest's order."""
    manifest: str
    """What the order and the batches depend on, as canonical JSON."""
    shape: BatchShape
    schema: Schema
    options: DecodeOptions
    window: int
    max_edges: int
    late_interaction: LateInteractionCapacities | None
    rank: int
    world_size: int
    threads: int
    processes: int
    processes_after_s: float
    on_error: OnStreamError
    retry: RetryPolicy
    cache: ShardCache | None = None
    budget: Budget = field(default_factory=Budget)


def derived_workers(threads: int | None, processes: int | None, shape: BatchShape) -> dict[str, Any]:
    """What decodes: `threads`, `processes` and `processes_after_s` of a `FeedConfig`, derived where they are None."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    # Ranks of one machine share it; torchrun says how many they are.
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = max(1, cpus // max(1, int(ranks) if ranks.isdigit() else 1))
    after_s = 0.0
    if processes is None:
        # Decoders that go through FFmpeg need a process of their own anyhow (`options.isolate`); this saves them the way to another.
        slow = shape.is_live(Modality.AUDIO) or shape.is_live(Modality.VIDEO)
        processes = share if threads is None and slow and share > 1 and sys.executable else 0
        after_s = PROCESSES_AFTER_S
    return {"threads": threads or share, "processes": processes, "processes_after_s": after_s}
