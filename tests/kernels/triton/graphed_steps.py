"""Training steps through Triton's interpreter, captured in a recorded graph and call by call: one rank, or one of several.

As a script, `graphed_steps.py FOLDER RANK WORLD_SIZE`, one rank: it meets the others in FOLDER and leaves there what it saw, as JSON.
"""

import io
import itertools
import json
import sys
import wave
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import treadle.model.device_step
from treadle.kernels import dispatch
from treadle.model.config import Choices, Contrastive, LateInteraction, MeshOptions, Schedule, TrainerConfig
from treadle.model.device_step import Mode
from treadle.model.mesh import Mesh
from treadle.model.reduction import GradientReduction
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, Objective, PairLossForm

TEXTS = BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=64, max_choices_per_item=2)
SHAPE = replace(TEXTS, image=ImageShape(patch_side=8, channels=4), audio=AudioShape(chunk_samples=80, sample_rate=8000))


def module(name: str, path: Path) -> Any:
    """A file of tests, as a module."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


recorded_graph = module("recorded_graph", Path(__file__).with_name("recorded_graph.py"))


def take_triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes Triton on the CPU too."""

    def choose(op: str, impl: Any, device: torch.device, *dtypes: torch.dtype) -> str:
        return "reference" if impl == "reference" or op not in dispatch._registered else "triton"

    original = dispatch.choose
    for name, found in list(sys.modules.items()):
        if name.startswith("treadle.") and getattr(found, "choose", None) is original:
            monkeypatch.setattr(found, "choose", choose)


def png(pixels: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def wav(samples: NDArray[np.int16]) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def batch_of(seed: int, shape: BatchShape, rank: int = 0) -> PackedBatch | None:
    """Pairs that attract, a recording, a choice: no two seeds alike in number or length; none for every fifth.

    Pairs are captions and pictures where the shape has pictures, else captions and their halves.
    """
    if seed % 5 == 4:
        return None
    rng = np.random.default_rng(7 * seed + rank)
    count = 1 + (seed + rank) % 2
    texts = [b"picture %d of %d" % (i, seed * 7) for i in range(count)]
    seen, second = [text[: 5 + seed] for text in texts], Modality.TEXT
    alone, sounds = [b"y or n?"], 0
    if shape.is_live(Modality.IMAGE):
        seen = [png(rng.integers(0, 256, (8 + 3 * (seed % 2), 13, 4), dtype=np.uint8)) for _ in range(count)]
        second, sounds = Modality.IMAGE, 1
        alone = [wav(rng.integers(-9000, 9000, 100 + 40 * (seed % 3), dtype=np.int16)), *alone]
    total = 2 * count + len(alone)
    items = StepItems(
        [*[Modality.TEXT, second] * count, *[Modality.AUDIO] * sounds, Modality.TEXT],
        [*[content for pair in zip(texts, seen, strict=True) for content in pair], *alone],
        ids=[100 * seed + 10 * rank + i for i in range(total)],
        sides=[*[1, 2] * count, *[0] * len(alone)],
        choices=[b""] * (total - 1) + [b"yn"],
        choice_targets=[()] * (total - 1) + [(0.25, 0.75)],
        relations=Relations(attract=Edges([*range(2 * count + 1), *[2 * count] * len(alone)], [i ^ 1 for i in range(2 * count)])),
    )
    return Packer(shape).pack(items)


def config_of(device: torch.device, mesh: Mesh | None) -> TrainerConfig:
    config = TrainerConfig(
        depth=1,
        hidden=128,
        batch=SHAPE if mesh is None else TEXTS,
        schedule=Schedule(steps=10, learning_rate=1e-3, warmup_steps=2),
        objective=Objective.JOINT,
        contrastive=Contrastive(pair_loss=PairLossForm.SIGMOID),
        late_interaction=LateInteraction(weight=0.5 if mesh is None else 0.0, width=16),
        choices=Choices(weight=1.0),
        device=device,
        precision="fp32",
    )
    return replace(config, mesh=mesh)


def run(mode: Mode, seeds: list[int], monkeypatch: pytest.MonkeyPatch, mesh: Mesh | None = None, *, fails: bool = False) -> dict[str, Any]:
    """Steps over the batches of some seeds: losses, norms, rates, a sum of the weights' bits, and what was captured.

    Args:
        fails: this rank's capture fails.
    """
    device, rank = torch.device("cpu"), 0 if mesh is None else mesh.rank
    layer = recorded_graph.RecordingLayer(device, monkeypatch, None if mesh is None else mesh.world)
    if fails:
        layer.capture = layer.refuse
    config = config_of(device, mesh)
    with Trainer(config) as trainer, monkeypatch.context() as patch:
        # Initial values are drawn by then.
        take_triton_everywhere(patch)
        patch.setattr(treadle.model.device_step, "WARM_STEPS", 1)
        runner = trainer._runner
        # Slices small enough that some are on their way while the backward pass runs.
        runner.reduction = GradientReduction(runner.world, runner.parameters, runner.network, bucket_bytes=2**18)
        runner.fix_sizes(layer, mode)
        sent = [runner.world.bytes_sent]
        stats = []
        for seed in seeds:
            stats.append(trainer.step(batch_of(seed, config.batch, rank)).stats)
            sent.append(runner.world.bytes_sent)
        return {
            "losses": [s.loss for s in stats],
            "terms": [[s.masked_text_loss, s.masked_image_loss, s.masked_audio_loss, s.contrastive_loss, s.choices_loss] for s in stats],
            "norms": [s.gradient_norm for s in stats],
            "weights": int(runner.parameters.weights.view(torch.int32).long().sum()),
            "updates": float(runner.optimizer.updates),
            "sent": [after - before for before, after in itertools.pairwise(sent)],
            "replays": layer.replays,
            "recorded": [] if layer.recorder is None else layer.recorder.names,
        }


def main(folder: Path, rank: int, size: int) -> None:
    """One rank: call by call, captured, and with a capture that fails on rank 1."""
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    options = MeshOptions(host_domain_index=rank, host_domain_count=size, directory=folder / "meet", timeout_s=240)
    seeds = [0, 1, 2]
    with Mesh.bootstrap(options, device="cpu") as mesh:
        found = {
            "eager": run("eager", seeds, monkeypatch, mesh),
            "graph": run("graph", seeds, monkeypatch, mesh),
            "failed": run("graph", seeds[:2], monkeypatch, mesh, fails=rank == 1),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
