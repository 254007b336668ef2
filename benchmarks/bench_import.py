"""Claim: `from treadle import Packer` costs well under half a second (numpy alone included), measured in fresh interpreters."""

import subprocess
import sys

import record

CASES = {
    "from treadle import Packer": "from treadle import Packer",
    "import numpy": "import numpy",
}
REPETITIONS = 9


def seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); exec({statement!r}); print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(REPETITIONS):
        for name, statement in CASES.items():
            taken[name].append(seconds(statement))
    for name, values in taken.items():
        record.append(record.Row(op="import", impl=name, shape={}, metric="wall time", unit="s", values=values))


if __name__ == "__main__":
    main()
