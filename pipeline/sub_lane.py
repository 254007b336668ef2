"""One source within one lane: the units that it reads in turn, its hold-back, its draws.

units g = lane, lane + L, ... --read--> [ o o o o o ] --keyed draw--> sample; the last one takes its place
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from treadle.pipeline.draws import BLOCK_DRAWS, HOLD, DrawSequence, permutation
from treadle.pipeline.order_plan import OrderPlan

DRY_EPOCHS = 3
"""A sub-lane without an end is over once so many whole epochs in a row gave it nothing."""


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


Ref = tuple[int, int, int, int]
"""A held-back sample by reference: (shard, index, offset, size)."""


Cursor = tuple[int, int, int, int, int, int, bool]
"""Where a sub-lane stands between two samples: (unit, next_index, next_offset, draws, taken, epoch, over).

`unit` is the global number of the unit being read, the next two say at which sample of its shard to go on, and at which byte
that one begins; `draws` counts samples ever, `taken` those of this epoch; `over` means that nothing will come any more.
"""

Move = tuple[int, Sequence[Ref], int, Cursor]
"""What one step did to a sub-lane: (sub_lane, appended, slot, cursor).

`sub_lane` is its number among the rank's own, lane by lane; `appended` came to the hold-back, then the sample at `slot` was drawn
and its place taken by the last one (-1: none was drawn). Plain tuples: this is made for every sample, and named ones cost a third more.
"""


cursor_of: Callable[["SubLane"], Cursor] = attrgetter("unit", "next_index", "next_offset", "draws", "taken", "epoch", "over")
"""Where a sub-lane stands."""


class Fault(NamedTuple):
    """A unit that ended early."""

    source: int
    epoch: int
    shard: int
    part: int
    error: Exception


class SubLane:
    """One source within one lane."""

    __slots__ = (
        "_catalogue", "_draws_of", "_faults", "_permutations", "_samples", "_shard", "_source", "_words",
        "appended", "bytes", "depth", "depth_bytes", "draws", "end_unit", "epoch", "lanes", "next_index", "next_offset", "number", "over", "parts", "pool", "refs",
        "taken", "unit", "units",
    )  # fmt: skip

    def __init__(
        self, plan: OrderPlan, source: int, lane: int, number: int, catalogue: Catalogue, permutations: "Permutations", faults: list[Fault]
    ) -> None:
        self._source = source
        self._catalogue = catalogue
        self._permutations = permutations
        self._faults = faults
        self._draws_of = DrawSequence(plan.seed, HOLD, lane, source)
        self._words: list[int] = []
        self.depth = plan.depth(source)
        self.depth_bytes = plan.depth_bytes(source)
        self._samples: Iterator[Located] | None = None
        self._shard = 0
        self.number = number
        self.lanes = plan.lanes
        self.parts = plan.parts(source)
        self.units = plan.sources[source].shards * self.parts
        endless = plan.epochs is None or plan.sources[source].repeat
        self.end_unit = None if plan.epochs is None or endless else plan.epochs * self.units
        # The hold-back twice over, place by place: the samples, and the references that a state keeps.
        self.pool: list[Located] = []
        self.refs: list[Ref] = []
        self.bytes = 0
        self.appended: list[Ref] | None = []
        self.unit = lane
        self.next_index = self.next_offset = self.draws = self.taken = 0
        # Every lane has a unit in every epoch, because units >= lanes: the first lies in epoch 0.
        self.epoch = 0
        self.over = False

    def restore(self, cursor: Cursor, refs: Sequence[Ref]) -> None:
        self.close()
        self.unit, self.next_index, self.next_offset, self.draws, self.taken, self.epoch, self.over = cursor
        self._words = []
        self.refs = list(refs)
        self.pool = [Held(index, offset, size) for _, index, offset, size in refs]
        self.bytes = sum([ref[3] for ref in refs])

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

    def fill(self) -> bool:
        """Holds back what there is room for; whether anything is held."""
        pool, refs, appended = self.pool, self.refs, self.appended
        depth, depth_bytes, size = self.depth, self.depth_bytes, self.bytes
        while len(pool) < depth and (size < depth_bytes or not pool):
            samples = self._samples or self.open()
            if samples is None:
                # The end of the epoch.
                break
            shard = self._shard
            try:
                for sample in samples:
                    ref = (shard, sample.index, sample.offset, sample.size)
                    pool.append(sample)
                    refs.append(ref)
                    if appended is not None:
                        appended.append(ref)
                    size += ref[3]
                    self.next_index, self.next_offset = ref[1] + 1, ref[2] + ref[3]
                    if len(pool) >= depth or size >= depth_bytes:
                        break
                else:
                    self._next_unit()
            except UnitBrokenError as broken:
                self._broke(broken)
        self.bytes = size
        return bool(pool)

    def fill_one(self) -> bool:
        """`fill` where all but one are held, which is how every draw but a lane's first finds it."""
        if self._samples is None or self.appended is not None:
            return self.fill()
        try:
            sample = next(self._samples, None)
        except UnitBrokenError as broken:
            self._broke(broken)
            return self.fill()
        if sample is None:
            self._next_unit()
            return self.fill()
        index, offset, size = sample.index, sample.offset, sample.size
        self.pool.append(sample)
        self.refs.append((self._shard, index, offset, size))
        self.bytes += size
        self.next_index, self.next_offset = index + 1, offset + size
        return True

    def _broke(self, broken: UnitBrokenError) -> None:
        part = self.unit % self.units % self.parts
        self._faults.append(Fault(self._source, self.epoch, self._shard, part, broken.fault))
        self._next_unit()

    def _next_unit(self) -> None:
        self.close()
        self.unit += self.lanes
        self.next_index = self.next_offset = 0

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
        appended = self.appended
        if appended is not None:
            moves.append((self.number, appended, slot, cursor_of(self)))
            self.appended = []

    def draw(self) -> tuple[int, Located, Ref]:
        """Draws one of the held-back samples, which `fill` or `roll` has found: its slot, the sample, its reference."""
        pool, refs, draws = self.pool, self.refs, self.draws
        place = draws % BLOCK_DRAWS
        if not place or not self._words:
            self._words = self._draws_of.block(draws // BLOCK_DRAWS)
        slot = self._words[place] * len(pool) >> 32
        self.draws = draws + 1
        self.taken += 1
        sample, ref = pool[slot], refs[slot]
        last, last_ref = pool.pop(), refs.pop()
        if slot < len(pool):
            pool[slot], refs[slot] = last, last_ref
        self.bytes -= ref[3]
        return slot, sample, ref


class Permutations:
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
