"""Claim: a packed step does useful work at every position, near the machine's own matrix-product rate.

The same tower, items and loss on the stamps mix, forward and backward, in turns:
  packed     rows of whole segments, as Treadle trains
  padded     every item of a modality padded at its right to the longest of that modality in the batch, as a collator would, and
             no mask charged for (which flatters the baseline)
  matmul     the machine's matrix products at the tower's width, the ceiling

Tokens are real tokens either way. `useful rate` is the packed step's floating-point operations (matrix products of the forward and
backward pass and attention scores) a second over the rate of bare products of the tower's own sizes.

    python benchmarks/bench_step.py --shards shards
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import record
import torch

from treadle import AudioShape, BatchShape, ImageShape, Modality, Objective, PackedBatch, Packer, Schedule, ShardStream, TrainerConfig
from treadle.decoders import Payload
from treadle.model.layout import BatchLayout
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.objectives import Objectives
from treadle.model.tower import inner_width
from treadle.pipeline.bag import DecodedBag

HIDDEN, DEPTH = 512, 12
SHAPE = BatchShape(
    max_rows_per_device=2,
    max_segments_per_device=512,
    max_columns_per_row=512,
    image=ImageShape(patch_side=16, channels=4),
    audio=AudioShape(chunk_samples=320, sample_rate=16_000),
)


def packed_batch(shards: list[str]) -> PackedBatch:
    """A full batch of the stamps."""
    with ShardStream(shards, SHAPE, epochs=1) as stream:
        return next(iter(stream))


def padded_payload(batch: PackedBatch, segment: int, grid: tuple[int, int, int]) -> Payload:
    """A segment's payload with zeros up to `grid`."""
    modality = Modality(int(batch.modality[segment]))
    payload = np.asarray(batch.payload(segment))
    if modality is Modality.TEXT:
        return Payload(np.pad(payload, (0, grid[0] - len(payload))), grid, (1, 1, grid[0]), False)
    if modality is Modality.AUDIO:
        samples = grid[0] * SHAPE.audio.chunk_samples
        return Payload(np.pad(payload, (0, samples - len(payload))), grid, (1, 1, samples), False)
    high, wide = grid[1] * SHAPE.image.patch_side, grid[2] * SHAPE.image.patch_side
    padded = np.pad(payload, ((0, high - payload.shape[0]), (0, wide - payload.shape[1]), (0, 0)))
    return Payload(padded, grid, (1, high, wide), False)


def padded_batch(batch: PackedBatch) -> PackedBatch:
    """The same items, each as long as the longest of its modality: a picture as tall and as wide as it takes to hold as many patches."""
    tokens = batch.grid[: batch.segments].prod(1)
    grids: dict[int, tuple[int, int, int]] = {}
    for modality in np.unique(batch.modality[: batch.segments]):
        of_kind = batch.modality[: batch.segments] == modality
        grids[int(modality)] = (int(tokens[of_kind].max()), 1, 1)
    segments = range(batch.segments)
    payloads: list[Payload] = []
    for segment in segments:
        kind = int(batch.modality[segment])
        longest = grids[kind][0]
        grid = grids[kind]
        if kind == Modality.IMAGE:
            high, wide = int(batch.grid[segment, 1]), int(batch.grid[segment, 2])
            # A patch sequence is padded as a sequence: rows of patches of this picture's width, the last one cut by rounding down.
            grid = (1, max(high, longest // wide), wide)
        payloads.append(padded_payload(batch, segment, grid))
    lengths = [1 + int(np.prod(payload.grid)) for payload in payloads]
    rows = -(-sum(lengths) // SHAPE.max_columns_per_row) + len(lengths)
    shape = replace(SHAPE, max_rows_per_device=rows, max_segments_per_device=batch.segments)
    packer = Packer(shape, window=1, max_edges=batch.segments**2)
    count = batch.segments
    packer.add_decoded(
        DecodedBag(
            modalities=batch.modality[:count].tolist(),
            payloads=payloads,
            lengths=lengths,
            items=list(segments),
            ids=batch.id[:count].tolist(),
            groups=batch.group[:count].tolist(),
            temperature_groups=[0] * count,
            sides=[0] * count,
            choices=[b""] * count,
            choice_targets=[np.zeros(0, np.float32)] * count,
        )
    )
    return packer.take()


def step(batch: PackedBatch, network: Network, objectives: Objectives, dtype: torch.dtype) -> Callable[[], float]:
    """Forward, loss and backward over `batch`; answers nothing of interest."""
    layout = BatchLayout.from_batch(batch, torch.device("cpu"))
    world = World()

    def run() -> float:
        for parameter in network.parameters():
            parameter.grad = None
        micro_batch = objectives.prepare(0, layout, 1, world, [layout.num_segments])
        counts = objectives.counts(micro_batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = objectives.sums(network, micro_batch, world).loss(1 / counts.clamp(min=1))
        assert loss is not None
        loss.backward()
        return 0.0

    return run


def operations(batch: PackedBatch) -> float:
    """Floating-point operations of a forward and backward pass: two a multiply-add, the backward pass twice the forward."""
    length = batch.length[: batch.segments].astype(np.float64)
    positions = length.sum()
    products = 2 * positions * DEPTH * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * inner_width(HIDDEN))
    attention = 4 * (length**2).sum() * HIDDEN * DEPTH
    return float(3 * (products + attention))


def matmul_rate(positions: int, dtype: torch.dtype, seconds: float = 2.0) -> float:
    """Floating-point operations a second of the tower's own products, forward and both gradients, back to back."""
    inner = inner_width(HIDDEN)
    sizes = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * inner), (inner, HIDDEN))
    cases = [
        (torch.randn(positions, k, dtype=dtype), torch.randn(n, k, dtype=dtype), torch.randn(positions, n, dtype=dtype)) for k, n in sizes
    ]
    done, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for x, w, dy in cases:
            torch.mm(x, w.t())
            torch.mm(dy, w)
            torch.mm(dy.t(), x)
            done += 6.0 * positions * x.shape[1] * w.shape[0]
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of every case; more than one wants a quiet machine [1]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    packed = packed_batch(shards)
    padded = padded_batch(packed)
    config = TrainerConfig(depth=DEPTH, hidden=HIDDEN, batch=SHAPE, schedule=Schedule(steps=1), objective=Objective.CONTRASTIVE)
    network = Network(config)
    objectives = Objectives(config)
    positions = int(packed.length[: packed.segments].sum())
    shape = {
        "threads": arguments.threads,
        "hidden": HIDDEN,
        "depth": DEPTH,
        "segments": packed.segments,
        "positions": positions,
        "padded": int(padded.length[: padded.segments].sum()),
    }
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        cases = {"packed": step(packed, network, objectives, dtype), "padded": step(padded, network, objectives, dtype)}
        for run in cases.values():
            run()
        rates: dict[str, list[float]] = {"packed": [], "padded": [], "useful": []}
        for _ in range(arguments.repetitions):
            for case, run in cases.items():
                start = time.perf_counter()
                run()
                rates[case].append(packed.tokens / (time.perf_counter() - start))
            achieved = operations(packed) * rates["packed"][-1] / packed.tokens
            rates["useful"].append(achieved / matmul_rate(positions, dtype))
        for case in cases:
            record.append(record.Row(op="step", impl=case, shape=shape, dtype=name, metric="tokens", unit="1/s", values=rates[case]))
        values = record.ratios(rates["packed"], rates["padded"])
        record.append(
            record.Row(op="step", impl="packed", baseline="padded", shape=shape, dtype=name, metric="rate ratio", unit="x", values=values)
        )
        record.append(
            record.Row(
                op="step",
                impl="packed",
                baseline="bare matrix products",
                shape=shape,
                dtype=name,
                metric="useful rate",
                unit="x",
                values=rates["useful"],
            )
        )


if __name__ == "__main__":
    main()
