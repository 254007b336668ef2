"""A step on thousands of GPUs, on paper: `python -m treadle.model.scaling` writes the tables of docs/scaling.md.

Bytes are those that `mesh_traffic` counts and tests check; operations are those that kernels declare (`kernels.roofline`). A collective takes
its bytes over the narrowest link and its rounds times the latency; the gradient's sum runs beside the backward pass, two thirds of the step.
Nothing here is measured on GPUs.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from treadle.kernels.registry import Workload
from treadle.kernels.roofline import CHIPS, KERNEL_SHARE, Chip, lines, parameters
from treadle.model.mesh import BUCKET_BYTES

PAGE = Path(__file__).parent / "../docs/scaling.md"
BEGIN, END = "<!-- tables: made by python -m treadle.model.scaling -->", "<!-- end of tables -->"
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What joins the GPUs, per GPU and direction."""

    gpus_per_node: int = 8
    node_bytes_per_s: float = 400e9
    """Within a machine: NVLink 4 moves 450 GB/s on paper."""
    network_bytes_per_s: float = 45e9
    """Between machines: a 400 Gb/s port for each GPU moves 50 GB/s on paper."""
    node_latency_s: float = 3e-6
    network_latency_s: float = 12e-6
    host_latency_s: float = 25e-6
    """One round of gloo over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Parts of one step, seconds."""

    gpus: int
    compute: float
    pairs: float
    """Scoring this rank's anchors against the world's candidates."""
    gather: float
    """Pooled vectors to all, and their gradients back."""
    reduce: float
    """The gradient's sum, whole."""
    exposed: float
    """What of it the backward pass does not hide."""
    host: float
    """Exchanges of counts among hosts."""

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + self.pairs + self.gather + self.exposed + self.host

    @property
    def efficiency(self) -> float:
        """Of what as many GPUs would do without a word to each other."""
        return self.compute / self.total


def sum_seconds(cluster: Cluster, gpus: int, size: float) -> float:
    """A sum of `size` bytes onto all: scattered and gathered within machines, an eighth of it summed between them by every GPU."""
    inside = min(gpus, cluster.gpus_per_node)
    nodes = math.ceil(gpus / cluster.gpus_per_node)
    seconds = 2 * (inside - 1) / inside * size / cluster.node_bytes_per_s + 2 * (inside - 1) * cluster.node_latency_s
    if nodes > 1:
        # A tree: rounds grow with the logarithm.
        seconds += 2 * (nodes - 1) / nodes * size / inside / cluster.network_bytes_per_s
        seconds += 2 * math.ceil(math.log2(nodes)) * cluster.network_latency_s
    return seconds


def gather_seconds(cluster: Cluster, gpus: int, part: float) -> float:
    """Everybody's `part` bytes to everybody, a ring: what comes from other machines comes over the network, once for each machine's GPUs."""
    inside = min(gpus, cluster.gpus_per_node)
    nodes = math.ceil(gpus / cluster.gpus_per_node)
    # Each GPU brings in an eighth of what is elsewhere and passes it on inside.
    far = (gpus - inside) * part / inside / cluster.network_bytes_per_s
    near = (gpus - 1) * part / cluster.node_bytes_per_s
    rounds = (nodes - 1) * cluster.network_latency_s + (inside - 1) * cluster.node_latency_s
    return max(far, near) + rounds


def step_time(gpus: int, work: Workload, chip: Chip, cluster: Cluster) -> StepTime:
    """One step of `work` on each of `gpus`, its joint objective scored over the world."""
    compute = sum(line.seconds(chip) for line in lines(work) if line.counted)
    segments = work.positions // work.segment_length
    candidates = segments * gpus
    # Scores, and products of their gradients with both sides; the tile is scored again in the backward pass.
    operations = 2.0 * segments * candidates * work.hidden * 4
    pairs = operations / (chip.flops * KERNEL_SHARE)
    gather = 0.0 if gpus == 1 else 2 * gather_seconds(cluster, gpus, 4.0 * work.hidden * segments)
    gradient = 4.0 * parameters(work)
    slices = math.ceil(gradient / BUCKET_BYTES)
    one = sum_seconds(cluster, gpus, gradient / slices) if gpus > 1 else 0.0
    reduce = slices * one
    exposed = max(one, reduce - BACKWARD_SHARE * compute) if gpus > 1 else 0.0
    # Flags and counts, and segments of the micro-batch: two exchanges whose rounds double what a rank knows.
    host = 2 * math.ceil(math.log2(gpus)) * cluster.host_latency_s
    return StepTime(gpus=gpus, compute=compute, pairs=pairs, gather=gather, reduce=reduce, exposed=exposed, host=host)


def loss_bytes(candidates: int, hidden: int, world_size: int) -> dict[str, float]:
    """What scoring a world batch holds on each rank, bytes."""
    return {
        "pooled vectors of the world, fp32": 4.0 * candidates * hidden,
        "their gradient": 4.0 * candidates * hidden,
        "groups and anchors' sums": 8.0 * candidates + 24.0 * candidates / world_size,
        "padding, where ranks hold unequally many": 2 * 4.0 * candidates * hidden,
    }


def tables(work: Workload | None = None, cluster: Cluster | None = None) -> str:
    """The generated part of the page."""
    work, cluster = work or Workload(), cluster or Cluster()
    chip = CHIPS[-1]
    text = [
        f"{chip.name}, {parameters(work) / 1e6:.0f} M parameters, {work.positions // 1024} x 1024 positions and "
        f"{work.positions // work.segment_length} segments a GPU, hidden {work.hidden}, joint objective; milliseconds a step.",
        "",
        "| GPUs | compute | pair scores | gather and back | gradient sum | of it exposed | host exchange | step | efficiency, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus in (1, 8, 16, 64, 256, 1024, 2048, 4096):
        t = step_time(gpus, work, chip, cluster)
        cells = [f"{1e3 * x:.1f}" for x in (t.compute, t.pairs, t.gather, t.reduce, t.exposed, t.host, t.total)]
        text.append(f"| {gpus} | " + " | ".join(cells) + f" | {100 * t.efficiency:.1f} |")
    text += ["", "At a quarter of the positions a GPU, where the backward pass hides less:", ""]
    text += ["| GPUs | compute | of the sum exposed | step | efficiency, % |", "|---|---|---|---|---|"]
    small = Workload(positions=work.positions // 4)
    for gpus in (8, 64, 512, 4096):
        t = step_time(gpus, small, chip, cluster)
        text.append(f"| {gpus} | {1e3 * t.compute:.1f} | {1e3 * t.exposed:.1f} | {1e3 * t.total:.1f} | {100 * t.efficiency:.1f} |")
    candidates = 2**20
    text += ["", f"Memory of the loss at {candidates:,} items in the world, hidden {work.hidden}, on each of 4,096 ranks:", ""]
    text += ["| what | GiB |", "|---|---|"]
    text += [f"| {name} | {size / 2**30:.2f} |" for name, size in loss_bytes(candidates, work.hidden, 4096).items()]
    return "\n".join(text)


def main() -> None:
    """Rewrites the tables of docs/scaling.md, or prints them with `--print`."""
    if "--print" in sys.argv:
        sys.stdout.write(tables() + "\n")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
