"""The compile report: `python -m treadle.kernels [--json]` builds every kernel at its shipped settings for sm_80, sm_90 and sm_100.

Needs no GPU. Exits 1 when a kernel spills, needs more shared memory than the chip has, uses atomics, or is a matrix kernel without
the chip's tensor-core instructions; with `--check` also when it takes more than its recorded baseline.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from treadle.kernels.baseline import BASELINES, read_baselines, regressions, stored, write_baselines
from treadle.kernels.compile_report import ROW_FIELDS, Job, Result, all_jobs, faults, run_jobs
from treadle.kernels.registry import ARCHES


def main(arguments: list[str] | None = None) -> int:
    """Builds, reports to standard output and answers the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m treadle.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="rows as one JSON list")
    parser.add_argument("--details", action="store_true", help="settings, loads and stores beside each row of the table")
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name holds TEXT")
    parser.add_argument("--arch", type=int, choices=ARCHES, action="append", help="only this architecture; may be repeated [all]")
    parser.add_argument("--check", action="store_true", help="also fail where a row is worse than its baseline for this version of triton")
    parser.add_argument("--stored", action="store_true", help="take rows from the baselines where nothing they depend on has changed")
    parser.add_argument("--update", action="store_true", help="write the rows into the baselines")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="file of baselines [%(default)s]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="builds at a time [%(default)s]")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET is set: unset it, interpreted kernels cannot be compiled")

    jobs = [job for job in all_jobs(options.arch or ARCHES) if options.kernel is None or options.kernel in job.name]
    baselines = read_baselines(options.baselines)
    known: dict[Job, Result] = {}
    for job in jobs if options.stored else ():
        recorded = stored(job, baselines)
        if recorded is not None:
            known[job] = recorded
    built = iter(run_jobs([job for job in jobs if job not in known], options.jobs))
    results: list[Result] = []
    failed = False
    if not options.json:
        _say(_line(dict(zip(ROW_FIELDS, ("kernel", "arch", "registers", "spill", "shared", "tensor-core", "atomics"), strict=True))))
    for job in jobs:
        result = known[job] if job in known else next(built)
        results.append(result)
        if options.update:
            write_baselines(options.baselines, [result], whole=False)
        found = faults(result) + (regressions(result, baselines) if options.check and not options.update else [])
        failed = failed or bool(found)
        if not options.json and result.row is not None:
            _say(_line(asdict(result.row)) + (_details(job, result) if options.details else ""))
        for fault in found:
            sys.stderr.write(f"{result.kernel} on {result.arch} {fault}\n")
    if options.json:
        _say(json.dumps([asdict(result.row) for result in results if result.row is not None], indent=1))
    if options.update and len(jobs) == len(all_jobs()):
        write_baselines(options.baselines, results, whole=True)
    return int(failed)


def _line(row: dict[str, object]) -> str:
    widths = (36, 6, 9, 7, 7, 11, 7)
    cells = [
        f"{row[name]!s:<{width}}" if i < 2 else f"{row[name]!s:>{width}}"
        for i, (name, width) in enumerate(zip(ROW_FIELDS, widths, strict=True))
    ]
    return "  ".join(cells)


def _details(job: Job, result: Result) -> str:
    details = result.details
    if details is None:
        return ""
    settings = job.kernel.settings[job.arch]
    blocks = " ".join(f"{name}={size}" for name, size in settings.blocks.items())
    return (
        f"  {settings.warps}/{settings.stages} {blocks} max_registers={settings.max_registers} loads={details.wide_loads}/{details.loads} "
        f"stores={details.wide_stores}/{details.stores} tensor_columns={details.tensor_columns} instructions={details.instructions}"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
