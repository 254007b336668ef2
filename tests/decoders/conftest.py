"""Makes every kind of media file in memory, so that the tests carry almost none."""

import io
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions, Payload, decode
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

_PLANAR: dict[str, Any] = {"fltp": np.float32, "s16p": np.int16, "s32p": np.int32, "dblp": np.float64}
_PACKED: dict[str, Any] = {"flt": np.float32, "s16": np.int16, "s32": np.int32, "dbl": np.float64, "u8": np.uint8}


class Maker:
    """Encoders, shapes and shortcuts, which decode in this process: test_isolate.py is about the others."""

    def shape(self, columns: int = 4097, **slices: Any) -> BatchShape:
        """A shape with every slice live; a row holds `columns - 1` tokens."""
        parts: dict[str, Any] = {
            "image": ImageShape(patch_side=16),
            "video": VideoShape(patch_side=16),
            "audio": AudioShape(chunk_samples=100),
        }
        return BatchShape(max_rows_per_device=1, max_segments_per_device=4, max_columns_per_row=columns, **{**parts, **slices})

    def image(self, data: bytes, channels: int = 3, *, columns: int = 4097, patch: int = 16, **options: Any) -> Payload:
        """Decodes a picture."""
        shape = self.shape(columns, image=ImageShape(patch_side=patch, channels=channels))
        return decode(Modality.IMAGE, data, shape, DecodeOptions(**{"isolate": False, **options}))

    def video(self, data: bytes, *, columns: int = 4097, options: dict[str, Any] | None = None, **slice_fields: Any) -> Payload:
        """Decodes a clip."""
        shape = self.shape(columns, video=VideoShape(**{"patch_side": 16, **slice_fields}))
        return decode(Modality.VIDEO, data, shape, DecodeOptions(**{"isolate": False, **(options or {})}))

    def audio(self, data: bytes, rate: int = 16_000, *, columns: int = 100_000, **options: Any) -> Payload:
        """Decodes a recording."""
        shape = self.shape(columns, audio=AudioShape(chunk_samples=100, sample_rate=rate))
        return decode(Modality.AUDIO, data, shape, DecodeOptions(**{"isolate": False, **options}))

    def turned(self, data: bytes, place: int, bit: int) -> int:
        """Frames of a clip with one bit turned; -1 where it is refused."""
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        try:
            return int(self.video(bytes(damaged), columns=100_000).extent[0])
        except DecodeError:
            return -1

    def boxes(self, data: bytes, inside: Collection[bytes], start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
        """Kind, begin and end of every MP4 box, those within `inside` too."""
        end = len(data) if end is None else end
        while start + 8 <= end:
            length, kind = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
            yield kind, start, start + length
            if kind in inside:
                yield from self.boxes(data, inside, start + 8, start + length)
            start += length

    def sine(self, seconds: float = 1.0, rate: int = 44_100, hz: float = 440.0, peak: float = 0.125) -> NDArray[np.float64]:
        """One channel."""
        return peak * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)

    def picture(self, height: int = 256, width: int = 256, seed: int = 0) -> NDArray[np.uint8]:
        """Noise over a slope, so that no two rows are alike."""
        noise = np.random.default_rng(seed).integers(0, 64, (height, width, 3))
        y, x = np.mgrid[0:height, 0:width]
        slope = np.stack([x * 190 // width, y * 190 // height, (x + y) * 190 // (height + width)], -1)
        return (slope + noise).astype(np.uint8)

    def save(self, picture: Image.Image | NDArray[Any], kind: str, **fields: Any) -> bytes:
        """A picture through Pillow."""
        out = io.BytesIO()
        source = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
        source.save(out, kind, **fields)
        return out.getvalue()

    def png_chunk(self, kind: bytes, body: bytes) -> bytes:
        """One PNG chunk."""
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    def png(self, height: int, width: int, depth: int, colour: int, rows: bytes, *middle: bytes, interlace: int = 0) -> bytes:
        """A PNG by hand: `rows` are filtered rows before deflation, `middle` chunks stand before them."""
        header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
        return b"".join(
            [
                b"\x89PNG\r\n\x1a\n",
                self.png_chunk(b"IHDR", header),
                *middle,
                self.png_chunk(b"IDAT", zlib.compress(rows)),
                self.png_chunk(b"IEND", b""),
            ]
        )

    def wav(
        self,
        sound: bytes,
        *,
        tag: int = 1,
        channels: int = 1,
        rate: int = 44_100,
        bits: int = 16,
        order: str = "<",
        before: bytes = b"",
        after: bytes = b"",
        data_size: int | None = None,
        riff_size: int | None = None,
        extra: bytes = b"",
    ) -> bytes:
        """A WAV by hand."""
        frame = channels * -(-bits // 8)
        form = struct.pack(order + "HHIIHH", tag, channels, rate, rate * frame, frame, bits) + extra
        size = len(sound) if data_size is None else data_size
        body = b"WAVE" + b"fmt " + struct.pack(order + "I", len(form)) + form + before
        body += b"data" + struct.pack(order + "I", size) + sound + after
        riff = len(body) if riff_size is None else riff_size
        return (b"RIFF" if order == "<" else b"RIFX") + struct.pack(order + "I", riff) + body

    def sound(
        self,
        samples: Sequence[NDArray[np.float64]] | NDArray[np.float64],
        rate: int,
        codec: str,
        container: str,
        *,
        layout: str = "mono",
        options: dict[str, str] | None = None,
        container_options: dict[str, str] | None = None,
        bit_rate: int = 0,
    ) -> bytes:
        """A recording through PyAV; `samples` is one array per channel, or one array."""
        rows = np.atleast_2d(np.asarray(samples))
        out = io.BytesIO()
        with av.open(out, "w", format=container, options=container_options or {}) as file:
            stream: Any = file.add_stream(codec, rate=rate, layout=layout, options=options or {})
            if bit_rate:
                stream.bit_rate = bit_rate
            name = stream.codec_context.codec.audio_formats[0].name
            stream.codec_context.format = name
            size = stream.codec_context.frame_size or 1024
            for start in range(0, rows.shape[1], size):
                block = rows[:, start : start + size]
                frame = av.AudioFrame.from_ndarray(_formatted(block, name), format=name, layout=layout)
                frame.sample_rate = rate
                frame.pts = start
                frame.time_base = Fraction(1, rate)
                file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
        return out.getvalue()

    def clip(
        self,
        frames: Iterable[NDArray[np.uint8]],
        codec: str = "libx264",
        container: str = "mp4",
        *,
        pixels: str = "yuv420p",
        rate: int = 10,
        options: dict[str, str] | None = None,
        container_options: dict[str, str] | None = None,
        times: Sequence[int] | None = None,
        context: dict[str, Any] | None = None,
        source: str = "rgb24",
    ) -> bytes:
        """A clip through PyAV; `times` are presentation times in units of 1 / rate."""
        out = io.BytesIO()
        with av.open(out, "w", format=container, options=container_options or {}) as file:
            stream: Any = None
            for number, array in enumerate(frames):
                if stream is None:
                    stream = file.add_stream(codec, rate=rate, options=options or {})
                    stream.height, stream.width = array.shape[:2]
                    stream.pix_fmt = pixels
                    for name, value in (context or {}).items():
                        setattr(stream.codec_context, name, value)
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format=source)
                frame.pts = number if times is None else times[number]
                frame.time_base = Fraction(1, rate)
                file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
        return out.getvalue()

    def moving(self, count: int = 30, height: int = 48, width: int = 64) -> list[NDArray[np.uint8]]:
        """Frames that tell their number: the left half's grey is 8 times the number, the right half slopes."""
        frames: list[NDArray[np.uint8]] = []
        slope = np.broadcast_to(np.linspace(0, 255, height).astype(np.uint8)[:, None, None], (height, width, 3))
        for number in range(count):
            frame = slope.copy()
            frame[:, : width // 2] = (8 * number) % 256
            frames.append(frame)
        return frames

    def index_first(self, data: bytes) -> bytes:
        """An MP4 with its index moved before its media: every chunk offset grows by the index's size."""
        at = data.index(b"moov") - 4
        size = int.from_bytes(data[at : at + 4], "big")
        index = bytearray(data[at : at + size])
        table = index.index(b"stco") + 8
        for place in range(table + 4, table + 4 + 4 * int.from_bytes(index[table : table + 4], "big"), 4):
            index[place : place + 4] = (int.from_bytes(index[place : place + 4], "big") + size).to_bytes(4, "big")
        media = data.index(b"mdat") - 4
        assert data[media - 8 : media] == b"\0\0\0\x08free" and at + size == len(data)
        return data[: media - 8] + bytes(index) + data[media - 8 : at]

    def numbers(self, payload: Payload) -> list[int]:
        """The numbers that the frames of `moving` tell."""
        left = payload.array[:, 4:-4, 4 : payload.extent[2] // 2 - 4, 0].mean(axis=(1, 2))
        return [round(float(value) / 8) for value in left]


def _formatted(block: NDArray[np.float64], name: str) -> NDArray[Any]:
    dtype = {**_PLANAR, **_PACKED}[name]
    if dtype is np.uint8:
        values = np.clip(np.round(block * 128 + 128), 0, 255).astype(np.uint8)
    elif np.issubdtype(dtype, np.integer):
        top = float(np.iinfo(dtype).max)
        values = np.round(np.clip(block, -1, 1) * top).astype(dtype)
    else:
        values = block.astype(dtype)
    return np.ascontiguousarray(values if name in _PLANAR else values.T.reshape(1, -1))


@pytest.fixture(scope="session")
def make() -> Maker:
    """The maker of files."""
    return Maker()
