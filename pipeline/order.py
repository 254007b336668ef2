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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from treadle.pipeline.draws import BLEND, DrawSequence
from treadle.pipeline.order_plan import OrderPlan, SourcePlan
from treadle.pipeline.sub_lane import (
    Catalogue,
    Cursor,
    Drawable,
    Fault,
    Held,
    Located,
    Move,
    Permutations,
    Ref,
    SubLane,
    UnitBrokenError,
    position_after,
    whole,
)

__all__ = [
    "Catalogue", "Cursor", "Drawn", "Ended", "Fault", "Held", "Located", "Move", "Order", "OrderPlan", "Ref", "Rounds", "SourcePlan", "Standing",
    "UnitBrokenError", "whole",
]  # fmt: skip


TRAIL_ENTRIES = 4096
"""What the trails of all lanes may hold, and four times the hold-back, before they are begun anew."""


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


Taken = tuple[tuple[int, int, int], int, Located, Ref]
"""A sample drawn: (key, source, sample, reference); see `Drawn` for the key."""

ROUND_SAMPLES = 2048
ROUND_BYTES = 2**22
"""Samples that are drawn in one go at most, and the tar bytes that the hold-back takes in for it."""


Standing = tuple[list[int], list[Cursor], list[list[Ref]]]
"""Where the lanes stand: draws per lane; cursor and hold-back per sub-lane, lane by lane, source by source."""


@dataclass(slots=True)
class Rounds:
    """Samples drawn in one go, of one source and epoch, in the rank's order: the next ones of each of some lanes, which take turns.

    lane 0   a0 a1 a2 ...
    lane 1   b0 b1 b2 ...   -->  a0 b0 c0 | a1 b1 c1 | a2 ...
    lane 2   c0 c1 c2 ...
    """

    first: int
    """The first entry of every key: the epoch, 0 in a blend."""
    taken: int
    """The second entry of the first round's; each round adds one."""
    lanes: Sequence[int]
    epoch: int
    source: int
    samples: Sequence[Drawable]
    refs: Sequence[Ref]

    def key(self, place: int) -> tuple[int, int, int]:
        """The place of a sample in the order of all ranks; see `Drawn.key`."""
        turn, lane = divmod(place, len(self.lanes))
        return self.first, self.taken + turn, self.lanes[lane]

    def token(self, place: int) -> tuple[int, ...]:
        """A sample by reference, with its key: (*key, epoch, source, *reference)."""
        return (*self.key(place), self.epoch, self.source, *self.refs[place])

    def undone(self, left: int) -> list[int]:
        """How many of the last `left` samples are each lane's."""
        count = len(self.lanes)
        return [(left + turn) // count for turn in range(count)]


class _Lane:
    """The sub-lanes of one lane, blended."""

    __slots__ = ("_blend_at", "_repeats", "_weights", "draws", "lane", "number", "sub_lanes")

    def __init__(self, plan: OrderPlan, lane: int, number: int, sub_lanes: list[SubLane]) -> None:
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
        self.faults: list[Fault] = []
        """Units that ended early and have not been told of."""
        permutations = Permutations(plan)
        self._lanes: list[_Lane] = []
        sources = range(len(plan.sources))
        for number, lane in enumerate(range(rank, plan.lanes, world_size)):
            sub_lanes = [
                SubLane(plan, source, lane, number * len(sources) + source, catalogue, permutations, self.faults) for source in sources
            ]
            self._lanes.append(_Lane(plan, lane, number, sub_lanes))
        self._heap: list[tuple[int, int, int]] = []
        self._by_lane = {lane.lane: lane for lane in self._lanes}
        self._sub_lanes = [sub_lane for lane in self._lanes for sub_lane in lane.sub_lanes]
        self._recording = True
        self._last: Rounds | None = None
        self._singly = 0
        self._begin_trails()
        self._enqueue()

    def _enqueue(self) -> None:
        if self._blended:
            self._heap = [(0, lane.draws, lane.lane) for lane in self._lanes]
        else:
            self._heap = [(lane.sub_lanes[0].epoch, lane.sub_lanes[0].taken, lane.lane) for lane in self._lanes]
        heapq.heapify(self._heap)
        self._last, self._singly = None, len(self._lanes)

    def restore(self, lane_draws: Sequence[int], cursors: Sequence[Cursor], pools: Sequence[Sequence[Ref]]) -> None:
        """Goes on from where other samples were left: per own lane its draws, per own sub-lane its cursor and hold-back."""
        for lane, draws in zip(self._lanes, lane_draws, strict=True):
            lane.draws = draws
        for sub_lane, cursor, refs in zip(self._sub_lanes, cursors, pools, strict=True):
            sub_lane.restore(cursor, refs)
        self.faults.clear()
        self._begin_trails()
        self._enqueue()

    def standing(self, left: int = 0) -> Callable[[], Standing]:
        """What answers where the lanes stand after the last draw but `left` of the last `rounds`, whenever it is asked for.

        Taken after every batch: it is a list of how far each trail has come, whatever is held back.
        """
        if not left and (self._recording or self._trails_are_long()):
            self._begin_trails()
        happened = list(map(len, self._trails))
        if left and self._last is not None and len(self._last.refs) > 1:
            for lane, undone in zip(self._last.lanes, self._last.undone(left), strict=True):
                happened[self._by_lane[lane].number] -= 2 * undone
        cursors, held, trails, sources = self._cursors, self._held, self._trails, len(self._trails) // len(self._lanes)

        def standing() -> Standing:
            positions = list(map(position_after, cursors, held, trails, happened))
            # A lane's draws are those of its sub-lanes.
            draws = [cursor[3] for cursor, _ in positions]
            lane_draws = [sum(draws[first : first + sources]) for first in range(0, len(draws), sources)]
            return lane_draws, [cursor for cursor, _ in positions], [refs for _, refs in positions]

        return standing

    def _trails_are_long(self) -> bool:
        return sum(map(len, self._trails)) > self._trail_entries

    def _begin_trails(self) -> None:
        """Begins all trails anew where the lanes stand now."""
        begun = [sub_lane.begin_trail() for sub_lane in self._sub_lanes]
        self._cursors, self._held, self._trails = (
            [cursor for cursor, _, _ in begun],
            [refs for _, refs, _ in begun],
            [trail for _, _, trail in begun],
        )
        self._trail_entries = TRAIL_ENTRIES + 4 * sum(map(len, self._held))

    def epochs(self) -> list[int | None]:
        """The epoch that each sub-lane stands in, None where it is over."""
        return [None if sub_lane.over else sub_lane.epoch for sub_lane in self._sub_lanes]

    def record_moves(self, record: bool) -> None:
        """Whether draws say what they changed: `rounds` needs that no more than `advance` can do without it."""
        for sub_lane in self._sub_lanes:
            sub_lane.appended = [] if record else None
        self._recording = record
        self._begin_trails()

    def open(self) -> None:
        """Opens the unit that each lane stands in, so that a catalogue that reads ahead begins with all of them at once."""
        # Parts of one shard can then share what the first of them begins to read.
        for sub_lane in sorted(self._sub_lanes, key=lambda each: each.next_offset):
            sub_lane.open()

    def close(self) -> None:
        """Lets go of the units being read."""
        for sub_lane in self._sub_lanes:
            sub_lane.close()

    def take_faults(self) -> Sequence[Fault]:
        """What `rounds` met."""
        if not self.faults:
            return ()
        faults = tuple(self.faults)
        self.faults.clear()
        return faults

    def advance(self) -> Drawn | Ended:
        """The rank's next sample, with what that changed; once ended, ended for good."""
        moves: list[Move] = []
        taken = self._next(moves)
        if taken is None:
            return Ended(moves, self.take_faults())
        key, source, sample, ref = taken
        lane = self._by_lane[key[2]]
        epoch = lane.sub_lanes[source].epoch if self._blended else key[0]
        return Drawn(epoch, key, source, ref[0], sample, lane.draws, moves, self.take_faults())

    def rounds(self) -> Rounds | None:
        """The rank's next samples, for whoever consumes all of them before more is drawn: many where the lanes just take turns, else one."""
        if not self._singly and not self._blended and (found := self._rounds()) is not None:
            return found
        # One lane does something else: a round later all of them may be alike again.
        self._singly = (self._singly or len(self._lanes)) - 1
        taken = self._next([])
        if taken is None:
            return None
        (first, number, lane), source, sample, ref = taken
        epoch = self._by_lane[lane].sub_lanes[source].epoch if self._blended else first
        self._last = Rounds(first, number, (lane,), epoch, source, (sample,), (ref,))
        return self._last

    def _rounds(self) -> Rounds | None:
        """Whole rounds of the lanes that stand first, where each of them takes a sample and gives one; None where one does not."""
        keys = sorted(self._heap)
        if not keys:
            return None
        epoch, taken, _ = keys[0]
        lanes = [lane for first, number, lane in keys if first == epoch and number == taken]
        later = keys[len(lanes) :]
        turns = max(1, ROUND_SAMPLES // len(lanes))
        if later and later[0][0] == epoch:
            turns = min(turns, later[0][1] - taken)
        sub_lanes = [self._by_lane[lane].sub_lanes[0] for lane in lanes]
        for sub_lane in sub_lanes:
            turns = sub_lane.steady(turns, ROUND_BYTES // len(lanes))
            if not turns:
                return None
        if self._trails_are_long():
            self._begin_trails()
        drawn: list[list[tuple[Drawable, Ref]]] = []
        for lane, sub_lane in zip(lanes, sub_lanes, strict=True):
            drawn.append(sub_lane.draw_steadily(turns))
            self._by_lane[lane].draws += turns
        self._heap = sorted([(epoch, taken + turns, lane) for lane in lanes] + later)
        samples, refs = zip(*chain.from_iterable(zip(*drawn, strict=True)), strict=True)
        self._last = Rounds(epoch, taken, lanes, epoch, 0, samples, refs)
        return self._last

    def rest(self, samples: Sequence[Located]) -> list[Drawn]:
        """The last of the samples of the last `rounds`, each with what changed to get it; one drawn alone has changed it already."""
        rounds = self._last
        assert rounds is not None
        moves: list[list[Move]] = [[] for _ in rounds.lanes]
        draws = [self._by_lane[lane].draws for lane in rounds.lanes]
        if len(rounds.refs) > 1:
            undone = rounds.undone(len(samples))
            moves = [self._by_lane[lane].sub_lanes[0].moves(count) for lane, count in zip(rounds.lanes, undone, strict=True)]
            draws = [count - left for count, left in zip(draws, undone, strict=True)]
        found: list[Drawn] = []
        for place, sample in enumerate(samples, len(rounds.refs) - len(samples)):
            turn = place % len(rounds.lanes)
            moved = [moves[turn].pop(0)] if moves[turn] else []
            draws[turn] += len(moved)
            found.append(Drawn(rounds.epoch, rounds.key(place), rounds.source, rounds.refs[place][0], sample, draws[turn], moved, ()))
        return found

    def _next(self, moves: list[Move]) -> Taken | None:
        if self._blended:
            return self._next_blended(moves)
        heap, by_lane = self._heap, self._by_lane
        while heap:
            key = heap[0]
            lane = by_lane[key[2]]
            sub_lane = lane.sub_lanes[0]
            held = len(sub_lane.pool)
            if held < sub_lane.depth and (sub_lane.bytes < sub_lane.depth_bytes or not held) and not sub_lane.fill():
                if not sub_lane.roll(moves):
                    heapq.heappop(heap)
                else:
                    # The lane has gone on to its next epoch: another may stand before it now.
                    heapq.heapreplace(heap, (sub_lane.epoch, sub_lane.taken, key[2]))
                continue
            slot, sample, ref = sub_lane.draw()
            if sub_lane.appended is not None:
                sub_lane.record(moves, slot)
            lane.draws += 1
            heapq.heapreplace(heap, (key[0], sub_lane.taken, key[2]))
            return key, 0, sample, ref
        return None

    def _next_blended(self, moves: list[Move]) -> Taken | None:
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
            slot, sample, ref = sub_lane.draw()
            sub_lane.record(moves, slot)
            lane.draws += 1
            heapq.heapreplace(heap, (0, lane.draws, key[2]))
            return key, source, sample, ref
        return None
