"""The examples run as they stand, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def run(example: str, *arguments: str) -> str:
    """What an example prints."""
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / example), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout


def test_the_packer_alone_trains_a_model_of_the_users_own(tmp_path: Path) -> None:
    picture = tmp_path / "batch.png"
    printed = run("packer_only.py", "--steps", "60", "--picture", str(picture))
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    fills = [float(fill) for fill in re.findall(r"([0-9.]+)% of positions used", printed)]
    # Bytes of a few known texts: from about the entropy of 256 classes, ln 256 = 5.5, to under half of it.
    assert len(losses) == 4 and losses[0] > 5 and losses[-1] < losses[0] / 2
    assert min(fills) > 95
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 200


def test_a_loop_that_is_stopped_three_times_ends_with_the_same_weights() -> None:
    printed = run("records.py")
    pending = [int(count) for count in re.findall(r"resumed at micro-batch \d+, (\d+) pending gradients", printed)]
    assert len(pending) == 3 and max(pending) > 0, "a stop within an accumulation window is what records are for"
    assert "the weights are the same" in printed
