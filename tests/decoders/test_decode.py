"""The entry: what it imports, what it refuses, and that nothing but DecodeError comes out of bad bytes."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from PIL import Image

import treadle.decoders
from treadle.decoders import DecodeError, DecodeOptions, Payload, decode, probe
from treadle.shape import BatchShape, Modality


def test_exports() -> None:
    assert treadle.decoders.__all__ == ["DecodeError", "DecodeOptions", "Payload", "Probe", "decode", "probe"]


def test_import_loads_no_codec_and_no_torch() -> None:
    heavy = "{'PIL', 'av', 'soxr', 'simplejpeg', 'torch', 'torchaudio'}"
    code = f"import sys, treadle.decoders; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_error_crosses_processes() -> None:
    error = DecodeError("corrupt", "frame 3 is damaged")
    error.index = 7
    again = pickle.loads(pickle.dumps(error))
    assert (again.kind, again.detail, again.index, str(again)) == ("corrupt", "frame 3 is damaged", 7, "corrupt: frame 3 is damaged")


@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize("call", [decode, probe])
def test_no_bytes_are_empty(make: Any, modality: Modality, call: Any) -> None:
    for nothing in (b"", bytearray(), memoryview(b"")):
        with pytest.raises(DecodeError) as caught:
            call(modality, nothing, make.shape())
        assert caught.value.kind == "empty"


@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO, Modality.AUDIO])
@pytest.mark.parametrize(
    "data", [b"<html><body>404</body></html>", b"\0" * 100, b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile '/etc/passwd'\n"]
)
def test_other_content_is_unsupported(make: Any, modality: Modality, data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(modality, data, make.shape())
    assert caught.value.kind == "unsupported"


def test_a_modality_without_a_slice_is_the_callers_mistake() -> None:
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=8)
    with pytest.raises(ValueError, match=r"no live image slice \(BatchShape.image\)"):
        decode(Modality.IMAGE, b"x", shape)
    with pytest.raises(ValueError, match="cut is 'middle'"):
        decode(Modality.TEXT, b"x", shape, cut="middle")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [f.name for f in fields(DecodeOptions)])
def test_options_are_checked(field: str) -> None:
    bad: tuple[object, ...] = (2, "yes") if field in ("strict", "isolate") else (0, -1, "1", float("nan"))
    for value in bad:
        with pytest.raises(ValueError, match=rf"DecodeOptions.{field} is {value!r}"):
            DecodeOptions(**{field: value})  # type: ignore[arg-type]


def test_input_bytes_are_limited(make: Any) -> None:
    with pytest.raises(DecodeError, match="11 bytes are above max_input_bytes 10") as caught:
        decode(Modality.TEXT, b"hello world", make.shape(), DecodeOptions(max_input_bytes=10))
    assert caught.value.kind == "too_large"


def test_a_codecs_own_exception_becomes_a_decode_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for raised, kind in ((KeyError("x"), "corrupt"), (MemoryError("x"), "too_large"), (RecursionError("x"), "corrupt")):

        def fail(*_: object, error: Exception = raised) -> None:
            raise error

        monkeypatch.setattr("treadle.decoders.image.sniff", fail)
        with pytest.raises(DecodeError) as caught:
            decode(Modality.IMAGE, b"x", make.shape())
        assert caught.value.kind == kind and caught.value.__cause__ is raised


def test_a_missing_library_is_no_fault_of_the_item(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImportError):
        make.image(make.save(make.picture(16, 16), "JPEG"))


def test_the_wall_clock_ends_a_decode(make: Any) -> None:
    clip = make.clip(make.moving(30))
    sound = make.sound(make.sine(2.0), 44_100, "flac", "flac")
    wav = make.wav(bytes(1 << 20))
    for modality, data in ((Modality.VIDEO, clip), (Modality.AUDIO, sound), (Modality.AUDIO, wav)):
        with pytest.raises(DecodeError, match="max_wall_s") as caught:
            decode(modality, data, make.shape(100_000), DecodeOptions(max_wall_s=1e-9))
        assert caught.value.kind == "timeout"


def _mixed(make: Any) -> list[tuple[Modality, bytes]]:
    picture = make.picture(64, 96)
    return [
        (Modality.TEXT, "déjà vu".encode()),
        (Modality.IMAGE, make.save(picture, "JPEG")),
        (Modality.IMAGE, make.save(picture, "PNG")),
        (Modality.IMAGE, make.save(picture, "WEBP")),
        (Modality.IMAGE, make.save(Image.fromarray(picture).quantize(), "GIF")),
        (Modality.VIDEO, make.clip(make.moving(12))),
        (Modality.VIDEO, make.clip(make.moving(12), "libvpx-vp9", "webm")),
        (Modality.AUDIO, make.wav((make.sine(0.3) * 32767).astype("<i2").tobytes())),
        (Modality.AUDIO, make.sound(make.sine(0.3), 44_100, "libmp3lame", "mp3")),
        (Modality.AUDIO, make.sound(make.sine(0.3, 48_000), 48_000, "libopus", "ogg")),
        (Modality.AUDIO, make.sound(make.sine(0.3), 44_100, "flac", "flac")),
        (Modality.IMAGE, b"\xff\xd8\xff"),
        (Modality.VIDEO, b"\0\0\0\x10ftypisom"),
    ]


def _outcome(modality: Modality, data: bytes, shape: BatchShape) -> Payload | str:
    try:
        return decode(modality, data, shape, DecodeOptions(isolate=False))
    except DecodeError as error:
        return error.kind


def test_eight_threads_answer_what_one_does(make: Any) -> None:
    items, shape = _mixed(make), make.shape()
    alone = [_outcome(modality, data, shape) for modality, data in items]
    order = np.random.default_rng(0).permutation(len(items) * 8) % len(items)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda place: _outcome(items[place][0], items[place][1], shape), order.tolist()))
    for place, answer in zip(order.tolist(), together, strict=True):
        expected = alone[place]
        if isinstance(expected, Payload):
            assert isinstance(answer, Payload)
            assert (answer.grid, answer.extent, answer.truncated) == (expected.grid, expected.extent, expected.truncated)
            np.testing.assert_array_equal(answer.array, expected.array)
        else:
            assert answer == expected


def test_payloads_are_contiguous_and_typed(make: Any) -> None:
    shape = make.shape()
    for modality, data in _mixed(make):
        answer = _outcome(modality, data, shape)
        if isinstance(answer, Payload):
            assert answer.array.flags.c_contiguous
            assert answer.array.dtype == (np.float32 if modality is Modality.AUDIO else np.uint8)
            assert answer.array.ndim == {Modality.TEXT: 1, Modality.AUDIO: 1, Modality.IMAGE: 3, Modality.VIDEO: 4}[modality]
            assert answer.tokens == answer.grid[0] * answer.grid[1] * answer.grid[2]


def test_every_buffer_type_is_read(make: Any) -> None:
    data = make.save(make.picture(16, 16), "PNG")
    expected = make.image(data).array
    for buffer in (bytearray(data), memoryview(data), memoryview(bytearray(data)).toreadonly()):
        np.testing.assert_array_equal(make.image(buffer).array, expected)


def test_a_modality_may_be_its_number(make: Any) -> None:
    data = make.save(make.picture(16, 16), "PNG")
    np.testing.assert_array_equal(decode(1, data, make.shape()).array, decode(Modality.IMAGE, data, make.shape()).array)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        decode(4, data, make.shape())  # type: ignore[arg-type]


def test_a_demuxer_that_seeks_before_the_file_raises_nothing_into_the_library() -> None:
    from treadle.decoders.limits import Deadline
    from treadle.decoders.media import Reader

    reader = Reader(memoryview(b"abcdef"), Deadline(60))
    assert (reader.read(4), reader.tell(), reader.seek(-2, 2), reader.read(9), reader.read(1)) == (b"abcd", 4, 4, b"ef", b"")
    assert reader.seek(-1) < 0 and reader.tell() == 6
    assert Reader(memoryview(b"abc"), Deadline(1e-9)).read(1) == b""
