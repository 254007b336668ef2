"""One sample of 500 MB: read with its own size of memory and a constant, whichever way it comes; refused in a constant alone."""

import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 500_000_000

READ = """
import sys
from treadle.pipeline.shards import Shard
def rss_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
url, where = sys.argv[1], sys.argv[2]
if where == "stream":
    from treadle.pipeline import ShardStream
    from treadle.shape import BatchShape
    stream = ShardStream(url, BatchShape(max_rows_per_device=1, max_segments_per_device=8, max_columns_per_row=64), epochs=1, threads=1)
    before = rss_bytes()
    with stream:
        found = [batch.segments for batch in stream]
    assert sum(found) == 3, (found, stream.quarantine.counts)
else:
    before = rss_bytes()
    most = {"max_member_bytes": 1 << 20} if where == "refused" else {}
    kinds, lengths = [], []
    for sample in Shard(url, **most).samples():
        kinds.append(sample.problem and sample.problem[0])
        lengths.append([len(field.data) for field in sample.fields])
    assert len(kinds) == 3, kinds
    assert lengths[1] == ([] if where == "refused" else [SIZE]), lengths
    assert kinds[1] == ("too_large" if where == "refused" else None)
print(rss_bytes() - before)
""".replace("SIZE", str(SIZE))


@pytest.fixture(name="shard", scope="module")
def shard_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, one of 500 MB of zeros that take no disk, and another."""
    import tarfile

    path = tmp_path_factory.mktemp("long") / "0.tar"
    with open(path, "wb") as file:
        for name, content, size in (("a.txt", b"text", 4), ("b.txt", b"", SIZE), ("c.txt", b"text", 4)):
            info = tarfile.TarInfo(name)
            info.size = size
            file.write(info.tobuf())
            file.write(content)
            file.seek(size - len(content) + -size % 512, 1)
        file.write(bytes(1024))
    return path


@pytest.mark.parametrize(("where", "most"), [("shard", SIZE), ("refused", 0), ("stream", SIZE)])
def test_a_sample_of_500_mb(shard: Path, where: str, most: int) -> None:
    # Of the long text the stream packs what a row holds.
    done = subprocess.run([sys.executable, "-c", READ, str(shard), where], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    # The constant: chunks, a batch, the libraries that decoding brings in.
    assert int(done.stdout) < most + most // 8 + (96 << 20)
