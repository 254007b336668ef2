"""Where the samples of a shard begin: found once, by whichever part asks first, and shared by all parts of the shard.

The parts of a shard read close behind each other. What the search for samples has in memory anyway is kept for a while, a
*window* of neighbouring samples at a time, so that small samples are not read again one by one; a window that has gone is read
and parsed again as a whole.

    samples  0 1 2 3 4 5 | 6 7 8 9 | 10 11 ...      windows of half a MiB, the last few with their contents
    part 1     ^       ^       ^
"""

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from os import stat
from typing import Final

from treadle.pipeline.grouping import Grouping, ShardError
from treadle.pipeline.raw_sample import RawSample, Singles, ends_of, in_columns, joined, offsets_of
from treadle.pipeline.storage import ByteStream, LocalStream, StorageError
from treadle.pipeline.tar import CHUNK_BYTES, MemberReader
from treadle.pipeline.unpack import UnpackError

MAX_TABLES = 16
"""Local shards whose sample offsets are remembered, 8 bytes a sample."""

WINDOW_BYTES: Final = 2**19
"""Tar bytes that close a window."""

HELD_WINDOWS: Final = 6
"""Windows of a shard whose contents are kept while it is being read."""

SMALL_BYTES: Final = 2**15
"""Mean tar bytes of a sample up to which a window is read again as a whole: larger ones are read one by one, by who needs them."""


class Window:
    """Neighbouring samples of a shard."""

    __slots__ = ("count", "first", "samples")

    def __init__(self, first: int) -> None:
        self.first = first
        """The index of the first one."""
        self.count = 0
        self.samples: Sequence[RawSample] | None = ()
        """The samples, those that pass `CHUNK_BYTES` without their contents; None where they are to be read one by one."""


class BoundedStream(ByteStream):
    """A stream from `offset` up to byte `stop`; closing it leaves the stream open."""

    def __init__(self, stream: ByteStream, offset: int, stop: int) -> None:
        super().__init__(stream.url, offset)
        stream.position = offset
        self._stream = stream
        self._stop = stop

    def read(self, n: int) -> bytes:
        data = self._stream.read(max(0, min(n, self._stop - self.position)))
        self.position += len(data)
        return data

    def close(self) -> None:
        """Leaves the stream open: it is the caller's."""


class SampleTable:
    """Where the samples of a shard begin, found as they are asked for; the parts of the shard share it."""

    def __init__(self, opened: Callable[[], ByteStream], index: int, offset: int) -> None:
        """Takes what opens a stream of the unpacked tar whose position can be set, and where sample `index` begins."""
        self.first = index
        """The first sample that it knows of."""
        self._opened = opened
        self._starts = array("q")
        self._end = offset
        self._windows: list[Window] = []
        self._firsts: list[int] = []
        self._held: OrderedDict[int, Window] = OrderedDict()
        self._readers = 0
        self._error: ShardError | None = None
        self._ended = False
        self.interrupted: BaseException | None = None
        """What ended the search in the midst, for no fault of the shard: it has to be searched anew."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stream = opened()
        self._stream.position = offset
        self._reader = MemberReader(self._stream, offset=offset, want=_unwanted, chunk_bytes=CHUNK_BYTES)
        self._runs = Grouping(self._reader, self._counts, index=index).runs()
        # What the last run had left.
        self._rest: Sequence[RawSample] = ()

    def counted(self) -> Counter[str]:
        """What was skipped or odd so far."""
        with self._lock:
            return Counter(self._counts)

    def close(self) -> None:
        """Lets go of the stream and of what is in memory."""
        self._stream.close()
        self._held.clear()

    def join(self) -> None:
        """One more part reads."""
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        """One part less reads; after the last one nothing stays in memory."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                for window in self._held.values():
                    window.samples = None
                self._held.clear()

    def span(self, index: int) -> tuple[int, int]:
        """Where a sample of a window begins and ends."""
        place = index - self.first
        return self._starts[place], self._starts[place + 1] if place + 1 < len(self._starts) else self._end

    def window(self, index: int, stream: ByteStream) -> tuple[Window, Sequence[RawSample] | None] | None:
        """The window that holds sample `index`, and its samples; None past the last.

        Args:
            stream: the caller's own, to read with; its position is lost.

        Raises:
            ShardError: the shard is damaged before that sample.
            RuntimeError: an earlier search was interrupted; `local_table` gives another one.
        """
        with self._lock:
            if self.interrupted is not None:
                raise RuntimeError(f"reading a shard was interrupted at byte {self._end}: {self.interrupted!r}") from self.interrupted
            while index - self.first >= len(self._starts):
                if self._error is not None:
                    raise ShardError(self._error.kind, self._error.offset, self._error.detail)
                if self._ended:
                    return None
                self._search()
            number = bisect_right(self._firsts, index) - 1
            window = self._windows[number]
            samples = window.samples
            if samples is not None:
                self._held.move_to_end(number)
                return window, samples
            start, end = self.span(window.first)[0], self.span(window.first + window.count - 1)[1]
        if end - start > SMALL_BYTES * window.count:
            return window, None
        samples = self._again(window, start, end, stream)
        if samples is not None:
            with self._lock:
                self._hold(number, window, samples)
        return window, samples

    def _search(self) -> None:
        """Finds the samples of the next window.

        Raises:
            BaseException: whatever is no fault of the shard.
        """
        try:
            self._search_window()
        except BaseException as error:
            # Members end after an error of any kind, as they do at the end of the shard.
            self.interrupted = error
            raise

    def _search_window(self) -> None:
        window = Window(self.first + len(self._starts))
        begin = self._end
        parts: list[Sequence[RawSample]] = []
        try:
            # Samples in columns stay in them: a window holds nothing else beside them.
            while self._end - begin < WINDOW_BYTES and not (parts and isinstance(parts[-1], Singles)):
                if not self._rest:
                    found = next(self._runs, None)
                    if found is None:
                        self._ended = True
                        break
                    self._rest = found
                    continue
                run = self._rest
                if parts and isinstance(run, Singles):
                    break
                ends = ends_of(run)
                count = min(bisect_left(ends, begin + WINDOW_BYTES) + 1, len(run))
                self._starts.append(run[0].offset)
                self._starts.extend(ends[: count - 1])
                self._end = ends[count - 1]
                parts.append(run[:count])
                self._rest = run[count:]
        except ShardError as error:
            self._error = error
        if self._ended or self._error is not None:
            self._stream.close()
        samples = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
        if samples:
            window.count = len(samples)
            self._windows.append(window)
            self._firsts.append(window.first)
            if self._end - begin > SMALL_BYTES * len(samples):
                # Whoever needs a large one reads it: here its headers do.
                window.samples = None
                self._reader.pace(SMALL_BYTES)
            else:
                self._hold(len(self._windows) - 1, window, samples)
                self._reader.pace(CHUNK_BYTES)

    def _hold(self, number: int, window: Window, samples: Sequence[RawSample]) -> None:
        window.samples = samples
        self._held[number] = window
        self._held.move_to_end(number)
        while len(self._held) > HELD_WINDOWS:
            self._held.popitem(last=False)[1].samples = None

    def _again(self, window: Window, start: int, end: int, stream: ByteStream) -> Sequence[RawSample] | None:
        """The samples of a window once more; None where they are not what they were, which whoever reads one of them then tells."""
        reader = MemberReader(BoundedStream(stream, start, end), offset=start, want=_unwanted, chunk_bytes=CHUNK_BYTES)
        samples: Sequence[RawSample] = []
        try:
            for run in Grouping(reader, Counter(), index=window.first).runs():
                if run:
                    samples = joined(samples, in_columns(run[0]) if len(run) == 1 else run) if samples else run
        except (ShardError, StorageError, UnpackError):
            return None
        place = window.first - self.first
        starts = self._starts[place : place + window.count].tolist()
        if len(samples) != window.count or offsets_of(samples) != starts:
            return None
        # What was skipped after the last sample counts to it.
        last = replace(samples[-1], size=end - samples[-1].offset)
        return joined(samples[:-1], in_columns(last)) if len(samples) > 1 else [last]


def _unwanted(_: object) -> bool:
    return False


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
        if table is None or table.first > index or table.interrupted is not None:
            table = _tables[key] = SampleTable(lambda: LocalStream(path, path), index, offset)
            while len(_tables) > MAX_TABLES:
                _tables.popitem(last=False)
        _tables.move_to_end(key)
        return table


__all__ = ["CHUNK_BYTES", "BoundedStream", "SampleTable", "Window", "local_table"]
