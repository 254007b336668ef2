"""The keyed order of samples: lanes over sources, in integers alone; no input, no output, no clock.

A source's shards are cut into parts so that every lane gets some; epoch by epoch the shards are permuted, and the units
(shard, part) of all epochs in a row are dealt to the lanes in turn. Within one lane a source is a *sub-lane*: it holds back
`depth` samples of its current epoch and emits one of them by keyed choice. Several sources are blended per lane, by keyed
choice at the output. A rank owns the lanes `l % world_size == rank` and takes from the lane with the smallest
(epoch, taken in it, lane).

Guarantee: a sub-lane's sequence depends on the plan and the data, never on ranks, threads or timing; each sample of a source
occurs once in each of its epochs. A refill happens at the draw only, so that one position has one state.

    index % parts == part      hold-back, one epoch          smallest (epoch, taken, lane)
    units g = lane, lane + L, ... --> [ o o o o o ] --draw--> lane --heap--> the rank's next sample
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

from treadle.pipeline.draws import BLEND, HOLD, DrawSequence, permutation

DRY_EPOCHS = 3
"""A sub-lane without an end is over once so many whole epochs in a row gave it nothing."""

MAX_LANES = 65_536
MAX_SOURCES = 65_536


class Located(Protocol):
    """A sample as the order sees it: where it is, and how many bytes of the tar it takes."""

    @property
    def index(self) -> int:
        """Place in its shard."""
        ...

    @property
    def offset(self) -> int:
        """Byte at which its first header begins, in the unpacked tar."""
        ...

    @property
    def size(self) -> int:
        """Bytes up to the next sample."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A sample known by reference alone: what a state brings back."""

    index: int
    offset: int
    size: int


class UnitBrokenError(Exception):
    """A unit ends before its shard does; every complete sample before the damage has been delivered."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Catalogue(Protocol):
    """Answers what a unit holds; the one thing that the order asks of the world."""

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Located]:
        """The samples of part `part` of `parts` from sample `index` on, which begins at byte `offset`.

        Raises:
            UnitBrokenError: while iterating, after the last sample before a damage.
        """
        ...


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


Entry = tuple[int, Located]
"""A held-back sample: (shard, sample)."""


Cursor = tuple[int, int, int, int, int, int, bool]
"""Where a sub-lane stands between two samples: (unit, next_index, next_offset, draws, taken, epoch, over).

`unit` is the global number of the unit being read, the next two say at which sample of its shard to go on, and at which byte
that one begins; `draws` counts samples ever, `taken` those of this epoch; `over` means that nothing will come any more.
"""

Move = tuple[int, Sequence[Entry], int, Cursor]
"""What one step did to a sub-lane: (sub_lane, appended, slot, cursor).

`sub_lane` is its number among the rank's own, lane by lane; `appended` came to the hold-back, then the sample at `slot` was drawn
and its place taken by the last one (-1: none was drawn). Plain tuples: this is made for every sample, and named ones cost a third more.
"""


class Fault(NamedTuple):
    """A unit that ended early."""

    source: int
    epoch: int
    shard: int
    part: int
    error: Exception


class Drawn(NamedTuple):
    """The rank's next sample, with everything that changed to get it."""

    epoch: int
    """Epoch of the sample in its source."""
    key: tuple[int, int, int]
    """(epoch, taken, lane), or (0, draws of the lane, lane) in a blend: the place in the order of all ranks."""
    source: int
    shard: int
    sample: Located
    lane_draws: int
    """Samples that the lane has emitted, this one included."""
    moves: Sequence[Move]
    faults: Sequence[Fault]


class Ended(NamedTuple):
    """No further sample, with what changed to find that out."""

    moves: Sequence[Move]
    faults: Sequence[Fault]


class _SubLane:
    """One source within one lane."""

    def __init__(
        self, plan: OrderPlan, source: int, lane: int, number: int, catalogue: Catalogue, permutations: "_Permutations", faults: list[Fault]
    ) -> None:
        self._plan = plan
        self._source = source
        self._catalogue = catalogue
        self._permutations = permutations
        self._faults = faults
        self._draw_at = DrawSequence(plan.seed, HOLD, lane, source).at
        self._depth = plan.depth(source)
        self._depth_bytes = plan.depth_bytes(source)
        self._samples: Iterator[Located] | None = None
        self._shard = 0
        self.number = number
        self.lanes = plan.lanes
        self.parts = plan.parts(source)
        self.units = plan.sources[source].shards * self.parts
        endless = plan.epochs is None or plan.sources[source].repeat
        self.end_unit = None if plan.epochs is None or endless else plan.epochs * self.units
        self.pool: list[Entry] = []
        self.bytes = 0
        self.appended: list[Entry] = []
        self.unit = lane
        self.next_index = self.next_offset = self.draws = self.taken = 0
        # Every lane has a unit in every epoch, because units >= lanes: the first lies in epoch 0.
        self.epoch = 0
        self.over = False

    def restore(self, cursor: Cursor, pool: Sequence[Entry]) -> None:
        self.close()
        self.unit, self.next_index, self.next_offset, self.draws, self.taken, self.epoch, self.over = cursor
        self.pool = list(pool)
        self.bytes = sum(sample.size for _, sample in pool)

    def close(self) -> None:
        samples, self._samples = self._samples, None
        close = getattr(samples, "close", None)
        if close is not None:
            close()

    def open(self) -> Iterator[Located] | None:
        """The unit being read; None at the end of the epoch or of the source."""
        unit = self.unit
        if self._samples is None and not ((self.end_unit is not None and unit >= self.end_unit) or unit // self.units != self.epoch):
            place, part = divmod(unit % self.units, self.parts)
            self._shard = self._permutations.at(self._source, self.epoch, place)
            self._samples = self._catalogue.read(
                self._source, self._shard, part=part, parts=self.parts, index=self.next_index, offset=self.next_offset
            )
        return self._samples

    def _intake(self) -> Located | None:
        """The next sample of the current epoch, or None at its end."""
        while True:
            samples = self._samples or self.open()
            if samples is None:
                return None
            try:
                for sample in samples:
                    self.next_index = sample.index + 1
                    self.next_offset = sample.offset + sample.size
                    return sample
            except UnitBrokenError as broken:
                part = self.unit % self.units % self.parts
                self._faults.append(Fault(self._source, self.epoch, self._shard, part, broken.fault))
            self.close()
            self.unit += self.lanes
            self.next_index = self.next_offset = 0

    def fill(self) -> bool:
        """Holds back what there is room for; whether anything is held."""
        pool = self.pool
        depth, depth_bytes = self._depth, self._depth_bytes
        while len(pool) < depth and (self.bytes < depth_bytes or not pool):
            sample = self._intake()
            if sample is None:
                break
            entry = (self._shard, sample)
            pool.append(entry)
            self.appended.append(entry)
            self.bytes += sample.size
        return bool(pool)

    def roll(self, moves: list[Move]) -> bool:
        """Fills, going on to the next epoch where the current one is drained; False when nothing will come any more."""
        if self.over:
            return False
        if self.fill():
            self.record(moves, -1)
            return True
        dry = 0 if self.taken else 1
        while not self.over:
            if self.end_unit is not None:
                self.over = self.unit >= self.end_unit
            else:
                self.over = dry >= DRY_EPOCHS
            if not self.over:
                dry += 1
                self.epoch = self.unit // self.units
                self.taken = 0
                if self.fill():
                    break
        self.record(moves, -1)
        return not self.over

    def record(self, moves: list[Move], slot: int) -> None:
        cursor = (self.unit, self.next_index, self.next_offset, self.draws, self.taken, self.epoch, self.over)
        moves.append((self.number, self.appended, slot, cursor))
        self.appended = []

    def draw(self, moves: list[Move]) -> Entry:
        """Draws one of the held-back samples; `fill` or `roll` has found some."""
        pool = self.pool
        slot = self._draw_at(self.draws) * len(pool) >> 32
        self.draws += 1
        self.taken += 1
        entry = pool[slot]
        last = pool.pop()
        if slot < len(pool):
            pool[slot] = last
        self.bytes -= entry[1].size
        self.record(moves, slot)
        return entry


class _Permutations:
    """The permutations of the epochs that are being read, computed when first asked for."""

    def __init__(self, plan: OrderPlan) -> None:
        self._plan = plan
        self._orders: list[dict[int, list[int]]] = [{} for _ in plan.sources]

    def at(self, source: int, epoch: int, place: int) -> int:
        orders = self._orders[source]
        order = orders.get(epoch)
        if order is None:
            # Lanes of one rank stand in at most a few epochs at a time; an older one is computed again when a lane lags.
            while len(orders) > 3:
                del orders[min(orders)]
            order = orders[epoch] = permutation(self._plan.seed, source, epoch, self._plan.sources[source].shards).tolist()
        return order[place]


class _Lane:
    """The sub-lanes of one lane, blended."""

    __slots__ = ("_blend_at", "_repeats", "_weights", "draws", "lane", "number", "sub_lanes")

    def __init__(self, plan: OrderPlan, lane: int, number: int, sub_lanes: list[_SubLane]) -> None:
        self.lane = lane
        self.number = number
        self.sub_lanes = sub_lanes
        self.draws = 0
        self._weights = [source.weight for source in plan.sources]
        self._repeats = [source.repeat for source in plan.sources]
        self._blend_at = DrawSequence(plan.seed, BLEND, lane).at

    def choose(self, moves: list[Move]) -> int | None:
        """The source of the lane's next sample, by keyed choice among the living; None at the lane's end."""
        living = [bool(sub_lane.pool) or sub_lane.roll(moves) for sub_lane in self.sub_lanes]
        finite = [alive for alive, repeat in zip(living, self._repeats, strict=True) if not repeat]
        if not any(living) or (finite and not any(finite)):
            return None
        weights = [weight if alive else 0.0 for weight, alive in zip(self._weights, living, strict=True)]
        point = self._blend_at(self.draws) / 2**32 * sum(weights)
        chosen = 0
        for source, weight in enumerate(weights):
            if weight > 0.0:
                # Rounding may leave the point at the very end: the last living source takes it.
                chosen = source
                if point < weight:
                    break
                point -= weight
        return chosen


class Order:
    """One rank's samples, in order.

    `advance()` answers the next one; everything that it changed travels with the sample, so that whoever consumes it can follow.
    """

    def __init__(self, plan: OrderPlan, catalogue: Catalogue, *, rank: int = 0, world_size: int = 1) -> None:
        if world_size > plan.lanes:
            raise ValueError(
                f"lanes is {plan.lanes} and world_size is {world_size}: every rank needs a lane; pass lanes={world_size} or more"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: it must lie between 0 and world_size - 1 = {world_size - 1}")
        self._blended = plan.blended
        self._faults: list[Fault] = []
        permutations = _Permutations(plan)
        self._lanes: list[_Lane] = []
        sources = range(len(plan.sources))
        for number, lane in enumerate(range(rank, plan.lanes, world_size)):
            sub_lanes = [
                _SubLane(plan, source, lane, number * len(sources) + source, catalogue, permutations, self._faults) for source in sources
            ]
            self._lanes.append(_Lane(plan, lane, number, sub_lanes))
        self._heap: list[tuple[int, int, int]] = []
        self._by_lane = {lane.lane: lane for lane in self._lanes}
        self._enqueue()

    def _enqueue(self) -> None:
        if self._blended:
            self._heap = [(0, lane.draws, lane.lane) for lane in self._lanes]
        else:
            self._heap = [(lane.sub_lanes[0].epoch, lane.sub_lanes[0].taken, lane.lane) for lane in self._lanes]
        heapq.heapify(self._heap)

    def restore(self, lane_draws: Sequence[int], cursors: Sequence[Cursor], pools: Sequence[Sequence[Entry]]) -> None:
        """Goes on from where other samples were left: per own lane its draws, per own sub-lane its cursor and hold-back."""
        sub_lanes = [sub_lane for lane in self._lanes for sub_lane in lane.sub_lanes]
        for lane, draws in zip(self._lanes, lane_draws, strict=True):
            lane.draws = draws
        for sub_lane, cursor, pool in zip(sub_lanes, cursors, pools, strict=True):
            sub_lane.restore(cursor, pool)
        self._faults.clear()
        self._enqueue()

    def open(self) -> None:
        """Opens the unit that each lane stands in, so that a catalogue that reads ahead begins with all of them at once."""
        sub_lanes = [sub_lane for lane in self._lanes for sub_lane in lane.sub_lanes]
        # Parts of one shard can then share what the first of them begins to read.
        for sub_lane in sorted(sub_lanes, key=lambda each: each.next_offset):
            sub_lane.open()

    def close(self) -> None:
        """Lets go of the units being read."""
        for lane in self._lanes:
            for sub_lane in lane.sub_lanes:
                sub_lane.close()

    def _take_faults(self) -> Sequence[Fault]:
        if not self._faults:
            return ()
        faults = tuple(self._faults)
        self._faults.clear()
        return faults

    def advance(self) -> Drawn | Ended:
        """The rank's next sample; once ended, ended for good."""
        moves: list[Move] = []
        if self._blended:
            return self._advance_blended(moves)
        heap = self._heap
        while heap:
            key = heap[0]
            lane = self._by_lane[key[2]]
            sub_lane = lane.sub_lanes[0]
            if not sub_lane.fill():
                if not sub_lane.roll(moves):
                    heapq.heappop(heap)
                    continue
                # The lane has gone on to its next epoch: another may stand before it now.
                heapq.heapreplace(heap, (sub_lane.epoch, sub_lane.taken, key[2]))
                continue
            shard, sample = sub_lane.draw(moves)
            lane.draws += 1
            heapq.heapreplace(heap, (key[0], sub_lane.taken, key[2]))
            return Drawn(key[0], key, 0, shard, sample, lane.draws, moves, self._take_faults())
        return Ended(moves, self._take_faults())

    def _advance_blended(self, moves: list[Move]) -> Drawn | Ended:
        heap = self._heap
        while heap:
            key = heap[0]
            lane = self._by_lane[key[2]]
            source = lane.choose(moves)
            if source is None:
                heapq.heappop(heap)
                continue
            sub_lane = lane.sub_lanes[source]
            sub_lane.fill()
            epoch = sub_lane.epoch
            shard, sample = sub_lane.draw(moves)
            lane.draws += 1
            heapq.heapreplace(heap, (0, lane.draws, key[2]))
            return Drawn(epoch, key, source, shard, sample, lane.draws, moves, self._take_faults())
        return Ended(moves, self._take_faults())
