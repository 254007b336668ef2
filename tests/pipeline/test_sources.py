"""URL patterns, sources and manifests."""

import logging
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from treadle.pipeline.sources import (
    MAX_CHECKED,
    MAX_URLS_IN_MANIFEST,
    ListedUrls,
    Manifest,
    ManifestSource,
    Source,
    expand_braces,
    expand_urls,
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a{000..003}.tar", ["a000.tar", "a001.tar", "a002.tar", "a003.tar"]),
        ("a{8..11}.tar", ["a8.tar", "a9.tar", "a10.tar", "a11.tar"]),
        ("a{008..10}", ["a008", "a009", "a010"]),
        ("a{3..1}", ["a3", "a2", "a1"]),
        ("a{0..10..5}", ["a0", "a5", "a10"]),
        ("a{-1..1}", ["a-1", "a0", "a1"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{train,val}-{0..1}", ["train-0", "train-1", "val-0", "val-1"]),
        ("{x,{0..1}y,}", ["x", "0y", "1y", ""]),
        ("a{b}c", ["a{b}c"]),
        ("a{b{0..1}", ["a{b{0..1}"]),
        ("a}{0..1}", ["a}0", "a}1"]),
        ("{}", ["{}"]),
        ("{u}{0..1}", ["{u}0", "{u}1"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert list(expand_braces(pattern)) == expected


def test_a_range_is_bounded() -> None:
    with pytest.raises(ValueError, match="more than 16777216 shards"):
        expand_urls("http://host/{0..999999999999}.tar")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b10.tar", "b2.tar", "a.tar", "odd[1]{x}.tar", "sub/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_local_patterns(folder: Path) -> None:
    assert expand_urls(f"{folder}/b*.tar") == [f"{folder}/b10.tar", f"{folder}/b2.tar"]
    assert expand_urls(folder / "a.tar") == [f"{folder}/a.tar"]
    assert expand_urls([f"{folder}/b{{10,2}}.tar", folder / "a.tar"]) == [f"{folder}/{name}.tar" for name in ("b10", "b2", "a")]
    assert expand_urls(f"{folder}/{{a,b?}}.tar") == [f"{folder}/a.tar", f"{folder}/b2.tar"]
    assert expand_urls(f"{folder}/**/c.tar") == [f"{folder}/sub/c.tar"]
    assert expand_urls(f"{folder}/odd[1]{{x}}.tar") == [f"{folder}/odd[1]{{x}}.tar"]
    assert expand_urls((folder / "a.tar").as_uri()) == [f"{folder}/a.tar"]
    # a folder that a glob happens to match is no shard
    (folder / "z.tar").mkdir()
    assert expand_urls(f"{folder}/[az]*.tar") == [f"{folder}/a.tar"]


def test_what_cannot_be_expanded(folder: Path) -> None:
    for urls, message in (
        (str(folder), rf"is a folder: to read the shards in it write '{folder}/\*\.tar'"),
        (f"{folder}/x*.tar", "matches nothing"),
        (f"{folder}/n{{0..9}}.tar", r"10 of 10 shards are not there: .*n0.tar.*n4.tar', \.\.\."),
        ([], "urls is empty"),
        ([""], "empty string"),
        ([3], "holds 3"),
        ("pipe:cat a.tar", "is refused"),
        (["a.tar", "pipe:curl -s http://host/{0..3}.tar"], "is refused"),
        ("nosuch://bucket/a.tar", "nothing opens nosuch"),
        ("http://host/*.tar", "does not list its files"),
        ("http://", "names a host"),
        ("http://host:99999/a.tar", "a port from 1 to 65535"),
        ("https://[::1/a.tar", "names a host"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_urls(urls)  # type: ignore[arg-type]


def test_credentials_do_not_show() -> None:
    with pytest.raises(ValueError) as raised:
        expand_urls("nosuch://user:hunter2@host/a.tar?sig=s3cr3t")
    assert "hunter2" not in str(raised.value) and "s3cr3t" not in str(raised.value)


def test_remote_patterns() -> None:
    assert expand_urls("https://host/{0..1}.tar?v=1") == ["https://host/0.tar?v=1", "https://host/1.tar?v=1"]
    assert expand_urls("s3://bucket/{0..1}.tar") == ["s3://bucket/0.tar", "s3://bucket/1.tar"]
    files = fsspec.filesystem("memory")
    for name in ("b", "a"):
        files.pipe_file(f"/listed/{name}.tar", b"")
    try:
        assert expand_urls("memory://listed/*.tar") == ["memory:///listed/a.tar", "memory:///listed/b.tar"]
        with pytest.raises(ValueError, match="matches nothing"):
            expand_urls("memory://listed/*.zip")
    finally:
        files.rm("/listed", recursive=True)


def test_a_shard_named_twice_is_warned_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(expand_urls([f"{folder}/a.tar", f"{folder}/a.tar"])) == 2
    assert "more than once" in caplog.text


def test_sources(folder: Path) -> None:
    assert Source(f"{folder}/a.tar").expanded() == [f"{folder}/a.tar"]
    assert Source([f"{folder}/a.tar", f"{folder}/b*.tar"], 2.0).urls == (f"{folder}/a.tar", f"{folder}/b*.tar")
    assert Source("a") == Source("a", 1.0, False)
    for weight in (0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match="weight"):
            Source("a", weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeat"):
        Source("a", repeat=1)  # type: ignore[arg-type]


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "sources": (ManifestSource.of(["a.tar", "b.tar"], 2.0), ManifestSource.of(["c.tar"], repeat=True)),
        "seed": 7,
        "lanes": 64,
        "shuffle": 1000,
        "shuffle_bytes": 1 << 29,
        "epochs": None,
        "schema": {"fields": ["jpg"], "sides": {}},
        "shape": {"max_rows_per_device": 4},
        "options": {"window": 4},
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_survives_json() -> None:
    again = Manifest.from_dict(manifest().to_dict())
    assert again.digest == manifest().digest
    assert again.differences(manifest()) == []
    assert again.to_json() == manifest().to_json()
    with pytest.raises(ValueError, match="no stream manifest"):
        Manifest.from_dict({"seed": 1})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, ["seed: 7 is not 8"]),
        ({"epochs": 2}, ["epochs: None is not 2"]),
        ({"schema": {"fields": ["png"], "sides": {}}}, ["schema.fields: ['jpg'] is not ['png']"]),
        ({"shape": {"max_rows_per_device": 4, "extra": 1}}, ["shape.extra: None is not 1"]),
        (
            {"sources": (ManifestSource.of(["a.tar", "x.tar"], 2.0), ManifestSource.of(["c.tar"], repeat=True))},
            ["sources[0].urls[1]: 'b.tar' is not 'x.tar'"],
        ),
        (
            {"sources": (ManifestSource.of(["a.tar"], 2.0), ManifestSource.of(["c.tar"], repeat=True))},
            ["sources[0].urls: 2 shards are not 1"],
        ),
        ({"sources": (ManifestSource.of(["a.tar", "b.tar"], 2.0),)}, ["sources: 2 is not 1"]),
        (
            {"sources": (ManifestSource.of(["a.tar", "b.tar"]), ManifestSource.of(["c.tar"]))},
            ["sources[0].weight: 2.0 is not 1.0", "sources[1].repeat: True is not False"],
        ),
    ],
)
def test_differences_are_named(changes: dict[str, Any], told: list[str]) -> None:
    assert manifest().differences(manifest(**changes)) == told
    assert manifest().digest != manifest(**changes).digest


def test_many_shards_are_written_down_by_their_digest() -> None:
    names = [f"{number}.tar" for number in range(MAX_URLS_IN_MANIFEST + 1)]
    many = manifest(sources=(ManifestSource.of(names),))
    assert len(many.to_json()) < 1000
    again = Manifest.from_dict(many.to_dict())
    assert again.digest == many.digest
    assert many.differences(again) == []
    other = manifest(sources=(ManifestSource.of(names[::-1]),))
    assert again.differences(other) == ["sources[0].urls: these 1001 shards are not those, or not in that order"]


def test_credentials_are_no_part_of_a_manifest() -> None:
    one = ManifestSource.of(["https://u:hunter2@host/a.tar?X-Amz-Signature=s3cr3t&v=1"])
    other = ManifestSource.of(["https://host/a.tar?X-Amz-Signature=another&v=1"])
    assert one == other
    assert one.urls == ("https://host/a.tar?v=1",)


def test_a_long_list_is_looked_at_in_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    real = os.stat

    def stat(path: str, **rest: Any) -> os.stat_result:
        looked.append(str(path))
        if "{" in str(path):
            raise FileNotFoundError(path)
        return real(tmp_path / "shard-0000.tar")

    (tmp_path / "shard-0000.tar").write_bytes(b"")
    monkeypatch.setattr("treadle.pipeline.sources.os.stat", stat)
    urls = expand_urls(f"{tmp_path}/shard-{{0000..4999}}.tar")
    assert len(urls) == 5000
    asked = {path for path in looked if "shard-" in path}
    # The first and the last among them; besides them one look at whether the pattern itself is a file.
    assert len(asked) == MAX_CHECKED + 1 and {urls[0], urls[-1]} <= asked


def test_missing_shards_of_a_long_list_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1000 of 1000 looked at, of 2000 shards, are not there: .*s-0000\.tar"):
        expand_urls(f"{tmp_path}/s-{{0000..1999}}.tar")


def test_listed_shards_are_taken_as_they_are() -> None:
    listed = ListedUrls(["/nowhere/a.tar", "/nowhere/b.tar"])
    assert expand_urls(listed) == list(listed)
    assert Source(listed, weight=2.0).expanded() == list(listed)


def test_globs_leave_out_folders_and_hidden_files(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", ".hidden.tar"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.tar").mkdir()
    assert expand_urls(f"{tmp_path}/*.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert expand_urls(f"{tmp_path}/.h*.tar") == [f"{tmp_path}/.hidden.tar"]
