"""Local files and what fsspec opens, URLs and their credentials, and the patience of a retry policy."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.storage import (
    LocalStream,
    StorageError,
    links_of,
    local_path,
    open_stream,
    public_text,
    public_url,
    retry_after_s,
    scheme_of,
)

BODY = bytes(range(256)) * 1000
QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, budget=12, timeout_s=5.0, max_retry_after_s=0.01)


def read_all(url: str, offset: int = 0, n: int = 50_000, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, offset, policy=policy) as stream:
        return b"".join(iter(lambda: stream.read(n), b""))


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files: MemoryFileSystem = fsspec.filesystem("memory")
    files.pipe_file("/shards/a.tar", BODY)
    yield files
    files.rm("/shards", recursive=True)


def test_fsspec_reads_in_ranges(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 100_000)
    assert read_all("memory://shards/a.tar") == BODY
    assert read_all("memory://shards/a.tar", 123_456, n=7_000) == BODY[123_456:]
    with open_stream("memory://shards/a.tar", len(BODY) + 1, policy=QUICK) as stream, pytest.raises(StorageError, match="changed"):
        stream.read(1)


def test_fsspec_goes_on_after_faults_and_short_reads(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.cat_file
    calls: list[tuple[int, int]] = []

    def every_other_call_fails(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        calls.append((start, end))
        if len(calls) % 2:
            raise TimeoutError("https://key:hunter2@host/x?sig=abc did not answer")
        return bytes(whole(self, path, start=start, end=end)[:90_000])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", every_other_call_fails)
    assert read_all("memory://shards/a.tar") == BODY
    assert [start for start, _ in calls] == [0, 0, 90_000, 90_000, 180_000, 180_000]


def test_fsspec_an_object_that_changes_ends_it(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.cat_file

    def changing(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        if start:
            self.pipe_file(path, BODY[:-1])
            raise ConnectionResetError("gone")
        return bytes(whole(self, path, start=start, end=end)[:1000])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", changing)
    with open_stream("memory://shards/a.tar", policy=QUICK) as stream:
        assert stream.read(2000) == BODY[:1000]
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 1000)


def test_fsspec_missing_and_unknown() -> None:
    with pytest.raises(StorageError) as raised:
        read_all("memory://shards/none.tar")
    assert raised.value.kind == "not_found"
    with pytest.raises(ValueError, match="nosuch"):
        open_stream("nosuch://bucket/a.tar")


def test_local_files(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    assert read_all(str(path), 10) == BODY[10:]
    assert read_all(path.as_uri()) == BODY
    with open_stream(str(path)) as stream:
        assert isinstance(stream, LocalStream)
        assert stream.read(10) == BODY[:10]
        assert stream.back(4)
        assert stream.read(4) == BODY[6:10]
        assert stream.skip(10**12) == len(BODY) - 10
        assert stream.read(1) == b""


def test_short_reads_of_a_local_file_are_looped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems over a network, and calls past 2 GiB, give them."""
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, n, offset: whole(file, min(n, 999), offset))
    with open_stream(str(path)) as stream:
        assert stream.read(5000) == BODY[:5000]
        assert stream.position == 5000
        assert stream.read(len(BODY)) == BODY[5000:]


def test_a_local_file_that_shrinks_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(BODY)
    with open_stream(str(path)) as stream:
        assert stream.read(1000) == BODY[:1000]
        os.truncate(path, 5000)
        assert stream.read(len(BODY)) == BODY[1000:5000]
        assert stream.read(1) == b""


def test_local_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, kind in (("fifo", "refused"), ("none", "not_found"), (".", "refused")):
        with pytest.raises(StorageError) as raised:
            open_stream(str(tmp_path / name))
        assert raised.value.kind == kind


@pytest.mark.parametrize(
    "url", ["pipe:cat x.tar", "pipe://cat", "PIPE:curl x", "simplecache::pipe:cat x", "exec:ls", "sh:ls", "reference://x.json"]
)
def test_nothing_is_ever_run(url: str) -> None:
    with pytest.raises(ValueError, match="is refused"):
        open_stream(url)
    with pytest.raises(ValueError, match="is refused") as raised:
        open_stream(f"{url} https://u:hunter2@host/x?token=t0k3n")
    assert "hunter2" not in str(raised.value) and "t0k3n" not in str(raised.value)


def test_schemes_and_paths() -> None:
    assert scheme_of("/data/a:b.tar") == ""
    assert scheme_of("S3://bucket/a.tar") == "s3"
    assert links_of("simplecache::tar://x::http://[fe80::1%eth0]:8/[a::b]") == ["simplecache", "tar://x", "http://[fe80::1%eth0]:8/[a::b]"]
    assert local_path("file:///data/a%20b.tar") == "/data/a b.tar"
    assert local_path("data/{0}.tar") == "data/{0}.tar"
    assert local_path("s3://bucket/a.tar") is None
    with pytest.raises(ValueError, match="names a path on this machine"):
        local_path("file://server/data/a.tar")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/data/a.tar?x", "/data/a.tar?x"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("https://u:p@host:8/a.tar", "https://host:8/a.tar"),
        ("https://host/a.tar?file=a.tar&part=3", "https://host/a.tar?file=a.tar&part=3"),
        ("https://host/a.tar?X-Amz-Credential=k&X-Amz-Signature=s&v=1", "https://host/a.tar?v=1"),
        ("https://acct.blob/a.tar?sv=2020&se=1&sp=r&sig=abc", "https://acct.blob/a.tar"),
        ("https://host/a.tar?access_token=abc#frag", "https://host/a.tar"),
        ("simplecache::https://u:p@host/a.tar", "simplecache::https://host/a.tar"),
        ("https://d1.cloudfront.net/a.tar?Expires=1&Policy=p&Signature=s&Key-Pair-Id=k&part=3", "https://d1.cloudfront.net/a.tar?part=3"),
        ("https://host/a.tar?password=a&client_secret=b&AUTH=c&my_creds=d&policy=e&api_key=f&expires=9&n=1", "https://host/a.tar?n=1"),
        ("http://u:p@[2001:db8::1]:80/a.tar?sig=x", "http://[2001:db8::1]:80/a.tar"),
        ("simplecache::http://u:p@[::1]/a.tar", "simplecache::http://[::1]/a.tar"),
        ("pipe:curl -s https://u:p@host/a.tar?token=x | cat", "pipe:curl -s https://host/a.tar | cat"),
        ("simplecache::pipe:curl https://u:p@host/a.tar", "simplecache::pipe:curl https://host/a.tar"),
    ],
)
def test_credentials_do_not_show(url: str, shown: str) -> None:
    assert public_url(url) == shown
    assert public_text(f"GET {url}: failed") == f"GET {shown}: failed"


@pytest.mark.parametrize("url", ["jupyter://x/a.tar", "generic://x/a.tar", "dbfs://x/a.tar"])
def test_a_store_that_needs_more_than_a_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"{url.partition(':')[0]}://x/a.tar.*missing"):
        open_stream(url)


def test_retry_after() -> None:
    assert retry_after_s("7") == 7
    assert retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now_s=40.0) == 60
    assert retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT") == 0
    assert retry_after_s(None) == retry_after_s("soon") == 0


def test_waits_grow_within_their_bounds() -> None:
    policy = RetryPolicy(base_delay_s=1.0, max_delay_s=5.0, max_retry_after_s=20.0)
    for failures, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (100, 5.0)):
        assert most / 2 <= policy.delay_s(failures) <= most
    # Thousands of readers that lost the same server do not come back at the same moment.
    waits = [policy.delay_s(1) for _ in range(1000)]
    assert len(set(waits)) > 900 and min(waits) < 0.6 and max(waits) > 0.9
    assert policy.delay_s(1, asked_s=7.0) == 7.0
    assert policy.delay_s(1, asked_s=1000.0) == 20.0


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"budget": 0}, {"base_delay_s": -1.0}, {"timeout_s": 0.0}, {"max_delay_s": float("nan")}])
def test_a_policy_is_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RetryPolicy(**bad)  # type: ignore[arg-type]
