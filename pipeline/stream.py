"""ShardStream: sharded tars in, packed batches out, each with the position just after it.

What is here is what the user holds: the arguments, the manifest, the states. The loop is `feed.py`.
"""

import dataclasses
import json
import logging
import operator
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, cast

from treadle.decoders import DecodeOptions
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.feed import Feed
from treadle.pipeline.feed_config import FeedConfig, OnStreamError, derived_workers
from treadle.pipeline.layout import LATE_INTERACTION_FIELDS, LateInteractionCapacities
from treadle.pipeline.ledger import Ledger
from treadle.pipeline.order import OrderPlan, SourcePlan
from treadle.pipeline.packer import Packer
from treadle.pipeline.quarantine import Budget, Quarantine, QuarantineFullError
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import Schema
from treadle.pipeline.sources import Manifest, ManifestSource, Source
from treadle.pipeline.state import StreamState
from treadle.shape import BatchShape, require_choice, require_count, require_member, require_path, shown

logger = logging.getLogger(__name__)

DEFAULT_LANES: Final = 64
DEFAULT_SHUFFLE_BYTES: Final = 2**29
DEFAULT_SCHEMA: Final = Schema()
DEFAULT_OPTIONS: Final = DecodeOptions()

_CLOSED: Final = "this stream is closed: make another, and load the state of the last batch to go on"

Sources = str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source]


class ShardStream:
    """Iterates the packed batches of sharded tars, for one rank.

    The order of samples is a pure function of the sources, `seed`, `lanes`, `shuffle` and `shuffle_bytes`; ranks, threads and
    timing do not change it. `state` is the position just after the last batch handed out, and every batch carries its own as
    `batch.state`; `load_state` goes on with the very next batch, bit for bit.

    The stream is its own iterator and goes over its data once: leaving a loop and iterating again goes on where it was. Its
    workers start with the first batch and end with the last one, with `close`, or with the `with` block.
    """

    def __init__(
        self,
        sources: Sources,
        shape: BatchShape,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        lanes: int = 0,
        shuffle: int = 1000,
        shuffle_bytes: int = 0,
        epochs: int | None = None,
        threads: int | None = None,
        processes: int | None = None,
        schema: Schema = DEFAULT_SCHEMA,
        options: DecodeOptions = DEFAULT_OPTIONS,
        on_error: OnStreamError = "quarantine",
        quarantine: str | os.PathLike[str] | Quarantine | None = None,
        window: int = 4,
        max_edges: int = 0,
        late_interaction: LateInteractionCapacities | None = None,
        retry: RetryPolicy | None = None,
        cache: ShardCache | None = None,
        max_quarantined: int | float | None = None,
        quarantine_probation: int = 1000,
    ) -> None:
        """
        Args:
            sources: a URL pattern, a list of them, or `Source`s to blend.
            seed: keys the order.
            lanes: independent sample sequences that together are the order; 0 derives 64. A loaded state brings its own.
            shuffle: samples held back over all lanes, to be drawn from.
            shuffle_bytes: tar bytes past which lanes hold back no more, over all lanes; 0 derives 512 MiB.
            epochs: passes over each source that does not repeat; None never ends.
            threads: decoding threads; None derives one per CPU of this rank's share of the machine.
            processes: decoding processes in place of threads; None derives as many where the shape has audio or video, whose decoders get in
                each other's way in threads, and starts them once there has been more than a little to decode; else 0. A process that a
                codec crashes, or stalls past `options.max_wall_s`, costs that item alone.
            schema: which files are items, and how they relate.
            options: limits of the decoders.
            on_error: "quarantine" counts what cannot be read or decoded and goes on without it, "raise" stops there.
            quarantine: file that gets one JSON line per thing left out, or where to count it; None keeps the counts alone.
            window: batches' worth of bags that the packer chooses from.
            max_edges: edges that each edge set of a batch holds; 0 derives 8 per segment.
            late_interaction: its query tokens, documents and document tokens become capacities of a batch.
            retry: how often, and how patiently, a broken read of a remote shard is tried again; no part of the manifest.
            cache: where whole remote shards are kept on this machine; no part of the manifest.
            max_quarantined: things left out past which the stream ends with `QuarantineFullError`: how many (an integer; the same thing in
                a later epoch counts once), or which share of the samples read (a number between 0 and 1). None sets no bound.
            quarantine_probation: samples read before a share is judged; it is judged at the end of the data, too.

        Raises:
            ValueError: an argument is out of range or of another type, or a pattern names no shard.
        """
        require_member("ShardStream", "shape", shape, BatchShape)
        world_size = require_count("ShardStream", "world_size", world_size, 1)
        rank = require_count("ShardStream", "rank", rank, 0, world_size - 1)
        self._arguments = _checked({
            "seed": seed, "lanes": lanes, "shuffle": shuffle, "shuffle_bytes": shuffle_bytes, "epochs": epochs, "threads": threads,
            "processes": processes, "schema": schema, "options": options, "on_error": on_error, "quarantine": quarantine,
            "window": window, "max_edges": max_edges, "late_interaction": late_interaction, "retry": retry,
            "cache": cache, "max_quarantined": max_quarantined, "quarantine_probation": quarantine_probation,
        }, shape)  # fmt: skip
        self.shape = shape.resolved()
        self.rank = rank
        self.world_size = world_size
        self._sources = _sources_of(sources)
        self._urls = [source.expanded() for source in self._sources]
        self._explicit_lanes: int = self._arguments["lanes"]
        self._config = self._configured(self._explicit_lanes or DEFAULT_LANES)
        if world_size > self._config.plan.lanes:
            raise ValueError(
                f"ShardStream.lanes is {lanes}{'' if lanes else f' ({DEFAULT_LANES} are derived)'} and world_size is {world_size}: every rank needs "
                f"a lane of its own; pass lanes={world_size} or a multiple of it"
            )
        _warn_if_uneven(self._config.plan.lanes, world_size)
        self._ledger = Ledger(quarantine if isinstance(quarantine, Quarantine) else Quarantine(quarantine), Counter())
        self._feed: Feed | None = None
        self._ended: list[Feed] = []
        self._loaded: StreamState | None = None
        self._state: StreamState | None = None
        self._failure: Exception | None = None
        self._one_at_a_time = threading.RLock()
        self._reading = False
        self._exhausted = False
        self._closed = False
        self._told = False

    def _configured(self, lanes: int) -> FeedConfig:
        given = self._arguments
        plan = OrderPlan(
            sources=tuple(
                SourcePlan(shards=len(urls), weight=float(source.weight), repeat=source.repeat)
                for source, urls in zip(self._sources, self._urls, strict=True)
            ),
            seed=given["seed"],
            lanes=lanes,
            shuffle=given["shuffle"],
            shuffle_bytes=given["shuffle_bytes"] or DEFAULT_SHUFFLE_BYTES,
            epochs=given["epochs"],
        )
        schema: Schema = given["schema"]
        options: DecodeOptions = given["options"]
        late = given["late_interaction"]
        manifest = Manifest(
            sources=tuple(
                ManifestSource.of(urls, source.weight, source.repeat) for source, urls in zip(self._sources, self._urls, strict=True)
            ),
            seed=plan.seed,
            lanes=lanes,
            shuffle=plan.shuffle,
            shuffle_bytes=plan.shuffle_bytes,
            epochs=plan.epochs,
            schema=schema.to_dict(),
            shape=_plain(self.shape),
            options={
                # Where an item is decoded changes nothing that it becomes.
                "decode": {name: value for name, value in _plain(options).items() if name != "isolate"},
                "window": given["window"],
                "max_edges": given["max_edges"],
                "late_interaction": None if late is None else {name: getattr(late, name) for name in LATE_INTERACTION_FIELDS},
            },
        )
        return FeedConfig(
            plan=plan, urls=self._urls, manifest=manifest.to_json(), shape=self.shape, schema=schema, options=options,
            window=given["window"], max_edges=given["max_edges"], late_interaction=late, rank=self.rank, world_size=self.world_size,
            **derived_workers(given["threads"], given["processes"], self.shape), on_error=given["on_error"],
            retry=given["retry"] or RetryPolicy(), cache=given["cache"],
            budget=Budget(max_quarantined=given["max_quarantined"], quarantine_probation=given["quarantine_probation"]),
        )  # fmt: skip

    @property
    def lanes(self) -> int:
        """Lanes of the order: as given, as derived, or as a loaded state has them."""
        return self._config.plan.lanes

    @property
    def manifest(self) -> Manifest:
        """All that the order and the batches are a function of."""
        return Manifest.from_dict(json.loads(self._config.manifest))

    @property
    def quarantine(self) -> Quarantine:
        """What was left out because it cannot be read or decoded: `counts` by kind, `total`, `summary()`."""
        return self._ledger.quarantine

    @property
    def left_out(self) -> Counter[str]:
        """Files that are no item of this stream, by reason: their modality has no live slice, or the schema leaves them out."""
        return self._ledger.left_out

    @property
    def warnings(self) -> Counter[str]:
        """What the shards read so far hold beside their samples, by kind: `skipped_*` members, `no_end_marker`, `key_seen_again`.

        Each shard counts once, however many parts and epochs it is read in, and each of its kinds is logged once.
        """
        return self._ledger.shard_counts.total()

    @property
    def state(self) -> StreamState:
        """The position just after the last batch handed out."""
        if self._state is None:
            if self._feed is None and self._loaded is not None:
                return self._loaded
            self._state = self._running().state()
        return self._state

    def load_state(self, state: StreamState | bytes) -> None:
        """Goes on from `state`, with the batch that comes just after it; what was under way is dropped.

        A state of another number of ranks must be merged first (`StreamState.merge`): its lanes are then dealt anew.

        Raises:
            ValueError: the state belongs to another stream; the message names what differs.
        """
        if isinstance(state, bytes | bytearray | memoryview):
            state = StreamState.from_bytes(state)
        require_member("ShardStream.load_state", "state", state, StreamState)
        if self._closed:
            raise ValueError("this stream is closed: make another to load a state into")
        lanes = self._explicit_lanes or state.lanes
        config = self._configured(lanes)
        found = Manifest.from_dict(json.loads(config.manifest)).differences(state.manifest)
        if found:
            raise ValueError("the state belongs to another stream (this stream's value is not the state's): " + "; ".join(found))
        if self.world_size > lanes:
            raise ValueError(f"the state has lanes={lanes} and world_size is {self.world_size}: every rank needs a lane of its own")
        share = state.deal(self.rank, self.world_size)
        if lanes != self.lanes:
            _warn_if_uneven(lanes, self.world_size)
        feed = Feed(config, self._ledger, share)
        self._stop()
        self._config, self._feed = config, feed
        self._loaded, self._state = state, self._feed.state()
        self._failure, self._exhausted, self._told = None, False, False

    def split(self, number: int, count: int) -> "ShardStream":
        """The same stream for part `number` of `count` of this rank's lanes: what one of several reading processes owns.

        Raises:
            ValueError: a number is out of range, or the parts of all ranks are more than there are lanes.
        """
        count = require_count("ShardStream.split", "count", count, 1)
        number = require_count("ShardStream.split", "number", number, 0, count - 1)
        return ShardStream(
            self._sources, self.shape, rank=self.rank * count + number, world_size=self.world_size * count, **self._arguments
        )

    def _running(self) -> Feed:
        if self._feed is None:
            self._stop()
            # After an interrupt (Ctrl-C in a notebook) it goes on behind the last batch handed out.
            last = self._loaded if self._state is None else self._state
            self._feed = Feed(self._config, self._ledger, None if last is None else last.deal(self.rank, self.world_size))
            if self._state is None:
                # Where it ends without one batch it stands where it began, whether or not anybody asked before.
                self._state = self._feed.state()
        return self._feed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        """The next batch; threads that share the stream get one each, in turn.

        Raises:
            ValueError: the stream is closed.
            QuarantineFullError: more was left out than `max_quarantined` allows.
            NoSamplesError: a whole epoch of an endless stream gave no bag.
            ShardError, SampleError, DecodeError: under `on_error="raise"`, what cannot be read or decoded.
        """
        with self._one_at_a_time:
            self._reading = True
            try:
                return self._next()
            finally:
                self._reading = False
                if self._closed:
                    self._shut()

    def _next(self) -> PackedBatch:
        if self._closed:
            raise ValueError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._exhausted:
            raise StopIteration
        try:
            batch = self._running().next_batch()
        except BaseException as error:
            self._stop()
            if isinstance(error, Exception):
                if self._closed:
                    raise ValueError(_CLOSED) from None
                self._failure = error
            raise
        if self._closed:
            # What came of reading that was told to stop in the midst counts for nothing.
            raise ValueError(_CLOSED)
        if batch is None:
            self._exhausted = True
            self._stop()
            self._tell_end("end of the data")
            try:
                self._ledger.quarantine.check_end(self._config.budget, self._ledger.samples)
            except QuarantineFullError as error:
                self._failure = error
                raise
            raise StopIteration
        self._state, self._loaded = batch.state, None
        return batch

    def _tell_end(self, what: str) -> None:
        """Sums up, once, what was read and what was lost."""
        if self._told:
            return
        self._told = True
        ledger = self._ledger
        losses = ledger.losses()
        if not ledger.batches and self._loaded is None:
            logger.warning("%s without one batch, after %d samples: %s", what, ledger.samples, losses or "they hold no files")
        else:
            level = logging.WARNING if ledger.quarantine.total or ledger.unfit_bags else logging.INFO
            logger.log(level, "%s: %d batches of %d samples; %s", what, ledger.batches, ledger.samples, losses or "nothing was left out")

    def stats(self) -> dict[str, Any]:
        """What each stage has done so far, and what the stream waits for.

        `limiting_stage` names the stage that the others wait for: "read", "decode", "pack", or "consumer", which is whoever asks for the
        batches; empty before the first batch. Each of `read` (draws samples, reads and labels them), `decode` (workers, and texts inline)
        and `pack` (places bags, writes batches) has `busy_s`, summed over workers, `wait_input_s`, what it waited for input, `wait_room_s`,
        what it waited because enough lay ahead or nobody asked, and `bytes` with `bytes_per_s` of `elapsed_s`. Of `decode`,
        `in_flight_bytes` are held now between the draw and the packer, `peak_bytes` at most; of `pack`, `unfit_bags` are samples whose
        items, `unfit_items` in all, can fit no batch of the shape.
        """
        if (feed := self._feed) is not None:
            feed.settle()
        return self._ledger.stats(feed.ahead.workers if feed else 0, feed.ahead.in_flight_bytes if feed else 0)

    def _stop(self) -> None:
        # Closing may be interrupted at any place: whoever stops the stream next goes on with it.
        if self._feed is not None:
            self._ended.append(self._feed)
            self._feed = None
        while self._ended:
            self._ended[-1].close()
            self._ended.pop()

    def close(self) -> None:
        """Joins every thread and process, sums up what was left out and closes the quarantine log; safe to call again.

        Whoever waits for a batch meanwhile, another thread or what a signal interrupts, gets the `ValueError` of a closed stream.
        """
        self._closed = True
        if (feed := self._feed) is not None:
            feed.interrupt()
        # A daemon thread that reads as the interpreter ends never lets go.
        if not self._one_at_a_time.acquire(blocking=not sys.is_finalizing()):
            return
        try:
            if not self._reading:
                self._shut()
        finally:
            self._one_at_a_time.release()

    def _shut(self) -> None:
        self._stop()
        if self._ledger.batches:
            self._tell_end("closed before the end of the data")
        if not isinstance(self._arguments["quarantine"], Quarantine):
            self._ledger.quarantine.close()

    def __del__(self) -> None:
        # An abandoned stream joins its workers too; one that was refused in the making has none.
        if hasattr(self, "_closed"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        begun = self._state is not None or self._loaded is not None
        state = self.state.to_bytes() if begun else None
        return _rebuilt, (self._sources, self.shape, self.rank, self.world_size, self._arguments, state)


def _checked(given: dict[str, Any], shape: BatchShape) -> dict[str, Any]:
    """The arguments that a stream and its copies share; numpy's numbers become Python's.

    Raises:
        ValueError: one is out of range or of another type: here, and not at the first batch.
    """
    owner = "ShardStream"
    for name, most in (("seed", 2**64 - 1), ("lanes", 2**31 - 1), ("shuffle", 2**31 - 1), ("shuffle_bytes", 2**63 - 1)):
        given[name] = require_count(owner, name, given[name], 0, most)
    for name, least, most in (("epochs", 1, 2**31 - 1), ("threads", 1, 4096), ("processes", 0, 4096)):
        if given[name] is not None:
            given[name] = require_count(owner, name, given[name], least, most)
    require_member(owner, "schema", given["schema"], Schema)
    require_member(owner, "options", given["options"], DecodeOptions)
    require_member(owner, "retry", given["retry"], RetryPolicy, optional=True)
    require_member(owner, "cache", given["cache"], ShardCache, optional=True)
    require_choice(owner, "on_error", given["on_error"], ("quarantine", "raise"))
    if given["quarantine"] is not None and not isinstance(given["quarantine"], Quarantine):
        require_path(owner, "quarantine", given["quarantine"])
    packer = Packer(shape, window=given["window"], max_edges=given["max_edges"], late_interaction=given["late_interaction"])
    # The manifest has them as they are given: 0 stays 0.
    return {**given, "window": packer.window, "max_edges": operator.index(given["max_edges"])}


def _rebuilt(
    sources: list[Source], shape: BatchShape, rank: int, world_size: int, arguments: dict[str, Any], state: bytes | None
) -> ShardStream:
    stream = ShardStream(sources, shape, rank=rank, world_size=world_size, **arguments)
    if state is not None:
        stream.load_state(state)
    return stream


def _sources_of(sources: Sources) -> list[Source]:
    """Patterns are one source together; `Source`s are blended."""
    if isinstance(sources, Source):
        return [sources]
    if isinstance(sources, str | os.PathLike):
        return [Source(os.fspath(sources))]
    if isinstance(sources, bytes | Mapping) or not isinstance(cast(object, sources), Iterable):
        raise ValueError(f"ShardStream.sources is {shown(sources)}: it must be a path, a URL, a pattern, a Source, or a list of them")
    sources = list(sources)
    strange = next((source for source in sources if not isinstance(cast(object, source), str | os.PathLike | Source)), None)
    if strange is not None:
        raise ValueError(f"ShardStream.sources holds {shown(strange)}: each must be a path, a URL, a pattern or a Source")
    blended = [source for source in sources if isinstance(source, Source)]
    patterns = [os.fspath(source) for source in sources if not isinstance(source, Source)]
    if blended and patterns:
        raise ValueError(
            f"sources holds {len(blended)} Sources and {len(patterns)} patterns such as {patterns[0]!r}: wrap each pattern in a Source to "
            "blend it, or pass patterns alone to read them as one source"
        )
    if not blended and not patterns:
        raise ValueError("sources is empty: name at least one shard")
    return blended or [Source(patterns)]


def _plain(value: Any) -> Any:
    """A configuration as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value


def _warn_if_uneven(lanes: int, world_size: int) -> None:
    if lanes % world_size == 0:
        return
    divisors = [count for count in range(1, lanes + 1) if lanes % count == 0]
    nearest = min(divisors, key=lambda count: (abs(count - world_size), -count))
    even = -(-lanes // world_size) * world_size
    warnings.warn(
        f"world_size={world_size} does not divide lanes={lanes}: some ranks own {lanes // world_size} lanes and others "
        f"{-(-lanes // world_size)}, so they run out at different times; use {nearest} ranks, or lanes={even} from the start",
        UserWarning,
        stacklevel=3,
    )
