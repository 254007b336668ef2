"""Predicted times on paper: `python -m treadle.kernels.roofline` writes docs/kernels.md from the costs that kernels declare.

A launch takes the longer of its matrix operations at the chip's rate and its bytes at the chip's bandwidth, each at the share of the peak that
such code reaches, plus what a launch costs inside a graph. Nothing here is measured; `make gpu` measures.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.kernels.registry import Cost, Workload, all_kernels

PAGE = Path(__file__).parent / "../docs/kernels.md"

LIBRARY_SHARE, KERNEL_SHARE, BANDWIDTH_SHARE = 0.75, 0.55, 0.85
"""Of the peak: cuBLAS's bf16 products of a thousand and more on a side, our own matrix kernels, streaming kernels."""

LIST_PASSES = 34
"""Passes over `[P, D]` in fp32 that lists padded to capacity cost: six for each medium that is embedded, four for each head, in torch."""

LAUNCH_S = 1.5e-6
"""Between two kernels of a graph."""

ALTERNATIVES = ("pair_tiles_ranked", "ranked_nodes", "ranked_slopes")
"""Kernels of other forms of a term, which the reference step does not run."""

BYTES_A_PARAMETER = {"adamw_and_clipping": 4.0 * 11, "bf16_weights": 6.0}
"""Reads and writes: gradient zeroed, measured, clipped (4), AdamW (7); fp32 weights to bf16 once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Peaks from the vendor's data sheets (dense, SXM)."""

    name: str
    flops: float
    """bf16 operations a second."""
    bytes_per_s: float


CHIPS = (Chip(name="H100", flops=989e12, bytes_per_s=3.35e12), Chip(name="H200", flops=989e12, bytes_per_s=4.8e12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table."""

    name: str
    cost: Cost
    share: float
    """Of the matrix peak."""
    counted: bool = True

    def seconds(self, chip: Chip) -> float:
        """All launches of one step."""
        return self.cost.launches * (max(self._compute(chip), self._memory(chip)) + LAUNCH_S)

    def bound(self, chip: Chip) -> str:
        """What takes longest."""
        slower = max(self._compute(chip), self._memory(chip))
        if slower < LAUNCH_S:
            return "launch"
        return "products" if self._compute(chip) >= self._memory(chip) else "bandwidth"

    def _compute(self, chip: Chip) -> float:
        return self.cost.matrix_operations / (chip.flops * self.share)

    def _memory(self, chip: Chip) -> float:
        return self.cost.bytes / (chip.bytes_per_s * BANDWIDTH_SHARE)


def products(work: Workload) -> Iterator[tuple[str, int, int, int, int]]:
    """Every matrix product that cuBLAS runs: name, rows, width in, width out, times a step."""
    d = work.hidden
    yield "qkv", work.positions, d, 3 * d, work.depth
    yield "out", work.positions, d, d, work.depth
    yield "gate_up", work.positions, d, 2 * work.inner, work.depth
    yield "down", work.positions, work.inner, d, work.depth
    hidden = 1 - work.visible_share
    yield "image_head", int(hidden * work.image_patches), d, work.image_values, 1
    yield "video_head", int(hidden * work.video_tubes), d, work.video_values, 1
    yield "audio_head", int(hidden * work.audio_chunks), d, work.audio_values, 1


def parameters(work: Workload) -> int:
    """Learned values of the products, which are all but a few."""
    return sum(width_in * width_out * times for _, _, width_in, width_out, times in products(work))


def lines(work: Workload) -> list[Line]:
    """Every kernel, product and pass over the parameters of one step."""
    found = [
        Line(name=kernel.name, cost=kernel.cost(work), share=KERNEL_SHARE, counted=kernel.name not in ALTERNATIVES)
        for kernel in all_kernels()
    ]
    for name, rows, width_in, width_out, times in products(work):
        if name.endswith("_head"):
            # At fixed sizes a head maps as many rows as could ever be hidden.
            rows = math.ceil(work.positions * (1 - work.visible_share))
        # Forward, gradient by the input, gradient by the weight.
        size = 2.0 * (rows * (width_in + width_out) + width_in * width_out)
        cost = Cost(bytes=size, matrix_operations=2.0 * rows * width_in * width_out, launches=3 * times)
        found.append(Line(name=f"cuBLAS {name}", cost=cost, share=LIBRARY_SHARE))
    found.append(Line(name="lists_at_capacity", cost=Cost(bytes=4.0 * LIST_PASSES * work.positions * work.hidden), share=1.0))
    for name, size in BYTES_A_PARAMETER.items():
        found.append(Line(name=name, cost=Cost(bytes=size * parameters(work), launches=1), share=1.0))
    return found


def model_operations(work: Workload) -> float:
    """Operations that the model needs whatever the code does: `6 parameters rows` for products, `12 L` a position, channel and layer for attention."""
    linear = sum(6.0 * rows * width_in * width_out * times for _, rows, width_in, width_out, times in products(work))
    return linear + 12.0 * work.segment_length * work.positions * work.hidden * work.depth


def page(work: Workload | None = None) -> str:
    """The whole of docs/kernels.md."""
    work = work or Workload()
    table = lines(work)
    text = [
        "# Kernels on paper",
        "",
        "Written by `python -m treadle.kernels.roofline` from what each kernel declares; a test compares. Change the kernels, not this page.",
        "**Nothing on this page is measured**: no GPU was at hand when it was written. `make gpu` measures on a machine that has one.",
        "",
        f"Reference step: {work.positions // 1024} x 1024 positions, hidden {work.hidden}, depth {work.depth}, segments of {work.segment_length}; "
        f"{work.text_positions} text positions, {work.image_patches} image patches of {work.image_values} values, {work.video_tubes} tubes of "
        f"{work.video_values}, {work.audio_chunks} chunks of {work.audio_values}, a quarter of the media visible; the joint objective.",
        "",
        "Assumed: "
        + ", ".join(f"{c.name} {c.flops / 1e12:.0f} TFLOP/s in bf16 and {c.bytes_per_s / 1e12:.2f} TB/s" for c in CHIPS)
        + f"; cuBLAS reaches {LIBRARY_SHARE:.0%} of the matrix peak, kernels of ours {KERNEL_SHARE:.0%}, passes over memory "
        f"{BANDWIDTH_SHARE:.0%} of the bandwidth; {LAUNCH_S * 1e6:.1f} us between two kernels of a graph.",
        "",
        "## The step",
        "",
        "| | " + " | ".join(c.name for c in CHIPS) + " |",
        "|---|" + "---|" * len(CHIPS),
    ]
    counted = [line for line in table if line.counted]
    totals = [sum(line.seconds(chip) for line in counted) for chip in CHIPS]
    operations = model_operations(work)
    parts = (
        ("cuBLAS products, ms", [sum(n.seconds(c) for n in counted if n.name.startswith("cuBLAS")) * 1e3 for c in CHIPS]),
        ("attention, ms", [sum(n.seconds(c) for n in counted if n.name.startswith("attention")) * 1e3 for c in CHIPS]),
        (
            "everything else, ms",
            [sum(n.seconds(c) for n in counted if not n.name.startswith(("cuBLAS", "attention"))) * 1e3 for c in CHIPS],
        ),
        ("predicted step, ms", [t * 1e3 for t in totals]),
        ("predicted MFU, %", [100 * operations / (t * c.flops) for t, c in zip(totals, CHIPS, strict=True)]),
        ("positions a second, thousands", [work.positions / t / 1e3 for t in totals]),
    )
    text += [f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |" for name, values in parts]
    text += [
        "",
        f"MFU counts {operations / 1e12:.1f} TFLOP a step: `6 N P` for the products' {parameters(work) / 1e6:.0f} M parameters, and attention within "
        "segments alone. What is recomputed does not count.",
        "",
        "## Every kernel",
        "",
        "Bytes and operations of one launch; times of all launches of one step. What is marked * belongs to another form of its term and is not summed.",
        "",
        "| kernel | launches | MB | GFLOP | bound by | " + " | ".join(f"{c.name}, us" for c in CHIPS) + " |",
        "|---|---|---|---|---|" + "---|" * len(CHIPS),
    ]
    for line in table:
        cost = line.cost
        text.append(
            f"| {line.name}{'' if line.counted else ' *'} | {cost.launches} | {cost.bytes / 1e6:.2f} | {cost.matrix_operations / 1e9:.2f} "
            f"| {line.bound(CHIPS[-1])} | " + " | ".join(f"{line.seconds(c) * 1e6:.0f}" for c in CHIPS) + " |"
        )
    return "\n".join(text) + "\n"


def main() -> int:
    """Writes the page; with `--check`, says instead whether it is current."""
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text() == page()
        if not current:
            sys.stderr.write("docs/kernels.md is out of date: run python -m treadle.kernels.roofline\n")
        return int(not current)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
