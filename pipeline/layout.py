"""Where every array of a packed batch lies in its one buffer: a function of the shape and the edge capacity alone.

Fields follow each other in a fixed order, each at a multiple of 64 bytes, the tape last, so that one copy of the used
prefix moves a whole batch.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treadle.shape import ALIGNMENT_BYTES, BatchShape, require_count, shown

FIELD_ALIGNMENT_BYTES = 64
"""Every field starts at a multiple of this: a cache line, and what vector loads want."""

EDGES_PER_SEGMENT = 8
"""Edge capacity that is derived where none is given."""

EDGE_SETS = ("attract", "repel", "ignore")

COUNTS = (
    "segments",
    "bags",
    "tokens",
    "truncated",
    "dropped",
    "dropped_edges",
    "items",
    "ids_defaulted",
    "tape_used",
    "positions",
    "closed_by",
    "query_tokens",
    "documents",
    "document_tokens",
)
"""What the entries of the `counts` field mean; the rest of its 16 entries are zero."""

NUM_COUNTS = 16

LATE_INTERACTION_FIELDS = ("max_query_span", "max_query_tokens_per_device", "max_documents_per_device", "max_document_tokens_per_device")
"""Of a late-interaction configuration, those that bound a batch."""


class LateInteractionCapacities(Protocol):
    """What the packer reads of a late-interaction configuration; a zero is derived from the shape."""

    @property
    def max_query_span(self) -> int: ...
    @property
    def max_query_tokens_per_device(self) -> int: ...
    @property
    def max_documents_per_device(self) -> int: ...
    @property
    def max_document_tokens_per_device(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacities:
    """How much of each dimension one batch carries."""

    positions: int
    """Rows times columns."""
    segments: int
    """Items."""
    bags: int
    """Bags."""
    edges: int
    """Edges of each edge set."""
    query_span: int = 0
    """Tokens that one query contributes at most; 0: late interaction is not counted."""
    query_tokens: int = 0
    """Query tokens; counted where `query_span` is positive, like the two below."""
    documents: int = 0
    """Documents."""
    document_tokens: int = 0
    """Document tokens."""

    @classmethod
    def of(cls, shape: BatchShape, max_edges: int = 0, late_interaction: LateInteractionCapacities | None = None) -> "Capacities":
        """The capacities of a resolved shape.

        Raises:
            ValueError: `max_edges` or a field of `late_interaction` is out of range.
        """
        max_edges = require_count("Packer", "max_edges", max_edges, 0, 2**31 - 1)
        segments = shape.max_segments_per_device
        bags = shape.max_bags_per_device or segments
        edges = max_edges or EDGES_PER_SEGMENT * segments
        if late_interaction is None:
            return cls(positions=shape.positions, segments=segments, bags=bags, edges=edges)
        lacking = [name for name in LATE_INTERACTION_FIELDS if not hasattr(late_interaction, name)]
        if lacking:
            raise ValueError(
                f"late_interaction is {shown(late_interaction)}: it must be a LateInteraction, or None; it has no {', '.join(lacking)}"
            )
        span, query_tokens, documents, document_tokens = [
            require_count("late_interaction", name, getattr(late_interaction, name)) for name in LATE_INTERACTION_FIELDS
        ]
        span = span or 64
        return cls(
            positions=shape.positions,
            segments=segments,
            bags=bags,
            edges=edges,
            query_span=span,
            query_tokens=query_tokens or span * segments,
            documents=documents or segments,
            document_tokens=document_tokens or shape.positions,
        )

    @property
    def late_interaction(self) -> bool:
        """Whether query tokens, documents and document tokens are counted."""
        return self.query_span > 0


class Field(NamedTuple):
    """One array of the buffer."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """First byte in the buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """This array in `buffer`, not copied."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The fields of a batch's buffer, in order."""

    fields: dict[str, Field]
    tape_offset: int
    """First byte of the tape."""
    total_bytes: int
    """Bytes of the whole buffer."""


def align(value: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """`value` rounded up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


@lru_cache(maxsize=64)
def batch_layout(shape: BatchShape, max_edges: int) -> Layout:
    """The layout of a resolved shape with room for `max_edges` edges in each edge set."""
    segments, rows, columns = shape.max_segments_per_device, shape.max_rows_per_device, shape.max_columns_per_row
    choices = segments * shape.max_choices_per_item
    listed: list[tuple[str, DTypeLike, tuple[int, ...]]] = [
        ("counts", np.int64, (NUM_COUNTS,)),
        ("tape_offsets", np.int64, (segments + 1,)),
        ("item", np.int64, (segments,)),
        ("id", np.uint64, (segments,)),
        ("group", np.int64, (segments,)),
        ("grid", np.int32, (segments, 3)),
        ("extent", np.int32, (segments, 3)),
        ("row", np.int32, (segments,)),
        ("start", np.int32, (segments,)),
        ("length", np.int32, (segments,)),
        ("bag", np.int32, (segments,)),
        ("temperature_group", np.int32, (segments,)),
        ("modality", np.uint8, (segments,)),
        ("side", np.uint8, (segments,)),
        ("position_segment", np.int32, (rows, columns)),
    ]
    for name in EDGE_SETS:
        listed += [
            (f"{name}_offsets", np.int64, (segments + 1,)),
            (f"{name}_ids", np.uint32, (max_edges,)),
            (f"{name}_weights", np.float32, (max_edges,)),
        ]
    listed += [
        ("choice_offsets", np.int64, (segments + 1,)),
        ("choice_target_data", np.float32, (choices,)),
        ("choice_data", np.uint8, (choices,)),
        ("tape", np.uint8, (shape.tape_bytes,)),
    ]
    fields: dict[str, Field] = {}
    offset = 0
    for name, dtype, size in listed:
        field = Field(name, np.dtype(dtype), size, offset)
        fields[name] = field
        offset = align(offset + field.nbytes, FIELD_ALIGNMENT_BYTES)
    return Layout(fields, fields["tape"].offset, fields["tape"].offset + shape.tape_bytes)


def allocate(layout: Layout) -> NDArray[np.uint8]:
    """A zeroed buffer that starts on a cache line; pages that are never written cost nothing.

    Raises:
        ValueError: others use the memory that it takes.
    """
    try:
        raw = np.zeros(layout.total_bytes + FIELD_ALIGNMENT_BYTES, np.uint8)
    except MemoryError as error:
        raise ValueError(
            f"a batch of this BatchShape and max_edges takes {layout.total_bytes:,} bytes, more than there are left: lower what "
            "they allow, or free what other processes hold"
        ) from error
    skip = -raw.ctypes.data % FIELD_ALIGNMENT_BYTES
    return raw[skip : skip + layout.total_bytes]
