"""Members to samples: runs of one key, and the sample that a damage leaves open."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import eq

from treadle.pipeline.raw_sample import RawField, RawSample, Singles
from treadle.pipeline.storage import StorageError
from treadle.pipeline.tar import Member, MemberReader, Members, TarError
from treadle.pipeline.unpack import UnpackError

MAX_KEYS = 1 << 16
"""Keys of one pass that are remembered to tell one that comes again."""


class ShardError(Exception):
    """A shard that cannot be read on from `offset`; every complete sample before it has been delivered.

    The kinds are those of `TarError`, `UnpackError` and `StorageError`.
    """

    def __init__(self, kind: str, offset: int, detail: str) -> None:
        super().__init__(kind, offset, detail)
        self.kind = kind
        self.offset = offset
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.offset}: {self.detail}"


def split_name(name: str) -> tuple[str, str]:
    """The key and the field of a member's name; the field is empty where the member belongs to no sample."""
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash or ("__MACOSX" in name and "__MACOSX" in name[:slash].split("/")):
        return name, ""
    return name[:dot], name[dot + 1 :].lower()


def _skip_reason(name: str) -> str:
    base = name.rpartition("/")[2]
    if base.startswith("._") or base == ".DS_Store" or "__MACOSX/" in name:
        return "skipped_macos"
    return "skipped_hidden" if base.startswith(".") else "skipped_no_field"


class Grouping:
    """Members in, samples out.

    Args:
        reader: stands at sample `index`.
        counts: what was skipped, and warnings, are added here.
        contents: False yields the samples without their fields.
    """

    def __init__(
        self, reader: MemberReader, counts: Counter[str], *, index: int, part: int = 0, parts: int = 1, contents: bool = True
    ) -> None:
        self.reader = reader
        self._counts = counts
        self._index = index
        self._part = part
        self._parts = parts
        self._contents = contents
        self._key: str | None = None
        self._offset = 0
        self._fields: dict[str, RawField] = {}
        self._problem: tuple[str, str] | None = None
        self._keys: set[str] = set()

    def wanted(self, member: Member) -> bool:
        """Whether a long member's content will be used."""
        key, field = split_name(member.name)
        index = self._index if self._key is None or key == self._key else self._index + 1
        return bool(field) and index % self._parts == self._part

    def samples(self) -> Iterator[RawSample]:
        """The samples of the part, each once the next has begun.

        Raises:
            ShardError: after the last complete one before a damage.
        """
        return chain.from_iterable(self.runs())

    def runs(self) -> Iterator[Sequence[RawSample]]:
        """The same, those that each chunk of the archive completes at once.

        Raises:
            ShardError: as `samples`.
        """
        reader = self.reader
        try:
            for block in reader.blocks():
                if reader.shared:
                    where = block.members[0].header_offset
                    raise TarError("unsupported", where, "a global header sets the path or size of all members after it")
                yield from self._block(*block)
        except TarError as error:
            if not self._belongs(error):
                yield self._last(error.offset)
            rest = "" if error.kind == "not_a_tar" else reader.rest()
            raise ShardError(error.kind, error.offset, error.detail + rest) from None
        except (StorageError, UnpackError) as error:
            cut = reader.cut
            offset = reader.end if cut is None else cut.offset
            if cut is None or not self._belongs(cut):
                yield self._last(offset)
            raise ShardError(error.kind, offset, error.detail) from None
        finally:
            self._counts.update(reader.counts)
            reader.counts.clear()
        yield self._last(reader.end)

    def _block(self, buffer: bytes, base: int, members: Members) -> Sequence[Sequence[RawSample]]:
        if self._contents and not self.reader.refused:
            alone = self._alone(buffer, base, members)
            if alone is not None:
                return alone
        found: list[RawSample] = []
        # All of it in locals: at 4 KiB a member this loop and the header's parse are what reading costs.
        part, parts, contents, keys, refused = self._part, self._parts, self._contents, self._keys, self.reader.refused
        open_key, index, fields = self._key, self._index, self._fields
        mine = contents and index % parts == part
        new = tuple.__new__
        for name, header, start, size in members.rows():
            slash = name.rfind("/") + 1
            dot = name.find(".", slash)
            if dot <= slash or name[0] == "." or "__MACOSX" in name:
                key, field = split_name(name)
            else:
                key, field = name[:dot], name[dot + 1 :].lower()
            if not field:
                self._counts[_skip_reason(name)] += 1
                continue
            if "0" <= field[0] <= "9" and key[-1:].isdigit() and "." in field:
                self._counts["key_cut_in_number"] += 1
            if key != open_key:
                if open_key is not None:
                    if index % parts == part:
                        found.append(RawSample(open_key, index, self._offset, header - self._offset, tuple(fields.values()), self._problem))
                    index += 1
                mine = contents and index % parts == part
                fields = {}
                open_key, self._offset, self._problem = key, header, None
                if key in keys:
                    self._counts["key_seen_again"] += 1
                elif len(keys) < MAX_KEYS:
                    keys.add(key)
            if mine and self._problem is None:
                if field not in fields and not (refused and header in refused):
                    inside = start - base
                    fields[field] = new(RawField, (field, start, buffer[inside : inside + size]))
                else:
                    self._problem, fields = _problem(key, field, header, start, fields, refused), {}
        self._key, self._index, self._fields = open_key, index, fields
        return (found,)

    def _alone(self, buffer: bytes, base: int, members: Members) -> Sequence[Sequence[RawSample]] | None:
        """The same where each member is a sample of its own, with one dot in its name and one extension, all of them at once."""
        names, headers, starts, sizes, count = members.names, members.headers, members.starts, members.sizes, len(members)
        first = names[0]
        dot = first.find(".", first.rfind("/") + 1)
        suffix = first[dot:]
        # Samples of several files show it at once, wherever the chunk begins.
        if dot < 1 or len(suffix) < 2 or not names[-1].endswith(suffix) or not names[count // 2].endswith(suffix):
            return None
        # A member's name has no zero within: as many pieces as names, each without one, are the names without the extension.
        text = "\0".join(names) + "\0"
        keys = text.split(suffix + "\0")
        if (
            len(keys) != count + 1
            or text.count("\0") != count
            or text.count(".") != count
            or f"/{suffix}\0" in text
            or "__MACOSX" in text
            or not all(keys[:-1])
            or keys[0] == self._key
            or any(map(eq, keys, keys[1:]))
            or len(self._keys) + count > MAX_KEYS
        ):
            return None
        keys.pop()
        field = suffix[1:].lower()
        seen = len(self._keys)
        self._keys.update(keys)
        if again := count - (len(self._keys) - seen):
            self._counts["key_seen_again"] += again
        found: list[Sequence[RawSample]] = []
        index = self._index if self._key is None else self._index + 1
        if self._key is not None:
            found.append(self._last(headers[0]))
        mine = slice((self._part - index) % self._parts, count - 1, self._parts)
        ends = [*headers[1:], headers[-1]]
        contents = [buffer[start - base : start - base + size] for start, size in zip(starts[mine], sizes[mine], strict=True)]
        found.append(
            Singles(
                field,
                range(index, index + count)[mine],
                keys[mine],
                headers[mine],
                [end - header for header, end in zip(headers[mine], ends[mine], strict=True)],
                starts[mine],
                contents,
            )
        )
        self._index = index + count - 1
        self._key, self._offset, self._problem = keys[-1], headers[-1], None
        start = starts[-1] - base
        wanted = self._index % self._parts == self._part
        self._fields = {field: RawField(field, starts[-1], buffer[start : start + sizes[-1]])} if wanted else {}
        return found

    def _last(self, end: int) -> list[RawSample]:
        """The sample that is open when members end, if one is."""
        key, self._key = self._key, None
        if key is None or self._index % self._parts != self._part:
            return []
        return [RawSample(key, self._index, self._offset, end - self._offset, tuple(self._fields.values()), self._problem)]

    def _belongs(self, error: TarError) -> bool:
        """Whether a damaged member may be one of the open sample: its name, as far as it can be read, says so."""
        if not error.name:
            return False
        if not error.name_whole and f"{self._key}.".startswith(error.name.removeprefix("./")):
            return True
        return split_name(error.name)[0] == self._key


def _problem(
    key: str, field: str, header: int, start: int, fields: dict[str, RawField], refused: dict[int, tuple[str, str]]
) -> tuple[str, str]:
    """Why a sample is refused for the member at `header`."""
    if header in refused:
        return refused[header]
    return "duplicate_field", f"{key!r} has field {field!r} twice, at bytes {fields[field].offset} and {start}"


def whole_sample(reader: MemberReader, data: bytes, index: int, offset: int) -> RawSample | None:
    """The one sample that `data`, read at `offset`, holds; None where it is not one sample."""
    members = reader.whole(data, offset)
    found: tuple[str, int] | None = None
    fields: dict[str, RawField] = {}
    problem: tuple[str, str] | None = None
    for name, header, start, size in members.rows():
        key, field = split_name(name)
        if not field:
            continue
        if found is None:
            found = key, header
        elif key != found[0]:
            return None
        if problem is None:
            if field in fields or header in reader.refused:
                problem, fields = _problem(key, field, header, start, fields, reader.refused), {}
            else:
                fields[field] = RawField(field, start, data[start - offset : start - offset + size])
    if found is None or found[1] != offset:
        return None
    return RawSample(found[0], index, offset, len(data), tuple(fields.values()), problem)
