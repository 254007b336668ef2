"""Two ranks whose streams end at different batches finish `Trainer.fit` together, over gloo; every sample is delivered once."""

import json
import subprocess
import sys
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path

SCRIPT = """
import json, sys, warnings
import torch
from treadle import BatchShape, Mesh, MeshOptions, Schedule, ShardStream, Trainer, TrainerConfig
torch.set_num_threads(1)
warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
shape = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32)
mesh = Mesh.bootstrap(MeshOptions(host_domain_index=rank, host_domain_count=2, directory=folder + "/meet", job="ends"), device="cpu")
stream = ShardStream(folder + "/*.tar", shape, rank=rank, world_size=2, lanes=3, shuffle=0, epochs=1, window=1)
found, sizes = [], []

def noted():
    for batch in stream:
        found.extend(batch.payload(segment).tobytes().decode().strip(".") for segment in range(batch.segments))
        sizes.append(batch.segments)
        yield batch

with mesh, Trainer(TrainerConfig(depth=1, hidden=128, batch=shape, schedule=Schedule(steps=1000), mesh=mesh)) as trainer:
    last = trainer.fit(noted())
    result = {"step": trainer.steps_done, "batches": len(sizes), "sizes": sizes, "found": found, "told": last.stats.step}
open(f"{folder}/{rank}.json", "w").write(json.dumps(result))
"""


def test_ranks_with_unequal_streams_finish_together(tmp_path: Path) -> None:
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for index in range(21):
                member = tarfile.TarInfo(f"k{index}.txt")
                member.size = 14
                tar.addfile(member, BytesIO(f"{shard}.{index}".encode().ljust(14, b".")))
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # Two lanes of 21 texts against one: four texts of 15 positions fill a batch of 2 x 32.
    assert [each["batches"] for each in told] == [11, 6]
    assert [each["sizes"][-1] for each in told] == [2, 1]
    # They take every step together, up to the last batch of whoever has most.
    assert [each["step"] for each in told] == [each["told"] for each in told] == [11, 11]
    seen = Counter(text for each in told for text in each["found"])
    assert seen == {f"{shard}.{index}": 1 for shard in range(3) for index in range(21)}
