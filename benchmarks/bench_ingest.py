"""Claim: ShardStream decodes the stamps at 0.95 of a bare decode loop's rate, and at 2.5 times the rate of the loader a user would write.

Over the same shards (examples/stamps/build.py), in turns, samples/s, two workers each:
  ShardStream   shards -> samples -> decoded items -> packed batches, in two processes (what is derived) or two threads
  bare          the same items, already in memory, decoded by the same decoders in two processes or threads that do nothing else
  ..., trusted  the same with `isolate=False`: FFmpeg works in the processes themselves, as it does in ShardStream's own, which it may take
                down and which are started again, and in the webdataset loader's
  webdataset    webdataset + Pillow + soundfile + torchaudio's default resampler in a DataLoader with two worker processes

`samples` is the rate of a whole run of `--epochs` passes, start-up included: ShardStream's processes are forked from the one that the warm-up's
stream has left, the others' from this one, so that imports are paid before the clock starts on either side. `sustained samples` is the rate without that: the samples that a run has more than one of a single pass, by the time that
it takes more.

    python benchmarks/bench_ingest.py --shards shards
"""

import argparse
import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
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


def warm_up(shards: list[str], samples: list[list[tuple[Modality, bytes]]]) -> None:
    """What only the first run would pay: imports in this process, which the others fork, and byte code, which an installed package has."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    stream_samples(shards[:1], 1, processes=WORKERS)
    decode_all(samples[:50])
    names = {Modality.IMAGE: "png", Modality.TEXT: "txt", Modality.AUDIO: "ogg"}
    decode_as_a_user_would({names[modality]: data for modality, data in samples[0]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=1, help="turns of this call [1]")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the shards in one run, from 2 on [2]")
    parser.add_argument("--full", action="store_true", help="threads too, and processes that isolate nothing")
    parser.add_argument("--turns", type=Path, help="JSON file of turns from earlier calls, added to: rows are made of all of them")
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    if arguments.epochs < 2:
        parser.error(f"--epochs is {arguments.epochs}: it must be at least 2, of which one is start-up's")
    torch.set_num_threads(1)
    samples = load_items(shards)
    warm_up(shards, samples)
    cases: dict[str, Callable[[int], int]] = {
        "ShardStream, processes": lambda epochs: stream_samples(shards, epochs, processes=WORKERS),
        "bare, processes": lambda epochs: bare_processes(samples, epochs),
        "bare, processes, trusted": lambda epochs: bare_processes(samples, epochs, TRUSTED),
        "webdataset": lambda epochs: webdataset_samples(shards, epochs),
    }
    pairs = [("ShardStream, processes", baseline) for baseline in ("bare, processes", "bare, processes, trusted", "webdataset")]
    if arguments.full:
        cases |= {
            "ShardStream, threads": lambda epochs: stream_samples(shards, epochs, threads=WORKERS),
            "bare, threads": lambda epochs: bare_threads(samples, epochs),
        }
        pairs += [("ShardStream, threads", baseline) for baseline in ("bare, threads", "webdataset")]
    epochs = arguments.epochs
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    if arguments.turns is not None and arguments.turns.exists():
        seconds |= json.loads(arguments.turns.read_text())
    for _ in range(arguments.repetitions):
        for name, run in cases.items():
            taken: list[float] = []
            for passes in (1, epochs):
                begun = time.perf_counter()
                assert run(passes) == passes * len(samples), name
                taken.append(time.perf_counter() - begun)
            seconds[name].append((taken[0], taken[1]))
        if arguments.turns is not None:
            arguments.turns.write_text(json.dumps(seconds))
    shape = {"samples": len(samples), "epochs": epochs, "workers": WORKERS, "rows": 64, "columns": 1024}
    cold = {name: [epochs * len(samples) / long for _, long in times] for name, times in seconds.items()}
    sustained = {name: [(epochs - 1) * len(samples) / (long - short) for short, long in times] for name, times in seconds.items()}
    for prefix, rates in (("", cold), ("sustained ", sustained)):
        for name in cases:
            record.append(record.Row(op="ingest", impl=name, shape=shape, metric=f"{prefix}samples", unit="1/s", values=rates[name]))
        for name, baseline in pairs:
            values = record.ratios(rates[name], rates[baseline])
            metric = f"{prefix}rate ratio"
            record.append(record.Row(op="ingest", impl=name, baseline=baseline, shape=shape, metric=metric, unit="x", values=values))


if __name__ == "__main__":
    main()
