"""How ShardStream's rate on the stamps compares with the streaming libraries of others, each from its own format with the same decoders.

Two workers each, `--epochs` times over the data, in turns, samples/s and CPU time a sample (of all processes), start-up included;
decoded items are thrown away, except by ShardStream, which shuffles, labels and packs them and keeps its position, and in the cases
"arrays", where a peer hands over what it decoded as cheaply as it can: one tape a batch, in memory that both processes share.
FFmpeg works in the worker processes everywhere, as in ShardStream's own (SPDL's threads hold it in the main process):
  ShardStream   tar shards, order and hold-back, packed batches with states, two processes
  bare          the items in memory, decoded by two forked processes that do nothing else: nobody's loader
  MosaicML      MDS files, StreamingDataset in a DataLoader with two workers
  LitData       its chunks, StreamingDataset in a StreamingDataLoader with two workers
  Energon       the same tar shards, indexed by `energon prepare`, its loader with two workers
  SPDL          no format of its own: the same tar shards through tarfile, a pipeline with two threads
  Grain         no format of its own without ArrayRecord: samples in memory, two worker processes
A library that is not installed is left out, and that is said. None of them is a dependency: install what is to be compared apart,
`pip install mosaicml-streaming litdata spdl grain megatron-energon`.

    python benchmarks/bench_peers.py --shards shards
"""

import argparse
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import bench_ingest
import numpy as np
import record
import torch

from treadle import Modality
from treadle.decoders import decode

WORKERS = bench_ingest.WORKERS
BATCH = 16
CHUNK_BYTES = 8 << 20
Sample = list[tuple[Modality, bytes]]
Run = Callable[[], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a case reads."""

    shards: list[str]
    samples: list[Sample]
    """All of them, once for each epoch."""
    epochs: int
    folder: Path
    """Where a format of its own is written."""


def decoded(sample: dict[str, bytes]) -> int:
    """Decodes the files of a sample, named `place.modality`; answers that it was one."""
    arrays_of(sample)
    return 1


def arrays_of(sample: dict[str, bytes]) -> list[np.ndarray[Any, Any]]:
    """The decoded files of a sample."""
    options = bench_ingest.TRUSTED
    return [
        decode(Modality(int(name.rpartition("_")[2])), data, bench_ingest.SHAPE, options).array for name, data in sorted(sample.items())
    ]


def tape_of(batch: list[list[np.ndarray[Any, Any]]]) -> tuple[torch.Tensor, list[list[int]]]:
    """A batch's arrays back to back in shared memory, as torch's own collate function lays out tensors, and their sizes."""
    sizes = [[array.nbytes for array in sample] for sample in batch]
    total = sum(map(sum, sizes))
    tape = torch.empty(0, dtype=torch.uint8)
    tape = tape.new(tape.untyped_storage()._new_shared(total, device="cpu")).resize_(total)
    into, at = tape.numpy(), 0
    for sample in batch:
        for array in sample:
            into[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            at += array.nbytes
    return tape, sizes


def counted(batch: Any) -> int:
    """Samples of a batch, however it came."""
    return batch if isinstance(batch, int) else len(batch[1])


def named(sample: Sample) -> dict[str, bytes]:
    """A sample's files under names that keep their order and modality."""
    return {f"f{place:02d}_{int(modality)}": data for place, (modality, data) in enumerate(sample)}


def both(run: Callable[[Callable[[dict[str, bytes]], Any], Callable[[list[Any]], Any]], int]) -> dict[str, Run]:
    """A peer's two cases: what it decodes thrown away, and handed over."""
    return {"": lambda: run(decoded, sum), ", arrays": lambda: run(arrays_of, tape_of)}


def mosaicml(source: Source) -> dict[str, Run]:
    """MDS needs the same columns in every sample: one holds them all, pickled by nobody, as a list of names and sizes before the bytes."""
    from streaming import MDSWriter, StreamingDataset

    folder = str(source.folder)

    class Decoding(StreamingDataset):  # type: ignore[misc]  # no types there
        work: Callable[[dict[str, bytes]], Any]

        def __getitem__(self, at: int) -> Any:
            found = super().__getitem__(at)
            return self.work(_split(found["data"]))

    with MDSWriter(out=folder, columns={"data": "bytes"}, size_limit=CHUNK_BYTES) as writer:
        for sample in source.samples:
            writer.write({"data": _joined(sample)})

    def run(work: Callable[[dict[str, bytes]], Any], collate: Callable[[list[Any]], Any]) -> int:
        dataset = Decoding(local=folder, batch_size=BATCH, shuffle=False)
        dataset.work = work
        loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)
        return sum(map(counted, loader))

    return both(run)


def litdata(source: Source) -> dict[str, Run]:
    """Chunks written by LitData's own writer."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    folder = str(source.folder)

    class Decoding(StreamingDataset):  # type: ignore[misc]  # no types there
        work: Callable[[dict[str, bytes]], Any]

        def __getitem__(self, at: Any) -> Any:
            return self.work(_split(super().__getitem__(at)))

    source.folder.mkdir()
    writer = BinaryWriter(folder, chunk_bytes=CHUNK_BYTES)
    for number, sample in enumerate(source.samples):
        writer[number] = _joined(sample)
    writer.done()
    writer.merge()

    def run(work: Callable[[dict[str, bytes]], Any], collate: Callable[[list[Any]], Any]) -> int:
        dataset = Decoding(folder)
        dataset.work = work
        return sum(map(counted, StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)))

    return both(run)


def energon(source: Source) -> dict[str, Run]:
    """Its own index beside the shards; its training loader repeats, so that it is read until it has given as many."""
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        basic_sample_keys,
        get_loader,
        get_train_dataset,
        stateless,
    )

    @dataclass
    class Cooked(Sample):  # type: ignore[misc]  # no types there
        content: Any

    source.folder.mkdir()
    for shard in source.shards:
        shutil.copy(shard, source.folder)
    prepare = [str(Path(sys.executable).with_name("energon")), "prepare", str(source.folder), "--non-interactive"]
    options = ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "2"]
    subprocess.run([*prepare, *options], check=True, capture_output=True)

    def run(work: Callable[[dict[str, bytes]], Any], collate: Callable[[list[Any]], Any]) -> int:
        @stateless  # type: ignore[untyped-decorator]
        def cook(sample: dict[str, Any]) -> Cooked:
            files = [
                (kind, value)
                for name, value in sample.items()
                if (kind := bench_ingest.EXTENSIONS.get(name.rpartition(".")[2])) is not None
            ]
            return Cooked(**basic_sample_keys(sample), content=work(named(files)))

        class Encoder(DefaultTaskEncoder):  # type: ignore[misc]  # no types there
            decoder = None
            cookers = (Cooker(cook),)

            @stateless  # type: ignore[untyped-decorator]
            def batch(self, samples: list[Cooked]) -> Any:
                return collate([sample.content for sample in samples])

        dataset = get_train_dataset(
            str(source.folder),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
            batch_size=BATCH,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            task_encoder=Encoder(),
        )
        total = 0
        for batch in get_loader(dataset):
            total += counted(batch)
            if total >= len(source.samples):
                break
        return total

    return both(run)


def spdl(source: Source) -> dict[str, Run]:
    """A pipeline of threads over tarfile: what they decode is where it is wanted."""
    from spdl.pipeline import PipelineBuilder

    def read() -> Iterator[dict[str, bytes]]:
        for shard in source.shards * source.epochs:
            with tarfile.open(shard) as tar:
                for _, members in groupby((member for member in tar if member.isfile()), key=lambda member: member.name.partition(".")[0]):
                    files: Sample = []
                    for member in members:
                        file = tar.extractfile(member)
                        assert file is not None
                        files.append((bench_ingest.EXTENSIONS[member.name.rpartition(".")[2]], file.read()))
                    yield named(files)

    def run() -> int:
        pipeline = PipelineBuilder().add_source(read()).pipe(decoded, concurrency=WORKERS).add_sink(BATCH).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            return sum(pipeline.get_iterator(timeout=60))

    return {"": run}


def grain(source: Source) -> dict[str, Run]:
    """A map over samples in memory, in worker processes."""
    import grain.python as library

    samples = [named(sample) for sample in source.samples]

    def run() -> int:
        dataset = library.MapDataset.source(samples).map(decoded).to_iter_dataset()
        return sum(dataset.mp_prefetch(library.MultiprocessingOptions(num_workers=WORKERS)))

    return {"": run}


def _joined(sample: Sample) -> bytes:
    parts = [len(sample).to_bytes(2, "little")]
    for modality, data in sample:
        parts += [int(modality).to_bytes(1, "little"), len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


def _split(data: bytes) -> dict[str, bytes]:
    files: Sample = []
    at = 2
    for _ in range(int.from_bytes(data[:2], "little")):
        size = int.from_bytes(data[at + 1 : at + 5], "little")
        files.append((Modality(data[at]), data[at + 5 : at + 5 + size]))
        at += 5 + size
    return named(files)


PEERS: dict[str, tuple[str, Callable[[Source], dict[str, Run]]]] = {
    "MosaicML": ("streaming", mosaicml),
    "LitData": ("litdata", litdata),
    "Energon": ("megatron.energon", energon),
    "SPDL": ("spdl", spdl),
    "Grain": ("grain", grain),
}


def settle() -> None:
    """Waits for processes that the case before has left to end, or they would take their time from the next."""
    gc.collect()
    for child in multiprocessing.active_children():
        child.join(30)


def cpu_s() -> float:
    """Seconds of CPU time that this process and all below it have taken, those that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        try:
            # After the name in parentheses: state, parent; from the twelfth on, time of the process and of its children that have ended.
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
        except OSError:
            continue
        if fields:
            parents[int(entry)], ticks[int(entry)] = int(fields[1]), [int(field) for field in fields[11:15]]
    total = 0
    for pid, found in ticks.items():
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        total += sum(found) if above else 0
    return total / os.sysconf("SC_CLK_TCK")


def installed(module: str) -> bool:
    """Whether a module is there."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the shards in one run [2]")
    parser.add_argument("--only", nargs="+", choices=sorted(PEERS), default=list(PEERS), help="which of them [all]")
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    torch.set_num_threads(1)
    epochs = arguments.epochs
    once = bench_ingest.load_items(shards)
    samples = once * epochs
    bench_ingest.warm_up(shards, samples)
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Run] = {
            "ShardStream": lambda: bench_ingest.stream_samples(shards, epochs, processes=WORKERS),
            "bare": lambda: bench_ingest.bare_processes(once, epochs, bench_ingest.TRUSTED),
        }
        for name, (module, make) in PEERS.items():
            if name not in arguments.only:
                continue
            if not installed(module):
                print(f"peers: {name} is left out: {module} is not installed")
                continue
            try:
                runs = make(Source(shards=shards, samples=samples, epochs=epochs, folder=Path(folder) / name))
                for run in runs.values():
                    assert run() >= len(samples), name
            except Exception as error:
                print(f"peers: {name} is left out: {type(error).__name__}: {error}")
                continue
            cases |= {f"{name}{suffix}": run for suffix, run in runs.items()}
        rates: dict[str, list[float]] = {name: [] for name in cases}
        cpu_ms: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.repetitions):
            for name, run in cases.items():
                settle()
                begun, cpu_begun = time.perf_counter(), cpu_s()
                count = run()
                taken = time.perf_counter() - begun
                # A peer's workers may still be ending, which is its time too.
                for child in multiprocessing.active_children():
                    child.join(30)
                rates[name].append(count / taken)
                cpu_ms[name].append(1e3 * (cpu_s() - cpu_begun) / count)
    shape = {"samples": len(samples), "workers": WORKERS}
    for name, values in rates.items():
        record.append(record.Row(op="peers", impl=name, shape=shape, metric="samples", unit="1/s", values=values))
        record.append(record.Row(op="peers", impl=name, shape=shape, metric="CPU time", unit="ms", values=cpu_ms[name]))
        if name != "ShardStream":
            values = record.ratios(rates["ShardStream"], values)
            record.append(
                record.Row(op="peers", impl="ShardStream", baseline=name, shape=shape, metric="rate ratio", unit="x", values=values)
            )


if __name__ == "__main__":
    main()
