"""kill -9 at random moments: from the state on disk the next process goes on with the very batches that a run in one piece gives.

A few kills in the suite; `make soak` asks for fifty (`TREADLE_KILLS`).
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
from treadle.pipeline import AudioShape, BatchShape, ImageShape, ShardStream
shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48,
    image=ImageShape(patch_side=8), audio=AudioShape(chunk_samples=64))
stream = ShardStream(sys.argv[1], shape, seed=3, lanes=4, shuffle=12, epochs=12, threads=2, window=2)
state, log = Path(sys.argv[2]), open(sys.argv[3], "a")
if state.exists():
    stream.load_state(state.read_bytes())
print("ready", flush=True)
for batch in stream:
    log.write(hashlib.sha256(batch.buffer[: batch.used_bytes]).hexdigest() + "\\n")
    log.flush()
    beside = state.with_suffix(".new")
    beside.write_bytes(batch.state.to_bytes())
    beside.replace(state)
    time.sleep(0.005)
log.write("end\\n")
"""


def test_killed_at_random_moments_it_gives_the_same_batches(tars: Any, mixed: Any, tmp_path: Path) -> None:
    full = tars.run(mixed(epochs=12))
    expected = [hashlib.sha256(content).hexdigest() for content, _ in full]
    after = {state: place + 1 for place, (_, state) in enumerate(full)}
    rng = random.Random(0)
    state, start, kills = tmp_path / "state", 0, int(os.environ.get("TREADLE_KILLS", "4"))
    for kill in range(kills + 1):
        log = tmp_path / f"{kill}.log"
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "mixed" / "*.tar"), str(state), str(log)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if kill < kills:
                assert process.stdout is not None
                if rng.random() < 0.8:
                    process.stdout.readline()
                time.sleep(rng.random() * 0.3)
                process.kill()
            else:
                process.communicate(timeout=300)
        whole = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
        assert whole == [*expected, "end"][start : start + len(whole)]
        if kill == kills:
            assert whole[-1:] == ["end"]
        if state.exists():
            start = after[state.read_bytes()]
