"""gs:// and hf:// against servers of their HTTP APIs: listing, a stream's batches, single samples by range, faults, an object that
changes, one that is not there. Their libraries are extras of this package, so that these tests are skipped where they are not installed:
`pip install 'treadle[gcs,hf]'`.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from treadle.pipeline.retry import RetryPolicy
from treadle.pipeline.shards import Shard
from treadle.pipeline.sources import expand_urls
from treadle.pipeline.storage import StorageError, open_stream
from treadle.pipeline.stream import ShardStream

QUICK = RetryPolicy(attempts=4, base_delay_s=0.001, max_delay_s=0.002, timeout_s=20.0)


class Store(ThreadingHTTPServer):
    """Objects by name."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.objects: dict[str, bytes] = {}
        self.failures: list[int] = []
        """Statuses that the next requests for content are answered with."""
        self.ranges: list[str] = []
        """Ranges of content asked for."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave when they have what they want."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> Store:
        assert isinstance(self.server, Store)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise AssertionError

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer_content(self, data: bytes, headers: dict[str, str]) -> None:
        """The object, or the range of it that is asked for."""
        if self.store.failures and self.command == "GET":
            self.answer(self.store.failures.pop(0), b"busy")
            return
        asked = self.headers.get("Range")
        if asked is None or self.command == "HEAD":
            self.answer(200, data, {**headers, "Accept-Ranges": "bytes", "Content-Length": str(len(data))})
            return
        self.store.ranges.append(asked)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1 if last else None]
        self.answer(206, piece, {**headers, "Content-Range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"})


class GoogleHandler(Handler):
    """The JSON API of Google Cloud Storage, as far as reading goes: one bucket, `shards`."""

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/shards/o(?:/(.+))?", place.path)
        if match is None:
            self.answer_json({"error": {"code": 404, "message": "Not Found"}}, 404)
            return
        query = parse_qs(place.query)
        if match[1] is None:
            prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
            found = [name for name in sorted(self.store.objects) if name.startswith(prefix)]
            direct = [name for name in found if not delimiter or delimiter not in name[len(prefix) :]]
            deeper = {prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in set(found) - set(direct)}
            items = [self.metadata(name) for name in direct]
            self.answer_json({"kind": "storage#objects", "items": items, "prefixes": sorted(deeper)})
            return
        name = unquote(match[1])
        if name not in self.store.objects:
            self.answer_json({"error": {"code": 404, "message": f"No such object: shards/{name}"}}, 404)
        elif "media" in query.get("alt", []):
            self.answer_content(self.store.objects[name], {"Content-Type": "application/x-tar"})
        else:
            self.answer_json(self.metadata(name))

    def metadata(self, name: str) -> dict[str, Any]:
        data = self.store.objects[name]
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        return {
            "kind": "storage#object",
            "id": f"shards/{name}/1",
            "name": name,
            "bucket": "shards",
            "generation": "1",
            "contentType": "application/x-tar",
            "storageClass": "STANDARD",
            "size": str(len(data)),
            "md5Hash": base64.b64encode(md5).decode(),
            "etag": md5.hex(),
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }


class HubHandler(Handler):
    """The HTTP API of the Hugging Face Hub, as far as reading goes: one data set, `someone/shards`, with one revision."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        if not urlsplit(self.path).path.startswith("/api/datasets/someone/shards/paths-info/"):
            self.answer_json({"error": "Not Found"}, 404)
            return
        paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
        self.answer_json([self.entry(path) for path in paths if path in self.store.objects])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        resolved = re.fullmatch(r"/datasets/someone/shards/resolve/[^/]+/(.+)", path)
        if resolved is not None and resolved[1] in self.store.objects:
            data = self.store.objects[resolved[1]]
            etag = hashlib.sha1(data, usedforsecurity=False).hexdigest()
            self.answer_content(data, {"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40})
        elif re.fullmatch(r"/api/datasets/someone/shards(/revision/[^/]+)?", path):
            self.answer_json(
                {
                    "_id": "0",
                    "id": "someone/shards",
                    "sha": "0" * 40,
                    "private": False,
                    "downloads": 0,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in sorted(self.store.objects)],
                }
            )
        elif re.fullmatch(r"/api/datasets/someone/shards/tree/[^/]+/?", path):
            self.answer_json([self.entry(name) for name in sorted(self.store.objects)])
        elif resolved is not None:
            self.answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def entry(self, name: str) -> dict[str, Any]:
        data = self.store.objects[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest()}


def serve(handler: type[Handler]) -> Iterator[Store]:
    with Store(handler) as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield store
        store.shutdown()
        thread.join()


@pytest.fixture(name="google")
def google_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Store]]:
    # Or it asks Google itself, whatever the endpoint, which kind of bucket this is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcsfs = pytest.importorskip("gcsfs", reason="gs:// is an extra: treadle[gcs] is not installed")
    from fsspec.config import conf

    for store in serve(GoogleHandler):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.endpoint)
        monkeypatch.setitem(conf, "gs", {"token": "anon"})
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield "gs://shards", store
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(name="hub")
def hub_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, Store]]:
    hub = pytest.importorskip("huggingface_hub", reason="hf:// is an extra: treadle[hf] is not installed")
    from fsspec.config import conf

    for store in serve(HubHandler):
        monkeypatch.setitem(conf, "hf", {"endpoint": store.endpoint, "token": False})
        hub.HfFileSystem.clear_instance_cache()
        yield "hf://datasets/someone/shards", store
        hub.HfFileSystem.clear_instance_cache()


@pytest.fixture(name="place", params=["google", "hub"])
def place_fixture(request: pytest.FixtureRequest) -> tuple[str, Store]:
    """Where URLs begin, and the store behind it."""
    found: tuple[str, Store] = request.getfixturevalue(request.param)
    return found


def test_a_stream_of_its_shards_is_that_of_the_files(place: tuple[str, Store], tars: Any, tmp_path: Path) -> None:
    base, store = place
    pattern = tars.write_mixed(tmp_path / "mixed", [14, 0, 9])
    for path in sorted((tmp_path / "mixed").iterdir()):
        store.objects[path.name] = path.read_bytes()
    urls = expand_urls(f"{base}/*.tar")
    assert urls == [f"{base}/{name}" for name in sorted(store.objects)]
    options: dict[str, Any] = {"lanes": 4, "shuffle": 12, "epochs": 2, "window": 2, "threads": 2, "retry": QUICK}
    with ShardStream(pattern, tars.shape, **options) as stream:
        local = list(stream)
    with ShardStream(f"{base}/{{000..002}}.tar", tars.shape, **options) as stream:
        remote = list(stream)
    # Ids come from the URLs; all else is the same.
    assert [batch.used_bytes for batch in remote] == [batch.used_bytes for batch in local]
    for one, other in zip(remote, local, strict=True):
        assert [one.payload(segment).tobytes() for segment in range(one.segments)] == [
            other.payload(segment).tobytes() for segment in range(other.segments)
        ]
    middle = len(remote) // 2
    state = remote[middle].state
    assert state is not None
    with ShardStream(urls, tars.shape, **options) as again:
        again.load_state(state)
        assert list(again) == remote[middle + 1 :]


def test_a_sample_is_one_range(place: tuple[str, Store], tars: Any, tmp_path: Path) -> None:
    base, store = place
    tars.write_texts(tmp_path / "a", [30])
    store.objects["a.tar"] = (tmp_path / "a" / "000.tar").read_bytes()
    samples = list(Shard(f"{base}/a.tar", policy=QUICK).samples())
    assert samples == list(Shard(str(tmp_path / "a" / "000.tar")).samples())
    store.ranges.clear()
    chosen = samples[7]
    shard = Shard(f"{base}/a.tar", policy=QUICK)
    assert shard.sample_at(chosen.index, chosen.offset, chosen.size) == chosen
    shard.close()
    assert store.ranges == [f"bytes={chosen.offset}-{chosen.offset + chosen.size - 1}"]


def test_faults_are_tried_again(place: tuple[str, Store]) -> None:
    base, store = place
    store.objects["a.tar"] = bytes(range(256)) * 50
    store.failures[:] = [503]
    with open_stream(f"{base}/a.tar", 1000, policy=QUICK) as stream:
        assert stream.read(1 << 20) == store.objects["a.tar"][1000:]
    assert not store.failures


def test_what_is_not_there_is_said(place: tuple[str, Store]) -> None:
    base, _ = place
    with open_stream(f"{base}/missing.tar", policy=QUICK) as stream, pytest.raises(StorageError, match="not_found"):
        stream.read(1)


def test_an_object_that_changes_is_told(place: tuple[str, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    base, store = place
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 4096)
    store.objects["a.tar"] = bytes(20_000)
    with open_stream(f"{base}/a.tar", policy=QUICK) as stream:
        assert stream.read(4096) == bytes(4096)
        store.objects["a.tar"] = bytes([1]) * 20_000
        with pytest.raises(StorageError, match="changed"):
            stream.read(16_000)
