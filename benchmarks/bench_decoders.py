"""What decoding costs beyond the codec: CPU time of one core against the fastest decoder alone, every case in turns.

    still pictures   at most 1.15 (JPEG) and 1.1 (PNG, WebP) times the decoder alone; a JPEG at a quarter of its size
                     at least 2 times as fast as full decode + resize
    video            at least 0.9 of the rate of a bare PyAV loop that converts the same frames
    audio            at most 1.3 times the fastest decoder found plus the resampler alone
    workers          wall time of an item in a worker process against the same item here
    memory           peak of a decode beyond its payload: at most one decoded frame and a constant
    damage           VP8 clips of which one byte is wrong: how many are refused, here and by FFmpeg's decoders

Inputs are made on the spot: a scene of several octaves of noise, a pan over it, ten seconds of stereo notes.
"""

import argparse
import functools
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import record
import simplejpeg
import soxr
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, decode
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

HERE = DecodeOptions(isolate=False)
PEAK = """
import json, pathlib, sys
from treadle.decoders import DecodeOptions, decode
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape
def peak_kib():
    return next(int(line.split()[1]) for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
modality, files = Modality[sys.argv[1]], [pathlib.Path(file).read_bytes() for file in sys.argv[2:4]]
shape = BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=1_000_001, image=ImageShape(patch_side=16, channels=3),
    video=VideoShape(patch_side=16), audio=AudioShape(chunk_samples=160))
decode(modality, files[0], shape, DecodeOptions(isolate=False))
before = peak_kib()
payload = decode(modality, files[1], shape, DecodeOptions(isolate=False)).array.nbytes
print(json.dumps([payload / 2**20, (peak_kib() - before) / 2**10]))
"""
"""Decodes a small file, then a large one: what the second adds to the process's peak. A process inherits getrusage's, not VmHWM."""
Case = Callable[[], object]


def shape(tokens: int, **slices: Any) -> BatchShape:
    """A shape whose rows hold `tokens` tokens of any one item."""
    return BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=tokens + 1, **slices)


def in_turns(cases: Mapping[str, Case], repetitions: int, clock: Callable[[], float] = time.process_time) -> dict[str, list[float]]:
    """Seconds of each case, the cases taking turns; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repetitions + 1):
        for name, run in cases.items():
            begun = clock()
            run()
            if turn:
                seconds[name].append(clock() - begun)
    return seconds


def scene(height: int, width: int) -> NDArray[np.uint8]:
    """A picture with the detail of a photograph: octaves of noise, the finest the weakest."""
    draw = np.random.default_rng(0)
    total = draw.normal(128, 4, (height, width, 3)).astype(np.float32)
    for side, level in ((4, 50.0), (16, 35.0), (64, 20.0), (256, 8.0)):
        grid = draw.normal(0, level, (side, side, 3)).astype(np.float32)
        for channel in range(3):
            total[..., channel] += np.asarray(Image.fromarray(grid[..., channel]).resize((width, height), Image.Resampling.BICUBIC))
    return np.clip(total, 0, 255).astype(np.uint8)


def saved(picture: NDArray[np.uint8], kind: str, **fields: Any) -> bytes:
    """The picture as a file."""
    out = io.BytesIO()
    Image.fromarray(picture).save(out, kind, **fields)
    return out.getvalue()


def clip(codec: str, container: str, options: dict[str, str], count: int) -> bytes:
    """A pan over a scene, 1280 x 720."""
    large, out = scene(720 + count, 1280 + 2 * count), io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for number in range(count):
            view = large[number : number + 720, 2 * number : 2 * number + 1280]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(view), format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


def notes(rate: int, times: int = 1) -> NDArray[np.float32]:
    """Ten seconds of two channels, struck twice a second, over faint noise; again and again."""
    time_s = np.arange(10 * rate) / rate
    draw = np.random.default_rng(1)
    channels: list[NDArray[np.float64]] = []
    for pitches in ((220, 277, 330, 440, 880, 1760), (110, 311, 415, 622, 1244, 2489)):
        tones = sum((0.08 * np.sin(2 * np.pi * hz * time_s) for hz in pitches), np.zeros_like(time_s))
        channels.append(tones * np.exp(-2 * (2 * time_s % 1)) + 0.005 * draw.normal(size=len(time_s)))
    return np.tile(np.stack(channels).astype(np.float32), times)


def recording(codec: str, container: str, rate: int, bit_rate: int = 0, times: int = 1) -> bytes:
    """`notes` as a file."""
    samples, out = notes(rate, times), io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout="stereo")
        if bit_rate:
            stream.bit_rate = bit_rate
        resampler = av.AudioResampler(format=stream.codec_context.codec.audio_formats[0].name, layout="stereo", rate=rate)
        size = stream.codec_context.frame_size or 1024
        for start in range(0, samples.shape[1], size):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[:, start : start + size]), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            for converted in resampler.resample(frame):
                file.mux(stream.encode(converted))
        file.mux(stream.encode(None))
    return out.getvalue()


def report(what: str, ours: list[float], theirs: list[float], baseline: str, case: dict[str, object], *, rate: bool = False) -> None:
    """Appends our time, and its ratio to the baseline's: of times, or of rates where more is better."""
    record.append(record.Row(op="decode", impl=what, shape=case, metric="CPU time", unit="ms", values=[1e3 * value for value in ours]))
    ratios = record.ratios(theirs, ours) if rate else record.ratios(ours, theirs)
    metric = "rate ratio" if rate else "CPU time ratio"
    record.append(record.Row(op="decode", impl=what, baseline=baseline, shape=case, metric=metric, unit="x", values=ratios))


def pictures(repetitions: int) -> None:
    """Stills at their own size, and JPEGs at a quarter of it."""
    picture, rgb = scene(512, 512), shape(1024, image=ImageShape(patch_side=16, channels=3))
    jpeg = saved(picture, "JPEG", quality=85)
    seconds = in_turns(
        {"ours": lambda: decode(Modality.IMAGE, jpeg, rgb, HERE), "theirs": lambda: simplejpeg.decode_jpeg(jpeg, "RGB")}, 4 * repetitions
    )
    report("decode", seconds["ours"], seconds["theirs"], "simplejpeg", {"file": "JPEG", "side_px": 512})
    for kind in ("PNG", "WEBP"):
        data = saved(picture, kind)
        seconds = in_turns(
            {
                "ours": lambda data=data: decode(Modality.IMAGE, data, rgb, HERE),
                "theirs": lambda data=data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
            },
            repetitions,
        )
        report("decode", seconds["ours"], seconds["theirs"], "Pillow", {"file": kind, "side_px": 512})
    for side in (512, 1024, 2048):
        data, small = saved(scene(side, side), "JPEG", quality=85), side // 4
        row = shape((small // 16) ** 2, image=ImageShape(patch_side=16, channels=3))
        assert decode(Modality.IMAGE, data, row, HERE).extent == (1, small, small)

        def full(data: bytes = data, small: int = small) -> object:
            return np.asarray(Image.fromarray(simplejpeg.decode_jpeg(data, "RGB")).resize((small, small), Image.Resampling.LANCZOS))

        seconds = in_turns({"ours": lambda data=data, row=row: decode(Modality.IMAGE, data, row, HERE), "theirs": full}, repetitions)
        report("quarter size", seconds["ours"], seconds["theirs"], "full decode + Lanczos", {"file": "JPEG", "side_px": side}, rate=True)


def bare_video(data: bytes, most: int, size: tuple[int, int] | None = None, codec: str = "") -> list[NDArray[Any]]:
    """The loop that everybody writes, with FFmpeg's usual decoder or another one."""
    frames: list[NDArray[Any]] = []
    with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
        context: Any = av.CodecContext.create(codec, "r") if codec else container.streams.video[0].codec_context
        context.thread_count = 1
        for packet in container.demux(video=0):
            for frame in context.decode(packet):
                if len(frames) == most:
                    return frames
                height, width = size or (frame.height, frame.width)
                frames.append(frame.to_ndarray(format="rgb24", width=width, height=height))
    return frames


def videos(repetitions: int, count: int) -> dict[str, bytes]:
    """720p clips whole, and scaled down to what a row of 4,096 tokens holds."""
    clips = {
        "MP4 H.264": clip("libx264", "mp4", {"preset": "veryfast", "crf": "23"}, count),
        "WebM VP8": clip("libvpx", "webm", {"crf": "10", "b": "2M", "cpu-used": "8", "deadline": "realtime"}, count),
        "WebM VP9": clip("libvpx-vp9", "webm", {"crf": "33", "b": "0", "cpu-used": "8", "deadline": "realtime"}, count),
    }
    for name, data in clips.items():
        for tokens in (45 * 80 * count // 2, 4096):
            row = shape(tokens, video=VideoShape(patch_side=16))
            frames, height, width = decode(Modality.VIDEO, data, row, HERE).extent
            size = None if (height, width) == (720, 1280) else (height, width)
            loops = {"bare PyAV loop": ""}
            if name == "WebM VP8":
                # FFmpeg's own VP8, its default, shows damaged frames without a word; ours is libvpx's, which tells.
                loops["bare PyAV loop, libvpx"] = "libvpx"

            def bare(codec: str, data: bytes = data, frames: int = frames, size: tuple[int, int] | None = size) -> object:
                return bare_video(data, frames, size, codec)

            cases: dict[str, Case] = {"ours": lambda data=data, row=row: decode(Modality.VIDEO, data, row, HERE)}
            cases |= {loop: functools.partial(bare, codec) for loop, codec in loops.items()}
            seconds = in_turns(cases, repetitions)
            case: dict[str, object] = {"file": name, "frames": frames, "height_px": height, "width_px": width, "stored_px": "1280x720"}
            for loop in loops:
                report("decode", seconds["ours"], seconds[loop], loop, case, rate=True)
    return clips


def bare_audio(data: bytes) -> int:
    """Every frame of a recording through PyAV, nothing made of it."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        return sum(frame.samples for frame in container.decode(stream))


def recordings(repetitions: int) -> dict[str, bytes]:
    """Ten seconds of stereo to 16 kHz mono."""
    files = {
        "WAV": (recording("pcm_s16le", "wav", 44_100), 44_100),
        "FLAC": (recording("flac", "flac", 44_100), 44_100),
        "MP3": (recording("libmp3lame", "mp3", 44_100, 128_000), 44_100),
        "Opus": (recording("libopus", "ogg", 48_000, 96_000), 48_000),
        "M4A": (recording("aac", "ipod", 44_100, 128_000), 44_100),
    }
    row = shape(20_000, audio=AudioShape(chunk_samples=160, sample_rate=16_000))
    for name, (data, rate) in files.items():
        mono = notes(rate).mean(0)
        decoders: dict[str, Case] = {"PyAV": lambda data=data: bare_audio(data)}
        try:
            import soundfile

            soundfile.read(io.BytesIO(data))
            decoders["soundfile"] = lambda data=data, read=soundfile.read: read(io.BytesIO(data), dtype="float32")
        except (ImportError, RuntimeError):
            pass
        cases = {
            "ours": lambda data=data: decode(Modality.AUDIO, data, row, HERE),
            "resampler": lambda mono=mono, rate=rate: soxr.resample(mono, rate, 16_000, "HQ"),
            **decoders,
        }
        seconds = in_turns(cases, 2 * repetitions)
        fastest = min(decoders, key=lambda decoder: statistics.median(seconds[decoder]))
        theirs = [codec + resampler for codec, resampler in zip(seconds[fastest], seconds["resampler"], strict=True)]
        report("decode", seconds["ours"], theirs, f"{fastest} + soxr HQ", {"file": name, "seconds": 10, "channels": 2, "rate_hz": rate})
    return {name: data for name, (data, _) in files.items()}


def workers(clips: Mapping[str, bytes], files: Mapping[str, bytes], repetitions: int) -> None:
    """Wall time with and without a worker process."""
    sound = shape(20_000, audio=AudioShape(chunk_samples=160, sample_rate=16_000))
    cases = [(Modality.AUDIO, name, files[name], sound) for name in ("MP3", "Opus")]
    cases += [(Modality.VIDEO, name, data, shape(4096, video=VideoShape(patch_side=16))) for name, data in clips.items()]
    cases += [(Modality.VIDEO, name, data, shape(8 * 3600, video=VideoShape(patch_side=16))) for name, data in clips.items()]
    for modality, name, data, row in cases:
        extent = decode(modality, data, row).extent
        seconds = in_turns(
            {
                "worker": lambda modality=modality, data=data, row=row: decode(modality, data, row),
                "here": lambda modality=modality, data=data, row=row: decode(modality, data, row, HERE),
            },
            repetitions,
            time.perf_counter,
        )
        case: dict[str, object] = {"file": name, "extent": "x".join(map(str, extent))}
        ratios = record.ratios(seconds["worker"], seconds["here"])
        record.append(
            record.Row(
                op="decode", impl="worker process", baseline="in process", shape=case, metric="wall time ratio", unit="x", values=ratios
            )
        )


def memory() -> None:
    """What a decode takes beyond its payload, of files whose payload is large."""
    codecs = {"WAV": ("pcm_s16le", "wav", 0), "FLAC": ("flac", "flac", 0), "MP3": ("libmp3lame", "mp3", 64_000)}
    cases: list[tuple[Modality, str, bytes, bytes, float]] = []
    for name, (codec, container, bit_rate) in codecs.items():
        small, large = (recording(codec, container, 16_000, bit_rate, times) for times in (1, 60))
        cases.append((Modality.AUDIO, name, small, large, 0.0))
    for name, codec, container in (("MP4 H.264", "libx264", "mp4"), ("WebM VP8", "libvpx", "webm")):
        options = {"preset": "ultrafast"} if codec == "libx264" else {"cpu-used": "8", "deadline": "realtime"}
        small, large = (clip(codec, container, options, count) for count in (2, 96))
        cases.append((Modality.VIDEO, name, small, large, 1280 * 720 * 1.5 / 2**20))
    for kind in ("JPEG", "PNG", "WEBP"):
        small, large = (saved(scene(side, side), kind) for side in (64, 2048))
        # Pillow holds RGB in four bytes; a JPEG or WebP is decoded into its payload.
        cases.append((Modality.IMAGE, kind, small, large, 2048 * 2048 * 4 / 2**20 if kind == "PNG" else 0.0))
    with tempfile.TemporaryDirectory() as folder:
        for modality, name, small, large, frame_mib in cases:
            files = [Path(folder, "small"), Path(folder, "large")]
            for file, data in zip(files, (small, large), strict=True):
                file.write_bytes(data)
            command = [sys.executable, "-P", "-c", PEAK, modality.name, *map(str, files)]
            answers = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(2)]
            case: dict[str, object] = {"file": name, "payload_mib": round(answers[0][0], 1), "file_mib": round(len(large) / 2**20, 1)}
            beyond = [grown - payload - frame_mib for payload, grown in answers]
            record.append(
                record.Row(op="decode", impl="decode", shape=case, metric="peak beyond payload and a frame", unit="MiB", values=beyond)
            )


def damage(count: int = 600) -> None:
    """Clips of 12 frames with one byte replaced behind the header."""
    codec_name, out = "libvpx", io.BytesIO()
    with av.open(out, "w", format="webm") as file:
        stream: Any = file.add_stream(codec_name, rate=10, options={"b": "200k"})
        stream.width, stream.height, stream.pix_fmt = 176, 144, "yuv420p"
        large = scene(144 + 24, 176 + 24)
        for number in range(12):
            view = np.ascontiguousarray(large[2 * number : 2 * number + 144, 2 * number : 2 * number + 176])
            file.mux(stream.encode(av.VideoFrame.from_ndarray(view, format="rgb24")))
        file.mux(stream.encode(None))
    whole, draw, row = out.getvalue(), np.random.default_rng(8), shape(100_000, video=VideoShape(patch_side=16))

    def bare(data: bytes, codec: str) -> list[NDArray[Any]] | None:
        try:
            return bare_video(data, 12, None, codec)
        except (av.error.FFmpegError, IndexError):
            return None

    refused = dict.fromkeys(("decode", "FFmpeg vp8", "FFmpeg libvpx", "both of FFmpeg's, where they differ"), 0)
    for _ in range(count):
        data = bytearray(whole)
        data[int(draw.integers(len(whole) // 8, len(whole) - 60))] ^= int(draw.integers(1, 256))
        own, reference = bare(bytes(data), "vp8"), bare(bytes(data), codec_name)
        alike = own is not None and reference is not None and len(own) == len(reference) and all(map(np.array_equal, own, reference))
        try:
            ours = decode(Modality.VIDEO, bytes(data), row, HERE).array
        except DecodeError:
            refused["decode"] += 1
        else:
            # What is shown is the reference decoder's.
            assert reference is not None and np.array_equal(ours, np.stack(reference))
        refused["FFmpeg vp8"] += own is None
        refused["FFmpeg libvpx"] += reference is None
        refused["both of FFmpeg's, where they differ"] += not alike
    for impl, number in refused.items():
        case: dict[str, object] = {"file": "WebM VP8", "clips": count, "frames": 12, "bytes": len(whole)}
        record.append(
            record.Row(op="decode", impl=impl, shape=case, metric="damaged clips refused", unit="%", values=[100 * number / count])
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="five times the turns, and clips of twice the length")
    parser.add_argument("--only", choices=("pictures", "memory"), help="only these rows")
    arguments = parser.parse_args()
    repetitions, count = (50, 96) if arguments.full else (10, 48)
    if arguments.only != "memory":
        pictures(2 * repetitions)
    if arguments.only == "pictures":
        return
    if arguments.only == "memory":
        return memory()
    clips = videos(repetitions, count)
    files = recordings(repetitions)
    workers(clips, files, repetitions)
    memory()
    damage()


if __name__ == "__main__":
    main()
