"""Claim: reading packed shards is at least ten times as fast as decoding the samples in them.

Three ways over the same stamps (examples/stamps/build.py), in turns, samples/s, one thread each:
  PackedReader   packed shards, in a folder on this machine, every array checked
  decoding       the items, already in memory, decoded by the same decoders
  ShardStream    shards of samples -> packed batches

    python benchmarks/bench_packed.py --shards shards
"""

import argparse
import tempfile
from pathlib import Path

import record
from bench_packer import STAMPS

from treadle import Modality
from treadle.decoders import decode
from treadle.pipeline import PackedReader, PackedWriter, ShardStream
from treadle.pipeline.shards import Shard

EXTENSIONS = {"png": Modality.IMAGE, "txt": Modality.TEXT, "ogg": Modality.AUDIO}


def load_items(shards: list[str]) -> list[list[tuple[Modality, bytes]]]:
    """Every sample's items, encoded, in memory."""
    return [
        [(EXTENSIONS[field.name.rsplit(".", 1)[-1].lower()], bytes(field.data)) for field in sample.fields]
        for url in shards
        for sample in Shard(url).samples()
    ]


def packed_samples(folder: str) -> int:
    """Samples read by one pass over packed shards."""
    with PackedReader(folder) as reader:
        return sum(batch.bags for batch in reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--count", type=int, default=0, help="shards to use; 0 uses all")
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))][: arguments.count or None]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    items = load_items(shards)

    def decoded() -> int:
        for sample in items:
            for modality, data in sample:
                decode(modality, data, STAMPS)
        return len(items)

    def streamed() -> int:
        with ShardStream(shards, STAMPS, epochs=1, threads=1, window=1) as stream:
            return sum(batch.bags for batch in stream)

    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        with ShardStream(shards, STAMPS, epochs=1, threads=1) as stream, PackedWriter(folder) as writer:
            for batch in stream:
                writer.write(batch)
        packed_samples(folder)
        rates = record.in_turns(
            {"PackedReader": lambda: packed_samples(folder), "decoding": decoded, "ShardStream": streamed}, arguments.repetitions
        )
    shape = {"samples": len(items), "rows": 64, "columns": 1024}
    for name, values in rates.items():
        record.append(record.Row(op="packed", impl=name, shape=shape, metric="samples", unit="1/s", values=values))
    for baseline in ("decoding", "ShardStream"):
        values = record.ratios(rates["PackedReader"], rates[baseline])
        record.append(
            record.Row(op="packed", impl="PackedReader", baseline=baseline, shape=shape, metric="rate ratio", unit="x", values=values)
        )


if __name__ == "__main__":
    main()
