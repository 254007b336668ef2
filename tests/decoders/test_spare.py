"""Things kept while idle: one user's at a time, few, and none left when the process ends."""

import subprocess
import sys
import threading

import numpy as np
import soxr
from numpy.typing import NDArray

from treadle.decoders.resample import Resampler
from treadle.decoders.spare import Spares


def test_a_thing_is_one_users_at_a_time() -> None:
    spares = Spares[str, object](2)
    assert spares.take("a") is None
    first, second = object(), object()
    spares.give("a", first)
    assert spares.take("a") is first
    assert spares.take("a") is None
    spares.give("a", first)
    spares.give("a", second)
    assert spares.take("a") is second
    assert spares.take("a") is None


def test_the_one_used_longest_ago_gives_way() -> None:
    spares = Spares[int, int](2)
    for key in (1, 2, 3):
        spares.give(key, key)
    assert [spares.take(key) for key in (1, 2, 3)] == [None, 2, 3]
    for key in (1, 2, 1, 3):
        spares.give(key, spares.take(key) or key)
    assert [spares.take(key) for key in (1, 2, 3)] == [1, None, 3]


def test_no_thing_is_handed_out_twice_among_threads() -> None:
    spares = Spares[int, list[int]](3)
    wrong: list[str] = []

    def use(number: int) -> None:
        for turn in range(3000):
            key = (number + turn) % 4
            thing = spares.take(key)
            thing = [] if thing is None else thing
            if thing:
                wrong.append(f"{number} found {thing}")
            thing.append(number)
            thing.clear()
            spares.give(key, thing)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kept_resampler_has_no_memory_of_what_it_was_fed() -> None:
    rng = np.random.default_rng(0)
    signals = [rng.normal(0, 0.1, count).astype(np.float32) for count in (50_000, 1, 7_777, 30_001)]

    def resample(signal: NDArray[np.float32], rate_hz: int, *, new: bool = False) -> bytes:
        resampler = Resampler(rate_hz, 16_000)
        if new:
            resampler._stream = soxr.ResampleStream(rate_hz, 16_000, 1, "float32", "HQ")
        out = [resampler.feed(signal[at : at + 9999]).tobytes() for at in range(0, len(signal), 9999)]
        return b"".join(out) + resampler.flush().tobytes()

    expected = [resample(signal, 44_100, new=True) for signal in signals]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 2, 0, 0)):
        assert [resample(signals[number], 44_100) for number in order] == [expected[number] for number in order]


def test_nothing_is_left_when_the_process_ends() -> None:
    """The resampling library writes to the error output about each of its objects that outlives it."""
    program = (
        "import numpy as np; from treadle.decoders.resample import Resampler; "
        "r = Resampler(44_100, 16_000); r.feed(np.zeros(9999, np.float32)); r.flush()"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
