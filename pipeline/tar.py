"""Strict tar reader over any forward byte stream: members with their byte offsets, one typed error per malformation.

Headers are parsed in batches, a chunk of the stream at a time. Ustar with its prefix, GNU long names, PAX `path` and `size`,
base-256 sizes and V7 headers are read; links, devices, directories and fifos are skipped and counted, never followed. Blocks of
zeros are skipped, so that concatenated archives are read to the stream's end. Nothing is allocated by a header's claim.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import NamedTuple, Protocol

from treadle.pipeline.tar_bulk import Member, Members, PlainHeaders, count_files
from treadle.pipeline.tar_header import (
    BLOCK_BYTES,
    Extension,
    TarError,
    checked_size,
    cut_header,
    header_name,
    parse_pax,
    plain_size,
    text_of,
)

__all__ = ["CHUNK_BYTES", "MAX_MEMBER_BYTES", "Block", "ForwardStream", "Member", "MemberReader", "Members", "TarError"]

CHUNK_BYTES = 1 << 20
"""What is read and parsed at a time, unless the stream knows better. A member that passes it is gathered on its own."""

GATHER_BYTES = 8 << 20
"""A long member is gathered in pieces of this size, so that memory follows what has arrived."""

MAX_EXTENSION_BYTES = 1 << 20
"""Most bytes of one extension header (GNU long name, PAX records): no path is longer."""

MAX_EXTENSIONS_BYTES = 4 << 20
"""Most bytes of all extension headers of one member."""

MAX_MEMBER_BYTES = 1 << 30
"""A longer member is refused as `too_large`; its bytes are skipped, not held."""

MAX_REST_BYTES = 64 << 20
"""Bytes past a damage that are looked through to count what is lost."""

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_ZERO_RUN = bytes(1 << 14)
"""Zeros that are passed at a time: block by block, a packed shard of nothing else takes minutes a GiB."""
_WITHOUT_DATA = {0x31: "hard_link", 0x32: "symbolic_link", 0x33: "device", 0x34: "device", 0x35: "directory", 0x36: "fifo", 0x56: "label"}
_GNU_LONG_NAME, _GNU_LONG_LINK, _GNU_SPARSE, _GNU_MULTIVOLUME = b"LKSM"
_PAX_LOCAL, _PAX_SOLARIS, _PAX_GLOBAL = b"xXg"
_EXTENSIONS = frozenset((_GNU_LONG_NAME, _GNU_LONG_LINK, _PAX_LOCAL, _PAX_SOLARIS, _PAX_GLOBAL))


class Block(NamedTuple):
    """Members parsed together; the content of one is `buffer[m.offset - base:][:m.size]`, empty where it was skipped."""

    buffer: bytes
    base: int
    members: Members


class ForwardStream(Protocol):
    """What the reader asks of a stream."""

    @property
    def size(self) -> int | None:
        """Bytes of the whole stream, where known."""
        ...

    def read(self, n: int) -> bytes:
        """The next `n` bytes; fewer only at the end."""
        ...

    def skip(self, n: int) -> int:
        """Moves forward by `n` bytes; answers how many there were."""
        ...

    def back(self, n: int) -> bool:
        """Moves back by `n` bytes where that costs nothing; answers whether it did."""
        ...


class _Incomplete(Exception):
    """The buffer ends before what is being parsed does."""


class MemberReader:
    """Reads the members of one archive, forward.

    Args:
        stream: stands at byte `offset` of the archive.
        offset: where a member's headers begin, or anything between members.
        want: asked for members longer than a chunk; False skips the content.
        contents: False skips whatever content a chunk does not happen to hold.
        chunk_bytes: bytes read and parsed at a time; by default the stream's own `chunk_bytes`, `CHUNK_BYTES` where it has none.
        max_member_bytes: longer members are refused as `too_large`.
    """

    def __init__(
        self,
        stream: ForwardStream,
        *,
        offset: int = 0,
        want: Callable[[Member], bool] | None = None,
        contents: bool = True,
        chunk_bytes: int | None = None,
        max_member_bytes: int = MAX_MEMBER_BYTES,
    ) -> None:
        self.end = offset
        """Where the last thing read that was not zeros ends: a member, or one that was skipped."""
        self.counts: Counter[str] = Counter()
        """Skipped members by type, and `no_end_marker`."""
        self.refused: dict[int, tuple[str, str]] = {}
        """Members whose content is not to be used, by header offset: kind (`sparse`, `too_large`) and detail."""
        self.shared: dict[bytes, bytes] = {}
        """`path` and `size` of PAX global headers."""
        self.cut: TarError | None = None
        """What was being read when the stream failed, if anything had begun."""
        self._stream = stream
        self._start = offset
        self._want = want
        self._contents = contents
        self.pace(getattr(stream, "chunk_bytes", CHUNK_BYTES) if chunk_bytes is None else chunk_bytes)
        self._max_member_bytes = max_member_bytes
        self._zeros = 0
        self._need = 0
        self._long: Member | None = None
        self._error: TarError | None = None
        self._rest = b""

    def pace(self, chunk_bytes: int) -> None:
        """How many bytes are read at a time from now on."""
        self._chunk_bytes = max(chunk_bytes, 2 * BLOCK_BYTES)

    def blocks(self) -> Iterator[Block]:
        """The members, a chunk at a time.

        Raises:
            TarError: after every whole member before the damage was given.
        """
        stream, base, buffer, position, final = self._stream, self._start, b"", 0, False
        while True:
            members, used = self._parse(buffer, base, final, position)
            if members:
                yield Block(buffer, base, members)
            if self._error is not None:
                self._rest = buffer[self._error.offset - base + BLOCK_BYTES :]
                raise self._error
            if self._long is not None:
                member, self._long = self._long, None
                block, base = self._gather(member, buffer[member.offset - base :])
                buffer, position = b"", 0
                yield block
                continue
            rest = len(buffer) - used
            base += used
            if final:
                if base + rest == 0:
                    raise TarError("empty", 0, "no bytes at all")
                if self._zeros < 2:
                    self.counts["no_end_marker"] += 1
                return
            kept = b"" if rest and stream.back(rest) else buffer[used:]
            try:
                piece = stream.read(max(self._chunk_bytes, self._need - len(kept)))
            except Exception:
                # A member that lacks only its padding is whole; what else had begun is named.
                members, _ = self._parse(buffer[used:], base, True)
                self.cut = self._error
                if members:
                    yield Block(buffer[used:], base, members)
                raise
            final = len(kept) + len(piece) <= rest
            position = 0
            # What lies across two pieces is put together alone: joining the pieces would copy all that is read.
            while kept and self._error is None and self._long is None and position + self._need - len(kept) <= len(piece):
                stop = position + self._need - len(kept)
                seam, position = kept + piece[position:stop], stop
                members, used = self._parse(seam, base, False)
                if members:
                    yield Block(seam, base, members)
                base += used
                kept = seam[used:]
            if kept:
                # Too long for this piece, or damaged: told of once more.
                buffer, position, self._error, self._long = kept + piece[position:], 0, None, None
            else:
                buffer, base = piece, base - position

    def rest(self) -> str:
        """What a damage, just raised, leaves behind it: how many files, in how many bytes, of the next `MAX_REST_BYTES`."""
        files, size, piece = 0, 0, self._rest
        self._rest = b""
        while piece and size < MAX_REST_BYTES:
            files += count_files(piece)
            size += len(piece)
            try:
                piece = self._stream.read(CHUNK_BYTES)
            except Exception:  # what is left cannot be read either, whatever the reason: it is left out as it is
                break
        if not size:
            return ""
        return f"; the rest is left out: {files} files whose headers are whole, in {'the first ' if piece else ''}{size} bytes"

    def whole(self, buffer: bytes, base: int) -> Members:
        """The members of a part of an archive, `buffer`, which begins at byte `base`.

        Raises:
            TarError: it does not hold them whole.
        """
        self._zeros, self._error = 0, None
        self.refused.clear()
        members, _ = self._parse(buffer, base, True)
        if self._error is not None:
            raise self._error
        return members

    def _gather(self, member: Member, held: bytes) -> tuple[Block, int]:
        """A member that the buffer does not hold whole: its block, and where reading goes on."""
        stream, size, total = self._stream, member.size, self._stream.size
        padded = size + -size % BLOCK_BYTES
        if total is not None and member.offset + size > total:
            raise _cut(member, total - member.offset)
        self._limit(member.header_offset, size)
        wanted = self._contents and member.header_offset not in self.refused and (self._want is None or self._want(member))
        content, have = b"", len(held)
        if wanted:
            gathered = BytesIO()
            gathered.write(held[:size])
            self.cut = _cut(member, have)
            while have < size:
                piece = stream.read(min(size - have, GATHER_BYTES))
                if not piece:
                    raise _cut(member, have)
                have += gathered.write(piece)
            content = gathered.getvalue()
        self.cut = _cut(member, have)
        have += stream.skip(padded - have)
        self.cut = None
        if have < size:
            raise _cut(member, have)
        self._zeros = 0
        self.end = member.offset + have
        members = Members()
        members.append(*member)
        return Block(content, member.offset, members), self.end

    def _limit(self, header_offset: int, size: int) -> None:
        if size > self._max_member_bytes:
            self.refused[header_offset] = ("too_large", f"a file of {size} bytes; at most {self._max_member_bytes} are read")

    def _parse(self, buffer: bytes, base: int, final: bool, position: int = 0) -> tuple[Members, int]:
        """Every member that `buffer`, at stream offset `base`, holds whole from `position` on, and up to where its bytes were used.

        An error is left in `self._error`, so that the members before it are given first.
        """
        members = Members()
        start = position
        end, zeros = len(buffer), self._zeros
        extension = Extension(self.shared) if self.shared else None
        plain: PlainHeaders | None = None
        first = 0
        self._need = BLOCK_BYTES
        try:
            while position + BLOCK_BYTES <= end:
                if extension is None and buffer[position + 156] == 0x30 and start == position:
                    if plain is None:
                        first = position
                        plain = PlainHeaders(memoryview(buffer)[first:], base + first, self._max_member_bytes)
                    position = first + plain.take(position - first, members)
                    if position > start:
                        start, zeros = position, 0
                        continue
                header = buffer[position : position + BLOCK_BYTES]
                size = plain_size(header)
                if size < 0:
                    if header == _ZERO_BLOCK and start == position:
                        if not zeros:
                            self.end = base + position
                        start = _after_zeros(buffer, position)
                        zeros += (start - position) // BLOCK_BYTES
                        position = start
                        continue
                    size = checked_size(header, base + position, extension)
                kind = header[156]
                data = position + BLOCK_BYTES
                if kind in _EXTENSIONS:
                    extension = extension or Extension(self.shared)
                    position = self._extend(buffer, base, start, position, size, extension, final)
                    if kind == _PAX_GLOBAL and start + BLOCK_BYTES == data:
                        start, extension, zeros = position, Extension(self.shared) if self.shared else None, 0
                    continue
                if kind in _WITHOUT_DATA:
                    self.counts[f"skipped_{_WITHOUT_DATA[kind]}"] += 1
                    position = data
                else:
                    position = self._file(buffer, base, start, position, size, extension, final, members)
                start, zeros = position, 0
                if extension is not None:
                    extension = Extension(self.shared) if self.shared else None
            if final:
                if start < position or buffer[position:].strip(b"\0"):
                    raise cut_header(buffer[position:], base + start, extension)
                start = end
            self._need = position - start + BLOCK_BYTES
        except TarError as error:
            self._error = error
        except _Incomplete:
            pass
        if not zeros:
            self.end = base + start
        self._zeros = zeros
        return members, start

    def _short(self, name: str, base: int, start: int, data: int, size: int, end: int, final: bool) -> int:
        """Where a member that runs past the buffer ends after all: only its padding is missing. Else raises what is to be done."""
        if final:
            if data + size <= end:
                return end
            raise _cut(Member(name, base + start, base + data, size), end - data)
        self._need = data + size + -size % BLOCK_BYTES - start
        if self._need > self._chunk_bytes or not self._contents:
            self._long = Member(name, base + start, base + data, size)
        raise _Incomplete

    def _extend(self, buffer: bytes, base: int, start: int, position: int, size: int, extension: Extension, final: bool) -> int:
        """Takes one extension header in; answers where the next header begins."""
        kind, data, end = buffer[position + 156], position + BLOCK_BYTES, len(buffer)
        stop = data + size + -size % BLOCK_BYTES
        if size > MAX_EXTENSION_BYTES or stop - start > MAX_EXTENSIONS_BYTES:
            raise TarError("bad_header", base + start, f"extension headers of {size} bytes; at most {MAX_EXTENSION_BYTES} are read")
        if stop > end:
            if final:
                raise TarError("truncated_header", base + start, f"{end - data} of {size} bytes of an extension header are there")
            self._need = stop - start + BLOCK_BYTES
            raise _Incomplete
        body = buffer[data : data + size]
        if kind == _GNU_LONG_NAME:
            if extension.name is None:
                extension.name = text_of(body.split(b"\0", 1)[0])
        elif kind != _GNU_LONG_LINK:
            try:
                records = parse_pax(body)
            except ValueError as error:
                raise TarError("bad_header", base + start, f"PAX extension header: {error}", extension.name or "", True) from None
            if kind == _PAX_GLOBAL:
                self.shared.update({key: value for key, value in records.items() if key in (b"path", b"size")})
                self.shared = {key: value for key, value in self.shared.items() if value}
            else:
                extension.apply(records, base + start)
        return stop

    def _file(
        self, buffer: bytes, base: int, start: int, position: int, size: int, extension: Extension | None, final: bool, members: Members
    ) -> int:
        """Takes a file in, of GNU's sparse type or of one unknown too, which POSIX counts as a file; answers where the next header begins."""
        header, data, end = buffer[position : position + BLOCK_BYTES], position + BLOCK_BYTES, len(buffer)
        name = extension.name if extension is not None and extension.name is not None else header_name(header)
        kind = header[156]
        if kind == _GNU_MULTIVOLUME:
            raise TarError("unsupported", base + start, f"{name!r} goes on from another volume", name, True)
        if not kind and name.endswith("/"):
            # V7 marks a directory by its name alone; it holds no data.
            self.counts["skipped_directory"] += 1
            return data
        if kind == _GNU_SPARSE:
            more = header[482]
            while more:
                if data + BLOCK_BYTES > end or data - start > MAX_EXTENSIONS_BYTES:
                    if final or data - start > MAX_EXTENSIONS_BYTES:
                        raise TarError("truncated_header", base + start, f"the map of sparse {name!r} does not end", name, True)
                    self._need = data + 2 * BLOCK_BYTES - start
                    raise _Incomplete
                more = buffer[data + 504]
                data += BLOCK_BYTES
        elif extension is not None and extension.size is not None:
            size = extension.size
        if kind == _GNU_SPARSE or (extension is not None and extension.sparse):
            self.refused[base + start] = ("sparse", f"{name!r} is stored sparse; store it whole (tar without --sparse)")
        stop = data + size + -size % BLOCK_BYTES
        if stop > end:
            stop = self._short(name, base, start, data, size, end, final)
        self._limit(base + start, size)
        members.append(name, base + start, base + data, size)
        return stop


def _after_zeros(buffer: bytes, position: int) -> int:
    """Where the blocks of zeros end, of which the first is at `position`: whole runs of them are passed at a time."""
    position += BLOCK_BYTES
    while buffer.startswith(_ZERO_RUN, position):
        position += len(_ZERO_RUN)
    return position


def _cut(member: Member, have: int) -> TarError:
    detail = f"{member.name!r} says {member.size} bytes, {max(0, have)} are there"
    return TarError("truncated_member", member.header_offset, detail, member.name, True)
