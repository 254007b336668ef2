"""Claim: a stream's resident memory is flat within 5 % over 20 epochs, and one sample of 500 MB adds no more than itself and the bytes
that may be in flight.

Each case runs in a process of its own, over shards that this script writes; memory is the resident set, read after every epoch, or its
peak. What is packed is captions with pictures, through two threads.

    python benchmarks/bench_memory.py
"""

import argparse
import gc
import io
import multiprocessing
import random
import resource
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from PIL import Image

from treadle import BatchShape, ImageShape, ShardStream
from treadle.pipeline.feed import IN_FLIGHT_BYTES

SHAPE = BatchShape(max_rows_per_device=16, max_segments_per_device=512, max_columns_per_row=512, image=ImageShape(patch_side=16))
EPOCHS = 20


def resident_mib() -> float:
    """The resident set of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def write_shards(folder: Path, shards: int, samples: int) -> list[str]:
    """Captions, each with a picture."""
    rng = random.Random(0)
    paths: list[str] = []
    for shard in range(shards):
        path = folder / f"{shard:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for index in range(samples // shards):
                out = io.BytesIO()
                pixels = np.frombuffer(rng.randbytes(20 * 20 * 3), np.uint8).reshape(20, 20, 3)
                Image.fromarray(pixels).resize((80, 80)).save(out, "png")
                for name, data in (("txt", rng.randbytes(rng.randint(20, 400))), ("png", out.getvalue())):
                    member = tarfile.TarInfo(f"{index:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        paths.append(str(path))
    return paths


def epochs_mib(shards: list[str]) -> list[float]:
    """The resident set after each epoch."""
    found: list[float] = []
    with ShardStream(shards, SHAPE, epochs=EPOCHS, threads=2, shuffle=200) as stream:
        for batch in stream:
            assert batch.state is not None
            epoch = int(batch.state.columns["epoch"].min())
            if epoch > len(found):
                gc.collect()
                found.append(resident_mib())
    gc.collect()
    return [*found, resident_mib()]


def large_sample_mib(shards: list[str]) -> list[float]:
    """The resident set before the pass, and its peak."""
    with ShardStream(shards[:1], SHAPE, epochs=1, threads=2, shuffle=200) as stream:
        list(stream)
    before = resident_mib()
    with ShardStream(shards, SHAPE, epochs=1, threads=2, shuffle=200) as stream:
        list(stream)
    return [before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]


def _apart(work: Callable[[list[str]], list[float]], shards: list[str]) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (shards,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=800)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder), 8, arguments.samples)
        found = _apart(epochs_mib, shards)
        shape: dict[str, Any] = {"samples": arguments.samples, "epochs": EPOCHS}
        record.append(record.Row(op="memory", impl="ShardStream", shape=shape, metric="resident", unit="MiB", values=found))
        grown = [100 * (each / found[1] - 1) for each in found[2:]]
        record.append(
            record.Row(
                op="memory", impl="ShardStream", baseline="after the second epoch", shape=shape, metric="growth", unit="%", values=grown
            )
        )
        large = Path(folder) / "large.tar"
        with tarfile.open(large, "w") as tar:
            for index in range(40):
                member = tarfile.TarInfo(f"{index:06d}.txt")
                member.size = 500_000_000 if index == 20 else 100
                tar.addfile(member, io.BytesIO(b"words and " * (member.size // 10)))
        before, peak = _apart(large_sample_mib, [*shards, str(large)])
        shape = {"sample_mb": 500, "in_flight_mib": IN_FLIGHT_BYTES // 2**20}
        record.append(
            record.Row(
                op="memory",
                impl="ShardStream, one sample of 500 MB",
                shape=shape,
                metric="peak above before",
                unit="MiB",
                values=[peak - before],
            )
        )


if __name__ == "__main__":
    main()
