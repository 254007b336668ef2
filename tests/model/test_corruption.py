"""Corruption against a step-by-step reading of its definition, its counts, its statistics and what it must not depend on."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from treadle.model.config import Masking
from treadle.model.corruption import MASK_BYTE, Corruption, corrupt, hidden_count
from treadle.model.layout import BatchLayout
from treadle.pipeline.draws import philox
from treadle.shape import BatchShape, Modality

SEED = 0x1234_5678_9ABC_DEF0
KEY = (SEED & 0xFFFFFFFF, SEED >> 32)


def words(index: int, identity: int, step: int, purpose: int) -> list[int]:
    """One draw, from the stream's numpy generator."""
    return [int(w) for w in philox(KEY, index, identity & 0xFFFFFFFF, identity >> 32, step * 16 + purpose)]


def count_of(size: int, share: float) -> int:
    return 0 if size == 1 else min(max(size * round(10000 * share) // 10000, 1), size - 1)


def spans(size: int, identity: int, step: int, share: float, mean: float) -> list[int]:
    """The covered bytes of one text, a span at a time."""
    covered: set[int] = set()
    wanted, number = count_of(size, share), 0
    while len(covered) < wanted:
        start_word, length_word, _, _ = words(number, identity, step, 0)
        start = math.floor(start_word / 2**32 * size)
        length = 1 + math.floor(math.log(1 - length_word / 2**32) / math.log(1 - 1 / mean)) if mean > 1 else 1
        for byte in range(start, min(start + length, size)):
            if len(covered) < wanted:
                covered.add(byte)
        number += 1
    return sorted(covered)


def smallest(size: int, identity: int, step: int, share: float) -> list[int]:
    """The candidates with the smallest draws."""
    order = sorted(range(size), key=lambda i: (words(i, identity, step, 2)[0], i))
    return sorted(order[: count_of(size, share)])


def by_item(layout: BatchLayout, corruption: Corruption) -> dict[int, Any]:
    """What is hidden of each item, whatever its place: tokens, what they show and what is there."""
    found: dict[int, Any] = {}
    segment, token = layout.token_of(corruption.covered_T)
    for s, t, shown, target in zip(
        segment.tolist(), token.tolist(), corruption.shown_T.tolist(), corruption.target_T.tolist(), strict=True
    ):
        found.setdefault(int(layout.id_S[s]), []).append((t, shown, target))
    for positions in (corruption.masked_image, corruption.masked_video, corruption.masked_audio):
        assert positions.tolist() == sorted(set(positions.tolist()))
        segment, token = layout.token_of(positions)
        for s, t in zip(segment.tolist(), token.tolist(), strict=True):
            found.setdefault(int(layout.id_S[s]), []).append(t)
    return found


@pytest.mark.parametrize("step", [1, 77])
@pytest.mark.parametrize(
    "masking",
    [
        Masking(),
        Masking(token_mask_probability=0.9, token_mean_span=2.5, replace_fraction=0.3, random_fraction=0.6, image_mask_ratio=0.1),
        Masking(token_mask_probability=1.0, token_mean_span=1.0, video_mask_ratio=1.0, audio_mask_ratio=0.5),
        Masking(token_mask_probability=0.0001, token_mean_span=1000.0),
    ],
)
def test_equals_the_definition(handmade: Any, masking: Masking, step: int) -> None:
    segments = handmade.mixed()
    layout = BatchLayout.from_batch(handmade.batch(segments), "cpu")
    got = by_item(layout, corrupt(layout, masking, SEED, step))
    shown = masking.resolved()
    for s, segment in enumerate(segments):
        identity, found = segment.id, got.get(int(layout.id_S[s]), [])
        size = int(layout.tokens_S[s])
        if segment.choices:
            assert found == []
        elif segment.modality is Modality.TEXT:
            expected = []
            for byte in spans(size, identity, step, shown.token_mask_probability, shown.token_mean_span):
                there = int(segment.payload[byte])
                word = words(byte, identity, step, 1)[0]
                u = word / 2**32
                if u < shown.replace_fraction:
                    expected.append((byte, MASK_BYTE, there))
                elif u < shown.replace_fraction + shown.random_fraction:
                    expected.append((byte, word & 0xFF, there))
                else:
                    expected.append((byte, there, there))
            assert found == expected
        elif segment.modality is Modality.VIDEO:
            deep, down, across = layout.grid_S3[s].tolist()
            columns = smallest(down * across, identity, step, shown.video_mask_ratio)
            assert sorted(found) == [t * down * across + c for t in range(deep) for c in columns]
        else:
            ratio = shown.image_mask_ratio if segment.modality is Modality.IMAGE else shown.audio_mask_ratio
            assert found == smallest(size, identity, step, ratio)


def test_counts_are_exact() -> None:
    size = torch.tensor([1, 2, 3, 6, 7, 100, 1000, 0])
    # 0.15: 2 * 1500 // 10000 = 0, held up to 1; 7 * 1500 // 10000 = 1; 100 * 1500 // 10000 = 15
    assert hidden_count(size, 0.15).tolist() == [0, 1, 1, 1, 1, 15, 150, 0]
    # 0.75: 3 * 7500 // 10000 = 2; 7 * 7500 // 10000 = 5
    assert hidden_count(size, 0.75).tolist() == [0, 1, 2, 4, 5, 75, 750, 0]
    assert hidden_count(size, 1.0).tolist() == [0, 1, 2, 5, 6, 99, 999, 0]
    # float 0.29 * 100 is 28.999...: integers do not care
    assert hidden_count(torch.tensor([100]), 0.29).tolist() == [29]


def test_does_not_depend_on_packing_order_batch_or_threads(handmade: Any) -> None:
    segments = handmade.mixed()
    layout = BatchLayout.from_batch(handmade.batch(segments), "cpu")
    together = by_item(layout, corrupt(layout, Masking(), SEED, 5))
    moved = [type(s)(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "row": 5 - s.row}) for s in reversed(segments)]
    torch.set_num_threads(1)
    other = BatchLayout.from_batch(handmade.batch(moved), "cpu")
    assert by_item(other, corrupt(other, Masking(), SEED, 5)) == together
    for segment in segments:
        alone = BatchLayout.from_batch(handmade.batch([segment]), "cpu")
        key = int(alone.id_S[0])
        assert by_item(alone, corrupt(alone, Masking(), SEED, 5)).get(key) == together.get(key)


def test_steps_seeds_and_ids_draw_differently(handmade: Any) -> None:
    def hidden(seed: int, step: int, identity: int) -> list[int]:
        layout = BatchLayout.from_batch(handmade.batch([handmade.text(bytes(90), id=identity)]), "cpu")
        return corrupt(layout, Masking(), seed, step).covered_T.tolist()

    draws = [hidden(1, 1, 1), hidden(2, 1, 1), hidden(1 + 2**32, 1, 1), hidden(1, 2, 1), hidden(1, 1, 2), hidden(1, 1, 1 + 2**32)]
    assert len({tuple(d) for d in draws}) == len(draws)
    assert hidden(1, 1, 1) == draws[0]
    assert hidden(1, 2**28 + 1, 1) == draws[0], "the step's word wraps at 2^32"


def test_no_items(handmade: Any) -> None:
    layout = BatchLayout.empty(handmade.shape, "cpu")
    corruption = corrupt(layout, Masking(), SEED, 1)
    assert corruption.covered_T.dtype == torch.int64
    assert not any(x.numel() for x in (corruption.covered_T, corruption.shown_T, corruption.target_T, corruption.masked_image))


def test_statistics_of_long_texts(handmade: Any) -> None:
    rows, columns = 64, 4097
    shape = BatchShape(max_rows_per_device=rows, max_segments_per_device=rows, max_columns_per_row=columns)
    # No zero byte, so that a random byte of 0 would show.
    content = np.random.default_rng(0).integers(1, 256, (rows, columns - 1), dtype=np.uint8)
    layout = BatchLayout.from_batch(handmade.batch([handmade.text(c.tobytes(), row=i) for i, c in enumerate(content)], shape), "cpu")
    corruption = corrupt(layout, Masking(token_mask_probability=0.02, token_mean_span=16), 3, 9)
    # 4096 * 200 // 10000 = 81 of each text
    total = 81 * rows
    assert corruption.covered_T.numel() == total
    shown, target = corruption.shown_T, corruption.target_T
    masked, kept = int((shown == MASK_BYTE).sum()), int((shown == target).sum())
    # Shares of 5184 draws: five standard deviations of a share p are 5 sqrt(p (1 - p) / 5184), 0.028 and 0.021; a random byte is the
    # true one once in 256.
    assert masked / total == pytest.approx(0.8, abs=0.028)
    assert kept / total == pytest.approx(0.1 + 0.1 / 256, abs=0.021)
    assert set(shown.tolist()) <= set(range(257))
    # Runs of covered bytes: at 2 % hardly any two spans meet, so a run is a span, but for the last of a text, cut at the count.
    runs: list[int] = []
    previous = -2
    for position in corruption.covered_T.tolist():
        if position == previous + 1:
            runs[-1] += 1
        else:
            runs.append(1)
        previous = position
    # Geometric lengths have no memory: each of the 80 bytes after the first opens a span with probability 1 / 16, 6 spans a text;
    # a text's count deviates by sqrt(80 / 16 * 15 / 16) = 2.2, the mean of 64 by 0.27, and spans that meet take a tenth away.
    lengths = Counter(min(r, 64) for r in runs)
    assert len(runs) / rows == pytest.approx(5.9, abs=4 * 0.27)
    # P(length = 1) = 1 / 16 before cutting
    assert 0.03 < lengths[1] / len(runs) < 0.13
    assert max(runs) > 40


def test_media_draws_are_uniform(handmade: Any) -> None:
    shape = handmade.shape
    pixels = np.zeros((20, 20, 3), np.uint8)
    hits = torch.zeros(16)
    layout = BatchLayout.from_batch(handmade.batch([handmade.image(pixels, id=7 + i, row=i % 6) for i in range(30)], shape), "cpu")
    for step in range(100):
        _, token = layout.token_of(corrupt(layout, Masking(), 0, step).masked_image)
        hits += torch.bincount(token, minlength=16)
    # 3000 pictures, 12 of 16 patches each: a patch is hit 2250 times, standard deviation sqrt(3000 * 0.75 * 0.25) = 24.
    assert int(hits.sum()) == 3000 * 12
    assert float((hits - 2250).abs().max()) < 5 * 24
