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
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from treadle.pipeline.bag import DecodedBag, LateBag
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.direct import Direct
from treadle.pipeline.feed_config import FeedConfig
from treadle.pipeline.identity import sample_id, sample_seed
from treadle.pipeline.ledger import Ledger
from treadle.pipeline.losses import Losses
from treadle.pipeline.order import Drawn, Ended, Held, Order
from treadle.pipeline.packer import Packer
from treadle.pipeline.prepare import Fetch, Outcome, Place, Preparer, Read, arrived, held_bytes
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.samples import RawSample
from treadle.pipeline.state import Columns, Pending, Position, Share, StreamState, columns_of
from treadle.pipeline.text_path import TextPath
from treadle.pipeline.units import Units

IN_FLIGHT_BYTES: Final = 2**28
"""Content and payloads charged for samples between the draw and the packer."""
INLINE_BYTES: Final = 2**20
"""Texts up to this size are decoded where they are drawn: a future costs more than their copy."""
QUEUED_SAMPLES: Final = 1024
"""Samples between the draw and the packer while some of them are being decoded."""
QUEUED_TEXTS: Final = 64
"""The same while all of them are texts: nothing is won by drawing them earlier."""
GROWTH: Final = 4
"""Samples drawn for each one consumed while the queue grows, once the first batch is out: it does not wait for later ones."""

DIRECT_AFTER_SAMPLES: Final = 2048
"""Samples in a row without anything to decode after which nothing is drawn ahead any more."""


class Context(NamedTuple):
    """What stays here while a sample is decoded."""

    step: Drawn
    """What was drawn."""
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
        self._late: deque[tuple[LateBag, int]] = deque()
        self._batch_positions = config.shape.max_rows_per_device * config.shape.max_columns_per_row
        self._most_bags = min(self._packer.capacities.bags, self._packer.capacities.segments)
        self._batches = 0
        self._directly = True
        self._order.record_moves(False)
        self._losses = Losses(config, ledger, self._epochs, restored=share is not None)
        self._direct = Direct(config, self._order, self._packer, self._text_path, ledger, self._losses)
        self._waiting: deque[Drawn] = deque()
        self._since_decoding = 0
        self._opened = False
        self._decoding = 0
        self._ended: Ended | None = None
        self._finished = False
        if share is not None:
            self._order.restore(share.lane_draws, share.cursors, share.pools)
            sources = len(config.plan.sources)
            held = [(number % sources, ref) for number, refs in enumerate(share.pools) for ref in refs]
            held += [(token.source, (token.shard, token.sample_index, token.offset, token.size)) for token in share.pending]
            self._units.expect(held)
            self._wait_for(share)

    def interrupt(self) -> None:
        """Ends waits for storage: what is being read fails as told to stop, which is nobody's loss."""
        self._units.interrupt()

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
            if not self._batches:
                self._begin_late()
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
            self._batches += 1
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
        config, packer = self._config, self._packer
        # Taken with every batch, and looked at now and then: what is done here takes down references alone.
        if self._directly:
            position: Callable[[], Columns] = partial(columns_of, self._lanes, self._order.standing(self._direct.left))
        else:
            position = self._position.snapshot()
        # Every bag of this packer was added with one.
        tokens: Any = packer.tokens_now()
        return StreamState.of_rank(config.manifest, config.rank, config.world_size, position, tokens, packer.snapshot())

    def _place(self, source: int, shard: int, index: int) -> Place:
        url = self._units.url(source, shard)
        return Place(source, shard, url, sample_id(url, index))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._order.open()

    def _consume_directly(self) -> None:
        """Packs texts until a batch is ready, the data ends, or something has to be decoded: then samples are drawn ahead."""
        self._open()
        direct = self._direct
        if direct.consume():
            self._finished = direct.ended
            return
        self._directly, self._since_decoding = False, 0
        self._position.stand(self._order.standing(direct.left)())
        self._waiting.extend(self._order.rest(direct.rest))
        self._order.record_moves(True)
        direct.drop()

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
            most = max(QUEUED_TEXTS, 4 * ahead.workers)
            if self._batches:
                most = min(QUEUED_SAMPLES, max(most, len(ahead) + GROWTH))
        # After texts alone for a while the queue runs dry, and they are consumed directly.
        while self._ended is None and ahead.room() and len(ahead) < most:
            if not self._waiting and self._since_decoding >= DIRECT_AFTER_SAMPLES:
                break
            step = self._waiting.popleft() if self._waiting else self._order.advance()
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

    def _fetch(self, step: Drawn, place: Place, held: Held) -> None:
        self._decoding += 1
        self._since_decoding = 0
        charge = held.size + self._config.shape.max_columns_per_row * self._config.shape.bytes_per_position
        # Many small reads wait for the network at once.
        self.ahead.submit(Context(step, place, True), Fetch(place, held, self._units.fetch(place.url, held)), charge, held.size)

    def _pop(self) -> tuple[Drawn, Place, Outcome]:
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
            self._finished = True
            self._losses.faults(self._ended.faults)
            return
        step, place, outcome = self._pop()
        sample = step.sample
        self._position.follow(step)
        self._ledger.count(1, sample.size, 0.0)
        self._losses.faults(step.faults)
        self._losses.outcome(place, outcome)
        bag = outcome.bag
        if bag is not None and bag.lengths:
            token = Pending(*step.key, step.epoch, step.source, step.shard, sample.index, sample.offset, sample.size)
            if self._packer.add_decoded(bag, token):
                self._losses.packed()
            else:
                self._losses.unfit(len(bag.lengths))
            return
        if bag is not None:
            # Its items are counted as dropped with the next batch.
            self._packer.add_decoded(bag)
        self._losses.bagless()

    def _epochs(self) -> list[int | None]:
        """The epoch that each sub-lane stands in, None where it is over."""
        return self._order.epochs() if self._directly else self._position.epochs()

    def _wait_for(self, share: Share) -> None:
        """Puts the bags that waited back in integers; they are read and decoded as they are placed."""
        bags = [LateBag(partial(self._begin, token)) for token in share.pending]
        if share.exact:
            self._packer.load(share.packer, bags, share.pending)
        else:
            self._packer.add_late(share.packer, bags, share.pending)
        lengths = iter(share.packer["item_length"].tolist())
        self._late.extend((bag, sum(islice(lengths, count))) for bag, count in zip(bags, share.packer["bag_items"].tolist(), strict=True))

    def _begin_late(self) -> None:
        """Begins with some more of the bags that waited: those that come first, about as many as the next batch takes."""
        positions = bags = 0
        while self._late and positions < self._batch_positions and bags < self._most_bags:
            bag, size = self._late.popleft()
            if not bag.begun:
                bag.begin()
                positions += size
                bags += 1

    def _begin(self, token: Pending) -> Callable[[], DecodedBag | None]:
        place = self._place(token.source, token.shard, token.sample_index)
        future = self.ahead.apart(Fetch(place, token.held, self._units.fetch(place.url, token.held)))

        def content() -> DecodedBag | None:
            begun = time.perf_counter()
            outcome = self.ahead.waited(future)
            self.ahead.waited_s += time.perf_counter() - begun
            if outcome.failure is not None:
                # Items that did not decode were told when it was first drawn.
                self._losses.outcome(place, outcome)
            return outcome.bag

        return content
