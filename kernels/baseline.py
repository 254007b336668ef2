"""Recorded rows of the compile report, by version of triton: what a change is held against.

A row carries a hash of all it depends on (the kernel's code and what it calls, constants, settings, the compiler's version). Where the
hash still holds, the row does too, and need not be built again.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treadle.kernels.compile_report import Details, Job, Result, Row

BASELINES = Path(__file__).with_name("baselines.json")

TOLERANCE = 1.05
"""A row may take this much more of anything than its baseline."""

Baselines = dict[str, dict[str, dict[str, Any]]]
"""Version of triton, `kernel arch`, row and details."""


def read_baselines(path: Path) -> Baselines:
    """What is recorded; nothing where there is no file."""
    if not path.exists():
        return {}
    found: Baselines = json.loads(path.read_text())
    return found


def write_baselines(path: Path, results: list[Result], *, whole: bool) -> None:
    """Records `results` for their version of triton; with `whole` they replace all that was there for it."""
    baselines = read_baselines(path)
    for version in {result.details.triton for result in results if result.details is not None}:
        rows = {} if whole else baselines.get(version, {})
        for result in results:
            if result.row is not None and result.details is not None and result.details.triton == version:
                rows[_key(result.kernel, result.arch)] = asdict(result.row) | asdict(result.details)
        baselines[version] = dict(sorted(rows.items()))
    lines = [
        f' "{version}": {{\n' + ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()) + "\n }"
        for version, rows in sorted(baselines.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def stored(job: Job, baselines: Baselines) -> Result | None:
    """The recorded result of a build that would come out the same, or None."""
    import triton

    arch = f"sm_{job.arch}"
    found = baselines.get(triton.__version__, {}).get(_key(job.name, arch))
    if found is None or found["source"] != job.source():
        return None
    row, details = _split(found)
    return Result(kernel=job.name, arch=arch, row=row, details=details)


def regressions(result: Result, baselines: Baselines) -> list[str]:
    """Where a build takes more than its baseline, both numbers side by side; nothing where there is none for this triton."""
    if result.row is None or result.details is None:
        return []
    known = baselines.get(result.details.triton)
    if known is None:
        return []
    found = known.get(_key(result.kernel, result.arch))
    if found is None:
        return [f"has no baseline for triton {result.details.triton}: record one with --update"]
    return [
        f"takes {now} {what}, its baseline for triton {result.details.triton} is {found[what]}"
        for what, now in (("registers", result.row.registers), ("shared_bytes", result.row.shared_bytes))
        if now > found[what] * TOLERANCE
    ]


def _key(kernel: str, arch: str) -> str:
    return f"{kernel} {arch}"


def _split(found: dict[str, Any]) -> tuple[Row, Details]:
    names = Row.__dataclass_fields__
    return Row(**{k: v for k, v in found.items() if k in names}), Details(**{k: v for k, v in found.items() if k not in names})
