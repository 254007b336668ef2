"""One sample to one decoded bag, wherever it runs: inline, in a thread, or in a worker process.

Nothing here raises for what a sample holds: what is wrong with it travels in the outcome, and the stream tells it in order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from treadle.decoders import DecodeError, DecodeOptions
from treadle.decoders.isolate import codec_modules
from treadle.pipeline.bag import DecodedBag, decode_bag
from treadle.pipeline.decode_process import Watch
from treadle.pipeline.order import Held
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import SampleError, Schema, modality_of
from treadle.pipeline.shards import RawSample, ShardError
from treadle.pipeline.units import Coming, read_sample
from treadle.shape import BatchShape, Modality


class Place(NamedTuple):
    """Where a sample comes from."""

    source: int
    shard: int
    url: str
    sample_id: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A sample known by reference, to be read before it is decoded."""

    place: Place
    held: Held
    coming: Future[RawSample] | Coming | None = None
    """The sample, where it is already on its way."""
    failure: ShardError | None = None
    """Why it cannot be had."""


class Read(NamedTuple):
    """A sample whose bytes are here."""

    place: Place
    sample: RawSample


@dataclass(slots=True)
class Outcome:
    """What became of a sample."""

    key: str = ""
    offset: int = 0
    bag: DecodedBag | None = None
    """The items that decoded, perhaps none; None where the sample had none to begin with."""
    failure: SampleError | ShardError | None = None
    """Why the sample as a whole is left out."""
    drops: Sequence[tuple[str, int, DecodeError]] = ()
    """Items that did not decode: member, byte offset, reason."""
    left_out: Counter[str] | None = None
    """Files that the schema or the shape leave out, by reason."""

    def problems(self) -> Iterator[tuple[SampleError | ShardError | DecodeError, str, int]]:
        """What is wrong with it: the error, the member (empty for the sample as a whole), the byte offset."""
        if self.failure is not None:
            yield self.failure, "", self.offset
        for member, offset, error in self.drops:
            yield error, member, offset


def arrived(task: Read | Fetch) -> Read | Fetch:
    """A task with what it waited for in its hands, ready to be sent to another process."""
    if not isinstance(task, Fetch) or task.coming is None:
        return task
    try:
        return Read(task.place, task.coming.result())
    except ShardError as error:
        return Fetch(task.place, task.held, failure=error)


def held_bytes(outcome: Outcome) -> int:
    """What an outcome keeps in memory."""
    return sum(payload.array.nbytes for payload in outcome.bag.payloads) if outcome.bag is not None else 0


@dataclass(frozen=True, slots=True)
class Preparer:
    """Reads where needed, labels and decodes; travels to worker processes by pickle."""

    schema: Schema
    shape: BatchShape
    options: DecodeOptions
    retry: RetryPolicy | None = None

    @property
    def modules(self) -> list[str]:
        """What decoding will import."""
        return codec_modules(self.shape)

    def watched(self, watch: Watch) -> Callable[[Read | Fetch], Outcome]:
        """The same in a worker process whose end costs one item: decoders need no processes of their own there."""
        watch.limit(self.options.max_wall_s)
        return partial(replace(self, options=replace(self.options, isolate=False)), around=watch.item)

    def __call__(self, task: Read | Fetch, around: Callable[[int], AbstractContextManager[object]] = nullcontext) -> Outcome:
        """The task's outcome; each item is decoded within `around(its number)`."""
        if isinstance(task, Fetch):
            if task.failure is not None:
                return Outcome(offset=task.held.offset, failure=task.failure)
            try:
                sample = task.coming.result() if task.coming is not None else read_sample(task.place.url, task.held, self.retry)
            except ShardError as error:
                return Outcome(offset=task.held.offset, failure=error)
        else:
            sample = task.sample
        place = task.place
        if sample.problem is not None:
            return Outcome(sample.key, sample.offset, failure=SampleError(*sample.problem))
        try:
            labelled = self.schema.bag(sample, place.source, place.shard, place.sample_id, self.shape)
        except SampleError as error:
            return Outcome(sample.key, sample.offset, failure=error)
        if not len(labelled.items):
            return Outcome(sample.key, sample.offset, left_out=labelled.left_out)
        failed: list[tuple[int, DecodeError]] = []
        bag = decode_bag(
            labelled.items,
            self.shape,
            self.options,
            on_error="drop",
            on_drop=lambda item, error: failed.append((item, error)),
            around=around,
        )
        drops = [(labelled.members[item], labelled.offsets[item], error) for item, error in failed]
        return Outcome(sample.key, sample.offset, bag, None, drops, labelled.left_out)

    def is_light(self, sample: RawSample) -> bool:
        """Whether nothing but texts has to be decoded."""
        for field in sample.fields:
            modality = modality_of(field.name)
            if modality and self.shape.is_live(modality):
                return False
        return True

    def charge_bytes(self, sample: RawSample) -> int:
        """An upper bound of what the decoded bag holds, with its content beside it: no item passes a row."""
        positions = self.shape.max_columns_per_row
        total = 0
        for field in sample.fields:
            size = len(field.data)
            total += size
            modality = modality_of(field.name)
            if modality is Modality.TEXT:
                total += min(size, positions)
            elif modality is not None and self.shape.is_live(modality):
                total += positions * self._token_bytes(modality)
        return total

    def _token_bytes(self, modality: Modality) -> int:
        if modality is Modality.IMAGE:
            return self.shape.image.token_bytes
        return self.shape.video.token_bytes if modality is Modality.VIDEO else self.shape.audio.token_bytes
