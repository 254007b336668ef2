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

from treadle.decoders import DecodeOptions

SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
from treadle.decoders import DecodeOptions
from treadle.pipeline import AudioShape, BatchShape, ImageShape, ShardStream
shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48,
    image=ImageShape(patch_side=8), audio=AudioShape(chunk_samples=64))
workers = {"threads": 2} if sys.argv[4] == "threads" else {"processes": 1}
# A machine that stops for a while, as busy ones do, is no reason to give an item up.
options = DecodeOptions(max_wall_s=1e6)
stream = ShardStream(sys.argv[1], shape, seed=3, lanes=4, shuffle=12, epochs=12, window=2, options=options, **workers)
state, log = Path(sys.argv[2]), open(sys.argv[3], "a")
if state.exists():
    stream.load_state(state.read_bytes())
print("starting", flush=True)
for batch in stream:
    log.write(hashlib.sha256(batch.buffer[: batch.used_bytes]).hexdigest() + "\\n")
    log.flush()
    beside = state.with_suffix(".new")
    beside.write_bytes(batch.state.to_bytes())
    beside.replace(state)
    print("a batch", flush=True)
    time.sleep(0.005)
log.write("end\\n")
"""


def test_killed_at_random_moments_it_gives_the_same_batches(tars: Any, mixed: Any, tmp_path: Path) -> None:
    """Killed while it starts, reads, decodes in threads or processes, or writes; at the end of the data it begins again."""
    full = tars.run(mixed(epochs=12, options=DecodeOptions(max_wall_s=1e6)))
    expected = [hashlib.sha256(content).hexdigest() for content, _ in full]
    after = {state: place + 1 for place, (_, state) in enumerate(full)}
    rng = random.Random(0)
    state, start, kills, within = tmp_path / "state", 0, int(os.environ.get("TREADLE_KILLS", "4")), 0
    whole: list[str] = []
    for kill in range(kills + 1):
        log = tmp_path / f"{kill}.log"
        workers = rng.choice(["threads", "threads", "processes"])
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "mixed" / "*.tar"), str(state), str(log), workers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if kill < kills:
                assert process.stdout is not None
                # Some while it starts, most some batches later.
                for _ in range(rng.choice([0, 1, *range(2, 16)])):
                    process.stdout.readline()
                time.sleep(rng.random() * 0.02)
                process.kill()
            else:
                process.communicate(timeout=300)
        whole = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
        assert whole == [*expected, "end"][start : start + len(whole)]
        if whole[-1:] == ["end"]:
            state.unlink()
            start = 0
        elif state.exists():
            within += whole != []
            start = after[state.read_bytes()]
    assert whole[-1:] == ["end"]
    # Most kills come in the middle of a run, not before it or after its end.
    assert within >= kills // 2
