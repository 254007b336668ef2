"""Mutated tars: whatever is done to an archive, reading it ends in peace or in one typed error, with bounded memory, and every
sample that lies whole before the first change is there. `make fuzz` runs many more cases (TREADLE_FUZZ_CASES).
"""

import gzip
import io
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from treadle.pipeline.raw_sample import RawSample
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.tar import MAX_EXTENSIONS_BYTES
from treadle.pipeline.tar_header import TAR_KINDS, checksum

CASES = int(os.environ.get("TREADLE_FUZZ_CASES", "160"))

KINDS = TAR_KINDS | {"truncated_gzip", "bad_gzip", "gzip_crc", "truncated_zstd", "bad_zstd", "zstd_checksum"}


def valid(rng: random.Random) -> bytes:
    """An archive of samples of two files, under names of all lengths."""
    out = io.BytesIO()
    form = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number in range(rng.randint(1, 25)):
            folder = "" if form == tarfile.USTAR_FORMAT or rng.random() < 0.8 else "é" * rng.randint(60, 200) + "/"
            for extension in ("jpg", "txt"):
                info = tarfile.TarInfo(f"{folder}{number:04d}.{extension}")
                info.size = rng.choice((0, 3, 512, 1000))
                tar.addfile(info, io.BytesIO(rng.randbytes(info.size)))
    return out.getvalue()


def flip(rng: random.Random, data: bytearray) -> int:
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    return place


def cut(rng: random.Random, data: bytearray) -> int:
    place = rng.randrange(len(data))
    del data[place:]
    return place


def insert(rng: random.Random, data: bytearray) -> int:
    place = rng.randrange(len(data))
    data[place:place] = rng.choice((rng.randbytes(rng.randint(1, 1100)), bytes(rng.randint(1, 2000)), b"\xff" * 512))
    return place


def remove(rng: random.Random, data: bytearray) -> int:
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 512, rng.randint(1, 3000)))]
    return place


def header_field(rng: random.Random, data: bytearray) -> int:
    """Writes nonsense into a field of a header and makes its checksum right again: the reader must see through it."""
    place = rng.randrange(len(data) // 512) * 512
    start, length = rng.choice(((0, 100), (124, 12), (156, 1), (257, 8), (345, 155), (482, 1), (148, 8)))
    noise = rng.choice(
        (rng.randbytes(length), bytes(length), b"\xff" * length, b"\x80" + b"\x7f" * (length - 1), b"7" * length, b" " * length,
         rng.choice(b"01234567xgXLKSMVDN").to_bytes(1, "big") * length)
    )  # fmt: skip
    data[place + start : place + start + length] = noise[:length]
    if start != 148 and rng.random() < 0.9:
        block = bytes(data[place : place + 512])
        if len(block) == 512:
            data[place + 148 : place + 156] = b"%06o\0 " % checksum(block)
    return place


def pax_records(rng: random.Random, data: bytearray) -> int:
    """A PAX header of nonsense before some block."""
    place = rng.randrange(len(data) // 512) * 512
    body = rng.choice(
        (b"9999999999 path=x\n", b"12 size=1e9\n", b"20 size=-1\n", b"-5 path=x\n", b"\xff" * 100, b"6 a=b\n" * 200, b"30 GNU.sparse.major=1\n",
         b"27 size=99999999999999999\n", b"11 path=a/\n", b"10 path=\0\n", rng.randbytes(300))
    )  # fmt: skip
    block = bytearray(512)
    block[:4] = b"pax0"
    block[124:136] = b"%011o\0" % rng.choice((len(body), len(body) + 5, 1 << 31, 0))
    block[156:157] = rng.choice((b"x", b"g", b"X", b"L", b"K"))
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % checksum(bytes(block))
    data[place:place] = bytes(block) + body + bytes(-len(body) % 512)
    return place


MUTATIONS: tuple[Callable[[random.Random, bytearray], int], ...] = (flip, cut, insert, remove, header_field, header_field, pax_records)


def mutated(rng: random.Random) -> tuple[bytes, bytes, int]:
    """An archive, what became of it, and the first byte that differs."""
    original = valid(rng)
    data = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if len(data) >= 1024:
            rng.choice(MUTATIONS)(rng, data)
    same = next((place for place, (a, b) in enumerate(zip(original, data, strict=False)) if a != b), min(len(original), len(data)))
    return original, bytes(data), same


def read(path: Path) -> tuple[list[RawSample], ShardError | None, dict[str, int]]:
    shard = Shard(str(path), max_member_bytes=1 << 20)
    found: list[RawSample] = []
    try:
        found.extend(shard.samples())
    except ShardError as error:
        return found, error, dict(shard.counts)
    return found, None, dict(shard.counts)


@pytest.mark.parametrize("shift", range(8))
def test_whatever_is_done_to_a_tar(shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.tar"
    # The first reading imports and fills caches, which the bound on memory is not about.
    path.write_bytes(valid(random.Random(0)))
    read(path)
    tracemalloc.start()
    try:
        for case in range(shift, CASES, 8):
            rng = random.Random(case)
            original, data, same = mutated(rng)
            path.write_bytes(original)
            whole = read(path)[0]
            packed = rng.choice((lambda raw: raw, lambda raw: raw, gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress))
            path.write_bytes(packed(data))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            found, error, counts = read(path)
            peak = tracemalloc.get_traced_memory()[1] - before
            # A chunk twice over, its samples, and what extension headers may take.
            assert peak < (6 << 20) + MAX_EXTENSIONS_BYTES + 4 * len(data), case
            assert error is None or error.kind in KINDS, case
            assert error is None or 0 <= error.offset <= len(data), case
            # The last sample before the change may have been told to go on.
            untouched = [sample for sample in whole if sample.end <= same][:-1]
            assert found[: len(untouched)] == untouched, case
            assert found or error or counts or not data.strip(b"\0"), case
            # The way through a chunk changes nothing.
            with monkeypatch.context() as patch:
                patch.setattr("treadle.pipeline.tar_bulk.LEAST_HEADERS", 1 << 40)
                again, other, also = read(path)
            assert (again, also) == (found, counts), case
            assert (None if other is None else (other.kind, other.offset)) == (None if error is None else (error.kind, error.offset)), case
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shift", range(4))
def test_whatever_is_done_to_a_packed_tar(shift: int, tmp_path: Path) -> None:
    for case in range(shift, CASES // 2, 4):
        rng = random.Random(f"packed {case}")
        original = valid(rng)
        suffix = rng.choice((".gz", ".zst"))
        packed = gzip.compress(original) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(original)
        data = bytearray(packed)
        rng.choice((flip, cut, insert, remove))(rng, data)
        path = tmp_path / f"{case}.tar{suffix}"
        path.write_bytes(original)
        whole = read(path)[0]
        path.write_bytes(bytes(data))
        found, error, _ = read(path)
        path.unlink()
        assert error is None or error.kind in KINDS | {"not_a_tar"}, case
        if error is None:
            # Harmless: a time or a name in the header, or zeros at the end.
            assert found == whole, case
        elif error.kind not in ("gzip_crc", "bad_gzip", "bad_zstd", "zstd_checksum"):
            assert found == whole[: len(found)] or error.kind in TAR_KINDS, case
