"""What a step costs besides its arithmetic: nothing is read from the device unless asked for, and recomputed blocks change no bit."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.model.config import Choices, LateInteraction, TrainerConfig
from treadle.model.config_json import to_json
from treadle.model.trainer import Trainer
from treadle.pipeline import PackedBatch, StepItems
from treadle.shape import Objective

Tiny = Callable[..., TrainerConfig]
Pairs = Callable[[list[int]], StepItems]
Packed = Callable[[StepItems], PackedBatch]

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")
"""How a tensor's value comes to the host."""


HOST_KNOWS = {
    "corruption",
    "cover_spans_reference",
    "tape_reference",
    "pair_loss_reference",
    "segment_attention_reference",
    "relations",
    "layout",
}
"""Files that look at sizes, grids and weights of edges, which came from the host with the batch; none of them sees a loss or a gradient."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of ours that read a floating tensor or a flag, read by read."""
    seen: list[str] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if tensor.is_floating_point() or tensor.dtype is torch.bool:
                frame = sys._getframe(1)
                while frame.f_back is not None and "/site-packages/" in frame.f_code.co_filename:
                    frame = frame.f_back
                seen.append(Path(frame.f_code.co_filename).stem)
            return original(tensor, *arguments, **named)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    return seen


@pytest.mark.parametrize("objective", [Objective.MASKED, Objective.CONTRASTIVE], ids=str)
def test_nothing_is_read_until_somebody_asks(objective: Objective, tiny: Tiny, pairs: Pairs, packed: Packed, reads: list[str]) -> None:
    batch = packed(pairs(list(range(8))))
    with Trainer(tiny(objective=objective)) as trainer:
        reads.clear()
        trainer.step(batch)
        trainer.accumulate(batch)
        result = trainer.step([batch, batch], embeddings=torch.float32)
        assert result.step == 2
        # Losses, norms and verdicts of two steps and a window are where they were made.
        assert set(reads) <= HOST_KNOWS
        reads.clear()
        assert result.stats.step == 2
        assert set(reads) == {"statistics"}
        reads.clear()
        assert result.stats.loss == result.stats.loss and not reads


def test_recomputed_blocks_change_no_bit(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batches = [packed(pairs(list(range(first, first + 6)))) for first in (0, 6)]
    every = {
        "objective": Objective.JOINT,
        "late_interaction": LateInteraction(weight=0.3, width=16),
        "choices": Choices(weight=0.5),
        "depth": 2,
    }
    ends = []
    for recompute in (False, True):
        with Trainer(tiny(**every, recompute_blocks=recompute)) as trainer:
            assert trainer.network.tower.checkpoint is recompute
            stats = [trainer.step(batches[i % 2]).stats for i in range(4)]
            ends.append((stats, {name: p.detach().clone() for name, p in trainer.network.named_parameters()}))
    (stats, weights), (again, recomputed) = ends
    assert stats == again
    assert all(torch.equal(weights[name], recomputed[name]) for name in weights)


def test_recomputing_is_no_part_of_a_runs_record(tiny: Tiny) -> None:
    """A run may be resumed with it switched on or off."""
    assert to_json(tiny(recompute_blocks=True)) == to_json(tiny())


def test_steps_compute_with_the_callers_threads(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    """Steps run in a thread of their own, to which torch gives a count of its own: the caller's at each call is what counts."""
    seen: list[tuple[int, int]] = []
    before = torch.get_num_threads()
    with Trainer(tiny()) as trainer:
        tower = trainer.network.tower
        tower.register_forward_hook(lambda *_: seen.append((torch.get_num_threads(), threading.get_ident())))
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            trainer.step(packed(pairs([0, 1])))
    torch.set_num_threads(before)
    assert [threads for threads, _ in seen] == [1, 3, 2]
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})
