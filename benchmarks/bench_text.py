"""Claim: of captions of 1 KiB, ShardStream packs at least twice as many samples a second as webdataset reads.

Ours are counted up to packed batches with their states (64 rows of 4096), webdataset's only up to its samples; both in one process, in
turns, over shards that this script writes:
  few shards    8, which 64 lanes cut into parts
  many shards   80, one and more for every lane
  blend         both of them as weighted sources, 3 to 1, and webdataset over all their shards

    python benchmarks/bench_text.py
"""

import argparse
import io
import random
import tarfile
import tempfile
from pathlib import Path

import record

from treadle import BatchShape, ShardStream
from treadle.pipeline import Source

SHAPE = BatchShape(max_rows_per_device=64, max_segments_per_device=1024, max_columns_per_row=4096)
CAPTION_BYTES = 1024


def write_shards(folder: Path, shards: int, samples: int) -> list[str]:
    """Shards of captions, `samples` in all."""
    rng = random.Random(0)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    folder.mkdir()
    paths: list[str] = []
    for shard in range(shards):
        path = folder / f"{shard:03d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in range(samples // shards):
                data = b" ".join(rng.choices(words, k=CAPTION_BYTES // 4))[:CAPTION_BYTES]
                member = tarfile.TarInfo(f"{shard:03d}{index:06d}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        paths.append(str(path))
    return paths


def stream_samples(sources: list[str] | list[Source], samples: int) -> int:
    """Samples packed by one pass of ShardStream."""
    with ShardStream(sources, SHAPE, epochs=1) as stream:
        found = sum(batch.bags for batch in stream)
    assert found == samples
    return found


def webdataset_samples(shards: list[str], samples: int) -> int:
    """Samples read by webdataset."""
    import webdataset

    found = sum(1 for _ in webdataset.WebDataset(shards, shardshuffle=False))
    assert found == samples
    return found


def measure(sources: list[str] | list[Source], shards: list[str], samples: int, shape: dict[str, object], repetitions: int) -> None:
    """One row each, and the ratio."""
    stream_samples(sources, samples)
    rates = record.in_turns(
        {
            "ShardStream": lambda: stream_samples(sources, samples),
            "webdataset": lambda: webdataset_samples(shards, samples),
        },
        repetitions,
    )
    for impl, values in rates.items():
        record.append(record.Row(op="text ingest", impl=impl, shape=shape, metric="samples", unit="1/s", values=values))
    values = record.ratios(rates["ShardStream"], rates["webdataset"])
    record.append(
        record.Row(op="text ingest", impl="ShardStream", baseline="webdataset", shape=shape, metric="rate ratio", unit="x", values=values)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24_000)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    samples = arguments.samples - arguments.samples % 80
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, object] = {"caption_bytes": CAPTION_BYTES, "samples": samples, "rows": 64, "columns": 4096}
        written: list[list[str]] = []
        for count in (8, 80):
            shards = write_shards(Path(folder) / str(count), count, samples)
            written.append(shards)
            measure(shards, shards, samples, {**common, "shards": count}, arguments.repetitions)
        few, many = written
        blend = [Source(few, weight=3.0), Source(many, weight=1.0)]
        shape = {**common, "samples": 2 * samples, "shards": "8 and 80", "weights": "3:1"}
        measure(blend, few + many, 2 * samples, shape, arguments.repetitions)


if __name__ == "__main__":
    main()
