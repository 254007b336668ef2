"""One safetensors file: whole or not at all, equal to what the published reader sees, every way of being bad refused by name."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.model.storage_errors import (
    DamagedFileError,
    MissingFileError,
    NewerFormatError,
    StorageFileError,
    TruncatedFileError,
    UnwritableFileError,
    WrongFormatError,
    require_format,
)
from treadle.model.storage_file import read_tensors, tensors_from_bytes, tensors_to_bytes, write_tensors

TENSORS: dict[str, Tensor] = {
    "z": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "bf16": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "odd": torch.arange(3, dtype=torch.uint8),
    "f64": torch.tensor([torch.pi], dtype=torch.float64),
}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_round_trip_and_the_published_reader_agree(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    metadata = {"format": "x", "text": 'quotes " and \u20ac "treadle.crc32":"00000000"'}
    write_tensors(path, TENSORS, metadata)
    tensors, read = read_tensors(path)
    assert same(tensors, TENSORS) and read == metadata
    assert same(load_file(path), TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata()["text"] == metadata["text"]
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_plain_safetensors_file_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a", metadata={"k": "v"})
    tensors, metadata = read_tensors(tmp_path / "a")
    assert same(tensors, TENSORS) and metadata == {"k": "v"}


def test_numpy_arrays_views_and_shared_storage(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    frozen = np.arange(4, dtype=np.uint64)
    frozen.setflags(write=False)
    write_tensors(tmp_path / "a", {"t": base.T, "base": base, "u": frozen, "big": np.array([1, 2], dtype=">i4")}, {})
    tensors, _ = read_tensors(tmp_path / "a")
    assert torch.equal(tensors["t"], base.T) and torch.equal(tensors["base"], base)
    assert tensors["u"].dtype == torch.uint64 and tensors["u"].tolist() == [0, 1, 2, 3]
    assert tensors["big"].tolist() == [1, 2]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", TENSORS, {"a": "1", "b": "2"})
    write_tensors(tmp_path / "b", dict(reversed(TENSORS.items())), {"b": "2", "a": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_cut_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", TENSORS, {})
    whole = (tmp_path / "a").read_bytes()
    bad = tmp_path / "bad"
    for size in range(len(whole)):
        bad.write_bytes(whole[:size])
        with pytest.raises(TruncatedFileError, match="bad: "):
            read_tensors(bad)


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"w": torch.arange(5.0)}, {"format": "x", "format_version": "1"})
    whole = (tmp_path / "a").read_bytes()
    bad = tmp_path / "bad"
    for at in range(len(whole)):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        with pytest.raises(StorageFileError):
            read_tensors(bad, kind="x", version=1)


def test_what_was_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensors(path, TENSORS, {"format": "x", "format_version": "1"})
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    for name in ("z", "bf16"):
        edited = {**TENSORS, name: TENSORS[name] + 1}
        # The metadata is carried over, as an editor of weights would.
        save_file(edited, path, metadata=metadata)
        with pytest.raises(DamagedFileError, match="it was changed"):
            read_tensors(path)
    write_tensors(path, TENSORS, {})
    whole = bytearray(path.read_bytes())
    at = bytes(whole).index(TENSORS["bf16"].view(torch.uint8).numpy().tobytes())
    whole[at] ^= 1
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DamagedFileError, match=r"does not match its checksum in bf16, odd; use another copy"):
        read_tensors(path)


def test_a_file_that_another_program_rewrote_is_no_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_file(TENSORS, path, metadata={"format": "x", "format_version": "1"})
    assert same(read_tensors(path)[0], TENSORS)
    with pytest.raises(DamagedFileError, match="lacks its checksums"):
        read_tensors(path, kind="x", version=1)
    # A newer format may check itself otherwise: that it is newer is told first.
    save_file(TENSORS, path, metadata={"format": "x", "format_version": "2"})
    with pytest.raises(NewerFormatError, match="update treadle"):
        read_tensors(path, kind="x", version=1)
    write_tensors(path, TENSORS, {"format": "x", "format_version": "1"})
    with pytest.raises(WrongFormatError, match="holds x: a y is needed"):
        read_tensors(path, kind="y", version=1)


def test_bytes_for_another_process() -> None:
    data = tensors_to_bytes(TENSORS, {"format": "x", "format_version": "1", "k": "v"})
    tensors, metadata = tensors_from_bytes("rank 1", data, kind="x", version=1)
    assert same(tensors, TENSORS) and metadata["k"] == "v"
    with pytest.raises(TruncatedFileError, match="rank 1"):
        tensors_from_bytes("rank 1", data[:-1], kind="x", version=1)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    for data in (noise, len(noise).to_bytes(8, "little") + noise):
        path.write_bytes(data)
        with pytest.raises(StorageFileError):
            read_tensors(path)


def entry(**fields: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (entry(dtype="F99"), "dtype 'F99' is not one of"),
        (entry(dtype=None), "dtype 'None' is not one of"),
        (entry(shape=[10**15]), "data_offsets 0 to 8 do not hold F32 of shape"),
        (entry(shape=[2**40, 2**40, 2**40]), "larger than any file"),
        (entry(shape=[0, 2**61, 2**61], data_offsets=[0, 0]), "larger than any file"),
        (entry(shape=[-2]), "shape .* is no list of 0 to 64 sizes"),
        (entry(shape=[True, 2]), "shape .* is no list of 0 to 64 sizes"),
        (entry(shape="2"), "shape .* is no list of 0 to 64 sizes"),
        (entry(shape=[1] * 65 + [2]), "shape .* is no list of 0 to 64 sizes"),
        (entry(data_offsets=[8, 0]), "data_offsets 8 to 0 do not hold"),
        (entry(data_offsets=[4, 12]), r"w starts at byte \d+ of the file, not at \d+"),
        (entry(data_offsets=[0]), "data_offsets .* is no list of 2 to 2 sizes"),
        (entry() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, r"starts at byte \d+ of the file, not at \d+"),
        ({"w": 3}, "is no table"),
        ({"__metadata__": []}, "is no table"),
        (entry() | {"__metadata__": {"a": 1}}, "is not a table of strings"),
        (entry(shape=[1], data_offsets=[0, 4]), "4 bytes follow"),
    ],
)
def test_broken_tables_are_refused_before_memory_is_taken(tmp_path: Path, table: dict[str, object], message: str) -> None:
    header = json.dumps(table).encode()
    path = tmp_path / "bad"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedFileError, match=message):
        read_tensors(path)


@pytest.mark.parametrize("header", [b"[]", b'{"a":1,"a":2}', b'{"a":' * 100_000, b"{" + b"9" * 5000, b'{"\xff":1}'])
def test_headers_that_are_no_object(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "bad").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedFileError, match="no safetensors file"):
        read_tensors(tmp_path / "bad")


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file; check the path"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(MissingFileError, match="no such file; check the path"):
        read_tensors(tmp_path / "no" / "folder")
    (tmp_path / "step-00000002.safetensors").touch()
    with pytest.raises(MissingFileError, match=r"no such file; its folder holds step-00000002\.safetensors"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(MissingFileError, match=r"no such file; a run keeps a best only where held-out samples score it; its folder holds"):
        read_tensors(tmp_path / "best.safetensors")
    with pytest.raises(StorageFileError, match="is a folder"):
        read_tensors(tmp_path)
    with pytest.raises(UnwritableFileError, match="is a folder"):
        write_tensors(tmp_path, {}, {})
    with pytest.raises(UnwritableFileError, match="there is no folder"):
        write_tensors(tmp_path / "none" / "a", {}, {})


def test_formats(tmp_path: Path) -> None:
    good = {"format": "record", "format_version": "2"}
    assert require_format("p", good, "record", 3) == 2
    with pytest.raises(NewerFormatError, match="format 2, this version reads up to 1: update treadle"):
        require_format("p", good, "record", 1)
    with pytest.raises(WrongFormatError, match="holds record: a checkpoint is needed"):
        require_format("p", good, "checkpoint", 1)
    with pytest.raises(WrongFormatError, match="no named kind"):
        require_format("p", {}, "checkpoint", 1)
    for text in ("", "-1", "1e3", "9" * 5000, "\u0663"):
        with pytest.raises(DamagedFileError, match="whole number"):
            require_format("p", {"format": "record", "format_version": text}, "record", 1)


def test_what_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'s' of type"):
        write_tensors(tmp_path / "a", {"s": np.array(["text"])}, {})
    with pytest.raises(ValueError, match="reserved"):
        write_tensors(tmp_path / "a", {}, {"treadle.crc32": "1"})
    assert os.listdir(tmp_path) == []


def test_a_stop_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensors(path, {"w": torch.zeros(1)}, {})
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, TENSORS, {}, on_tensor=stop)
    assert seen == [(1, 7), (2, 7), (3, 7)] and os.listdir(tmp_path) == ["a"]
    assert read_tensors(path)[0]["w"].item() == 0
    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, TENSORS, {})
        read_tensors(path, on_tensor=stop)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The file-size limit of the process stands for the full disk: both fail a write half way through."""
    path = tmp_path / "a"
    write_tensors(path, {"w": torch.zeros(1)}, {})
    script = """
import resource, signal, sys, torch
from treadle.model.storage_errors import UnwritableFileError
from treadle.model.storage_file import write_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_tensors(sys.argv[1], {str(i): torch.zeros(10_000) for i in range(9)}, {})
except UnwritableFileError as error:
    sys.exit(0 if "cannot be written" in str(error) else 1)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == 0
    assert os.listdir(tmp_path) == ["a"] and read_tensors(path)[0]["w"].item() == 0


WRITE_FOREVER = """
import itertools, sys, torch
from treadle.model.storage_file import write_tensors
for at in itertools.count(1):
    write_tensors(sys.argv[1], {str(i): torch.full((2000,), float(at)) for i in range(20)}, {"at": str(at)})
"""


def test_killed_writers_leave_a_whole_file_and_their_leftovers_go(tmp_path: Path) -> None:
    path = tmp_path / "a[1].safetensors"
    write_tensors(path, {str(i): torch.zeros(2000) for i in range(20)}, {"at": "0"})
    for turn in range(2):
        before = path.stat().st_mtime_ns
        writer = subprocess.Popen([sys.executable, "-P", "-c", WRITE_FOREVER, str(path)])
        while path.stat().st_mtime_ns == before:  # the writer lives and has written at least once
            assert writer.poll() is None
        for _ in range(turn * 1000):
            path.stat()
        writer.kill()
        writer.wait()
        tensors, metadata = read_tensors(path)
        assert all(torch.equal(t, torch.full((2000,), float(metadata["at"]))) for t in tensors.values())
    (tmp_path / ".a[1].safetensors.0123456789ab.tmp").write_bytes(b"left by a killed writer")
    write_tensors(path, {}, {})
    assert os.listdir(tmp_path) == [path.name]


def test_large_files_are_checked_beside_their_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    monkeypatch.setattr("treadle.model.storage_file.THREADED_BYTES", 1)
    path = tmp_path / "a"
    many = {f"t{i:02}": torch.arange(i, i + 999.0) for i in range(20)}
    write_tensors(path, many, {})
    whole = path.read_bytes()
    monkeypatch.setattr("treadle.model.storage_file.MAX_THREADS", 1)
    write_tensors(path, many, {})
    assert path.read_bytes() == whole
    monkeypatch.setattr("treadle.model.storage_file.MAX_THREADS", 3)
    seen: list[int] = []
    tensors, _ = read_tensors(path, on_tensor=lambda done, total: seen.append(done))
    assert same(tensors, many) and seen == list(range(1, 21))
    data = bytearray(whole)
    data[-1] ^= 1
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="in t18, t19; use another copy"):
        read_tensors(path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for call in (lambda: read_tensors(path, on_tensor=stop), lambda: write_tensors(path, many, {}, on_tensor=stop)):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert path.read_bytes() == data and threading.active_count() == threads


def test_a_pipe_is_no_file_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageFileError, match="is a pipe"):
        read_tensors(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("x" * 300, "file name too long", "File name too long"),
        ("a\0b", "the name holds a zero byte", "the name holds a zero byte"),
        ("new/", "is a folder: name a file in it", "there is no such file"),
        ("file/", "is a folder: name a file in it", "Not a directory"),
        ("file/a", "not a directory", "Not a directory"),
        ("folder", "is a folder: name a file in it", "is a folder: name the file in it"),
        ("pipe", "is a device, a pipe or a socket", "is a pipe, a device or a socket"),
        ("none/a", "there is no folder .*none", "there is no such file"),
        ("dangling", "there is no folder .*gone", "there is a link to gone/a, which is not there"),
        ("loop", "too many levels of symbolic links", "Too many levels of symbolic links"),
    ],
)
def test_a_name_that_takes_no_file_is_told_and_leaves_nothing(name: str, written: str, read: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("gone/a")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UnwritableFileError, match=f"cannot be written: {written}"):
        write_tensors(f"{tmp_path}/{name}", {}, {})
    with pytest.raises(StorageFileError, match=read):
        read_tensors(f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_text() == "old"


def test_a_name_of_nothing_is_told() -> None:
    with pytest.raises(UnwritableFileError, match="the path: cannot be written: the name is empty"):
        write_tensors("", {}, {})
    with pytest.raises(MissingFileError, match="the path: there is no such file"):
        read_tensors("")


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    write_tensors(tmp_path / "link", {}, {})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").is_file()


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/treadle")  # root writes through permissions; nobody creates files here
    else:
        tmp_path.chmod(0o500)
        target = tmp_path / "a"
    with pytest.raises(UnwritableFileError, match="cannot be written"):
        write_tensors(target, {}, {})
