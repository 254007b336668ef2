"""The step on a CUDA device: graph against eager, repeats, the CPU's losses, and no synchronisation.

Needs a CUDA device; `make gpu` runs it. What of the step needs none is tested in `tests/model/test_device_step.py`.
"""

from collections.abc import Callable

import pytest
import torch

from treadle.model.config import Choices, LateInteraction, Schedule, TrainerConfig
from treadle.model.device_step import VARIABLE
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, Modality, Objective

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = BatchShape(max_rows_per_device=8, max_segments_per_device=64, max_columns_per_row=128, max_choices_per_item=4)


def batch(step: int) -> PackedBatch:
    """Texts in attracting pairs; the last makes a choice."""
    count = 32
    texts = [bytes((3 * step + 5 * i + j * j) % 200 for j in range(9 + (7 * i) % 50)) for i in range(count)]
    items = StepItems(
        [Modality.TEXT] * (count + 1),
        [*texts, b"yes or no?"],
        ids=[100 * step + i for i in range(count + 1)],
        sides=[3] * count + [0],
        choices=[b""] * count + [b"yn"],
        choice_targets=[()] * count + [(0.25, 0.75)],
        relations=Relations(attract=Edges([*range(count + 1), count], [i ^ 1 for i in range(count)])),
    )
    return Packer(SHAPE).pack(items)


def config(device: str, precision: str, **changes: object) -> TrainerConfig:
    return TrainerConfig(
        depth=2,
        hidden=256,
        batch=SHAPE,
        schedule=Schedule(steps=100, learning_rate=1e-3, warmup_steps=2),
        objective=Objective.JOINT,
        late_interaction=LateInteraction(weight=0.5, width=64),
        choices=Choices(weight=1.0),
        device=device,
        precision=precision,  # type: ignore[arg-type]  # one of the two
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[float], torch.Tensor]]:
    def run(device: str, precision: str, mode: str, steps: int = 8) -> tuple[list[float], torch.Tensor]:
        monkeypatch.setenv(VARIABLE, mode)
        with Trainer(config(device, precision)) as trainer:
            results = [trainer.step(batch(step)) for step in range(steps)]
            found = [result.stats.loss for result in results]
            return found, trainer._runner.parameters.weights.cpu().clone()

    return run


Losses = Callable[..., tuple[list[float], torch.Tensor]]


def test_the_graph_equals_eager_to_the_last_bit(losses: Losses) -> None:
    """Three eager steps, one capture, four replays, against eight eager steps."""
    one, weights = losses("cuda", "bf16", "graph")
    other, others = losses("cuda", "bf16", "eager")
    assert one == other and torch.equal(weights, others)


def test_a_run_repeats_to_the_last_bit(losses: Losses) -> None:
    one, weights = losses("cuda", "bf16", "graph")
    other, others = losses("cuda", "bf16", "graph")
    assert one == other and torch.equal(weights, others)


def test_fp32_losses_are_the_cpu_s(losses: Losses) -> None:
    """fp32 on both; tolerances grow with the steps, as differences of rounding do under Adam."""
    cuda, _ = losses("cuda", "fp32", "graph")
    cpu, _ = losses("cpu", "fp32", "free")
    for step, (found, want) in enumerate(zip(cuda, cpu, strict=True)):
        assert found == pytest.approx(want, rel=1e-4 * (step + 1)), step


def test_bf16_losses_are_near_the_cpu_s(losses: Losses) -> None:
    cuda, _ = losses("cuda", "bf16", "graph")
    cpu, _ = losses("cpu", "fp32", "free")
    assert cuda == pytest.approx(cpu, rel=2e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_the_step_never_synchronises(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any synchronising call of a warm step raises."""
    monkeypatch.setenv(VARIABLE, mode)
    batches = [batch(step) for step in range(10)]
    with Trainer(config("cuda", "bf16")) as trainer:
        for warm in batches[:5]:
            assert trainer.step(warm).stats.skipped == 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [trainer.step(one) for one in batches[5:]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(result.stats.loss > 0 for result in results)


def test_the_step_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "graph")
    with Trainer(config("cuda", "bf16")) as trainer:
        for step in range(5):
            trainer.step(batch(step))
        fixed = trainer._runner._fixed
        assert fixed is not None and fixed._graph is not None
