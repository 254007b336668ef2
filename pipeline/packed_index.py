"""The index of a folder of packed shards: what is in it, checked when it is read back.

    index.json       all shards; what a reader looks at
    part-003.json    the shards of one part, while several writers fill a folder; joined into index.json once all are complete

A part is what one packing stream wrote: `parts` of them were packed as the streams of as many ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from zlib import crc32

from treadle.pipeline.batch_file import parsed_shape, shape_table
from treadle.pipeline.layout import Capacities
from treadle.pipeline.tar import MAX_MEMBER_BYTES
from treadle.pipeline.tensor_file import PackedError
from treadle.shape import BatchShape

if TYPE_CHECKING:
    from treadle.pipeline.state import StreamState

FORMAT_NAME = "treadle.packed_shards"
FORMAT_VERSION = 3
INDEX_NAME = "index.json"

MAX_INDEX_BYTES = 1 << 28
"""Largest index that is read: about a million batches."""

MAX_PARTS = 1 << 16
BLOCK_BYTES = 512
"""Tar pads what it holds to blocks of this."""
SUFFIX = "safetensors"


@dataclass(kw_only=True, slots=True)
class PackedShard:
    """One shard of an index."""

    name: str
    """File beside the index."""
    part: int = 0
    bytes: int = 0
    """Size of the file."""
    batches: int = 0
    segments: int = 0
    bags: int = 0
    tokens: int = 0
    dropped: int = 0
    fill: dict[str, float] = field(default_factory=dict)
    """Mean used share of each dimension."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each batch's file."""
    checks: list[int] = field(default_factory=list)
    """Checksum of each batch's header, which holds one of all its arrays."""
    states: list[str | None] = field(default_factory=list)
    """What each batch's stream state is known by."""

    def place(self, number: int) -> tuple[int, int]:
        """Where a batch's header begins in the shard, and the bytes of its file."""
        return sum(2 * BLOCK_BYTES + (size - 1) // BLOCK_BYTES * BLOCK_BYTES for size in self.sizes[:number]), self.sizes[number]


@dataclass(frozen=True, kw_only=True)
class PackedIndex:
    """An index, or one part's."""

    shape: BatchShape
    capacities: Capacities
    parts: int = 1
    complete: bool = False
    """Whether the writer came to its end."""
    made_of: str = ""
    """What the batches are made of, as their writer knows it; equal for all parts."""
    shards: Sequence[PackedShard]

    @property
    def batches(self) -> int:
        """Batches of all shards."""
        return sum(shard.batches for shard in self.shards)

    @cached_property
    def shards_of(self) -> list[list[int]]:
        """Numbers of each part's shards, in order."""
        found: list[list[int]] = [[] for _ in range(self.parts)]
        for number, shard in enumerate(self.shards):
            found[shard.part].append(number)
        return found

    @cached_property
    def ends_of(self) -> list[list[int]]:
        """Batches of each part up to the end of each of its shards."""
        return [list(accumulate(self.shards[number].batches for number in numbers)) for numbers in self.shards_of]

    @cached_property
    def batch_of_state(self) -> dict[str, tuple[int, int]]:
        """Part, and place in it, of the batch that carries each state."""
        found: dict[str, tuple[int, int]] = {}
        for part, numbers in enumerate(self.shards_of):
            states = [state for number in numbers for state in self.shards[number].states]
            found.update({state: (part, place) for place, state in enumerate(states) if state is not None})
        return found

    def to_bytes(self) -> bytes:
        """The index file."""
        table = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **shape_table(self.shape, self.capacities)}
        table |= {
            "parts": self.parts,
            "complete": self.complete,
            "made_of": self.made_of,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return json.dumps({**table, "crc32": _checksum(table)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "PackedIndex":
        """The index whose file is `data`.

        Raises:
            PackedError: it is malformed, or of another format version.
        """
        if len(data) > MAX_INDEX_BYTES:
            raise PackedError("too_large", f"the index has {len(data)} bytes: at most {MAX_INDEX_BYTES} are read")
        try:
            table = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PackedError("corrupt", f"the index is no JSON: {error}") from error
        if not isinstance(table, dict) or table.get("format") != FORMAT_NAME:
            raise PackedError("corrupt", f"this is no index of {FORMAT_NAME}")
        if table.get("version") != FORMAT_VERSION:
            raise PackedError("version", f"index version {table.get('version')!r}: this reads version {FORMAT_VERSION}")
        if table.pop("crc32", None) != _checksum(table):
            raise PackedError("corrupt", "the index does not match its checksum: use it as it was written")
        shape, capacities = parsed_shape(table)
        parts, complete, listed = table.get("parts"), table.get("complete"), table.get("shards")
        if type(parts) is not int or not 0 < parts <= MAX_PARTS or type(complete) is not bool:
            raise PackedError("corrupt", f"the index names {parts!r} parts, complete {complete!r}")
        if not isinstance(listed, list):
            raise PackedError("corrupt", "the index lists no shards")
        made_of = table.get("made_of")
        if not isinstance(made_of, str):
            raise PackedError("corrupt", f"the index is made of {made_of!r}")
        shards = [_shard(entry, parts) for entry in listed]
        return cls(shape=shape, capacities=capacities, parts=parts, complete=complete, made_of=made_of, shards=shards)


def index_name(part: int, parts: int) -> str:
    """The index file of one part's writer."""
    return INDEX_NAME if parts == 1 else f"part-{part:03d}.json"


def joined(parts: Sequence[PackedIndex]) -> PackedIndex:
    """One index over all parts, which are complete.

    Raises:
        PackedError: they are of different shapes.
    """
    first = parts[0]
    for part in parts:
        if (part.shape, part.capacities, part.parts, part.made_of) != (first.shape, first.capacities, first.parts, first.made_of):
            raise PackedError("mismatch", "the parts of this folder were packed into different shapes, or of different data")
    shards = [shard for part in parts for shard in part.shards]
    return PackedIndex(
        shape=first.shape, capacities=first.capacities, parts=first.parts, complete=True, made_of=first.made_of, shards=shards
    )


def _checksum(table: Mapping[str, Any]) -> int:
    """Of everything else in an index: a changed digit of a count or a shape would read as well as the right one."""
    return crc32(json.dumps(table, separators=(",", ":")).encode())


def _shard(entry: Any, parts: int) -> PackedShard:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
        raise PackedError("corrupt", f"a shard's name is {name!r}: it must be a file beside the index")
    table: Mapping[str, Any] = entry
    counts = ("part", "bytes", "batches", "segments", "bags", "tokens", "dropped")
    if set(table) != {each.name for each in fields(PackedShard)} or not all(_is_count(table[count]) for count in counts):
        raise PackedError("corrupt", f"{name}: its entry in the index is malformed")
    sizes, checks, states, fill = table["sizes"], table["checks"], table["states"], table["fill"]
    if not all(isinstance(listed, list) and len(listed) == table["batches"] for listed in (sizes, checks, states)):
        raise PackedError("corrupt", f"{name}: the index counts {table['batches']} batches and names other sizes or states")
    if (
        not all(_is_count(size) and 0 < size <= MAX_MEMBER_BYTES for size in sizes)
        or not all(map(_is_count, checks))
        or not all(state is None or isinstance(state, str) for state in states)
    ):
        raise PackedError("corrupt", f"{name}: a size or a state in the index is malformed")
    if not isinstance(fill, dict) or not all(isinstance(share, int | float) for share in fill.values()) or table["part"] >= parts:
        raise PackedError("corrupt", f"{name}: its fill or its part in the index is malformed")
    return PackedShard(**table)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def header_check(data: bytes | memoryview) -> int:
    """The checksum of the header that a batch's file begins with."""
    view = memoryview(data)
    return crc32(view[: 8 + int.from_bytes(view[:8], "little")])


def state_digest(state: "StreamState", rank: int | None = None) -> str:
    """What an index knows a position by: that of the state's rank, or of `rank` among those that were merged."""
    rank = state.ranks[0] if rank is None else rank
    share = state.deal(rank, state.world_size)
    place = json.dumps([state.world_size, rank, share.lane_draws, share.cursors, share.pending], separators=(",", ":"))
    return blake2b(place.encode(), key=blake2b(state.manifest_json.encode(), digest_size=32).digest(), digest_size=16).hexdigest()


def tar_header(number: int, size: int) -> bytes:
    """The ustar header of a shard's batch: the same bytes on every machine and every day."""
    fields = [
        f"{number:08d}.{SUFFIX}".encode().ljust(100, b"\0"),
        b"0000644\0",
        b"0000000\0",
        b"0000000\0",
        f"{size:011o}\0".encode(),
        b"00000000000\0",
        b" " * 8,
        b"0",
        bytes(100),
        b"ustar\x0000",
    ]
    header = bytearray(b"".join(fields).ljust(BLOCK_BYTES, b"\0"))
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)
