"""One tar header: its sums, numbers, extension records, and the error that says what is wrong with it."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.pipeline.tar_header import TarError, checksum, parse_number, parse_pax, plain_size, signed_checksum


def test_errors_pickle() -> None:
    error = TarError("bad_size", 512, "detail", "a.txt", True)
    again = pickle.loads(pickle.dumps(error))
    assert (again.kind, again.offset, again.detail, again.name, str(again)) == ("bad_size", 512, "detail", "a.txt", str(error))


@settings(deadline=None)
@given(st.binary(min_size=512, max_size=512))
def test_checksum_is_the_sum_of_the_bytes(block: bytes) -> None:
    counted = block[:148] + block[156:]
    assert checksum(block) == sum(counted) + 8 * 32
    assert signed_checksum(block) == sum(byte - 256 if byte > 127 else byte for byte in counted) + 8 * 32


def test_numbers() -> None:
    assert parse_number(b"0000017 ") == 15
    assert parse_number(b"       \0") == 0
    assert parse_number(b"\x80\0\0\0\0\0\1\0") == 256
    for bad in (b"\xc0\0\0\0\0\0\0\1", b"9       ", b"1 7     ", b"-1      "):
        with pytest.raises(ValueError):
            parse_number(bad)


def test_pax_records_hold_anything() -> None:
    # "12 path=a=b\n" counts 12 bytes, "7 k=\n\n\n" counts 7
    assert parse_pax(b"12 path=a=b\n7 k=\n\n\n") == {b"path": b"a=b", b"k": b"\n\n"}


def test_plain_sizes_are_told_from_others() -> None:
    block = bytearray(512)
    block[124:136] = b"00000000017\0"
    block[148:156] = b"%06o\0 " % checksum(bytes(block))
    assert plain_size(bytes(block)) == 15
    for place, byte in ((124, 0x80), (130, 0x38), (135, 0x31), (148, 0x31), (154, 0x37), (300, 1)):
        other = bytearray(block)
        other[place] = byte
        assert plain_size(bytes(other)) == -1, place
    assert plain_size(bytes(512)) == -1
