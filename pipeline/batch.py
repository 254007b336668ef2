"""A packed batch: fixed-size arrays in one contiguous buffer, the tape last.

The arrays are views of the buffer, which the batch owns. Entries past the counts are zeros (-1 in
`position_segment`, the last offset repeated in every offsets array), so that any entry is a valid read.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.columns import Tape
from treadle.pipeline.items import Edges
from treadle.pipeline.layout import COUNTS, EDGE_SETS, Capacities, LateInteractionCapacities, Layout, allocate, batch_layout
from treadle.pipeline.memory import check_memory
from treadle.shape import BatchShape, Modality, require_choice, require_count, require_member, require_path, shown

if TYPE_CHECKING:
    import torch

    from treadle.pipeline.state import StreamState

DIMENSIONS = ("positions", "segments", "bags", "edges", "query_tokens", "documents", "document_tokens")
"""What `fill` reports and `closed_by` names, in the order of its code in the counts."""


class PackedBatch:
    """What one device's step reads. `S, R, C` are the shape's segments, rows and columns.

    A fresh batch is empty: no segments, which every reader accepts.
    """

    tape: NDArray[np.uint8]
    """Payloads as decoded, each at a multiple of 16 bytes; `payload(s)` is the typed view."""
    tape_offsets: NDArray[np.int64]
    """[S + 1] where each payload begins; it ends where its extent says."""
    modality: NDArray[np.uint8]
    """[S]"""
    grid: NDArray[np.int32]
    """[S, 3] tokens (t, h, w)"""
    extent: NDArray[np.int32]
    """[S, 3] payload size (frames, height, width), pixels; text and audio (1, 1, n)"""
    row: NDArray[np.int32]
    """[S]"""
    start: NDArray[np.int32]
    """[S] column of the prefix position"""
    length: NDArray[np.int32]
    """[S] positions, prefix and mask included"""
    item: NDArray[np.int64]
    """[S] index among the step's items"""
    id: NDArray[np.uint64]
    """[S] global item id"""
    bag: NDArray[np.int32]
    """[S] number of the bag within the batch"""
    group: NDArray[np.int64]
    """[S] what the item is the same thing as; 0: nothing"""
    temperature_group: NDArray[np.int32]
    """[S]"""
    side: NDArray[np.uint8]
    """[S] role in late interaction"""
    position_segment: NDArray[np.int32]
    """[R, C] segment at each position, -1 where empty"""

    def __init__(
        self,
        shape: BatchShape,
        max_edges: int = 0,
        late_interaction: LateInteractionCapacities | None = None,
        *,
        capacities: Capacities | None = None,
        state: "StreamState | None" = None,
    ) -> None:
        """
        Args:
            max_edges: edges that each edge set holds; 0 derives 8 per segment.
            late_interaction: query tokens, documents and document tokens become capacities too.
            capacities: all capacities at once, in place of the two above.
            state: position of the stream.

        Raises:
            ValueError: an argument is out of range or of another type, or the host has no memory for such capacities.
        """
        require_member("PackedBatch", "shape", shape, BatchShape)
        require_member("PackedBatch", "capacities", capacities, Capacities, optional=True)
        if state is not None:
            from treadle.pipeline.state import StreamState

            require_member("PackedBatch", "state", state, StreamState)
        resolved = shape.resolved()
        limits = capacities or Capacities.of(resolved, max_edges, late_interaction)
        layout = batch_layout(resolved, limits.edges)
        check_memory(resolved, limits, layout)
        self._bind(resolved, limits, layout, allocate(layout), state)
        self.position_segment.fill(-1)

    @classmethod
    def over(cls, shape: BatchShape, capacities: Capacities, layout: Layout, buffer: NDArray[np.uint8]) -> "PackedBatch":
        """A batch over memory of the layout's size, which is taken as it is; the shape is resolved."""
        batch = cls.__new__(cls)
        batch._bind(shape, capacities, layout, buffer, None)
        return batch

    def _bind(
        self, shape: BatchShape, capacities: Capacities, layout: Layout, buffer: NDArray[np.uint8], state: "StreamState | None"
    ) -> None:
        self.shape = shape
        self.capacities = capacities
        self.state = state
        """Position of the stream just after the last sample that this batch consumed, or None."""
        self.layout = layout
        self.buffer = buffer
        """All arrays, back to back."""
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.ndarray(size, dtype, buffer, offset) for name, dtype, size, offset in layout.fields.values()
        }
        arrays = self._arrays
        self._counts: NDArray[np.int64] = arrays["counts"]
        self.tape, self.tape_offsets = arrays["tape"], arrays["tape_offsets"]
        self.modality, self.grid, self.extent = arrays["modality"], arrays["grid"], arrays["extent"]
        self.row, self.start, self.length = arrays["row"], arrays["start"], arrays["length"]
        self.item, self.id, self.bag, self.group = arrays["item"], arrays["id"], arrays["bag"], arrays["group"]
        self.temperature_group, self.side = arrays["temperature_group"], arrays["side"]
        self.position_segment = arrays["position_segment"]

    @property
    def max_edges(self) -> int:
        """Edges that each edge set holds at most."""
        return self.capacities.edges

    @property
    def segments(self) -> int:
        """Items packed."""
        return int(self._counts[0])

    @property
    def bags(self) -> int:
        """Bags packed."""
        return int(self._counts[1])

    @property
    def tokens(self) -> int:
        """Tokens packed: positions less prefixes and masks."""
        return int(self._counts[2])

    @property
    def truncated(self) -> int:
        """Packed items whose content was cut at the row's width."""
        return int(self._counts[3])

    @property
    def dropped(self) -> int:
        """Items left out whole."""
        return int(self._counts[4])

    @property
    def dropped_edges(self) -> int:
        """Edges that named an item left out."""
        return int(self._counts[5])

    @property
    def items(self) -> int:
        """Items of the step, dropped ones too where they have an index."""
        return int(self._counts[6])

    @property
    def ids_defaulted(self) -> bool:
        """Whether `id` is the item's index for want of global ids."""
        return bool(self._counts[7])

    @property
    def positions(self) -> int:
        """Positions used."""
        return int(self._counts[9])

    @property
    def closed_by(self) -> str:
        """The dimension that was fullest when bags were left waiting or dropped; "end" where none was."""
        code = int(self._counts[10])
        return DIMENSIONS[code - 1] if code else "end"

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffer's prefix that hold everything: the fixed arrays and the used part of the tape."""
        return self.layout.tape_offset + int(self._counts[8])

    @property
    def counts(self) -> dict[str, int]:
        """The counts header by name."""
        return {name: int(value) for name, value in zip(COUNTS, self._counts.tolist(), strict=False)}

    @property
    def fill(self) -> dict[str, float]:
        """Used share of every dimension; edges by the fullest edge set."""
        limits = self.capacities
        edges = max(int(self._arrays[f"{name}_offsets"][-1]) for name in EDGE_SETS)
        used = {
            "positions": self.positions / limits.positions,
            "segments": self.segments / limits.segments,
            "bags": self.bags / limits.bags,
            "edges": edges / limits.edges,
        }
        if limits.late_interaction:
            for name in DIMENSIONS[4:]:
                used[name] = int(self._counts[COUNTS.index(name)]) / getattr(limits, name)
        return used

    @property
    def attract(self) -> Edges:
        """Pairs of segments pulled together."""
        return self._edges("attract")

    @property
    def repel(self) -> Edges:
        """Pairs of segments pushed apart."""
        return self._edges("repel")

    @property
    def ignore(self) -> Edges:
        """Pairs of segments skipped."""
        return self._edges("ignore")

    @property
    def choices(self) -> Tape[np.uint8]:
        """Legal bytes of each segment."""
        offsets = self._arrays["choice_offsets"]
        return Tape(self._arrays["choice_data"][: offsets[-1]], offsets)

    @property
    def choice_targets(self) -> Tape[np.float32]:
        """Target probability of each legal byte."""
        offsets = self._arrays["choice_offsets"]
        return Tape(self._arrays["choice_target_data"][: offsets[-1]], offsets)

    def _edges(self, name: str) -> Edges:
        offsets = self._arrays[f"{name}_offsets"]
        used = int(offsets[-1])
        return Edges(offsets, self._arrays[f"{name}_ids"][:used], self._arrays[f"{name}_weights"][:used])

    def array(self, name: str) -> NDArray[Any]:
        """One array of the buffer by its field name, at its full capacity.

        Raises:
            ValueError: there is no such field.
        """
        require_choice("PackedBatch.array", "name", name, self._arrays)
        return self._arrays[name]

    def payload(self, segment: int) -> NDArray[Any]:
        """One segment's content: text uint8 [n], image [H, W, channels], video [T, H, W, channels], audio float32 [n].

        Raises:
            ValueError: `segment` is no integer.
            IndexError: there is no such segment.
        """
        if type(segment) is not int:
            segment = require_count("PackedBatch.payload", "segment", segment, -(2**63), 2**63 - 1)
        if not 0 <= segment < self.segments:
            raise IndexError(f"segment {segment} of a batch of {self.segments}")
        kind = Modality(int(self.modality[segment]))
        size, dtype = payload_form(kind, self.extent[segment].tolist(), self.shape)
        begin = int(self.tape_offsets[segment])
        nbytes = int(np.prod(size, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.tape[begin : begin + nbytes].view(dtype).reshape(size)

    def cu_seqlens(self) -> NDArray[np.int32]:
        """[segments + 1] where each segment begins once the used positions are laid out in (row, column) order without gaps."""
        used = self.segments
        order = np.lexsort((self.start[:used], self.row[:used]))
        bounds = np.zeros(used + 1, np.int32)
        np.cumsum(self.length[:used][order], out=bounds[1:])
        return bounds

    def document_ids(self) -> NDArray[np.int32]:
        """[R, C] the segment that each position may attend to, -1 where empty: what a document mask compares."""
        return self.position_segment.copy()

    def to(self, device: "torch.device | str") -> "dict[str, torch.Tensor]":
        """Every array on `device`, by field name, moved by one copy of the used prefix.

        Unsigned ids and edge ids arrive as the signed type of the same bits. On the CPU the tensors share the copy.

        Raises:
            ValueError: `device` names none, or is no `torch.device`.
        """
        import torch

        try:
            device = torch.device(device) if isinstance(device, str) else device
        except RuntimeError:
            device = f"no device: {device}"
        if not isinstance(device, torch.device):
            raise ValueError(f"PackedBatch.to.device is {shown(device)}: it must be a device such as 'cpu' or 'cuda:1'")
        moved = torch.from_numpy(self.buffer[: self.used_bytes]).to(device, copy=True)
        kinds = {"int64": torch.int64, "uint64": torch.int64, "int32": torch.int32, "uint32": torch.int32}
        kinds |= {"float32": torch.float32, "uint8": torch.uint8}
        tensors: dict[str, torch.Tensor] = {}
        for name, field in self.layout.fields.items():
            end = self.used_bytes if name == "tape" else field.offset + field.nbytes
            size = (end - field.offset,) if name == "tape" else field.shape
            tensors[name] = moved[field.offset : end].view(kinds[field.dtype.name]).view(size)
        return tensors

    def draw(self, path: "str | PathLike[str]") -> None:
        """Writes a picture of the batch as a PNG: rows as strips, a colour for each modality, thumbnails where they fit.

        Raises:
            ValueError: `path` is none.
        """
        require_path("PackedBatch.draw", "path", path)
        from treadle.pipeline.picture import draw_batch

        drawn: Any = self
        draw_batch(drawn, path)

    def save(self, path: "str | PathLike[str]") -> None:
        """Writes the batch, with its stream state, as one safetensors file, whole or not at all.

        Raises:
            ValueError: `path` is none.
        """
        require_path("PackedBatch.save", "path", path)
        from treadle.pipeline.batch_file import save_batch

        saved: Any = self
        save_batch(saved, path)

    @classmethod
    def load(cls, path: "str | PathLike[str]") -> "PackedBatch":
        """The batch that `save` wrote.

        Raises:
            ValueError: `path` is none.
            PackedError: the file is truncated, altered, or of another format version.
        """
        require_path("PackedBatch.load", "path", path)
        from treadle.pipeline.batch_file import load_batch

        loaded: Any = load_batch(path)
        batch: PackedBatch = loaded
        return batch

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same content in the same shape; stream states are not compared."""
        if not isinstance(other, PackedBatch):
            return NotImplemented
        if (self.shape, self.capacities, self.used_bytes) != (other.shape, other.capacities, other.used_bytes):
            return False
        return bool(np.array_equal(self.buffer[: self.used_bytes], other.buffer[: other.used_bytes]))

    def __hash__(self) -> int:
        raise TypeError("a PackedBatch holds arrays: it is compared by content and is not hashable")

    def __reduce__(self) -> "tuple[Any, ...]":
        used = self.buffer[: self.used_bytes].tobytes()
        return _rebuilt, (self.shape, self.capacities, used, self.state)

    def __repr__(self) -> str:
        shape = self.shape
        kinds = np.bincount(self.modality[: self.segments], minlength=len(Modality)).tolist()
        parts = ", ".join(f"{count} {kind}" for kind, count in zip(Modality, kinds, strict=True) if count)
        edges = ", ".join(f"{len(self._edges(name))} {name}" for name in EDGE_SETS if self._arrays[f"{name}_offsets"][-1])
        lost = f", {self.dropped} dropped" if self.dropped else ""
        return (
            f"PackedBatch({shape.max_rows_per_device}x{shape.max_columns_per_row}: {self.segments} segments"
            f"{f' ({parts})' if parts else ''} in {self.bags} bags, {self.tokens} tokens, "
            f"{100 * self.positions / shape.positions:.1f}% of positions"
            f"{f', edges {edges}' if edges else ''}{lost}, closed by {self.closed_by})"
        )


def _rebuilt(shape: BatchShape, capacities: Capacities, used: bytes, state: "StreamState | None") -> PackedBatch:
    batch = PackedBatch(shape, capacities=capacities, state=state)
    batch.buffer[: len(used)] = np.frombuffer(used, np.uint8)
    return batch


def payload_form(kind: Modality, extent: list[int], shape: BatchShape) -> "tuple[tuple[int, ...], type[np.generic]]":
    """Array shape and type of a payload of that extent, for a resolved shape."""
    frames, high, wide = extent
    if kind is Modality.TEXT:
        return (wide,), np.uint8
    if kind is Modality.IMAGE:
        return (high, wide, shape.image.channels), np.uint8
    if kind is Modality.VIDEO:
        return (frames, high, wide, shape.video.channels), np.uint8
    return (wide,), np.float32
