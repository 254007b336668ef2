"""Packs shards of samples into shards of packed batches: one process per rank that will train, each going on where it was.

    parent:   a bar; starts the ranks' processes, a few at a time; joins their indexes when all are complete
    process:  ShardStream(rank p of P) from the state of the last batch of part p's last whole shard -> PackedWriter(part p)

A shard and the index that names it are written whole, and every batch carries the position just after it: so whatever kills
a process, at whatever moment, packing again goes on with the very next batch, and the folder comes out the same.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from treadle.launch.samples import named
from treadle.launch.settings import PackSettings
from treadle.launch.streams import open_stream
from treadle.model.config import LateInteraction
from treadle.pipeline.layout import Capacities
from treadle.pipeline.packed import PackedWriter, join_parts, read_part
from treadle.pipeline.packed_index import PackedIndex
from treadle.pipeline.packed_reader import last_batch
from treadle.pipeline.storage import public_url


class PackingError(RuntimeError):
    """A rank's process failed; what it had finished stays."""


@dataclass(slots=True)
class Packed:
    """What is packed so far, of one part or of all; `lost` counts what this run could not use, by kind."""

    batches: int = 0
    segments: int = 0
    tokens: int = 0
    dropped: int = 0
    fill: float = 0.0
    """Sum over batches of the fullest dimension's used share."""
    lost: Counter[str] = field(default_factory=Counter)
    complete: bool = False

    def plus(self, other: "Packed") -> "Packed":
        """Both together."""
        return Packed(
            self.batches + other.batches,
            self.segments + other.segments,
            self.tokens + other.tokens,
            self.dropped + other.dropped,
            self.fill + other.fill,
            self.lost + other.lost,
            self.complete and other.complete,
        )

    @property
    def mean_fill(self) -> float:
        """Mean over batches of the fullest dimension's used share."""
        return self.fill / max(1, self.batches)


def already_packed(out: str, part: int, parts: int) -> Packed:
    """What the whole shards of one part hold.

    Raises:
        PackedError: its index is malformed.
    """
    index = read_part(out, part, parts)
    if index is None:
        return Packed()
    found = Packed(complete=index.complete)
    for shard in index.shards:
        fill = max(shard.fill.values(), default=0.0) * shard.batches
        found = found.plus(Packed(shard.batches, shard.segments, shard.tokens, shard.dropped, fill, complete=True))
    return found


def is_joined(out: str, parts: int) -> bool:
    """Whether the index that readers look at is there.

    Raises:
        PackedError: it is malformed.
    """
    return read_part(out, 0, 1) is not None if parts > 1 else already_packed(out, 0, 1).complete


def _late_interaction(settings: PackSettings) -> LateInteraction | None:
    return settings.late_interaction.resolved(settings.batch.resolved()) if settings.late_interaction.weight > 0 else None


def _check_source(out: str, index: PackedIndex | None, made_of: str) -> None:
    """Refuses to add batches of other data, or of other settings, to a folder."""
    if index is not None and index.made_of not in ("", made_of):
        raise ValueError(f"{public_url(out)} was packed from other shards, or with other settings: give another folder")


def pack_part(settings: PackSettings, out: str, part: int, *, tell: Callable[[Packed], None], stopped: Callable[[], bool]) -> Packed:
    """Packs one part to its end, or until it is asked to stop; goes on after the whole shards that are there.

    Raises:
        ValueError: nothing could be packed, or the shards that are there are of other data or settings.
        PackedError: the folder's index, or the batch to go on after, is damaged.
    """
    parts = settings.ranks
    late = _late_interaction(settings)
    with open_stream(settings.data, settings.batch, late, rank=part, world_size=parts) as stream:
        made_of, index = stream.manifest.digest, read_part(out, part, parts)
        if index is None or index.complete or not index.shards:
            # Where there are shards to go on after, the state of their last batch tells what differs.
            _check_source(out, index, made_of)
        if index is not None and index.complete:
            return already_packed(out, part, parts)
        writer = PackedWriter(out, batches_per_shard=settings.batches_per_shard, append=True, part=part, parts=parts)
        with writer:
            # Read again under the writer's lock: another process may have gone on meanwhile.
            done = replace(already_packed(out, part, parts), lost=Counter())
            writer.expect(stream.shape, Capacities.of(stream.shape, settings.data.max_edges, late), made_of)
            if writer.index is not None and writer.index.shards:
                batch = last_batch(out, writer.index)
                if batch.state is None:
                    raise ValueError(f"{out}: its batches carry no stream state to go on from; give another folder")
                stream.load_state(batch.state)
            most = settings.max_batches
            for batch in stream if not most or done.batches < most else ():
                writer.write(batch)
                done.batches, done.segments, done.tokens = done.batches + 1, done.segments + batch.segments, done.tokens + batch.tokens
                done.dropped, done.fill = done.dropped + batch.dropped, done.fill + max(batch.fill.values())
                done.lost = Counter(stream.quarantine.counts)
                tell(done)
                if stopped() or done.batches == most:
                    break
            done.lost = Counter(stream.quarantine.counts)
            if parts == 1 and not done.batches and not stopped():
                raise ValueError(
                    f"{named(settings.data.sources)}: holds no item that could be packed"
                    f"{''.join(f', {count} {kind}' for kind, count in sorted(done.lost.items()))}"
                )
            done.complete = not stopped() or done.batches == most
            writer.close(complete=done.complete)
    return done


def pack_all(settings: PackSettings, out: str, *, tell: Callable[[Packed], None], stopped: Callable[[], bool]) -> Packed:
    """Packs every part, and joins them once all are complete.

    Raises:
        ValueError: as `pack_part`.
        PackingError: a rank's process failed or was killed; what it had finished stays.
    """
    if settings.ranks == 1:
        return pack_part(settings, out, 0, tell=tell, stopped=stopped)
    with open_stream(settings.data, settings.batch, _late_interaction(settings), rank=0, world_size=settings.ranks) as stream:
        made_of = stream.manifest.digest
    for part in range(settings.ranks):
        index = read_part(out, part, settings.ranks)
        if index is not None and index.complete:
            # No process looks at it again.
            _check_source(out, index, made_of)
    found = [already_packed(out, part, settings.ranks) for part in range(settings.ranks)]
    cpus = os.cpu_count() or 1
    at_once = min(settings.workers or cpus, settings.ranks)
    data = settings.data
    if data.threads is None and not data.processes:
        settings = replace(settings, data=replace(data, threads=max(1, cpus // at_once)))
    _Workers(settings, out, at_once, found).run(tell, stopped)
    whole = found[0]
    for other in found[1:]:
        whole = whole.plus(other)
    if whole.complete:
        join_parts(out, settings.ranks)
    return whole


class _Workers:
    """The ranks' processes, `at_once` of them at a time."""

    def __init__(self, settings: PackSettings, out: str, at_once: int, found: list[Packed]) -> None:
        self._settings, self._out, self._at_once, self._found = settings, out, at_once, found
        self._context = multiprocessing.get_context("spawn")
        self._stop = self._context.Event()
        self._waiting = deque(part for part, done in enumerate(found) if not done.complete)
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}
        self._failure: str | None = None

    def run(self, tell: Callable[[Packed], None], stopped: Callable[[], bool]) -> None:
        """Runs until every part has ended, one has failed, or a stop is asked for.

        Raises:
            PackingError: a process failed.
        """
        try:
            while self._running or (self._waiting and not self._stop.is_set()):
                while self._waiting and len(self._running) < self._at_once and not self._stop.is_set():
                    self._start(self._waiting.popleft())
                for ready in wait(list(self._running), timeout=0.2):
                    assert isinstance(ready, Connection)
                    self._hear(ready)
                    whole = self._found[0]
                    for part in self._found[1:]:
                        whole = whole.plus(part)
                    tell(whole)
                if stopped() or self._failure is not None:
                    self._stop.set()
        finally:
            self._stop.set()
            for connection, (_, process) in self._running.items():
                process.terminate()
                process.join()
                connection.close()
        if self._failure is not None:
            raise PackingError(self._failure)

    def _start(self, part: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(self._settings, self._out, part, theirs, self._stop), name=f"pack-{part}")
        process.start()
        theirs.close()
        self._running[ours] = (part, process)

    def _hear(self, connection: Connection) -> None:
        part, process = self._running[connection]
        try:
            told: Packed | str = connection.recv()
        except EOFError:
            process.join()
            connection.close()
            del self._running[connection]
            if process.exitcode and self._failure is None:
                self._failure = (
                    f"rank {part}'s process ended with exit code {process.exitcode}: its whole shards stay; pack again to go on after them"
                )
            return
        if isinstance(told, str):
            self._failure = self._failure or f"rank {part}: {told}"
        else:
            self._found[part] = told


def _work(settings: PackSettings, out: str, part: int, parent: Connection, stop: Any) -> None:
    """One part's process. It ends when its parent does: telling a parent that is gone fails."""
    # Ctrl-C reaches all processes of a terminal: the parent hears it and asks the others to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = pack_part(settings, out, part, tell=parent.send, stopped=stop.is_set)
        parent.send(done)
    except BrokenPipeError:
        raise SystemExit(1) from None
    except Exception as error:
        from treadle.launch.cli import one_line

        parent.send(one_line(error))
        raise SystemExit(1) from None
