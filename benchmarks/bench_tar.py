"""Claim: the strict tar reader passes at least 5 times webdataset's members/s on one core, streaming and from local files.

Absolute rates move with the machine. In its fast phase (webdataset at 33,000 members/s) 576,000 members/s come from local files and 533,000
streaming, 17 and 16 times as many. The goals are 400,000 and 200,000; in slow phases (webdataset at 17,500 to 23,000) earlier forms gave
304,000 to 380,000 from local files. The kernel's copy of the file into memory alone takes half of the time (`read`); without it, by mapping
the file, a shard that is cut while it is read would end the process.

One archive of 4 KiB members, every member's content in hand, on one thread, the cases taking turns, members/s:
  local        MemberReader over the file
  streaming    MemberReader over pieces of 1 MiB that come from an iterator, as from a network: no size, no going back
  samples      Shard.samples over the file: members grouped to samples, two files each, contents as bytes
  read         nothing but the reads that `local` makes, 1 MiB at a time: what the machine allows whoever copies the file into memory
  webdataset   webdataset's own tar iterator over the file, its defaults
  tarfile      tarfile over the file, as a user would loop over it

    python benchmarks/bench_tar.py [--full]
"""

import argparse
import io
import random
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import record

from treadle.pipeline.shards import Shard
from treadle.pipeline.storage import LocalStream
from treadle.pipeline.tar import MemberReader

PIECE_BYTES = 1 << 20

MEMBERS: dict[str, int] = {}
"""What each archive was written with."""


class Pieces:
    """A forward stream of pieces: what a network gives."""

    size: int | None = None

    def __init__(self, path: str) -> None:
        self._pieces = self._read(path)
        self._held = b""

    @staticmethod
    def _read(path: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def read(self, n: int) -> bytes:
        """The next `n` bytes."""
        while len(self._held) < n and (piece := next(self._pieces, b"")):
            self._held = self._held + piece if self._held else piece
        data, self._held = self._held[:n], self._held[n:]
        return data

    def skip(self, n: int) -> int:
        """Reads on."""
        return len(self.read(n))

    def back(self, n: int) -> bool:
        """A network does not go back."""
        return False


def write_archive(path: Path, members: int, size: int, form: int) -> None:
    """Two files a sample, of random bytes."""
    rng = random.Random(0)
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(members):
            info = tarfile.TarInfo(f"train/{number // 2:08d}.{('jpg', 'txt')[number % 2]}")
            info.size = size
            if form == tarfile.PAX_FORMAT:
                info.mtime = 1_700_000_000.25  # a fraction takes a PAX header
            tar.addfile(info, io.BytesIO(rng.randbytes(size)))


def local(path: str) -> int:
    """Members of the file."""
    with LocalStream(path, path) as stream:
        return sum(len(block.members) for block in MemberReader(stream).blocks())


def streaming(path: str) -> int:
    """Members of the pieces."""
    return sum(len(block.members) for block in MemberReader(Pieces(path)).blocks())


def samples(path: str) -> int:
    """Members within samples."""
    return sum(len(sample.fields) for sample in Shard(path).samples())


def read(path: str) -> int:
    """Members of the file, none of which is looked at."""
    with LocalStream(path, path) as stream:
        while stream.read(PIECE_BYTES):
            pass
    return MEMBERS[path]


def webdataset_members(path: str) -> int:
    """Members that webdataset's iterator gives."""
    from webdataset.tariterators import tar_file_iterator

    with open(path, "rb") as file:
        return sum(1 for _ in tar_file_iterator(file))


def tarfile_members(path: str) -> int:
    """Members that tarfile gives, read."""
    count = 0
    with tarfile.open(path) as tar:
        for info in tar:
            file = tar.extractfile(info)
            count += file is not None and len(file.read()) == info.size
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1 KiB and 64 KiB members and PAX headers too")
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    cases = [(4096, 20_000, tarfile.USTAR_FORMAT)]
    if arguments.full:
        cases += [(1024, 40_000, tarfile.USTAR_FORMAT), (65_536, 2_000, tarfile.USTAR_FORMAT), (4096, 20_000, tarfile.PAX_FORMAT)]
    ours = {"local": local, "streaming": streaming, "samples": samples}
    theirs = {"webdataset": webdataset_members, "tarfile": tarfile_members}
    with tempfile.TemporaryDirectory() as folder:
        for size, members, form in cases:
            path = str(Path(folder) / f"{size}-{form}.tar")
            write_archive(Path(path), members, size, form)
            MEMBERS[path] = members
            both = {**ours, "read": read, **theirs}
            for run in both.values():
                assert run(path) == members
            rates = record.in_turns({name: partial(run, path) for name, run in both.items()}, arguments.repetitions)
            shape = {"member_bytes": size, "members": members, "headers": "PAX" if form == tarfile.PAX_FORMAT else "ustar"}
            for name, values in rates.items():
                record.append(record.Row(op="tar", impl=name, shape=shape, metric="members", unit="1/s", values=values))
            for name, baseline in [*((name, "webdataset") for name in ours), ("local", "read")]:
                ratio = record.ratios(rates[name], rates[baseline])
                record.append(record.Row(op="tar", impl=name, baseline=baseline, shape=shape, metric="rate ratio", unit="x", values=ratio))


if __name__ == "__main__":
    main()
