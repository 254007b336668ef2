"""What the order of samples is a function of, beside the data: the plan, and the numbers that follow from it."""

from dataclasses import dataclass
from fractions import Fraction

MAX_LANES = 65_536
MAX_SOURCES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlan:
    """What the order needs to know of a source."""

    shards: int
    """Number of shards, in the manifest's order."""
    weight: float = 1.0
    """Share of the blend, against the other sources' weights."""
    repeat: bool = False
    """Whether the source goes on past `epochs`; it then never ends a lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderPlan:
    """Everything that the order is a function of, beside the data."""

    sources: tuple[SourcePlan, ...]
    seed: int = 0
    lanes: int = 64
    """Independent sample sequences that together are the order."""
    shuffle: int = 1000
    """Samples held back over all lanes."""
    shuffle_bytes: int = 2**29
    """Tar bytes past which a hold-back takes no further sample, over all lanes."""
    epochs: int | None = None
    """Epochs of each source after which its sub-lanes end; None never ends."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty: name at least one shard")
        if len(self.sources) > MAX_SOURCES:
            raise ValueError(f"sources has {len(self.sources)} entries: at most {MAX_SOURCES} can be blended")
        for number, source in enumerate(self.sources):
            if source.shards < 1:
                raise ValueError(f"sources[{number}] has {source.shards} shards: it needs at least one")
            if not 0.0 < source.weight < float("inf"):
                raise ValueError(f"sources[{number}] weighs {source.weight}: a weight must be positive and finite")
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"lanes is {self.lanes}: it must lie between 1 and {MAX_LANES}")
        if self.shuffle < 0:
            raise ValueError(f"shuffle is {self.shuffle}: it must be 0 (keep each lane's order) or a number of samples")
        if self.shuffle_bytes < 1:
            raise ValueError(f"shuffle_bytes is {self.shuffle_bytes}: it must be a positive number of bytes")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}: it must be at least 1, or None for no end")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}: it must lie between 0 and 2^64 - 1")

    @property
    def endless(self) -> bool:
        """Whether samples never end, as long as there are any."""
        return self.epochs is None or all(source.repeat for source in self.sources)

    @property
    def blended(self) -> bool:
        """Whether lanes choose between sources."""
        return len(self.sources) > 1

    def parts(self, source: int) -> int:
        """Parts that a shard of the source is cut into: samples by index modulo this."""
        return max(1, -(-self.lanes // self.sources[source].shards))

    def _lane_share(self, source: int) -> Fraction:
        total = sum((Fraction(each.weight) for each in self.sources), Fraction(0))
        return Fraction(self.sources[source].weight) / total / self.lanes

    def depth(self, source: int) -> int:
        """Samples that one sub-lane of the source holds back at most."""
        share = self._lane_share(source) * self.shuffle
        return max(1, -(-share.numerator // share.denominator))

    def depth_bytes(self, source: int) -> int:
        """Tar bytes from which one sub-lane of the source holds back no further sample."""
        return max(1, int(self._lane_share(source) * self.shuffle_bytes))
