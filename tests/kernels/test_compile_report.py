"""The compile report: what it judges, what it holds against the baselines, and that the shipped kernels pass.

Rows whose baseline still holds (same code, same settings, same compiler) are taken from it, so that the suite builds only what has
changed, and a few builds besides that show the recorded rows to be what the compiler says. `make kernels` builds everything.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from treadle.kernels.baseline import BASELINES, read_baselines, regressions, write_baselines
from treadle.kernels.compile_report import ROW_FIELDS, Details, Result, Row, faults

ROW = Row(kernel="k", arch="sm_90", registers=100, spill_bytes=0, shared_bytes=4096, tensor_core_instructions=8, atomics=0)
DETAILS = Details(
    kind="matrix",
    fallback_instructions=0,
    tensor_columns=0,
    wide_loads=4,
    loads=6,
    wide_stores=2,
    stores=2,
    instructions=500,
    triton="3.8.0",
    source="0",
)


def result(**changed: Any) -> Result:
    row = replace(ROW, **{k: v for k, v in changed.items() if k in ROW_FIELDS})
    details = replace(DETAILS, **{k: v for k, v in changed.items() if k not in ROW_FIELDS})
    return Result(kernel=row.kernel, arch=row.arch, row=row, details=details)


def test_a_good_build_has_no_fault() -> None:
    assert faults(result()) == []
    assert faults(result(kind="other", tensor_core_instructions=0, wide_loads=0)) == []
    assert faults(result(kind="streaming", tensor_core_instructions=0)) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spill_bytes": 16}, "spills 16 bytes"),
        ({"shared_bytes": 227 * 1024 + 1}, "takes 232449 bytes of shared memory, sm_90 has 232448"),
        ({"arch": "sm_80", "shared_bytes": 163 * 1024 + 1}, "sm_80 has 166912"),
        ({"atomics": 1}, "has 1 global atomics"),
        ({"tensor_core_instructions": 0}, "has no HGMMA instruction: its products do not run on sm_90's tensor cores"),
        ({"arch": "sm_80", "tensor_core_instructions": 0}, "has no HMMA instruction"),
        ({"fallback_instructions": 3}, "has 3 HMMA instructions: a tile has fewer than 64 rows"),
        ({"arch": "sm_100", "tensor_columns": 576}, "takes 576 columns of tensor memory, sm_100 has 512"),
        ({"kind": "streaming", "wide_loads": 0}, "has loads but none of 16 bytes"),
        ({"kind": "streaming", "wide_stores": 0}, "has stores but none of 16 bytes"),
    ],
)
def test_faults_are_told(changed: dict[str, Any], said: str) -> None:
    (fault,) = faults(result(**changed))
    assert said in fault


def test_a_build_that_ended_its_process_is_a_fault() -> None:
    assert faults(Result(kernel="k", arch="sm_90", error="the compiler ended its process (status 6)")) == [
        "does not compile: the compiler ended its process (status 6)"
    ]


def test_regressions_show_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    write_baselines(path, [result()], whole=True)
    known = read_baselines(path)
    assert regressions(result(), known) == []
    assert regressions(result(registers=90, shared_bytes=0), known) == []
    assert regressions(result(registers=105), known) == []
    assert regressions(result(registers=106), known) == ["takes 106 registers, its baseline for triton 3.8.0 is 100"]
    assert regressions(result(shared_bytes=8192), known) == ["takes 8192 shared_bytes, its baseline for triton 3.8.0 is 4096"]
    assert regressions(result(kernel="new"), known) == ["has no baseline for triton 3.8.0: record one with --update"]
    assert regressions(result(triton="9.0.0", registers=255), known) == []


def test_recording_a_part_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    write_baselines(path, [result(), result(kernel="other")], whole=True)
    write_baselines(path, [result(registers=50)], whole=False)
    rows = read_baselines(path)["3.8.0"]
    assert (rows["k sm_90"]["registers"], rows["other sm_90"]["registers"]) == (50, 100)
    write_baselines(path, [result()], whole=True)
    assert list(read_baselines(path)["3.8.0"]) == ["k sm_90"]


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "treadle.kernels", *arguments]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)


def test_shipped_kernels_pass_and_hold_their_baselines() -> None:
    done = report("--json", "--check", "--stored")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows and all(tuple(row) == ROW_FIELDS for row in rows)
    kernels = {row["kernel"] for row in rows}
    assert {(row["kernel"], row["arch"]) for row in rows} == {(k, a) for k in kernels for a in ("sm_80", "sm_90", "sm_100")}
    # One kernel of every op at least.
    ops = {path.stem.removesuffix("_reference") for path in BASELINES.parent.glob("*_reference.py")} - {"tape"}
    names = {"segment_attention": "attention", "pair_loss": "pair", "payload_error": "patch_error"}
    assert {op for op in ops if not any(kernel.startswith(names.get(op, op)) for kernel in kernels)} == set()


def test_recorded_rows_are_what_the_compiler_says() -> None:
    import triton

    done = report("--json", "--kernel", "swiglu_fwd")
    assert done.returncode == 0, done.stderr
    known = read_baselines(BASELINES).get(triton.__version__, {})
    for row in json.loads(done.stdout):
        recorded = known.get(f"{row['kernel']} {row['arch']}")
        assert recorded is None or {name: recorded[name] for name in ROW_FIELDS} == row


def test_a_compiler_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A kernel that spills by design, one that is no kernel and one whose process dies: three faults, exit status 1."""
    script = tmp_path / "run.py"
    script.write_text(
        "import dataclasses, os, sys\n"
        "from treadle.kernels import __main__, compile_report\n"
        "from treadle.kernels.registry import Settings, all_kernels\n"
        "swiglu = next(k for k in all_kernels() if k.name == 'swiglu_bwd')\n"
        "def form(name, **changed):\n"
        "    return compile_report.Job(dataclasses.replace(swiglu, name=name, **changed), swiglu.builds[0], 90)\n"
        "jobs = [form('good'),\n"
        "        form('spills', settings={90: Settings({'BLOCK_F': 8192}, warps=1, max_registers=32)}),\n"
        "        form('untyped', settings={90: Settings({'BLOCK_X': 1})}),\n"
        "        form('dies')]\n"
        "compile_job = compile_report.compile_job\n"
        "compile_report.compile_job = lambda job: os.abort() if job.name == 'dies' else compile_job(job)\n"
        "__main__.all_jobs = lambda arches=(): jobs\n"
        "sys.exit(__main__.main(['--json']))\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", str(script)], env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [row["kernel"] for row in json.loads(done.stdout)] == ["good", "spills"]
    assert "spills on sm_90 spills" in done.stderr
    assert "untyped on sm_90 does not compile: ValueError: parameters ['BLOCK_F'] have no type" in done.stderr
    assert "dies on sm_90 does not compile: the compiler ended its process" in done.stderr
    assert "good on" not in done.stderr


def test_interpreted_kernels_are_not_compiled() -> None:
    done = report("--json", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set: unset it" in done.stderr


def test_results_travel_between_processes() -> None:
    found = result()
    assert Result.from_json(json.loads(json.dumps(found.to_json()))) == found
    failed = Result(kernel="k", arch="sm_80", error="no")
    assert Result.from_json(json.loads(json.dumps(failed.to_json()))) == failed
    assert set(asdict(found)["row"]) == set(ROW_FIELDS)
