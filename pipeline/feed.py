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

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, cast

from treadle.decoders import DecodeOptions
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.layout import LateInteractionCapacities
from treadle.pipeline.order import Drawn, Ended, Fault, Held, Order, OrderPlan
from treadle.pipeline.packer import Packer
from treadle.pipeline.prepare import Fetch, Outcome, Place, Preparer, Read, held_bytes
from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.samples import RawSample, Schema, sample_id
from treadle.pipeline.shard_counts import ShardCounts
from treadle.pipeline.shards import ShardError
from treadle.pipeline.state import Pending, Position, Share, StreamState
from treadle.pipeline.storage import RetryPolicy
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
    on_error: OnStreamError
    retry: RetryPolicy


@dataclass(slots=True)
class Ledger:
    """What a stream counts over all its passes."""

    quarantine: Quarantine
    left_out: Counter[str]
    """Files that the schema or the shape left out, by reason."""
    shard_counts: ShardCounts = field(default_factory=ShardCounts)
    """What was skipped or odd in the shards themselves."""
    unfit_bags: int = 0
    """Samples whose items could never fit one batch together."""
    unfit_items: int = 0
    samples: int = 0
    read_bytes: int = 0
    batches: int = 0
    read_s: float = 0.0
    inline_s: float = 0.0
    pack_s: float = 0.0
    worked_s: float = 0.0
    waited_s: float = 0.0
    peak_bytes: int = 0

    def losses(self) -> str:
        """What did not become part of a batch, in one line; empty where all of it did."""
        found = [self.quarantine.summary()] if self.quarantine.total else []
        if self.unfit_bags:
            found.append(f"{self.unfit_bags} samples ({self.unfit_items} items) can fit no batch of this shape")
        for name, counts in (("left out", self.left_out), ("in the shards", self.shard_counts.total())):
            if counts:
                found.append(f"{name}: " + ", ".join(f"{count} {reason}" for reason, count in counts.most_common()))
        return "; ".join(found)


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
        self._units = Units(config.urls, world_size=config.world_size, retry=config.retry, counts=ledger.shard_counts)
        self._order = Order(config.plan, self._units, rank=config.rank, world_size=config.world_size)
        self._position = Position(config.plan, config.rank, config.world_size)
        self._packer = Packer(
            config.shape, window=config.window, max_edges=config.max_edges, late_interaction=config.late_interaction,
            seed=config.plan.seed, options=config.options,
        )  # fmt: skip
        self._preparer = Preparer(config.schema, config.shape, config.options, config.retry)
        self._text_path = TextPath(config.schema, config.shape, config.options)
        self.ahead: Readahead[Context, Read | Fetch, Outcome] = Readahead(
            self._preparer, threads=config.threads, processes=config.processes, limit_bytes=IN_FLIGHT_BYTES, measure=held_bytes
        )
        self._told: set[tuple[int, int, int, str]] = set()
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
            self._position.restore(share)

    def close(self) -> None:
        """Joins every thread and process, and lets go of every shard; safe to call again."""
        ahead, ledger = self.ahead, self._ledger
        self._units.interrupt()
        ahead.close()
        ledger.worked_s += ahead.worked_s
        ledger.waited_s += ahead.waited_s
        ledger.peak_bytes = max(ledger.peak_bytes, ahead.peak_bytes)
        ahead.worked_s = ahead.waited_s = 0.0
        self._order.close()
        self._units.close()

    def next_batch(self) -> PackedBatch | None:
        """The next batch, with its state; None at the end of the data.

        Raises:
            ShardError | SampleError | DecodeError: under `on_error="raise"`, with a note that says where.
            NoSamplesError: nothing of a whole epoch of every source can become part of a batch, and there is no end.
        """
        ledger = self._ledger
        begun, elsewhere_s = time.perf_counter(), self._elsewhere_s()
        try:
            self._restore()
            while not self._packer.ready():
                if self._finished:
                    if not self._packer.num_pending:
                        return None
                    break
                self._consume()
            batch = self._packer.take()
            batch.state = self.state()
            ledger.batches += 1
            return batch
        finally:
            ledger.pack_s += time.perf_counter() - begun - (self._elsewhere_s() - elsewhere_s)

    def _elsewhere_s(self) -> float:
        """Seconds of this thread that were not spent on packing."""
        return self._ledger.read_s + self._ledger.inline_s + self.ahead.waited_s

    def state(self) -> StreamState:
        """The position just after the last sample consumed."""
        config, share = self._config, self._share
        if share is not None and share.packer is not None:
            columns = share.packer
            return StreamState.of_rank(
                config.manifest, config.rank, config.world_size, self._position.snapshot(), share.pending, lambda: columns
            )
        self._restore()
        # Every bag of this packer was added with one.
        tokens = cast("list[Pending]", self._packer.tokens)
        return StreamState.of_rank(
            config.manifest, config.rank, config.world_size, self._position.snapshot(), tokens, self._packer.snapshot()
        )

    def _place(self, source: int, shard: int, index: int) -> Place:
        url = self._units.url(source, shard)
        return Place(source, shard, url, sample_id(url, index))

    def _draw_ahead(self) -> None:
        """Draws, labels and submits while there is room."""
        ahead, ledger = self.ahead, self._ledger
        begun = time.perf_counter()
        inline_s = ledger.inline_s
        if not self._opened:
            self._opened = True
            self._order.open()
        most = QUEUED_TEXTS
        if self._decoding:
            most = min(QUEUED_SAMPLES, max(QUEUED_TEXTS, 4 * ahead.workers, len(ahead) + GROWTH))
        while self._ended is None and ahead.room() and len(ahead) < most:
            step = self._order.advance()
            if isinstance(step, Ended):
                self._ended = step
                self._order.close()
                break
            sample = step.sample
            place = self._place(step.source, step.shard, sample.index)
            if isinstance(sample, RawSample):
                self._submit(step, place, sample)
            else:
                self._fetch(step, place, Held(sample.index, sample.offset, sample.size))
        ledger.read_s += time.perf_counter() - begun - (ledger.inline_s - inline_s)

    def _submit(self, step: Drawn, place: Place, sample: RawSample) -> None:
        texts = self._text_path.bag(sample, place.sample_id)
        if texts is not None:
            self.ahead.put(Context(step, place, False), Outcome(sample.key, sample.offset, texts), sample.size)
            return
        labelled = self._preparer.label(sample, place)
        if isinstance(labelled, Outcome):
            self.ahead.put(Context(step, place, False), labelled, sample.size)
            return
        charge = self._preparer.charge_bytes(labelled)
        if sample.size <= INLINE_BYTES and not labelled.bag.items.modalities.any():
            begun = time.perf_counter()
            self.ahead.put(Context(step, place, False), self._preparer(labelled), charge)
            self._ledger.inline_s += time.perf_counter() - begun
            return
        self._decoding += 1
        self.ahead.submit(Context(step, place, True), labelled, charge, sample.size)

    def _fetch(self, step: Drawn | None, place: Place, held: Held) -> None:
        self._decoding += 1
        charge = held.size + self._config.shape.max_columns_per_row * self._config.shape.bytes_per_position
        # Many small reads wait for the network at once; worker processes read for themselves.
        coming = None if self._config.processes else self._units.fetch(place.url, held)
        self.ahead.submit(Context(step, place, True), Fetch(place, held, coming), charge, held.size)

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
            assert self._ended is not None
            self._position.follow(self._ended)
            self._finished = True
            for fault in self._ended.faults:
                self._tell_fault(fault)
            return
        step, place, outcome = self._pop()
        assert step is not None
        sample = step.sample
        self._position.follow(step)
        self._ledger.samples += 1
        self._ledger.read_bytes += sample.size
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
        self._without_bag += 1
        if self._endless:
            self._check_drought()

    def _check_drought(self) -> None:
        """Raises once a whole epoch of every source has given no bag: the next one would not either."""
        count = self._without_bag
        if count == 1:
            self._drought_from = self._position.epochs()
        if count % DROUGHT_SAMPLES and count & (count - 1):
            return
        for begun, epoch in zip(self._drought_from, self._position.epochs(), strict=True):
            if begun is not None and epoch is not None and epoch < begun + self._drought_epochs:
                return
        raise NoSamplesError(
            f"the last {count} samples, a whole epoch of every source, gave nothing to train on, and epochs=None has no end: "
            f"{self._ledger.losses() or 'they hold no files'}; check schema, shape and decoder options, or pass epochs"
        )

    def _restore(self) -> None:
        """Reads and decodes the bags that waited, in order, and puts them back where they were."""
        share, self._share = self._share, None
        if share is None:
            return
        waiting = iter(share.pending)
        bags: list[tuple[Pending, Outcome]] = []
        bag = next(waiting, None)
        read = 0
        while read < len(share.pending):
            while bag is not None and self.ahead.room():
                self._fetch(None, self._place(bag.source, bag.shard, bag.sample_index), bag.held)
                bag = next(waiting, None)
            _, place, outcome = self._pop()
            if outcome.failure is not None:
                self._tell(place, outcome)
            bags.append((share.pending[read], outcome))
            read += 1
        kept = [(token, outcome.bag) for token, outcome in bags if outcome.bag is not None]
        if share.packer is not None and len(kept) == len(bags):
            self._packer.load(share.packer, [bag for _, bag in kept], [token for token, _ in kept])
            return
        for token, decoded in kept:
            self._packer.add_decoded(decoded, token)

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
            error.add_note(f'in shard {url}{named}, at byte {offset}; on_error="quarantine" leaves it out and goes on')
            raise error
        self._ledger.quarantine.record(url=url, key=key, member=member, offset=offset, kind=kind, reason=reason)
