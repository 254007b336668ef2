"""One sample to one decoded bag, wherever it runs: inline, in a thread, or in a worker process.

Nothing here raises for what a sample holds: what is wrong with it travels in the outcome, and the stream tells it in order.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from treadle.decoders import DecodeError, DecodeOptions
from treadle.pipeline.bag import DecodedBag, decode_bag
from treadle.pipeline.order import Held
from treadle.pipeline.samples import SampleBag, SampleError, Schema
from treadle.pipeline.shards import RawSample, ShardError
from treadle.pipeline.storage import RetryPolicy
from treadle.pipeline.units import read_sample
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
    coming: Future[RawSample] | None = None
    """The sample, where it is already on its way."""


@dataclass(frozen=True, slots=True)
class Read:
    """A sample whose bytes are here, labelled."""

    key: str
    offset: int
    bag: SampleBag


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


def held_bytes(outcome: Outcome) -> int:
    """What an outcome keeps in memory."""
    return sum(payload.array.nbytes for payload in outcome.bag.payloads) if outcome.bag is not None else 0


@dataclass(frozen=True, slots=True)
class Preparer:
    """Labels, reads where needed, and decodes; travels to worker processes by pickle."""

    schema: Schema
    shape: BatchShape
    options: DecodeOptions
    retry: RetryPolicy | None = None

    def label(self, sample: RawSample, place: Place) -> Read | Outcome:
        """The sample's items, or why there are none."""
        if sample.problem is not None:
            return Outcome(sample.key, sample.offset, failure=SampleError(*sample.problem))
        try:
            bag = self.schema.bag(sample, place.source, place.shard, place.sample_id, self.shape)
        except SampleError as error:
            return Outcome(sample.key, sample.offset, failure=error)
        if not len(bag.items):
            return Outcome(sample.key, sample.offset, left_out=bag.left_out)
        return Read(sample.key, sample.offset, bag)

    def __call__(self, task: Read | Fetch) -> Outcome:
        """The task's outcome."""
        if isinstance(task, Fetch):
            try:
                sample = task.coming.result() if task.coming is not None else read_sample(task.place.url, task.held, self.retry)
            except ShardError as error:
                return Outcome(offset=task.held.offset, failure=error)
            labelled = self.label(sample, task.place)
            if isinstance(labelled, Outcome):
                return labelled
            task = labelled
        failed: list[tuple[int, DecodeError]] = []
        bag = decode_bag(
            task.bag.items, self.shape, self.options, on_error="drop", on_drop=lambda item, error: failed.append((item, error))
        )
        drops = [(task.bag.members[item], task.bag.offsets[item], error) for item, error in failed]
        return Outcome(task.key, task.offset, bag, None, drops, task.bag.left_out)

    def charge_bytes(self, task: Read) -> int:
        """An upper bound of what the decoded bag holds, with its content beside it: no item passes a row."""
        items = task.bag.items
        positions = self.shape.max_columns_per_row
        total = 0
        for item, kind in enumerate(items.modalities.tolist()):
            size = len(items.content(item))
            total += size + (min(size, positions) if kind == Modality.TEXT else positions * self._token_bytes(Modality(kind)))
        return total

    def _token_bytes(self, modality: Modality) -> int:
        if modality is Modality.IMAGE:
            return self.shape.image.token_bytes
        return self.shape.video.token_bytes if modality is Modality.VIDEO else self.shape.audio.token_bytes
