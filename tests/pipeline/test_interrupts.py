"""Errors that are nobody's fault (a bug, no memory, Ctrl-C), wherever they come up: they reach whoever takes the batches, nothing hangs,
no thread or process stays behind, and what is read afterwards lacks nothing.
"""

import errno
import gc
import gzip
import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import cache, connections, grouping, http_source, prepare, sample_table, shards, spool, storage, tar, unpack
from treadle.pipeline.cache import ShardCache
from treadle.pipeline.feed import Feed
from treadle.pipeline.processes import Processes
from treadle.pipeline.readahead import Readahead
from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.stream import ShardStream
from treadle.pipeline.units import Units

COUNTS = [14, 9, 17]
WITHIN_S = 60.0
"""Far more than any of it takes, however busy the machine: what is not over by then hangs."""

POINTS: list[tuple[object, str]] = [
    (http_source.HttpSource, "fetch"),
    (connections.Connections, "take"),
    (storage.RemoteStream, "_some"),
    (storage.RemoteStream, "read"),
    (unpack.UnpackedStream, "read"),
    (spool.Spool, "_keep"),
    (spool.SpoolStream, "read"),
    (sample_table.SampleTable, "_search_window"),
    (sample_table.SampleTable, "_hold"),
    (tar.MemberReader, "_parse"),
    (grouping.Grouping, "_block"),
    (shards.Shard, "samples_at"),
    (cache.KeepingStream, "read"),
    (cache.Part, "finish"),
    (prepare, "decode_bag"),
]
"""Where reading threads, decoding threads and the consumer pass."""

ERRORS = (RuntimeError, MemoryError, SystemExit, KeyboardInterrupt)


class Broken:
    """Raises, the n-th time that it is called."""

    def __init__(self, at: int, error: type[BaseException], then: Callable[..., Any]) -> None:
        self.left = at
        self.raised = 0
        self._error = error
        self._then = then
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self._lock:
            self.left -= 1
            raises = self.left == 0
            self.raised += raises
        if raises:
            raise self._error("injected")
        return self._then(*args, **named)

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return lambda *args, **named: self(instance, *args, **named)


def in_time(work: Callable[[], Any]) -> Any:
    """What `work` answers, or raises; a failure where it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:  # the point: of every kind
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # In short turns: a machine that is paused for a while counts one of them.
    for _ in range(int(WITHIN_S / 0.05)):
        thread.join(0.05)
        if found:
            break
    assert found, "it hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("treadle")]


@pytest.fixture(name="remote")
def remote_fixture(tars: Any, tmp_path: Path, site: Any) -> list[str]:
    """Plain and packed shards, on a server."""
    tars.write_mixed(tmp_path / "mixed", COUNTS)
    urls: list[str] = []
    for number, path in enumerate(sorted((tmp_path / "mixed").glob("*.tar"))):
        data = path.read_bytes()
        urls.append(site.url(path.name + (".gz" if number == 1 else ""), gzip.compress(data) if number == 1 else data))
    return urls


def opened(tars: Any, urls: list[str], folder: Path) -> ShardStream:
    """More lanes than shards: parts that share spools and tables."""
    cached = ShardCache(folder=folder, max_bytes=1 << 24)
    return ShardStream(urls, tars.shape, lanes=4, shuffle=12, epochs=1, window=1, threads=2, seed=3, cache=cached)


@pytest.mark.parametrize("place", range(len(POINTS)), ids=[name for _, name in POINTS])
def test_an_error_of_any_kind_reaches_the_consumer(
    tars: Any, tmp_path: Path, remote: list[str], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = POINTS[place]
    with opened(tars, remote, tmp_path / "cache") as stream:
        whole = in_time(partial(tars.run, stream))
    passed = 0
    for number, error in enumerate(ERRORS):
        for resumed in (False, True):
            broken = Broken((1, 2)[number % 2], error, getattr(owner, name))
            with opened(tars, remote, tmp_path / f"cache{number}{resumed}") as stream:
                if resumed:
                    stream.load_state(whole[1][1])
                with monkeypatch.context() as patched:
                    patched.setattr(owner, name, broken)
                    if resumed:
                        # What was held back and what waited is read as it is needed.
                        stream.load_state(whole[1][1])
                    try:
                        in_time(partial(tars.run, stream))
                    except (error, RuntimeError) as found:
                        # Another part of the shard may come first: it names what interrupted the reading.
                        assert "injected" in str(found)
                    else:
                        assert not broken.raised
                passed += broken.raised
                assert our_threads() == []
                if error in (RuntimeError, MemoryError) and broken.raised:
                    # A stream that failed says so again; another one reads all of it.
                    with pytest.raises((error, RuntimeError), match="injected"):
                        next(stream)
            with opened(tars, remote, tmp_path / f"cache{number}{resumed}") as stream:
                assert in_time(partial(tars.run, stream)) == whole
    assert passed


def test_after_an_interrupt_the_stream_goes_on_behind_the_last_batch(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the midst of a local shard: nothing is skipped, neither by this stream nor by the next one over the same files."""
    pattern = tars.write_texts(tmp_path / "texts", [120, 90], width=60)

    def make() -> ShardStream:
        return ShardStream(pattern, tars.shape, lanes=4, shuffle=8, epochs=1, window=1, threads=1)

    with make() as stream:
        whole = tars.run(stream)
    sample_table._tables.clear()
    for at in (1, 2, 3, 5):
        for owner, name in ((tar.MemberReader, "_parse"), (sample_table.SampleTable, "_hold"), (grouping.Grouping, "_block")):
            found: list[Any] = []
            with make() as stream, monkeypatch.context() as patched:
                patched.setattr(owner, name, Broken(at, KeyboardInterrupt, getattr(owner, name)))
                while True:
                    try:
                        for batch in stream:
                            found.append(tars.snapshot(batch))
                        break
                    except KeyboardInterrupt:
                        continue
            assert found == whole
            sample_table._tables.clear()


def test_an_interrupt_before_the_first_batch_of_a_loaded_state(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = tars.write_texts(tmp_path / "texts", [200], width=20)
    with ShardStream(pattern, tars.shape, lanes=2, shuffle=8, epochs=1, window=1) as stream:
        whole = tars.run(stream)
    with ShardStream(pattern, tars.shape, lanes=2, shuffle=8, epochs=1, window=1) as stream:
        stream.load_state(whole[2][1])
        with monkeypatch.context() as patched:
            patched.setattr(tar.MemberReader, "_parse", Broken(1, KeyboardInterrupt, tar.MemberReader._parse))
            sample_table._tables.clear()
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert tars.run(stream) == whole[3:]


def test_every_text_once_after_interrupts_at_random(tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = tars.write_texts(tmp_path / "texts", [150, 120, 130], width=20)
    seen: Counter[tuple[int, int]] = Counter()

    with ShardStream(pattern, tars.text_shape, lanes=4, shuffle=20, epochs=2, window=2, threads=1) as stream:
        for at in (3, 7, 2, 11, 5, 40, 1, 1000):
            with monkeypatch.context() as patched:
                patched.setattr(grouping.Grouping, "_block", Broken(at, KeyboardInterrupt, grouping.Grouping._block))
                try:
                    for batch in stream:
                        seen.update(tars.texts(batch))
                except KeyboardInterrupt:
                    continue
    assert set(seen.values()) == {2} and len(seen) == 400


WORK = """
def work(task):
    name, number = task
    if number == 3:
        raise {"SystemExit": SystemExit, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt, "OSError": OSError}[name]("injected")
    return number
"""


@pytest.mark.parametrize("name", ["MemoryError", "OSError", "SystemExit", "KeyboardInterrupt"])
def test_an_error_of_any_kind_in_a_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends the process is told as its end."""
    (tmp_path / "injected.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    work = importlib.import_module("injected").work

    def pops() -> None:
        with Readahead[int, tuple[str, int], int](work, processes=1) as ahead:
            for number in range(6):
                ahead.submit(number, (name, number), charge_bytes=1)
            for number in range(6):
                assert ahead.pop() == (number, number)

    try:
        with pytest.raises((MemoryError, OSError, RuntimeError), match=r"injected|decode processes after the other ended"):
            in_time(pops)
    finally:
        sys.modules.pop("injected")
    assert our_threads() == []


@pytest.mark.parametrize("where", ["local", "local.gz", "remote"])
@pytest.mark.parametrize("short_of", [errno.EMFILE, errno.ENFILE])
def test_what_a_process_runs_out_of_is_no_shards_fault(
    tars: Any, tmp_path: Path, site: Any, where: str, short_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = []
    for path in sorted(Path(tars.write_mixed(tmp_path / "mixed", COUNTS)).parent.glob("*.tar")):
        data = path.read_bytes() if where != "local.gz" else gzip.compress(path.read_bytes())
        (tmp_path / (path.name + where[5:])).write_bytes(data)
        urls.append(site.url(path.name, data) if where == "remote" else str(tmp_path / (path.name + where[5:])))
    retry = RetryPolicy(attempts=2, base_delay_s=0.0)

    def make() -> ShardStream:
        return ShardStream(urls, tars.shape, lanes=3, shuffle=0, epochs=1, window=1, retry=retry)

    whole = tars.run(make())
    begun, open_file, connect = 0, os.open, connections.Peer.connect

    def short(count: bool) -> None:
        nonlocal begun
        begun += count
        # Of connections there must be none: one that was left open would serve what was to be tried again.
        if begun > (0 if where == "remote" else 2):
            raise OSError(short_of, os.strerror(short_of))

    def opening(path: Any, *args: Any, **named: Any) -> int:
        short(str(path) in urls)
        return open_file(path, *args, **named)

    def connecting(peer: connections.Peer, timeout_s: float) -> Any:
        short(True)
        return connect(peer, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        patch.setattr(connections.Peer, "connect", connecting)
        stream = make()
        with pytest.raises(OSError, match="ulimit -n"):
            list(stream)
    assert stream.quarantine.total == 0
    again = make()
    again.load_state(stream.state)
    assert tars.run(again) == whole


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("by", ["a signal", "another thread"])
def test_a_stream_is_closed_while_it_makes_a_batch(
    tars: Any, tmp_path: Path, by: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = tars.write_mixed(tmp_path / "mixed", COUNTS)

    def make() -> ShardStream:
        return ShardStream(pattern, tars.shape, lanes=4, shuffle=12, epochs=1, window=1, threads=2 - processes, processes=processes)

    whole = tars.run(make())
    stream = make()
    first = [tars.snapshot(next(stream))]
    closing = threading.Thread(target=stream.close)
    take = Feed._pop

    def closed_meanwhile(feed: Feed) -> Any:
        if by == "a signal":
            stream.close()
        elif not closing.ident:
            closing.start()
            while not stream._closed:
                pass
        return take(feed)

    monkeypatch.setattr(Feed, "_pop", closed_meanwhile)

    def rest() -> None:
        with pytest.raises(ValueError, match="this stream is closed"):
            list(stream)

    in_time(rest)
    monkeypatch.undo()
    if closing.ident:
        in_time(closing.join)
    assert stream.quarantine.total == 0
    again = make()
    again.load_state(stream.state)
    assert first + tars.run(again) == whole


def test_closing_a_stream_that_waits_for_a_server_loses_nothing(tars: Any, tmp_path: Path, server: Any) -> None:
    asked, closed = threading.Event(), threading.Event()

    def silent(handler: Any) -> None:
        asked.set()
        closed.wait(WITHIN_S)

    server.faults = [silent] * 8
    quarantine = tmp_path / "left_out.jsonl"
    stream = ShardStream(server.url, tars.shape, lanes=2, epochs=1, quarantine=quarantine)

    def close() -> None:
        asked.wait(WITHIN_S)
        stream.close()
        closed.set()

    closing = threading.Thread(target=close)
    closing.start()

    def first() -> None:
        with pytest.raises(ValueError, match="this stream is closed"):
            next(stream)

    in_time(first)
    in_time(closing.join)
    assert stream.quarantine.total == 0
    assert not quarantine.exists() or quarantine.read_bytes() == b""


def test_the_files_of_abandoned_streams_are_closed(tars: Any, tmp_path: Path) -> None:
    """More shards than tables are kept for, in parts, none read to its end."""
    pattern = tars.write_texts(tmp_path, [40] * (3 * sample_table.MAX_TABLES), width=6000)
    numbers = []
    for _ in range(3):
        with ShardStream(pattern, tars.text_shape, lanes=6 * sample_table.MAX_TABLES, shuffle=0, epochs=1, threads=1) as stream:
            next(stream)
        gc.collect()
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        numbers.append(sum(link.is_symlink() and link.readlink().is_relative_to(tmp_path) for link in links))
    # Those of the tables that are kept for the next stream.
    assert numbers == [sample_table.MAX_TABLES] * 3


@pytest.mark.parametrize("place", [(Processes, "shutdown"), (Readahead, "close"), (Feed, "settle"), (Units, "close")])
def test_a_stream_whose_closing_is_interrupted_is_closed_by_the_next(
    tars: Any, tmp_path: Path, place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ShardStream(tars.write_mixed(tmp_path / "mixed", COUNTS), tars.shape, shuffle=12, epochs=1, window=1, processes=1)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(*place, Broken(1, KeyboardInterrupt, getattr(*place)))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    stream.close()
    assert our_threads() == []
