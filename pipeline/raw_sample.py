"""The files of one sample as a shard holds them; and, in columns, neighbouring samples of one file each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol, TypeVar, cast, overload


class RawField(NamedTuple):
    """One file of a sample."""

    name: str
    """What follows the first dot of the member's basename, in lower case."""
    offset: int
    """Byte of the unpacked tar where its content begins."""
    data: bytes


@dataclass(slots=True)
class RawSample:
    """The files of one key. Not frozen: that would triple what making one costs."""

    key: str
    index: int
    """Place in its shard."""
    offset: int
    """Byte of the unpacked tar where its first header begins."""
    size: int
    """Bytes up to the next sample, headers included."""
    fields: tuple[RawField, ...]
    problem: tuple[str, str] | None = None
    """Why the sample is refused whole, as kind and detail; it then has no fields."""

    @property
    def end(self) -> int:
        """Where the next sample begins."""
        return self.offset + self.size


Single = tuple[str, str, int, bytes]
"""A sample of one file without its place in the shard: (key, field, where the content begins, content)."""


def alone(single: Single, index: int, offset: int, size: int) -> RawSample:
    """A single at its place."""
    key, field, start, content = single
    return RawSample(key, index, offset, size, (RawField(field, start, content),))


class Singles(Sequence[RawSample]):
    """Samples of one file each, of one field: columns, of which a sample is made when it is asked for."""

    __slots__ = ("contents", "field", "indices", "keys", "offsets", "sizes", "starts")

    def __init__(
        self,
        field: str,
        indices: Sequence[int],
        keys: Sequence[str],
        offsets: Sequence[int],
        sizes: Sequence[int],
        starts: Sequence[int],
        contents: Sequence[bytes],
    ) -> None:
        """Takes the columns as `RawSample` and `RawField` name them."""
        self.field, self.indices, self.keys, self.offsets = field, indices, keys, offsets
        self.sizes, self.starts, self.contents = sizes, starts, contents

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> RawSample: ...
    @overload
    def __getitem__(self, at: slice) -> "Singles": ...
    def __getitem__(self, at: int | slice) -> "RawSample | Singles":
        if isinstance(at, int):
            return alone(
                (self.keys[at], self.field, self.starts[at], self.contents[at]), self.indices[at], self.offsets[at], self.sizes[at]
            )
        return Singles(self.field, self.indices[at], self.keys[at], self.offsets[at], self.sizes[at], self.starts[at], self.contents[at])

    def bare(self) -> list[Single]:
        """Each without its place."""
        return list(zip(self.keys, repeat(self.field), self.starts, self.contents, strict=False))


class Sized(Protocol):
    """What takes bytes of a tar."""

    @property
    def size(self) -> int:
        """Up to the next sample."""
        ...


_Sample = TypeVar("_Sample", bound=Sized)


def joined(first: Sequence[_Sample], second: Sequence[_Sample]) -> Sequence[_Sample]:
    """One after the other: in columns where both are, and of one field."""
    both: list[Any] = [first, second]
    if isinstance(first, Singles) and isinstance(second, Singles) and first.field == second.field:
        columns = Singles(
            first.field,
            [*first.indices, *second.indices],
            [*first.keys, *second.keys],
            [*first.offsets, *second.offsets],
            [*first.sizes, *second.sizes],
            [*first.starts, *second.starts],
            [*first.contents, *second.contents],
        )
        return cast("Sequence[_Sample]", columns)
    return list(chain.from_iterable(both))


def in_columns(sample: RawSample) -> Sequence[RawSample]:
    """A sample alone, in columns where it has but one file."""
    if len(sample.fields) != 1 or sample.problem is not None:
        return [sample]
    field, start, content = sample.fields[0]
    return Singles(field, [sample.index], [sample.key], [sample.offset], [sample.size], [start], [content])


def sizes_of(samples: Sequence[Sized]) -> Sequence[int]:
    """Bytes of each."""
    return samples.sizes if isinstance(samples, Singles) else [sample.size for sample in samples]


def offsets_of(samples: Sequence[RawSample]) -> Sequence[int]:
    """Where each begins."""
    return samples.offsets if isinstance(samples, Singles) else [sample.offset for sample in samples]


def ends_of(samples: Sequence[RawSample]) -> list[int]:
    """Where each ends."""
    if isinstance(samples, Singles):
        return list(map(int.__add__, samples.offsets, samples.sizes))
    return [sample.offset + sample.size for sample in samples]
