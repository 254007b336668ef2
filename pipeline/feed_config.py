"""How one pass of a stream is built."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from treadle.decoders import DecodeOptions
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.layout import LateInteractionCapacities
from treadle.pipeline.order_plan import OrderPlan
from treadle.pipeline.quarantine import Budget
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import Schema
from treadle.shape import BatchShape

OnStreamError = Literal["quarantine", "raise"]


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
