"""A training loop of your own that can be stopped anywhere and goes on bit for bit.

Trains a small text classifier twice: once without a pause, and once in pieces, each of which a new process could run: it builds everything
anew, restores the record and goes on in the middle of an accumulation window. Both end with the same weights.

    python examples/records.py [FOLDER]
"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treadle import TrainingRecord
from treadle.model import WeightedGradientsAccumulator

WINDOW = 4
"""Micro-batches that make one update."""
UPDATES = 12
TEXTS = [
    b"a red square",
    b"a blue circle",
    b"square of green",
    b"one round circle",
    b"squares",
    b"circles everywhere",
    b"a square!",
    b"circle?",
]


class Classifier(nn.Module):
    """Tells squares from circles by their bytes; dropout, so that the random generator matters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.EmbeddingBag(256, 32)
        self.out = nn.Sequential(nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 2))

    def forward(self, texts: list[bytes]) -> Tensor:
        offsets = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
        scores: Tensor = self.out(self.bytes(torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long(), offsets))
        return scores


@dataclass
class Loop:
    """Everything that training needs, in one place."""

    model: Classifier = field(default_factory=Classifier)
    optimizer: Any = None
    scheduler: Any = None
    accumulator: WeightedGradientsAccumulator = field(default_factory=WeightedGradientsAccumulator)
    micro_batch: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=UPDATES + 1)

    def run(self, until: int) -> None:
        """Micro-batches up to `until`, an update after each window of them."""
        while self.micro_batch < until:
            # Micro-batches are unequal: weighting each by its texts makes a window's gradient the mean over all of them.
            texts = TEXTS[self.micro_batch % 8 :][: 1 + self.micro_batch % 3]
            labels = torch.tensor([int(b"circle" in text) for text in texts])
            self.model.zero_grad()
            loss = nn.functional.cross_entropy(self.model(texts), labels)
            torch.autograd.backward(loss)
            self.accumulator.accumulate_mean(self.model, weight=len(texts))
            self.losses.append(loss.item())
            self.micro_batch += 1
            if self.micro_batch % WINDOW == 0:
                self.accumulator.finish_mean().assign(self.model)
                self.optimizer.step()
                self.scheduler.step()

    def save(self, path: Path) -> None:
        """One file with all of it, whole or not at all."""
        # The record knows no counters and no generators: what else the loop needs goes into a state of your own.
        state = {"micro_batch": self.micro_batch, "losses": self.losses, "random": torch.get_rng_state()}
        TrainingRecord.capture_weighted(self.model, self.optimizer, self.scheduler, self.accumulator, state).save(path)

    @classmethod
    def resumed(cls, path: Path) -> "Loop":
        """A loop built anew, where the saved one stood."""
        loop = cls()
        restored = TrainingRecord.load(path).restore_weighted(loop.model, loop.optimizer, loop.scheduler)
        loop.accumulator = restored.accumulator
        loop.micro_batch, loop.losses = restored.state["micro_batch"], restored.state["losses"]
        torch.set_rng_state(restored.state["random"])
        return loop


def main(folder: Path) -> None:
    path = folder / "loop.safetensors"
    torch.manual_seed(0)
    whole = Loop()
    whole.run(WINDOW * UPDATES)

    torch.manual_seed(0)
    loop = Loop()
    for stop in (7, 18, 40):  # in the middle of a window, and after one
        loop.run(stop)
        loop.save(path)
        loop = Loop.resumed(path)
        pending = len(loop.accumulator.gradients)
        print(f"resumed at micro-batch {loop.micro_batch}, {pending} pending gradients, {path.stat().st_size:,} bytes")
    loop.run(WINDOW * UPDATES)

    same = loop.losses == whole.losses and all(
        torch.equal(a, b) for a, b in zip(whole.model.state_dict().values(), loop.model.state_dict().values(), strict=True)
    )
    print(
        f"loss {whole.losses[0]:.3f} to {sum(whole.losses[-8:]) / 8:.3f}; stopped three times, the weights are {'the same' if same else 'NOT the same'}"
    )
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
