"""What worlds of ranks are tried on: configurations, items, and how they are dealt. Tests and the ranks that they start load this file."""

import importlib.util
import io
import wave
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from treadle.model.config import Choices, Contrastive, LateInteraction, OptimizerConfig, Schedule, TrainerConfig
from treadle.model.mesh import Mesh
from treadle.model.trainer import Trainer
from treadle.pipeline import PackedBatch, Packer, StepItems
from treadle.shape import Modality, Negatives, Objective, PairLossForm, VideoShape

STEPS = 3

Deal = list[list[list[int] | None]]
"""Micro-batches; in each, the seeds of every rank, or None."""


def _conftest() -> Any:
    spec = importlib.util.spec_from_file_location("sample_items", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLES = _conftest()


@dataclass(frozen=True)
class Scenario:
    changes: dict[str, Any]
    deal: Deal
    texts_only: tuple[int, ...] = ()
    """Ranks that get no pictures; dealt to one process, the same items have none either."""
    accumulated: int = 0
    """Micro-batches given to `accumulate` before the step."""
    mixed: bool = False
    """Seeds are of all modalities, each of some."""


def config_of(scenario: Scenario) -> TrainerConfig:
    base = TrainerConfig(
        depth=1,
        hidden=128,
        batch=SAMPLES.SHAPE,
        schedule=Schedule(steps=50, learning_rate=2e-4, warmup_steps=1),
        optimizer=OptimizerConfig(eps=1e-6),
        device="cpu",
    )
    return replace(base, **scenario.changes)


NAMED_JOINT = {
    "objective": Objective.JOINT,
    "contrastive": Contrastive(negatives=Negatives.NAMED, matryoshka_dimensions=(32, 128)),
    "late_interaction": LateInteraction(weight=0.5, width=16),
    "choices": Choices(weight=1.0),
}
RANKED = {"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.RANKED)}
BALANCED = {"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.BALANCED, inverse_temperature=8.0)}
SIGMOID = {"objective": Objective.JOINT, "contrastive": Contrastive(matryoshka_dimensions=(64,))}
ALL = {**NAMED_JOINT, "batch": replace(SAMPLES.SHAPE, video=VideoShape(patch_side=8, tube_frames=2, channels=3))}

WORLDS: dict[int, dict[str, Scenario]] = {
    2: {
        "masked_uneven": Scenario({}, [[[0, 1], [2, 3, 4, 5]]]),
        "masked_none": Scenario({}, [[[0, 1, 2, 3], None]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1, 2, 3], [4, 5]]]),
        "joint_named_none": Scenario(NAMED_JOINT, [[None, [0, 1, 2, 3]]]),
        "joint_named_texts_only": Scenario(NAMED_JOINT, [[[0, 1], [2, 3]]], texts_only=(0,)),
        "ranked": Scenario(RANKED, [[[0, 1, 2, 3], [8, 9]]]),
        "ranked_none": Scenario(RANKED, [[None, [0, 1, 2, 3]]]),
        "balanced_micro_batches": Scenario(BALANCED, [[[0, 1], [2, 3]], [[4, 5], None]]),
        "sigmoid_groups_across_ranks": Scenario(SIGMOID, [[[0, 1], [8, 9, 2, 3]]]),
        # Rank 0 has a sound and a picture; all else, texts and clips among it, is rank 1's.
        "all_modalities": Scenario(ALL, [[[2, 4], [0, 1, 3, 8, 5]]], mixed=True),
        "joint_accumulated": Scenario(SIGMOID, [[[0, 1], [2, 3]], [[4, 5], None], [[6, 7], [10, 11]]], accumulated=2),
    },
    3: {
        "masked_micro_batches": Scenario({}, [[[0, 1], None, [2, 3]], [None, [4, 5], [6, 7]]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1], None, [2, 3, 4, 5]]]),
        "ranked": Scenario(RANKED, [[[0, 1], [8, 9], [2, 3]]]),
        "all_modalities": Scenario(ALL, [[[0, 5], None, [1, 2, 3, 4, 8]]], mixed=True),
        "sigmoid_accumulated": Scenario(SIGMOID, [[[0, 1], None, [2, 3]], [None, [4, 5], [6, 7]]], accumulated=1),
    },
    4: {
        "masked_even": Scenario({}, [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
        "joint_named_uneven": Scenario(NAMED_JOINT, [[[0, 1, 2], None, [3, 4], [5]]], texts_only=(2,)),
        "joint_named_micro_batches": Scenario(NAMED_JOINT, [[[0, 1], [2, 3], [4], None], [[6, 7], None, None, None]]),
        "ranked": Scenario(RANKED, [[[0, 1], [8, 9], None, [2, 3, 4]]]),
        "balanced": Scenario(BALANCED, [[[0, 1], [2], [8, 3], [4, 5]]]),
        "all_modalities": Scenario(ALL, [[[2], [4], [0, 1, 8], [3]], [None, [5], None, [7, 9]]], mixed=True),
        "sigmoid_groups_across_ranks": Scenario(SIGMOID, [[[0], [8, 1], [16, 9], [2, 3, 24]]]),
        "sigmoid_accumulated": Scenario(SIGMOID, [[[0, 1], None, [2], [3]], [[4], [5, 6], None, [7]]], accumulated=1),
    },
}


def choices_of(ids: list[int]) -> dict[str, Any]:
    """The captions of even seeds make a choice."""
    chooses = [i % 2000 == 1 for i in ids]
    return {
        "choices": [b"AB" if c else None for c in chooses],
        "choice_targets": [[0.75, 0.25] if c else None for c in chooses],
    }


KINDS = (
    tuple(Modality),
    (Modality.TEXT, Modality.VIDEO),
    (Modality.AUDIO,),
    (Modality.VIDEO, Modality.AUDIO),
    (Modality.IMAGE,),
)
"""What items a mixed seed has, by its remainder."""


def clip(seed: int) -> bytes:
    """Four frames of noise, of which no bit is lost."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=4, options={"threads": "1"})
        stream.width = stream.height = 16
        stream.pix_fmt = "bgr0"
        for pixels in np.random.default_rng(seed).integers(0, 256, (4, 16, 16, 3)).astype(np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
    return out.getvalue()


def sound(seed: int) -> bytes:
    """50 ms of a tone and some noise."""
    noise = np.random.default_rng(seed).normal(0, 1000, 400)
    samples = (8000 * np.sin(np.arange(400) * (0.1 + 0.05 * (seed % 7))) + noise).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def mixed_items(seeds: list[int]) -> StepItems:
    """Texts, pictures, clips and sounds; what belongs to a seed attracts each other, and repels the next seed's."""
    make = {Modality.TEXT: SAMPLES.caption, Modality.IMAGE: SAMPLES.picture, Modality.VIDEO: clip, Modality.AUDIO: sound}
    held = [(place, seed, kind) for place, seed in enumerate(seeds) for kind in KINDS[seed % len(KINDS)]]

    def edges(away: int) -> Any:
        """To the items of the same seed, or of the one so many places on."""
        found = [
            [j for j, (other, _, _) in enumerate(held) if j != i and other == (place + away) % len(seeds)] if away < len(seeds) else []
            for i, (place, _, _) in enumerate(held)
        ]
        return SAMPLES.Edges(np.cumsum([0, *map(len, found)]), [j for row in found for j in row])

    ids = [1000 * seed + 1 + int(kind) for _, seed, kind in held]
    return StepItems(
        [kind for _, _, kind in held],
        [make[kind](seed) for _, seed, kind in held],
        [place for place, _, _ in held],
        ids=ids,
        groups=[1 + seed % 8 for _, seed, _ in held],
        sides=[3 if kind is Modality.TEXT else 2 for _, _, kind in held],
        relations=SAMPLES.Relations(attract=edges(0), repel=edges(1)),
        **choices_of(ids),
    )


def items_of(seeds: list[int], *, texts_only: bool) -> StepItems:
    """Captions and pictures, some captions making a choice; or the captions alone, without relations."""
    if texts_only:
        ids = [1000 * s + 1 for s in seeds]
        return StepItems([0] * len(seeds), [SAMPLES.caption(s) for s in seeds], ids=ids, sides=[3] * len(seeds), **choices_of(ids))
    items: StepItems = SAMPLES.caption_pairs(seeds)
    assert items.ids is not None
    return StepItems(
        items.modalities,
        items.contents,
        items.bags,
        ids=items.ids,
        groups=items.groups,
        sides=items.sides,
        relations=items.relations,
        **choices_of(items.ids.tolist()),
    )


def joined(parts: list[StepItems]) -> StepItems:
    """The items of several ranks as one rank's."""
    offset, bag = 0, 0
    columns: dict[str, list[int]] = {"modalities": [], "bags": [], "ids": [], "groups": [], "sides": []}
    contents: list[Any] = []
    sets: dict[str, tuple[list[int], list[int], list[float]]] = {"attract": ([0], [], []), "repel": ([0], [], [])}
    for part in parts:
        count = len(part)
        columns["modalities"] += part.modalities.tolist()
        columns["bags"] += [bag + b for b in (part.bags.tolist() if part.bags is not None else range(count))]
        columns["ids"] += part.ids.tolist() if part.ids is not None else []
        columns["groups"] += part.groups.tolist() if part.groups is not None else [0] * count
        columns["sides"] += part.sides.tolist() if part.sides is not None else [0] * count
        contents += [part.content(i) for i in range(count)]
        for name, (offsets, ids, weights) in sets.items():
            edges = getattr(part.relations, name)
            starts = edges.offsets.tolist() if len(edges.offsets) else [0] * (count + 1)
            offsets += [offsets[-1] + o for o in starts[1:]]
            ids += [offset + i for i in edges.ids.tolist()]
            weights += edges.weights_or_ones().tolist()
        offset += count
        bag += count
    relations = SAMPLES.Relations(**{name: SAMPLES.Edges(*lists) for name, lists in sets.items()})
    return StepItems(
        columns["modalities"],
        contents,
        columns["bags"],
        ids=columns["ids"],
        groups=columns["groups"],
        sides=columns["sides"],
        relations=relations,
        **choices_of(columns["ids"]),
    )


def run(scenario: Scenario, mesh: Mesh | None, batches: list[PackedBatch | None]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Takes the steps; answers their numbers, the weights after them and the first step's gradients, clipped."""
    numbers: list[list[float]] = []
    tensors: dict[str, torch.Tensor] = {}
    with Trainer(replace(config_of(scenario), mesh=mesh)) as trainer:
        for _ in range(STEPS):
            for batch in batches[: scenario.accumulated]:
                trainer.accumulate(batch)
            rest = [b for b in batches[scenario.accumulated :] if b is not None]
            stats = trainer.step(rest if rest else None).stats
            numbers.append(
                [
                    stats.loss,
                    stats.contrastive_loss,
                    stats.masked_text_loss,
                    stats.masked_image_loss,
                    stats.late_interaction_loss,
                    stats.choices_loss,
                    stats.masked_video_loss,
                    stats.masked_audio_loss,
                    stats.gradient_norm,
                    float(stats.truncated),
                ]
            )
            if not tensors:
                tensors |= {f"gradient.{name}": p.grad.clone() for name, p in trainer.network.named_parameters() if p.grad is not None}
        return numbers, tensors | {name: p.detach().clone() for name, p in trainer.network.named_parameters()}


def rank_batches(scenario: Scenario, rank: int) -> list[PackedBatch | None]:
    packer = Packer(config_of(scenario).batch)
    return [None if micro[rank] is None else packer.pack(rank_items(scenario, rank, micro[rank] or [])) for micro in scenario.deal]


def rank_items(scenario: Scenario, rank: int, seeds: list[int]) -> StepItems:
    return mixed_items(seeds) if scenario.mixed else items_of(seeds, texts_only=rank in scenario.texts_only)


def world_batches(scenario: Scenario) -> list[PackedBatch | None]:
    packer = Packer(config_of(scenario).batch)
    return [packer.pack(joined([rank_items(scenario, r, s) for r, s in enumerate(micro) if s is not None])) for micro in scenario.deal]
