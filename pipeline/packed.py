"""Shards of packed batches: written once, read many times without decoding.

    folder/index.json            format, version, shape, capacities, and per shard: batches, counts, fill, digests of states
    folder/batches-000000.tar    one safetensors file per batch, in order

A shard appears whole or not at all, and the index names it only then: whatever kills a writer, the index and its
shards agree. Shards are plain tars, so they are read over the network, with retries, like any other shard.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, Self

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.batch_file import batch_from_bytes, batch_parts, parsed_shape, shape_table
from treadle.pipeline.packed_folder import open_folder
from treadle.pipeline.storage import StorageError, open_stream, public_url
from treadle.pipeline.tar import MAX_MEMBER_BYTES
from treadle.pipeline.tensor_file import PackedError

if TYPE_CHECKING:
    from treadle.pipeline.state import StreamState

logger = logging.getLogger(__name__)

FORMAT_NAME = "treadle.packed_shards"
FORMAT_VERSION = 1
INDEX_NAME = "index.json"

MAX_INDEX_BYTES = 1 << 28
"""Largest index that is read: about a million batches."""

_BLOCK_BYTES = 512
_SUFFIX = "safetensors"


class Records(Protocol):
    """Where a reader tells what it skipped."""

    def record(self, *, url: str, key: str, member: str, offset: int, kind: str, reason: str) -> None:
        """Counts and logs one thing that was skipped."""


@dataclass(frozen=True, slots=True)
class PackedPosition:
    """A position in a sequence of packed shards: what comes next."""

    shard: int
    batch: int
    """Batches of that shard that were handed out."""
    offset: int
    """Byte of the shard where the next one begins."""


def _tar_header(name: str, size: int) -> bytes:
    """A ustar header: the same bytes on every machine and every day."""
    fields = [
        name.encode().ljust(100, b"\0"),
        b"0000644\0",
        b"0000000\0",
        b"0000000\0",
        f"{size:011o}\0".encode(),
        b"00000000000\0",
        b" " * 8,
        b"0",
        bytes(100),
        b"ustar\x0000",
    ]
    header = bytearray(b"".join(fields).ljust(_BLOCK_BYTES, b"\0"))
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def state_digest(state: "StreamState") -> str:
    """What an index knows a stream state by."""
    return blake2b(state.to_bytes(), digest_size=16).hexdigest()


class PackedWriter:
    """Writes packed batches into shards under a folder, on this machine or in an object store.

    Closing finishes the last shard; leaving a `with` by an error drops the shard that was open, never one that is whole.
    """

    def __init__(self, folder: str | os.PathLike[str], *, batches_per_shard: int = 64, append: bool = False) -> None:
        """
        Args:
            folder: where the shards go: a path, made if it is not there, or an object store's URL.
            batches_per_shard: batches of one shard.
            append: go on after the shards that the folder's index names.

        Raises:
            ValueError: `batches_per_shard` is not positive, or the folder holds shards and `append` is False.
            PackedError: the index to go on from is malformed.
        """
        if batches_per_shard < 1:
            raise ValueError(f"PackedWriter.batches_per_shard is {batches_per_shard}: it must be at least 1")
        self.batches_per_shard = batches_per_shard
        self._folder = open_folder(folder)
        self._table: dict[str, Any] | None = None
        self._shards: list[dict[str, Any]] = []
        index = self._folder.read(INDEX_NAME)
        if index is not None:
            if not append:
                raise ValueError(
                    f"{public_url(os.fspath(folder))} holds an {INDEX_NAME}: give another folder, or append=True to go on after its shards"
                )
            found = read_index(index)
            self._table, self._shards = {"shape": found["shape"], "capacities": found["capacities"]}, found["shards"]
        self._file: IO[bytes] | None = None
        self._temporary = ""
        self._open: dict[str, Any] = {}

    @property
    def batches(self) -> int:
        """Batches in finished shards: what a reader sees now."""
        return sum(int(shard["batches"]) for shard in self._shards)

    def write(self, batch: PackedBatch) -> None:
        """Adds one batch.

        Raises:
            ValueError: its shape or capacities differ from the first batch's.
        """
        table = json.loads(json.dumps(shape_table(batch.shape, batch.capacities)))
        if self._table is None:
            self._table = table
        elif table != self._table:
            raise ValueError(f"this batch has shape and capacities {table}: the folder's batches have {self._table}; write it elsewhere")
        if self._file is None:
            self._file, self._temporary = self._folder.begin()
            self._open = {"batches": 0, "segments": 0, "bags": 0, "tokens": 0, "dropped": 0, "fill": {}, "states": []}
        parts = batch_parts(batch)
        size = sum(len(part) for part in parts)
        if size > MAX_MEMBER_BYTES:
            raise ValueError(f"this batch takes {size} bytes: a shard's reader takes at most {MAX_MEMBER_BYTES} a batch; use fewer rows")
        for part in (_tar_header(f"{self._open['batches']:08d}.{_SUFFIX}", size), *parts, bytes(-size % _BLOCK_BYTES)):
            self._file.write(part)
        summary = self._open
        for name, value in batch.fill.items():
            mean = summary["fill"].get(name, 0.0)
            summary["fill"][name] = mean + (value - mean) / (summary["batches"] + 1)
        summary["batches"] += 1
        for name in ("segments", "bags", "tokens", "dropped"):
            summary[name] += getattr(batch, name)
        summary["states"].append(None if batch.state is None else state_digest(batch.state))
        if summary["batches"] >= self.batches_per_shard:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.write(bytes(2 * _BLOCK_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self._file = None
        name = f"batches-{len(self._shards):06d}.tar"
        self._folder.publish(self._temporary, name)
        self._shards.append({"name": name, "bytes": size, **self._open})
        table = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **(self._table or {}), "shards": self._shards}
        self._folder.write(INDEX_NAME, json.dumps(table, indent=1).encode())

    def close(self) -> None:
        """Finishes the shard that is open."""
        self._finish_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()
            self._file = None
            os.unlink(self._temporary)


def read_index(data: bytes) -> dict[str, Any]:
    """A folder's index, checked.

    Raises:
        PackedError: it is malformed, or of another format version.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise PackedError("too_large", f"the index has {len(data)} bytes: at most {MAX_INDEX_BYTES} are read")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PackedError("corrupt", f"the index is no JSON: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT_NAME:
        raise PackedError("corrupt", f"this is no index of {FORMAT_NAME}")
    if table.get("version") != FORMAT_VERSION:
        raise PackedError("version", f"index version {table.get('version')!r}: this reads version {FORMAT_VERSION}")
    parsed_shape(table)
    shards = table.get("shards")
    if not isinstance(shards, list):
        raise PackedError("corrupt", "the index lists no shards")
    for shard in shards:
        name = shard.get("name") if isinstance(shard, dict) else None
        if not isinstance(name, str) or "/" in name or "\\" in name or name.startswith("."):
            raise PackedError("corrupt", f"a shard's name is {name!r}: it must be a file beside the index")
        batches, states = shard.get("batches"), shard.get("states")
        if type(batches) is not int or batches < 0 or not isinstance(states, list) or len(states) != batches:
            raise PackedError("corrupt", f"{name}: the index counts {batches!r} batches and names other states")
    return table


class PackedReader:
    """Iterates the packed batches of shards, in order, each with its stream state.

    It goes on from `position`, or from the state of the last batch that a trainer consumed. Of several ranks, rank r
    of W reads the batches whose number is r modulo W, and skips the others' bytes.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        on_error: Literal["raise", "quarantine"] = "raise",
        quarantine: Records | None = None,
    ) -> None:
        """
        Args:
            rank: this process among those that share the batches.
            world_size: how many share them; more than one needs an index.
            urls: a folder with an index (a path or a URL), or shards: a pattern or a list of URLs.
            on_error: "quarantine" skips a damaged batch, or the rest of a damaged shard, and counts it.
            quarantine: also told what was skipped.

        Raises:
            ValueError: an argument is none of its values, or the folder has no index.
            PackedError: the index is malformed.
        """
        if on_error not in ("raise", "quarantine"):
            raise ValueError(f'PackedReader.on_error is {on_error!r}: it must be "raise" or "quarantine"')
        if not 0 <= rank < world_size:
            raise ValueError(f"PackedReader.rank is {rank}: it must lie between 0 and world_size - 1, {world_size - 1}")
        self.rank, self.world_size = rank, world_size
        self.on_error = on_error
        self.quarantine = quarantine
        self.counts: Counter[str] = Counter()
        """What was skipped, by kind."""
        self.index: dict[str, Any] | None = None
        self.shards = self._shards_of(urls)
        """URLs of the shards, in order."""
        if world_size > 1 and self.index is None:
            raise ValueError(f"PackedReader.world_size is {world_size}: shards without an index cannot be shared; give their folder")
        self.position = PackedPosition(0, 0, 0)
        """What the next iteration begins with."""
        self.state: StreamState | None = None
        """The stream state of the last batch handed out."""

    def _shards_of(self, urls: str | os.PathLike[str] | Sequence[str]) -> list[str]:
        if isinstance(urls, str | os.PathLike):
            base = os.fspath(urls)
            folder = base.removesuffix(INDEX_NAME).rstrip("/") or "/"
            if base.endswith(INDEX_NAME) or os.path.isdir(base) or ("://" in base and not base.endswith((".tar", "}")) and "*" not in base):
                self.index = _index_of(folder)
                return [f"{folder}/{shard['name']}" for shard in self.index["shards"]]
            urls = base
        from treadle.pipeline.sources import expand_urls

        return list(expand_urls(urls))

    def __len__(self) -> int:
        """Batches in all shards, of all ranks.

        Raises:
            TypeError: there is no index that counts them.
        """
        if self.index is None:
            raise TypeError("these shards were given without an index: their batches are not counted")
        return sum(int(shard["batches"]) for shard in self.index["shards"])

    def load_position(self, position: PackedPosition) -> None:
        """Goes on from a position that `position` held.

        Raises:
            ValueError: it lies outside these shards.
        """
        if not 0 <= position.shard <= len(self.shards) or position.batch < 0 or position.offset < 0:
            raise ValueError(f"{position} lies outside these {len(self.shards)} shards")
        self.position = position

    def load_state(self, state: "StreamState") -> None:
        """Goes on after the batch that carries `state`.

        Raises:
            ValueError: no batch of the index carries it.
        """
        wanted = state_digest(state)
        for number, shard in enumerate(self.index["shards"] if self.index else ()):
            if wanted in shard["states"]:
                self.position = PackedPosition(number, shard["states"].index(wanted) + 1, -1)
                self.state = state
                return
        raise ValueError("no batch of these packed shards carries this stream state: it belongs to other data, or there is no index")

    def __iter__(self) -> Iterator[PackedBatch]:
        while self.position.shard < len(self.shards):
            number = self.position.shard
            try:
                yield from self._batches(number)
            except PackedError as error:
                self._skip(self.shards[number], "", 0, error.kind, error.detail, error)
            self.position = PackedPosition(number + 1, 0, 0)

    def _batches(self, number: int) -> Iterator[PackedBatch]:
        from treadle.pipeline.shards import Shard, ShardError

        url, start, offset = self.shards[number], self.position.batch, self.position.offset
        # A position found by its state knows no byte: reading starts at the shard's, the batches before it are passed over.
        first = 0 if offset < 0 else start
        shards = self.index["shards"] if self.index else []
        part = (self.rank - sum(int(shard["batches"]) for shard in shards[:number])) % self.world_size
        seen = 0
        try:
            for sample in Shard(url).samples(part=part, parts=self.world_size, index=first, offset=max(0, offset)):
                if sample.index < start:
                    continue
                seen += 1
                self.position = PackedPosition(number, sample.index + 1, sample.end)
                try:
                    batch = self._batch(sample)
                except PackedError as error:
                    self._skip(url, sample.key, sample.offset, error.kind, error.detail, error)
                    continue
                self.state = batch.state
                yield batch
        except ShardError as error:
            kind = "truncated" if error.kind.startswith("truncated") else "corrupt"
            raise PackedError(kind, f"{public_url(url)}: {error}") from error
        expected = len([at for at in range(start, shards[number]["batches"]) if at % self.world_size == part]) if shards else seen
        if seen != expected:
            raise PackedError("truncated", f"{public_url(url)} holds {seen} more batches, its index counts {expected}")

    def _batch(self, sample: Any) -> PackedBatch:
        found = [field for field in sample.fields if field.name == _SUFFIX]
        if len(found) != 1 or len(sample.fields) != 1:
            raise PackedError("corrupt", f"{sample.key}: a packed shard holds one .{_SUFFIX} file per batch")
        batch = batch_from_bytes(found[0].data)
        if self.index is not None and parsed_shape(self.index) != (batch.shape, batch.capacities):
            raise PackedError("mismatch", f"{sample.key}: its shape is not the index's")
        return batch

    def _skip(self, url: str, key: str, offset: int, kind: str, reason: str, error: PackedError) -> None:
        url = public_url(url)
        if self.on_error == "raise":
            if not key:
                raise error
            raise PackedError(kind, f"{url}, batch {key}: {reason}") from error
        logger.warning("%s: skipped %s: %s: %s", url, key or "the rest of the shard", kind, reason)
        self.counts[kind] += 1
        if self.quarantine is not None:
            self.quarantine.record(url=url, key=key, member=f"{key}.{_SUFFIX}" if key else "", offset=offset, kind=kind, reason=reason)


def _index_of(folder: str) -> dict[str, Any]:
    """The index of a folder of packed shards.

    Raises:
        ValueError: it has none.
        PackedError: it is malformed, or of another format version.
    """
    where = public_url(folder)
    try:
        return read_index(_read_all(f"{folder}/{INDEX_NAME}", MAX_INDEX_BYTES))
    except PackedError as error:
        raise PackedError(error.kind, f"{where}/{INDEX_NAME}: {error.detail}") from error
    except StorageError as error:
        if error.kind != "not_found":
            raise
        raise ValueError(f"{where!r} holds no {INDEX_NAME}: give a folder that PackedWriter closed, or its shards as a pattern") from error


def _read_all(url: str, most: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    with open_stream(url) as stream:
        while piece := stream.read(1 << 20):
            size += len(piece)
            if size > most:
                raise PackedError("too_large", f"the index has more than {most} bytes")
            pieces.append(piece)
    return b"".join(pieces)
