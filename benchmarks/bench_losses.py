"""Claims: pair losses hold no N x N matrix, and RANKED costs at most three times SIGMOID.

memory   the peak of a forward and backward pass over N anchors and N candidates beyond the vectors and their gradients, in a process of its
         own, at N = 4,096, 16,384 and 32,768: it grows by a few vectors' worth of memory, where a matrix of fp32 scores would take 4 N N bytes.
         Late interaction's: beyond the token vectors it holds the scores of its queries and documents, never a matrix of tokens.
time     RANKED over SIGMOID at equal N and width, in turns, by attracting edges of an anchor and inverse temperature

  python benchmarks/bench_losses.py          time at N = 4,096, memory up to 32,768
  python benchmarks/bench_losses.py --time   time alone (--memory: the other)
"""

import argparse
import math
import resource
import subprocess
import sys
import time

import record
import torch
from torch import Tensor

from treadle.kernels.maxsim import maxsim
from treadle.kernels.pair_loss import NamedPairs, PairForm, PairRows, pair_loss
from treadle.model.device import keep_freed_memory

FORMS: tuple[PairForm, ...] = ("sigmoid", "balanced", "ranked")
WIDTH = 128
COUNTS = (4096, 16_384, 32_768)
TOKENS = 32
"""Of a query and of a document."""


def bags(count: int, edges: int) -> PairRows:
    """Bags of `edges + 1` items that attract each other and repel everybody else."""
    whole = count // (edges + 1)
    first_B = torch.arange(whole) * (edges + 1)
    place = torch.arange(edges + 1)
    ids_BMM = first_B[:, None, None] + place[None, None, :].expand(1, edges + 1, -1)
    ids = ids_BMM.expand(whole, -1, -1)[:, ~torch.eye(edges + 1, dtype=torch.bool)].reshape(-1)
    counts = torch.full((count,), edges, dtype=torch.int64)
    counts[whole * (edges + 1) :] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    nobody = torch.zeros(count, dtype=torch.int64)
    return PairRows(torch.arange(count), nobody, nobody, NamedPairs(offsets, ids, torch.ones(len(ids)), torch.zeros(len(ids))), 1.0)


def run_pairs(form: PairForm, vectors_ND: Tensor, pairs: PairRows, scale: float) -> None:
    """A forward and backward pass."""
    log_scale_G = torch.tensor([math.log(scale)], requires_grad=True)
    bias_G = torch.zeros(1, requires_grad=True)
    groups = torch.zeros(len(vectors_ND), dtype=torch.int64)
    width = vectors_ND.shape[1]
    loss = pair_loss(vectors_ND, vectors_ND, log_scale_G, bias_G, groups, pairs, form=form, widths=(width,))
    loss.backward()  # type: ignore[no-untyped-call]


def run_late(count: int) -> None:
    """Scores of `count` queries and as many documents, forward and backward."""
    offsets = torch.arange(count + 1) * TOKENS
    u, v = (torch.nn.functional.normalize(torch.randn(count * TOKENS, WIDTH), dim=1).requires_grad_() for _ in range(2))
    before = peak_mib()
    maxsim(u, v, offsets, offsets).sum().backward()  # type: ignore[no-untyped-call]
    print(peak_mib() - before)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: str, count: int) -> None:
    """Prints the MiB that a pass added to this process's peak."""
    torch.set_num_threads(1)
    if form == "late":
        run_late(count)
        return
    vectors_ND = torch.randn(count, WIDTH, requires_grad=True)
    pairs = bags(count, 7)
    run_pairs("sigmoid", torch.randn(256, WIDTH, requires_grad=True), bags(256, 7), 1.0)  # what torch loads on its first product is no part
    before = peak_mib()
    run_pairs(form, vectors_ND, pairs, 10.0)  # type: ignore[arg-type]  # a form's name
    print(peak_mib() - before)


def memory() -> None:
    cases = [(form, count) for form in FORMS for count in COUNTS] + [("late", count) for count in (128, 256, 512)]
    for form, count in cases:
        answer = subprocess.run([sys.executable, __file__, "--measure", form, str(count)], capture_output=True, text=True, check=True)
        shape = {"queries": count, "tokens": TOKENS, "width": WIDTH} if form == "late" else {"N": count, "width": WIDTH}
        matrix_mib = 4 * (count * (TOKENS if form == "late" else 1)) ** 2 / 2**20
        row = record.Row(
            op="loss memory", impl="maxsim" if form == "late" else form, baseline="", shape=shape | {"matrix MiB": round(matrix_mib)},
            dtype="float32", metric="peak beyond the vectors", unit="MiB", values=[float(answer.stdout)],
        )  # fmt: skip
        record.append(row)


def times(count: int, repetitions: int, widths: list[int], edge_counts: list[int]) -> None:
    """RANKED at each inverse temperature beside SIGMOID, whose passes do not depend on it, for bags of `edges + 1`."""
    for width in widths:
        vectors_ND = torch.randn(count, width, requires_grad=True)
        for edges in edge_counts:
            pairs = bags(count, edges)
            # Above seven edges an inverse temperature of 100 is no part of the claim.
            scales = (1.0, 30.0, 100.0) if edges <= 7 else (1.0, 10.0, 30.0)
            cases: list[tuple[PairForm, float]] = [("sigmoid", 10.0), *(("ranked", scale) for scale in scales)]
            seconds: dict[tuple[PairForm, float], list[float]] = {case: [] for case in cases}
            for _ in range(repetitions + 1):
                for form, scale in cases:
                    start = time.perf_counter()
                    run_pairs(form, vectors_ND, pairs, scale)
                    seconds[form, scale].append(time.perf_counter() - start)
            for case in cases[1:]:
                values = [a / b for a, b in zip(seconds[case][1:], seconds[cases[0]][1:], strict=True)]
                shape = {"N": count, "width": width, "edges": edges, "inverse temperature": case[1]}
                row = record.Row(
                    op="loss", impl="ranked", baseline="sigmoid", shape=shape, dtype="float32", metric="time ratio", unit="x", values=values
                )
                record.append(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4096, help="anchors and candidates of the times [4096]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--edges", type=int, nargs="+", default=[1, 7, 16, 63, 255], help="attracting edges of every anchor")
    parser.add_argument("--time", action="store_true", help="leave memory out")
    parser.add_argument("--memory", action="store_true", help="leave time out")
    parser.add_argument("--measure", nargs=2, metavar=("FORM", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], int(arguments.measure[1]))
        return
    torch.set_num_threads(1)
    if not arguments.memory:
        keep_freed_memory()  # as Trainer does; memory is measured in processes of their own, without
        times(arguments.count, arguments.repetitions, arguments.widths, arguments.edges)
    if not arguments.time:
        memory()


if __name__ == "__main__":
    main()
