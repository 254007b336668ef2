"""Where the samples of a shard begin: found once, by whichever part asks first, and shared by all parts of the shard."""

import threading
from array import array
from collections import Counter, OrderedDict
from os import stat

from treadle.pipeline.grouping import Grouping, ShardError
from treadle.pipeline.storage import ByteStream, LocalStream
from treadle.pipeline.tar import MemberReader

MAX_TABLES = 16
"""Local shards whose sample offsets are remembered, 8 bytes a sample."""


class SampleTable:
    """Where the samples of a shard begin, found as they are asked for; the parts of the shard share it."""

    def __init__(self, stream: ByteStream, index: int, offset: int) -> None:
        self.first = index
        """The first sample that it knows of."""
        self._starts = array("q")
        self._end = offset
        self._error: ShardError | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stream = stream
        stream.position = offset
        reader = MemberReader(stream, offset=offset, contents=False)
        self._found = Grouping(reader, self._counts, index=index, contents=False).samples()

    def counted(self) -> Counter[str]:
        """What was skipped or odd so far."""
        with self._lock:
            return Counter(self._counts)

    def close(self) -> None:
        """Lets go of the stream."""
        self._stream.close()

    def locate(self, index: int) -> tuple[int, int] | None:
        """Where sample `index` begins and ends, None past the last.

        Raises:
            ShardError: the shard is damaged before that sample.
        """
        place = index - self.first
        with self._lock:
            while place >= len(self._starts):
                if self._error is not None:
                    raise ShardError(self._error.kind, self._error.offset, self._error.detail)
                try:
                    sample = next(self._found, None)
                except ShardError as error:
                    self._error = error
                    continue
                if sample is None:
                    self._stream.close()
                    return None
                self._starts.append(sample.offset)
                self._end = sample.end
            start = self._starts[place]
            return start, self._starts[place + 1] if place + 1 < len(self._starts) else self._end


_tables: OrderedDict[tuple[str, int, int], SampleTable] = OrderedDict()
_tables_lock = threading.Lock()


def local_table(path: str, index: int, offset: int) -> SampleTable:
    """The shared table of a file as it now is, from sample `index` or before.

    Raises:
        OSError | StorageError: it cannot be opened.
    """
    found = stat(path)
    key = path, found.st_size, found.st_mtime_ns
    with _tables_lock:
        table = _tables.get(key)
        if table is None or table.first > index:
            table = _tables[key] = SampleTable(LocalStream(path, path), index, offset)
            while len(_tables) > MAX_TABLES:
                _tables.popitem(last=False)
        _tables.move_to_end(key)
        return table
