"""Claim: reading S3 by obstore, where the extra `treadle[obstore]` is installed, brings at least 1.3 times the bytes/s of reading it by fsspec
and at least 5 times the samples/s, for 0.5 to 0.8 of the CPU time of whole shards and a fifth of that of samples.

Two quiet runs without and one with TLS: 1.4 to 1.5 times the bytes/s with no latency, 3 to 4 (2.6 with TLS) with 20 ms a request and 64 MiB a
shard, 1.8 with 8 MiB; 5.7 to 7.6 times the samples/s, at 1.0 ms of CPU time a sample in place of 5.3; the first piece after 23 ms in place
of 55, as one request does what takes fsspec two. So obstore is what reads s3:// and gs:// where it is installed. obstore by itself takes half of the CPU time
of ours: a read that can be told to stop goes through an event loop, one way in and back for each MiB, or sample.

For http(s):// our own client stays: of whole shards it takes 0.6 to 0.75 of obstore's CPU time, as
much as urllib3's, and is 1.3 to 1.7 times as fast without latency; with 20 ms and 64 MiB obstore's one request is 1.7 times as fast as our
three. Of samples obstore alone gives twice as many a second at 20 ms, at a third of the CPU time, which the same event loop would take back. What was slow in ours
and is mended: each request searched the environment for proxies and read netrc (a third of its CPU time); each 8 MiB cost a round trip, where a
range now reaches four times as far after one that was read quickly; TLS came in pieces of 16 KiB.

The server is a process of its own that sends from memory by the kernel (over TLS by itself, which bounds the rate there, not the CPU time);
CPU time is the client's process alone. What each name is: `Treadle ...` a stream as a shard's reader has it, 1 MiB at a time, and samples as
`Shard.sample_at` gives them; all others by their own means, without a check whether the object has changed, nor a way to stop a wait.

    python benchmarks/bench_storage.py [--full] [--tls]
"""

import argparse
import importlib
import importlib.util
import io
import multiprocessing
import os
import random
import re
import socket
import ssl
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import record

from treadle.pipeline.connections import Connections
from treadle.pipeline.fsspec_source import FsspecSource
from treadle.pipeline.shards import Shard
from treadle.pipeline.storage import ByteStream, RemoteStream, open_stream

MIB = 1 << 20
SAMPLE_BYTES = 16 << 10
"""Of a sample in its shard, header included."""
PIECE_BYTES = 1 << 20
"""What a shard's reader asks for at a time."""
RANGE_BYTES = 8 << 20
"""What a reader by ranges asks the store for at a time."""
THREADS = 64
"""That fetch samples, as in a stream."""
BUCKET = "shards"
BASELINES = {
    "Treadle http": "urllib3",
    "Treadle s3": "Treadle s3 by fsspec",
    "obstore s3": "Treadle s3 by fsspec",
    "obstore http": "Treadle http",
}
"""What whom is divided by."""

Measured = dict[str, float]
"""By metric and unit."""


def shard_bytes(size: int) -> bytes:
    """A tar of as many samples as fit, each 16 KiB with its header."""
    out = io.BytesIO()
    content = random.Random(0).randbytes(SAMPLE_BYTES - 512)
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for index in range(size // SAMPLE_BYTES - 1):
            info = tarfile.TarInfo(f"{index:08d}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue().ljust(size, b"\0")[:size]


class Server:
    """As much of S3 as reading takes: GET and HEAD with ranges and ETags, sent from memory by the kernel. Any key is served by its size.

    A key is `<latency in ms>/<size in MiB>/<anything>`.
    """

    def __init__(self, certificate: str) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
        if self._context is not None:
            self._context.load_cert_chain(certificate)
        self._files: dict[int, int] = {}
        self.port: int = self._listening.getsockname()[1]

    def file(self, size: int) -> int:
        """A descriptor of the object of `size` bytes."""
        file = self._files.get(size)
        if file is None:
            file = os.memfd_create(f"{size}")
            os.write(file, shard_bytes(size))
            self._files[size] = file
        return file

    def serve(self) -> None:
        """Serves for ever."""
        while True:
            connected, _ = self._listening.accept()
            threading.Thread(target=self._answer_all, args=(connected,), daemon=True).start()

    def _answer_all(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        held = b""
        try:
            if self._context is not None:
                connected = self._context.wrap_socket(connected, server_side=True)
            while True:
                while b"\r\n\r\n" not in held:
                    piece = connected.recv(1 << 16)
                    if not piece:
                        return
                    held += piece
                head, _, held = held.partition(b"\r\n\r\n")
                self._answer(connected, head)
        except OSError:
            pass
        finally:
            connected.close()

    def _answer(self, connected: socket.socket, head: bytes) -> None:
        method, path = head.split(b" ", 2)[:2]
        latency_ms, size_mib = map(int, [part for part in path.split(b"?")[0].split(b"/") if part][1:3])
        size = size_mib * MIB
        start, stop, status = 0, size, "200 OK"
        asked = re.search(rb"\r\nrange: *bytes=(\d+)-(\d*)", head, re.IGNORECASE)
        if asked:
            start, stop, status = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size), "206 Partial Content"
        if latency_ms:
            time.sleep(latency_ms / 1000)
        lines = [
            f"HTTP/1.1 {status}", f"Content-Length: {stop - start}", "Accept-Ranges: bytes", f'ETag: "{size}"', f"Date: {formatdate(usegmt=True)}",
            "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT", "Content-Type: application/x-tar", "x-amz-request-id: 1", "Server: bench",
        ]  # fmt: skip
        if asked:
            lines.append(f"Content-Range: bytes {start}-{stop - 1}/{size}")
        connected.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        file = self.file(size)
        while method == b"GET" and start < stop:
            if self._context is None:
                start += os.sendfile(connected.fileno(), file, start, stop - start)
            else:
                piece = os.pread(file, min(stop - start, 1 << 18), start)
                connected.sendall(piece)
                start += len(piece)


def serve(certificate: str, told: "Connection[int, Any]") -> None:
    """The server's process."""
    server = Server(certificate)
    for size_mib in (8, 64):
        server.file(size_mib * MIB)
    told.send(server.port)
    server.serve()


def write_certificate(folder: Path) -> str:
    """A certificate of localhost that it signed itself, and its key, in one file."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    path = folder / "localhost.pem"
    path.write_bytes(
        builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(path)


class Client(Protocol):
    """What reads objects."""

    def pieces(self, key: str) -> Iterable[Any]:
        """The object, in order."""
        ...

    def samples(self, key: str) -> Callable[[int], int]:
        """What gives the length of sample `index`."""
        ...


class Treadle:
    """`open_stream` and `Shard`, as a stream uses them."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._connections = Connections()

    def _open(self, key: str) -> ByteStream:
        return open_stream(f"{self._place}/{key}", connections=self._connections)

    def pieces(self, key: str) -> Iterator[bytes]:
        with self._open(key) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece

    def samples(self, key: str) -> Callable[[int], int]:
        shard = Shard(f"{self._place}/{key}", connections=self._connections)
        return lambda index: shard.sample_at(index, index * SAMPLE_BYTES, SAMPLE_BYTES).size


class TreadleOddKeys(Treadle):
    """The same, of keys with an empty part, which obstore does not send: they are left to fsspec."""

    def _open(self, key: str) -> ByteStream:
        return super()._open(key.replace("/", "//"))

    def samples(self, key: str) -> Callable[[int], int]:
        return super().samples(key.replace("/", "//"))


class TreadleFsspecHttp(Treadle):
    """The same streams, with fsspec's HTTP client below."""

    def _open(self, key: str) -> ByteStream:
        url = f"{self._place}/{key}"
        return RemoteStream(url, FsspecSource(url))

    def samples(self, key: str) -> Callable[[int], int]:
        def sample(index: int) -> int:
            with self._open(key) as stream:
                assert isinstance(stream, RemoteStream)
                stream.aim(index * SAMPLE_BYTES, SAMPLE_BYTES)
                return len(stream.read(SAMPLE_BYTES))

        return sample


class Obstore:
    """obstore: one answer per object, as it comes; or, with `ranges`, one per range."""

    def __init__(self, store: Any, ranges: bool = False) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        self._store = store
        self._ranges = ranges

    def pieces(self, key: str) -> Iterator[Any]:
        if not self._ranges:
            yield from self._obstore.get(self._store, key).stream(PIECE_BYTES)
            return
        at, size = 0, 1
        while at < size:
            answer = self._obstore.get(self._store, key, options={"range": (at, at + RANGE_BYTES)})
            size = answer.meta["size"]
            data = answer.bytes()
            at += len(data)
            yield data

    def samples(self, key: str) -> Callable[[int], int]:
        return lambda index: len(self._obstore.get_range(self._store, key, start=index * SAMPLE_BYTES, length=SAMPLE_BYTES))


class Urllib3:
    """urllib3, by itself: one answer per object."""

    def __init__(self, place: str, certificate: str) -> None:
        import urllib3

        self._place = place
        self._pool = urllib3.PoolManager(maxsize=THREADS, ca_certs=certificate or None)

    def pieces(self, key: str) -> Iterator[bytes]:
        answer = self._pool.request("GET", f"{self._place}/{key}", preload_content=False)
        yield from answer.stream(PIECE_BYTES)
        answer.release_conn()

    def samples(self, key: str) -> Callable[[int], int]:
        def sample(index: int) -> int:
            start = index * SAMPLE_BYTES
            asked = {"Range": f"bytes={start}-{start + SAMPLE_BYTES - 1}"}
            return len(self._pool.request("GET", f"{self._place}/{key}", headers=asked).data)

        return sample


class Boto3:
    """boto3, one answer per object."""

    def __init__(self) -> None:
        import boto3
        from botocore.config import Config

        self._client: Any = boto3.client("s3", config=Config(max_pool_connections=THREADS, s3={"addressing_style": "path"}))

    def pieces(self, key: str) -> Iterator[bytes]:
        body = self._client.get_object(Bucket=BUCKET, Key=key)["Body"]
        while piece := body.read(PIECE_BYTES):
            yield piece

    def samples(self, key: str) -> Callable[[int], int]:
        def sample(index: int) -> int:
            start = index * SAMPLE_BYTES
            asked = f"bytes={start}-{start + SAMPLE_BYTES - 1}"
            return len(self._client.get_object(Bucket=BUCKET, Key=key, Range=asked)["Body"].read())

        return sample


class SmartOpen:
    """smart_open over boto3."""

    def __init__(self) -> None:
        import boto3
        import smart_open
        from botocore.config import Config

        client = boto3.client("s3", config=Config(max_pool_connections=THREADS, s3={"addressing_style": "path"}))
        self._open: Any = partial(smart_open.open, mode="rb", compression="disable", transport_params={"client": client})

    def pieces(self, key: str) -> Iterator[bytes]:
        with self._open(f"s3://{BUCKET}/{key}") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def samples(self, key: str) -> Callable[[int], int]:
        def sample(index: int) -> int:
            with self._open(f"s3://{BUCKET}/{key}") as file:
                file.seek(index * SAMPLE_BYTES)
                return len(file.read(SAMPLE_BYTES))

        return sample


class S3Torch:
    """s3torchconnector: its sequential reader, and its range reader."""

    def __init__(self, endpoint: str) -> None:
        from s3torchconnector import S3ClientConfig, S3ReaderConstructor
        from s3torchconnector._s3client import S3Client

        self._client = S3Client(region="us-east-1", endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
        self._forward = S3ReaderConstructor.sequential()
        self._ranged = S3ReaderConstructor.range_based(buffer_size=0)

    def pieces(self, key: str) -> Iterator[bytes]:
        with self._client.get_object(BUCKET, key, reader_constructor=self._forward) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def samples(self, key: str) -> Callable[[int], int]:
        def sample(index: int) -> int:
            with self._client.get_object(BUCKET, key, reader_constructor=self._ranged) as file:
                file.seek(index * SAMPLE_BYTES)
                return len(file.read(SAMPLE_BYTES))

        return sample


def clients(endpoint: str, certificate: str, all_of_them: bool) -> dict[str, Client]:
    """Whatever is installed, by its name."""
    place = f"{endpoint}/{BUCKET}"
    found: dict[str, Client] = {"urllib3": Urllib3(place, certificate), "Treadle http": Treadle(place)}
    if not certificate:
        # It does not look at SSL_CERT_FILE.
        found["Treadle http by fsspec"] = TreadleFsspecHttp(place)
    installed = {
        name for name in ("boto3", "s3fs", "obstore", "smart_open", "s3torchconnector") if importlib.util.find_spec(name) is not None
    }
    if "boto3" in installed:
        found["boto3"] = Boto3()
    if "s3fs" in installed:
        found["Treadle s3 by fsspec"] = TreadleOddKeys(f"s3://{BUCKET}")
    if "obstore" in installed:
        stores: Any = importlib.import_module("obstore.store")
        options: Any = {"allow_http": True, "root_certificate": Path(certificate).read_bytes()} if certificate else {"allow_http": True}
        store = stores.S3Store(BUCKET, endpoint=endpoint, client_options=options)
        found |= {
            "Treadle s3": Treadle(f"s3://{BUCKET}"),
            "obstore http": Obstore(stores.HTTPStore.from_url(place, client_options=options)),
            "obstore s3": Obstore(store),
            "obstore s3 by ranges": Obstore(store, ranges=True),
        }
    if all_of_them and installed > {"smart_open", "boto3"}:
        found["smart_open s3"] = SmartOpen()
    if all_of_them and "s3torchconnector" in installed and not certificate:
        found["s3torchconnector"] = S3Torch(endpoint)
    return found


def check(client: Client) -> None:
    """That it reads what is there."""
    assert b"".join(bytes(piece) for piece in client.pieces("0/8/a.tar")) == shard_bytes(8 * MIB)
    assert client.samples("0/8/a.tar")(7) == SAMPLE_BYTES


def whole(client: Client, latency_ms: int, size_mib: int, count: int) -> Measured:
    """Objects read whole, one after the other."""
    first_ms: list[float] = []
    begun, cpu_s, got = time.perf_counter(), time.process_time(), 0
    for number in range(count):
        opened = time.perf_counter()
        for piece in client.pieces(f"{latency_ms}/{size_mib}/{number}.tar"):
            if len(first_ms) == number:
                first_ms.append(1000 * (time.perf_counter() - opened))
            got += len(piece)
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    assert got == count * size_mib * MIB
    return {"bytes, MB/s": got / wall_s / 1e6, "CPU time, s/GB": cpu_s / got * 1e9, "first byte, ms": statistics.median(first_ms)}


def samples(client: Client, latency_ms: int) -> Measured:
    """A thousand samples of a hundred objects, by as many threads as a stream has for them."""
    rng = random.Random(1)
    places = [(rng.randrange(100), rng.randrange(64 * MIB // SAMPLE_BYTES - 1)) for _ in range(1000)]
    with ThreadPoolExecutor(THREADS) as pool:
        begun, cpu_s = time.perf_counter(), time.process_time()
        opened = [client.samples(f"{latency_ms}/64/{number}.tar") for number in range(100)]
        sizes = list(pool.map(lambda place: opened[place[0]](place[1]), places))
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    assert sizes == [SAMPLE_BYTES] * len(places)
    return {"samples, 1/s": len(places) / wall_s, "CPU time, ms/sample": 1000 * cpu_s / len(places)}


def measure(
    chosen: Mapping[str, Client], shape: Mapping[str, object], run: Callable[[Client], Measured], repetitions: int, rows: bool
) -> None:
    """Every client in turn, and how they compare."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repetitions):
        for name, client in chosen.items():
            for metric, value in run(client).items():
                found.setdefault(metric, {}).setdefault(name, []).append(value)
    for metric, values in found.items():
        what, unit = metric.split(", ")
        for name in values:
            if rows:
                record.append(record.Row(op="storage", impl=name, shape=shape, metric=what, unit=unit, values=values[name]))
            else:
                print(f"{dict(shape)} {name:16s} {what} {statistics.median(values[name]):8.4g} {unit}", flush=True)
        for name, baseline in BASELINES.items():
            if rows and what != "first byte" and name in values and baseline in values:
                ratio = record.ratios(values[name], values[baseline])
                record.append(
                    record.Row(op="storage", impl=name, baseline=baseline, shape=shape, metric=f"{what} ratio", unit="x", values=ratio)
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="smart_open and s3torchconnector too, and 8 MiB objects without latency")
    parser.add_argument("--tls", action="store_true", help="over TLS; needs the package cryptography")
    parser.add_argument("--only", default="", help="these clients alone, with commas between them")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rehearse", action="store_true", help="prints, and writes no rows")
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as folder:
        certificate = write_certificate(Path(folder)) if arguments.tls else ""
        if certificate:
            os.environ |= {"SSL_CERT_FILE": certificate, "AWS_CA_BUNDLE": certificate}
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(certificate, there), daemon=True)
        process.start()
        try:
            endpoint = f"http{'s' if certificate else ''}://localhost:{here.recv()}"
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            found = clients(endpoint, certificate, arguments.full)
            chosen = {name: client for name, client in found.items() if not arguments.only or name in arguments.only.split(",")}
            for client in chosen.values():
                check(client)
            for latency_ms, size_mib, count in ((0, 64, 2), (20, 64, 2), (20, 8, 12), (0, 8, 12))[: 4 if arguments.full else 3]:
                shape = {"latency_ms": latency_ms, "object_MiB": size_mib, "TLS": arguments.tls}
                run = partial(whole, latency_ms=latency_ms, size_mib=size_mib, count=count)
                measure(chosen, shape, run, arguments.repetitions, not arguments.rehearse)
            for latency_ms in (0, 20):
                shape = {"latency_ms": latency_ms, "sample_KiB": SAMPLE_BYTES >> 10, "threads": THREADS, "TLS": arguments.tls}
                measure(chosen, shape, partial(samples, latency_ms=latency_ms), arguments.repetitions, not arguments.rehearse)
        finally:
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
