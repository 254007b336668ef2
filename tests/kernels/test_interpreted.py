"""Triton versions of the ops, run by Triton's interpreter on the CPU in a process of its own.

TRITON_INTERPRET must be set before triton is imported and changes what every kernel is, so no other test may share the process.
The cases are in `tests/kernels/triton`; `make kernels` runs the thorough ones too.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "triton"


def test_triton_versions_equal_the_references() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", str(FOLDER)]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
