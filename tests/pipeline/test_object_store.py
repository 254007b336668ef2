"""s3:// and gs:// by obstore, against a server that fails in every way, and when they are left to fsspec. It is an extra of this package,
so that these tests are skipped where it is not installed: `pip install 'treadle[obstore]'`.
"""

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline import object_store
from treadle.pipeline.fsspec_source import FsspecSource
from treadle.pipeline.object_store import ObjectStoreSource
from treadle.pipeline.retry import Contacts, RetryPolicy
from treadle.pipeline.shards import Shard
from treadle.pipeline.storage import RemoteStream, StorageError, open_stream

pytest.importorskip("obstore", reason="it is an extra: treadle[obstore] is not installed")

QUICK = RetryPolicy(attempts=4, base_delay_s=0.001, max_delay_s=0.002, timeout_s=20.0)
SECRETS = ("hunter2", "t0k3n")


@pytest.fixture(autouse=True)
def place(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An endpoint, credentials and an object."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS[1])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 100_000)
    server.files["/shards/a%20b/%C3%A4.tar"] = server.body
    yield "s3://shards/a b/ä.tar"
    object_store._store.cache_clear()


def source_of(url: str) -> object:
    with open_stream(url, policy=QUICK) as stream:
        assert isinstance(stream, RemoteStream)
        return stream._source


def read_all(url: str, offset: int = 0, n: int = 30_000, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, offset, policy=policy) as stream:
        assert isinstance(stream, RemoteStream) and isinstance(stream._source, ObjectStoreSource)
        return b"".join(iter(lambda: stream.read(n), b""))


@pytest.mark.parametrize("n", [1, 30_000, 1 << 30])
def test_an_object_is_read_by_growing_ranges_and_nothing_else(server: Any, place: str, n: int) -> None:
    server.body = server.body[: 9_000 if n == 1 else None]
    server.files["/shards/a%20b/%C3%A4.tar"] = server.body
    assert read_all(place, n=n) == server.body
    asked = ["bytes=0-99999", f"bytes=100000-{len(server.body) - 1}"]
    assert [span for _, span in server.asked] == asked[: 1 if n == 1 else 2]
    assert {path for path, _ in server.asked} == {"/shards/a%20b/%C3%A4.tar"}
    assert {headers["user-agent"] for headers in server.headers} == {"treadle"}


def test_no_more_is_asked_for_than_is_wanted(server: Any, place: str) -> None:
    with open_stream(place, 1000, length=500, policy=QUICK) as stream:
        assert stream.read(500) == server.body[1000:1500]
        assert isinstance(stream, RemoteStream)
        stream.aim(70_000, 10)
        assert stream.read(10) == server.body[70_000:70_010]
        assert (stream.size, stream.version) == (len(server.body), '"one"')
    assert [span for _, span in server.asked] == ["bytes=1000-1499", "bytes=70000-70009"]


def test_a_short_gap_is_read_through(server: Any, place: str) -> None:
    with open_stream(place, policy=QUICK) as stream:
        assert stream.read(100) == server.body[:100]
        stream.skip(50_000)
        assert stream.read(100) == server.body[50_100:50_200]
    assert len(server.asked) == 1


def test_it_goes_on_where_it_broke(server: Any, place: str) -> None:
    server.faults = [
        lambda handler: handler.answer(503, body=b"<Error><Code>SlowDown</Code></Error>"),
        lambda handler: handler.serve(cut=60_000),
        lambda handler: handler.serve(cut=0),
        lambda handler: handler.answer(429),
        lambda handler: handler.serve(),
        lambda handler: handler.answer(500),
    ]
    assert read_all(place) == server.body
    assert not server.faults


def test_what_contradicts_itself_is_a_fault(server: Any, place: str) -> None:
    def ignored(handler: Any) -> None:
        server.ranges = False
        handler.serve()
        server.ranges = True

    def elsewhere(handler: Any) -> None:
        handler.answer(206, {"Content-Range": "bytes 7-9/256000"}, b"123")

    server.faults = [ignored, elsewhere, lambda handler: handler.answer(206, {}, b"123")]
    assert read_all(place) == server.body


def test_it_is_given_up_when_the_attempts_are_spent(server: Any, place: str) -> None:
    server.always = lambda handler: handler.answer(503)
    with pytest.raises(StorageError, match=r"503 Service Unavailable.*given up after 4 faults"):
        read_all(place)


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [
        (404, "not_found", "no such object"),
        (403, "forbidden", "403"),
        (401, "forbidden", "401"),
        (400, "unreadable", "400"),
        (301, "unreadable", "AWS_REGION"),
    ],
)
def test_some_answers_are_final_and_say_nothing_of_credentials(
    server: Any, place: str, code: int, kind: str, match: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.always = lambda handler: handler.answer(code, body=b"<Error><Code>No</Code></Error>")
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError, match=match) as raised:
        read_all(place)
    assert raised.value.kind == kind
    assert len(server.asked) == 1
    told = f"{raised.value!r} {caplog.text}"
    assert not [secret for secret in (*SECRETS, "Signature=") if secret in told]


@pytest.mark.parametrize("what", ["etag", "size"])
def test_an_object_that_changes_ends_it(server: Any, place: str, what: str) -> None:
    with open_stream(place, policy=QUICK) as stream:
        assert stream.read(100_000) == server.body[:100_000]
        if what == "etag":
            server.etag = '"two"'
        else:
            server.body += b"more"
            server.files["/shards/a%20b/%C3%A4.tar"] = server.body
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 100_000)


def test_ends(server: Any, place: str) -> None:
    size = len(server.body)
    assert read_all(place, size - 5) == server.body[-5:]
    assert read_all(place, size) == b""
    with pytest.raises(StorageError, match=f"has {size} bytes, byte {size + 1}"):
        read_all(place, size + 1)
    server.files["/shards/empty"] = b""
    assert read_all("s3://shards/empty") == b""


def test_a_blocked_read_ends_when_told_to(server: Any, place: str) -> None:
    closing, answered = threading.Event(), threading.Event()

    def silent(handler: Any) -> None:
        closing.set()
        answered.wait(20)

    server.always = silent
    with open_stream(place, policy=QUICK, closing=closing) as stream, pytest.raises(StorageError) as raised:
        stream.read(1)
    answered.set()
    assert raised.value.kind == "closed"


def test_silence_is_a_fault(server: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PATIENT_BYTES_PER_S", 1 << 30)
    over = threading.Event()
    server.faults = [lambda handler: over.wait(20)]
    assert read_all(place, policy=RetryPolicy(attempts=2, base_delay_s=0.001, timeout_s=0.2)) == server.body
    over.set()


def test_an_endpoint_that_nobody_reaches_is_given_up_soon(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "contacts", Contacts())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    policy = RetryPolicy(attempts=10_000, budget=10_000, base_delay_s=0.01, max_delay_s=0.01, first_contact_s=0.1)
    with pytest.raises(StorageError, match=r"Connection refused.*nothing there has ever answered.*first_contact_s"):
        read_all(place, policy=policy)


def test_a_version_and_a_shard(server: Any, tars: Any, tmp_path: Path) -> None:
    tars.write_texts(tmp_path, [40])
    server.files["/shards/0.tar?versionId=7"] = (tmp_path / "000.tar").read_bytes()
    samples = list(Shard(str(tmp_path / "000.tar")).samples())
    shard = Shard("s3://shards/0.tar?versionId=7", policy=QUICK)
    assert list(shard.samples()) == samples
    assert shard.sample_at(9, samples[9].offset, samples[9].size) == samples[9]
    shard.close()


def test_google(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")

    def found(handler: Any) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        piece = server.body[first : last + 1]
        span = f"bytes {first}-{first + len(piece) - 1}/{len(server.body)}"
        modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        handler.answer(206, {"Content-Range": span, "ETag": '"one"', "Last-Modified": modified}, piece)

    server.faults = [lambda handler: handler.answer(503), found, lambda handler: handler.answer(500), found, found]
    assert read_all("gs://shards/a.tar", 7) == server.body[7:]
    assert [span for _, span in server.asked] == [
        "bytes=7-100006", "bytes=7-100006", "bytes=100007-255999", "bytes=100007-200006", "bytes=200007-255999",
    ]  # fmt: skip
    server.always = lambda handler: handler.answer(404)
    with pytest.raises(StorageError, match="not_found"):
        read_all("gs://shards/a.tar")


def test_credentials_of_a_profile(server: Any, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore", reason="it finds what the AWS tools are configured with, and comes with treadle[s3]")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile mine]\nregion = ap-south-2\nendpoint_url = http://127.0.0.1:{server.port}\n")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = AKIAMINE\naws_secret_access_key = hunter2\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert read_all(place) == server.body
    assert server.headers
    assert all(re.search("Credential=AKIAMINE/.*/ap-south-2/s3/", headers["authorization"]) for headers in server.headers)


@pytest.mark.parametrize("url", ["s3://b/a//b.tar", "s3://b/../b.tar", "s3://b/a.tar/", "s3://b/a\tb", "simplecache::s3://b/a.tar"])
def test_odd_urls_are_left_to_fsspec(url: str) -> None:
    assert object_store.object_store(url, "s3") is None


def test_what_fsspec_is_configured_for_is_left_to_it(server: Any, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsspec.config import conf

    assert isinstance(source_of(place), ObjectStoreSource)
    with monkeypatch.context() as patch:
        patch.setitem(conf, "s3", {"anon": True})
        assert isinstance(source_of(place), FsspecSource)
    with monkeypatch.context() as patch:
        (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        assert isinstance(source_of(place), FsspecSource)
    with monkeypatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
        assert object_store.object_store("gs://shards/a.tar", "gs") is None
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert isinstance(source_of(place), FsspecSource)
    assert not server.asked


FORKED = """
import os, sys
from treadle.pipeline.storage import open_stream
def read():
    with open_stream("s3://shards/a b/ä.tar") as stream:
        return type(stream._source).__name__, len(stream.read(1 << 30))
print(*read(), flush=True)
child = os.fork()
if not child:
    print(*read(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(*read(), flush=True)
"""


def test_a_forked_process_reads_by_fsspec(server: Any) -> None:
    pytest.importorskip("s3fs", reason="what reads in a forked process is an extra: treadle[s3]")
    server.files["/shards/a%20b/%C3%A4.tar"] = server.body
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=False)
    size = len(server.body)
    assert done.stdout.split("\n")[:3] == [f"{name} {size}" for name in ("ObjectStoreSource", "FsspecSource", "ObjectStoreSource")], (
        done.stderr
    )


def test_an_endpoint_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no://[where")
    with pytest.raises((ValueError, StorageError)) as raised:
        read_all(place)
    assert SECRETS[0] not in str(raised.value)
