"""Claim: no rank's batch costs much more than the others': no step waits long for its slowest rank, and ranks need not talk for it.

The cost of a batch is `a * positions + sum of squared segment lengths`: with `a` 0 attention alone counts, with `a` 1024 the rest of
a block beside rows of 1024. Each simulated rank packs its own stream, and the k-th batches of all ranks meet in a step. Told: the
dearest over the mean, averaged over steps past the first ones. Beside it the same without choosing by cost.

    python benchmarks/bench_balance.py            8 and 64 ranks for each kind of lengths
    python benchmarks/bench_balance.py --full     more steps: some minutes
"""

import argparse
from collections.abc import Sequence

import numpy as np
import record
from bench_packer import COLUMNS, POSITIONS, ROWS, WINDOW
from lengths import KINDS, draw_bags

from treadle.pipeline import placement
from treadle.pipeline.layout import Capacities
from treadle.pipeline.pending import PendingBag, pack_demand
from treadle.pipeline.placement import Placement

SETTLED = 6


def costs(kind: str, rank: int, batches: int) -> list[tuple[int, int]]:
    """Positions and sum of squared lengths of each batch of a rank."""
    bags = draw_bags(kind, batches * POSITIONS, COLUMNS, seed=1000 + rank)
    segments = 2 * POSITIONS * sum(map(len, bags)) // sum(map(sum, bags))
    packer = Placement(ROWS, COLUMNS, Capacities(positions=POSITIONS, segments=segments, bags=segments, edges=8 * segments), WINDOW)
    found: list[tuple[int, int]] = []
    for lengths in bags:
        count = len(lengths)
        packer.add(PendingBag(lengths, pack_demand((1, count, count * (count - 1), 0, 0))))
        while packer.ready():
            bags_placed = [bag for bag, _ in packer.take()]
            found.append((sum(bag.positions for bag in bags_placed), sum(bag.squares for bag in bags_placed)))
    return found[SETTLED:]


def dearest_over_mean(ranks: Sequence[Sequence[tuple[int, int]]], per_position: int) -> list[float]:
    """Of each step that all ranks reach."""
    steps = min(map(len, ranks))
    cost = np.array([[per_position * used + squares for used, squares in rank[:steps]] for rank in ranks], np.float64)
    ratios: list[float] = (cost.max(axis=0) / cost.mean(axis=0)).tolist()
    return ratios


def report(kind: str, num_ranks: int, batches: int, *, blind: bool) -> None:
    """Rows for one kind of lengths, without choosing by cost, too, where asked for."""
    band = placement.BALANCE_BAND
    cases = [("Packer", band), ("Packer, blind to cost", float("inf"))]
    try:
        for name, value in cases[: 1 + blind]:
            placement.BALANCE_BAND = value
            ranks = [costs(kind, rank, batches) for rank in range(num_ranks)]
            for per_position in (0, 1024):
                shape = {"lengths": kind, "ranks": num_ranks, "a": per_position, "window": WINDOW}
                values = dearest_over_mean(ranks, per_position)
                row = record.Row(op="balance", impl=name, shape=shape, metric="dearest over mean", unit="x", values=values)
                record.append(row)
                print(f"   mean over {len(values)} steps {np.mean(values):.4f}", flush=True)
    finally:
        placement.BALANCE_BAND = band


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--kind", choices=KINDS, action="append")
    arguments = parser.parse_args()
    for kind in arguments.kind or KINDS:
        report(kind, 8, 100 if arguments.full else 24, blind=True)
        report(kind, 64, 60 if arguments.full else 18, blind=arguments.full or kind == "captions")


if __name__ == "__main__":
    main()
