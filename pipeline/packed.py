"""Shards of packed batches: written once, read many times without decoding.

    folder/index.json            format, version, shape, capacities, and per shard: batches, counts, fill, digests of states
    folder/batches-000000.tar    one safetensors file per batch, in order

A shard appears whole or not at all, and the index names it only then: whatever kills a writer, the index and its
shards agree. Shards are plain tars, so they are read over the network, with retries, like any other shard.

Several writers fill one folder as its parts, each with shards and an index of its own (`batches-003-000000.tar`,
`part-003.json`); `join_parts` makes the index of all of them.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.batch_file import batch_parts
from treadle.pipeline.layout import Capacities
from treadle.pipeline.packed_folder import ShardFolder, open_folder, release
from treadle.pipeline.packed_index import (
    BLOCK_BYTES,
    INDEX_NAME,
    MAX_PARTS,
    PackedIndex,
    PackedShard,
    header_check,
    index_name,
    joined,
    state_digest,
    tar_header,
)
from treadle.pipeline.packed_reader import PackedReader
from treadle.pipeline.storage import public_url
from treadle.pipeline.tar import MAX_MEMBER_BYTES
from treadle.pipeline.tensor_file import PackedError
from treadle.shape import BatchShape, require_count, require_member, require_path


class PackedWriter:
    """Writes packed batches into shards under a folder, on this machine or in an object store.

    Closing finishes the last shard; leaving a `with` by an error drops the shard that was open, never one that is whole.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, batches_per_shard: int = 64, append: bool = False, part: int = 0, parts: int = 1
    ) -> None:
        """
        Args:
            folder: where the shards go: a path, made if it is not there, or an object store's URL.
            batches_per_shard: batches of one shard.
            append: go on after the shards that the folder's index names.
            part: which of `parts` this writer fills.
            parts: writers that fill the folder; `join_parts` makes their common index in the end.

        Raises:
            ValueError: an argument is out of range, the folder holds shards and `append` is False, or another process writes this part.
            PackedError: the index to go on from is malformed.
        """
        self.batches_per_shard = require_count("PackedWriter", "batches_per_shard", batches_per_shard, 1)
        self.parts = require_count("PackedWriter", "parts", parts, 1, MAX_PARTS)
        self.part = require_count("PackedWriter", "part", part, 0, parts - 1)
        require_member("PackedWriter", "append", append, bool)
        self._where = public_url(require_path("PackedWriter", "folder", folder))
        self._folder = open_folder(folder)
        self._lock = self._folder.claim(part)
        self._closed = False
        self._file: IO[bytes] | None = None
        self._temporary = ""
        self._open = PackedShard(name="", part=part)
        try:
            self._index = self._found(append)
        except BaseException:
            release(self._lock)
            raise

    def _found(self, append: bool) -> PackedIndex | None:
        """What is there to go on from."""
        name = index_name(self.part, self.parts)
        found = self._folder.read(name)
        if found is None and name != INDEX_NAME:
            whole = self._folder.read(INDEX_NAME)
            if whole is not None:
                raise ValueError(f"{self._where} holds {INDEX_NAME}, of {PackedIndex.from_bytes(whole).parts} parts: give another folder")
        if found is None:
            return None
        if not append:
            raise ValueError(f"{self._where} holds {name}: give another folder, or append=True to go on after its shards")
        index = PackedIndex.from_bytes(found)
        if index.parts != self.parts:
            raise ValueError(f"{self._where} was packed in {index.parts} parts, not {self.parts}: give as many, or another folder")
        return index

    @property
    def index(self) -> PackedIndex | None:
        """What finished shards hold: what a reader sees now; None before the first one."""
        return self._index

    @property
    def batches(self) -> int:
        """Batches in finished shards."""
        return self._index.batches if self._index is not None else 0

    def expect(self, shape: BatchShape, capacities: Capacities, made_of: str = "") -> None:
        """Says what batches will come, so that a part of none has an index, too.

        Args:
            shape: theirs, resolved.
            capacities: theirs.
            made_of: what the index says that they are made of.

        Raises:
            ValueError: the folder's batches have others.
        """
        if self._index is None:
            self._index = PackedIndex(shape=shape, capacities=capacities, parts=self.parts, made_of=made_of, shards=())
            if self.parts > 1:
                # Tells readers that this folder is being packed, and by how many.
                self._folder.write(index_name(self.part, self.parts), self._index.to_bytes())
        elif (shape, capacities) != (self._index.shape, self._index.capacities):
            raise ValueError(
                f"this batch has shape and capacities {shape}, {capacities}: the batches of {self._where} have {self._index.shape}, "
                f"{self._index.capacities}; write it elsewhere"
            )

    def write(self, batch: PackedBatch) -> None:
        """Adds one batch.

        Raises:
            ValueError: its shape or capacities differ from the first batch's, it is larger than a shard's reader takes, or the writer is
                closed.
            OSError: the folder or the disk refused it. The shard that was open is dropped and the writer closed; whole shards stay.
        """
        if self._closed:
            raise ValueError(f"this writer of {self._where} is closed: make another with append=True to go on")
        require_member("PackedWriter.write", "batch", batch, PackedBatch)
        self.expect(batch.shape, batch.capacities)
        assert self._index is not None
        parts = batch_parts(batch)
        size = sum(len(part) for part in parts)
        if size > MAX_MEMBER_BYTES:
            raise ValueError(f"this batch takes {size} bytes: a shard's reader takes at most {MAX_MEMBER_BYTES} a batch; use fewer rows")
        try:
            self._add(batch, parts, size, len(self._index.shards))
        except BaseException as error:
            self._say_where(error)
            # Part of a batch may be written: nothing must follow it.
            self._drop_open()
            raise

    def _say_where(self, error: BaseException) -> None:
        """Gives an error of the disk, which names no file, the folder that it came up in."""
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = os.path.dirname(self._temporary) or self._where

    def _add(self, batch: PackedBatch, parts: Sequence[bytes | memoryview], size: int, number: int) -> None:
        shard = self._open
        if self._file is None:
            self._file, self._temporary = self._folder.begin(self.part)
            self._open = shard = PackedShard(name=self._name(number), part=self.part)
        for part in (tar_header(shard.batches, size), *parts, bytes(-size % BLOCK_BYTES)):
            self._file.write(part)
        for name, value in batch.fill.items():
            mean = shard.fill.get(name, 0.0)
            shard.fill[name] = mean + (value - mean) / (shard.batches + 1)
        shard.batches += 1
        shard.segments += batch.segments
        shard.bags += batch.bags
        shard.tokens += batch.tokens
        shard.dropped += batch.dropped
        shard.sizes.append(size)
        shard.checks.append(header_check(parts[0]))
        shard.states.append(None if batch.state is None else state_digest(batch.state))
        if shard.batches >= self.batches_per_shard:
            self._finish_shard()

    def _name(self, number: int) -> str:
        return f"batches-{number:06d}.tar" if self.parts == 1 else f"batches-{self.part:03d}-{number:06d}.tar"

    def _finish_shard(self, *, complete: bool = False) -> None:
        index, file, shard = self._index, self._file, self._open
        if index is None:
            return
        shards = index.shards
        if file is not None:
            file.write(bytes(2 * BLOCK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            shard.bytes = file.tell()
            self._folder.publish(self._temporary, shard.name)
            # Closed after it has its name: the lock on it keeps others from taking it for abandoned.
            file.close()
            self._file = None
            shards = [*shards, shard]
        elif index.complete == complete:
            return
        self._index = replace(index, shards=shards, complete=complete)
        self._folder.write(index_name(self.part, self.parts), self._index.to_bytes())

    def close(self, *, complete: bool = True) -> None:
        """Finishes the shard that is open; `complete` says that no batch will follow. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_shard(complete=complete)
        except OSError as error:
            self._say_where(error)
            raise
        finally:
            self._drop_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._drop_open()

    def _drop_open(self) -> None:
        """Closes the writer, and removes the shard that is not whole."""
        self._closed = True
        file, self._file = self._file, None
        try:
            if file is not None:
                Path(self._temporary).unlink(missing_ok=True)
                with suppress(OSError):
                    # What it still holds back has no room: that was told, and the file is gone.
                    file.close()
        finally:
            release(self._lock)


def read_part(folder: str | os.PathLike[str], part: int, parts: int) -> PackedIndex | None:
    """What one part's writer has finished; None where it has nothing.

    Raises:
        PackedError: its index is malformed.
    """
    found = open_folder(folder).read(index_name(part, parts))
    return None if found is None else PackedIndex.from_bytes(found)


def join_parts(folder: str | os.PathLike[str], parts: int) -> PackedIndex:
    """Writes the index of a folder whose parts are all complete.

    Raises:
        ValueError: one is not.
        PackedError: an index is malformed, or the parts are of different shapes.
    """
    files: ShardFolder = open_folder(folder)
    found: list[PackedIndex] = []
    for part in range(parts):
        data = files.read(index_name(part, parts))
        index = None if data is None else PackedIndex.from_bytes(data)
        if index is None or not index.complete:
            raise ValueError(f"{public_url(os.fspath(folder))}: part {part} of {parts} is not complete: finish its writer first")
        found.append(index)
    whole = joined(found)
    files.write(INDEX_NAME, whole.to_bytes())
    return whole


__all__ = ["PackedError", "PackedReader", "PackedWriter", "join_parts", "read_part"]
