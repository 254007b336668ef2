"""Small tars of texts, PNGs and WAVs, what a stream makes of them byte for byte, and a web server that counts."""

import io
import random
import socket
import ssl
import tarfile
import threading
import wave
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.stream import ShardStream
from treadle.shape import AudioShape, BatchShape, ImageShape

Sample = tuple[str, Mapping[str, bytes]]
Make = Callable[..., ShardStream]


class Tars:
    """Writes shards, and reads batches back."""

    shape = BatchShape(
        max_rows_per_device=2,
        max_segments_per_device=24,
        max_columns_per_row=48,
        image=ImageShape(patch_side=8),
        audio=AudioShape(chunk_samples=64),
    )
    text_shape = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48)

    @staticmethod
    def png(rng: random.Random, width: int, height: int) -> bytes:
        pixels = np.frombuffer(rng.randbytes(width * height * 4), np.uint8).reshape(height, width, 4)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "png")
        return out.getvalue()

    @staticmethod
    def wav(rng: random.Random, samples: int) -> bytes:
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(rng.randbytes(2 * samples))
        return out.getvalue()

    @staticmethod
    def write_shard(path: Path, samples: Sequence[Sample]) -> None:
        with tarfile.open(path, "w") as tar:
            for key, fields in samples:
                for name, data in fields.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))

    @staticmethod
    def mixed_sample(rng: random.Random) -> dict[str, bytes]:
        fields = {"txt": rng.randbytes(rng.randint(1, 30))}
        kind = rng.randrange(3)
        if kind == 1:
            fields["png"] = Tars.png(rng, rng.randint(1, 24), rng.randint(1, 24))
        if kind == 2:
            fields["wav"] = Tars.wav(rng, rng.randint(1, 900))
        return fields

    @staticmethod
    def write_mixed(folder: Path, counts: Sequence[int], seed: int = 0) -> str:
        """Shards with these many samples; answers the pattern that names them."""
        rng = random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        for shard, count in enumerate(counts):
            Tars.write_shard(folder / f"{shard:03d}.tar", [(f"s{shard}/k{index}", Tars.mixed_sample(rng)) for index in range(count)])
        return str(folder / "*.tar")

    @staticmethod
    def write_texts(folder: Path, counts: Sequence[int], width: int = 9) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for shard, count in enumerate(counts):
            samples = [(f"k{index}", {"txt": f"{shard}.{index} ".encode().ljust(width + index % 5, b".")}) for index in range(count)]
            Tars.write_shard(folder / f"{shard:03d}.tar", samples)
        return str(folder / "*.tar")

    @staticmethod
    def texts(batch: PackedBatch) -> list[tuple[int, int]]:
        """(shard, index) of the texts of `write_texts` in a batch."""
        found = []
        for segment in range(batch.segments):
            shard, index = batch.payload(segment).tobytes().split(b" ")[0].split(b".")
            found.append((int(shard), int(index)))
        return found

    @staticmethod
    def snapshot(batch: PackedBatch) -> tuple[bytes, bytes]:
        assert batch.state is not None
        return batch.buffer[: batch.used_bytes].tobytes(), batch.state.to_bytes()

    @staticmethod
    def run(stream: ShardStream, most: int = 1 << 30) -> list[tuple[bytes, bytes]]:
        return [Tars.snapshot(batch) for _, batch in zip(range(most), stream, strict=False)]


class Site(ThreadingHTTPServer):
    """Serves `files` by ranges, and counts the bytes; while `down`, it answers 503."""

    daemon_threads = True
    # Of five, which is the default, the sixth tries again after a second.
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.files: dict[str, bytes] = {}
        self.down = False
        self.asked = threading.Semaphore(0)
        """Released by each request."""
        self.requests = 0
        self.connections = 0
        self.sent = 0

    def get_request(self) -> tuple[Any, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are closed leave in the middle of an answer."""

    def url(self, name: str, data: bytes) -> str:
        """Serves `data` from now on."""
        self.files[f"/{name}"] = data
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        site = self.server
        assert isinstance(site, Site)
        site.requests += 1
        site.asked.release()
        if site.down:
            self.send_error(503)
            return
        data = site.files[self.path]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1 if last else None]
        site.sent += len(piece)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)


@pytest.fixture(name="site")
def site_fixture() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        site.shutdown()
        thread.join()


class Faulty(ThreadingHTTPServer):
    """Serves `files`, and `body` in place of any other; each request is first offered to `faults`, which pops what is to happen instead."""

    daemon_threads = True
    # Of five, which is the default, the sixth tries again after a second.
    request_queue_size = 128

    def __init__(self, context: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), FaultyHandler)
        self.host = f"[{host}]" if ":" in host else host
        self.context = context
        self.body = bytes(range(256)) * 1000
        self.files: dict[str, bytes] = {}
        self.etag: str | None = '"one"'
        self.ranges = True
        self.faults: list[Callable[[FaultyHandler], None]] = []
        self.always: Callable[[FaultyHandler], None] | None = None
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each request."""
        self.headers: list[Mapping[str, str]] = []
        """Its headers."""

    def get_request(self) -> tuple[Any, Any]:
        connected, address = super().get_request()
        if self.context is not None:
            # The handshake is left to the thread of the connection.
            connected = self.context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        return connected, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave in mid-answer here; that is the point."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"{'http' if self.context is None else 'https'}://{self.host if self.context is None else 'localhost'}:{self.port}/shard.tar"


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> Faulty:
        assert isinstance(self.server, Faulty)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        owner = self.owner
        owner.asked.append((self.path, self.headers.get("Range")))
        owner.headers.append(dict(self.headers))
        if owner.always is not None:
            owner.always(self)
        elif owner.faults:
            owner.faults.pop(0)(self)
        else:
            self.serve()

    def serve(self, *, cut: int | None = None, lie: int = 0, etag: str | None = None) -> None:
        """Answers the range asked for; `cut` bytes of it only, with a length that is `lie` bytes too long."""
        body = self.owner.files.get(self.path, self.owner.body)
        start, stop = 0, len(body)
        asked = self.headers.get("Range")
        if asked and self.owner.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(body), int(last) + 1)
            if start >= len(body):
                self.answer(416, {"Content-Range": f"bytes */{len(body)}"})
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start + lie))
        found = etag or self.owner.etag
        if found:
            self.send_header("ETag", found)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body[start:stop][:cut])
        if cut is not None or lie:
            self.wfile.flush()
            self.close_connection = True

    def answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)


@contextmanager
def serve_faults(context: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> Generator[Faulty]:
    with Faulty(context, host, port) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture(name="serving")
def serving_fixture() -> Callable[..., Any]:
    """Serves for the length of a `with` block."""
    return serve_faults


@pytest.fixture(name="server")
def server_fixture() -> Iterator[Faulty]:
    with serve_faults() as found:
        yield found


@pytest.fixture(name="tars")
def tars_fixture() -> Tars:
    return Tars()


@pytest.fixture(name="mixed")
def mixed_fixture(tmp_path: Path) -> Make:
    """Makes streams over five shards of 45 samples in all."""
    pattern = Tars.write_mixed(tmp_path / "mixed", [14, 0, 9, 17, 5])

    def make(**changed: Any) -> ShardStream:
        options: dict[str, Any] = {"seed": 3, "lanes": 4, "shuffle": 12, "epochs": 2, "threads": 2, "window": 2, **changed}
        return ShardStream(pattern, Tars.shape, **options)

    return make
