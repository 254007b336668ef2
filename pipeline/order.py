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
from collections.abc import Sequence
from typing import NamedTuple

from treadle.pipeline.draws import BLEND, DrawSequence
from treadle.pipeline.order_plan import OrderPlan, SourcePlan
from treadle.pipeline.sub_lane import Catalogue, Cursor, Fault, Held, Located, Move, Permutations, Ref, SubLane, UnitBrokenError, cursor_of

__all__ = [
    "Catalogue", "Cursor", "Drawn", "Ended", "Fault", "Held", "Located", "Move", "Order", "OrderPlan", "Ref", "SourcePlan", "Standing", "Taken",
    "UnitBrokenError",
]  # fmt: skip


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
"""A sample whose draw is followed at once: (key, source, sample, reference); see `Drawn` for the key."""

Standing = tuple[list[int], list[Cursor], list[list[Ref]]]
"""Where the lanes stand: draws per lane; cursor and hold-back per sub-lane, lane by lane, source by source."""


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
        self._enqueue()

    def _enqueue(self) -> None:
        if self._blended:
            self._heap = [(0, lane.draws, lane.lane) for lane in self._lanes]
        else:
            self._heap = [(lane.sub_lanes[0].epoch, lane.sub_lanes[0].taken, lane.lane) for lane in self._lanes]
        heapq.heapify(self._heap)

    def restore(self, lane_draws: Sequence[int], cursors: Sequence[Cursor], pools: Sequence[Sequence[Ref]]) -> None:
        """Goes on from where other samples were left: per own lane its draws, per own sub-lane its cursor and hold-back."""
        for lane, draws in zip(self._lanes, lane_draws, strict=True):
            lane.draws = draws
        for sub_lane, cursor, refs in zip(self._sub_lanes, cursors, pools, strict=True):
            sub_lane.restore(cursor, refs)
        self.faults.clear()
        self._enqueue()

    def standing(self) -> Standing:
        """Where the lanes stand after the last draw."""
        return (
            [lane.draws for lane in self._lanes],
            list(map(cursor_of, self._sub_lanes)),
            [sub_lane.refs.copy() for sub_lane in self._sub_lanes],
        )

    def record_moves(self, record: bool) -> None:
        """Whether draws say what they changed: `take` needs that no more than `advance` can do without it."""
        for sub_lane in self._sub_lanes:
            sub_lane.appended = [] if record else None

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
        """What `take` met."""
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

    def take(self) -> Taken | None:
        """The rank's next sample without what that changed, for whoever consumes each one before the next is drawn."""
        return self._next([])

    def lane_draws(self, lane: int) -> int:
        """Samples that a lane has emitted."""
        return self._by_lane[lane].draws

    def epoch_of(self, lane: int, source: int) -> int:
        """The epoch that a sub-lane stands in."""
        return self._by_lane[lane].sub_lanes[source].epoch

    def _next(self, moves: list[Move]) -> Taken | None:
        if self._blended:
            return self._next_blended(moves)
        heap, by_lane = self._heap, self._by_lane
        while heap:
            key = heap[0]
            lane = by_lane[key[2]]
            sub_lane = lane.sub_lanes[0]
            held = len(sub_lane.pool)
            if (
                held < sub_lane.depth
                and (sub_lane.bytes < sub_lane.depth_bytes or not held)
                and not (sub_lane.fill_one() if held == sub_lane.depth - 1 else sub_lane.fill())
            ):
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
