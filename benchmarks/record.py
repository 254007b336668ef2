"""Rows of results.csv, and the table in README.md that is made from them.

A claim is a ratio against a named baseline, both timed in turns within one run: these rows are what the README may quote.
"""

import argparse
import csv
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSV = HERE / "results.csv"
README = HERE / "README.md"
COLUMNS = (
    "op", "impl", "baseline", "shape", "dtype", "metric", "unit", "p20", "p50", "p80", "n", "device", "driver", "torch", "triton", "commit", "date",
)  # fmt: skip
BEGIN, END = "<!-- results: made by record.py from results.csv -->", "<!-- end of results -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured claim."""

    op: str
    """What was measured, e.g. `ingest`."""
    impl: str
    """What did it, e.g. `ShardStream`."""
    baseline: str = ""
    """What `impl` is divided by where `metric` is a ratio."""
    shape: Mapping[str, object]
    """Sizes of the case."""
    dtype: str = ""
    metric: str
    unit: str
    values: Sequence[float]
    """One value per repetition."""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _device() -> tuple[str, str]:
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if gpu:
        name, _, driver = gpu.splitlines()[0].partition(", ")
        return name, driver
    return f"{platform.machine()} CPU", ""


def append(row: Row) -> None:
    """Adds `row` to results.csv and prints it."""
    ordered = sorted(row.values)
    p20, p50, p80 = (
        (ordered[0],) * 3 if len(ordered) == 1 else (statistics.quantiles(ordered, n=10, method="inclusive")[k] for k in (1, 4, 7))
    )
    device, driver = _device()
    commit = _output("git", "rev-parse", "--short", "HEAD") + (
        "+" if _output("git", "status", "--porcelain", "--untracked-files=no") else ""
    )
    cells = (
        row.op, row.impl, row.baseline, json.dumps(dict(row.shape), sort_keys=True), row.dtype, row.metric, row.unit,
        f"{p20:.4g}", f"{p50:.4g}", f"{p80:.4g}", len(ordered), device, driver, _version("torch"), _version("triton"), commit, date.today().isoformat(),
    )  # fmt: skip
    new = not CSV.exists()
    with CSV.open("a", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(cells)
    against = f" against {row.baseline}" if row.baseline else ""
    print(f"{row.op}: {row.impl}{against}: {row.metric} {p50:.4g} {row.unit} (p20 {p20:.4g}, p80 {p80:.4g}, n {len(ordered)})", flush=True)


def in_turns(
    cases: Mapping[str, Callable[[], float]], repetitions: int, *, before: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Every case's rate, `repetitions` times, the cases taking turns so that the machine's mood hits all alike.

    Args:
        before: called before each case, untimed: it settles what the case before left undone.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, run in cases.items():
            if before is not None:
                before()
            start = time.perf_counter()
            count = run()
            rates[name].append(count / (time.perf_counter() - start))
    return rates


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Ratios of rates measured in the same turn."""
    return [a / b for a, b in zip(of, to, strict=True)]


def table() -> str:
    """The newest row of every (op, impl, baseline, shape, dtype, metric), as Markdown."""
    with CSV.open(newline="") as f:
        newest = {tuple(row[c] for c in ("op", "impl", "baseline", "shape", "dtype", "metric")): row for row in csv.DictReader(f)}
    lines = [
        "| what | implementation | against | case | metric | p50 (p20 to p80) | n | commit, date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in newest.values():
        case = ", ".join(f"{k} {v}" for k, v in json.loads(row["shape"]).items()) + (f", {row['dtype']}" if row["dtype"] else "")
        lines.append(
            f"| {row['op']} | {row['impl']} | {row['baseline']} | {case} | {row['metric']}, {row['unit']} | "
            f"{row['p50']} ({row['p20']} to {row['p80']}) | {row['n']} | {row['commit']}, {row['date']} |"
        )
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description="Rewrites the table in benchmarks/README.md from results.csv.").parse_args()
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
