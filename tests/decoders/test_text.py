"""Bytes pass as they are, and a cut falls between code points where there are any."""

from typing import Any

import pytest

from treadle.decoders import DecodeError, DecodeOptions, decode, probe
from treadle.shape import Modality

ODD = [
    b"\xef\xbb\xbfwith BOM",
    b"line\r\nline\r\n",
    b"nul\0inside\0",
    b"caf\xe9",
    "sixteen".encode("utf-16"),
    b"\xed\xa0\x80",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467".encode(),
    bytes(range(256)),
]


@pytest.mark.parametrize("data", ODD)
def test_bytes_pass_unchanged(make: Any, data: bytes) -> None:
    payload = decode(Modality.TEXT, data, make.shape())
    assert payload.array.tobytes() == data
    assert (payload.grid, payload.extent, payload.truncated) == ((len(data), 1, 1), (1, 1, len(data)), False)


def test_the_family_is_18_bytes(make: Any) -> None:
    # Three emoji of four bytes and two joiners of three.
    assert decode(Modality.TEXT, ODD[6], make.shape()).extent == (1, 1, 3 * 4 + 2 * 3)


def cut(make: Any, data: bytes, tokens: int, side: str) -> bytes:
    shape = make.shape(tokens + (2 if side == "head" else 1))
    payload = decode(Modality.TEXT, data, shape, DecodeOptions(), side)  # type: ignore[arg-type]
    seen = probe(Modality.TEXT, data, shape, DecodeOptions(), side)  # type: ignore[arg-type]
    assert seen.exact and (seen.grid, seen.extent) == (payload.grid, payload.extent)
    assert payload.truncated == (len(payload.array) < len(data))
    return payload.array.tobytes()


def test_a_row_loses_one_position_to_the_prefix_and_one_to_the_mask(make: Any) -> None:
    assert cut(make, b"abcdef", 4, "tail") == b"abcd"
    assert cut(make, b"abcdef", 4, "head") == b"cdef"
    assert cut(make, b"abcd", 4, "head") == b"abcd"


@pytest.mark.parametrize("tokens", range(1, 12))
def test_a_cut_keeps_whole_code_points(make: Any, tokens: int) -> None:
    text = "aé€😀b"  # 1 + 2 + 3 + 4 + 1 bytes
    data = text.encode()
    tails = [text[:i].encode() for i in range(len(text) + 1)]
    heads = [text[i:].encode() for i in range(len(text) + 1)]
    assert cut(make, data, tokens, "tail") == max((t for t in tails if len(t) <= tokens), key=len)
    assert cut(make, data, tokens, "head") == max((h for h in heads if len(h) <= tokens), key=len)


def test_invalid_text_is_cut_anywhere(make: Any) -> None:
    # Valid up to the cut, invalid behind it: the text as a whole is no UTF-8.
    data = "éé".encode() + b"\xff"
    assert cut(make, data, 3, "tail") == data[:3]
    assert cut(make, data, 2, "head") == data[-2:]


def test_validity_is_judged_across_blocks(make: Any) -> None:
    data = b"a" + "é".encode() * (1 << 20)  # every block of a power of two ends inside a code point
    assert cut(make, data, 1000, "tail") == data[:999]
    assert cut(make, data, 1001, "head") == data[-1000:]
    assert cut(make, data + b"\xc3", 1000, "tail") == data[:1000]


def test_no_code_point_fits(make: Any) -> None:
    for side in ("tail", "head"):
        with pytest.raises(DecodeError, match="3 tokens holds no whole code point") as caught:
            cut(make, "😀😀".encode(), 3, side)
        assert caught.value.kind == "too_large"


def test_the_payload_outlives_the_input(make: Any) -> None:
    data = bytearray(b"abc")
    payload = decode(Modality.TEXT, data, make.shape())
    data[0] = 0
    assert payload.array.tobytes() == b"abc"
