"""What of `make gpu` runs without a GPU: its refusal, its report, and both sides of every comparison at small sizes."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CASES = ("attention forward", "attention backward", "patch embedding", "pair loss", "MaxSim")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu_cases = load("gpu_cases")
gpu = load("gpu")


@pytest.mark.parametrize("place", range(len(CASES)), ids=CASES)
def test_both_sides_of_a_case_answer_the_same(place: int) -> None:
    """Through the references; Triton's versions are compared with those elsewhere."""
    torch.set_num_threads(1)
    case = gpu_cases.cases(torch.device("cpu"), small=True)[place]()
    assert case.name == CASES[place] and case.operations > 0 and case.bytes > 0
    assert case.difference() <= case.tolerance


def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-P", str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "make gpu needs a CUDA device, and torch sees none here\n")
    assert not list(tmp_path.iterdir())


def test_the_sanitizer_sees_every_op() -> None:
    """What its expression selects: at least one test of every op that has kernels, none of the thorough ones."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-m",
        "not thorough",
        "-k",
        gpu.SANITIZED,
        "tests/kernels/triton",
    ]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    ops = (
        "attention", "patch_embed", "chunk_embed", "byte_embed", "rms_norm", "rotary", "swiglu", "mean_pool", "byte_cross_entropy",
        "patches_and_tubes", "pair_loss", "row_loss", "maxsim", "cover_spans",
    )  # fmt: skip
    assert [op for op in ops if f"::test_{op}[" not in done.stdout] == []


def test_times_are_judged_by_the_targets() -> None:
    """A patch embedding of 1 ms bound that takes 1.25 ms is at 80 % of it; one that takes 2 ms is at 50 %."""
    chip = gpu.chip_of("NVIDIA H200")
    assert chip.name == "H200" and gpu.chip_of("another").name == "H100"
    case = gpu_cases.Case(
        name="patch embedding", ours=lambda: (), baseline=None, baseline_name="torch", operations=989e9, bytes=1.0, sizes={}, target=""
    )
    assert gpu.bound_ms(case, chip) == pytest.approx(1.0)
    good = {f.name: f for f in gpu.judge(case, chip, 1.25, 2.5, 0)}
    assert good["patch embedding: speed over torch"].value == 2.0 and good["patch embedding: speed over torch"].met
    assert good["patch embedding: share of its bound"].value == pytest.approx(80) and good["patch embedding: share of its bound"].met
    bad = {f.name: f for f in gpu.judge(case, chip, 2.0, 1.0, 0)}
    assert bad["patch embedding: speed over torch"].met is False and bad["patch embedding: share of its bound"].met is False


def test_memory_of_the_pair_loss_is_judged() -> None:
    case = gpu_cases.Case(name="pair loss", ours=lambda: (), baseline=None, baseline_name="torch", operations=1.0, bytes=1.0)
    chip = gpu.CHIPS[1]
    for size, met in ((2**30 - 1, True), (2**30, False)):
        assert next(f for f in gpu.judge(case, chip, 1.0, 1.0, size) if f.unit == "GiB").met is met


def test_the_report_holds_what_was_measured(tmp_path: Path) -> None:
    figures = [gpu.Figure(name="a", value=2.0, unit="x", target="at least 3", met=False, detail="2 of 3")]
    report = {
        "device": "none", "torch": "2", "triton": "3", "commit": "0", "figures": [asdict(f) for f in figures],
        "checks": [gpu.run_tests([sys.executable, "-c", "print('FAILED one'); print('1 failed'); raise SystemExit(1)"], 60)],
    }  # fmt: skip
    gpu.write(tmp_path, report)
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    page = (tmp_path / "gpu.md").read_text()
    assert "| a | 2 x | at least 3 | **no** |" in page and "- FAILED one" in page and "1 failed" in page
    assert not gpu.passed(report)
    assert gpu.passed(report | {"checks": [], "figures": []})


def test_a_check_that_runs_too_long_is_stopped() -> None:
    found = gpu.run_tests([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert found["status"] == 124 and "ran past" in found["last"]


def test_the_whole_script_runs_on_a_pretended_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part in its order, at small sizes on the CPU; the tests that it would start are listed."""
    torch.set_num_threads(1)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    # Asked first by the script, afterwards by torch itself.
    answers = iter([True])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: next(answers, False))

    def timed(work: Callable[[], object], repeats: int = 20) -> float:
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)

    asked: list[list[str]] = []

    def tested(arguments: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        asked.append([*arguments])
        return {"command": arguments[-1], "status": 0, "last": "1 passed", "failures": [], "seconds": 1.0}

    small = {"rows": 4, "columns": 64, "hidden": 128, "depth": 1, "steps": 1, "device": "cpu"}
    steps_figures = gpu.steps_figures
    monkeypatch.setattr(gpu, "time_ms", timed)
    monkeypatch.setattr(gpu, "run_tests", tested)
    monkeypatch.setattr(gpu, "sanitizer", lambda: ["compute-sanitizer"])
    monkeypatch.setattr(gpu, "cases", lambda _: gpu_cases.cases(torch.device("cpu"), small=True))
    monkeypatch.setattr(gpu, "steps_figures", lambda chip: steps_figures(chip, **small))
    status = gpu.main(["--out", str(tmp_path)])
    report = json.loads((tmp_path / "gpu.json").read_text())
    files = {Path(arguments[-1]).name for arguments in asked}
    assert {"test_attention.py", "test_cover_spans.py", "test_step_on_cuda.py", "test_ranks_on_cuda.py"} <= files
    assert asked[-1][0] == "compute-sanitizer" and report["device"] == "NVIDIA H200"
    assert not [check for check in report["checks"] if check["command"] == "table"], "a part of the table failed"
    names = {figure["name"] for figure in report["figures"]}
    assert "MFU at the reference shape" in names and all(any(name.startswith(case) for name in names) for case in CASES)
    # A CPU misses the targets.
    assert status == 1 and (tmp_path / "gpu.md").read_text().startswith("# Treadle on NVIDIA H200")


def test_steps_are_measured_and_compared() -> None:
    """The same code on the CPU, with a tower of one layer: the batch is packed, the modes run, the ratios come out."""
    torch.set_num_threads(1)
    sizes = {"rows": 4, "columns": 64, "hidden": 128, "depth": 1, "steps": 1}
    figures = {f.name: f for f in gpu.steps_figures(gpu.CHIPS[1], **sizes, device="cpu")}
    assert set(figures) == {
        "MFU at the reference shape", "step: graph over eager", "step: fixed sizes over free sizes", "items a second, packed over padded",
    }  # fmt: skip
    assert all(f.value > 0 for f in figures.values())
