"""Shards being read: the catalogue that the order asks for the samples of its units.

Local shards are read as the order asks. Remote ones are read ahead, a unit per lane, by a few threads: while one lane's next
samples are on their way, the others' are taken. What a unit holds does not depend on it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from treadle.pipeline.order import Held, UnitBrokenError
from treadle.pipeline.samples import RawSample
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import local_path

STRIDE_BYTES: Final = 2**19
"""Tar bytes of a unit that are read ahead at a time; a lane holds at most two such strides."""
STRIDE_SAMPLES: Final = 512
IO_THREADS: Final = 16

Stride = tuple[list[RawSample], Exception | None, bool]
"""Samples, the fault that ended them, and whether the unit is at its end."""


class Units:
    """Reads the units of a stream's sources."""

    def __init__(self, urls: Sequence[Sequence[str]], *, open_shard: Callable[[str], Shard] = Shard) -> None:
        """`urls` names each source's shards, in the manifest's order."""
        self._urls = urls
        self._open_shard = open_shard
        self._executor: ThreadPoolExecutor | None = None

    def url(self, source: int, shard: int) -> str:
        """Where a shard is."""
        return self._urls[source][shard]

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[RawSample]:
        """The samples of a unit from `index` on; see `order.Catalogue`."""
        url = self.url(source, shard)
        samples = self._open_shard(url).samples(part=part, parts=parts, index=index, offset=offset)
        if local_path(url) is not None:
            return _directly(samples)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="treadle-read")
        # The first stride is under way before anyone asks for it.
        return _strides(self._executor, samples, self._executor.submit(_stride, samples))

    def sample(self, source: int, shard: int, held: Held) -> RawSample:
        """A sample known by reference.

        Raises:
            ShardError: it cannot be read.
        """
        return self._open_shard(self.url(source, shard)).sample_at(held.index, held.offset, held.size)

    def close(self) -> None:
        """Joins the reading threads; safe to call again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


def _directly(samples: Iterator[RawSample]) -> Iterator[RawSample]:
    try:
        yield from samples
    except ShardError as error:
        raise UnitBrokenError(error) from error


def _stride(samples: Iterator[RawSample]) -> Stride:
    read: list[RawSample] = []
    size = 0
    try:
        for sample in samples:
            read.append(sample)
            size += sample.size
            if size >= STRIDE_BYTES or len(read) >= STRIDE_SAMPLES:
                return read, None, False
    except ShardError as error:
        return read, error, True
    return read, None, True


def _strides(executor: ThreadPoolExecutor, samples: Iterator[RawSample], coming: Future[Stride]) -> Iterator[RawSample]:
    try:
        while True:
            read, fault, at_end = coming.result()
            if not at_end:
                coming = executor.submit(_stride, samples)
            yield from read
            if fault is not None:
                raise UnitBrokenError(fault) from fault
            if at_end:
                return
    finally:
        # A generator that another thread is running cannot be closed: wait for that stride first.
        if not coming.cancel():
            coming.exception()
        close = getattr(samples, "close", None)
        if close is not None:
            close()
