"""How ShardStream's rate on the stamps compares with the streaming libraries of others, each from its own format with the same decoders.

Two workers each, twice over the data, in turns, samples/s, start-up included; decoded items are thrown away, except by ShardStream, which packs them.
FFmpeg works in the worker processes everywhere, as in ShardStream's own (SPDL's threads hold it in the main process):
  ShardStream   tar shards, order and hold-back, packed batches with states, two processes
  MosaicML      MDS files, StreamingDataset in a DataLoader with two workers
  LitData       its chunks, StreamingDataset in a StreamingDataLoader with two workers
  SPDL          no format of its own: the same tar shards through tarfile, a pipeline with two threads
  Grain         no format of its own without ArrayRecord: samples in memory, two worker processes
A library that is not installed is left out, and that is said. None of them is a dependency: install what is to be compared apart,
`pip install mosaicml-streaming litdata spdl grain`. Megatron-Energon reads WebDataset tars through webdataset's own reader and is not
run here: its dataset folder is prepared by an interactive tool.

    python benchmarks/bench_peers.py --shards shards
"""

import argparse
import gc
import multiprocessing
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import bench_ingest
import record
import torch

from treadle import Modality

WORKERS = bench_ingest.WORKERS
EPOCHS = 2
Sample = list[tuple[Modality, bytes]]


def decoded(sample: dict[str, bytes]) -> int:
    """Decodes the files of a sample, named `place.modality`."""
    items = [(Modality(int(name.rpartition("_")[2])), data) for name, data in sorted(sample.items())]
    return bench_ingest.decode_all([items], bench_ingest.TRUSTED)


def named(sample: Sample) -> dict[str, bytes]:
    """A sample's files under names that keep their order and modality."""
    return {f"f{place:02d}_{int(modality)}": data for place, (modality, data) in enumerate(sample)}


def _total(batch: list[int]) -> int:
    return sum(batch)


def mosaicml(samples: list[Sample], folder: Path) -> Callable[[], int]:
    """MDS needs the same columns in every sample: one holds them all, pickled by nobody, as a list of names and sizes before the bytes."""
    from streaming import MDSWriter, StreamingDataset

    class Decoding(StreamingDataset):  # type: ignore[misc]  # no types there
        def __getitem__(self, at: int) -> Any:
            found = super().__getitem__(at)
            return decoded(_split(found["data"]))

    with MDSWriter(out=str(folder), columns={"data": "bytes"}, size_limit=8 << 20) as writer:
        for sample in samples:
            writer.write({"data": _joined(sample)})

    def run() -> int:
        dataset = Decoding(local=str(folder), batch_size=16, shuffle=False)
        loader = torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=WORKERS, collate_fn=_total)
        return sum(loader)

    return run


def litdata(samples: list[Sample], folder: Path) -> Callable[[], int]:
    """Chunks written by LitData's own writer."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    class Decoding(StreamingDataset):  # type: ignore[misc]  # no types there
        def __getitem__(self, at: Any) -> Any:
            return decoded(_split(super().__getitem__(at)))

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=8 << 20)
    for number, sample in enumerate(samples):
        writer[number] = _joined(sample)
    writer.done()
    writer.merge()

    def run() -> int:
        loader = StreamingDataLoader(Decoding(str(folder)), batch_size=16, num_workers=WORKERS, collate_fn=_total)
        return sum(loader)

    return run


def spdl(samples: list[Sample], folder: Path) -> Callable[[], int]:
    """A pipeline of threads over tarfile."""
    from spdl.pipeline import PipelineBuilder

    shards = [
        Path(os.environ["TREADLE_STAMPS"]) / name for name in sorted(os.listdir(os.environ["TREADLE_STAMPS"])) if name.startswith("train-")
    ]

    def read() -> Iterator[dict[str, bytes]]:
        for shard in shards * EPOCHS:
            with tarfile.open(shard) as tar:
                for _, members in groupby((member for member in tar if member.isfile()), key=lambda member: member.name.partition(".")[0]):
                    files: list[tuple[Modality, bytes]] = []
                    for member in members:
                        file = tar.extractfile(member)
                        assert file is not None
                        files.append((bench_ingest.EXTENSIONS[member.name.rpartition(".")[2]], file.read()))
                    yield named(files)

    def run() -> int:
        pipeline = PipelineBuilder().add_source(read()).pipe(decoded, concurrency=WORKERS).add_sink(16).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            return sum(pipeline.get_iterator(timeout=60))

    return run


def grain(samples: list[Sample], folder: Path) -> Callable[[], int]:
    """A map over samples in memory, in worker processes."""
    import grain.python as library

    source = [named(sample) for sample in samples]

    def run() -> int:
        dataset = library.MapDataset.source(source).map(decoded).to_iter_dataset()
        return sum(dataset.mp_prefetch(library.MultiprocessingOptions(num_workers=WORKERS)))

    return run


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


PEERS = {"MosaicML": ("streaming", mosaicml), "LitData": ("litdata", litdata), "SPDL": ("spdl", spdl), "Grain": ("grain", grain)}


def settle() -> None:
    """Waits for processes that the case before has left to end, or they would take their time from the next."""
    gc.collect()
    for child in multiprocessing.active_children():
        child.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(PEERS), default=sorted(PEERS), help="which of them [all]")
    arguments = parser.parse_args()
    shards = [str(path) for path in sorted(arguments.shards.glob("train-*.tar"))]
    if not shards:
        parser.error(f"no train-*.tar in {arguments.shards}: build them with examples/stamps/build.py")
    os.environ["TREADLE_STAMPS"] = str(arguments.shards)
    torch.set_num_threads(1)
    samples = bench_ingest.load_items(shards) * EPOCHS
    bench_ingest.warm_up(shards, samples)
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Callable[[], float]] = {"ShardStream": lambda: bench_ingest.stream_samples(shards, EPOCHS, processes=WORKERS)}
        for name, (module, make) in PEERS.items():
            if name not in arguments.only:
                continue
            if find_spec(module) is None:
                print(f"peers: {name} is left out: {module} is not installed")
                continue
            try:
                run = make(samples, Path(folder) / name)
                assert run() == len(samples), name
            except Exception as error:
                print(f"peers: {name} is left out: {type(error).__name__}: {error}")
                continue
            cases[name] = run
        rates = record.in_turns(cases, arguments.repetitions, before=settle)
    shape = {"samples": len(samples), "workers": WORKERS}
    for name, values in rates.items():
        record.append(record.Row(op="peers", impl=name, shape=shape, metric="samples", unit="1/s", values=values))
        if name != "ShardStream":
            values = record.ratios(rates["ShardStream"], values)
            record.append(
                record.Row(op="peers", impl="ShardStream", baseline=name, shape=shape, metric="rate ratio", unit="x", values=values)
            )


if __name__ == "__main__":
    main()
