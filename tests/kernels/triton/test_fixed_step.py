"""A whole training step through the Triton versions of every op: the numbers of the references, and nothing that would read the device.

Also the cases of `make gpu` at small sizes, so that the script does not rot where there is no GPU.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.kernels import dispatch, registry
from treadle.model.config import Choices, Contrastive, LateInteraction, Schedule, TrainerConfig
from treadle.model.device_layer import layer_of
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, Modality, Objective, PairLossForm

ROOT = Path(__file__).resolve().parents[3]

READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.equal",
    "aten.is_nonzero",
)
"""What waits for the device: values that the host reads, and shapes that follow from values."""


class NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no dispatch modes
    """Refuses what would wait for the device; kernels are launched outside of it, as the interpreter reads its arguments."""

    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name() if hasattr(func, "name") else func).replace("::", ".")
        if not self.paused:
            assert not name.startswith(READS), f"{name} waits for the device"
            if name.startswith("aten.index.Tensor") or name.startswith("aten.index_put"):
                assert all(i is None or i.dtype is not torch.bool for i in args[1]), f"{name} by a mask waits for the device"
            if name.startswith("aten.repeat_interleave"):
                assert (kwargs or {}).get("output_size") is not None, f"{name} without output_size waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` takes Triton on the CPU too."""

    def choose(op: str, impl: Any, device: torch.device, *dtypes: torch.dtype) -> str:
        return "reference" if impl == "reference" or op not in dispatch._registered else "triton"

    original = dispatch.choose
    for name, module in list(sys.modules.items()):
        if name.startswith("treadle.") and getattr(module, "choose", None) is original:
            monkeypatch.setattr(module, "choose", choose)
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
    watch = NoReading()  # type: ignore[no-untyped-call]
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
        with pytest.raises(AssertionError, match="waits for the device"), NoReading():  # type: ignore[no-untyped-call]
            read()


def gpu_cases() -> Any:
    spec = spec_from_file_location("gpu_cases", ROOT / "benchmarks" / "gpu_cases.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_cases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", range(5))
def test_cases_of_the_gpu_script(place: int, device: torch.device) -> None:
    make: Callable[[], Any] = gpu_cases().cases(device, small=True, impl="triton")[place]
    case = make()
    assert case.difference() <= case.tolerance
