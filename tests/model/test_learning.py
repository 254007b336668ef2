"""Learning is real: a tiny tower, a few hundred steps, items that were never trained on, and results far above chance.

A picture is one of 64 noisy colours, its caption spells the colour; held-out pictures carry new noise. Chance of finding one of 64 is 1.6 %.
"""

import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from treadle.kernels.maxsim import maxsim
from treadle.model.choices import choice_log_probabilities
from treadle.model.config import Choices, Contrastive, LateInteraction, Masking, Schedule, TrainerConfig
from treadle.model.layout import BatchLayout
from treadle.model.statistics import TrainerStepStats
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, ImageShape, Modality, Objective, PairLossForm

COLOURS = 64
SHAPE = BatchShape(
    max_rows_per_device=28,
    max_segments_per_device=256,
    max_columns_per_row=64,
    max_choices_per_item=2,
    image=ImageShape(patch_side=8, channels=3),
)
LEVELS = ("dark", "low", "mid", "full")


def picture(colour: int, rng: np.random.Generator) -> bytes:
    base = np.array([colour // 16, colour // 4 % 4, colour % 4]) * 70 + 20
    pixels = np.clip(base + rng.normal(0, 12, (16, 16, 3)), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def caption(colour: int) -> bytes:
    return f"{LEVELS[colour // 16]} {LEVELS[colour // 4 % 4]} {LEVELS[colour % 4]}".encode()


def pairs(colours: list[int], seed: int) -> PackedBatch:
    """Captions (queries) and pictures (documents) in turns; equal colours share a group, so that they never repel."""
    rng = np.random.default_rng(seed)
    count = 2 * len(colours)
    items = StepItems(
        [Modality.TEXT, Modality.IMAGE] * len(colours),
        [content for c in colours for content in (caption(c), picture(c, rng))],
        bags=[i // 2 for i in range(count)],
        groups=[1 + c for c in colours for _ in range(2)],
        sides=[1, 2] * len(colours),
        ids=range(1000 * seed, 1000 * seed + count),
        relations=Relations(attract=Edges(np.arange(count + 1), np.arange(count) ^ 1)),
    )
    return Packer(SHAPE).pack(items)


@cache
def training_pairs() -> tuple[PackedBatch, ...]:
    rng = np.random.default_rng(0)
    return tuple(pairs(rng.permutation(COLOURS)[:40].tolist(), 1 + seed) for seed in range(12))


@cache
def held_out() -> PackedBatch:
    return pairs(list(range(COLOURS)), 99)


def train(batches: tuple[PackedBatch, ...], steps: int, **parts: Any) -> tuple[Trainer, list[TrainerStepStats]]:
    config = TrainerConfig(
        depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=steps, learning_rate=4e-3, warmup_steps=20), device="cpu", **parts
    )
    trainer = Trainer(config)
    results = [trainer.step(batches[i % len(batches)]) for i in range(steps)]
    return trainer, [results[0].stats, results[-1].stats]


def states(trainer: Trainer, batch: PackedBatch) -> tuple[Tensor, BatchLayout]:
    layout = BatchLayout.from_batch(batch, "cpu")
    with torch.no_grad():
        return trainer.network.tower(layout), layout


def recall(scores_QN: Tensor) -> float:
    """The share of queries whose best document is their own."""
    assert scores_QN.shape == (COLOURS, COLOURS)
    return float((scores_QN.argmax(1) == torch.arange(len(scores_QN))).float().mean())


def pooled_recall(trainer: Trainer, width: int = 128) -> float:
    states_PD, layout = states(trainer, held_out())
    unit = torch.nn.functional.normalize(trainer.network.tower.pool(states_PD, layout)[:, :width], dim=1)
    return recall(unit[0::2] @ unit[1::2].T)


def maxsim_recall(trainer: Trainer) -> float:
    states_PD, layout = states(trainer, held_out())
    assert trainer.network.token_head is not None
    with torch.no_grad():
        vectors_PW = trainer.network.token_head(states_PD)
    tokens = [vectors_PW[s + 1 : s + 1 + n] for s, n in zip(layout.start_S.tolist(), layout.tokens_S.tolist(), strict=True)]

    def joined(items: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat(items), torch.tensor([0, *np.cumsum([len(x) for x in items])])

    (u, u_offsets), (v, v_offsets) = joined(tokens[0::2]), joined(tokens[1::2])
    return recall(maxsim(u, v, u_offsets, v_offsets))


@pytest.mark.parametrize("form", [PairLossForm.SIGMOID, PairLossForm.BALANCED, PairLossForm.RANKED], ids=str)
def test_contrastive_finds_pictures_by_their_captions(form: PairLossForm) -> None:
    trainer, _ = train(
        training_pairs(), 200, objective=Objective.CONTRASTIVE, contrastive=Contrastive(pair_loss=form, matryoshka_dimensions=(32, 128))
    )
    with trainer:
        assert pooled_recall(trainer) > 0.5
        # The short prefix was trained too.
        assert pooled_recall(trainer, 32) > 0.4


def test_late_interaction_finds_pictures_by_their_captions_tokens() -> None:
    masking = Masking(text_weight=1e-6, image_weight=1e-6)
    trainer, _ = train(
        training_pairs(), 200, objective=Objective.MASKED, masking=masking, late_interaction=LateInteraction(weight=1.0, width=32)
    )
    with trainer:
        assert maxsim_recall(trainer) > 0.4


def test_masked_reconstructs_what_it_does_not_see() -> None:
    trainer, (first, last) = train(training_pairs(), 200, objective=Objective.MASKED)
    with trainer:
        # A guess of nothing costs log 256 = 5.5 nats a byte and 1 a standardised pixel. Noise is all that a flat picture's pixels vary by in
        # a patch and channel, but the three channels differ: which is which shows in the picture's other patches.
        assert first.masked_text_loss > 5.0
        assert last.masked_text_loss < 1.5
        assert first.masked_image_loss > 0.8
        assert last.masked_image_loss < 0.5


def test_joint_does_both() -> None:
    """Everything through one corrupted pass, which hides three of a picture's four patches: slower than either alone, and both well above chance."""
    trainer, (_, last) = train(training_pairs(), 200, objective=Objective.JOINT, late_interaction=LateInteraction(weight=0.5, width=32))
    with trainer:
        assert pooled_recall(trainer) > 8 / COLOURS
        assert maxsim_recall(trainer) > 8 / COLOURS
        assert last.masked_text_loss < 2.0
        assert last.masked_image_loss < 0.6


def test_choices_answer_texts_never_seen() -> None:
    def asked(seed: int) -> PackedBatch:
        rng = np.random.default_rng(seed)
        texts = [rng.choice(list("abcdefgh"), 12) for _ in range(96)]
        for text in texts[::2]:
            text[rng.integers(12)] = "q"
        targets = [[1.0, 0.0] if "q" in text else [0.0, 1.0] for text in texts]
        return Packer(SHAPE).pack(
            StepItems([Modality.TEXT] * 96, ["".join(text).encode() for text in texts], choices=[b"YN"] * 96, choice_targets=targets)
        )

    trainer, _ = train(tuple(asked(s) for s in range(8)), 150, objective=Objective.CONTRASTIVE, choices=Choices(weight=1.0))
    with trainer:
        states_PD, layout = states(trainer, asked(100))
        with torch.no_grad():
            chosen = choice_log_probabilities(states_PD, trainer.network.heads.text, layout).view(-1, 2).argmax(1)
        right = float((chosen == layout.choice_targets.view(-1, 2).argmax(1)).float().mean())
        # Half of the texts hold the letter that is asked for.
        assert right > 0.9
