"""Tars as they break in the field, each with its right reading: samples with their fields, what is counted, and the error that ends them.

Most of these are read without a word by tarfile and webdataset, which stop early, keep wrong bytes, or join what does not belong together.
"""

import gzip
import io
import logging
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.tar import MAX_MEMBER_BYTES
from treadle.pipeline.tar_header import checksum

Names = Sequence[str]


def archive(names: Names, *, form: int = tarfile.USTAR_FORMAT, content: bytes = b"text", headers: dict[str, str] | None = None) -> bytes:
    """Files of `content`, a header and a block each, filled up to 10,240 bytes; a name that ends in a slash is a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=headers) as tar:
        for name in names:
            info = tarfile.TarInfo(name.rstrip("/"))
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
                continue
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def changed(data: bytes, place: int, bits: int = 1) -> bytes:
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def header(name: str, size: bytes) -> bytes:
    block = bytearray(archive([name])[:512])
    block[124:136] = size
    block[148:156] = b"%06o\0 " % checksum(bytes(block))
    return bytes(block)


def mtimes() -> bytes:
    """A PAX header before each member, for a time with a fraction."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("0001.jpg", "0001.txt"):
            info = tarfile.TarInfo(name)
            info.mtime, info.size = 1_700_000_000.123, 4
            tar.addfile(info, io.BytesIO(b"text"))
    return out.getvalue()


FIVE = archive([f"{number:04d}.txt" for number in range(5)])
ZIPPED = gzip.compress(FIVE, mtime=0)
LONG = f"{'d' * 120}/{'k' * 150}"


@dataclass(frozen=True, kw_only=True)
class Case:
    data: bytes
    samples: list[tuple[str, str]] = field(default_factory=list)
    """Key, and its fields with spaces between."""
    error: tuple[str, int] | None = None
    told: str = ""
    """A part of the error's detail."""
    counts: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    """Why the first sample is refused."""


def texts(*numbers: int) -> list[tuple[str, str]]:
    return [(f"{number:04d}", "txt") for number in numbers]


CASES = {
    # The third header begins at byte 2048; two files, their headers whole, follow it in the rest of 10,240 bytes.
    "T1 bad checksum": Case(
        data=changed(FIVE, 2048 + 148), samples=texts(0, 1), error=("bad_checksum", 2048),
        told="2 files whose headers are whole, in 7680 bytes",
    ),
    "T1 bad name": Case(data=changed(FIVE, 2048 + 2), samples=texts(0, 1), error=("bad_checksum", 2048)),
    "T2 cut between members": Case(data=FIVE[:2048], samples=texts(0, 1), counts={"no_end_marker": 1}),
    "T2 cut in a header": Case(data=FIVE[:2148], samples=texts(0, 1), error=("truncated_header", 2048), told="100 of 512"),
    "T2 cut in a file": Case(data=FIVE[:2562], samples=texts(0, 1), error=("truncated_member", 2048), told="says 4 bytes, 2 are there"),
    "T4 no zero block": Case(data=FIVE[:5120], samples=texts(*range(5)), counts={"no_end_marker": 1}),
    "T4 one zero block": Case(data=FIVE[:5632], samples=texts(*range(5)), counts={"no_end_marker": 1}),
    "T6 the first half": Case(data=archive(["0000.jpg", "0000.txt", "0001.jpg"]), samples=[("0000", "jpg txt"), ("0001", "jpg")]),
    "T6 the second half": Case(data=archive(["0001.txt", "0002.jpg"]), samples=[("0001", "txt"), ("0002", "jpg")]),
    "T7 empty": Case(data=b"", error=("empty", 0)),
    "T7 zeros": Case(data=bytes(10_240)),
    "T7 a page": Case(data=b"<html>403 Forbidden</html>" * 100, error=("not_a_tar", 0), told="<html>403"),
    "T8 20 GiB claimed": Case(
        data=header("big.jpg", b"\x80" + (20 << 30).to_bytes(11, "big")) + bytes(100), error=("truncated_member", 0), told="100 are there"
    ),
    "T8 a negative size": Case(data=header("neg.jpg", b"\xff" * 12) + bytes(1024), error=("bad_size", 0), told="negative"),
    "T9 long names, GNU": Case(data=archive([f"{LONG}.jpg", "日本語.jpg"], form=tarfile.GNU_FORMAT), samples=[(LONG, "jpg"), ("日本語", "jpg")]),
    "T9 long names, PAX": Case(data=archive([f"{LONG}.jpg", "日本語.jpg"], form=tarfile.PAX_FORMAT), samples=[(LONG, "jpg"), ("日本語", "jpg")]),
    "T10 PAX times": Case(data=mtimes(), samples=[("0001", "jpg txt")]),
    "T10 PAX global": Case(data=archive(["0001.jpg"], form=tarfile.PAX_FORMAT, headers={"comment": "a commit"}), samples=[("0001", "jpg")]),
    "T13 several dots": Case(
        data=archive(["a.b.jpg", "22.05.png", "dir.v2/0001.jpg", "/p/22.0/1.1.png", "x.seg.png"]),
        samples=[("a", "b.jpg"), ("22", "05.png"), ("dir.v2/0001", "jpg"), ("/p/22.0/1", "1.png"), ("x", "seg.png")],
        counts={"key_cut_in_number": 2},
    ),
    "T14 ./ before some": Case(data=archive(["./", "./0001.jpg", "0001.txt"]), samples=[("0001", "jpg txt")], counts={"skipped_directory": 1}),
    "T14 .. and / are names": Case(
        data=archive(["../../etc/passwd.txt", "/etc/shadow.txt"]), samples=[("../../etc/passwd", "txt"), ("/etc/shadow", "txt")]
    ),
    "T15 AppleDouble": Case(
        data=archive(["d/0002.jpg", "d/._0002.jpg", "d/0002.txt", "d/.DS_Store", "__MACOSX/d/._0002.txt"], content=b"\0\5\x16\7"),
        samples=[("d/0002", "jpg txt")],
        counts={"skipped_macos": 3},
    ),
    "T16 a field twice": Case(data=archive(["a.jpg", "a.txt", "a.jpg"]), samples=[("a", "")], refused="at bytes 512 and 2560"),
    "T16 a field in both cases": Case(data=archive(["a.jpg", "a.JPG"]), samples=[("a", "")], refused="at bytes 512 and 1536"),
    "T16 a key in both cases": Case(data=archive(["A.jpg", "a.txt"]), samples=[("A", "jpg"), ("a", "txt")]),
    "T17 interleaved": Case(
        data=archive(["0.a", "1.a", "0.b", "1.b"]), samples=[("0", "a"), ("1", "a"), ("0", "b"), ("1", "b")], counts={"key_seen_again": 2}
    ),
    "T19 gzip, bad sum": Case(data=changed(ZIPPED, len(ZIPPED) - 8), samples=texts(*range(5)), error=("gzip_crc", 5120)),
    "T19 gzip, zeros after it": Case(data=ZIPPED + bytes(37), samples=texts(*range(5))),
    "T20 odd names": Case(
        data=archive(["trailingdot.", ".hidden", "noext", "sub/.jpg", "__meta__", "a\\b.txt", "sp ace.txt", "日本.jpg"], form=tarfile.GNU_FORMAT),
        samples=[("a\\b", "txt"), ("sp ace", "txt"), ("日本", "jpg")],
        counts={"skipped_no_field": 3, "skipped_hidden": 2},
    ),
}  # fmt: skip


def read(path: Path) -> tuple[list[tuple[str, str]], ShardError | None, Shard, str]:
    """Samples, the error that ended them, the shard, and why the first sample is refused."""
    shard = Shard(str(path))
    found: list[tuple[str, str]] = []
    refused = ""
    error: ShardError | None = None
    try:
        for sample in shard.samples():
            found.append((sample.key, " ".join(each.name for each in sample.fields)))
            refused = refused or " ".join(sample.problem or ())
    except ShardError as raised:
        error = raised
    return found, error, shard, refused


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_tar_of_the_field(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(case.data)
    found, error, shard, refused = read(path)
    assert found == case.samples
    assert (None if error is None else (error.kind, error.offset)) == case.error
    assert error is None or case.told in error.detail
    assert dict(shard.counts) == case.counts
    assert case.refused in refused


def test_a_gzip_that_is_cut_gives_what_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "0.tar.gz"
    path.write_bytes(ZIPPED[: len(ZIPPED) * 2 // 3])
    found, error, _, _ = read(path)
    assert error is not None and error.kind == "truncated_gzip"
    # Each sample takes 1,024 bytes; those that are whole before the byte where it ends are there.
    assert found == texts(*range(5))[: error.offset // 1024]
    assert found


@pytest.mark.parametrize("gib", [1, 20])
@pytest.mark.parametrize("pack", ["", ".gz"])
def test_a_claim_allocates_nothing(gib: int, pack: str, tmp_path: Path) -> None:
    """Neither that of a file that would be read nor of one longer than any that is; whether or not the archive's own length is known."""
    assert 1 << 30 <= MAX_MEMBER_BYTES < 20 << 30
    data = archive(["a.txt"])[:1024] + header("big.jpg", b"\x80" + (gib << 30).to_bytes(11, "big")) + bytes(100)
    path = tmp_path / f"0.tar{pack}"
    path.write_bytes(gzip.compress(data) if pack else data)
    tracemalloc.start()
    found, error, _, _ = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [("a", "txt")]
    assert error is not None and (error.kind, error.offset) == ("truncated_member", 1024)
    assert "100 are there" in error.detail
    # A chunk, and what unpacking takes.
    assert peak < 16 << 20


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_files_are_refused_not_read_raw(form: str, tmp_path: Path) -> None:
    if shutil.which("tar") is None:
        pytest.skip("the tar program is not installed")
    with open(tmp_path / "sp.bin", "wb") as file:
        file.seek(524_288)
        file.write(b"HELLO")
        file.truncate(1 << 20)
    (tmp_path / "z.txt").write_bytes(b"text")
    subprocess.run(["tar", "--sparse", f"--format={form}", "-cf", "0.tar", "sp.bin", "z.txt"], cwd=tmp_path, check=True)
    found, error, _, refused = read(tmp_path / "0.tar")
    assert error is None
    assert found == [("sp", ""), ("z", "txt")]
    assert refused.startswith("sparse 'sp.bin' is stored sparse")


def test_each_oddity_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(archive(["22.05.png", "22.06.png", "23.1.png", "24.2.png"]))
    with caplog.at_level(logging.WARNING):
        read(path)
    (record,) = caplog.records
    assert "key_cut_in_number (4)" in record.message


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../etc/passwd", "0.txt"])
def test_links_and_devices_are_never_followed(kind: bytes, target: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.png")
        info.type, info.linkname = kind, target
        tar.addfile(info)
        info = tarfile.TarInfo("0.txt")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"text"))
    (tmp_path / "0.tar").write_bytes(out.getvalue())
    found, error, shard, _ = read(tmp_path / "0.tar")
    assert (found, error) == ([("0", "txt")], None)
    assert shard.counts.total() == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "0.tar"]
