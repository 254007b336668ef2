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
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from treadle.pipeline.draws import BLEND, BLOCK_DRAWS, DrawSequence
from treadle.pipeline.order_plan import OrderPlan, SourcePlan
from treadle.pipeline.sub_lane import (
    Catalogue,
    Cursor,
    Drawable,
    Fault,
    Held,
    Located,
    Mark,
    Move,
    Permutations,
    Ref,
    SubLane,
    UnitBrokenError,
    mark_of,
    moved,
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
    """Samples drawn in one go, in the rank's order: the next ones of each of some lanes, which take turns.

    lane 0   a0 a1 a2 ...
    lane 1   b0 b1 b2 ...   -->  a0 b0 c0 | a1 b1 c1 | a2 ...
    lane 2   c0 c1 c2 ...
    """

    first: int
    """The first entry of every key: the epoch, 0 in a blend."""
    taken: int
    """The second entry of the first round's; each round adds one."""
    lanes: Sequence[int]
    choices: Sequence[Sequence[int]] | None
    """In a blend, the source of each draw, by lane; None: there is but one."""
    epochs: Sequence[Sequence[int]]
    """In a blend, the epoch of each source, by lane."""
    steady: bool
    """Whether the draws changed nothing but the hold-backs."""
    samples: Sequence[Drawable]
    refs: Sequence[Ref]

    @property
    def turns(self) -> int:
        """Samples of each lane."""
        return len(self.refs) // len(self.lanes)

    def key(self, place: int) -> tuple[int, int, int]:
        """The place of a sample in the order of all ranks; see `Drawn.key`."""
        turn, lane = divmod(place, len(self.lanes))
        return self.first, self.taken + turn, self.lanes[lane]

    def origin(self, place: int) -> tuple[int, int]:
        """The epoch and the source of a sample."""
        if self.choices is None:
            return self.first, 0
        turn, lane = divmod(place, len(self.lanes))
        source = self.choices[lane][turn]
        return self.epochs[lane][source], source

    def sources(self) -> Sequence[int]:
        """The source of each sample."""
        return [0] * len(self.refs) if self.choices is None else list(chain.from_iterable(zip(*self.choices, strict=True)))

    def token(self, place: int) -> tuple[int, ...]:
        """A sample by reference, with its key: (*key, epoch, source, *reference)."""
        return (*self.key(place), *self.origin(place), *self.refs[place])

    def undone(self, left: int) -> list[int]:
        """How many of the last `left` samples are each lane's."""
        count = len(self.lanes)
        return [(left + turn) // count for turn in range(count)]


class _Lane:
    """The sub-lanes of one lane, blended."""

    __slots__ = ("_blend", "_chosen", "_chosen_of", "_repeats", "_weights", "choices", "draws", "lane", "number", "sub_lanes")

    def __init__(self, plan: OrderPlan, lane: int, number: int, sub_lanes: list[SubLane]) -> None:
        self.lane = lane
        self.number = number
        self.sub_lanes = sub_lanes
        self.draws = 0
        self.choices: Sequence[int] = ()
        """The sources of the last `draw_steadily`."""
        self._weights = [source.weight for source in plan.sources]
        self._repeats = [source.repeat for source in plan.sources]
        self._blend = DrawSequence(plan.seed, BLEND, lane)
        self._chosen: list[int] = []
        self._chosen_of: tuple[int, list[bool]] = -1, []

    def choose(self, moves: list[Move]) -> int | None:
        """The source of the lane's next sample, by keyed choice among the living; None at the lane's end."""
        living = [bool(sub_lane.pool) or sub_lane.roll(moves) for sub_lane in self.sub_lanes]
        return None if self._ends(living) else self._choices(living)[self.draws % BLOCK_DRAWS]

    def _ends(self, living: list[bool]) -> bool:
        finite = [alive for alive, repeat in zip(living, self._repeats, strict=True) if not repeat]
        return not any(living) or (bool(finite) and not any(finite))

    def _choices(self, living: list[bool]) -> list[int]:
        """The sources of all draws of the block that the next one is in, as long as those are the living ones."""
        block = self.draws // BLOCK_DRAWS
        if self._chosen_of != (block, living):
            weights = [weight if alive else 0.0 for weight, alive in zip(self._weights, living, strict=True)]
            points = np.array(self._blend.block(block)) / 2**32 * sum(weights)
            chosen = np.full(BLOCK_DRAWS, -1)
            for source, weight in enumerate(weights):
                if weight > 0.0:
                    chosen[(chosen < 0) & (points < weight)] = source
                    points -= weight
            # Rounding may leave a point at the very end: the last living source takes it.
            chosen[chosen < 0] = max(source for source, alive in enumerate(living) if alive)
            self._chosen, self._chosen_of = chosen.tolist(), (block, living)
        return self._chosen

    def able(self, most: int, most_bytes: int) -> int:
        """How many draws, up to `most`, change nothing but the hold-backs; see `SubLane.able`."""
        if len(self.sub_lanes) == 1:
            return max(0, self.sub_lanes[0].able(most, most_bytes))
        living = [not sub_lane.over for sub_lane in self.sub_lanes]
        if self._ends(living):
            return 0
        at = self.draws % BLOCK_DRAWS
        choices = self._choices(living)[at : at + most]
        for source, sub_lane in enumerate(self.sub_lanes):
            if living[source] and (not sub_lane.pool or source in choices):
                able = sub_lane.able(len(choices), most_bytes // len(living))
                if able < 0:
                    return 0
                own = [place for place, chosen in enumerate(choices) if chosen == source]
                if len(own) > able:
                    del choices[own[able] :]
        self.choices = choices
        return len(choices)

    def draw_steadily(self, count: int) -> Sequence[tuple[Drawable, Ref]]:
        """`count` draws, which `able` has answered last."""
        self.draws += count
        if len(self.sub_lanes) == 1:
            return self.sub_lanes[0].draw_steadily(count)
        self.choices = choices = self.choices[:count]
        drawn = [
            iter(sub_lane.draw_steadily(choices.count(source), choices[-1] == source)) for source, sub_lane in enumerate(self.sub_lanes)
        ]
        return [next(drawn[source]) for source in choices]

    def happened(self, turns: int, choices: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """How long each trail was after the first `turns` draws of a `draw_steadily`, whose `choices` and `mark_of` each were these."""
        if len(self.sub_lanes) == 1:
            return [self.sub_lanes[0].happened(marks[0], turns, turns, turns)]
        chosen, before = choices[:turns], choices[: max(0, turns - 1)]
        return [
            sub_lane.happened(mark, chosen.count(source), before.count(source), turns)
            for source, (sub_lane, mark) in enumerate(zip(self.sub_lanes, marks, strict=True))
        ]


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
        self._drawn_to: tuple[list[int], list[Mark]] = [], []
        """After the last steady rounds: how long each trail is, and what its draws began with."""
        self._singly, self._patience = 0, 1
        self._begin_trails()
        self._enqueue()

    def _enqueue(self) -> None:
        if self._blended:
            self._heap = [(0, lane.draws, lane.lane) for lane in self._lanes]
        else:
            self._heap = [(lane.sub_lanes[0].epoch, lane.sub_lanes[0].taken, lane.lane) for lane in self._lanes]
        heapq.heapify(self._heap)
        self._last = None

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

        Taken after every batch, so that it does next to nothing: what is to be left of the last draws is worked out when it is asked for.
        """
        if not left and (self._recording or self._trails_are_long()):
            self._begin_trails()
        last = self._last if left and self._last is not None and self._last.steady else None
        # Nothing has been drawn since.
        lengths, marks = (list(map(len, self._trails)), []) if last is None else self._drawn_to
        cursors, held, trails, sources = self._cursors, self._held, self._trails, len(self._trails) // len(self._lanes)

        def standing() -> Standing:
            happened = lengths.copy()
            if last is not None:
                for at, undone in enumerate(last.undone(left)):
                    lane = self._by_lane[last.lanes[at]]
                    own = slice(lane.number * sources, (lane.number + 1) * sources)
                    if undone:
                        happened[own] = lane.happened(last.turns - undone, () if last.choices is None else last.choices[at], marks[own])
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
        if not self._singly:
            if (found := self._rounds()) is not None:
                self._patience = 1
                return found
            # Lanes that long do something else are not looked at for every sample.
            self._singly = self._patience = min(2 * self._patience, len(self._lanes))
        self._singly -= 1
        taken = self._next([])
        if taken is None:
            return None
        (first, number, lane), source, sample, ref = taken
        epochs = [sub_lane.epoch for sub_lane in self._by_lane[lane].sub_lanes]
        self._last = Rounds(first, number, (lane,), ((source,),) if self._blended else None, (epochs,), False, (sample,), (ref,))
        return self._last

    def _rounds(self) -> Rounds | None:
        """Whole rounds of the lanes that stand first, where each of them takes a sample and gives one; None where the first does not."""
        keys = sorted(self._heap)
        if not keys:
            return None
        first, taken, _ = keys[0]
        lanes = [self._by_lane[lane] for epoch, number, lane in keys if epoch == first and number == taken]
        turns = max(1, ROUND_SAMPLES // len(lanes))
        if len(lanes) < len(keys) and keys[len(lanes)][0] == first:
            turns = min(turns, keys[len(lanes)][1] - taken)
        most_bytes = ROUND_BYTES // len(lanes)
        for place, lane in enumerate(lanes):
            able = lane.able(turns, most_bytes)
            if not able:
                if not place:
                    return None
                # Those before it have their turn; then it does something else.
                lanes, turns = lanes[:place], 1
                break
            turns = able
        if self._trails_are_long():
            self._begin_trails()
        drawn = [lane.draw_steadily(turns) for lane in lanes]
        self._heap = sorted([(first, taken + turns, lane.lane) for lane in lanes] + keys[len(lanes) :])
        samples, refs = zip(*chain.from_iterable(zip(*drawn, strict=True)), strict=True)
        choices: list[Sequence[int]] | None = None
        epochs: list[list[int]] = []
        if self._blended:
            choices, epochs = [lane.choices for lane in lanes], [[sub_lane.epoch for sub_lane in lane.sub_lanes] for lane in lanes]
        self._last = Rounds(first, taken, [lane.lane for lane in lanes], choices, epochs, True, samples, refs)
        self._drawn_to = list(map(len, self._trails)), list(map(mark_of, self._sub_lanes))
        return self._last

    def rest(self, samples: Sequence[Located]) -> list[Drawn]:
        """The last of the samples of the last `rounds`, each with what changed to get it; one drawn alone has changed it already."""
        rounds = self._last
        assert rounds is not None
        moves: list[list[list[Move]]] = [[] for _ in rounds.lanes]
        draws = [self._by_lane[lane].draws for lane in rounds.lanes]
        if rounds.steady:
            undone = rounds.undone(len(samples))
            moves = [self._moves(self._by_lane[lane], rounds.turns, count) for lane, count in zip(rounds.lanes, undone, strict=True)]
            draws = [count - left for count, left in zip(draws, undone, strict=True)]
        found: list[Drawn] = []
        for place, sample in enumerate(samples, len(rounds.refs) - len(samples)):
            at = place % len(rounds.lanes)
            draws[at] += rounds.steady
            epoch, source = rounds.origin(place)
            moved_here = moves[at].pop(0) if rounds.steady else []
            found.append(Drawn(epoch, rounds.key(place), source, rounds.refs[place][0], sample, draws[at], moved_here, ()))
        return found

    def _moves(self, lane: _Lane, turns: int, undone: int) -> list[list[Move]]:
        """What each of the last `undone` of a lane's `turns` steady draws changed."""
        own = list(map(mark_of, lane.sub_lanes))
        marks = [lane.happened(turn, lane.choices, own) for turn in range(turns - undone, turns + 1)]
        found: list[list[Move]] = [[] for _ in range(undone)]
        for source, sub_lane in enumerate(lane.sub_lanes):
            number = sub_lane.number
            trail = self._trails[number]
            cursor, _ = position_after(self._cursors[number], self._held[number], trail, marks[0][source])
            for turn, (before, after) in enumerate(pairwise(marks)):
                if after[source] > before[source]:
                    found[turn].append(moved(number, trail[before[source] : after[source]], cursor))
                    cursor = found[turn][-1][3]
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
