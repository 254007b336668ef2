"""Eight threads decode a mixture of whole and damaged files and answer what one thread does; streams left half way end; nobody prints.

The suite runs a few seconds of it; `make soak` a minute (TREADLE_SOAK_S), with worker processes too.
"""

import io
import logging
import os
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, decode
from treadle.decoders.limits import Deadline
from treadle.decoders.video import _Clip
from treadle.pipeline import ShardStream
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

SOAK_S = float(os.environ.get("TREADLE_SOAK_S", "2"))
THREADS = 8
Answer = tuple[Any, ...]


def whole_files(make: Any) -> list[tuple[Modality, bytes]]:
    rgb = make.picture(96, 144)
    sound, wide = make.sine(0.5), make.sine(0.5, 48_000)
    stills = [make.save(Image.fromarray(rgb), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")]
    stills += [make.save(rgb, "JPEG", progressive=True), make.save(Image.fromarray(rgb).convert("CMYK"), "JPEG")]
    films = [make.clip(make.moving(8), *codec) for codec in (("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libvpx", "webm"))]
    films += [make.clip(make.moving(8), *codec) for codec in (("libx264", "mpegts"), ("mpeg4", "avi"), ("ffv1", "matroska"))]
    sounds = [make.wav((sound * 32767).astype("<i2").tobytes()), make.sound(wide, 48_000, "libopus", "ogg")]
    sounds += [
        make.sound(sound, 44_100, *codec) for codec in (("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "ipod"), ("adpcm_ms", "wav"))
    ]
    sounds.append(make.sound([sound] * 2, 44_100, "vorbis", "ogg", layout="stereo", options={"strict": "experimental"}))
    texts = ["déjà vu".encode(), b"\xff\xfe\0"]
    kinds = [(Modality.IMAGE, stills), (Modality.VIDEO, films), (Modality.AUDIO, sounds), (Modality.TEXT, texts)]
    return [(modality, data) for modality, files in kinds for data in files]


def damaged(data: bytes, number: int) -> bytes:
    out = bytearray(data)
    for place in np.random.default_rng(number).integers(0, len(out), 4).tolist():
        out[place] ^= 0x5A
    return bytes(out)


@pytest.fixture(scope="module")
def mixture(make: Any) -> list[tuple[Modality, bytes]]:
    whole = whole_files(make)
    return [*whole, *((modality, damaged(data, number)) for number, (modality, data) in enumerate(whole))]


def answer(item: tuple[Modality, bytes], shape: BatchShape, options: DecodeOptions) -> Answer:
    modality, data = item
    try:
        payload = decode(modality, data, shape, options)
    except DecodeError as error:
        return error.kind, error.detail
    return payload.grid, payload.extent, payload.truncated, payload.array.tobytes()


@pytest.mark.parametrize("isolate", [False, True] if SOAK_S >= 10 else [False])
def test_eight_threads_answer_what_one_does(make: Any, mixture: list[tuple[Modality, bytes]], isolate: bool) -> None:
    shape = make.shape(129, image=ImageShape(patch_side=16, channels=3))
    # A clock that a stopped or crowded machine does not run out: what is compared is not how long it took.
    options = DecodeOptions(isolate=isolate, max_wall_s=86_400)
    expected = [answer(item, shape, DecodeOptions(isolate=False)) for item in mixture]
    assert {len(one) for one in expected} == {2, 4}, "some are refused, some decoded"
    end, wrong = time.monotonic() + SOAK_S, list[int]()
    rounds = [0] * THREADS

    def work(thread: int) -> None:
        draw = np.random.default_rng(thread)
        while rounds[thread] == 0 or time.monotonic() < end:
            for place in draw.permutation(len(mixture)).tolist():
                if answer(mixture[place], shape, options) != expected[place]:
                    wrong.append(place)
                if rounds[thread] and time.monotonic() > end:
                    break
            rounds[thread] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, sorted(set(wrong))
    assert min(rounds) >= 1


def shard(make: Any, folder: Path, samples: int) -> str:
    path = folder / "films.tar"
    film, sound = make.clip(make.moving(8)), make.sound(make.sine(0.5, 48_000), 48_000, "libopus", "ogg")
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for name, data in (("mp4", film), ("opus", sound), ("txt", b"text"), ("bad.mp4", film[:-20])):
                entry = tarfile.TarInfo(f"{number:04d}.{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return str(path)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_stream_left_half_way_ends(make: Any, tmp_path: Path, isolate: bool) -> None:
    url = shard(make, tmp_path, 12)
    shape = BatchShape(
        max_rows_per_device=2, max_segments_per_device=16, max_columns_per_row=512,
        image=ImageShape(patch_side=16), video=VideoShape(patch_side=16), audio=AudioShape(chunk_samples=400),
    )  # fmt: skip
    done = threading.Event()

    def leave() -> None:
        for taken in (1,) if isolate else (1, 2):
            stream = ShardStream(url, shape, epochs=None, threads=2 if isolate else 8, options=DecodeOptions(isolate=isolate))
            for number, _ in enumerate(stream, 1):
                if number == taken:
                    break
            stream.close()
        done.set()

    before = threading.active_count()
    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    assert done.wait(300), "it hangs"
    thread.join()
    assert threading.active_count() == before


def test_frames_that_nobody_takes_hold_nothing(make: Any) -> None:
    data = make.clip(make.moving(30))
    clips = [_Clip(memoryview(data), VideoShape(patch_side=16).resolved(), DecodeOptions(), Deadline(60)) for _ in range(20)]
    taken = [clip.frames() for clip in clips]
    pictures: list[NDArray[Any]] = [next(frames).to_ndarray(format="gray") for frames in taken]
    for frames in taken:
        frames.close()
        with pytest.raises(StopIteration):
            next(frames)
    for picture in pictures[1:]:
        np.testing.assert_array_equal(picture, pictures[0])


def test_codecs_print_and_log_nothing(
    make: Any, mixture: list[tuple[Modality, bytes]], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shape = make.shape(129)
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG, logger="libav"):
        for number in range(6):
            for modality, data in mixture:
                answer((modality, damaged(data, number)), shape, DecodeOptions(isolate=False, strict=number % 2 == 0))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("libav")]
