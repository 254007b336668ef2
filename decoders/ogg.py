"""Ogg: pages are walked and their checksums verified; a chained file is cut into its links."""

import zlib
from dataclasses import dataclass, field

from treadle.decoders.errors import DecodeError
from treadle.decoders.limits import Deadline, DecodeOptions

_FIRST, _LAST = 2, 4
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_CHECK_EVERY = 1024


@dataclass(slots=True)
class OggLink:
    """One link of a chained file: streams that begin together."""

    start: int
    end: int = 0
    pages: dict[int, int] = field(default_factory=dict[int, int])
    """Next page number by stream serial."""
    ended: set[int] = field(default_factory=set[int])
    sound_pages: int = 0
    """Pages at whose end some sound is complete."""
    samples: int = 0
    """The last of their positions."""


def page_checksum(page: bytes) -> int:
    """The CRC-32 of Ogg, most significant bit first, by the reflected one of zlib over reversed bits."""
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(reflected.to_bytes(4, "big").translate(_REVERSED), "little")


def read_ogg(data: memoryview, options: DecodeOptions, deadline: Deadline) -> tuple[list[OggLink], bool]:
    """The links of a file, and whether its last pages are there.

    Raises:
        DecodeError: a page is damaged or missing; in strict mode also an end that is missing.
    """
    links: list[OggLink] = []
    at, size = 0, len(data)
    lack = ""
    heads = False
    for count in range(options.max_chunks):
        if count % _CHECK_EVERY == 0:
            deadline.check()
        if at == size:
            break
        header = bytes(data[at : at + 27])
        if header[:4] != b"OggS":
            if links and len(links[-1].ended) == len(links[-1].pages) and not bytes(data[at:]).count(b"OggS"):
                break
            if b"OggS".startswith(header[:4]):
                lack = "the Ogg ends inside a page"
                break
            raise DecodeError("corrupt", f"no Ogg page at byte {at}")
        lacing = bytes(data[at + 27 : at + 27 + header[26]]) if len(header) == 27 else b""
        end = at + 27 + len(lacing) + sum(lacing)
        if len(header) < 27 or len(lacing) < header[26] or end > size:
            lack = "the Ogg ends inside a page"
            break
        if header[4] != 0:
            raise DecodeError("unsupported", f"Ogg version {header[4]}")
        page = b"".join((header[:22], bytes(4), header[26:], data[at + 27 : end]))
        if page_checksum(page) != int.from_bytes(header[22:26], "little"):
            raise DecodeError("corrupt", f"the checksum of the Ogg page at byte {at} is wrong")
        flags, serial, number = header[5], int.from_bytes(header[14:18], "little"), int.from_bytes(header[18:22], "little")
        if flags & _FIRST:
            if not heads:
                if links:
                    links[-1].end = at
                    lack = lack or _missing_end(links[-1])
                links.append(OggLink(at))
            heads = True
            links[-1].pages[serial] = number
        else:
            heads = False
        if not links or serial not in links[-1].pages:
            raise DecodeError("corrupt", f"the Ogg page at byte {at} belongs to no stream")
        if links[-1].pages[serial] != number:
            raise DecodeError("corrupt", f"the Ogg lacks page {links[-1].pages[serial]} of stream {serial}")
        links[-1].pages[serial] = number + 1 & 0xFFFFFFFF
        position = int.from_bytes(header[6:14], "little", signed=True)
        if position > 0:
            links[-1].sound_pages += 1
            links[-1].samples = position
        if flags & _LAST:
            links[-1].ended.add(serial)
        at = end
    else:
        raise DecodeError("too_large", f"more than max_chunks {options.max_chunks} pages")
    if not links:
        raise DecodeError("truncated", lack or "the Ogg has no page")
    links[-1].end = at
    lack = lack or _missing_end(links[-1])
    if lack and options.strict:
        raise DecodeError("truncated", lack)
    return links, not lack


def _missing_end(link: OggLink) -> str:
    missing = link.pages.keys() - link.ended
    return f"the Ogg has no last page of stream {min(missing)}" if missing else ""
