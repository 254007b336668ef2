"""The resampler: exact lengths, a flat pass band, no aliases, and the same answer however it is fed."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from treadle.decoders import DecodeError
from treadle.decoders.resample import Resampler, gather, resampled_count, to_mono

PAIRS = [
    (44_100, 16_000),
    (48_000, 16_000),
    (32_000, 16_000),
    (22_050, 16_000),
    (8_000, 16_000),
    (44_100, 48_000),
    (96_000, 16_000),
    (11_025, 24_000),
]


def resample(samples: NDArray[np.float32], rate: int, target: int, block: int = 1 << 16) -> NDArray[np.float32]:
    return gather(((rate, samples[i : i + block]) for i in range(0, len(samples), block)), target, 1 << 40)[0]


def tone(hz: float, rate: int, seconds: float = 1.0, peak: float = 0.5) -> NDArray[np.float32]:
    return (peak * np.sin(2 * np.pi * hz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def level(samples: NDArray[np.float32]) -> float:
    middle = samples[len(samples) // 4 : -len(samples) // 4].astype(np.float64)
    return float(np.sqrt((middle**2).mean()))


@pytest.mark.parametrize("rate, target", PAIRS)
def test_lengths_are_the_time_rounded_up(rate: int, target: int) -> None:
    for count in (1, 2, 3, 100, 1021, rate, 10 * rate, 10 * rate + 1):
        samples = np.zeros(count, np.float32)
        assert len(resample(samples, rate, target)) == resampled_count(count, rate, target) == math.ceil(count * target / rate)
    assert resampled_count(10 * rate, rate, target) == 10 * target


@pytest.mark.parametrize("rate, target", PAIRS)
def test_the_pass_band_is_flat_to_nine_tenths(rate: int, target: int) -> None:
    for share in (0.01, 0.25, 0.5, 0.75, 0.9):
        source = tone(share * min(rate, target) / 2, rate)
        gain_db = 20 * math.log10(level(resample(source, rate, target)) / level(source))
        assert abs(gain_db) < 0.1, (share, gain_db)


@pytest.mark.parametrize("rate, target", [pair for pair in PAIRS if pair[0] > pair[1]])
def test_aliases_are_below_90_db(rate: int, target: int) -> None:
    for share in (1.02, 1.1, 1.3, 1.9):
        hz = share * target / 2
        if hz < rate / 2 * 0.98:
            source = tone(hz, rate)
            assert 20 * math.log10(level(resample(source, rate, target)) / level(source) + 1e-12) < -90, hz


@pytest.mark.parametrize("rate, target", [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (44_100, 48_000)])
def test_it_equals_torchaudios_windowed_sinc(rate: int, target: int) -> None:
    """The reference at its high-quality Kaiser setting, over a sum of tones in the pass band of both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchaudio.functional import resample as reference
    low = min(rate, target) / 2
    source = sum((tone(share * low, rate, peak=0.1) for share in (0.03, 0.2, 0.41, 0.6, 0.8)), np.zeros(rate, np.float32))
    expected: Any = reference(
        torch.from_numpy(source), rate, target, lowpass_filter_width=64, rolloff=0.9476, resampling_method="sinc_interp_kaiser", beta=14.77
    )
    ours = resample(source, rate, target)
    assert len(ours) == len(expected)
    inner = slice(target // 10, -target // 10)  # beside the ends, where the tones stop
    assert np.abs(ours[inner] - expected.numpy()[inner]).max() < 2e-3


@pytest.mark.parametrize("rate, target", [(44_100, 16_000), (8_000, 16_000)])
@pytest.mark.parametrize("block", [1, 7, 1000, 44_100])
def test_blocks_do_not_show(rate: int, target: int, block: int) -> None:
    source = np.random.default_rng(0).normal(0, 0.1, 5000).astype(np.float32)
    np.testing.assert_allclose(resample(source, rate, target, block), resample(source, rate, target, 1 << 20), atol=1e-6)


def test_an_impulse_stays_in_its_place() -> None:
    source = np.zeros(44_100, np.float32)
    source[22_050] = 1
    assert int(np.abs(resample(source, 44_100, 16_000)).argmax()) == 8_000


def test_the_same_rate_passes_untouched() -> None:
    source = tone(440, 16_000)
    np.testing.assert_array_equal(resample(source, 16_000, 16_000), source)


def test_gathering_stops_as_soon_as_it_knows() -> None:
    taken: list[int] = []

    def blocks() -> Any:
        for number in range(1000):
            taken.append(number)
            yield 16_000, np.full(100, 0.5, np.float32)

    array, more = gather(blocks(), 16_000, 250)
    assert (len(array), more, len(taken)) == (250, True, 3)
    array, more = gather(((16_000, np.zeros(100, np.float32)) for _ in range(3)), 16_000, 300)
    assert (len(array), more) == (300, False)
    array, more = gather(iter(()), 16_000, 300)
    assert (len(array), more) == (0, False)


@pytest.mark.parametrize("rate", [0, -1, 999, 1_000_001])
def test_rates_beyond_reason_are_refused(rate: int) -> None:
    with pytest.raises(DecodeError) as caught:
        Resampler(rate, 16_000)
    assert caught.value.kind == "unsupported"


def test_extreme_ratios_stay_exact() -> None:
    for rate, target in ((1_000, 768_000), (1_000_000, 1_000), (999_983, 16_001)):
        source = np.zeros(3000, np.float32)
        assert len(resample(source, rate, target)) == math.ceil(3000 * target / rate)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("planar", [False, True])
def test_samples_are_scaled_and_averaged(dtype: Any, planar: bool) -> None:
    ends = (
        (0, 128, 255)
        if dtype is np.uint8
        else (-1, 0, 1)
        if np.issubdtype(dtype, np.floating)
        else (np.iinfo(dtype).min, 0, np.iinfo(dtype).max)
    )
    left, right = np.array(ends, dtype), np.full(3, ends[1], dtype)
    both = np.stack([left, right], 0 if planar else -1)
    mono = to_mono(both if planar else both.reshape(1, -1), 2, planar=planar)
    np.testing.assert_allclose(mono, [-0.5, 0, 0.5], atol=1 / 250)
    assert mono.dtype == np.float32 and mono.flags.c_contiguous
