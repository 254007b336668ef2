"""The code that the pages show runs as it stands, but for sizes and names of files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from treadle import BatchShape, Packer, StepItems, Trainer, TrainerConfig
from treadle.model import GradientsAccumulator, ModelStateTrainingRecord, TrainableParameterContract
from treadle.model.config import Schedule
from treadle.pipeline import PackedReader, PackedWriter

ROOT = Path(__file__).resolve().parents[2]
SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=16, max_columns_per_row=64)


def blocks(page: str) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the pictures that pages name, to run in."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for name in ("boat.png", "cat.png"):
        Image.fromarray(pixels).save(name)


def test_the_readme_trains_and_packs(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, pack = blocks("README.md")
    smaller = {
        "max_rows_per_device=64": "max_rows_per_device=2",
        "max_segments_per_device=1024": "max_segments_per_device=32",
        "max_columns_per_row=1024": "max_columns_per_row=128",
        "depth=12, hidden=512": "depth=1, hidden=128, device='cpu'",
        "steps=100_000": "steps=2",
        "data/train-{000..127}.tar": f"{shards}/train-{{000..001}}.tar",
    }
    for shown, small in smaller.items():
        assert shown in train
        train = train.replace(shown, small)
    exec(train, {})
    assert len(capsys.readouterr().out.split()) == 2 and Path("checkpoint.safetensors").stat().st_size > 0
    exec(pack, {})
    assert Path("step.safetensors").stat().st_size > 0


def test_the_packer_page(capsys: pytest.CaptureFixture[str]) -> None:
    step, stream, masks, reader = blocks("docs/packer.md")
    names: dict[str, Any] = {}
    exec(step, names)
    printed = capsys.readouterr().out
    promised = re.search(r"print\(batch\)  # (.*), \.\.\.\)", step)
    assert promised is not None and printed.startswith(promised[1]) and Path("batch.png").stat().st_size > 0

    trained: list[Any] = []
    names |= {"bags": [StepItems([0], [bytes(1 + n % 40)]) for n in range(400)], "train": trained.append}
    exec(stream, names)
    assert sum(batch.bags for batch in trained) == 400 and len(trained) > 5

    exec(masks, names)
    documents = names["batch"].document_ids()
    assert torch.equal(names["allowed"][:, 0], torch.from_numpy(documents[:, :, None] == documents[:, None, :]))

    with PackedWriter("packed") as writer:
        for _ in range(3):
            writer.write(Packer(SHAPE).pack(StepItems([0], [b"a text"])))
    exec(reader, names | {"rank": 0, "world_size": 1, "state": PackedReader("packed").state})


def test_the_records_page(tiny_loop: Callable[[], dict[str, Any]]) -> None:
    loop, _, part, folder = blocks("docs/records.md")
    names = tiny_loop()
    exec(loop, names)
    assert names["number"] == 1000
    names |= {"accumulator": GradientsAccumulator(), "state": {}}
    exec(part, names | {"TrainableParameterContract": TrainableParameterContract, "ModelStateTrainingRecord": ModelStateTrainingRecord})

    config = TrainerConfig(depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=2), device="cpu")
    with Trainer(config) as trainer:
        trainer.step(StepItems([0], [b"a text"]))
        shown, resume = folder.split("\nTrainer(TrainerConfig(...")
        exec(shown, {"trainer": trainer, "recall": 0.5})
    assert resume.startswith(', resume="run/checkpoints"))')
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        "LATEST",
        "best.json",
        "best.safetensors",
        "last.safetensors",
        "step-00000001.safetensors",
    ]


@pytest.fixture
def tiny_loop() -> Callable[[], dict[str, Any]]:
    """A linear model and what a loop over it needs."""

    def make() -> dict[str, Any]:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [(torch.ones(1, 3), torch.ones(1, 1))] * 1001
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.mse_loss
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches, "loss_of": loss}

    return make
