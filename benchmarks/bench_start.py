"""What starting costs: one process plays sampled ranks of 4,096 over 8,192 lanes and many shards; a listing, a stream made, a first batch.

The shards are hard links to eight small tars in a temporary folder (`--shards`, 20,000; `--full` 100,000), or those of `--folder`.
"""

import argparse
import io
import os
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path

from record import Row, append

from treadle.pipeline import ShardStream, Source
from treadle.pipeline.sources import ListedUrls, expand_urls
from treadle.shape import BatchShape

SHAPE = BatchShape(max_rows_per_device=8, max_segments_per_device=128, max_columns_per_row=512)
RANKS, LANES = 4096, 8192


def write(folder: Path, shards: int) -> str:
    """`shards` tars of 200 short texts; answers their pattern."""
    for base in range(8):
        with tarfile.open(folder / f"base-{base}", "w") as tar:
            for sample in range(200):
                data = (f"sample {base} {sample} " * 8).encode()
                info = tarfile.TarInfo(f"{sample:05d}.txt")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    for shard in range(shards):
        os.link(folder / f"base-{shard % 8}", folder / f"shard-{shard:06d}.tar")
    return str(folder / f"shard-{{000000..{shards - 1:06d}}}.tar")


def traced(pattern: str, rank: int) -> tuple[float, float]:
    """Most memory that Python and numpy hold, MiB: while shards are listed; from the list to a rank's first batch, the list aside."""
    tracemalloc.start()
    urls = expand_urls(pattern)
    held, listing = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    with ShardStream([Source(ListedUrls(urls))], SHAPE, rank=rank, world_size=RANKS, lanes=LANES, threads=1) as stream:
        next(iter(stream))
        starting = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    return listing / 2**20, starting / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="shards `shard-000000.tar` and on lie here already")
    parser.add_argument("--full", action="store_true", help="100,000 shards")
    parser.add_argument("--ranks", type=int, default=8, help="ranks played")
    given = parser.parse_args()
    shards = 100_000 if given.full else given.shards
    with tempfile.TemporaryDirectory() as made:
        pattern = str(given.folder / f"shard-{{000000..{shards - 1:06d}}}.tar") if given.folder else write(Path(made), shards)
        listing, asking, creating, first, told = ([] for _ in range(5))
        for rank in range(0, RANKS, RANKS // given.ranks):
            begin = time.perf_counter()
            urls = expand_urls(pattern)
            listed = time.perf_counter()
            for url in urls:
                os.path.exists(url)
            asked = time.perf_counter()
            stream = ShardStream([Source(ListedUrls(urls))], SHAPE, rank=rank, world_size=RANKS, lanes=LANES, threads=1)
            created = time.perf_counter()
            batch = next(iter(stream))
            done = time.perf_counter()
            assert batch.state is not None
            told.append(len(batch.state.to_bytes()) / 2**10)
            stream.close()
            listing.append(listed - begin)
            asking.append(asked - listed)
            creating.append(created - asked)
            first.append(done - created)
        # Apart from what is timed, which tracing slows down.
        peaks = [traced(pattern, rank) for rank in (0, RANKS // 2, RANKS - 1)]
        shape = {"shards": shards, "ranks": RANKS, "lanes": LANES}
        rows = (
            ("expand_urls, rank 0", "", "time", "s", listing),
            ("a look at every shard", "", "time", "s", asking),
            ("ShardStream, listed", "", "time", "s", creating),
            ("first batch", "", "time", "s", first),
            ("expand_urls, rank 0", "a look at every shard", "time ratio", "x", [a / b for a, b in zip(listing, asking, strict=True)]),
            ("expand_urls, rank 0", "", "peak memory", "MiB", [peak for peak, _ in peaks]),
            ("ShardStream to its first batch", "", "peak memory", "MiB", [peak for _, peak in peaks]),
            ("state", "", "size", "KiB", told),
        )
        for impl, baseline, metric, unit, values in rows:
            append(Row(op="start", impl=impl, baseline=baseline, shape=shape, metric=metric, unit=unit, values=values))


if __name__ == "__main__":
    main()
