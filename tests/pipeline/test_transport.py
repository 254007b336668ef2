"""The ways to a store: TLS with an authority of one's own, proxies, an S3 server; and that no credential shows on any of them."""

import json
import logging
import ssl
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.retry import Contacts, RetryPolicy
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.sources import expand_urls
from treadle.pipeline.storage import StorageError, open_stream
from treadle.pipeline.stream import ShardStream

QUICK = RetryPolicy(base_delay_s=0.001, max_delay_s=0.002, attempts=4, budget=12, timeout_s=5.0, max_retry_after_s=0.01)


def read_all(url: str, policy: RetryPolicy = QUICK) -> bytes:
    with open_stream(url, policy=policy) as stream:
        return b"".join(iter(lambda: stream.read(50_000), b""))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "no_proxy",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(name="authority", scope="module")
def authority_fixture() -> Iterator[tuple[Path, ssl.SSLContext]]:
    """A certificate of an authority that nobody knows, and what a server named localhost needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    begun = datetime.now(UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begun)
        .not_valid_after(begun + timedelta(days=10))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        # An authority's own certificate as a server's is refused by rustls.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    with tempfile.TemporaryDirectory() as folder:
        public, private = Path(folder) / "ca.pem", Path(folder) / "key.pem"
        public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(public, private)
        yield public, context


@pytest.fixture(name="secure")
def secure_fixture(authority: tuple[Path, ssl.SSLContext], serving: Any) -> Iterator[Any]:
    with serving(authority[1]) as found:
        yield found


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_an_authority_of_ones_own(
    secure: Any, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(authority[0]))
    secure.faults = [lambda handler: handler.serve(cut=100_000), lambda handler: handler.answer(503)]
    assert read_all(secure.url) == secure.body


def test_an_authority_that_nobody_knows_is_refused_at_once(secure: Any) -> None:
    with pytest.raises(StorageError, match="SSL_CERT_FILE") as raised:
        read_all(secure.url)
    assert raised.value.kind == "refused"
    assert not secure.asked


def test_tls_is_not_left(secure: Any, server: Any, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    secure.always = lambda handler: handler.answer(302, {"Location": server.url})
    with pytest.raises(StorageError, match="never from https to http") as raised:
        read_all(secure.url)
    assert raised.value.kind == "refused"
    assert not server.asked
    server.always = lambda handler: handler.answer(302, {"Location": secure.url})
    secure.always = None
    assert read_all(server.url) == secure.body


def test_a_plain_server_where_tls_was_asked_for(server: Any) -> None:
    with pytest.raises(StorageError) as raised:
        read_all(server.url.replace("http://", "https://"))
    assert raised.value.kind == "unreadable"


def test_a_login_of_the_netrc_file(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password p@ss\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert read_all(server.url) == server.body
    # base64 of me:p@ss
    assert server.headers[-1]["Authorization"] == "Basic bWU6cEBzcw=="
    # What others may read is not taken.
    (tmp_path / ".netrc").chmod(0o644)
    assert read_all(server.url) == server.body
    assert "Authorization" not in server.headers[-1]


class Proxy(ThreadingHTTPServer):
    """Passes requests on, and bytes where it is asked to connect."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.asked: list[tuple[str, str | None]] = []
        """Each request's line and its Proxy-Authorization."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave."""


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def note(self) -> None:
        assert isinstance(self.server, Proxy)
        self.server.asked.append((f"{self.command} {self.path}", self.headers.get("Proxy-Authorization")))

    def do_GET(self) -> None:
        self.note()
        host, _, path = self.path.removeprefix("http://").partition("/")
        onward = HTTPConnection(host)
        kept = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
        onward.request("GET", f"/{path}", headers=kept)
        answer = onward.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.read())
        onward.close()

    def do_CONNECT(self) -> None:
        self.note()
        self.close_connection = True
        host, _, port = self.path.rpartition(":")
        with create_connection((host, int(port))) as onward:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=self.pass_on, args=(onward, self.connection))
            back.start()
            self.pass_on(self.connection, onward)
            back.join()

    @staticmethod
    def pass_on(source: Any, target: Any) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(1)
        except OSError:
            return


@contextmanager
def proxying() -> Generator[Proxy]:
    with Proxy() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture(name="proxy")
def proxy_fixture() -> Iterator[Proxy]:
    with proxying() as found:
        yield found


def test_a_proxy_for_http(server: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:p%40ss@127.0.0.1:{proxy.server_address[1]}")
    assert read_all(server.url.replace("//", "//you:secret@")) == server.body
    # base64 of me:p@ss; what is for the server goes to the server
    assert proxy.asked == [(f"GET {server.url}", "Basic bWU6cEBzcw==")]
    assert server.headers[0]["Authorization"] == "Basic eW91OnNlY3JldA=="
    assert "Proxy-Authorization" not in server.headers[0]


def test_a_proxy_for_https(secure: Any, proxy: Proxy, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    monkeypatch.setenv("https_proxy", f"me:p%40ss@127.0.0.1:{proxy.server_address[1]}")
    secure.faults = [lambda handler: handler.serve(cut=100_000)]
    assert read_all(secure.url) == secure.body
    assert proxy.asked == [(f"CONNECT localhost:{secure.port}", "Basic bWU6cEBzcw==")] * 2
    assert all("Proxy-Authorization" not in headers for headers in secure.headers)


def test_no_proxy(server: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read_all(server.url) == server.body
    assert not proxy.asked


def test_a_proxy_that_is_not_there_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    monkeypatch.setenv("http_proxy", "http://me:hunter2@127.0.0.1:1")
    with pytest.raises(StorageError) as raised:
        read_all(server.url)
    assert "hunter2" not in repr(raised.value)
    assert not server.asked


# The second is base64 of user:hunter2, as a header has it.
SECRETS = ("hunter2", "dXNlcjpodW50ZXIy", "s3cr3t", "t0k3n")


@pytest.mark.parametrize("on_error", ["quarantine", "raise"])
@pytest.mark.parametrize("fault", ["status", "redirect", "page", "damage", "place"])
def test_no_credential_shows_anywhere(
    server: Any, tars: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, on_error: Any
) -> None:
    tars.write_texts(tmp_path / "good", [30])
    url = server.url.replace("//", "//user:hunter2@") + "?X-Amz-Signature=s3cr3t&token=t0k3n&versionId=7"
    body = bytearray((tmp_path / "good" / "000.tar").read_bytes())
    body[1024 * 9 + 148] ^= 1
    always = {
        "status": lambda handler: handler.answer(500),
        "redirect": lambda handler: handler.answer(302, {"Location": "file:///x?token=t0k3n"}),
        "page": lambda handler: handler.answer(200, {}, b"<html>no</html>"),
        "damage": None,
        "place": lambda handler: handler.answer(302, {"Location": "http://user:hunter2@[::1/x?sig=s3cr3t"}),
    }
    server.body, server.always = bytes(body), always[fault]
    log = tmp_path / "quarantine.jsonl"
    told = ""
    with (
        caplog.at_level(logging.DEBUG),
        ShardStream(
            [url, str(tmp_path / "good" / "000.tar")], tars.text_shape, epochs=1, retry=QUICK, threads=1, quarantine=log, on_error=on_error
        ) as stream,
    ):
        try:
            for batch in stream:
                assert batch.state is not None
                told += repr(batch.state.to_bytes()) + repr(batch)
        except ShardError as error:
            assert on_error == "raise"
            told += repr(error) + str(error) + repr(getattr(error, "__notes__", "")) + repr(error.__cause__) + repr(error.__context__)
        else:
            assert on_error == "quarantine"
        told += stream.state.to_bytes().decode("latin-1") + stream.manifest.to_json() + stream.quarantine.summary() + repr(stream.stats())
    told += caplog.text + log.read_text()
    for secret in SECRETS:
        assert secret not in told
    if on_error == "quarantine":
        (line,) = [json.loads(line) for line in log.read_text().splitlines()]
        assert line["url"] == server.url + "?versionId=7"


@pytest.fixture(name="bucket", scope="module")
def bucket_fixture() -> Iterator[tuple[str, Any]]:
    """An S3 server with a bucket, and what puts objects into it."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    # File systems are kept by their arguments, of which the endpoint in the environment is none.
    S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        host, port = moto.get_host_and_port()
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="shards")
        yield "s3://shards", client
        moto.stop()
    S3FileSystem.clear_instance_cache()


@pytest.fixture(name="reader", params=["obstore", "fsspec"])
def reader_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads s3:// here."""
    from fsspec.config import conf

    if request.param == "obstore":
        pytest.importorskip("obstore", reason="it is an extra: treadle[obstore] is not installed")
    else:
        # What is configured for fsspec is left to it.
        monkeypatch.setitem(conf, "s3", {})


@pytest.mark.usefixtures("reader")
def test_an_s3_server(bucket: tuple[str, Any], tars: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 40_000)
    pattern = tars.write_texts(tmp_path, [60, 45, 70])
    for path in sorted(tmp_path.glob("*.tar")):
        bucket[1].put_object(Bucket="shards", Key=f"train/{path.name}", Body=path.read_bytes())

    def run(urls: str) -> list[bytes]:
        # Another name is another order of held-back samples: none is held back, and one lane reads one shard after the other.
        with ShardStream(urls, tars.text_shape, epochs=1, lanes=1, shuffle=0, threads=1, window=1) as stream:
            return sorted(text for batch in stream for text in (batch.payload(s).tobytes() for s in range(batch.segments)))

    expected = run(pattern)
    assert len(expected) == 175
    assert run(f"{bucket[0]}/train/*.tar") == run(f"{bucket[0]}/train/{{000..002}}.tar") == expected
    url = f"{bucket[0]}/train/001.tar"
    samples = list(Shard(str(tmp_path / "001.tar")).samples())
    assert list(Shard(url, policy=QUICK).samples()) == samples
    assert Shard(url, policy=QUICK).sample_at(9, samples[9].offset, samples[9].size) == samples[9]
    Shard(url).close()


@pytest.mark.usefixtures("reader")
def test_an_s3_server_without_the_object(bucket: tuple[str, Any]) -> None:
    with pytest.raises(ShardError) as raised:
        list(Shard(f"{bucket[0]}/none.tar", policy=QUICK).samples())
    assert raised.value.kind == "not_found"
    with pytest.raises(ValueError, match="matches nothing"):
        expand_urls(f"{bucket[0]}/nowhere/*.tar")


@pytest.mark.usefixtures("reader")
def test_an_s3_object_that_changes(bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 40_000)
    bucket[1].put_object(Bucket="shards", Key="changing", Body=bytes(100_000))
    with open_stream(f"{bucket[0]}/changing", policy=QUICK) as stream:
        assert stream.read(40_000) == bytes(40_000)
        bucket[1].put_object(Bucket="shards", Key="changing", Body=b"1" * 100_000)
        with pytest.raises(StorageError) as raised:
            stream.read(1)
    assert (raised.value.kind, raised.value.offset) == ("changed", 40_000)


@pytest.mark.usefixtures("reader")
def test_s3_faults(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    monkeypatch.setattr("treadle.pipeline.ranges.RANGE_BYTES", 100_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server.files["/faulty/a.tar"] = server.body
    slow_down = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    server.faults = [
        lambda handler: handler.serve(),
        lambda handler: handler.answer(503, {"Content-Type": "application/xml"}, slow_down),
        lambda handler: handler.serve(cut=1000),
    ]
    assert read_all("s3://faulty/a.tar") == server.body
    server.always = lambda handler: handler.answer(403)
    with pytest.raises(StorageError) as raised:
        read_all("s3://faulty/a.tar")
    assert raised.value.kind == "forbidden"
    assert "hunter2" not in repr(raised.value)
    S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("reader")
def test_an_s3_endpoint_that_nobody_reaches_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    for module in ("fsspec_source", "object_store"):
        monkeypatch.setattr(f"treadle.pipeline.{module}.contacts", Contacts())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    policy = RetryPolicy(attempts=10_000, budget=10_000, base_delay_s=0.01, max_delay_s=0.01, first_contact_s=0.1)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1.*nothing there has ever answered"):
        read_all("s3://nowhere/a.tar", policy)
    S3FileSystem.clear_instance_cache()


def test_obstore_trusts_whom_a_bundle_names(secure: Any, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="it is an extra: treadle[obstore] is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{secure.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with pytest.raises(StorageError, match="AWS_CA_BUNDLE or SSL_CERT_FILE may name a bundle") as raised:
        read_all("s3://shards/a.tar")
    assert raised.value.kind == "refused"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority[0]))
    secure.faults = [lambda handler: handler.serve(cut=100_000)]
    assert read_all("s3://shards/a.tar") == secure.body


@pytest.mark.usefixtures("reader")
def test_the_same_quarantine_from_any_store(bucket: tuple[str, Any], server: Any, tars: Any, tmp_path: Path) -> None:
    tars.write_texts(tmp_path, [30])
    body = bytearray((tmp_path / "000.tar").read_bytes())
    body[1024 * 9 + 148] ^= 1
    (tmp_path / "bad.tar").write_bytes(body)
    server.body = bytes(body)
    bucket[1].put_object(Bucket="shards", Key="bad.tar", Body=bytes(body))
    found: list[tuple[int, str]] = []
    for url in (str(tmp_path / "bad.tar"), server.url, f"{bucket[0]}/bad.tar"):
        quarantine = Quarantine()
        with ShardStream(url, tars.text_shape, epochs=1, threads=1, quarantine=quarantine) as stream:
            found.append((sum(batch.segments for batch in stream), quarantine.summary()))
    # Nine samples come before the damage.
    assert found == [(9, "1 quarantined: 1 bad_checksum")] * 3
