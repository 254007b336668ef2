"""Claim: ShardStream decodes the stamps at nearly the rate of a bare decode loop, and faster than the loader a user would write.

Three ways over the same shards (examples/stamps/build.py), in turns, samples/s:
  ShardStream   shards -> samples -> decoded items -> packed batches, two threads
  bare          the same items, already in memory, decoded by the same decoders in a plain two-thread map
  webdataset    webdataset + Pillow + soundfile + torchaudio's default resampler in a DataLoader with two worker processes

    python benchmarks/bench_ingest.py --shards shards
"""

import argparse
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from treadle import AudioShape, BatchShape, ImageShape, Modality, ShardStream
from treadle.decoders import decode
from treadle.pipeline import Schema
from treadle.pipeline.shards import Shard

SHAPE = BatchShape(
    max_rows_per_device=64,
    max_segments_per_device=2048,
    max_columns_per_row=1024,
    image=ImageShape(patch_side=16, channels=4),
    audio=AudioShape(chunk_samples=320, sample_rate=16_000),
)
WORKERS = 2
EXTENSIONS = {"png": Modality.IMAGE, "txt": Modality.TEXT, "ogg": Modality.AUDIO}


def stream_samples(shards: list[str]) -> int:
    """Samples packed by one pass of ShardStream."""
    with ShardStream(shards, SHAPE, epochs=1, threads=WORKERS, schema=Schema(), window=1) as stream:
        return sum(batch.bags for batch in stream)


def load_items(shards: list[str]) -> list[list[tuple[Modality, bytes]]]:
    """Every sample's items, encoded, in memory."""
    return [
        [(EXTENSIONS[field.name.rsplit(".", 1)[-1].lower()], bytes(field.data)) for field in sample.fields]
        for url in shards
        for sample in Shard(url).samples()
    ]


def bare_samples(samples: list[list[tuple[Modality, bytes]]]) -> int:
    """Samples decoded by a bare thread map."""

    def one(sample: list[tuple[Modality, bytes]]) -> int:
        for modality, data in sample:
            decode(modality, data, SHAPE)
        return 1

    with ThreadPoolExecutor(WORKERS) as pool:
        return sum(pool.map(one, samples, chunksize=4))


def decode_as_a_user_would(sample: Mapping[str, Any]) -> list[torch.Tensor]:
    """Pillow, soundfile and torchaudio at their defaults."""
    import soundfile
    import torchaudio.functional
    from PIL import Image

    out: list[torch.Tensor] = []
    for name, data in sample.items():
        if name.startswith("__"):
            continue
        if name.endswith("png"):
            out.append(torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGBA"))))
        elif name.endswith("ogg"):
            wave, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
            out.append(torchaudio.functional.resample(torch.from_numpy(wave.mean(1)), rate, 16_000))
        else:
            out.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return out


def _same(batch: list[Any]) -> list[Any]:
    return batch


def webdataset_samples(shards: list[str]) -> int:
    """Samples delivered by a two-worker DataLoader over webdataset."""
    import webdataset

    dataset = webdataset.WebDataset(shards, shardshuffle=False).map(decode_as_a_user_would)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=WORKERS, collate_fn=_same)
    return sum(len(batch) for batch in loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    torch.set_num_threads(1)
    samples = load_items(shards)
    for run in (lambda: stream_samples(shards), lambda: bare_samples(samples)):
        run()  # imports, caches
    rates = record.in_turns(
        {
            "ShardStream": lambda: stream_samples(shards),
            "bare": lambda: bare_samples(samples),
            "webdataset": lambda: webdataset_samples(shards),
        },
        arguments.repetitions,
    )
    shape = {"samples": len(samples), "workers": WORKERS, "rows": 64, "columns": 1024}
    for name, values in rates.items():
        record.append(record.Row(op="ingest", impl=name, shape=shape, metric="samples", unit="1/s", values=values))
    for baseline in ("bare", "webdataset"):
        values = record.ratios(rates["ShardStream"], rates[baseline])
        record.append(
            record.Row(op="ingest", impl="ShardStream", baseline=baseline, shape=shape, metric="rate ratio", unit="x", values=values)
        )


if __name__ == "__main__":
    main()
