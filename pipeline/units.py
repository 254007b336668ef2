"""Shards being read: the catalogue that the order asks for the samples of its units.

Local shards are read as the order asks. Remote ones are read ahead, a unit per lane, by a few threads: while one lane's next
samples are on their way, the others' are taken. What a unit holds does not depend on it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from treadle.pipeline.order import Held, UnitBrokenError
from treadle.pipeline.samples import RawSample
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.storage import StorageError, local_path

STRIDE_BYTES: Final = 2**19
"""Tar bytes of a unit that are read ahead at a time; a lane holds at most two such strides."""
FIRST_SAMPLES: Final = 4
STRIDE_SAMPLES: Final = 512
"""Samples of the first stride, and of the largest: strides double, so that a lane's first sample does not wait for many others."""
IO_THREADS: Final = 32

Stride = tuple[list[RawSample], Exception | None, bool]
"""Samples, the fault that ended them, and whether the unit is at its end."""


class Units:
    """Reads the units of a stream's sources."""

    def __init__(self, urls: Sequence[Sequence[str]]) -> None:
        """`urls` names each source's shards, in the manifest's order."""
        self._urls = urls
        self._executor: ThreadPoolExecutor | None = None

    def url(self, source: int, shard: int) -> str:
        """Where a shard is."""
        return self._urls[source][shard]

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[RawSample]:
        """The samples of a unit from `index` on; see `order.Catalogue`."""
        url = self.url(source, shard)
        samples = _opened(url).samples(part=part, parts=parts, index=index, offset=offset)
        if local_path(url) is not None:
            return _directly(samples)
        executor = self._reading()
        # The first stride is under way before anyone asks for it.
        return _strides(executor, samples, executor.submit(_stride, samples, FIRST_SAMPLES))

    def fetch(self, url: str, held: Held) -> Future[RawSample] | None:
        """A remote sample known by reference, on its way; None where it is local and read in no time."""
        return None if local_path(url) is not None else self._reading().submit(read_sample, url, held)

    def _reading(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="treadle-read")
        return self._executor

    def close(self) -> None:
        """Joins the reading threads; safe to call again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1024)
def _opened(url: str) -> Shard:
    # A shard that has been looked at once is not asked again whether it is compressed.
    return Shard(url)


def read_sample(url: str, held: Held) -> RawSample:
    """A sample known by reference.

    Raises:
        ShardError: it cannot be read.
    """
    try:
        return _opened(url).sample_at(held.index, held.offset, held.size)
    except StorageError as error:
        raise _as_shard_error(error) from error


def _as_shard_error(error: ShardError | StorageError) -> ShardError:
    return error if isinstance(error, ShardError) else ShardError(error.kind, error.offset, error.detail)


def _directly(samples: Iterator[RawSample]) -> Iterator[RawSample]:
    try:
        yield from samples
    except (ShardError, StorageError) as error:
        raise UnitBrokenError(_as_shard_error(error)) from error


def _stride(samples: Iterator[RawSample], most: int) -> Stride:
    read: list[RawSample] = []
    size = 0
    try:
        for sample in samples:
            read.append(sample)
            size += sample.size
            if size >= STRIDE_BYTES or len(read) >= most:
                return read, None, False
    except (ShardError, StorageError) as error:
        return read, _as_shard_error(error), True
    return read, None, True


def _strides(executor: ThreadPoolExecutor, samples: Iterator[RawSample], coming: Future[Stride]) -> Iterator[RawSample]:
    most = FIRST_SAMPLES
    try:
        while True:
            read, fault, at_end = coming.result()
            if not at_end:
                most = min(2 * most, STRIDE_SAMPLES)
                coming = executor.submit(_stride, samples, most)
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
