"""Valid archives of every writer that we know read as tarfile and webdataset read them, whichever way our reader takes through them."""

import gzip
import io
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander
from webdataset.writer import TarWriter

from treadle.pipeline.shards import Shard
from treadle.pipeline.storage import LocalStream
from treadle.pipeline.tar import Member, MemberReader

Found = list[tuple[Member, bytes]]


def ours(path: Path, chunk_bytes: int = 1 << 20) -> Found:
    with LocalStream(str(path), str(path)) as stream:
        return [
            (member, block.buffer[member.offset - block.base :][: member.size])
            for block in MemberReader(stream, chunk_bytes=chunk_bytes).blocks()
            for member in block.members
        ]


def theirs(path: Path) -> Found:
    """Regular files, as tarfile reads them."""
    found: Found = []
    with tarfile.open(path) as tar:
        for info in tar:
            if info.isreg() and not info.islnk():
                file = tar.extractfile(info)
                assert file is not None
                found.append((Member(info.name, info.offset, info.offset_data, info.size), file.read()))
    return found


LETTERS = "abcXYZ019 .-_éß日🙂'\\"


def random_name(rng: random.Random, longest: int) -> str:
    name = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, longest)))
    return name.strip(" .") or "x"


def write_tree(folder: Path, rng: random.Random, longest: int) -> None:
    """Files, folders and links of all kinds."""
    folders = [folder]
    for _ in range(rng.randint(5, 30)):
        parent = rng.choice(folders)
        path = parent / random_name(rng, longest)
        if path.exists() or path.is_symlink():
            continue
        kind = rng.random()
        if kind < 0.2:
            path.mkdir()
            folders.append(path)
        elif kind < 0.25:
            path.symlink_to("nowhere/at/all")
        else:
            path.write_bytes(rng.randbytes(rng.choice((0, 1, 511, 512, 513, 5000))))
            if kind > 0.95:
                os.link(path, path.with_name(path.name + "+"))


@pytest.mark.skipif(shutil.which("tar") is None, reason="the tar program is not installed")
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "pax"])
@pytest.mark.parametrize("seed", range(5))
def test_what_the_tar_program_writes(form: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{form} {seed}")
    tree, path = tmp_path / "tree", tmp_path / "0.tar"
    tree.mkdir()
    write_tree(tree, rng, 80 if form in ("gnu", "pax", "oldgnu") else 20)
    options = [f"--format={form}", *rng.choice(([], ["--blocking-factor=1"], ["--numeric-owner", "--sort=name"]))]
    # What a format has no room for the program leaves out, and says so with its status.
    subprocess.run(["tar", *options, "-cf", str(path), "-C", str(tree), "."], check=False, stderr=subprocess.DEVNULL)
    expected = theirs(path)
    assert expected
    for chunk_bytes in (1024, 1 << 20):
        assert ours(path, chunk_bytes) == expected


@pytest.mark.skipif(shutil.which("tar") is None, reason="the tar program is not installed")
def test_what_the_tar_program_appends(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(b"text %d" % number)
    names = [f"{number}.txt" for number in range(40)]
    subprocess.run(["tar", "-cf", "0.tar", *names[:20]], cwd=tmp_path, check=True)
    subprocess.run(["tar", "-rf", "0.tar", *names[20:]], cwd=tmp_path, check=True)
    path = tmp_path / "0.tar"
    assert ours(path) == theirs(path)
    assert len(ours(path)) == 40
    # Two archives in one file: tarfile stops at the first one's end unless it is told not to.
    joined = tmp_path / "joined.tar"
    joined.write_bytes(path.read_bytes() * 2)
    assert [member.name for member, _ in ours(joined)] == names * 2


FIELDS = st.dictionaries(
    st.sampled_from(["jpg", "txt", "json.gz", "a.b.c", "cls", "flac"]), st.binary(max_size=1400), min_size=1, max_size=4
)
KEYS = st.text("abc019_-/é日", min_size=1, max_size=30).filter(
    lambda key: not key.startswith("/") and not key.endswith("/") and "//" not in key
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(KEYS, FIELDS), min_size=1, max_size=40, unique_by=lambda sample: sample[0]), st.sampled_from(["", ".gz"]))
def test_what_webdataset_writes(tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, dict[str, bytes]]], suffix: str) -> None:
    path = tmp_path_factory.mktemp("shards") / f"0.tar{suffix}"
    with TarWriter(str(path), encoder=False) as writer:
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
    found = [(sample.key, {each.name: each.data for each in sample.fields}) for sample in Shard(str(path)).samples()]
    with gzip.open(path) if suffix else open(path, "rb") as file:
        groups = group_by_keys(tar_file_expander([{"url": str(path), "stream": file}]))
        read = [(sample["__key__"], {name: data for name, data in sample.items() if not name.startswith("__")}) for sample in groups]
    assert found == read == samples


def piece(rng: random.Random, number: int) -> bytes:
    """A member, or a few, as some writer writes them; the end of an archive, now and then."""
    out = io.BytesIO()
    kind = rng.random()
    form = tarfile.PAX_FORMAT if kind < 0.1 else tarfile.GNU_FORMAT if kind < 0.3 else tarfile.USTAR_FORMAT
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for place in range(rng.randint(1, 30)):
            info = tarfile.TarInfo(f"{number}/{place}.{rng.choice(('txt', 'JPG', 'a.b'))}")
            if form != tarfile.USTAR_FORMAT and rng.random() < 0.2:
                info.name = f"{'é' * rng.randint(40, 90)}/{info.name}"
            elif rng.random() < 0.1:
                info.name = f"{'p' * 90}/{'n' * 60}/{info.name}"
            if rng.random() < 0.1:
                info.type = rng.choice((tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE))
                tar.addfile(info)
                continue
            content = rng.randbytes(rng.choice((0, 1, 512, 700, 4096)))
            if rng.random() < 0.1 and number:
                # A tar within the tar: its headers are content.
                content = piece(rng, 0)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        members_end = tar.offset
    return out.getvalue()[: members_end if rng.random() < 0.8 else None]


@pytest.mark.parametrize("seed", range(60))
def test_both_ways_through_a_chunk_are_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers taken all at once give what headers taken one by one give."""
    rng = random.Random(seed)
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(piece(rng, number) for number in range(1, rng.randint(2, 12))))
    found = ours(path)
    assert found == ours(path, 20_480)
    monkeypatch.setattr("treadle.pipeline.tar_bulk.LEAST_HEADERS", 1 << 40)
    assert found == ours(path)
    monkeypatch.setattr("treadle.pipeline.tar_bulk.LEAST_HEADERS", 1)
    assert found == ours(path) == ours(path, 5_120)
    with tarfile.open(path, ignore_zeros=True) as tar:
        assert [member.name for member, _ in found] == [info.name for info in tar if info.isreg()]
