"""Decoding where a crash costs one item: a pool of worker processes that grows with the threads that decode at once.

    decode ── which formats? ──┬─ in this process
                               └─ idle worker, or a new one ── item ──> worker.py ── payload ──> array over shared memory
                                     │ ends, or is killed past the wall clock
                                     └─> DecodeError; the next item gets another worker

Workers are plain child processes with a socket each: no threads, no helper processes, nothing of the main module imported.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import cast, get_args

import numpy as np

from treadle.decoders.channel import Channel, Head, NoMemoryFile, socket_pair
from treadle.decoders.errors import DecodeError, DecodeErrorKind
from treadle.decoders.limits import DecodeOptions
from treadle.decoders.payload import Array, Extent, Payload, Probe
from treadle.decoders.sniff import AUDIO_FORMATS, VIDEO_FORMATS, Format
from treadle.decoders.wav import read_wav
from treadle.shape import BatchShape, Modality

logger = logging.getLogger(__name__)

_START_S = 120.0
"""Seconds that a worker may take to start, imports on a busy machine included."""
_GRACE_S = 1.0
"""Seconds past the wall clock in which a worker may still say by itself that time is up."""
_PAUSE_S = 60.0
"""Seconds in which no other start is tried after one that failed."""
_PATIENCE_S = 5.0
"""Seconds that a process whose channel is closed may take to end."""
HEAVY_PIXELS = 1 << 23
"""Pictures from here on go to a worker, whose start and transfer are nothing beside them; smaller ones take half a second at most."""
_MAIN = "import sys; sys.path[:] = sys.argv[2:]; from treadle.decoders.worker import serve; serve(int(sys.argv[1]))"

AVAILABLE = sys.platform == "linux" and bool(sys.executable)
"""Whether workers can be had here: they need memory that two processes map, and an interpreter to start."""


_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26), "MALLOC_TOP_PAD_": str(2**24)}
"""Memory that an item gives back, up to 64 MiB, stays with a worker for the next: fresh pages cost a sixth of the time of small items."""


def worker_environment() -> dict[str, str]:
    """What a process that decodes finds in its environment: one thread, and memory kept, unless the user's says otherwise."""
    return {**_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def search_path() -> list[str]:
    """Where this process finds modules, as arguments of another: one each, since a single one may have 128 KiB at most."""
    return [path for path in sys.path if isinstance(path, str)]


def codec_modules(shape: BatchShape) -> list[str]:
    """What the decoders of the modalities in `shape` import on first use: a process that others are forked from imports it for all."""
    names: list[str] = []
    if shape.is_live(Modality.IMAGE):
        names += ["simplejpeg", "PIL.Image", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin"]
    if shape.is_live(Modality.AUDIO):
        names += ["av", "av.logging", "soxr"]
    if shape.is_live(Modality.VIDEO):
        names += ["av", "av.logging", "av.video.reformatter"]
    return names


class NoWorker(Exception):
    """No worker can be started here."""


class _Worker:
    """One child process."""

    def __init__(self) -> None:
        ours, theirs = socket_pair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), *search_path()],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=worker_environment(),
                )
            except OSError:
                ours.close()
                raise
        self._channel = Channel(ours)
        try:
            self._channel.receive(_START_S)
        except (OSError, EOFError) as error:
            raise OSError(f"a decode worker ended as it started, with status {self.end(_PATIENCE_S)}") from error

    def ask(self, head: Head, body: memoryview, limit_s: float) -> tuple[Head, memoryview]:
        """The worker's answer.

        Raises:
            TimeoutError: none came in time.
            EOFError, OSError: the worker has ended.
        """
        self._channel.send(head, body)
        return self._channel.receive(min(limit_s + _GRACE_S, threading.TIMEOUT_MAX))

    def end(self, patience_s: float = 0.0) -> int | None:
        """Ends the process, by force once patience is over; the status that it ended with by itself, negative for a signal."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        self._process.wait()
        return None

    @property
    def alive(self) -> bool:
        """Whether the process has not ended by itself: while it waits, memory that others want may cost it its life."""
        return self._process.poll() is None

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        self._channel.close()
        self._process.returncode = 0


class _Pool:
    """Workers that wait for an item, and all that live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._most_idle = os.cpu_count() or 1
        self._reason, self._refuse_until_s = "", 0.0

    def take(self) -> _Worker:
        """A worker of the caller's own, the one used last where there is one.

        Raises:
            NoWorker: none can be started, or none could a moment ago.
        """
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
                if worker is None and time.monotonic() < self._refuse_until_s:
                    raise NoWorker(self._reason)
            if worker is None:
                break
            if worker.alive:
                return worker
            self.drop(worker)
        try:
            worker = _Worker()
        except OSError as error:
            with self._lock:
                self._reason, self._refuse_until_s = str(error), time.monotonic() + _PAUSE_S
            logger.warning("decoding without the protection of worker processes for %g s: %s", _PAUSE_S, error)
            raise NoWorker(str(error)) from error
        with self._lock:
            self._all.add(worker)
        return worker

    def give(self, worker: _Worker) -> None:
        """Takes a worker back; more than there are processors do not wait."""
        with self._lock:
            if len(self._idle) < self._most_idle:
                self._idle.append(worker)
                return
        self.drop(worker)

    def drop(self, worker: _Worker, patience_s: float = 0.0) -> int | None:
        """Ends a worker that is not to be used again; answers as `_Worker.end`."""
        with self._lock:
            self._all.discard(worker)
        return worker.end(patience_s)

    def close(self) -> None:
        """Ends every worker that waits."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._all.difference_update(idle)
        for worker in idle:
            worker.end(_PATIENCE_S)

    def forget(self) -> None:
        """Starts anew in a forked child."""
        workers = self._all
        self._lock, self._idle, self._all = threading.Lock(), [], set()
        for worker in workers:
            worker.forget()


POOL = _Pool()
atexit.register(POOL.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)


def codec_may_crash(modality: Modality, kind: Format | None, data: memoryview, options: DecodeOptions) -> bool:
    """Whether the item goes through FFmpeg or libavif: large C libraries whose decoders have crashed on hostile files before."""
    if modality is Modality.VIDEO:
        return kind in VIDEO_FORMATS
    if modality is Modality.AUDIO:
        return kind in AUDIO_FORMATS and not (kind == "wav" and all(form.native for form in read_wav(data, options)))
    return modality is Modality.IMAGE and kind == "avif"


def decode_isolated(modality: Modality, data: memoryview, shape: BatchShape, options: DecodeOptions, cut: str) -> Payload:
    """`decode`, in a worker.

    Raises:
        DecodeError: the item is refused, crashed the worker, or was killed past the wall clock.
    """
    head, body = _ask(modality, data, shape, options, cut, probe=False)
    dtype = np.dtype(np.float32 if modality is Modality.AUDIO else np.uint8)
    if head["dtype"] != dtype.str:
        raise DecodeError("corrupt", f"a decode worker answered {head['dtype']}")
    array = np.frombuffer(body, dtype).reshape(head["shape"])
    if not array.flags.writeable:
        array = array.copy()
    return Payload(cast(Array, array), _extent(head["grid"]), _extent(head["extent"]), bool(head["truncated"]))


def probe_isolated(modality: Modality, data: memoryview, shape: BatchShape, options: DecodeOptions, cut: str) -> Probe:
    """`probe`, in a worker.

    Raises:
        DecodeError: as `decode_isolated`.
    """
    head, _ = _ask(modality, data, shape, options, cut, probe=True)
    return Probe(_extent(head["grid"]), _extent(head["extent"]), bool(head["exact"]))


def crash_error(status: int | None) -> DecodeError:
    """What a process that ended in the middle of an item says of the item: `status` as `Popen.returncode` has it."""
    if status == -signal.SIGKILL:
        return DecodeError("too_large", "the decoding process was killed, most likely for the memory that this item took")
    how = "" if status is None else f", signal {-status}" if status < 0 else f", exit status {status}"
    return DecodeError("corrupt", f"the codec crashed on this item{how}")


def _extent(values: list[int]) -> Extent:
    t, h, w = values
    return int(t), int(h), int(w)


@functools.lru_cache(maxsize=16)
def _settings(shape: BatchShape, options: DecodeOptions) -> str:
    """Shape and options as a text that the worker, too, reads once only."""
    return json.dumps({"shape": asdict(shape), "options": {**asdict(options), "isolate": False}})


def _ask(
    modality: Modality, data: memoryview, shape: BatchShape, options: DecodeOptions, cut: str, *, probe: bool
) -> tuple[Head, memoryview]:
    head: Head = {"settings": _settings(shape, options), "modality": int(modality), "cut": cut, "probe": probe}
    worker = POOL.take()
    try:
        answer, body = worker.ask(head, data, options.max_wall_s)
    except TimeoutError as error:
        POOL.drop(worker)
        raise DecodeError(
            "timeout", f"decoding took more than {options.max_wall_s:g} s (DecodeOptions.max_wall_s), and was killed"
        ) from error
    except NoMemoryFile as error:
        POOL.drop(worker)
        raise NoWorker(str(error)) from error
    except (EOFError, OSError) as error:
        raise crash_error(POOL.drop(worker, _PATIENCE_S)) from error
    except BaseException:
        # The answer that is still to come must not reach the next item.
        POOL.drop(worker)
        raise
    POOL.give(worker)
    if "no_memory_file" in answer:
        raise NoWorker(str(answer["no_memory_file"]))
    if "missing" in answer:
        raise ImportError(answer["missing"])
    if "kind" in answer:
        known: dict[str, DecodeErrorKind] = {kind: kind for kind in get_args(DecodeErrorKind)}
        raise DecodeError(known.get(answer["kind"], "corrupt"), str(answer["detail"]))
    return answer, body
