"""Shards being read: the catalogue that the order asks for the samples of its units.

Local shards are read as the order asks. Remote ones are read ahead, a unit per lane, by a few threads: while one lane's next
samples are on their way, the others' are taken. The parts of a shard that one rank reads are fetched and unpacked once for all
of them. What a unit holds does not depend on it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from treadle.pipeline.cache import ShardCache
from treadle.pipeline.order import Held, Located, Ref, UnitBrokenError
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.samples import RawSample
from treadle.pipeline.shard_counts import ShardCounts
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.spool import Spools
from treadle.pipeline.storage import local_path, scheme_of

if TYPE_CHECKING:
    from treadle.pipeline.connections import Connections

STRIDE_BYTES: Final = 2**19
"""Tar bytes of a unit that are read ahead at a time; a lane holds at most two such strides."""
FIRST_SAMPLES: Final = 4
STRIDE_SAMPLES: Final = 512
"""Samples of the first stride, and of the largest: strides double, so that a lane's first sample does not wait for many others."""
GAP_BYTES: Final = 2**16
"""Samples no further apart are fetched with one request: what that is at 20 ms and some megabytes a second."""
RUN_BYTES: Final = 2**17
"""Most bytes that are fetched with one request for samples known by reference."""
IO_THREADS: Final = 64
"""Most threads that read remote shards; parts of one shard wait for the same bytes, so that fewer would hold up other shards."""
MAX_SHARDS: Final = 4096
"""Shards whose connections and findings are kept for their next samples."""

Stride = tuple[list[RawSample], Exception | None, bool]
"""Samples, the fault that ended them, and whether the unit is at its end."""


class Coming:
    """A sample of a run that is on its way."""

    def __init__(self, run: Future[dict[int, RawSample | ShardError]], index: int) -> None:
        self._run = run
        self._index = index

    def result(self) -> RawSample:
        """The sample, once it is there.

        Raises:
            ShardError: it cannot be read.
        """
        # Taken out: what was asked for once is not held any longer.
        found = self._run.result().pop(self._index)
        if isinstance(found, ShardError):
            raise found
        return found


class _Run:
    """Samples of one shard that lie close together, or of a packed shard, which is unpacked once for all of them."""

    def __init__(self, shard: Shard, start: int) -> None:
        self._shard = shard
        self._held: list[Held] = []
        self.start = self.end = start
        self.future: Future[dict[int, RawSample | ShardError]] | None = None

    def add(self, held: Held) -> None:
        self._held.append(held)
        self.end = held.offset + held.size

    def read(self) -> dict[int, RawSample | ShardError]:
        return self._shard.samples_at([(held.index, held.offset, held.size) for held in self._held])


class Units:
    """Reads the units of a stream's sources, for one of `world_size` ranks."""

    def __init__(
        self,
        urls: Sequence[Sequence[str]],
        *,
        world_size: int = 1,
        retry: RetryPolicy | None = None,
        counts: ShardCounts | None = None,
        cache: ShardCache | None = None,
    ) -> None:
        """`urls` names each source's shards, in the manifest's order; `counts` gets what is skipped or odd in them."""
        self._cache = cache
        self._urls = urls
        self._world_size = world_size
        self._retry = retry or RetryPolicy()
        self._counts = counts or ShardCounts()
        self._closing = threading.Event()
        self._spools = Spools()
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None
        self._runs: dict[tuple[str, int], _Run] = {}
        self._connections: Connections | None = None
        self.waited_s = 0.0
        """Seconds that whoever reads has waited for remote shards."""

    def url(self, source: int, shard: int) -> str:
        """Where a shard is."""
        return self._urls[source][shard]

    def read(self, source: int, shard: int, *, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[Located]]:
        """The samples of a unit from `index` on; see `order.Catalogue`."""
        url = self.url(source, shard)
        # With as many ranks as parts, each rank reads one: nothing is there to share.
        spools = self._spools if parts > self._world_size else None
        found = self._shard(url)
        if local_path(url) is not None:
            return _directly(found, part, parts, index, offset, spools)
        samples = found.samples(part=part, parts=parts, index=index, offset=offset, spools=spools)
        executor = self._reading()
        # The first stride is under way before anyone asks for it.
        return self._strides(executor, samples, executor.submit(_stride, samples, FIRST_SAMPLES))

    def expect(self, references: Iterable[tuple[int, Ref]]) -> None:
        """Samples, each with its source, that `fetch` will be asked for: neighbours are then fetched together."""
        by_shard: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
        for source, (number, index, offset, size) in references:
            by_shard.setdefault((source, number), set()).add((offset, index, size))
        for (source, number), found in by_shard.items():
            url = self._urls[source][number]
            shard = self._shard(url)
            packed = shard.looks_packed
            if local_path(url) is not None and not packed:
                continue
            run: _Run | None = None
            for offset, index, size in sorted(found):
                if run is None or (not packed and (offset - run.end > GAP_BYTES or offset + size - run.start > RUN_BYTES)):
                    run = _Run(shard, offset)
                run.add(Held(index, offset, size))
                self._runs[url, index] = run

    def fetch(self, url: str, held: Held) -> "Future[RawSample] | Coming | None":
        """A remote sample known by reference, on its way; None where it is local and read in no time."""
        run = self._runs.pop((url, held.index), None)
        if run is not None:
            if run.future is None:
                run.future = self._reading().submit(run.read)
            return Coming(run.future, held.index)
        if local_path(url) is not None:
            return None
        return self._reading().submit(self._shard(url).sample_at, held.index, held.offset, held.size)

    def _strides(self, executor: ThreadPoolExecutor, samples: Iterator[RawSample], coming: Future[Stride]) -> Iterator[Sequence[RawSample]]:
        most = FIRST_SAMPLES
        try:
            while True:
                begun = time.perf_counter()
                read, fault, at_end = coming.result()
                self.waited_s += time.perf_counter() - begun
                if not at_end:
                    most = min(2 * most, STRIDE_SAMPLES)
                    coming = executor.submit(_stride, samples, most)
                if read:
                    yield read
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

    def _shard(self, url: str) -> Shard:
        shard = self._shards.get(url)
        if shard is None:
            if self._connections is None and scheme_of(url) in ("http", "https"):
                from treadle.pipeline.connections import Connections

                self._connections = Connections()
            shard = self._shards[url] = Shard(
                url, policy=self._retry, counts=self._counts, closing=self._closing, connections=self._connections, cache=self._cache
            )
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
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._spools.close()
        while self._shards:
            self._shards.popitem()[1].close()
        if self._connections is not None:
            self._connections.close()


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


def _directly(shard: Shard, part: int, parts: int, index: int, offset: int, spools: Spools | None) -> Iterator[Sequence[Located]]:
    try:
        yield from shard.runs(part=part, parts=parts, index=index, offset=offset, spools=spools, references=True)
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
