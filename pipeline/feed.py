"""One pass of a stream: drawn samples in, batches out, with the position that follows them.

    order --reads--> units (shards)
      |  a drawn sample, and what changed to get it
      v
    label --> readahead: decoded ahead, in order, bounded in bytes
      |  the head
      v
    position follows --> packer --> batch + state

Draws run ahead of what is consumed. Everything that a draw changed travels with its sample, faults included, and counts only
once the sample is consumed: so a state never knows of what is under way, and nothing is told twice after a restore.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, cast

from treadle.decoders import DecodeOptions
from treadle.pipeline.bag import DecodedBag, LateBag
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.identity import MASK, SAMPLE_STEP, sample_id, sample_seed, shard_key
from treadle.pipeline.layout import LateInteractionCapacities
from treadle.pipeline.ledger import Ledger
from treadle.pipeline.order import Drawn, Ended, Fault, Held, Order, OrderPlan
from treadle.pipeline.packer import Packer
from treadle.pipeline.prepare import Fetch, Outcome, Place, Preparer, Read, arrived, held_bytes
from treadle.pipeline.quarantine import Budget
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import RawSample, Schema
from treadle.pipeline.shards import ShardError
from treadle.pipeline.state import Columns, Pending, Position, Share, StreamState, columns_of, epochs_of
from treadle.pipeline.storage import public_url
from treadle.pipeline.text_path import TextPath
from treadle.pipeline.units import Units
from treadle.shape import BatchShape

IN_FLIGHT_BYTES: Final = 2**28
"""Content and payloads charged for samples between the draw and the packer."""
INLINE_BYTES: Final = 2**20
"""Texts up to this size are decoded where they are drawn: a future costs more than their copy."""
QUEUED_SAMPLES: Final = 1024
"""Samples between the draw and the packer while some of them are being decoded."""
QUEUED_TEXTS: Final = 64
"""The same while all of them are texts: nothing is won by drawing them earlier."""
GROWTH: Final = 4
"""Samples drawn for each one consumed while the queue grows: the first batch does not wait for a full queue."""

DIRECT_AFTER_SAMPLES: Final = 2048
"""Samples in a row without anything to decode after which nothing is drawn ahead any more."""

STORAGE_KINDS: Final = frozenset({"not_found", "forbidden", "refused", "changed", "not_a_tar", "unreadable"})
"""Faults of the storage, which come and go; the others are damages of what is stored."""

DROUGHT_SAMPLES: Final = 256
"""Samples in a row without a bag after which it is looked at, again and again, whether a whole epoch has given none; powers of two too."""

OnStreamError = Literal["quarantine", "raise"]


class NoSamplesError(ValueError):
    """A stream without an end read a whole epoch of every source, and nothing in it could become part of a batch."""


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


class Context(NamedTuple):
    """What stays here while a sample is decoded."""

    step: Drawn | None
    """What was drawn; None for a bag that waited in the packer of a state."""
    place: Place
    submitted: bool
    """Whether a worker decodes it."""


class Feed:
    """One pass, from the start or from a rank's share of a state."""

    def __init__(self, config: FeedConfig, ledger: Ledger, share: Share | None = None) -> None:
        self._config = config
        self._ledger = ledger
        self._units = Units(config.urls, world_size=config.world_size, retry=config.retry, counts=ledger.shard_counts, cache=config.cache)
        self._order = Order(config.plan, self._units, rank=config.rank, world_size=config.world_size)
        self._position = Position(config.plan, config.rank, config.world_size)
        self._lanes = list(range(config.rank, config.plan.lanes, config.world_size))
        self._packer = Packer(
            config.shape, window=config.window, max_edges=config.max_edges, late_interaction=config.late_interaction,
            seed=config.plan.seed, options=config.options,
        )  # fmt: skip
        self._preparer = Preparer(config.schema, config.shape, config.options, config.retry)
        self._text_path = TextPath(config.schema, config.shape, config.options)
        self.ahead: Readahead[Context, Read | Fetch, Outcome] = Readahead(
            self._preparer,
            threads=config.threads,
            processes=config.processes,
            processes_after_s=config.processes_after_s,
            limit_bytes=IN_FLIGHT_BYTES,
            measure=held_bytes,
            prepared=arrived,
        )
        self._full_from = 0.0
        self._late: deque[LateBag] = deque()
        self._late_step = 0
        self._told: set[tuple[int, int, int, str]] = set()
        self._directly = True
        self._order.record_moves(False)
        self._since_decoding = 0
        self._opened = False
        self._decoding = 0
        self._ended: Ended | None = None
        self._finished = False
        self._endless = config.plan.endless
        self._without_bag = 0
        self._drought_from: list[int | None] = []
        # Only from the start of the data is the first epoch seen whole.
        self._drought_epochs = 1 if share is None else 2
        self._share = share
        if share is not None:
            self._order.restore(share.lane_draws, share.cursors, share.pools)
            sources = len(config.plan.sources)
            held = [(number % sources, ref) for number, refs in enumerate(share.pools) for ref in refs]
            held += [(token.source, (token.shard, token.sample_index, token.offset, token.size)) for token in share.pending]
            self._units.expect(held)

    def close(self) -> None:
        """Joins every thread and process, and lets go of every shard; safe to call again."""
        ahead = self.ahead
        self._units.interrupt()
        ahead.close()
        self.settle()
        self._order.close()
        self._units.close()

    def settle(self) -> None:
        """Enters into the ledger what the workers and the storage have taken so far."""
        ahead, ledger = self.ahead, self._ledger
        ledger.worked_s += ahead.worked_s
        ledger.waited_s += ahead.waited_s
        ledger.worker_s += ahead.there_s()
        ledger.decoded_bytes += ahead.measured_bytes
        ledger.peak_bytes = max(ledger.peak_bytes, ahead.peak_bytes)
        ledger.storage_s += self._units.waited_s
        ahead.worked_s = ahead.waited_s = self._units.waited_s = 0.0
        ahead.measured_bytes = 0

    def next_batch(self) -> PackedBatch | None:
        """The next batch, with its state; None at the end of the data.

        Raises:
            ShardError | SampleError | DecodeError: under `on_error="raise"`, with a note that says where.
            NoSamplesError: nothing of a whole epoch of every source can become part of a batch, and there is no end.
        """
        ledger = self._ledger
        begun, elsewhere_s = ledger.asked(), self._elsewhere_s()
        # Thousands of small objects that make no cycles: the collector would look at each of them several times over.
        collecting = self._directly and gc.isenabled()
        if collecting:
            gc.disable()
        try:
            self._restore()
            while not self._packer.ready():
                if self._finished:
                    if not self._packer.num_pending:
                        return None
                    break
                if self._directly:
                    self._consume_directly()
                else:
                    self._consume()
            batch = self._packer.take()
            self._begin_late()
            batch.state = self.state()
            ledger.batches += 1
            ledger.batch_bytes += batch.used_bytes
            return batch
        finally:
            if collecting:
                gc.enable()
            ledger.answered()
            ledger.pack_s += time.perf_counter() - begun - (self._elsewhere_s() - elsewhere_s)

    def _elsewhere_s(self) -> float:
        """Seconds of this thread that were not spent on packing."""
        return self._ledger.read_s + self._ledger.inline_s + self.ahead.waited_s

    def state(self) -> StreamState:
        """The position just after the last sample consumed."""
        config, share = self._config, self._share
        if share is not None and share.packer is not None:
            columns = share.packer
            return StreamState.of_rank(config.manifest, config.rank, config.world_size, self._standing(), share.pending, lambda: columns)
        self._restore()
        # Every bag of this packer was added with one.
        tokens = cast("Callable[[], list[Pending]]", self._packer.tokens_now())
        return StreamState.of_rank(config.manifest, config.rank, config.world_size, self._standing(), tokens, self._packer.snapshot())

    def _standing(self) -> Callable[[], Columns]:
        """What builds the columns of where the last sample consumed leaves the lanes."""
        return columns_of(self._lanes, self._order.standing()) if self._directly else self._position.snapshot()

    def _place(self, source: int, shard: int, index: int) -> Place:
        url = self._units.url(source, shard)
        return Place(source, shard, url, sample_id(url, index))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._order.open()

    def _consume_directly(self) -> None:
        """Draws texts and packs each one before the next is drawn, until a batch is ready or something else comes.

        Nothing runs ahead, so that the order's own standing is the position, and no moves have to be noted and followed.
        """
        self._open()
        order, packer, ledger, urls, blended = self._order, self._packer, self._ledger, self._config.urls, self._config.plan.blended
        ready, take, bag_of, add, clock = packer.ready, order.take, self._text_path.bag, packer.add_decoded, time.perf_counter
        faults = order.faults
        samples = size = 0
        read_s = 0.0
        packed = False
        try:
            while not ready():
                begun = clock()
                taken = take()
                if taken is None:
                    read_s += clock() - begun
                    self._end(order.take_faults())
                    return
                key, source, sample, (shard, index, offset, nbytes) = taken
                url = urls[source][shard]
                bag = bag_of(sample, shard_key(url) + (index + 1) * SAMPLE_STEP & MASK) if type(sample) is RawSample else None
                read_s += clock() - begun
                epoch = order.epoch_of(key[2], source) if blended else key[0]
                if bag is None:
                    drawn = Drawn(epoch, key, source, shard, sample, order.lane_draws(key[2]), (), order.take_faults())
                    self._run_ahead(drawn, Place(source, shard, url, sample_id(url, index)))
                    return
                samples += 1
                size += nbytes
                if faults:
                    for fault in order.take_faults():
                        self._tell_fault(fault)
                if add(bag, (*key, epoch, source, shard, index, offset, nbytes)):
                    packed = True
                else:
                    if packed:
                        self._without_bag, self._drought_epochs = 0, 2
                        packed = False
                    ledger.unfit_bags += 1
                    ledger.unfit_items += len(bag.lengths)
                    self._count_bagless()
        finally:
            ledger.count(samples, size, read_s)
            if packed:
                self._without_bag, self._drought_epochs = 0, 2

    def _run_ahead(self, drawn: Drawn, place: Place) -> None:
        """From here on samples are drawn ahead, so that they can be decoded meanwhile; `drawn` is the first, and its draw is followed."""
        self._directly, self._since_decoding = False, 0
        self._position.stand(self._order.standing())
        self._order.record_moves(True)
        self._put(drawn, place)

    def _draw_ahead(self) -> None:
        """Draws, labels and submits while there is room."""
        ahead, ledger = self.ahead, self._ledger
        begun = time.perf_counter()
        inline_s = ledger.inline_s
        if self._full_from:
            ledger.full_s += begun - self._full_from
            self._full_from = 0.0
        self._open()
        most = QUEUED_TEXTS
        if self._decoding:
            most = min(QUEUED_SAMPLES, max(QUEUED_TEXTS, 4 * ahead.workers, len(ahead) + GROWTH))
        # After texts alone for a while the queue runs dry, and they are consumed directly.
        while self._ended is None and ahead.room() and len(ahead) < most and self._since_decoding < DIRECT_AFTER_SAMPLES:
            step = self._order.advance()
            if isinstance(step, Ended):
                self._ended = step
                self._order.close()
                break
            self._put(step, self._place(step.source, step.shard, step.sample.index))
        now = time.perf_counter()
        ledger.read_s += now - begun - (ledger.inline_s - inline_s)
        if self._ended is None:
            self._full_from = now

    def _put(self, step: Drawn, place: Place) -> None:
        sample = step.sample
        if not isinstance(sample, RawSample):
            self._fetch(step, place, Held(sample.index, sample.offset, sample.size))
            return
        texts = self._text_path.bag(sample, sample_seed(place.url, sample.index))
        if texts is not None:
            self._since_decoding += 1
            self.ahead.put(Context(step, place, False), Outcome(sample.key, sample.offset, texts), sample.size)
            return
        charge = self._preparer.charge_bytes(sample)
        if sample.size <= INLINE_BYTES and self._preparer.is_light(sample):
            self._since_decoding += 1
            begun = time.perf_counter()
            self.ahead.put(Context(step, place, False), self._preparer(Read(place, sample)), charge)
            self._ledger.inline_s += time.perf_counter() - begun
            return
        self._decoding += 1
        self._since_decoding = 0
        self.ahead.submit(Context(step, place, True), Read(place, sample), charge, sample.size)

    def _fetch(self, step: Drawn | None, place: Place, held: Held) -> None:
        self._decoding += 1
        self._since_decoding = 0
        charge = held.size + self._config.shape.max_columns_per_row * self._config.shape.bytes_per_position
        # Many small reads wait for the network at once.
        self.ahead.submit(Context(step, place, True), Fetch(place, held, self._units.fetch(place.url, held)), charge, held.size)

    def _pop(self) -> tuple[Drawn | None, Place, Outcome]:
        context, outcome = self.ahead.pop()
        if context.submitted:
            self._decoding -= 1
        return context.step, context.place, outcome

    def _consume(self) -> None:
        """Takes the head of what was drawn into the packer; at the end, the end."""
        if self._decoding or len(self.ahead) <= QUEUED_TEXTS // 2:
            self._draw_ahead()
        if not len(self.ahead):
            if self._ended is None:
                self._directly = True
                self._order.record_moves(False)
                return
            self._position.follow(self._ended)
            self._end(self._ended.faults)
            return
        step, place, outcome = self._pop()
        assert step is not None
        sample = step.sample
        self._position.follow(step)
        self._ledger.count(1, sample.size, 0.0)
        for fault in step.faults:
            self._tell_fault(fault)
        self._tell(place, outcome)
        bag = outcome.bag
        if bag is not None and bag.lengths:
            token = Pending(*step.key, step.epoch, step.source, step.shard, sample.index, sample.offset, sample.size)
            if self._packer.add_decoded(bag, token):
                self._without_bag, self._drought_epochs = 0, 2
                return
            self._ledger.unfit_bags += 1
            self._ledger.unfit_items += len(bag.lengths)
        elif bag is not None:
            # Its items are counted as dropped with the next batch.
            self._packer.add_decoded(bag)
        self._count_bagless()

    def _end(self, faults: Sequence[Fault]) -> None:
        """The end of the data."""
        self._finished = True
        for fault in faults:
            self._tell_fault(fault)

    def _count_bagless(self) -> None:
        """One more sample in a row gave no bag."""
        self._without_bag += 1
        if self._endless:
            self._check_drought()

    def _check_drought(self) -> None:
        """Raises once a whole epoch of every source has given no bag: the next one would not either."""
        count = self._without_bag
        if count == 1:
            self._drought_from = self._epochs()
        if count % DROUGHT_SAMPLES and count & (count - 1):
            return
        for begun, epoch in zip(self._drought_from, self._epochs(), strict=True):
            if begun is not None and epoch is not None and epoch < begun + self._drought_epochs:
                return
        raise NoSamplesError(
            f"the last {count} samples, a whole epoch of every source, gave nothing to train on, and epochs=None has no end: "
            f"{self._ledger.losses() or 'they hold no files'}; check schema, shape and decoder options, or pass epochs"
        )

    def _epochs(self) -> list[int | None]:
        """The epoch that each sub-lane stands in, None where it is over."""
        return epochs_of(self._order.standing()[1]) if self._directly else self._position.epochs()

    def _restore(self) -> None:
        """Puts the bags that waited back where they were; they are read and decoded as they are placed."""
        share, self._share = self._share, None
        if share is None:
            return
        if share.packer is None:
            self._restore_dealt(share.pending)
            return
        bags = [LateBag(partial(self._begin, token)) for token in share.pending]
        self._packer.load(share.packer, bags, share.pending)
        self._late.extend(bags)
        self._late_step = -(-len(bags) // self._config.window)
        self._begin_late()

    def _begin_late(self) -> None:
        """Begins with some more of the bags that waited: about as many as the next batch takes."""
        for _ in range(min(self._late_step, len(self._late))):
            self._late.popleft().begin()

    def _begin(self, token: Pending) -> Callable[[], DecodedBag | None]:
        place = self._place(token.source, token.shard, token.sample_index)
        future = self.ahead.apart(Fetch(place, token.held, self._units.fetch(place.url, token.held)))

        def content() -> DecodedBag | None:
            begun = time.perf_counter()
            outcome = self.ahead.waited(future)
            self.ahead.waited_s += time.perf_counter() - begun
            if outcome.failure is not None:
                # Items that did not decode were told when it was first drawn.
                self._tell(place, outcome)
            return outcome.bag

        return content

    def _restore_dealt(self, pending: Sequence[Pending]) -> None:
        """Reads and decodes bags that waited in other packers, and adds them in the order in which they were drawn."""
        waiting = iter(pending)
        bag = next(waiting, None)
        for token in pending:
            while bag is not None and self.ahead.room():
                self._fetch(None, self._place(bag.source, bag.shard, bag.sample_index), bag.held)
                bag = next(waiting, None)
            _, place, outcome = self._pop()
            if outcome.failure is not None:
                self._tell(place, outcome)
            if outcome.bag is not None:
                self._packer.add_decoded(outcome.bag, token)

    def _tell_fault(self, fault: Fault) -> None:
        """Counts a shard that ended early: once an epoch, however many parts it is cut into, or raises it."""
        error = fault.error
        assert isinstance(error, ShardError)
        if self._config.on_error == "quarantine":
            if error.kind in STORAGE_KINDS:
                # It may have come between two parts of the shard: whichever meets it first tells.
                key = (fault.source, fault.epoch, fault.shard, error.kind)
                if key in self._told:
                    return
                self._told.add(key)
            elif fault.part:
                # A damage is met by every part; the first one tells, on whichever rank, before or after a restore.
                return
        self._quarantine(error, self._units.url(fault.source, fault.shard), "", "", error.offset, error.kind, error.detail)

    def _tell(self, place: Place, outcome: Outcome) -> None:
        """Counts what is wrong with a sample, or raises it."""
        if outcome.left_out:
            self._ledger.left_out.update(outcome.left_out)
        for error, member, offset in outcome.problems():
            self._quarantine(error, place.url, outcome.key, member, offset, error.kind, error.detail)

    def _quarantine(self, error: Exception, url: str, key: str, member: str, offset: int, kind: str, reason: str) -> None:
        if self._config.on_error == "raise":
            named = "".join(f", {name} {value!r}" for name, value in (("sample", key), ("member", member)) if value)
            error.add_note(f'in shard {public_url(url)}{named}, at byte {offset}; on_error="quarantine" leaves it out and goes on')
            raise error
        self._ledger.quarantine.record(url=url, key=key, member=member, offset=offset, kind=kind, reason=reason)
        self._ledger.quarantine.check(self._config.budget, self._ledger.samples, url, key, member, kind)
