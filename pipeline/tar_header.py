"""Tar headers: their numbers, checksums, names and extension records, and what is wrong with them."""

from zlib import adler32

BLOCK_BYTES = 512
_COMPRESSED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"\x1f\x9d": "compress", b"\x04\x22\x4d\x18": "lz4"}


TAR_KINDS = frozenset(
    {"empty", "not_a_tar", "bad_checksum", "bad_size", "bad_header", "unsupported", "truncated_header", "truncated_member"}
)
"""What can be wrong with an archive."""


class TarError(Exception):
    """An archive that cannot be read on from `offset`; `kind` is one of `TAR_KINDS`.

    `name` is the name of the member that is hit, as far as it can still be read, and `name_whole` whether that is all of it.
    """

    def __init__(self, kind: str, offset: int, detail: str, name: str = "", name_whole: bool = False) -> None:
        super().__init__(kind, offset, detail, name, name_whole)
        self.kind = kind
        self.offset = offset
        self.detail = detail
        self.name = name
        self.name_whole = name_whole

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.offset}: {self.detail}"


def checksum(header: bytes) -> int:
    """The sum of a header's bytes, its checksum field counted as eight spaces.

    `adler32(x) & 0xffff` is one plus the sum of the bytes as long as that stays below 65,521, which 257 bytes cannot pass:
    three calls in C take the place of 512 additions.
    """
    return (adler32(header[:148]) & 0xFFFF) + (adler32(header[156:400]) & 0xFFFF) + (adler32(header[400:]) & 0xFFFF) + 253


def signed_checksum(header: bytes) -> int:
    """The same sum over signed bytes, as some old writers computed it."""
    counted = header[:148] + header[156:]
    return checksum(header) - 256 * sum(byte >> 7 for byte in counted)


def parse_number(field: bytes) -> int:
    """A numeric header field: octal digits, or GNU's base-256.

    Raises:
        ValueError: it is neither, or negative.
    """
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise ValueError("a negative number")
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise ValueError("not octal digits")
    return int(digits, 8) if digits else 0


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """The records `"%d key=value\\n"` of a PAX extension header.

    Raises:
        ValueError: a record is malformed.
    """
    records: dict[bytes, bytes] = {}
    position = 0
    end = len(data)
    while position < end and data[position]:
        space = data.find(b" ", position, position + 20)
        digits = data[position:space] if space > position else b""
        if not digits.isdigit():
            raise ValueError("a record without its length")
        stop = position + int(digits)
        equals = data.find(b"=", space, stop)
        if stop > end or stop <= space or equals <= space + 1 or data[stop - 1] != 0x0A:
            raise ValueError("a record that does not end where it says")
        records[data[space + 1 : equals]] = data[equals + 1 : stop - 1]
        position = stop
    return records


def text_of(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogateescape")


def header_name(header: bytes) -> str:
    """The name a header carries itself, its ustar prefix included."""
    name = header[:100].split(b"\0", 1)[0]
    if header[345:346] > b"\0" and header[257:263] == b"ustar\0":
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return text_of(name)


def is_header(block: bytes) -> bool:
    """Whether a block is a member's header."""
    if len(block) != BLOCK_BYTES:
        return False
    try:
        return parse_number(block[148:156]) in (checksum(block), signed_checksum(block))
    except ValueError:
        return False


class Extension:
    """What the headers before a member say of it. The first that gives a name wins, as in tarfile."""

    __slots__ = ("name", "size", "sparse")

    def __init__(self, shared: dict[bytes, bytes]) -> None:
        self.name: str | None = None
        self.size: int | None = None
        self.sparse = False
        if shared:
            self.apply(shared, 0)

    def apply(self, records: dict[bytes, bytes], offset: int) -> None:
        path = records.get(b"GNU.sparse.name", records.get(b"path"))
        if path and self.name is None:
            self.name = text_of(path)
        digits = records.get(b"size", b"")
        if digits:
            if not digits.isdigit() or len(digits) > 18:
                raise TarError("bad_size", offset, f"PAX size {digits[:40]!r} is not a count of bytes", self.name or "", True)
            self.size = int(digits)
        self.sparse = self.sparse or any(key.startswith(b"GNU.sparse.") for key in records)


def cut_header(tail: bytes, offset: int, extension: Extension | None) -> TarError:
    """The error for a stream that ends within a header, or between an extension header and its member."""
    if extension is not None and extension.name is not None:
        return TarError("truncated_header", offset, f"{extension.name!r} ends in its headers", extension.name, True)
    if offset == 0 and tail[257:262] != b"ustar" and extension is None:
        return not_a_tar(tail)
    name = tail[:100].split(b"\0", 1)[0]
    whole = len(tail) >= 100 or len(name) < len(tail)
    return TarError("truncated_header", offset, f"{len(tail)} of {BLOCK_BYTES} bytes of a header are there", text_of(name), whole)


def not_a_tar(start: bytes) -> TarError:
    for magic, what in _COMPRESSED.items():
        if start.startswith(magic):
            return TarError("not_a_tar", 0, f"a {what} file; tars may be plain, gz or zst")
    return TarError("not_a_tar", 0, f"it begins {start[:32]!r}")


def plain_size(header: bytes) -> int:
    """The size in a header whose numbers are plain octal and whose checksum is right; -1 where it takes `checked_size` to tell."""
    try:
        size = int(header[124:135], 8)
        if checksum(header) == int(header[148:154], 8) and not (header[135] | header[154]) & 0xDF:
            return size
    except ValueError:
        pass
    return -1


def checked_size(header: bytes, offset: int, extension: Extension | None) -> int:
    """A header's size, the way that takes every spelling of it.

    Raises:
        TarError: the header is damaged, or none.
    """
    name = extension.name if extension is not None and extension.name is not None else header_name(header)
    try:
        want = parse_number(header[148:156])
    except ValueError:
        want = -1
    found = checksum(header)
    if want not in (found, signed_checksum(header)):
        if offset == 0 and header[257:262] != b"ustar":
            raise not_a_tar(header)
        raise TarError("bad_checksum", offset, f"the header of {name!r} sums to {found}, its checksum is {header[148:156]!r}", name, True)
    try:
        size = parse_number(header[124:136])
    except ValueError as error:
        raise TarError("bad_size", offset, f"the size of {name!r} is {header[124:136]!r}: {error}", name, True) from None
    if size >= 1 << 62:
        raise TarError("bad_size", offset, f"{name!r} says {size} bytes", name, True)
    return size
