"""Terms: which are live, how their numerators and denominators make a loss."""

from collections.abc import Callable

import pytest
import torch

from treadle.model.config import Choices, LateInteraction, Masking, TrainerConfig
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.objectives import TERMS, Objectives, TermSums, term_weights
from treadle.pipeline import PackedBatch, StepItems
from treadle.shape import BatchShape, Objective

Tiny = Callable[..., TrainerConfig]
Pairs = Callable[[list[int]], StepItems]
Packed = Callable[[StepItems], PackedBatch]


def test_weights_of_the_terms_that_a_run_has(tiny: Tiny) -> None:
    masking = Masking(text_weight=2.0, image_weight=0.5)
    assert dict(zip(TERMS, term_weights(tiny(masking=masking)), strict=True)) == {
        "text": 2.0,
        "image": 0.5,
        "video": 0.0,  # no live slice
        "audio": 1.0,
        "contrastive": 0.0,
        "late_interaction": 0.0,
        "choices": 0.0,
    }
    contrastive = tiny(objective=Objective.CONTRASTIVE, late_interaction=LateInteraction(weight=0.3), choices=Choices(weight=0.7))
    assert term_weights(contrastive) == (0.0, 0.0, 0.0, 0.0, 1.0, 0.3, 0.7)


def test_a_world_mean_is_no_mean_of_means() -> None:
    # One item of gradient 2 and three of gradient 4 each: (2 + 12) / 4 = 3.5, where the mean of means is 3.
    weight = torch.zeros((), requires_grad=True)
    batches = [TermSums({"text": 2.0 * weight}, torch.zeros(0, 8)), TermSums({"text": (4.0 + 4.0 + 4.0) * weight}, torch.zeros(0, 8))]
    counts_K = torch.tensor([4.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    scales_K = torch.where(counts_K > 0, 1.0 / counts_K.clamp(min=1), 0.0)
    for batch in batches:
        loss = batch.loss(scales_K)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and float(weight.grad) == 3.5


def test_terms_without_a_graph_make_no_loss() -> None:
    assert TermSums({}, torch.zeros(0, 8)).loss(torch.ones(7)) is None
    assert TermSums({"text": torch.ones(())}, torch.zeros(0, 8)).loss(torch.ones(7)) is None
    assert TermSums({"image": torch.tensor(3.0)}, torch.zeros(0, 8)).values_K().tolist() == [0, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("objective", list(Objective), ids=str)
def test_counts_come_before_the_forward_pass_and_match_the_sums(objective: Objective, tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    config = tiny(objective=objective, late_interaction=LateInteraction(weight=1.0, width=16))
    objectives, network, world = Objectives(config), Network(config), World()
    batch = packed(pairs([0, 1, 2]))
    prepared = objectives.prepare(0, BatchLayout.from_batch(batch, "cpu"), 1, world, [batch.segments])
    counts = dict(zip(TERMS, objectives.counts(prepared).tolist(), strict=True))
    masks, scores = objective is not Objective.CONTRASTIVE, objective is not Objective.MASKED
    # Texts have 22, 24 and 23 bytes: 15 % of each, rounded down, is 3. Pictures have 4 patches, 3 of them masked.
    lengths = [len(bytes(pairs([0, 1, 2]).content(i))) for i in (0, 2, 4)]
    assert counts["text"] == (sum(n * 1500 // 10000 for n in lengths) if masks else 0)
    assert counts["image"] == (9 if masks else 0)
    assert counts["contrastive"] == (6 if scores else 0)
    assert counts["late_interaction"] == 3
    sums = objectives.sums(network, prepared, world)
    live = {name for name, value in counts.items() if value}
    assert {name for name, value in sums.numerators.items() if float(value.detach())} == live
    assert sums.pooled_SD.shape == (6, 128) and not sums.pooled_SD.requires_grad


def test_no_items_count_and_sum_to_nothing(tiny: Tiny, shape: BatchShape) -> None:
    config = tiny(objective=Objective.JOINT)
    objectives, world = Objectives(config), World()
    prepared = objectives.prepare(0, BatchLayout.empty(shape, "cpu"), 1, world, [0])
    assert not objectives.counts(prepared).any()
    sums = objectives.sums(Network(config), prepared, world)
    assert sums.numerators == {} and sums.pooled_SD.shape == (0, 128)
