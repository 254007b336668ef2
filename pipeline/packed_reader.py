"""Reads shards of packed batches: dealt to ranks by lanes, and going on from any position.

The batches of `P` parts are numbered across them: batch `k` of part `p` is number `k * P + p`. Lane `l` of `L` holds the
numbers that are `l` modulo `L`, a multiple of `P`; rank `r` of `W` owns the lanes that are `r` modulo `W` and takes from
the one with the smallest (epoch, batches taken in it, lane). One rank reads everything in order; as many ranks as parts
read a part each, which is what their streams would have packed; and any other number shares all batches.
"""

import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.batch_file import batch_from_bytes
from treadle.pipeline.layout import batch_layout
from treadle.pipeline.packed_index import (
    BLOCK_BYTES,
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SUFFIX,
    PackedIndex,
    header_check,
    index_name,
    state_digest,
    tar_header,
)
from treadle.pipeline.recycle import Recycler
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.storage import ByteStream, LocalStream, StorageError, open_stream, public_url
from treadle.pipeline.tensor_file import PackedError
from treadle.shape import require_choice, require_count, require_member, shown

if TYPE_CHECKING:
    from treadle.pipeline.sources import Manifest
    from treadle.pipeline.state import StreamState

logger = logging.getLogger(__name__)

FORMAT_NAME = "treadle.packed_position"
DEFAULT_LANES = 64
MAX_SKIP_BYTES = 1 << 22
"""Bytes that are read and thrown away rather than asked for anew."""


class Records(Protocol):
    """Where a reader tells what it skipped."""

    def record(self, *, url: str, key: str, member: str, offset: int, kind: str, reason: str) -> None:
        """Counts and logs one thing that was skipped."""


class PackedReader:
    """Iterates the packed batches of shards, each with the position just after it as `batch.state`.

    Where as many ranks read as packed, once or without end, a batch carries the state of the stream that packed it: a `ShardStream` over
    the samples could go on from it. Otherwise the state is a position in the packed shards. `load_state` takes either, of one rank or
    merged.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        lanes: int = 0,
        epochs: int | None = 1,
        on_error: Literal["raise", "quarantine"] = "raise",
        quarantine: Records | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """
        Args:
            urls: a folder with an index (a path or a URL), or shards: a pattern or a list of URLs, for one rank and one pass.
            rank: this process among those that share the batches.
            world_size: how many share them.
            lanes: sequences that the batches are dealt to; 0 derives 64, or what ranks and parts need. A loaded state brings its own.
            epochs: passes over the batches; None never ends.
            on_error: "quarantine" skips a damaged batch, or the rest of a damaged shard, and counts it.
            quarantine: also told what was skipped.
            retry: how a broken read is tried again.

        Raises:
            ValueError: an argument is none of its values, or the folder has no index.
            PackedError: the index is malformed.
            StorageError: the index cannot be read.
        """
        require_choice("PackedReader", "on_error", on_error, ("raise", "quarantine"))
        world_size = require_count("PackedReader", "world_size", world_size, 1)
        rank = require_count("PackedReader", "rank", rank, 0, world_size - 1)
        lanes = require_count("PackedReader", "lanes", lanes, 0)
        epochs = None if epochs is None else require_count("PackedReader", "epochs", epochs, 1)
        if quarantine is not None and not callable(getattr(quarantine, "record", None)):
            raise ValueError(f"PackedReader.quarantine is {shown(quarantine)}: it must be a Quarantine, or what records like one, or None")
        require_member("PackedReader", "retry", retry, RetryPolicy, optional=True)
        self.rank, self.world_size, self.epochs = rank, world_size, epochs
        self.on_error, self.quarantine = on_error, quarantine
        self.counts: Counter[str] = Counter()
        """What was skipped, by kind."""
        self.index: PackedIndex | None = None
        self._retry = retry
        self.shards = self._shards_of(urls)
        """URLs of the shards, in order."""
        if self.index is None and (world_size > 1 or epochs != 1):
            raise ValueError(
                f"PackedReader.world_size is {world_size} and epochs {epochs}: shards without an index cannot be shared or repeated; "
                "give their folder"
            )
        parts = self.index.parts if self.index is not None else 1
        self._explicit_lanes = lanes
        self.lanes = self._settled(lanes or parts * max(1, DEFAULT_LANES // parts, -(-world_size // parts)))
        """Sequences that the batches are dealt to."""
        self._lanes: dict[int, tuple[int, int, int]] = {}
        self._stand({})
        # Over several epochs, but not endlessly, a position must say which one it is in, and a stream's state does not.
        self._carries_streams = world_size == parts and epochs in (None, 1)
        """Whether batches carry the states of the streams that packed them."""
        self._position = 0
        self._state: StreamState | None = None
        self._streams: dict[int, tuple[int, ByteStream]] = {}
        self._broken: set[int] = set()
        self._scratch = bytearray()
        self._recycler = None if self.index is None else Recycler(batch_layout(self.index.shape, self.index.capacities.edges))

    def _settled(self, lanes: int) -> int:
        parts = self.index.parts if self.index is not None else 1
        if lanes % parts or lanes < self.world_size:
            raise ValueError(
                f"PackedReader.lanes is {lanes}: it must be a multiple of the {parts} parts that were packed, and at least world_size, "
                f"{self.world_size}"
            )
        return lanes

    def _shards_of(self, urls: str | os.PathLike[str] | Sequence[str]) -> list[str]:
        if isinstance(urls, str | os.PathLike):
            base = os.fspath(urls)
            folder = base.removesuffix(INDEX_NAME).rstrip("/") or "/"
            if base.endswith(INDEX_NAME) or os.path.isdir(base) or ("://" in base and not base.endswith((".tar", "}")) and "*" not in base):
                self.index = _index_of(folder, self._retry)
                return [f"{folder}/{shard.name}" for shard in self.index.shards]
            urls = base
        if isinstance(urls, bytes | Mapping) or not isinstance(cast(object, urls), Iterable):
            raise ValueError(f"PackedReader.urls is {shown(urls)}: it must be a folder, a URL, a pattern, or a list of them")
        from treadle.pipeline.sources import expand_urls

        return list(expand_urls(urls))

    def __len__(self) -> int:
        """Batches in all shards, of all ranks.

        Raises:
            TypeError: there is no index that counts them.
        """
        if self.index is None:
            raise TypeError("these shards were given without an index: their batches are not counted")
        return self.index.batches

    @property
    def state(self) -> "StreamState | None":
        """The position just after the last batch handed out; None where there is no index and no batch has come."""
        if self._state is None and self.index is not None:
            # Before the first batch too it is of the kind that the other ranks' batches carry: states of one kind merge.
            return (self._stream_state() if self._carries_streams else None) or self._own_state()
        return self._state

    def _stream_state(self) -> "StreamState | None":
        """The state of the stream that packed this rank's part where its lanes stand, if the batches carry any."""
        assert self.index is not None
        taken = sum(taken for epoch, taken, _ in self._lanes.values() if not epoch)
        if taken:
            return self._carried(self.rank, taken - 1)
        part = next((part for part, ends in enumerate(self.index.ends_of) if ends), None)
        first = None if part is None else self._carried(part, 0)
        if first is None:
            return None
        from treadle.pipeline.packer import Packer
        from treadle.pipeline.state import StreamState, start_columns

        sources = len(first.manifest.sources)
        packer = Packer(self.index.shape, max_edges=self.index.capacities.edges)
        columns = start_columns(first.lanes, sources, self.rank, self.world_size)
        return StreamState.of_rank(first.manifest_json, self.rank, self.world_size, columns, (), packer.snapshot())

    def _carried(self, part: int, place: int) -> "StreamState | None":
        """The state that a batch carries; None where it carries none, or cannot be read: iterating tells that."""
        assert self.index is not None
        ends = self.index.ends_of[part]
        nth = bisect_right(ends, place)
        number = self.index.shards_of[part][nth]
        offset, size = self.index.shards[number].place(place - (ends[nth - 1] if nth else 0))
        try:
            with open_stream(self.shards[number], offset + BLOCK_BYTES, policy=self._retry, length=size) as stream:
                return batch_from_bytes(stream.read(size)).state
        except (PackedError, StorageError):
            return None

    def _manifest(self) -> "Manifest":
        from treadle.pipeline.sources import Manifest, ManifestSource

        assert self.index is not None
        names = [shard.name for shard in self.index.shards]
        options = {"format": FORMAT_NAME, "parts": self.index.parts, "digest": ManifestSource.of(names).digest}
        source = ManifestSource.of(["packed"])
        return Manifest(sources=(source,), seed=0, lanes=self.lanes, shuffle=0, shuffle_bytes=0, epochs=self.epochs, options=options)

    def _own_state(self) -> "StreamState":
        """This rank's position in the packed shards."""
        from treadle.pipeline.state import StreamState, columns_of

        lanes = sorted(self._lanes)
        cursors = [(lane, taken, 0, draws, taken, epoch, False) for lane, (epoch, taken, draws) in sorted(self._lanes.items())]
        pools: list[list[Any]] = [[] for _ in lanes]
        standing = ([self._lanes[lane][2] for lane in lanes], cursors, pools)
        return StreamState.of_rank(
            self._manifest().to_json(), self.rank, self.world_size, lambda: columns_of(lanes, lambda: standing), (), dict[str, Any]
        )

    def _stand(self, positions: "dict[int, tuple[int, int, int]]") -> None:
        """Takes over where this rank's lanes stand: epoch, batches taken in it, batches taken ever."""
        self._lanes = {lane: positions.get(lane, (0, 0, 0)) for lane in range(self.rank, self.lanes, self.world_size)}

    def load_state(self, state: "StreamState | bytes") -> None:
        """Goes on after the batch that carries `state`, or, with the merged states of all ranks, after all of theirs.

        Raises:
            ValueError: no batch of the index carries it, or it does not hold what this rank needs.
        """
        from treadle.pipeline.state import StreamState

        if isinstance(state, bytes | bytearray | memoryview):
            state = StreamState.from_bytes(state)
        require_member("PackedReader.load_state", "state", state, StreamState)
        if self.index is None:
            raise ValueError(
                "no batch of these packed shards carries this stream state: they were given without an index; give their folder"
            )
        manifest = state.manifest
        if manifest.options.get("format") == FORMAT_NAME:
            self.lanes = self._settled(self._explicit_lanes or state.lanes)
            found = self._manifest().differences(manifest)
            if found:
                raise ValueError("the state belongs to other packed shards (theirs is not the state's): " + "; ".join(found))
            share = state.deal(self.rank, self.world_size)
            own = range(self.rank, self.lanes, self.world_size)
            self._stand({lane: (cursor[5], cursor[4], cursor[3]) for lane, cursor in zip(own, share.cursors, strict=True)})
            # A part may have been left with gaps, which a stream's state cannot say; and the states of all ranks must stay of one kind.
            self._carries_streams = False
        else:
            self._stand(self._after_stream_state(state))
            self._carries_streams = self.world_size == self.index.parts and self.epochs in (None, 1)
        self._state = state if state.ranks == (self.rank,) and state.world_size == self.world_size else None
        self._close_streams()

    def _after_stream_state(self, state: "StreamState") -> dict[int, tuple[int, int, int]]:
        """Where the lanes stand after the batches that carry a packing stream's states."""
        assert self.index is not None
        parts = self.index.parts
        if state.world_size != parts:
            raise ValueError(
                f"the state is of {state.world_size} ranks, and these batches were packed as {parts}: it belongs to other data"
            )
        needed = [self.rank] if self.world_size == parts else list(range(parts))
        missing = sorted(set(needed) - set(state.ranks))
        if missing:
            raise ValueError(
                f"this reader is rank {self.rank} of {self.world_size}, and the state is of {list(state.ranks)} of {parts}: load the rank's "
                "own state, or those of all ranks merged with StreamState.merge"
            )
        positions: dict[int, tuple[int, int, int]] = {}
        stride = self.lanes // parts
        for part in needed:
            share = state.deal(part, parts)
            if sum(share.lane_draws) == 0 and not share.pending:
                continue
            at = self.index.batch_of_state.get(state_digest(state, part))
            if at is None:
                raise ValueError("no batch of these packed shards carries this stream state: it belongs to other data")
            consumed = at[1] + 1
            for place in range(stride):
                # Of the part's first `consumed` batches, this lane holds those that are `place` modulo `stride`.
                taken = len(range(place, consumed, stride))
                positions[part + place * parts] = (0, taken, taken)
        return positions

    def __iter__(self) -> Iterator[PackedBatch]:
        if self.index is None:
            yield from self._without_index()
            return
        while (lane := self._next_lane()) is not None:
            epoch, taken, draws = self._lanes[lane]
            number = lane + taken * self.lanes
            self._lanes[lane] = (epoch, taken + 1, draws + 1)
            self._state = None
            batch = self._at(number % self.index.parts, number // self.index.parts)
            if batch is None:
                continue
            if not self._carries_streams or batch.state is None:
                batch.state = self._own_state()
            self._state = batch.state
            yield batch

    def _next_lane(self) -> int | None:
        """The lane whose turn it is; lanes at their end begin their next epoch."""
        best: tuple[int, int, int] | None = None
        for lane, (epoch, taken, draws) in self._lanes.items():
            held = self._batches_of(lane)
            if not held:
                continue
            if taken >= held:
                epoch, taken = epoch + 1, 0
                if self.epochs is not None and epoch >= self.epochs:
                    continue
                self._lanes[lane] = (epoch, taken, draws)
                self._broken.clear()
            if best is None or (epoch, taken, lane) < best:
                best = (epoch, taken, lane)
        return None if best is None else best[2]

    def _batches_of(self, lane: int) -> int:
        assert self.index is not None
        ends = self.index.ends_of[lane % self.index.parts]
        return len(range(lane // self.index.parts, ends[-1] if ends else 0, self.lanes // self.index.parts))

    def _at(self, part: int, place: int) -> PackedBatch | None:
        """One batch of a part; None where it is damaged and skipped."""
        assert self.index is not None
        ends = self.index.ends_of[part]
        nth = bisect_right(ends, place)
        shard_number = self.index.shards_of[part][nth]
        shard, within = self.index.shards[shard_number], place - (ends[nth - 1] if nth else 0)
        url, key = self.shards[shard_number], f"{within:08d}"
        if shard_number in self._broken:
            return None
        offset, size = shard.place(within)
        try:
            data = self._read(part, shard_number, offset, BLOCK_BYTES + size)
        except StorageError as error:
            self._broken.add(shard_number)
            self._skip(url, "", error.offset, "unreadable", f"{error.kind}: {error.detail}", error)
            return None
        try:
            if len(data) < BLOCK_BYTES + size:
                self._broken.add(shard_number)
                key = ""
                raise PackedError("truncated", f"it ends at byte {offset + len(data)}, inside batch {within} of {shard.batches}")
            view = data[BLOCK_BYTES:]
            if bytes(data[:BLOCK_BYTES]) != tar_header(within, size) or header_check(view) != shard.checks[within]:
                raise PackedError("corrupt", "this is not the batch that the index describes: it was altered, or the shard is another")
            batch = batch_from_bytes(view, self._recycler)
            if (batch.shape, batch.capacities) != (self.index.shape, self.index.capacities):
                raise PackedError("mismatch", "its shape is not the index's")
        except PackedError as error:
            self._skip(url, key, offset, error.kind, error.detail, error)
            return None
        return batch

    def _read(self, part: int, shard_number: int, offset: int, size: int) -> memoryview:
        """Bytes of a shard, from the stream that is open there, or from another."""
        number, stream = self._streams.pop(part, (-1, None))
        if stream is not None and (number != shard_number or not 0 <= offset - stream.position <= MAX_SKIP_BYTES):
            stream.close()
            stream = None
        if stream is None:
            stream = open_stream(self.shards[shard_number], offset, policy=self._retry)
        try:
            data = self._into_scratch(stream, offset, size) if isinstance(stream, LocalStream) else _forward(stream, offset, size)
        except BaseException:
            stream.close()
            raise
        self._streams[part] = (shard_number, stream)
        return data

    def _into_scratch(self, stream: LocalStream, offset: int, size: int) -> memoryview:
        """Bytes of a local file, in memory that the next read uses again: fresh memory costs as much as the copy."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size + size // 8)
        view, read = memoryview(self._scratch)[:size], 0
        try:
            while read < size and (more := os.preadv(stream.fileno(), [view[read:]], offset + read)):
                read += more
        except OSError as error:
            raise StorageError("unreadable", offset + read, str(error)) from None
        stream.position = offset + read
        return view[:read]

    def _without_index(self) -> Iterator[PackedBatch]:
        """Shards as they come: what each holds is found out by reading it."""
        from treadle.pipeline.shards import Shard, ShardError

        while self._position < len(self.shards):
            url = self.shards[self._position]
            self._position += 1
            try:
                for sample in Shard(url).samples():
                    try:
                        if len(sample.fields) != 1 or sample.fields[0].name != SUFFIX:
                            raise PackedError("corrupt", f"{sample.key}: a packed shard holds one .{SUFFIX} file per batch")
                        batch = batch_from_bytes(sample.fields[0].data)
                    except PackedError as error:
                        self._skip(url, sample.key, sample.offset, error.kind, error.detail, error)
                        continue
                    self._state = batch.state
                    yield batch
            except ShardError as error:
                kind = "truncated" if error.kind.startswith("truncated") else "corrupt"
                self._skip(url, "", error.offset, kind, str(error), error)

    def _skip(self, url: str, key: str, offset: int, kind: str, reason: str, error: Exception) -> None:
        url = public_url(url)
        if self.on_error == "raise":
            raise PackedError(kind, f"{url}{f', batch {key}' if key else ''}: {reason}") from error
        logger.warning("%s: skipped %s: %s: %s", url, key or "the rest of the shard", kind, reason)
        self.counts[kind] += 1
        if self.quarantine is not None:
            self.quarantine.record(url=url, key=key, member=f"{key}.{SUFFIX}" if key else "", offset=offset, kind=kind, reason=reason)

    def _close_streams(self) -> None:
        streams, self._streams = self._streams, {}
        for _, stream in streams.values():
            stream.close()

    def close(self) -> None:
        """Lets go of files and connections; iterating opens them again."""
        self._close_streams()

    def __del__(self) -> None:
        if hasattr(self, "_streams"):
            self._close_streams()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _forward(stream: ByteStream, offset: int, size: int) -> memoryview:
    stream.skip(offset - stream.position)
    return memoryview(stream.read(size))


def last_batch(folder: str | os.PathLike[str], index: PackedIndex, retry: RetryPolicy | None = None) -> PackedBatch:
    """The last batch of a folder's last shard: what a writer goes on after.

    Raises:
        PackedError: it is damaged.
        StorageError: it cannot be read.
    """
    shard = index.shards[-1]
    offset, size = shard.place(shard.batches - 1)
    with open_stream(f"{os.fspath(folder).rstrip('/')}/{shard.name}", offset + BLOCK_BYTES, policy=retry, length=size) as stream:
        try:
            return batch_from_bytes(stream.read(size))
        except PackedError as error:
            raise PackedError(error.kind, f"{public_url(os.fspath(folder))}/{shard.name}: {error.detail}") from error


def _index_of(folder: str, retry: RetryPolicy | None) -> PackedIndex:
    """The index of a folder of packed shards.

    Raises:
        ValueError: it has none.
        PackedError: it is malformed, or of another format version.
    """
    where = public_url(folder)
    try:
        return PackedIndex.from_bytes(_read_all(f"{folder}/{INDEX_NAME}", retry))
    except PackedError as error:
        raise PackedError(error.kind, f"{where}/{INDEX_NAME}: {error.detail}") from error
    except StorageError as error:
        if error.kind != "not_found":
            raise
        if _is_there(f"{folder}/{index_name(0, 2)}", retry):
            raise ValueError(
                f"{where!r} is not packed to its end: run the same `treadle pack` again, which goes on where it was"
            ) from error
        raise ValueError(f"{where!r} holds no {INDEX_NAME}: give a folder that PackedWriter closed, or its shards as a pattern") from error


def _is_there(url: str, retry: RetryPolicy | None) -> bool:
    try:
        with open_stream(url, policy=retry) as stream:
            return bool(stream.read(1))
    except StorageError:
        return False


def _read_all(url: str, retry: RetryPolicy | None) -> bytes:
    pieces: list[bytes] = []
    size = 0
    with open_stream(url, policy=retry) as stream:
        while piece := stream.read(1 << 20):
            size += len(piece)
            if size > MAX_INDEX_BYTES:
                raise PackedError("too_large", f"the index has more than {MAX_INDEX_BYTES} bytes")
            pieces.append(piece)
    return b"".join(pieces)
