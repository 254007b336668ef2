"""Claims: saving and loading a training record takes at most 1.2 times torch.save's and torch.load's time, in a file of the same size; a
trainer's checkpoint is written at more than half the rate of a plain safetensors file; a save beside training stops it for the copy alone.

Record: model, AdamW and pending gradients of a user's loop.
  TrainingRecord.save    one safetensors file with checksums, beside the target, fsync, rename
  torch.save             the same state_dicts and gradients, pickled, then fsync; "not synced" leaves that out (and its file to the disk, untimed, before the next case)
  TrainingRecord.load    every checksum checked
  torch.load             weights_only, the zip's own checksums checked
Checkpoint: Trainer.save against safetensors.torch.save_file of the same tensors, then fsync. Every row is a ratio of rates: above 1 is faster.
Stop: rate of Trainer.save(wait=False) up to its return, against one copy of the same tensors to memory of its own.

    python benchmarks/bench_save.py [--full] [--folder DIR]
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treadle import BatchShape, Schedule, Trainer, TrainerConfig, TrainingRecord
from treadle.model import GradientsAccumulator


def sync(path: Path) -> None:
    """Waits until a file is on the disk, as a save that survives a power cut must."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def user_loop(hidden: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer, GradientsAccumulator]:
    """A loop of a user's own in the middle of a window, its optimizer warm."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(hidden, hidden // 64, 4 * hidden) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accumulator = GradientsAccumulator()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    accumulator.accumulate(model)
    return model, optimizer, accumulator


def add(op: str, impl: str, baseline: str, shape: dict[str, object], rates: dict[str, list[float]]) -> None:
    values = record.ratios(rates[impl], rates[baseline])
    record.append(
        record.Row(op=op, impl=impl, baseline=baseline, shape=shape, dtype="float32", metric="rate ratio", unit="x", values=values)
    )


def in_turns(cases: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    for run in cases.values():
        run()  # the page cache and the allocator
    # Nobody pays for the disk's debts of the case before: an unsynced save leaves its file to whoever writes next.
    return record.in_turns(cases, repetitions, before=os.sync)


def bench_record(folder: Path, hidden: int, depth: int, repetitions: int) -> None:
    model, optimizer, accumulator = user_loop(hidden, depth)
    ours, theirs = folder / "record.safetensors", folder / "record.pt"
    captured = TrainingRecord.capture(model, optimizer, None, accumulator, {"step": 1})
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "gradients": dict(accumulator.gradients),
        "state": {"step": 1},
    }
    captured.save(ours)
    torch.save(state, theirs)
    count = float(ours.stat().st_size)
    shape: dict[str, object] = {"hidden": hidden, "depth": depth, "MB": round(count / 1e6)}
    sizes = [count / theirs.stat().st_size]
    record.append(
        record.Row(
            op="record size", impl="TrainingRecord", baseline="torch.save", shape=shape, metric="bytes ratio", unit="x", values=sizes
        )
    )

    def save() -> float:
        captured.save(ours)
        return count

    def torch_save() -> float:
        torch.save(state, theirs)
        sync(theirs)
        return count

    def torch_save_unsynced() -> float:
        torch.save(state, theirs)
        return count

    def load() -> float:
        TrainingRecord.load(ours)
        return count

    def torch_load() -> float:
        torch.load(theirs, weights_only=True)
        return count

    saves = in_turns({"TrainingRecord.save": save, "torch.save": torch_save, "torch.save, not synced": torch_save_unsynced}, repetitions)
    add("record save", "TrainingRecord.save", "torch.save", shape, saves)
    add("record save", "TrainingRecord.save", "torch.save, not synced", shape, saves)
    loads = in_turns({"TrainingRecord.load": load, "torch.load": torch_load}, repetitions)
    add("record load", "TrainingRecord.load", "torch.load", shape, loads)


def bench_trainer(folder: Path, hidden: int, depth: int, repetitions: int) -> None:
    shape_of_batch = BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=64)
    config = TrainerConfig(depth=depth, hidden=hidden, batch=shape_of_batch, schedule=Schedule(steps=10), device="cpu")
    ours, plain = folder / "checkpoint.safetensors", folder / "plain.safetensors"
    with Trainer(config) as trainer:
        trainer.save(ours)
        tensors = load_file(ours)
        count = float(ours.stat().st_size)
        shape: dict[str, object] = {"hidden": hidden, "depth": depth, "MB": round(count / 1e6)}

        def save() -> float:
            trainer.save(ours)
            return count

        def save_plain() -> float:
            save_file(tensors, plain)
            sync(plain)
            return count

        def copy() -> float:
            copies = [tensor.clone() for tensor in tensors.values()]
            return count if copies else 0.0

        rates = in_turns({"Trainer.save": save, "safetensors save_file": save_plain}, repetitions)
        add("checkpoint save", "Trainer.save", "safetensors save_file", shape, rates)
        saving = trainer.save(ours, wait=False)

        def stop() -> float:
            nonlocal saving
            saving = trainer.save(ours, wait=False)
            return count

        stops: dict[str, list[float]] = {"Trainer.save, wait=False": [], "copy": []}
        for _ in range(repetitions):
            saving.result()  # one that is still being written would be waited for
            for name, rate in record.in_turns({"Trainer.save, wait=False": stop}, 1).items():
                stops[name] += rate
            saving.result()
            for name, rate in record.in_turns({"copy": copy}, 1).items():
                stops[name] += rate
        add("training stop", "Trainer.save, wait=False", "copy", shape, stops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a model of a gigabyte as well")
    parser.add_argument("--folder", type=Path, help="where to write [a temporary folder]")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for depth in (4, 16) if arguments.full else (4,):
            bench_record(Path(name), 512, depth, arguments.repetitions)
            bench_trainer(Path(name), 512, depth, arguments.repetitions)


if __name__ == "__main__":
    main()
