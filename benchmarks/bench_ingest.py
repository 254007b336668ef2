"""Claim: ShardStream decodes the stamps at 0.95 of a bare decode loop's rate, and at 2.5 times the rate of the loader a user would write.

Over the same shards (examples/stamps/build.py), in turns, samples/s, two workers each, start-up included:
  ShardStream   shards -> samples -> decoded items -> packed batches, in two processes or two threads (what is derived)
  bare          the same items, already in memory, decoded by the same decoders in two processes or two threads that do nothing else
  ..., trusted  the same with `isolate=False`: FFmpeg works in the processes themselves, as it does for the webdataset loader, and not in
                one of its own that it may take down
  webdataset    webdataset + Pillow + soundfile + torchaudio's default resampler in a DataLoader with two worker processes

    python benchmarks/bench_ingest.py --shards shards
"""

import argparse
import io
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from treadle import AudioShape, BatchShape, ImageShape, Modality, ShardStream
from treadle.decoders import DecodeOptions, decode
from treadle.pipeline.shards import Shard

SHAPE = BatchShape(
    max_rows_per_device=64,
    max_segments_per_device=2048,
    max_columns_per_row=1024,
    image=ImageShape(patch_side=16, channels=4),
    audio=AudioShape(chunk_samples=320, sample_rate=16_000),
)
ISOLATED, TRUSTED = DecodeOptions(), DecodeOptions(isolate=False)
WORKERS = 2
EXTENSIONS = {"png": Modality.IMAGE, "txt": Modality.TEXT, "ogg": Modality.AUDIO}


def stream_samples(
    shards: list[str], epochs: int, *, threads: int | None = None, processes: int | None = None, options: DecodeOptions = ISOLATED
) -> int:
    """Samples packed by ShardStream."""
    with ShardStream(shards, SHAPE, epochs=epochs, window=1, threads=threads, processes=processes, options=options) as stream:
        return sum(batch.bags for batch in stream)


def load_items(shards: list[str]) -> list[list[tuple[Modality, bytes]]]:
    """Every sample's items, encoded, in memory."""
    return [
        [(EXTENSIONS[field.name.rsplit(".", 1)[-1].lower()], bytes(field.data)) for field in sample.fields]
        for url in shards
        for sample in Shard(url).samples()
    ]


def decode_all(samples: list[list[tuple[Modality, bytes]]], options: DecodeOptions = ISOLATED) -> int:
    """Decodes every item of `samples`."""
    for sample in samples:
        for modality, data in sample:
            decode(modality, data, SHAPE, options)
    return len(samples)


def bare_threads(samples: list[list[tuple[Modality, bytes]]], epochs: int) -> int:
    """Samples decoded by threads that take the next one as they go."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return sum(pool.map(decode_all, ([sample] for _ in range(epochs) for sample in samples)))


def bare_processes(samples: list[list[tuple[Modality, bytes]]], epochs: int, options: DecodeOptions = ISOLATED) -> int:
    """Samples decoded by processes that find their part in memory."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=decode_all, args=(samples[number::WORKERS] * epochs, options)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(samples) * epochs


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


def webdataset_samples(shards: list[str], epochs: int) -> int:
    """Samples delivered by a two-worker DataLoader over webdataset."""
    import webdataset

    dataset = webdataset.WebDataset(shards * epochs, shardshuffle=False).map(decode_as_a_user_would)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=WORKERS, collate_fn=_same)
    return sum(len(batch) for batch in loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the shards in one turn [2]")
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    torch.set_num_threads(1)
    samples = load_items(shards)
    epochs = arguments.epochs
    decode_all(samples[:50])  # imports, caches
    rates = record.in_turns(
        {
            "ShardStream, processes": lambda: stream_samples(shards, epochs, processes=WORKERS),
            "bare, processes": lambda: bare_processes(samples, epochs),
            "ShardStream, threads": lambda: stream_samples(shards, epochs, threads=WORKERS),
            "bare, threads": lambda: bare_threads(samples, epochs),
            "ShardStream, processes, trusted": lambda: stream_samples(shards, epochs, processes=WORKERS, options=TRUSTED),
            "bare, processes, trusted": lambda: bare_processes(samples, epochs, TRUSTED),
            "webdataset": lambda: webdataset_samples(shards, epochs),
        },
        arguments.repetitions,
    )
    shape = {"samples": len(samples), "epochs": epochs, "workers": WORKERS, "rows": 64, "columns": 1024}
    for name, values in rates.items():
        record.append(record.Row(op="ingest", impl=name, shape=shape, metric="samples", unit="1/s", values=values))
    for kind in ("processes", "threads", "processes, trusted"):
        name = f"ShardStream, {kind}"
        for baseline in (f"bare, {kind}", "webdataset"):
            values = record.ratios(rates[name], rates[baseline])
            record.append(record.Row(op="ingest", impl=name, baseline=baseline, shape=shape, metric="rate ratio", unit="x", values=values))


if __name__ == "__main__":
    main()
