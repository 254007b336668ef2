"""Unpacking: what comes out equals what went in, and of a damaged stream every byte before the damage."""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.pipeline.storage import open_stream
from treadle.pipeline.unpack import UnpackedStream, UnpackError, unpacked

# Compressible and not: 40,000 bytes of text with numbers in it, then noise.
TEXT = b"".join(b"line %d of a text\n" % number for number in range(2000)) + random.Random(0).randbytes(20_000)


def unpack(path: Path, data: bytes, n: int = 7_000) -> tuple[bytes, UnpackError | None]:
    """Everything that comes out, and the error that ended it."""
    path.write_bytes(data)
    out = b""
    with open_stream(str(path)) as packed:
        stream = unpacked(packed)
        try:
            while piece := stream.read(n):
                out += piece
                assert stream.position == len(out) or not isinstance(stream, UnpackedStream)
        except UnpackError as error:
            return out, error
    return out, None


def zst(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True, **options).compress(data)  # type: ignore[arg-type]


def deflate(data: bytes) -> bytes:
    """A gzip member's raw deflate data."""
    return gzip.compress(data, mtime=0)[10:-8]


@pytest.mark.parametrize("n", [1, 777, 1 << 20])
def test_plain_bytes_stay_as_they_are(tmp_path: Path, n: int) -> None:
    for data in (b"", b"a", b"plain bytes" * 100):
        assert unpack(tmp_path / "x", data, n) == (data, None)


@pytest.mark.parametrize(
    "pack", [lambda data: gzip.compress(data, mtime=0), zst, lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data)]
)
@pytest.mark.parametrize("data", [b"", b"a", TEXT, bytes(3_000_000)])
def test_packed_and_back(tmp_path: Path, pack: Callable[[bytes], bytes], data: bytes) -> None:
    assert unpack(tmp_path / "x", pack(data)) == (data, None)
    # several in a row are one stream; zeros after it are padding
    assert unpack(tmp_path / "x", pack(data) + pack(b"more") + bytes(37)) == (data + b"more", None)
    assert unpack(tmp_path / "x", pack(data) + bytes(600_000)) == (data, None)


def test_gzip_headers_with_everything(tmp_path: Path) -> None:
    head = b"\x1f\x8b\x08\x1e" + bytes(6) + b"\x05\x00extra" + b"name\0" + b"a comment\0" + b"\x12\x34"
    trailer = zlib.crc32(TEXT).to_bytes(4, "little") + len(TEXT).to_bytes(4, "little")
    assert unpack(tmp_path / "x", head + deflate(TEXT) + trailer) == (TEXT, None)


def test_zstd_skippable_frames(tmp_path: Path) -> None:
    skippable = b"\x52\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    assert unpack(tmp_path / "x", skippable + zst(TEXT) + skippable) == (TEXT, None)


def test_gzip_crc_comes_after_all_the_data(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(TEXT))
    packed[-8] ^= 1
    out, error = unpack(tmp_path / "x", bytes(packed))
    assert out == TEXT
    assert error is not None
    assert (error.kind, error.offset) == ("gzip_crc", len(TEXT))
    packed = bytearray(gzip.compress(TEXT))
    packed[-1] ^= 1
    assert unpack(tmp_path / "x", bytes(packed))[0] == TEXT


def test_zstd_checksum_comes_after_all_the_data(tmp_path: Path) -> None:
    packed = bytearray(zst(TEXT))
    packed[-1] ^= 1
    out, error = unpack(tmp_path / "x", bytes(packed))
    assert out == TEXT
    assert error is not None
    assert (error.kind, error.offset) == ("zstd_checksum", len(TEXT))


def test_a_damaged_deflate_stream_gives_all_before_it(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(TEXT, mtime=0))
    place = len(packed) // 2
    packed[place : place + 40] = b"\xff" * 40
    out, error = unpack(tmp_path / "x", bytes(packed))
    assert error is not None
    assert error.kind in ("bad_gzip", "gzip_crc")
    # byte by byte is the most that zlib gives
    slow, inflater = b"", zlib.decompressobj(-15)
    try:
        for byte in packed[10:-8]:
            slow += inflater.decompress(bytes([byte]))
    except zlib.error:
        pass
    assert out[: len(slow)] == slow
    assert error.kind == "gzip_crc" or len(out) - len(slow) < 300


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(st.data())
def test_any_cut_is_told_and_loses_nothing_before_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("cut") / "x"
    for packed, kind in ((gzip.compress(TEXT, mtime=0), "truncated_gzip"), (zst(TEXT), "truncated_zstd")):
        length = data.draw(st.integers(4, len(packed) - 1))
        out, error = unpack(path, packed[:length])
        assert error is not None
        assert (error.kind, error.offset) == (kind, len(out))
        assert TEXT.startswith(out)
        if kind == "truncated_gzip":
            assert len(out) >= len(zlib.decompressobj(31).decompress(packed[:length]))


@pytest.mark.parametrize(
    ("tail", "kind"),
    [
        (b"junk at the end", "bad_gzip"),
        (bytes(100) + b"junk", "bad_gzip"),
        (b"\x1f\x8b\x08", "truncated_gzip"),
        (b"\x1f\x8b\x07" + bytes(20), "bad_gzip"),
    ],
)
def test_what_follows_gzip_is_told(tmp_path: Path, tail: bytes, kind: str) -> None:
    out, error = unpack(tmp_path / "x", gzip.compress(TEXT) + tail)
    assert out == TEXT
    assert error is not None
    assert error.kind == kind


def test_what_follows_zstd_is_told(tmp_path: Path) -> None:
    for tail, kind in ((b"junk at the end", "bad_zstd"), (bytes(10) + b"junk", "bad_zstd"), (b"\x28\xb5", "truncated_zstd")):
        out, error = unpack(tmp_path / "x", zst(TEXT) + tail)
        assert out == TEXT
        assert error is not None
        assert error.kind == kind


def test_a_bomb_is_unpacked_in_small_steps(tmp_path: Path) -> None:
    for packed in (gzip.compress(bytes(30_000_000), 9), zst(bytes(30_000_000))):
        path = tmp_path / "x"
        path.write_bytes(packed)
        with open_stream(str(path)) as stream:
            content = unpacked(stream)
            tracemalloc.start()
            assert content.skip(30_000_000) == 30_000_000
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 8_000_000


def test_a_window_that_is_too_large_is_refused(tmp_path: Path) -> None:
    # frame header: no single segment, window descriptor of 2^31 bytes
    frame = b"\x28\xb5\x2f\xfd" + bytes([0]) + bytes([21 << 3]) + b"\x01\x00\x00"
    error = unpack(tmp_path / "x", frame)[1]
    assert error is not None
    assert error.kind == "bad_zstd"
