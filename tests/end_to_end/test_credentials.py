"""Shards behind URLs with a password and a signature: no command shows either, in what it prints, logs or writes for others to read."""

import io
import logging
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from treadle.pipeline.storage import public_urls

Run = Callable[..., Any]

# The last one is how a header has the password: base64 of user:hunter2.
SECRETS = ("hunter2", "s3cr3t", "t0k3n", "dXNlcjpodW50ZXIy")

CONFIG = """
output = "{output}"
log_every = 1
[trainer]
depth = 1
hidden = 128
device = "cpu"
batch = {{ max_rows_per_device = 2, max_segments_per_device = 8, max_columns_per_row = 64 }}
schedule = {{ steps = 2 }}
[data]
sources = "{url}"
quarantine = "quarantine.jsonl"
"""


class Site(BaseHTTPRequestHandler):
    """A shard whole, one with a damaged header, and none."""

    protocol_version = "HTTP/1.1"
    whole = b""

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        data = bytearray(self.whole)
        if self.path.startswith("/damaged"):
            # The header of the 31st of 40 files.
            data[1024 * 30 + 148] ^= 1
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        piece = bytes(data[int(first) : int(last) + 1 if last else None])
        missing = self.path.startswith("/none")
        self.send_response(404 if missing else 206)
        if not missing:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(0 if missing else len(piece)))
        self.end_headers()
        self.wfile.write(b"" if missing else piece)


@pytest.fixture(name="url")
def url_fixture() -> Iterator[Callable[[str], str]]:
    """`url("whole")`, `url("damaged")` and `url("none")`, each with a password and signatures."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(20):
            for field in ("a.txt", "b.txt"):
                member = tarfile.TarInfo(f"{number:03d}.{field}")
                member.size = 9
                tar.addfile(member, io.BytesIO(b"some text"))
    Site.whole = out.getvalue()
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield (
            lambda name: (
                f"http://user:hunter2@127.0.0.1:{server.server_address[1]}/{name}.tar?X-Amz-Signature=s3cr3t&token=t0k3n&versionId=7"
            )
        )
        server.shutdown()
        thread.join()


@pytest.fixture(name="said")
def said_fixture(treadle: Run, caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Runs a command; answers all that it said and logged, which holds no secret."""
    caplog.set_level(logging.DEBUG, "treadle")

    def run(*arguments: object, code: int = 0) -> str:
        caplog.clear()
        done = treadle("-v", *arguments, code=code)
        told = str(done.out + done.err + caplog.text)
        assert not [secret for secret in SECRETS if secret in told], told
        return told

    return run


def test_no_command_shows_a_credential(said: Callable[..., str], url: Callable[[str], str], tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(output=tmp_path / "run", url=url("damaged")))
    shown = public_urls(url("damaged"))
    assert shown.endswith("/damaged.tar?versionId=7")
    assert shown in said("train", config, "--show")
    said("train", config)
    assert shown in (tmp_path / "quarantine.jsonl").read_text()
    # It reads its own configuration, and knows where its shards are.
    assert (tmp_path / "run" / "config.toml").stat().st_mode & 0o777 == 0o600
    said("train", "--resume", tmp_path / "run", "--steps", 3)
    checkpoint = tmp_path / "run/checkpoints/last.safetensors"
    assert shown in said("evaluate", checkpoint, url("damaged"))
    said("encode", checkpoint, url("damaged"), "--out", "vectors.npy")
    assert shown in (tmp_path / "vectors.jsonl").read_text()
    assert shown in said("inspect", url("damaged"))
    said("pack", "--config", config, "--out", "packed", "--max_batches", 2)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("config.toml", "run.toml")]
    assert len(written) > 8
    assert [path for path in written if any(secret.encode() in path.read_bytes() for secret in SECRETS)] == []


def test_no_refusal_shows_a_credential(
    said: Callable[..., str], url: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after --debug: with the traceback of each failure.
    monkeypatch.setenv("TREADLE_DEBUG", "1")
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(output=tmp_path / "run", url=url("none")))
    assert "not_found" in said("train", config, code=1)
    where = f"in shard {public_urls(url('damaged'))}, at byte 30720"
    assert where in said("train", config, "--output", "strict", "--data.on_error", "raise", "--data.sources", url("damaged"), code=1)
    assert "no sample could be read" in said("inspect", url("none"), code=1)
    assert "holds no item" in said("pack", "--config", config, "--out", "packed", "--max_batches", 2, code=1)
    for number, (sources, told) in enumerate(
        [
            (url("*"), "does not list its files"),
            (url("none").replace("127.0.0.1", "[::1"), "names a host"),
            (url("none").replace("http", "nosuch"), "nothing opens nosuch"),
            (f"pipe:curl {url('none')}", "is refused"),
            (f'["{url("none")}"', "not valid TOML"),
            (f'["{url("none")}", {{urls = "x"}}]', "table"),
        ]
    ):
        code = 2 if told in ("not valid TOML", "table") else 1
        assert told in said("train", config, "--output", f"other{number}", "--data.sources", sources, code=code)
    assert "both set" in said("train", config, "--output", "packed", "--data.packed", url("none"), code=2)
