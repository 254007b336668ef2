"""Tells a format by an item's bytes. Nothing is ever handed to a library to guess: a guess could pick a playlist
format that opens other files."""

from mmap import mmap
from typing import Literal

Format = Literal[
    "jpeg", "png", "webp", "gif", "bmp", "avif",
    "mp4", "matroska", "mpegts", "avi", "h264", "hevc",
    "wav", "flac", "mp3", "ogg", "aac",
]  # fmt: skip

IMAGE_FORMATS: frozenset[Format] = frozenset({"jpeg", "png", "webp", "gif", "bmp", "avif"})
VIDEO_FORMATS: frozenset[Format] = frozenset({"mp4", "matroska", "mpegts", "avi", "h264", "hevc"})
AUDIO_FORMATS: frozenset[Format] = frozenset({"wav", "flac", "mp3", "ogg", "aac", "mp4", "matroska", "mpegts", "avi"})

_MP4_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot"}
_FOREIGN = {
    b"II*\0": "TIFF", b"MM\0*": "TIFF", b"FORM": "AIFF", b"caff": "CAF", b"riff": "Wave64", b".snd": "AU", b"#!AM": "AMR",
    b"FLV\x01": "FLV", b"0&\xb2u": "ASF, WMA or WMV", b"\0\0\1\xba": "an MPEG program stream", b"wvpk": "WavPack", b"MThd": "MIDI",
    b"jP  ": "JPEG 2000", b"JXL ": "JPEG XL", b"\xff\x0a": "JPEG XL", b"8BPS": "Photoshop", b"qoif": "QOI", b"\0\0\1\0": "ICO",
    b"%PDF": "PDF", b"<svg": "SVG", b"<!DO": "HTML", b"<htm": "HTML", b"<?xm": "XML", b"\x1f\x8b": "gzip", b"PK\3\4": "ZIP",
}  # fmt: skip
"""Formats that are told, in a refusal, by their first four bytes, or by the four behind a length."""
_BMP_HEADER_BYTES = {12, 40, 52, 56, 64, 108, 124}
_AVIF_BRANDS = {b"avif", b"avis"}


def sniff(data: memoryview) -> Format | None:
    """The format of `data`, or None for one that is not read."""
    head = bytes(data[:64])
    if head.startswith(b"\xff\xd8\xff") or head == b"\xff\xd8":
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and len(head) >= 12:
        kinds: dict[bytes, Format] = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
        return kinds.get(head[8:12])
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADER_BYTES:
        return "bmp"
    if head[4:8] in _MP4_FIRST_BOXES:
        return "avif" if head[4:8] == b"ftyp" and _is_avif(head) else "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if head[:4] == b"OggS":
        return "ogg"
    if head[:1] == b"\x47" and _is_mpegts(data):
        return "mpegts"
    if head[:3] == b"\0\0\1" or head[:4] == b"\0\0\0\1":
        return _annex_b(head)
    start = skip_id3(data, 0)
    if bytes(data[start : start + 4]) == b"fLaC":
        return "flac"
    return _mpeg_audio(data, start)


def describe(data: memoryview) -> str:
    """What `data` is, for a refusal: a format, read or not, by its name, or its first bytes."""
    kind = sniff(data)
    head = bytes(data[:16])
    if kind == "mp4" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC"
    names = (_FOREIGN.get(start) for start in (head[:4], head[:2], head[4:8]))
    return kind or next((name for name in names if name), None) or f"it begins {head!r}"


def searchable(data: memoryview) -> bytes | mmap:
    """The same bytes with `find`; those of a whole `bytes` or file mapping are not copied."""
    whole = data.obj
    return whole if isinstance(whole, bytes | mmap) and len(whole) == len(data) else bytes(data)


def skip_id3(data: memoryview, start: int) -> int:
    """Where the bytes after any ID3v2 tags and zeros at `start` begin."""
    while bytes(data[start : start + 3]) == b"ID3" and len(data) >= start + 10:
        sizes = data[start + 6 : start + 10]
        if any(size & 0x80 for size in sizes):
            break
        footer = 10 if data[start + 5] & 0x10 else 0
        start += 10 + footer + (sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3])
    zeros = start
    while zeros < min(len(data), start + (1 << 16)) and data[zeros] == 0:
        zeros += 1
    return zeros


def _is_avif(head: bytes) -> bool:
    size = int.from_bytes(head[:4], "big")
    brands = [head[8:12], *(head[i : i + 4] for i in range(16, min(size, len(head)) - 3, 4))]
    return any(brand in _AVIF_BRANDS for brand in brands)


def _is_mpegts(data: memoryview) -> bool:
    return all(data[at] == 0x47 for at in range(0, min(len(data), 188 * 4), 188)) and len(data) >= 188


def _annex_b(head: bytes) -> Format | None:
    nal = head[head.index(1) + 1 :][:1]
    if nal and nal[0] & 0x80 == 0:
        if nal[0] & 0x1F in (6, 7, 9) and nal[0] != 0x46:
            return "h264"
        if nal[0] >> 1 in (32, 35):
            return "hevc"
    return None


def _mpeg_audio(data: memoryview, start: int) -> Format | None:
    head = bytes(data[start : start + 4])
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    layer = head[1] >> 1 & 3
    if head[1] & 0xF0 == 0xF0 and layer == 0:
        return "aac"
    if layer == 0 or head[1] >> 3 & 3 == 1 or head[2] >> 4 == 15 or head[2] >> 2 & 3 == 3:
        return None
    return "mp3"
