"""Worker processes: the same answers, a crash that costs one item, a clock that is kept by force, nothing left behind."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode, isolate, probe
from treadle.decoders.channel import Channel
from treadle.decoders.isolate import NoWorker, _Pool, _Worker
from treadle.shape import AudioShape, ImageShape, Modality

HERE = DecodeOptions(isolate=False)
pytestmark = pytest.mark.skipif(not isolate.AVAILABLE, reason="worker processes need Linux's memory files")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Pool]:
    """A pool of the test's own, so that what it kills is missed by nobody."""
    pool = _Pool()
    monkeypatch.setattr(isolate, "POOL", pool)
    yield pool
    pool.close()


def pid(worker: _Worker) -> int:
    return worker._process.pid


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def items(make: Any) -> dict[str, tuple[Modality, bytes]]:
    """One item of each kind that goes to a worker."""
    sound = make.sine(0.3)
    return {
        "mp4": (Modality.VIDEO, make.clip(make.moving(12))),
        "webm": (Modality.VIDEO, make.clip(make.moving(12), "libvpx-vp9", "webm")),
        "flac": (Modality.AUDIO, make.sound(sound, 44_100, "flac", "flac")),
        "mp3": (Modality.AUDIO, make.sound(sound, 44_100, "libmp3lame", "mp3")),
        "opus": (Modality.AUDIO, make.sound(make.sine(0.3, 48_000), 48_000, "libopus", "ogg")),
        "adpcm": (Modality.AUDIO, make.sound(sound, 44_100, "adpcm_ms", "wav")),
        "avif": (Modality.IMAGE, make.save(make.picture(64, 96), "AVIF")),
        "large": (Modality.IMAGE, make.save(Image.new("RGB", (4096, 2048), (1, 2, 3)), "PNG")),
    }


@pytest.mark.parametrize("name", ["mp4", "webm", "flac", "mp3", "opus", "adpcm", "avif", "large"])
def test_a_worker_answers_what_this_process_would(make: Any, pool: _Pool, name: str) -> None:
    modality, data = items(make)[name]
    shape = make.shape(2001, image=ImageShape(patch_side=16, channels=3))
    payload, expected = decode(modality, data, shape), decode(modality, data, shape, HERE)
    assert len(pool._all) == 1, "a worker did it"
    assert (payload.grid, payload.extent, payload.truncated) == (expected.grid, expected.extent, expected.truncated)
    assert payload.array.dtype == expected.array.dtype and payload.array.flags.c_contiguous and payload.array.flags.writeable
    np.testing.assert_array_equal(payload.array, expected.array)
    assert probe(modality, data, shape) == probe(modality, data, shape, HERE)


def test_what_cannot_crash_or_stall_stays_here(make: Any, pool: _Pool) -> None:
    picture = make.picture(32, 48)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        decode(Modality.IMAGE, make.save(Image.fromarray(picture), kind), make.shape())
    decode(Modality.AUDIO, make.wav(bytes(2000)), make.shape())
    decode(Modality.TEXT, b"text", make.shape())
    for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO):
        with pytest.raises(DecodeError):
            decode(modality, b"<html>", make.shape())
    assert not pool._all


def test_refusals_keep_their_kind_and_words(make: Any, pool: _Pool) -> None:
    shape = make.shape()
    for modality, data in items(make).values():
        if data.startswith(b"\x89PNG"):
            continue
        for damaged in (data[: len(data) // 2], data[: len(data) // 2] + bytes(50) + data[len(data) // 2 + 50 :]):
            answers: list[tuple[Any, ...]] = []
            for options in (DecodeOptions(), HERE):
                try:
                    answers.append(decode(modality, damaged, shape, options).extent)
                except DecodeError as error:
                    answers.append((error.kind, error.detail))
            assert answers[0] == answers[1]
    assert len(pool._all) == 1, "one worker took them all, one after the other"


def test_a_crash_costs_one_item(make: Any, pool: _Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is killed by the signal that a codec's bad access raises, while it holds the item."""
    modality, data = items(make)["mp4"]
    shape = make.shape()
    expected = decode(modality, data, shape)
    first = next(iter(pool._all))
    for sign, kind in ((signal.SIGSEGV, "corrupt"), (signal.SIGABRT, "corrupt"), (signal.SIGKILL, "too_large")):
        worker = pool.take()
        pool.give(worker)
        ask = worker.ask

        def crash(*arguments: Any, number: int = pid(worker), sign: signal.Signals = sign, ask: Any = ask) -> Any:
            os.kill(number, signal.SIGSTOP)
            os.kill(number, sign)
            os.kill(number, signal.SIGCONT)
            return ask(*arguments)

        monkeypatch.setattr(worker, "ask", crash, raising=False)
        with pytest.raises(DecodeError, match=r"crashed on this item, signal|was killed") as caught:
            decode(modality, data, shape)
        assert caught.value.kind == kind
        again = decode(modality, data, shape)
        np.testing.assert_array_equal(again.array, expected.array)
    assert not alive(pid(first))


def test_a_worker_that_died_while_it_waited_costs_no_item(make: Any, pool: _Pool) -> None:
    modality, data = items(make)["flac"]
    decode(modality, data, make.shape())
    first = next(iter(pool._all))
    os.kill(pid(first), signal.SIGKILL)
    # Ended, and left for the pool to find.
    os.waitid(os.P_PID, pid(first), os.WEXITED | os.WNOWAIT)
    assert decode(modality, data, make.shape()).extent == (1, 1, 4800)
    assert first not in pool._all and not alive(pid(first))


@pytest.mark.parametrize("kind, columns", [("large", 100), ("mp4", 2001)])
def test_where_no_more_files_open_the_item_is_decoded_here(make: Any, pool: _Pool, kind: str, columns: int) -> None:
    """Of the picture the item is too large for a message, of the clip its payload."""
    modality, data = items(make)[kind]
    shape = make.shape(columns)
    expected = decode(modality, data, shape, HERE)
    decode(modality, data, shape)
    assert len(pool._all) == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        payload = decode(modality, data, shape)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(payload.array, expected.array)


@pytest.mark.parametrize("noise", [True, False], ids=["file", "payload"])
def test_files_limited_in_size_cost_no_item(make: Any, pool: _Pool, noise: bool) -> None:
    """Of noise the item passes the limit, of one colour its payload alone."""
    pixels = np.random.default_rng(0).integers(0, 256, (2048, 4096, 3), np.uint8) if noise else np.zeros((2048, 4096, 3), np.uint8)
    data, shape = make.save(Image.fromarray(pixels), "PNG"), make.shape(40_000)
    expected = decode(Modality.IMAGE, data, shape, HERE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        payload = decode(Modality.IMAGE, data, shape)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    np.testing.assert_array_equal(payload.array, expected.array)


def test_a_stalled_codec_is_killed_at_its_time(make: Any, pool: _Pool) -> None:
    modality, data = items(make)["mp4"]
    shape = make.shape()
    decode(modality, data, shape)
    stalled = next(iter(pool._all))
    os.kill(pid(stalled), signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(DecodeError, match=r"more than 0.2 s \(DecodeOptions.max_wall_s\), and was killed") as caught:
        decode(modality, data, shape, DecodeOptions(max_wall_s=0.2))
    assert caught.value.kind == "timeout"
    assert time.monotonic() - begun < 60, "it did not wait for the codec"
    assert not alive(pid(stalled))
    assert decode(modality, data, shape).extent[0] == 12


def test_a_stalled_picture_is_killed_too(make: Any, pool: _Pool) -> None:
    modality, data = items(make)["large"]
    decode(modality, data, make.shape(100))
    os.kill(pid(next(iter(pool._all))), signal.SIGSTOP)
    with pytest.raises(DecodeError) as caught:
        decode(modality, data, make.shape(100), DecodeOptions(max_wall_s=0.1))
    assert caught.value.kind == "timeout"


def test_many_threads_have_a_worker_each_and_share_them_later(make: Any, pool: _Pool) -> None:
    modality, data = items(make)["flac"]
    shape = make.shape()
    expected = decode(modality, data, shape, HERE).array
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: decode(modality, data, shape).array, range(40)))
    assert 1 <= len(pool._all) <= 4
    for array in answers:
        np.testing.assert_array_equal(array, expected)
    assert len(pool._idle) <= max(1, os.cpu_count() or 1)


def test_an_interrupted_wait_ends_the_worker(make: Any, pool: _Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the item that was given up must not become the next item's."""
    modality, data = items(make)["flac"]
    decode(modality, data, make.shape())
    worker = next(iter(pool._all))
    send = worker._channel.send

    def interrupted(*arguments: Any) -> None:
        send(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker._channel, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode(modality, data, make.shape())
    assert not pool._all and not alive(pid(worker))
    assert decode(modality, data, make.shape()).extent == (1, 1, 4800)


def test_where_no_worker_starts_the_item_is_decoded_here(
    make: Any, pool: _Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(_Worker, "__init__", fail)
    modality, data = items(make)["flac"]
    assert decode(modality, data, make.shape()).extent == (1, 1, 4800)
    assert probe(modality, data, make.shape()).extent[2] > 0
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["decoding without the protection of worker processes for 60 s: no more processes"], "told once"
    with pytest.raises(NoWorker):
        isolate.decode_isolated(modality, memoryview(data), make.shape(), DecodeOptions(), "tail")


def test_an_interpreter_that_cannot_start_is_told(pool: _Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "_MAIN", "import sys; sys.exit(3)")
    with pytest.raises(NoWorker, match="ended as it started, with status 3"):
        pool.take()


SCRIPT = """
import os, pathlib, sys
from treadle.decoders import DecodeOptions, decode, isolate
from treadle.shape import AudioShape, BatchShape, Modality
data = pathlib.Path(sys.argv[1]).read_bytes()
shape = BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=999, audio=AudioShape(chunk_samples=100))
extent = decode(Modality.AUDIO, data, shape).extent
before = {worker._process.pid for worker in isolate.POOL._all}
child = os.fork()
if child == 0:
    same = decode(Modality.AUDIO, data, shape).extent == extent
    fresh = before.isdisjoint(worker._process.pid for worker in isolate.POOL._all)
    isolate.POOL.close()
    os._exit(0 if same and fresh else 1)
assert os.waitpid(child, 0)[1] == 0
assert decode(Modality.AUDIO, data, shape).extent == extent
assert {worker._process.pid for worker in isolate.POOL._all} == before
sys.stdout.write(" ".join(map(str, before)))
"""


def test_a_forked_child_has_workers_of_its_own_and_an_exit_leaves_none(make: Any, tmp_path: Any) -> None:
    file = tmp_path / "a.flac"
    file.write_bytes(items(make)["flac"][1])
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", SCRIPT, str(file)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout and not any(alive(int(number)) for number in done.stdout.split())


def test_no_thread_and_no_multiprocessing_stands_behind_a_worker(make: Any, pool: _Pool) -> None:
    import multiprocessing

    before = threading.active_count()
    modality, data = items(make)["flac"]
    decode(modality, data, make.shape())
    assert threading.active_count() == before and not multiprocessing.active_children()


def test_large_bodies_are_shared_and_malformed_messages_refused() -> None:
    import socket

    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    for size in (0, 1, 1 << 15, (1 << 15) + 1, 5_000_000):
        body = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        one.send({"size": size}, body.data)
        head, seen = other.receive(10)
        assert head == {"size": size} and bytes(seen) == body.tobytes()
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    ours.sendall(b"\xff" * 13)
    with pytest.raises(OSError, match="malformed"):
        other.receive(10)
    one.close()
    assert one.closed
    with pytest.raises((EOFError, OSError)):
        other.receive(10)
    other.close()


def test_settings_reach_the_worker_whole() -> None:
    from dataclasses import replace

    from treadle.decoders.worker import read_settings
    from treadle.shape import BatchShape, VideoShape

    shape = BatchShape(
        max_rows_per_device=2, max_segments_per_device=3, max_columns_per_row=77, max_choices_per_item=4,
        image=ImageShape(patch_side=8, channels=1), video=VideoShape(patch_side=4, frame_stride=5), audio=AudioShape(chunk_samples=9),
    )  # fmt: skip
    options = DecodeOptions(max_audio_s=float("inf"), max_wall_s=0.25, strict=False, max_pixels=12345)
    assert read_settings(isolate._settings(shape, options)) == (shape, replace(options, isolate=False))


def test_a_payload_outlives_its_worker(make: Any, pool: _Pool) -> None:
    modality, data = items(make)["mp4"]
    payload: Payload = decode(modality, data, make.shape())
    copy = payload.array.copy()
    pool.close()
    np.testing.assert_array_equal(payload.array, copy)
    payload.array[:] = 7
