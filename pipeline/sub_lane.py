"""One source within one lane: the units that it reads in turn, its hold-back, its draws.

units g = lane, lane + L, ... --read--> [ o o o o o ] --keyed draw--> sample; the last one takes its place
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter
from typing import NamedTuple, Protocol

from treadle.pipeline.draws import BLOCK_DRAWS, HOLD, DrawSequence, permutation
from treadle.pipeline.order_plan import OrderPlan
from treadle.pipeline.raw_sample import Single, Singles, alone, joined, sizes_of

DRY_EPOCHS = 3
"""A sub-lane without an end is over once so many whole epochs in a row gave it nothing."""

NEVER = 1 << 60
"""More draws than there are."""


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

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[Located]]:
        """The samples of part `part` of `parts` from sample `index` on, which begins at byte `offset`: in lists of what is at hand together.

        Raises:
            UnitBrokenError: while iterating, after the last sample before a damage.
        """
        ...


Ref = tuple[int, int, int, int]
"""A held-back sample by reference: (shard, index, offset, size)."""


Drawable = Located | Single
"""A sample, or one whose place only its reference knows."""


def whole(sample: Drawable, ref: Ref) -> Located:
    """A sample with its place."""
    return alone(sample, *ref[1:]) if isinstance(sample, tuple) else sample


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


Mark = tuple[int, int]
"""Of the last `draw_steadily`: how long the trail was before it, and how many of its draws take nothing in."""

mark_of: Callable[["SubLane"], Mark] = attrgetter("begun", "spare")
"""What the next `draw_steadily` changes; `SubLane.happened` needs it of the last."""


Trail = list[Ref | Cursor | int]
"""What has happened to a sub-lane, in order: a reference came to the hold-back, a slot was drawn, or it stood at a cursor after anything else."""


def position_after(cursor: Cursor, held: Sequence[Ref], trail: Trail, happened: int) -> tuple[Cursor, list[Ref]]:
    """The cursor and the hold-back after the first `happened` entries of a trail."""
    unit, next_index, next_offset, draws, taken, epoch, over = cursor
    refs = list(held)
    for entry in islice(trail, happened):
        if isinstance(entry, int):
            last = refs.pop()
            if entry < len(refs):
                refs[entry] = last
            draws += 1
            taken += 1
        elif len(entry) == 4:
            refs.append(entry)
            next_index, next_offset = entry[1] + 1, entry[2] + entry[3]
        else:
            unit, next_index, next_offset, draws, taken, epoch, over = entry
    return (unit, next_index, next_offset, draws, taken, epoch, over), refs


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
        "_alone", "_at", "_block", "_broken", "_catalogue", "_draws_of", "_eager", "_faults", "_permutations", "_ready", "_runs",
        "_shard", "_source", "_words",
        "appended", "begun", "bytes", "depth", "depth_bytes", "draws", "end_unit", "epoch", "lanes", "next_index", "next_offset", "number", "over", "parts", "pool",
        "spare", "taken", "trail", "unit", "units",
    )  # fmt: skip

    def __init__(
        self, plan: OrderPlan, source: int, lane: int, number: int, catalogue: Catalogue, permutations: "Permutations", faults: list[Fault]
    ) -> None:
        self._source = source
        self._catalogue = catalogue
        self._permutations = permutations
        self._faults = faults
        self._draws_of = DrawSequence(plan.seed, HOLD, lane, source)
        self._block = -1
        self._words: list[int] = []
        self.depth = plan.depth(source)
        self.depth_bytes = plan.depth_bytes(source)
        self._alone = not plan.blended
        # A lane that chooses looks whether each source has a sample: with room for one alone, it is taken in before it is chosen.
        self._eager = plan.blended and self.depth == 1
        # Of the draws since `begun`, how many take nothing in.
        self.spare = self.begun = 0
        self._runs: Iterator[Sequence[Located]] | None = None
        # What is at hand of the unit, up to `_at` held back already, and the fault that comes after it.
        self._ready: Sequence[Located] = ()
        self._at = 0
        self._broken: UnitBrokenError | None = None
        self._shard = 0
        self.number = number
        self.lanes = plan.lanes
        self.parts = plan.parts(source)
        self.units = plan.sources[source].shards * self.parts
        endless = plan.epochs is None or plan.sources[source].repeat
        self.end_unit = None if plan.epochs is None or endless else plan.epochs * self.units
        # The hold-back: the samples, and the references that a state keeps.
        self.pool: list[tuple[Drawable, Ref]] = []
        self.bytes = 0
        self.appended: list[Ref] | None = []
        self.unit = lane
        self.next_index = self.next_offset = self.draws = self.taken = 0
        # Every lane has a unit in every epoch, because units >= lanes: the first lies in epoch 0.
        self.epoch = 0
        self.over = False
        self.trail: Trail = []
        """What has happened since `begin_trail`, as long as draws do not say what they changed."""

    def restore(self, cursor: Cursor, refs: Sequence[Ref]) -> None:
        self.close()
        self.unit, self.next_index, self.next_offset, self.draws, self.taken, self.epoch, self.over = cursor
        self.pool = [(Held(ref[1], ref[2], ref[3]), ref) for ref in refs]
        self.bytes = sum([ref[3] for ref in refs])

    def begin_trail(self) -> tuple[Cursor, list[Ref], Trail]:
        """Where it stands, and the trail that begins there."""
        self.trail = []
        return cursor_of(self), [ref for _, ref in self.pool], self.trail

    def close(self) -> None:
        runs, self._runs = self._runs, None
        self._ready, self._at, self._broken = (), 0, None
        close = getattr(runs, "close", None)
        if close is not None:
            close()

    def open(self) -> bool:
        """Opens the unit to be read; False at the end of the epoch or of the source."""
        unit = self.unit
        if self._runs is None and not ((self.end_unit is not None and unit >= self.end_unit) or unit // self.units != self.epoch):
            place, part = divmod(unit % self.units, self.parts)
            self._shard = self._permutations.at(self._source, self.epoch, place)
            self._runs = self._catalogue.read(
                self._source, self._shard, part=part, parts=self.parts, index=self.next_index, offset=self.next_offset
            )
        return self._runs is not None

    def _at_hand(self, enough: int = 1, enough_bytes: int = 0) -> int:
        """Samples of the open unit at hand: at least one, and `enough` of them or of their bytes, unless it ends or breaks before."""
        while (left := len(self._ready) - self._at) < enough:
            if self._runs is None or self._broken is not None or (left and sum(sizes_of(self._ready[self._at :])) >= enough_bytes):
                break
            try:
                found = next(self._runs, None)
            except UnitBrokenError as broken:
                self._broken = broken
                break
            if found is None:
                break
            self._ready, self._at = joined(self._ready[self._at :], found) if left else found, 0
        return left

    def fill(self) -> bool:
        """Holds back what there is room for; whether anything is held."""
        pool = self.pool
        came = (self.trail if self.appended is None else self.appended).append
        depth, depth_bytes, size = self.depth, self.depth_bytes, self.bytes
        while len(pool) < depth and (size < depth_bytes or not pool):
            if self._runs is None and not self.open():
                # The end of the epoch.
                break
            if not self._at_hand():
                self._leave()
                continue
            sample = self._ready[self._at]
            self._at += 1
            ref = (self._shard, sample.index, sample.offset, sample.size)
            pool.append((sample, ref))
            came(ref)
            size += ref[3]
            self.next_index, self.next_offset = ref[1] + 1, ref[2] + ref[3]
        self.bytes = size
        return bool(pool)

    def _leave(self) -> None:
        """Goes on to the next unit, from the end of this one or from where it is broken."""
        if self._broken is not None:
            part = self.unit % self.units % self.parts
            self._faults.append(Fault(self._source, self.epoch, self._shard, part, self._broken.fault))
        self.close()
        self.unit += self.lanes
        self.next_index = self.next_offset = 0
        if self.appended is None:
            self.trail.append(cursor_of(self))

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
            if self.appended is None:
                self.trail.append(cursor_of(self))
            if not self.over and self.fill():
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
        pool = self.pool
        slot = self._drawn(self.draws) * len(pool) >> 32
        self.draws += 1
        self.taken += 1
        sample, ref = pool[slot]
        last = pool.pop()
        if slot < len(pool):
            pool[slot] = last
        if self.appended is None:
            self.trail.append(slot)
        self.bytes -= ref[3]
        return slot, whole(sample, ref), ref

    def _drawn(self, draw: int) -> int:
        """The word of a draw."""
        block, place = divmod(draw, BLOCK_DRAWS)
        if block != self._block:
            self._words, self._block = self._draws_of.block(block), block
        return self._words[place]

    def able(self, most: int, most_bytes: int) -> int:
        """How many draws, up to `most`, change nothing but the hold-back: each takes in what `fill` would, of the open unit, or, at an
        epoch's end, nothing. Below zero where even a lane that draws from another source changes more.

        The samples taken in are one, or no more than `most_bytes` together.
        """
        held = len(self.pool)
        if not held and not (self._eager or self._alone):
            return -1
        most = min(most, BLOCK_DRAWS - self.draws % BLOCK_DRAWS)
        if self._runs is None:
            # A lane that stands at a choice goes on to the next epoch where one of its sources has nothing left.
            drains = (self.end_unit is not None and self.unit >= self.end_unit) or self.unit // self.units != self.epoch
            self.spare = NEVER
            return min(most, held if self._alone else held - 1) if drains and held else -1
        self.spare = held - self.depth + 1
        if self.spare not in (0, 1):
            return 0
        missing = 1 - held if self._eager else 0
        at_hand = self._at_hand(most + missing, most_bytes)
        if at_hand <= missing:
            return -1 if at_hand < missing else 0
        most = min(most, at_hand - missing)
        ready, at = self._ready, self._at
        sizes = sizes_of(ready[at : at + most])
        size = sum(sizes)
        if size > most_bytes:
            most = max(1, bisect_right(list(accumulate(sizes)), most_bytes))
        return most if self.depth == 1 or self.bytes + size < self.depth_bytes else 0

    def draw_steadily(self, count: int, last: bool = True) -> list[tuple[Drawable, Ref]]:
        """`count` draws, which `able` has answered, with all that each takes in before: the samples drawn, with their references.

        Args:
            last: whether the lane's last draw is one of them: until then, what has but one sample takes in the next at once.
        """
        pool, trail = self.pool, self.trail
        self.begun = len(trail)
        if self._eager:
            self.spare = len(pool)
            number = 1 - len(pool) + count - last
        else:
            if not count:
                # What `able` found, if it was asked, was no more than that.
                self.spare = NEVER
            number = max(0, count - self.spare)
        if not count and not number:
            return []
        coming = self._ready[self._at : self._at + number]
        samples: Sequence[Drawable] = coming
        if isinstance(coming, Singles):
            refs = list(zip(repeat(self._shard), coming.indices, coming.offsets, coming.sizes, strict=False))
            samples = coming.bare()
        else:
            refs = [(self._shard, sample.index, sample.offset, sample.size) for sample in coming]
        drawn: list[tuple[Drawable, Ref]] = []
        if self._eager:
            pool += zip(samples, refs, strict=True)
            drawn, self.pool = pool[:count], pool[count:]
            trail += refs[: 1 - self.spare]
            for ref in refs[1 - self.spare :]:
                trail += (0, ref)
            if last:
                trail.append(0)
        else:
            self._drawn(self.draws)
            first = self.draws % BLOCK_DRAWS
            words = self._words[first : first + count]
            for word in words[: count - number]:
                slot = word * len(pool) >> 32
                drawn.append(pool[slot])
                end = pool.pop()
                if slot < len(pool):
                    pool[slot] = end
                trail.append(slot)
            depth, slot_of_end = self.depth, self.depth - 1
            slots = [word * depth >> 32 for word in words[count - number :]]
            for entry, slot in zip(zip(samples, refs, strict=True), slots, strict=True):
                if slot < slot_of_end:
                    drawn.append(pool[slot])
                    pool[slot] = entry
                else:
                    drawn.append(entry)
            trail += chain.from_iterable(zip(refs, slots, strict=True))
        self.draws += count
        self.taken += count
        if refs:
            self._at += number
            self.next_index, self.next_offset = refs[-1][1] + 1, refs[-1][2] + refs[-1][3]
        self.bytes += sum([ref[3] for ref in refs]) - sum([ref[3] for _, ref in drawn])
        return drawn

    def happened(self, mark: Mark, chosen: int, before: int, turns: int) -> int:
        """How long the trail was after the first `turns` draws of its lane since `draw_steadily` began.

        Args:
            mark: what `mark_of` answered after it.
            chosen: how many of the draws were its own.
            before: how many of them but the last.
        """
        begun, spare = mark
        if not self._eager:
            return begun + chosen + max(0, chosen - spare)
        return begun + chosen + (1 - spare + before if turns else 0)


def moved(number: int, entries: Sequence[Ref | Cursor | int], cursor: Cursor) -> Move:
    """What entries of a trail, of one draw at most, changed from a cursor on."""
    unit, next_index, next_offset, draws, taken, epoch, over = cursor
    appended: list[Ref] = []
    slot = -1
    for entry in entries:
        if isinstance(entry, int):
            slot, draws, taken = entry, draws + 1, taken + 1
        else:
            assert len(entry) == 4
            appended.append(entry)
            next_index, next_offset = entry[1] + 1, entry[2] + entry[3]
    return number, appended, slot, (unit, next_index, next_offset, draws, taken, epoch, over)


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
