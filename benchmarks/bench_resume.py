"""Claim: after a resume the first batch is there within 2 s of the stream's creation, wherever the position lies, from local tars and over
HTTP ranges, with 100 shards, at the world size of the state and dealt anew to another; and a state of 64 lanes with `shuffle=10000`
stays below a MiB, and attaching it costs less than 1 % of a batch's time, of the smallest batches that there are: captions alone.

Shards of captions, each sample with a small picture, that this script writes; the web server runs in a process of its own and answers each
request after 20 ms, as one on another continent's edge would. Positions: after the first batch, and well into the data.

The server accepts as many connections at once as servers do: Python's own accepts five, and whoever comes sixth tries again after a second.

    python benchmarks/bench_resume.py
"""

import argparse
import io
import multiprocessing
import random
import tarfile
import tempfile
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bench_text
import numpy as np
import record
from PIL import Image

from treadle import BatchShape, ImageShape, ShardStream
from treadle.pipeline.state import StreamState

SHAPE = BatchShape(max_rows_per_device=32, max_segments_per_device=1024, max_columns_per_row=1024, image=ImageShape(patch_side=16))
SHARDS = 100
LATENCY_S = 0.02


class Ranged(SimpleHTTPRequestHandler):
    """Serves a folder by ranges, after a while."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        path = Path(self.translate_path(self.path))
        size = path.stat().st_size
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        start, stop = int(first), min(size, int(last) + 1 if last else size)
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(stop - start)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{path.name}"')
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


class Server(ThreadingHTTPServer):
    """Accepts many connections at once, and says nothing of those that end early."""

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing."""


def serve(folder: str, told: "Connection[int, Any]") -> None:
    """The server's process."""
    server = Server(("127.0.0.1", 0), partial(Ranged, directory=folder))
    told.send(server.server_address[1])
    server.serve_forever()


def write_shards(folder: Path, samples: int) -> None:
    """Captions of 200 to 800 bytes, each with a picture of 96 x 96."""
    rng = random.Random(0)
    pictures: list[bytes] = []
    for _ in range(20):
        out = io.BytesIO()
        pixels = np.frombuffer(rng.randbytes(24 * 24 * 3), np.uint8).reshape(24, 24, 3)
        Image.fromarray(pixels).resize((96, 96)).save(out, "png")
        pictures.append(out.getvalue())
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in range(samples // SHARDS):
                for name, data in (("txt", rng.randbytes(rng.randint(200, 800))), ("png", rng.choice(pictures))):
                    member = tarfile.TarInfo(f"{index:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def first_batch_s(urls: list[str], shuffle: int, state: bytes, world_size: int) -> float:
    """Seconds from the creation of rank 0's stream to its first batch."""
    begun = time.perf_counter()
    with ShardStream(urls, SHAPE, shuffle=shuffle, world_size=world_size) as stream:
        stream.load_state(state)
        next(stream)
        return time.perf_counter() - begun


def attach_shares(shards: list[str], shuffle: int) -> list[float]:
    """Per batch of captions, what taking its state cost of the time that the batch took, in percent."""
    taken_s: list[float] = []
    shares: list[float] = []
    with ShardStream(shards, bench_text.SHAPE, shuffle=shuffle) as stream:
        next(stream)
        feed: Any = stream._running()
        state = feed.state

        def timed() -> StreamState:
            begun = time.perf_counter()
            answer: StreamState = state()
            taken_s.append(time.perf_counter() - begun)
            return answer

        feed.state = timed
        for _ in range(60):
            begun = time.perf_counter()
            next(stream)
            shares.append(100 * taken_s[-1] / (time.perf_counter() - begun))
    return shares


def record_attaching(folder: Path) -> None:
    """What attaching a state costs."""
    shards = bench_text.write_shards(folder, 80, 24_000)
    for shuffle in (1000, 10_000):
        shape = {"caption_bytes": bench_text.CAPTION_BYTES, "samples": 24_000, "shards": 80, "rows": 64, "columns": 4096}
        record.append(
            record.Row(
                op="state", impl="attach to a batch", baseline="the batch's time", shape=shape | {"shuffle": shuffle, "lanes": 64},
                metric="share", unit="%", values=attach_shares(shards, shuffle),
            )
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record_attaching(Path(folder) / "captions")
        write_shards(Path(folder), arguments.samples)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, theirs), daemon=True)
        process.start()
        port = ours.recv()
        names = [f"{shard:03d}.tar" for shard in range(SHARDS)]
        places = {"local": [f"{folder}/{name}" for name in names], "http, 20 ms": [f"http://127.0.0.1:{port}/{name}" for name in names]}
        for shuffle in (1000, 10_000):
            for place, urls in places.items():
                with ShardStream(urls, SHAPE, shuffle=shuffle) as stream:
                    states = [(1, stream.state)]
                    for number, batch in enumerate(stream, 1):
                        if number in (1, 30):
                            assert batch.state is not None
                            states.append((number, batch.state))
                        if number == 30:
                            break
                for number, state in states[1:]:
                    data = state.to_bytes()
                    shape = {
                        "shards": SHARDS,
                        "lanes": 64,
                        "shuffle": shuffle,
                        "after_batches": number,
                        "waiting": len(state.columns["pending_lane"]),
                    }
                    for world_size in (1, 2):
                        values = [first_batch_s(urls, shuffle, data, world_size) for _ in range(arguments.repetitions)]
                        impl = place if world_size == 1 else f"{place}, one rank's state dealt to {world_size}"
                        record.append(record.Row(op="resume", impl=impl, shape=shape, metric="first batch", unit="s", values=values))
                    if place == "local":
                        size = record.Row(op="state", impl="to_bytes", shape=shape, metric="size", unit="KiB", values=[len(data) / 1024])
                        record.append(size)
        process.terminate()


if __name__ == "__main__":
    main()
