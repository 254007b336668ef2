"""Recordings to one rate: soxr at its high-quality setting, fed in blocks, flushed, exact in length, cut where the row is full."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.decoders.errors import DecodeError
from treadle.decoders.spare import Spares

Mono = NDArray[np.float32]
Block = tuple[int, Mono]
"""A rate in Hz and consecutive mono samples."""
LEAST_RATE_HZ, MOST_RATE_HZ = 1_000, 1_000_000

_SCALES = {"u1": (1 / 128, 128.0), "i2": (1 / 2**15, 0.0), "i4": (1 / 2**31, 0.0), "i8": (1 / 2**63, 0.0)}
"""Factor, and the level that is silence, by numpy's name of an integer type."""
_LEAST_GROWTH, _MOST_GROWTH = 1 << 18, 1 << 20
"""Samples by which the answer's array grows beyond what it must hold."""
_STREAMS = Spares[tuple[int, int], Any](8)
"""By rate and target: a new one costs a tenth of a millisecond, a fifth of what two seconds of sound do."""
_LOUDEST = 1e30
"""What float64 samples are clipped to, so that float32 holds them."""


def resampled_count(count: int, rate_hz: int, target_hz: int) -> int:
    """Samples that `count` samples become: their time, rounded up to a whole sample."""
    return -(-count * target_hz // rate_hz)


class Resampler:
    """One run of samples of a constant rate, answered at `target_hz`."""

    def __init__(self, rate_hz: int, target_hz: int) -> None:
        if not LEAST_RATE_HZ <= rate_hz <= MOST_RATE_HZ:
            raise DecodeError("unsupported", f"a sample rate of {rate_hz} Hz (read: {LEAST_RATE_HZ} to {MOST_RATE_HZ})")
        self._rate_hz, self._target_hz = rate_hz, target_hz
        self._taken = self._given = 0
        self._stream: Any = None
        if rate_hz != target_hz:
            import soxr

            self._stream = _STREAMS.take((rate_hz, target_hz)) or soxr.ResampleStream(rate_hz, target_hz, 1, "float32", "HQ")

    def feed(self, block: Mono) -> Mono:
        """The samples that are settled after `block`."""
        self._taken += len(block)
        if self._stream is None:
            return block
        out: Mono = self._stream.resample_chunk(block)
        self._given += len(out)
        return out

    def flush(self) -> Mono:
        """The samples that were waiting for the filter's tail, up to the run's exact length; nothing can be fed after."""
        if self._stream is None:
            return np.empty(0, np.float32)
        left = resampled_count(self._taken, self._rate_hz, self._target_hz) - self._given
        # The library rounds a run's length; silence behind it yields the sample that rounding down would lose.
        silence = np.zeros(2 + 2 * self._rate_hz // self._target_hz, np.float32)
        out: Mono = self._stream.resample_chunk(silence, last=True)
        stream, self._stream = self._stream, None
        stream.clear()
        _STREAMS.give((self._rate_hz, self._target_hz), stream)
        return out[: max(left, 0)]


def gather(blocks: Iterable[Block], target_hz: int, wanted: int) -> tuple[Mono, bool]:
    """The first `wanted` samples of consecutive `(rate, mono samples)` blocks at `target_hz`, and whether there were more.

    A run of blocks of one rate is one signal; reading stops as soon as the answer is settled.
    """
    out = _Samples()
    rate_hz = 0
    resampler: Resampler | None = None
    for rate, block in blocks:
        if resampler is None or rate != rate_hz:
            if resampler is not None:
                out.add(resampler.flush())
            resampler, rate_hz = Resampler(rate, target_hz), rate
        out.add(resampler.feed(block))
        if out.count > wanted:
            break
    else:
        if resampler is not None:
            out.add(resampler.flush())
    array = out.first(wanted)
    return np.clip(array, -1.0, 1.0, out=array), out.count > wanted


class _Samples:
    """Samples in one array that grows where it lies: memory from 32 MiB on is moved by the kernel, not copied."""

    def __init__(self) -> None:
        self._array: Mono = np.empty(_LEAST_GROWTH, np.float32)
        self.count = 0

    def add(self, block: Mono) -> None:
        """Appends a copy of `block`."""
        count = self.count + len(block)
        if count > len(self._array):
            self._array.resize(count + max(_LEAST_GROWTH, min(count // 4, _MOST_GROWTH)), refcheck=False)
        self._array[self.count : count] = block
        self.count = count

    def first(self, wanted: int) -> Mono:
        """The first `wanted` samples, the rest of their memory given back; nothing can be added after."""
        self._array.resize(min(wanted, self.count), refcheck=False)
        return self._array


def to_mono(samples: NDArray[Any] | Sequence[NDArray[Any]], channels: int, *, planar: bool) -> Mono:
    """The plain average of the channels as float32, integers scaled to [-1, 1).

    Args:
        samples: a row per channel where `planar`, else frames of `channels` samples one behind the other.

    Raises:
        DecodeError: a sample is NaN or infinite.
    """
    dtype = samples.dtype if isinstance(samples, np.ndarray) else samples[0].dtype
    scale, bias = _SCALES.get(dtype.str[1:], (1.0, 0.0))
    work = np.float64 if dtype.itemsize > 4 else np.float32
    rows: Sequence[NDArray[Any]] | NDArray[Any]
    if isinstance(samples, np.ndarray):
        # Converted while they lie side by side, and only then taken apart.
        whole = samples.astype(work, copy=False)
        rows = whole.reshape(channels, -1) if planar else whole.reshape(-1, channels).T
    else:
        rows = [row.astype(work, copy=False) for row in samples]
    with np.errstate(over="ignore", invalid="ignore"):
        mono = np.add(rows[0], rows[1]) if channels > 1 else np.array(rows[0])
        for row in rows[2:]:
            mono += row
        if bias:
            mono -= bias * channels
        if scale != channels:
            mono *= scale / channels
        # One sum tells of any NaN or infinity in it at a tenth of the cost of looking at each sample; where it is the sum that
        # overflows, a wider one tells.
        if dtype.kind == "f" and not np.isfinite(mono.sum()) and not np.isfinite(mono.sum(dtype=np.float64)):
            raise DecodeError("corrupt", "a sample is not finite")
    return np.ascontiguousarray(np.clip(mono, -_LOUDEST, _LOUDEST) if work is np.float64 else mono, np.float32)
