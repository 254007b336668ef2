"""One shard's unpacked tar, fetched and unpacked once for all its parts: kept in a temporary file while they read.

The file has no name and ends with its pass, or when later shards take its place. It grows as the reader that is furthest on asks for more; the others find
their bytes in it. All spools of a process share a bound on disk: past it a spool keeps what it has, and each reader goes on with
a stream of its own. What is read does not depend on any of that.

    unpacked stream --> [ spooled ............ | end ]      pread by every part
                                                 \\-- bound reached: own streams
"""

import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import BinaryIO, Final

from treadle.pipeline.grouping import ShardError
from treadle.pipeline.sample_table import SampleTable
from treadle.pipeline.storage import ByteStream, StorageError
from treadle.pipeline.unpack import UnpackError

logger = logging.getLogger(__name__)

SPOOL_BYTES: Final = 2**33
"""Disk that the spools of a process take at most, in the folder that `TMPDIR` names."""

PIECE_BYTES: Final = 2**20

MAX_IDLE: Final = 4
"""Spools of a pass that wait for the next part of their shard: parts of one shard lie in neighbouring lanes, which read in turn."""

Opener = Callable[[int], ByteStream]
"""Opens the unpacked tar at a byte."""


class _Disk:
    """What all spools of this process keep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used = 0

    def take(self, size: int) -> bool:
        with self._lock:
            if self.used + size > SPOOL_BYTES:
                return False
            self.used += size
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


disk: Final = _Disk()


class Spool:
    """The unpacked tar from byte `start` on."""

    def __init__(self, url: str, opened: Opener, start: int) -> None:
        self.url = url
        self.start = start
        self.opened = opened
        self._end = start
        self._file: BinaryIO | None = None
        self._source: ByteStream | None = None
        self._size: int | None = None
        self._error: ShardError | StorageError | UnpackError | None = None
        self._interrupted: BaseException | None = None
        self._ended = False
        self._lock = threading.Lock()
        self.full = False
        """Whether nothing more is kept: readers past the end read for themselves."""

    @property
    def size(self) -> int | None:
        """Bytes of the whole tar, where known."""
        return self._size

    @property
    def failed(self) -> bool:
        """Whether the storage gave up, or reading was interrupted: another try may do better."""
        return self._interrupted is not None or isinstance(self._error, ShardError | StorageError)

    def reach(self, stop: int) -> int:
        """Spools up to byte `stop` and answers how far it went: less at the end, at a damage, and at the bound."""
        if stop > self._end:
            with self._lock:
                if self._interrupted is not None:
                    raise RuntimeError(f"reading a shard was interrupted at byte {self._end}: {self._interrupted!r}") from self._interrupted
                while self._end < stop and not (self._ended or self.full or self._error is not None):
                    self._grow()
        return min(stop, self._end)

    def _grow(self) -> None:
        try:
            if self._source is None:
                self._source = self.opened(self.start)
            piece = self._source.read(PIECE_BYTES)
            self._size = self._source.size
            if piece:
                self._keep(piece)
            else:
                self._ended = True
        except (ShardError, StorageError, UnpackError) as error:
            self._error = error
        except BaseException as error:
            # The source may have moved on by what was lost: nobody reads on behind that.
            self._interrupted = error
            self._let_go()
            raise
        if self._ended or self.full or self._error is not None:
            self._let_go()

    def _keep(self, piece: bytes) -> None:
        if not disk.take(len(piece)):
            self.full = True
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="treadle-", buffering=0)
            view, place = memoryview(piece), self._end - self.start
            while view:
                written = os.pwrite(self._file.fileno(), view, place)
                view, place = view[written:], place + written
        except OSError as error:
            disk.give(len(piece))
            self.full = True
            logger.warning("the temporary file of a shard cannot grow (%s): its parts are read one by one; TMPDIR names its folder", error)
            return
        self._end += len(piece)

    def at(self, position: int, size: int) -> bytes:
        """The bytes there, as far as they are spooled."""
        if self._file is None or size <= 0:
            return b""
        try:
            return os.pread(self._file.fileno(), size, position - self.start)
        except OSError as error:
            raise StorageError("unreadable", position, str(error)) from None

    def check(self) -> None:
        """Raises what ended the spool, for a reader at its end.

        Raises:
            ShardError | StorageError | UnpackError: the shard cannot be read on from there.
        """
        if self._error is not None:
            raise type(self._error)(self._error.kind, self._error.offset, self._error.detail)

    def _let_go(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def close(self) -> None:
        """Gives the disk back."""
        with self._lock:
            self._let_go()
            self._ended = True
            file, self._file = self._file, None
            if file is not None:
                file.close()
            disk.give(self._end - self.start)
            self._end = self.start


class SpoolStream(ByteStream):
    """Reads a spool from any byte of it on."""

    def __init__(self, spool: Spool, offset: int) -> None:
        super().__init__(spool.url, offset)
        self._spool = spool
        self._own: ByteStream | None = None

    @property
    def size(self) -> int | None:
        return self._spool.size

    def read(self, n: int) -> bytes:
        spool = self._spool
        have = spool.reach(self.position + n) - self.position
        data = spool.at(self.position, have)
        self.position += len(data)
        if len(data) < n:
            if spool.full:
                data += self._alone(n - len(data))
            elif not data:
                spool.check()
        return data

    def _alone(self, n: int) -> bytes:
        """The next `n` bytes from a stream of this reader's own."""
        own = self._own
        if own is None or own.position > self.position:
            self.close()
            own = self._own = self._spool.opened(self.position)
        own.skip(self.position - own.position)
        data = own.read(n)
        self.position += len(data)
        return data

    def skip(self, n: int) -> int:
        stop = self._spool.reach(self.position + n)
        moved = max(0, stop - self.position)
        self.position += moved
        if moved < n:
            if self._spool.full:
                return moved + super().skip(n - moved)
            self._spool.check()
        return moved

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()


class Shared:
    """A shard that several parts read."""

    def __init__(self, url: str, opened: Opener, index: int, offset: int) -> None:
        self.spool = Spool(url, opened, offset)
        self.table = SampleTable(lambda: SpoolStream(self.spool, offset), index, offset)
        self.readers = 0

    def close(self) -> None:
        """Gives the disk back."""
        self.table.close()
        self.spool.close()


class Spools:
    """Where the parts of shards meet, in one pass."""

    def __init__(self) -> None:
        self._shared: OrderedDict[str, Shared] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def join(self, url: str, opened: Opener, index: int, offset: int) -> Shared:
        """The shard from sample `index` or before on, until `leave`; where storage has failed, a new try."""
        with self._lock:
            shared = self._shared.get(url)
            if shared is None or shared.table.first > index or shared.spool.failed or shared.table.interrupted is not None:
                if shared is not None and not shared.readers:
                    shared.close()
                shared = self._shared[url] = Shared(url, opened, index, offset)
            self._shared.move_to_end(url)
            shared.readers += 1
            return shared

    def leave(self, shared: Shared) -> None:
        """One part less reads it."""
        with self._lock:
            shared.readers -= 1
            if shared.readers:
                return
            url = shared.spool.url
            if self._closed or self._shared.get(url) is not shared:
                shared.close()
                return
            idle = [url for url, each in self._shared.items() if not each.readers]
            for url in idle[:-MAX_IDLE]:
                self._shared.pop(url).close()

    def close(self) -> None:
        """Gives back what nobody reads any more, and the rest as soon as its readers leave."""
        with self._lock:
            self._closed = True
            for shared in self._shared.values():
                if not shared.readers:
                    shared.close()
            self._shared.clear()
