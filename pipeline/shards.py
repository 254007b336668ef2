"""One shard: its samples in order, from any of them on, or one at a time.

A sample is a run of members with one key: the path up to the first dot of the basename; what follows that dot, in lower case,
names the field. Sample `i` begins at byte `offset` of the unpacked tar and ends where sample `i + 1` begins; members that are
skipped count to the sample before them. Where reading starts never changes what is read.

    storage --> unpack (gz, zst) --> tar members --> runs of one key --> RawSample

Parts of a shard share where its samples begin; one that is packed or remote is unpacked and fetched once for all of them
(`spool.py`).
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from os import getpid
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from treadle.pipeline.cache import ShardCache
from treadle.pipeline.grouping import Grouping, ShardError, whole_sample
from treadle.pipeline.raw_sample import RawField, RawSample, sizes_of
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.sample_table import BoundedStream, SampleTable, local_table
from treadle.pipeline.shard_counts import ShardCounts
from treadle.pipeline.spool import Spools, SpoolStream
from treadle.pipeline.storage import SHORTAGES, ByteStream, LocalStream, RemoteStream, StorageError, local_path, open_stream
from treadle.pipeline.sub_lane import Held
from treadle.pipeline.tar import CHUNK_BYTES, MAX_MEMBER_BYTES, MemberReader, TarError
from treadle.pipeline.tar_header import BLOCK_BYTES, TAR_KINDS, is_header
from treadle.pipeline.unpack import Peekable, UnpackedStream, UnpackError, unpacked

if TYPE_CHECKING:
    from treadle.pipeline.connections import Connections

__all__ = ["RawField", "RawSample", "Shard", "ShardError"]

MAX_IDLE = 64
"""Streams kept open between single samples."""

_PACKED_SUFFIXES = (".gz", ".tgz", ".zst", ".tzst", ".zstd")


class _Nothing(ByteStream):
    """No bytes."""

    def read(self, n: int) -> bytes:
        return b""

    def close(self) -> None:
        """Nothing is open."""


def _slices(url: str, max_member_bytes: int) -> MemberReader:
    """A reader for parts of a shard that are in memory."""
    return MemberReader(_Nothing(url, 0), max_member_bytes=max_member_bytes)


class _Idle:
    """Streams that single samples were read from, for the next ones of the same shard: connections, and places in packed shards."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[int, str, threading.Event | None, int], ByteStream] = OrderedDict()
        self._lock = threading.Lock()
        self._count = 0

    def take(self, url: str, closing: threading.Event | None, packed: bool, offset: int) -> ByteStream | None:
        """A stream of that shard that serves at `offset`; the furthest on, where it can only go forward."""
        here = getpid(), url, closing
        with self._lock:
            fitting = [
                (stream.position, key[-1])
                for key, stream in self._streams.items()
                if key[:-1] == here and isinstance(stream, UnpackedStream) == packed and (not packed or stream.position <= offset)
            ]
            return self._streams.pop((*here, max(fitting)[1])) if fitting else None

    def put(self, stream: ByteStream, closing: threading.Event | None) -> None:
        """Keeps a stream until `MAX_IDLE` later ones have come; only readers that stop with it may have it."""
        with self._lock:
            self._count += 1
            self._streams[getpid(), stream.url, closing, self._count] = stream
            while len(self._streams) > MAX_IDLE:
                self._streams.popitem(last=False)[1].close()

    def drop(self, url: str, closing: threading.Event | None) -> None:
        """Closes the streams of a shard."""
        with self._lock:
            for key in [key for key in self._streams if key[1:-1] == (url, closing)]:
                self._streams.pop(key).close()


_idle = _Idle()


class Shard:
    """One shard, by its URL. Nothing is opened before it is read.

    Args:
        url: a path, or a URL that `open_stream` opens.
        policy: how broken reads are tried again.
        max_member_bytes: a longer file refuses its sample as `too_large`.
        counts: where to count what was skipped, and to warn of it; its own by default.
        closing: once set, a remote read gives up.
        connections: where connections to HTTP servers wait between requests.
        cache: where a remote shard is kept when it is read whole, and looked for first.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: RetryPolicy | None = None,
        max_member_bytes: int = MAX_MEMBER_BYTES,
        counts: ShardCounts | None = None,
        closing: threading.Event | None = None,
        connections: "Connections | None" = None,
        cache: ShardCache | None = None,
    ) -> None:
        self.url = url
        self._cache = cache if local_path(url) is None else None
        self._policy = policy or RetryPolicy()
        self._max_member_bytes = max_member_bytes
        self._counts = counts or ShardCounts()
        self._closing = closing
        self._connections = connections
        self._packed: bool | None = None

    @property
    def counts(self) -> Counter[str]:
        """Members skipped and warnings, by kind, as far as any one reading got: `skipped_*`, `no_end_marker`, `key_seen_again`."""
        return self._counts.of(self.url)

    def samples(
        self, *, part: int = 0, parts: int = 1, index: int = 0, offset: int = 0, spools: Spools | None = None
    ) -> Iterator[RawSample]:
        """The samples whose index is `part` modulo `parts`, from sample `index` on, which begins at byte `offset`.

        Args:
            spools: where the parts of shards meet; what has to be fetched or unpacked is then spooled, once for all of them.

        Raises:
            ShardError: after every complete sample before a damage, or before what cannot be read.
        """
        with closing(self.runs(part=part, parts=parts, index=index, offset=offset, spools=spools)) as runs:
            for run in runs:
                yield from cast(Sequence[RawSample], run)

    def runs(
        self, *, part: int = 0, parts: int = 1, index: int = 0, offset: int = 0, spools: Spools | None = None, references: bool = False
    ) -> Generator[Sequence[RawSample | Held], None, None]:
        """`samples` in lists, as they came into memory together.

        Args:
            references: the large ones of a plain local shard in parts by reference alone: whoever decodes one reads it, and nobody
                holds it before.

        Raises:
            ShardError: as `samples`.
        """
        if not 0 <= part < parts or index < 0 or offset < 0:
            raise ValueError(f"part {part} of {parts} from sample {index} at byte {offset}: part must lie below parts, none be negative")
        if parts > 1:
            path = local_path(self.url)
            if path is not None and not self._is_packed():
                yield from self._plain_local(path, part, parts, index, offset, references)
                return
            if spools is not None:
                yield from self._spooled(spools, part, parts, index, offset)
                return
        yield from self._forward(part, parts, index, offset)

    def _forward(self, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[RawSample]]:
        counts: Counter[str] = Counter()
        stream = self._open(offset)
        try:
            reader = MemberReader(
                stream, offset=offset, want=lambda member: grouping.wanted(member), max_member_bytes=self._max_member_bytes
            )
            grouping = Grouping(reader, counts, index=index, part=part, parts=parts)
            yield from grouping.runs()
        finally:
            stream.close()
            self._counts.note(self.url, counts)

    def sample_at(self, index: int, offset: int, size: int) -> RawSample:
        """Sample `index`, which takes `size` bytes from `offset`. In a packed shard, ask in ascending order: going back starts anew.

        Raises:
            ShardError: it cannot be read, or is not there.
        """
        if self._presumed_plain():
            try:
                return self._sample_at(False, index, offset, size)
            except ShardError as error:
                if error.kind != "changed" or not self._is_packed():
                    raise
        return self._sample_at(self._is_packed(), index, offset, size)

    @property
    def looks_packed(self) -> bool:
        """Whether it is gz or zst, as far as its name tells and what has been read of it."""
        return urlsplit(self.url).path.lower().endswith(_PACKED_SUFFIXES) if self._packed is None else self._packed

    def samples_at(self, places: Sequence[tuple[int, int, int]]) -> dict[int, RawSample | ShardError]:
        """Samples (index, offset, size), in ascending order, by index: with one request where the shard is plain, in one go where it is packed.

        One that cannot be read is an error, as `sample_at` raises it.
        """
        found: dict[int, RawSample | ShardError] = {}
        if len(places) > 1 and not self.looks_packed:
            start, stop = places[0][1], places[-1][1] + places[-1][2]
            try:
                with self._stream(start, stop - start) as stream:
                    slices = _slices(self.url, self._max_member_bytes)
                    for index, offset, size in places:
                        stream.skip(offset - stream.position)
                        found[index] = self._one(stream, slices, index, offset, size)
            except (ShardError, StorageError):
                # Told by whoever is read alone, after another try.
                pass
        for index, offset, size in places:
            if index not in found:
                try:
                    found[index] = self.sample_at(index, offset, size)
                except ShardError as error:
                    found[index] = error
        return found

    def close(self) -> None:
        """Lets go of connections that `sample_at` left open for the next one."""
        _idle.drop(self.url, self._closing)

    def _sample_at(self, packed: bool, index: int, offset: int, size: int) -> RawSample:
        stream: ByteStream | None = None
        done = False
        try:
            stream = self._at(packed, offset, size)
            sample = self._one(stream, _slices(self.url, self._max_member_bytes), index, offset, size)
            done = True
            return sample
        except (StorageError, UnpackError) as error:
            raise ShardError(error.kind, error.offset, error.detail) from None
        finally:
            if done and stream is not None and not isinstance(stream, LocalStream):
                _idle.put(stream, self._closing)
            elif stream is not None:
                stream.close()

    def _at(self, packed: bool, offset: int, size: int) -> ByteStream:
        """A stream at `offset`, one that was left open where that serves."""
        idle = _idle.take(self.url, self._closing, packed, offset)
        if isinstance(idle, RemoteStream):
            idle.aim(offset, size)
            return idle
        if packed:
            stream = idle or unpacked(self._stream())
            stream.skip(offset - stream.position)
            return stream
        return self._stream(offset, size)

    def _one(self, stream: ByteStream, slices: MemberReader, index: int, offset: int, size: int) -> RawSample:
        """The sample at a stream's position."""
        sample = None
        if size <= CHUNK_BYTES:
            data = stream.read(size)
            if len(data) == size:
                try:
                    sample = whole_sample(slices, data, index, offset)
                except TarError as error:
                    raise ShardError("changed", offset, f"sample {index} is not there any more: {error}") from None
        else:
            # A long one is gathered member by member, so that its bytes are not held twice.
            reader = MemberReader(BoundedStream(stream, offset, offset + size), offset=offset, max_member_bytes=self._max_member_bytes)
            try:
                found = list(Grouping(reader, Counter(), index=index).samples())
            except ShardError as error:
                if error.kind not in TAR_KINDS:
                    raise
                raise ShardError("changed", offset, f"sample {index} is not there any more: {error}") from None
            sample = replace(found[0], size=size) if len(found) == 1 and found[0].offset == offset else None
        if sample is None:
            raise ShardError("changed", offset, f"bytes {offset} to {offset + size} do not hold sample {index} any more")
        return sample

    def _stream(self, offset: int = 0, length: int | None = None) -> ByteStream:
        if self._cache is not None:
            return self._cache.open(self.url, self._store, offset, length)
        return open_stream(self.url, offset, policy=self._policy, length=length, closing=self._closing, connections=self._connections)

    def _store(self, offset: int, length: int | None) -> RemoteStream:
        stream = open_stream(self.url, offset, policy=self._policy, length=length, closing=self._closing, connections=self._connections)
        assert isinstance(stream, RemoteStream)
        return stream

    def _plain_local(
        self, path: str, part: int, parts: int, index: int, offset: int, references: bool
    ) -> Iterator[Sequence[RawSample | Held]]:
        try:
            table = local_table(path, index, offset)
            stream = LocalStream(self.url, path)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            raise ShardError("not_found" if isinstance(error, FileNotFoundError) else "unreadable", offset, str(error)) from None
        except StorageError as error:
            raise ShardError(error.kind, offset, error.detail) from None
        yield from self._located(table, stream, part, parts, index, references)

    def _spooled(self, spools: Spools, part: int, parts: int, index: int, offset: int) -> Iterator[Sequence[RawSample | Held]]:
        shared = spools.join(self.url, self._open, index, offset)
        try:
            yield from self._located(shared.table, SpoolStream(shared.spool, offset), part, parts, index, False)
        finally:
            spools.leave(shared)

    def _located(
        self, table: SampleTable, stream: ByteStream, part: int, parts: int, index: int, references: bool
    ) -> Iterator[Sequence[RawSample | Held]]:
        slices = _slices(self.url, self._max_member_bytes)
        whole_bytes = min(CHUNK_BYTES, self._max_member_bytes)
        table.join()
        try:
            index += (part - index) % parts
            while (found := table.window(index, stream)) is not None:
                window, samples = found
                mine = None if samples is None else samples[index - window.first :: parts]
                if mine and max(sizes_of(mine)) <= whole_bytes:
                    yield mine
                    index += parts * len(mine)
                    continue
                for place in range(index - window.first, window.count, parts):
                    if samples is not None and (sample := samples[place]).size <= whole_bytes:
                        yield [sample]
                    elif references:
                        start, end = table.span(index)
                        yield [Held(index, start, end - start)]
                    else:
                        start, end = table.span(index)
                        stream.position = start
                        yield [self._one(stream, slices, index, start, end - start)]
                    index += parts
        except (StorageError, UnpackError) as error:
            raise ShardError(error.kind, error.offset, error.detail) from None
        finally:
            table.leave()
            stream.close()
            self._counts.note(self.url, table.counted())

    def _presumed_plain(self) -> bool:
        """Whether to read it as a plain tar until that fails: the name says so, and nothing has been looked at."""
        return self._packed is None and urlsplit(self.url).path.lower().endswith(".tar") and local_path(self.url) is None

    def _is_packed(self) -> bool:
        """Whether the shard is gz or zst: by its name, else by its first bytes.

        Raises:
            ShardError: they cannot be read.
        """
        if self._packed is None:
            if urlsplit(self.url).path.lower().endswith(_PACKED_SUFFIXES):
                self._packed = True
            else:
                try:
                    with self._stream(length=8) as stream:
                        self._packed = isinstance(unpacked(stream), UnpackedStream)
                except StorageError as error:
                    raise ShardError(error.kind, error.offset, error.detail) from None
        return self._packed

    def _open(self, offset: int) -> ByteStream:
        """The unpacked tar from `offset` on."""
        try:
            if offset and self._presumed_plain():
                # Saves a request for the first bytes: at `offset` a plain tar has a header.
                stream = Peekable(self._stream(offset))
                with suppress(StorageError):
                    if is_header(stream.peek(BLOCK_BYTES)):
                        return stream
                stream.close()
            if offset and not self._is_packed():
                return self._stream(offset)
            start = unpacked(self._stream())
            self._packed = isinstance(start, UnpackedStream)
            if start.skip(offset) < offset:
                raise StorageError("changed", offset, f"byte {offset} was to be read; the shard ends before it")
            return start
        except (StorageError, UnpackError) as error:
            raise ShardError(error.kind, offset, error.detail) from None
