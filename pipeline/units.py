"""Shards being read: the catalogue that the order asks for the samples of its units.

Local shards are read as the order asks. Remote ones are read ahead, a unit per lane, by a few threads: while one lane's next
samples are on their way, the others' are taken. The parts of a shard that one rank reads are fetched and unpacked once for all
of them. What a unit holds does not depend on it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from treadle.pipeline.order import Held, UnitBrokenError
from treadle.pipeline.samples import RawSample
from treadle.pipeline.shard_counts import ShardCounts
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.spool import Spools
from treadle.pipeline.storage import RetryPolicy, local_path

STRIDE_BYTES: Final = 2**19
"""Tar bytes of a unit that are read ahead at a time; a lane holds at most two such strides."""
FIRST_SAMPLES: Final = 4
STRIDE_SAMPLES: Final = 512
"""Samples of the first stride, and of the largest: strides double, so that a lane's first sample does not wait for many others."""
IO_THREADS: Final = 64
"""Most threads that read remote shards; parts of one shard wait for the same bytes, so that fewer would hold up other shards."""
MAX_SHARDS: Final = 4096
"""Shards whose connections and findings are kept for their next samples."""

Stride = tuple[list[RawSample], Exception | None, bool]
"""Samples, the fault that ended them, and whether the unit is at its end."""


class Units:
    """Reads the units of a stream's sources, for one of `world_size` ranks."""

    def __init__(
        self,
        urls: Sequence[Sequence[str]],
        *,
        world_size: int = 1,
        retry: RetryPolicy | None = None,
        counts: ShardCounts | None = None,
    ) -> None:
        """`urls` names each source's shards, in the manifest's order; `counts` gets what is skipped or odd in them."""
        self._urls = urls
        self._world_size = world_size
        self._retry = retry or RetryPolicy()
        self._counts = counts or ShardCounts()
        self._closing = threading.Event()
        self._spools = Spools()
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None

    def url(self, source: int, shard: int) -> str:
        """Where a shard is."""
        return self._urls[source][shard]

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[RawSample]:
        """The samples of a unit from `index` on; see `order.Catalogue`."""
        url = self.url(source, shard)
        # With as many ranks as parts, each rank reads one: nothing is there to share.
        spools = self._spools if parts > self._world_size else None
        samples = self._shard(url).samples(part=part, parts=parts, index=index, offset=offset, spools=spools)
        if local_path(url) is not None:
            return _directly(samples)
        executor = self._reading()
        # The first stride is under way before anyone asks for it.
        return _strides(executor, samples, executor.submit(_stride, samples, FIRST_SAMPLES))

    def fetch(self, url: str, held: Held) -> Future[RawSample] | None:
        """A remote sample known by reference, on its way; None where it is local and read in no time."""
        if local_path(url) is not None:
            return None
        return self._reading().submit(self._shard(url).sample_at, held.index, held.offset, held.size)

    def _shard(self, url: str) -> Shard:
        shard = self._shards.get(url)
        if shard is None:
            shard = self._shards[url] = Shard(url, policy=self._retry, counts=self._counts, closing=self._closing)
            if len(self._shards) > MAX_SHARDS:
                self._shards.popitem(last=False)[1].close()
        self._shards.move_to_end(url)
        return shard

    def _reading(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="treadle-read")
        return self._executor

    def interrupt(self) -> None:
        """Ends waits for broken storage, and what is being read: closing then waits for no one."""
        self._closing.set()

    def close(self) -> None:
        """Joins the reading threads and lets go of connections; nothing is read afterwards. Safe to call again."""
        self.interrupt()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        self._spools.close()
        while self._shards:
            self._shards.popitem()[1].close()


@lru_cache(maxsize=1024)
def _opened(url: str, retry: RetryPolicy | None) -> Shard:
    # A shard that has been looked at once is not asked again whether it is compressed.
    return Shard(url, policy=retry)


def read_sample(url: str, held: Held, retry: RetryPolicy | None = None) -> RawSample:
    """A sample known by reference.

    Raises:
        ShardError: it cannot be read.
    """
    return _opened(url, retry).sample_at(held.index, held.offset, held.size)


def _directly(samples: Iterator[RawSample]) -> Iterator[RawSample]:
    try:
        yield from samples
    except ShardError as error:
        raise UnitBrokenError(error) from error


def _stride(samples: Iterator[RawSample], most: int) -> Stride:
    read: list[RawSample] = []
    size = 0
    try:
        for sample in samples:
            read.append(sample)
            size += sample.size
            if size >= STRIDE_BYTES or len(read) >= most:
                return read, None, False
    except ShardError as error:
        return read, error, True
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
