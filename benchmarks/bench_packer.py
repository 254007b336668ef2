"""Claim: batches come out full, ahead of other packers at equal look-ahead, and faster than any training reads them.

fill        used share of positions, batches of 64 x 1024 and a window of 4, past the first batches, beside the peers'
placement   items/s of one core that only chooses places
captions    samples/s through add and take, texts of 1 KiB and of 80 bytes
tape        copying payloads into a batch, against memcpy of the same bytes between buffers in use
stamps      a batch from decoded stamps, against decoding them (with --shards: a folder of examples/stamps/build.py)

python benchmarks/bench_packer.py --shards shards
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import record
from lengths import KINDS, draw_bags
from peer_packers import PEERS

from treadle import AudioShape, BatchShape, ImageShape, Packer
from treadle.decoders import DecodeOptions, Payload
from treadle.pipeline.bag import NO_RELATIONS, DecodedBag, decode_bag
from treadle.pipeline.layout import Capacities
from treadle.pipeline.pending import PendingBag, pack_demand
from treadle.pipeline.placement import Placement

ROWS, COLUMNS, WINDOW = 64, 1024, 4
POSITIONS = ROWS * COLUMNS
SETTLED = 6
"""Batches before the pool has settled."""


def placed(kind: str, batches: int, seed: int) -> tuple[list[float], float, list[list[int]]]:
    """Fill of each settled batch, items/s, and the bags."""
    bags = draw_bags(kind, batches * POSITIONS, COLUMNS, seed)
    items = sum(map(len, bags))
    # Segments at twice the mean demand, edges at 8 a segment: positions are what is scarce.
    segments = 2 * POSITIONS * items // sum(map(sum, bags))
    placement = Placement(ROWS, COLUMNS, Capacities(positions=POSITIONS, segments=segments, bags=segments, edges=8 * segments), WINDOW)
    fills: list[float] = []
    begun_s = time.process_time()
    for lengths in bags:
        count = len(lengths)
        placement.add(PendingBag(lengths, pack_demand((1, count, count * (count - 1), 0, 0))))
        while placement.ready():
            fills.append(sum(bag.positions for bag, _ in placement.take()) / POSITIONS)
    rate = items / (time.process_time() - begun_s)
    assert placement.longest_delay <= 2 * WINDOW
    return fills[SETTLED:], rate, bags


def text_bags(size: int, count: int) -> list[DecodedBag]:
    rng = np.random.default_rng(0)
    none = np.zeros(0, np.float32)
    bags: list[DecodedBag] = []
    for number in range(count):
        nbytes = size - int(rng.integers(0, size // 4))
        array = np.frombuffer(rng.bytes(nbytes), np.uint8)
        bags.append(
            DecodedBag(
                modalities=[0], payloads=[Payload(array, (nbytes, 1, 1), (1, 1, nbytes))], lengths=[nbytes + 1], items=[0], ids=[number],
                groups=[number + 1], temperature_groups=[0], sides=[0], choices=[b""], choice_targets=[none], relations=NO_RELATIONS,
            )
        )  # fmt: skip
    return bags


def packed_texts(shape: BatchShape, bags: Sequence[DecodedBag]) -> int:
    packer = Packer(shape, window=WINDOW)
    for bag in bags:
        packer.add_decoded(bag)
        while packer.ready():
            packer.take()
    for _ in packer.flush():
        pass
    return len(bags)


PICTURES = BatchShape(max_rows_per_device=ROWS, max_segments_per_device=1024, max_columns_per_row=COLUMNS, image=ImageShape(patch_side=16))


def picture_bags(count: int) -> list[DecodedBag]:
    rng = np.random.default_rng(0)
    none = np.zeros(0, np.float32)
    bags: list[DecodedBag] = []
    for number in range(count):
        high, wide = (16 * int(side) for side in rng.integers(8, 30, 2))
        array = rng.integers(0, 256, (high, wide, 4), np.uint8)
        bags.append(
            DecodedBag(
                modalities=[1], payloads=[Payload(array, (1, high // 16, wide // 16), (1, high, wide))],
                lengths=[1 + high * wide // 256], items=[0], ids=[number], groups=[number + 1], temperature_groups=[0], sides=[0],
                choices=[b""], choice_targets=[none],
            )
        )  # fmt: skip
    return bags


class Tape:
    """The same payloads into batches, and by memcpy from one large buffer in use to another."""

    def __init__(self) -> None:
        self.bags = picture_bags(700)
        self.bytes = sum(bag.payloads[0].array.nbytes for bag in self.bags)
        self.source = np.random.default_rng(1).integers(0, 256, 64 << 20, np.uint8)
        self.target = np.zeros_like(self.source)
        self.packer = Packer(PICTURES, window=1)

    def fill(self) -> float:
        """Bytes, of everything that a batch takes: places, columns, tape."""
        for bag in self.bags:
            self.packer.add_decoded(bag)
            while self.packer.ready():
                self.packer.take()
        for _ in self.packer.flush():
            pass
        return self.bytes

    def memcpy(self) -> float:
        """As many bytes."""
        left = self.bytes
        while left > 0:
            size = min(left, len(self.source))
            np.copyto(self.target[:size], self.source[:size])
            left -= size
        return self.bytes


STAMPS = BatchShape(
    max_rows_per_device=ROWS,
    max_segments_per_device=2048,
    max_columns_per_row=COLUMNS,
    image=ImageShape(patch_side=16, channels=4),
    audio=AudioShape(chunk_samples=320, sample_rate=16_000),
)


def stamps_share(shards: Sequence[Path]) -> list[float]:
    """Time to pack each batch, as a share of the time to decode what is in it, which worker processes do for some formats."""
    from treadle.pipeline import Schema
    from treadle.pipeline.samples import sample_id
    from treadle.pipeline.shards import Shard

    packer, shares, decoded_s, packed_s = Packer(STAMPS, window=1), [], 0.0, 0.0
    for url in map(str, shards):
        for sample in Shard(url).samples():
            items = Schema().bag(sample, 0, 0, sample_id(url, sample.index), STAMPS).items
            begun_s = time.perf_counter()
            bag = decode_bag(items, STAMPS, DecodeOptions(), on_error="drop")
            middle_s = time.perf_counter()
            packer.add_decoded(bag)
            ready = packer.ready()
            if ready:
                packer.take()
            ended_s = time.perf_counter()
            decoded_s, packed_s = decoded_s + middle_s - begun_s, packed_s + ended_s - middle_s
            if ready:
                shares.append(packed_s / decoded_s)
                decoded_s = packed_s = 0.0
            if len(shares) > 3:
                return shares[1:]
    return shares[1:] or shares


def report_fill(kinds: Sequence[str], batches: int, seeds: int) -> None:
    for kind in kinds:
        shape = {"lengths": kind, "rows": ROWS, "columns": COLUMNS, "window": WINDOW}
        ours: list[float] = []
        rates: list[float] = []
        peers: dict[str, list[float]] = {name: [] for name in PEERS}
        for seed in range(seeds):
            fills, rate, bags = placed(kind, batches, seed)
            ours.append(float(np.mean(fills)))
            rates.append(rate)
            lengths = [length for bag in bags for length in bag]
            for name, peer in PEERS.items():
                peers[name].append(peer(lengths, COLUMNS, WINDOW * POSITIONS))
        record.append(record.Row(op="fill", impl="Packer", shape=shape, metric="positions", unit="share", values=ours))
        for name, values in peers.items():
            record.append(record.Row(op="fill", impl=name, shape=shape, metric="positions", unit="share", values=values))
            assert min(a - b for a, b in zip(ours, values, strict=True)) > 0, f"{name} is ahead on {kind}"
        record.append(record.Row(op="placement", impl="Placement", shape=shape, metric="items", unit="1/s", values=rates))


def report_rates(repetitions: int) -> None:
    for size, count in ((1024, 4000), (80, 20_000)):
        batch = BatchShape(max_rows_per_device=ROWS, max_segments_per_device=2048, max_columns_per_row=COLUMNS + 64)
        bags = text_bags(size, count)
        packed_texts(batch, bags)
        rates = record.in_turns({"Packer": partial(packed_texts, batch, bags)}, repetitions)
        row = record.Row(
            op="captions", impl="Packer", shape={"bytes": size, "rows": ROWS}, metric="samples", unit="1/s", values=rates["Packer"]
        )
        record.append(row)
    tape = Tape()
    cases: dict[str, Callable[[], float]] = {"Packer": tape.fill, "memcpy": tape.memcpy}
    for run in cases.values():
        run()
    rates = record.in_turns(cases, 2 * repetitions)
    shape = {"rows": ROWS, "columns": COLUMNS, "pictures": len(tape.bags)}
    values = record.ratios(rates["Packer"], rates["memcpy"])
    record.append(record.Row(op="tape", impl="Packer", baseline="memcpy", shape=shape, metric="rate ratio", unit="x", values=values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, default=Path("shards"), help="folder that examples/stamps/build.py wrote [shards]")
    parser.add_argument("--full", action="store_true", help="more batches and seeds: some minutes")
    parser.add_argument("--only", choices=("fill", "rates", "stamps"))
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.only in (None, "fill"):
        report_fill(KINDS, 120 if arguments.full else 40, 5 if arguments.full else 3)
    if arguments.only in (None, "rates"):
        report_rates(arguments.repetitions)
    shards = sorted(arguments.shards.glob("train-*.tar"))
    if arguments.only in (None, "stamps") and shards:
        shape = {"rows": ROWS, "columns": COLUMNS}
        values = stamps_share(shards)
        record.append(
            record.Row(op="stamps batch", impl="Packer", baseline="decoding", shape=shape, metric="time share", unit="x", values=values)
        )


if __name__ == "__main__":
    main()
