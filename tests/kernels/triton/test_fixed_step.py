"""A whole training step through the Triton versions of every op: the numbers of the references, and nothing that would read the device.

Also the cases of `make gpu` at small sizes, so that the script does not rot where there is no GPU.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels import registry
from treadle.model.config import Choices, Contrastive, LateInteraction, Schedule, TrainerConfig
from treadle.model.device_layer import layer_of
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, Modality, Objective, PairLossForm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def _module(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


graphed_steps = _module("graphed_steps", HERE / "graphed_steps.py")
recorded_graph = graphed_steps.recorded_graph
NoReading = recorded_graph.NoReading

on_the_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="records operations of the CPU: on a GPU tests/gpu captures the step itself"
)


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graphed_steps.take_triton_everywhere(monkeypatch)
    yield


def small_batch(shape: BatchShape) -> PackedBatch:
    """Four texts that attract in pairs, and one that makes a choice."""
    items = StepItems(
        [Modality.TEXT] * 5,
        [b"a red square", b"red", b"the blue circle", b"blue and round", b"yes or no?"],
        ids=[11, 12, 13, 14, 15],
        sides=[3, 3, 3, 3, 0],
        choices=[b""] * 4 + [b"yn"],
        choice_targets=[()] * 4 + [(0.25, 0.75)],
        relations=Relations(attract=Edges([0, 1, 2, 3, 4, 4], [1, 0, 3, 2])),
    )
    return Packer(shape).pack(items)


def trainer_of(shape: BatchShape, device: torch.device) -> Trainer:
    config = TrainerConfig(
        depth=1,
        hidden=128,
        batch=shape,
        schedule=Schedule(steps=10, learning_rate=1e-3),
        objective=Objective.JOINT,
        contrastive=Contrastive(pair_loss=PairLossForm.SIGMOID),
        late_interaction=LateInteraction(weight=0.5, width=16),
        choices=Choices(weight=1.0),
        device=device,
        precision="fp32",
    )
    return Trainer(config)


def test_a_step_of_triton_versions_reads_nothing(triton_everywhere: None, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Loss and gradient of a joint step with late interaction and choices, against the references' path of free sizes."""
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=6, max_columns_per_row=96, max_choices_per_item=2)
    batch = small_batch(shape)
    watch = NoReading()
    launch = registry.Kernel.launch

    def unwatched(self: registry.Kernel, *args: Any, **kwargs: Any) -> None:
        watch.paused = True
        try:
            launch(self, *args, **kwargs)
        finally:
            watch.paused = False

    monkeypatch.setattr(registry.Kernel, "launch", unwatched)
    with trainer_of(shape, device) as trainer:
        trainer._runner.fix_sizes(layer_of(device), "eager")
        fixed = trainer._runner._fixed
        assert fixed is not None
        work = fixed._work
        gradients: list[Tensor] = []

        def watched() -> None:
            # AdamW on the CPU reads its rate; on CUDA it does not. What precedes it is the same on both.
            with watch:
                work()

        update = fixed._update

        def keep(*args: Any) -> Any:
            gradients.append(trainer._runner.parameters.gradients.clone())
            watch.paused = device.type == "cpu"
            try:
                return update(*args)
            finally:
                watch.paused = False

        monkeypatch.setattr(fixed, "_work", watched)
        monkeypatch.setattr(fixed, "_update", keep)
        found = trainer.step(batch).stats
    monkeypatch.undo()
    with trainer_of(shape, torch.device("cpu")) as trainer:
        want = trainer.step(batch).stats
    assert gradients and found.masked_text_loss > 0 and found.late_interaction_loss > 0 and found.choices_loss > 0
    for name in ("loss", "masked_text_loss", "contrastive_loss", "late_interaction_loss", "choices_loss", "gradient_norm"):
        assert getattr(found, name) == pytest.approx(getattr(want, name), rel=2e-5), name


def test_the_watch_refuses_what_reads() -> None:
    x = torch.tensor([1.0, 0.0])
    for read in (lambda: x[0].item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: torch.repeat_interleave(x, torch.tensor([1, 2]))):
        with pytest.raises(AssertionError, match="waits for the device"), NoReading():
            read()


@on_the_cpu
def test_a_captured_step_equals_one_launched_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of other numbers, lengths and modalities than the captured one, a step that the graph does not take in between, a rising rate."""
    seeds = [0, 1, 4, 2]
    eager, graph = (graphed_steps.run(mode, seeds, monkeypatch) for mode in ("eager", "graph"))
    assert graph.pop("replays") == 2 and eager.pop("replays") == 0
    recorded = graph.pop("recorded")
    assert eager.pop("recorded") == [] and graph == eager
    assert len({loss for loss in graph["losses"] if loss}) == 3
    # One graph from the draws to the statistics.
    order = ["kernel.cover_spans", "kernel.attention_fwd", "kernel.pair_tiles", "kernel.attention_dkv", "aten._fused_adamw_.tensor_lr"]
    places = [recorded.index(name) for name in order]
    assert places == sorted(places)


def test_a_recorded_number_is_frozen() -> None:
    """What the comparison above rests on: a replay takes numbers of Python as they were, tensors as they are."""
    layer, rate, frozen, x = recorded_graph.RecordingLayer(torch.device("cpu"), pytest.MonkeyPatch()), torch.ones(()), [1.0], torch.zeros(2)
    replay = layer.capture(lambda: x.add_(rate * frozen[0]))
    assert x.tolist() == [0, 0]
    rate.fill_(5)
    frozen[0] = 7.0
    replay()
    assert x.tolist() == [5, 5]


@on_the_cpu
@pytest.mark.thorough
def test_ranks_capture_their_collectives(tmp_path: Path) -> None:
    """Two ranks over gloo: graph against call by call, the collectives of one graph, and a capture that fails on one rank."""
    command = [sys.executable, "-P", str(HERE / "graphed_steps.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    told = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for seen in (one, other):
        graph, eager, failed = seen["graph"], seen["eager"], seen["failed"]
        assert graph["replays"] == 2 and failed["replays"] == 0
        for name in ("losses", "terms", "norms", "weights", "updates"):
            assert graph[name] == eager[name], name
        # The bytes that a replay sends are counted as if it called; an int64 tells the other rank that the capture worked.
        assert [one - other for one, other in zip(graph["sent"], eager["sent"], strict=True)] == [0, 8, 0]
        assert failed["losses"] == eager["losses"][:2]
        assert "the step cannot be captured on rank 1, it goes on eagerly" in told[0]
    for name in ("losses", "terms", "norms", "weights"):
        assert one["graph"][name] == other["graph"][name], name
    collectives = [[name for name in seen["graph"]["recorded"] if name.startswith("c10d")] for seen in (one, other)]
    assert collectives[0] == collectives[1]
    # Denominators, vectors, their gradient, slices of the gradient, numerators.
    kinds = [name for name, _ in itertools.groupby(collectives[0])]
    assert len(kinds) == 4 and "allgather" in kinds[1] and "reduce_scatter" in kinds[2] and kinds[0] == kinds[3]
    recorded = one["graph"]["recorded"]
    sums = [place for place, name in enumerate(recorded) if name == kinds[0]]
    # The first slice is on its way before the backward pass is over; none waits for the host in between.
    assert len(sums) > 4 and sums[1] < recorded.index("kernel.byte_embed_bwd") < recorded.index("aten._fused_adamw_.tensor_lr")


@pytest.mark.parametrize("place", range(5))
def test_cases_of_the_gpu_script(place: int, device: torch.device) -> None:
    cases = _module("gpu_cases", ROOT / "benchmarks" / "gpu_cases.py")
    make: Callable[[], Any] = cases.cases(device, small=True, impl="triton")[place]
    case = make()
    assert case.difference() <= case.tolerance
