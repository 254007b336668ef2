"""Which device a run takes: CUDA as if there were some, with its number, and what is refused."""

import subprocess
import sys

import pytest
import torch

from treadle.model.device import computes_in_bf16, keep_freed_memory, pick_device


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process saw four CUDA devices and the third were current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


@pytest.mark.usefixtures("four_gpus")
def test_a_cuda_device_always_has_its_number() -> None:
    for given in (None, "cuda", torch.device("cuda")):
        assert pick_device("device", given) == torch.device("cuda", 2)
        assert pick_device("device", given, 1) == torch.device("cuda", 1)
        # A fifth process on a machine of four starts again with the first.
        assert pick_device("device", given, 4) == torch.device("cuda", 0)
    assert pick_device("device", "cuda:3", 1) == torch.device("cuda", 3)
    assert pick_device("device", "cpu", 1) == torch.device("cpu")


@pytest.mark.usefixtures("four_gpus")
def test_a_number_beyond_those_seen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.device is 'cuda:4': this process sees 4 CUDA devices"):
        pick_device("TrainerConfig.device", "cuda:4")


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("device", None) == torch.device("cpu")
    with pytest.raises(ValueError, match="device is 'cuda': this process sees 0 CUDA devices"):
        pick_device("device", "cuda")
    for wrong in ("gpu", 3, "meta"):
        with pytest.raises(ValueError, match="it must be a device such as 'cpu', 'cuda' or 'cuda:1'"):
            pick_device("device", wrong)  # type: ignore[arg-type]  # what a user may try


def test_precision_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [computes_in_bf16(None, d) for d in (cpu, cuda)] == [False, True]
    assert [computes_in_bf16("fp32", cuda), computes_in_bf16("bf16", cpu)] == [False, True]


FAULTS = """
import resource, torch
from treadle.model.device import keep_freed_memory
told = {call}
for _ in range(10):
    torch.ones(12 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(12 * 2**20)
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is told")
def test_kept_memory_is_not_faulted_in_again() -> None:
    """Ten tensors of 48 MiB, one after the other: each of 12,288 pages of 4 KiB anew, or none."""

    def faults(call: str, **environment: str) -> tuple[str, int]:
        code = FAULTS.replace("{call}", call)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": "", **environment})
        told, count = done.stdout.split()
        return told, int(count)

    told, kept = faults("keep_freed_memory()")
    assert told == "True"
    # Huge pages may take fewer faults than 4 KiB ones would.
    assert faults("False")[1] > 2 * max(1, kept)
    assert faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


def test_keeping_memory_is_done_once() -> None:
    assert keep_freed_memory() is keep_freed_memory()
