"""Masked terms against loops over positions in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.model.config import Masking
from treadle.model.corruption import corrupt
from treadle.model.heads import Heads
from treadle.model.layout import BatchLayout
from treadle.model.masked import masked_counts, masked_sums
from treadle.shape import Modality


def payload_of(handmade: Any, segment: Any, token: int) -> tuple[Tensor, Tensor]:
    """A token's own values, laid out as a whole patch, and which of them exist."""
    shape = handmade.shape.resolved()
    if segment.modality is Modality.AUDIO:
        chunk = shape.audio.chunk_samples
        values, real = torch.zeros(chunk, dtype=torch.float64), torch.zeros(chunk, dtype=torch.bool)
        own = segment.payload[token * chunk : (token + 1) * chunk]
        values[: len(own)], real[: len(own)] = torch.from_numpy(own.astype(np.float64)), True
        return values, real
    image = segment.modality is Modality.IMAGE
    frames, side = (1, shape.image.patch_side) if image else (shape.video.tube_frames, shape.video.patch_side)
    clip = torch.from_numpy(segment.payload.copy()).double()
    clip = clip[None] if image else clip
    across, down = -(-clip.shape[2] // side), -(-clip.shape[1] // side)
    t, h, w = token // (across * down), token // across % down, token % across
    own = clip[t * frames : (t + 1) * frames, h * side : (h + 1) * side, w * side : (w + 1) * side]
    values = torch.zeros(frames, side, side, clip.shape[3], dtype=torch.float64)
    real = torch.zeros(values.shape, dtype=torch.bool)
    values[:, : own.shape[1], : own.shape[2]], real[:, : own.shape[1], : own.shape[2]] = own, True
    return values.flatten(), real.flatten()


def test_sums_counts_and_gradients_equal_the_definition(handmade: Any) -> None:
    segments = handmade.mixed()
    layout = BatchLayout.from_batch(handmade.batch(segments), "cpu")
    corruption = corrupt(layout, Masking(), 2, 3)
    heads = Heads(128, handmade.shape, list(Modality), 0).double()
    states = torch.randn(layout.num_positions, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    counts = masked_counts(layout, corruption)
    sums = masked_sums(heads, states, layout, corruption)
    lists = [corruption.covered_T, corruption.masked_image, corruption.masked_video, corruption.masked_audio]
    assert counts.tolist() == [len(positions) for positions in lists]
    assert min(counts.tolist()) > 0
    expected = [torch.zeros((), dtype=torch.float64) for _ in Modality]
    for position, target in zip(corruption.covered_T.tolist(), corruption.target_T.tolist(), strict=True):
        logits = states[position] @ heads.text.weight.T
        expected[0] = expected[0] + torch.log(torch.exp(logits).sum()) - logits[target]
    for modality, positions in zip(Modality, lists, strict=True):
        if modality is Modality.TEXT:
            continue
        head = heads.of(modality)
        assert head is not None
        for position in positions.tolist():
            s = int(layout.segment_P[position])
            values, real = payload_of(handmade, segments[s], position - int(layout.start_S[s]) - 1)
            own = values[real]
            target = (own - own.mean()) / torch.sqrt(own.var(unbiased=False) + 1e-6)
            expected[modality] = expected[modality] + (((states[position] @ head.weight.T)[real] - target) ** 2).mean()
    torch.testing.assert_close(sums, torch.stack(expected), rtol=1e-10, atol=1e-10)
    leaves = [states, *heads.parameters()]
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    got = torch.autograd.grad((sums * scale).sum(), leaves)
    want = torch.autograd.grad((torch.stack(expected) * scale).sum(), leaves)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_a_head_that_knows_nothing_costs_log_256_and_one(handmade: Any) -> None:
    rng = np.random.default_rng(0)
    image, video = (rng.integers(0, 256, size, dtype=np.uint8) for size in ((10, 15, 3), (4, 8, 8, 1)))
    segments = [handmade.text(bytes(40)), handmade.image(image), handmade.video(video, row=1)]
    layout = BatchLayout.from_batch(handmade.batch(segments), "cpu")
    corruption = corrupt(layout, Masking(), 2, 3)
    heads = Heads(128, handmade.shape, list(Modality), 0)
    sums = masked_sums(heads, torch.zeros(layout.num_positions, 128), layout, corruption)
    text_loss, image_loss, video_loss, _ = (sums / masked_counts(layout, corruption)).tolist()
    assert text_loss == pytest.approx(math.log(256), rel=1e-6)
    # Standardised targets have mean square variance / (variance + 1e-6): one, within rounding.
    assert image_loss == pytest.approx(1.0, abs=1e-6)
    assert video_loss == pytest.approx(1.0, abs=1e-6)


def test_modalities_without_a_head_are_not_scored(handmade: Any) -> None:
    layout = BatchLayout.from_batch(handmade.batch(handmade.mixed()), "cpu")
    corruption = corrupt(layout, Masking(), 2, 3)
    states = torch.ones(layout.num_positions, 128)
    sums = masked_sums(Heads(128, handmade.shape, (Modality.TEXT,), 0), states, layout, corruption)
    assert sums[0] > 0
    assert sums[1:].tolist() == [0.0, 0.0, 0.0]
    assert masked_sums(Heads(128, handmade.shape, (), 0), states, layout, corruption).tolist() == [0.0] * 4


def test_no_items_score_nothing_and_give_zero_gradients(handmade: Any) -> None:
    layout = BatchLayout.empty(handmade.shape, "cpu")
    corruption = corrupt(layout, Masking(), 0, 1)
    heads = Heads(128, handmade.shape, list(Modality), 0)
    states = torch.zeros(0, 128, requires_grad=True)
    sums = masked_sums(heads, states, layout, corruption)
    assert sums.tolist() == [0.0] * 4
    assert masked_counts(layout, corruption).tolist() == [0] * 4
    for gradient in torch.autograd.grad(sums.sum(), list(heads.parameters())):
        assert (gradient == 0).all()


def test_text_logits_are_fp32_under_autocast(handmade: Any) -> None:
    layout = BatchLayout.from_batch(handmade.batch([handmade.text(bytes(range(90)))]), "cpu")
    corruption = corrupt(layout, Masking(), 0, 1)
    heads = Heads(128, handmade.shape, (Modality.TEXT,), 0)
    states = torch.randn(layout.num_positions, 128, generator=torch.Generator().manual_seed(0))
    plain = masked_sums(heads, states, layout, corruption)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = masked_sums(heads, states, layout, corruption)
    assert torch.equal(plain, rounded)
