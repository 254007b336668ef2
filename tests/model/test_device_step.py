"""The step at fixed sizes against the path of free sizes, on the CPU and on a device that works as late as its events allow."""

import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.model.config import Choices, Contrastive, LateInteraction, TrainerConfig
from treadle.model.device_batch import BatchPlan
from treadle.model.device_layer import DeviceLayer, HostLayer
from treadle.model.device_step import VARIABLE, step_mode
from treadle.model.statistics import StepResult
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Relations, StepItems
from treadle.shape import BatchShape, Modality, Negatives, Objective, PairLossForm

_HERE = Path(__file__).parent


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"of_device_step_{name}", _HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_items = _module("conftest")
_ring = _module("test_device_ring")
Tiny = Callable[..., TrainerConfig]

FORMS: dict[str, dict[str, Any]] = {
    "masked": {},
    "joint": {"objective": Objective.JOINT},
    "ranked": {"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.RANKED, negatives=Negatives.AMBIENT)},
    "matryoshka": {
        "objective": Objective.CONTRASTIVE,
        "contrastive": Contrastive(pair_loss=PairLossForm.BALANCED, matryoshka_dimensions=(32, 128), negatives=Negatives.NAMED),
    },
    "everything": {"objective": Objective.JOINT, "late_interaction": LateInteraction(weight=0.5, width=32), "choices": Choices(weight=1.0)},
}


def items(step: int) -> StepItems:
    """Captions and pictures that attract and repel, and a text that makes a choice."""
    pairs = _items.caption_pairs([3 * step + j for j in range(4)])
    relations = pairs.relations
    attract, repel = (
        Edges([*e.offsets.tolist(), len(e.ids)], e.ids.tolist(), e.weights.tolist()) for e in (relations.attract, relations.repel)
    )
    return StepItems(
        [*pairs.modalities, Modality.TEXT],
        [*pairs.contents, b"yes or no?"],
        bags=[0, 0, 1, 1, 2, 2, 3, 3, 4],
        ids=[*pairs.ids.tolist(), 99 + step],
        groups=[*pairs.groups.tolist(), 0],
        sides=[*pairs.sides.tolist(), 0],
        choices=[b""] * 8 + [b"yn"],
        choice_targets=[()] * 8 + [(0.25, 0.75)],
        relations=Relations(attract=attract, repel=repel),
    )


def run(config: TrainerConfig, layer: DeviceLayer | None, batches: list[Any]) -> tuple[list[StepResult], Trainer]:
    with Trainer(config) as trainer:
        if layer is not None:
            trainer._runner.fix_sizes(layer, "eager")
        results = [trainer.step(batch, embeddings=torch.float32) for batch in batches]
    return results, trainer


@pytest.mark.parametrize("form", FORMS)
def test_the_same_steps_as_with_free_sizes(form: str, tiny: Tiny) -> None:
    """Losses, norms, embeddings and weights agree to rounding over five steps, one of them with nothing."""
    config = tiny(**FORMS[form])
    batches = [items(0), items(1), None, items(2), items(3)]
    free, one = run(config, None, batches)
    fixed, other = run(config, HostLayer(torch.device("cpu")), batches)
    for a, b in zip(free, fixed, strict=True):
        for name in (
            "loss",
            "contrastive_loss",
            "masked_text_loss",
            "masked_image_loss",
            "late_interaction_loss",
            "choices_loss",
            "gradient_norm",
        ):
            assert getattr(b.stats, name) == pytest.approx(getattr(a.stats, name), rel=2e-5, abs=1e-6), name
        assert (a.stats.step, a.stats.learning_rate, a.stats.truncated) == (b.stats.step, b.stats.learning_rate, b.stats.truncated)
        assert a.embeddings is not None and b.embeddings is not None
        torch.testing.assert_close(b.embeddings, a.embeddings, rtol=0, atol=2e-5, equal_nan=True)
    # A step of Adam moves a weight by the rate, whatever its gradient: what rounding leaves of a zero one may move it too.
    weights, others = one._runner.parameters.weights, other._runner.parameters.weights
    assert float((weights - others).abs().mean()) < 1e-5


def test_a_device_that_works_as_late_as_it_may(tiny: Tiny) -> None:
    """Ten steps without reading anything: the host is a ring ahead at most, and statistics read at the end are those of their steps."""
    config = tiny(objective=Objective.JOINT)
    batches = [items(step) for step in range(10)]
    expected, _ = run(config, HostLayer(torch.device("cpu")), batches)
    layer = _ring.LazyLayer()
    trainer = Trainer(config)
    trainer._runner.fix_sizes(layer, "eager")
    results = [trainer.step(batch) for batch in batches]
    assert layer.waits == len(batches) - 3, "the host waits for a slot of the ring and for nothing else"
    assert [r.stats.loss for r in results] == [e.stats.loss for e in expected]
    trainer.close()


def test_several_micro_batches_and_windows_take_free_sizes(tiny: Tiny) -> None:
    config = tiny()
    with Trainer(config) as trainer:
        trainer._runner.fix_sizes(HostLayer(torch.device("cpu")), "eager")
        fixed = trainer._runner._fixed
        assert fixed is not None
        trainer.accumulate(items(0))
        trainer.step(items(1))
        assert fixed._taken == 0
        trainer.step(items(2))
        assert fixed._taken == 1


def test_more_edges_than_the_sizes_hold_take_free_sizes(tiny: Tiny) -> None:
    config = tiny(objective=Objective.CONTRASTIVE)
    with Trainer(config) as trainer:
        trainer._runner.fix_sizes(HostLayer(torch.device("cpu")), "eager")
        fixed = trainer._runner._fixed
        assert fixed is not None
        field = fixed.plan.fields["pair_ids"]
        fixed.plan.fields["pair_ids"] = type(field)(field.offset, field.dtype, (3,))
        stats = trainer.step(items(0)).stats
        assert fixed._taken == 0 and stats.contrastive_loss > 0


def test_refused_updates_are_explained(tiny: Tiny) -> None:
    """A weight that is no number: the update is refused, and the row from the ring says so."""
    with Trainer(tiny()) as trainer:
        trainer._runner.fix_sizes(HostLayer(torch.device("cpu")), "eager")
        trainer.network.tower.norm.data[0] = float("nan")
        stats = trainer.step(items(0)).stats
        assert stats.skipped == 1 and "update refused" in stats.refusals[0]


def test_a_plan_holds_every_position_hidden_or_shown(tiny: Tiny) -> None:
    """Fields do not overlap, the tape is last, and lists hold what a batch of the smallest segments needs."""
    plan = BatchPlan(tiny(objective=Objective.JOINT), 2)
    spans = sorted((f.offset, f.offset + f.bytes) for f in plan.fields.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= plan.tape_offset and plan.bytes >= plan.tape_offset + plan.shape.tape_bytes
    for share in (0.01, 0.15, 0.33335, 0.5, 0.9, 0.90006, 1.0):
        plan.hidden_shares = dict.fromkeys(Modality, share)
        for n in range(2, 70):  # n tokens and a prefix
            count = min(max(n * round(10_000 * share) // 10_000, 1), n - 1)
            assert plan.positions // (n + 1) * count <= plan.most_hidden(Modality.AUDIO)
            # n columns of ten tubes
            assert plan.positions // (10 * n + 1) * 10 * count <= plan.most_hidden(Modality.VIDEO)
    assert plan.candidates == 2 * plan.segments


def test_an_empty_batch_is_a_step_of_nothing(tiny: Tiny, shape: BatchShape) -> None:
    results, _ = run(tiny(objective=Objective.JOINT), HostLayer(torch.device("cpu")), [PackedBatch(shape)])
    assert results[0].stats.loss == 0 and results[0].stats.gradient_norm == 0 and results[0].stats.skipped == 0


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert step_mode() == "graph"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match="TREADLE_CUDA_STEP is 'fast': it must be graph, eager or free"):
        step_mode()
