"""Shards: the samples of tars, wherever reading starts, and everything complete before a damage."""

import gzip
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator
from webdataset.writer import TarWriter

from treadle.pipeline import sample_table
from treadle.pipeline import shards as shards_module
from treadle.pipeline.grouping import split_name
from treadle.pipeline.shards import RawSample, Shard, ShardError
from treadle.pipeline.storage import LocalStream, open_stream

Files = list[tuple[str, bytes]]


def archive(files: Files, *, form: int = tarfile.USTAR_FORMAT, end: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        length = tar.offset
    return out.getvalue() if end else out.getvalue()[:length]


def pairs(count: int, size: int = 10) -> Files:
    """`count` samples of a jpg and a txt."""
    return [
        (f"{number:04d}.{field}", f"{field} {number} ".encode().ljust(size, b".")) for number in range(count) for field in ("jpg", "txt")
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def put(data: bytes | Files, name: str = "a.tar") -> str:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else archive(data))
        return str(path)

    return put


def read(shard: Shard, **where: Any) -> tuple[list[RawSample], ShardError | None]:
    found: list[RawSample] = []
    try:
        found.extend(shard.samples(**where))
    except ShardError as error:
        return found, error
    return found, None


def collect(url: str) -> tuple[list[tuple[str, list[str]]], str]:
    """Keys with their fields, and the kind of the error that ended them."""
    found, error = read(Shard(url))
    return [(sample.key, [file.name for file in sample.fields]) for sample in found], error.kind if error else ""


def test_samples_with_their_places(write: Callable[..., str]) -> None:
    found, error = read(Shard(write(pairs(3))))
    assert error is None
    assert [(sample.key, sample.index, sample.offset, sample.size, sample.end) for sample in found] == [
        (f"{number:04d}", number, 2048 * number, 2048, 2048 * (number + 1)) for number in range(3)
    ]
    assert [(file.name, file.offset, file.data) for file in found[1].fields] == [
        ("jpg", 2048 + 512, b"jpg 1 ...."),
        ("txt", 2048 + 1536, b"txt 1 ...."),
    ]


def test_samples_never_cross_shards(write: Callable[..., str]) -> None:
    first = write([("0000.jpg", b"0"), ("0000.txt", b"0"), ("0001.jpg", b"1")], "s0.tar")
    second = write([("0001.txt", b"1"), ("0002.jpg", b"2")], "s1.tar")
    assert collect(first) == ([("0000", ["jpg", "txt"]), ("0001", ["jpg"])], "")
    assert collect(second) == ([("0001", ["txt"]), ("0002", ["jpg"])], "")


@pytest.mark.parametrize(
    ("name", "key", "field"),
    [
        ("a.b.jpg", "a", "b.jpg"),
        ("22.05.png", "22", "05.png"),
        ("dir.v2/0001.jpg", "dir.v2/0001", "jpg"),
        ("/p/22.0/1.1.png", "/p/22.0/1", "1.png"),
        ("x.seg.png", "x", "seg.png"),
        ("x.ES.OGG", "x", "es.ogg"),
        ("./0001.jpg", "0001", "jpg"),
        ("././/0001.jpg", "0001", "jpg"),
        ("../../etc/0001.jpg", "../../etc/0001", "jpg"),
        ("日本.jpg", "日本", "jpg"),
        ("a b\\c.jpg", "a b\\c", "jpg"),
        ("a..jpg", "a", ".jpg"),
        ("trailingdot.", "trailingdot", ""),
        (".hidden", ".hidden", ""),
        ("noext", "noext", ""),
        ("sub/.jpg", "sub/.jpg", ""),
        ("__meta__", "__meta__", ""),
        ("d/._0001.jpg", "d/._0001.jpg", ""),
        ("d/.DS_Store", "d/.DS_Store", ""),
        ("__MACOSX/d/0001.jpg", "__MACOSX/d/0001.jpg", ""),
        ("a__MACOSX/0001.jpg", "a__MACOSX/0001", "jpg"),
        ("", "", ""),
    ],
)
def test_keys_and_fields(name: str, key: str, field: str) -> None:
    assert split_name(name) == (key, field)


def test_dot_slash_joins_its_plain_sibling(write: Callable[..., str]) -> None:
    assert collect(write([("./0001.jpg", b"1"), ("0001.txt", b"2")])) == ([("0001", ["jpg", "txt"])], "")


def test_skipped_members_do_not_split_samples(write: Callable[..., str]) -> None:
    files = [
        ("._0001.jpg", b"mac"),
        ("0001.jpg", b"1"),
        ("d/._0001.txt", b"mac"),
        ("0001.txt", b"2"),
        ("__MACOSX/0001.png", b"mac"),
        (".hidden", b""),
        ("noext", b""),
    ]
    shard = Shard(write(files))
    found, _ = read(shard)
    assert [(sample.key, [file.name for file in sample.fields]) for sample in found] == [("0001", ["jpg", "txt"])]
    assert (found[0].offset, found[0].size) == (1024, 3 * 1024 + 1024 + 512 + 512)
    assert dict(shard.counts) == {"skipped_macos": 3, "skipped_hidden": 1, "skipped_no_field": 1}


@pytest.mark.parametrize("second", ["a.jpg", "a.JPG"])
def test_duplicate_fields_refuse_the_sample(write: Callable[..., str], second: str) -> None:
    found, error = read(Shard(write([("a.jpg", b"1"), (second, b"2"), ("a.txt", b"3"), ("b.jpg", b"4")])))
    assert error is None
    assert found[0].problem is not None
    assert found[0].problem[0] == "duplicate_field"
    assert "512" in found[0].problem[1] and "1536" in found[0].problem[1]
    assert (found[0].fields, found[0].size) == ((), 3072)
    assert (found[1].key, found[1].index, found[1].problem) == ("b", 1, None)


def test_keys_are_case_sensitive_and_may_come_again(write: Callable[..., str]) -> None:
    shard = Shard(write([("A.a", b"1"), ("a.a", b"2"), ("A.b", b"3")]))
    assert [sample.key for sample in read(shard)[0]] == ["A", "a", "A"]
    assert shard.counts["key_seen_again"] == 1


def test_an_empty_shard_and_no_tar(write: Callable[..., str]) -> None:
    assert collect(write(b"")) == ([], "empty")
    assert collect(write(bytes(10240))) == ([], "")
    assert collect(write(b"<html>403 Forbidden</html>" * 100)) == ([], "not_a_tar")
    assert collect(write(b"")[:-1]) == ([], "not_found")


@pytest.mark.parametrize("place", [148, 124, 156])
def test_everything_complete_before_a_damaged_header(write: Callable[..., str], place: int) -> None:
    # headers stand at 0, 1024, 2048 ...: sample 2 begins at 4096
    for damaged, whole in ((4096, 2), (4096 + 1024, 2), (4096 + 2048, 3)):
        data = bytearray(archive(pairs(5)))
        data[damaged + place] ^= 1
        found, error = read(Shard(write(bytes(data))))
        assert [sample.index for sample in found] == list(range(whole))
        assert all(len(sample.fields) == 2 for sample in found)
        assert error is not None
        assert (error.kind, error.offset) == ("bad_checksum", damaged)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
@given(st.integers(0, 5 * 2048), st.sampled_from(["", ".gz", ".zst"]))
def test_everything_complete_before_a_cut(tmp_path_factory: pytest.TempPathFactory, length: int, pack: str) -> None:
    data = archive(pairs(5))[:length]
    path = tmp_path_factory.mktemp("cut") / f"a.tar{pack}"
    path.write_bytes({"": data, ".gz": gzip.compress(data), ".zst": zstandard.compress(data)}[pack])
    shard = Shard(str(path))
    found, error = read(shard)
    # the content of the second file of sample i ends at 2048 i + 1536 + 10
    whole = max(0, length - 1546 + 2048) // 2048
    complete = [sample for sample in found if len(sample.fields) == 2]
    assert len(complete) == whole
    # only a cut before the second header has begun looks like a sample of one file
    assert len(found) == whole or (len(found) == whole + 1 and 522 <= length - 2048 * whole <= 1024)
    assert error is not None or shard.counts["no_end_marker"] or length == 0


def test_sparse_files_refuse_their_sample_alone(write: Callable[..., str], tmp_path: Path) -> None:
    sparse = bytearray(archive([("sp.bin", b"x" * 512)], end=False))
    sparse[156:157] = b"S"
    sparse[148:156] = b"%06o\0 " % (sum(sparse[:148]) + 256 + sum(sparse[156:512]))
    found, error = read(Shard(write(archive(pairs(1), end=False) + bytes(sparse) + archive(pairs(1)))))
    assert error is None
    assert [sample.problem[0] if sample.problem else "" for sample in found] == ["", "sparse", ""]


def test_a_global_size_is_refused(write: Callable[..., str]) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"size": "1"}) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    assert collect(write(out.getvalue())) == ([], "unsupported")


def test_too_large_members_refuse_their_sample(write: Callable[..., str]) -> None:
    shard = Shard(write([("a.jpg", bytes(3_000_000)), ("a.txt", b"a"), ("b.txt", b"b")]), max_member_bytes=2_000_000)
    found, error = read(shard)
    assert error is None
    assert [sample.problem[0] if sample.problem else "" for sample in found] == ["too_large", ""]


MIXED: Files = [
    ("a.jpg", b"1" * 3000), ("a.txt", b"2"), ("b.txt", b""), (".hidden", b"h"), ("c.jpg", b"x"), ("c.JPG", b"y"),
    ("d" * 120 + ".txt", b"long"), ("e.mp4", bytes(1_100_000)), ("e.txt", b"caption"), ("f.txt", b"f"), ("g.txt", b"g"),
]  # fmt: skip


def packed(data: bytes, kind: str) -> bytes:
    return {"tar": data, "tar.gz": gzip.compress(data, 1), "tar.zst": zstandard.compress(data)}[kind]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bytes, str], str]]:
    """Puts bytes somewhere, and says where."""
    files = fsspec.filesystem("memory")

    def put(data: bytes, name: str) -> str:
        if request.param == "local":
            (tmp_path / name).write_bytes(data)
            return str(tmp_path / name)
        files.pipe_file(f"/store/{name}", data)
        return f"memory://store/{name}"

    yield put
    if files.exists("/store"):
        files.rm("/store", recursive=True)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.zst"])
@pytest.mark.parametrize("name", ["a.{kind}", "a.tar"])
def test_wherever_reading_starts(store: Callable[[bytes, str], str], kind: str, name: str) -> None:
    data = archive(MIXED, form=tarfile.GNU_FORMAT, end=False) + bytes(1024) + archive(MIXED, form=tarfile.PAX_FORMAT)
    url = store(packed(data, kind), name.format(kind=kind))
    whole, error = read(Shard(url))
    assert error is None
    assert len(whole) == 14
    for sample in whole:
        assert read(Shard(url), index=sample.index, offset=sample.offset) == (whole[sample.index :], None)
        assert Shard(url).sample_at(sample.index, sample.offset, sample.size) == sample
    assert read(Shard(url), index=14, offset=whole[-1].end) == ([], None)
    for parts in (2, 3, 20):
        for part in range(parts):
            assert read(Shard(url), part=part, parts=parts) == (whole[part::parts], None)
            for start in (1, 5, 13):
                expected = [sample for sample in whole[start:] if sample.index % parts == part]
                assert read(Shard(url), part=part, parts=parts, index=start, offset=whole[start].offset) == (expected, None)
    Shard(url).close()


def test_the_parts_of_a_shard_parse_it_once(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(pairs(200, size=2000))
    read_before = LocalStream.read
    reads: list[int] = []

    def counted(self: LocalStream, n: int) -> bytes:
        data = read_before(self, n)
        reads.append(len(data))
        return data

    monkeypatch.setattr(LocalStream, "read", counted)
    monkeypatch.setattr(sample_table, "_tables", type(sample_table._tables)())
    turns = [Shard(url).samples(part=part, parts=8) for part in range(8)]
    found = [next(turn) for _ in range(25) for turn in turns]
    assert [sample.index for sample in found] == list(range(200))
    # once for the table and once for the samples, not once for each of the eight parts
    assert sum(reads) < 2.5 * Path(url).stat().st_size


def test_parts_share_a_damage(write: Callable[..., str]) -> None:
    data = bytearray(archive(pairs(9)))
    data[2048 * 6 + 148] ^= 1
    url = write(bytes(data))
    for part in range(4):
        found, error = read(Shard(url), part=part, parts=4)
        assert [sample.index for sample in found] == [index for index in range(6) if index % 4 == part]
        assert error is not None
        assert (error.kind, error.offset) == ("bad_checksum", 2048 * 6)


def test_parts_in_threads(write: Callable[..., str]) -> None:
    url = write(pairs(400))
    shard = Shard(url)
    whole, _ = read(shard)
    found: dict[int, list[RawSample]] = {}
    threads = [
        threading.Thread(target=lambda part=part: found.update({part: list(shard.samples(part=part, parts=4))})) for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {part: whole[part::4] for part in range(4)} == found


def test_a_shard_that_changed_is_told(store: Callable[[bytes, str], str]) -> None:
    url = store(archive(pairs(5)), "a.tar")
    sample = read(Shard(url))[0][3]
    Shard(url).close()
    for content in (archive(pairs(5, size=600)), archive(pairs(2), end=False), b"junk" * 10_000):
        store(content, "a.tar")
        with pytest.raises(ShardError) as raised:
            Shard(url).sample_at(sample.index, sample.offset, sample.size)
        assert raised.value.kind == "changed"
        Shard(url).close()


def test_a_packed_shard_is_unpacked_once_for_ascending_samples(store: Callable[[bytes, str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = store(gzip.compress(archive(pairs(50))), "a.tar.gz")
    whole, _ = read(Shard(url))
    opened: list[str] = []

    def counted(url: str, offset: int = 0, **given: Any) -> object:
        opened.append(url)
        return open_stream(url, offset, **given)

    monkeypatch.setattr(shards_module, "open_stream", counted)
    assert [Shard(url).sample_at(sample.index, sample.offset, sample.size) for sample in whole[3::7]] == whole[3::7]
    assert len(opened) == 1
    Shard(url).close()


def test_gzip_damage_comes_after_the_samples(write: Callable[..., str]) -> None:
    data = bytearray(gzip.compress(archive(pairs(5))))
    data[-8] ^= 1
    found, error = read(Shard(write(bytes(data), "a.tar.gz")))
    assert len(found) == 5
    assert error is not None
    assert error.kind == "gzip_crc"


def test_what_webdataset_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "w.tar")
    with TarWriter(path) as sink:
        for number in range(20):
            sink.write({"__key__": f"{number:03d}", "txt": f"caption {number}", "bin": bytes([number]) * number * 300})
    found, error = read(Shard(path))
    assert error is None
    with open(path, "rb") as file:
        stream: Any = file
        members = [{**member, "__url__": path} for member in tar_file_iterator(stream)]
    theirs = [{name: sample[name] for name in ("__key__", "txt", "bin")} for sample in group_by_keys(members)]
    assert [{"__key__": sample.key, **{file.name: file.data for file in sample.fields}} for sample in found] == theirs


def test_bad_arguments() -> None:
    refused: list[dict[str, Any]] = [{"part": 2, "parts": 2}, {"part": -1}, {"index": -1}, {"offset": -1}]
    for bad in refused:
        with pytest.raises(ValueError, match="part"):
            next(Shard("a.tar").samples(**bad))


def test_a_shard_that_is_not_there_is_a_shard_error(tmp_path: Path) -> None:
    for name in ("none", "none.tar", "none.tar.gz"):
        shard = Shard(str(tmp_path / name))
        for parts in (1, 2):
            found, error = read(shard, parts=parts)
            assert (found, error and error.kind) == ([], "not_found")
        with pytest.raises(ShardError, match="not_found"):
            shard.sample_at(0, 0, 1024)
