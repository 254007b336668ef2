"""A packed batch as one safetensors file: what is used of every array, checked for sense when it is read back.

`position_segment` and zeros past the counts are not stored; a checksum over all arrays tells an altered file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.batch_check import check_batch
from treadle.pipeline.fill import write_positions
from treadle.pipeline.layout import EDGE_SETS, NUM_COUNTS, Capacities, batch_layout
from treadle.pipeline.recycle import Recycler
from treadle.pipeline.tensor_file import MAX_HEADER_BYTES, PackedError, header_bytes, read_tensors, tensor_parts
from treadle.pipeline.whole_file import whole_file
from treadle.shape import AudioShape, BatchShape, ImageShape, VideoShape

FORMAT_NAME = "treadle.packed_batch"
FORMAT_VERSION = 1

MAX_BATCH_BYTES = 1 << 33
"""Largest batch that a file may ask memory for."""

MAX_STATE_BYTES = 1 << 28
"""Largest stream state that a file may carry."""

_SEGMENT_FIELDS = (
    "item",
    "id",
    "group",
    "grid",
    "extent",
    "row",
    "start",
    "length",
    "bag",
    "temperature_group",
    "modality",
    "side",
)


def shape_table(shape: BatchShape, capacities: Capacities) -> dict[str, Any]:
    """A shape and its capacities as plain JSON."""
    return {"shape": asdict(shape), "capacities": asdict(capacities)}


def parsed_shape(table: Any) -> tuple[BatchShape, Capacities]:
    """What `shape_table` wrote.

    Raises:
        PackedError: it is malformed, or asks for more memory than `MAX_BATCH_BYTES`.
    """
    try:
        sizes = dict(table["shape"])
        slices = {"image": ImageShape, "video": VideoShape, "audio": AudioShape}
        named: dict[str, Any] = {name: slices[name](**value) if name in slices else value for name, value in sizes.items()}
        shape = BatchShape(**named).resolved()
        values = dict(table["capacities"])
        if set(values) != {field.name for field in fields(Capacities)} or not all(
            type(value) is int and 0 <= value < 2**40 for value in values.values()
        ):
            raise ValueError(f"capacities are {values}")
        capacities = Capacities(**values)
        expected = (shape.positions, shape.max_segments_per_device, shape.max_bags_per_device)
        if (capacities.positions, capacities.segments, capacities.bags) != expected or not 0 < capacities.edges < 2**31:
            raise ValueError("capacities do not suit the shape")
    except (KeyError, TypeError, ValueError) as error:
        raise PackedError("corrupt", f"the batch shape is malformed: {error}") from error
    total = batch_layout(shape, capacities.edges).total_bytes
    if total > MAX_BATCH_BYTES:
        raise PackedError("too_large", f"a batch of that shape takes {total} bytes: at most {MAX_BATCH_BYTES} are read")
    return shape, capacities


def batch_parts(batch: PackedBatch) -> list[bytes | memoryview]:
    """The file's bytes, in parts that share the batch's memory."""
    used = batch.segments
    arrays: dict[str, NDArray[Any]] = {"counts": batch.array("counts"), "tape_offsets": batch.tape_offsets[: used + 1]}
    for name in _SEGMENT_FIELDS:
        arrays[name] = batch.array(name)[:used]
    for name in EDGE_SETS:
        offsets = batch.array(f"{name}_offsets")
        arrays[f"{name}_offsets"] = offsets[: used + 1]
        arrays[f"{name}_ids"] = batch.array(f"{name}_ids")[: offsets[-1]]
        arrays[f"{name}_weights"] = batch.array(f"{name}_weights")[: offsets[-1]]
    offsets = batch.array("choice_offsets")
    arrays["choice_offsets"] = offsets[: used + 1]
    arrays["choice_target_data"] = batch.array("choice_target_data")[: offsets[-1]]
    arrays["choice_data"] = batch.array("choice_data")[: offsets[-1]]
    if batch.state is not None:
        arrays["state"] = np.frombuffer(batch.state.to_bytes(), np.uint8)
    arrays["tape"] = batch.tape[: batch.tape_offsets[-1]]
    about = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "crc32": _checksum(arrays), **shape_table(batch.shape, batch.capacities)}
    return tensor_parts(arrays, {FORMAT_NAME: json.dumps(about)})


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> int:
    found = 0
    for array in arrays.values():
        found = crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    return found


def batch_from_bytes(data: bytes | memoryview, recycler: Recycler | None = None) -> PackedBatch:
    """The batch whose file is `data`, copied out of it, into memory of `recycler` where that is of its layout.

    Raises:
        PackedError: the file is truncated, altered, or of another format version.
    """
    arrays, metadata = read_tensors(data)
    about = _about(metadata)
    shape, capacities = parsed_shape(about)
    if _checksum(arrays) != about.get("crc32"):
        raise PackedError("corrupt", "the arrays do not match their checksum")
    state_bytes = arrays.pop("state", None)
    used = _used_segments(arrays, capacities)
    layout, stale = batch_layout(shape, capacities.edges), 0
    if recycler is not None and recycler.layout is layout:
        buffer, stale = recycler.take()
        batch = PackedBatch.over(shape, capacities, layout, buffer)
    else:
        batch = PackedBatch(shape, capacities=capacities)
    expected = {name for name in batch.layout.fields if name != "position_segment"}
    if set(arrays) != expected:
        raise PackedError("corrupt", f"arrays differ from the format's: {', '.join(sorted(set(arrays) ^ expected))}")
    for name, array in arrays.items():
        _copy_in(batch, name, array, used)
    if stale > len(arrays["tape"]):
        batch.tape[len(arrays["tape"]) : stale] = 0
    check_batch(batch)
    write_positions(batch, used)
    if state_bytes is not None:
        from treadle.pipeline.state import StreamState

        try:
            batch.state = StreamState.from_bytes(state_bytes.tobytes())
        except ValueError as error:
            raise PackedError("corrupt", f"the stream state is malformed: {error}") from error
    return batch


def _about(metadata: Mapping[str, str]) -> dict[str, Any]:
    if FORMAT_NAME not in metadata:
        raise PackedError("corrupt", f"the file holds no {FORMAT_NAME}")
    try:
        about = json.loads(metadata[FORMAT_NAME])
    except (ValueError, RecursionError) as error:
        raise PackedError("corrupt", f"the metadata is no JSON: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT_NAME:
        raise PackedError("corrupt", f"the file holds no {FORMAT_NAME}")
    if about.get("version") != FORMAT_VERSION:
        raise PackedError("version", f"format version {about.get('version')!r}: this reads version {FORMAT_VERSION}")
    return about


def _used_segments(arrays: Mapping[str, NDArray[Any]], capacities: Capacities) -> int:
    counts = arrays.get("counts")
    if counts is None or counts.dtype != np.int64 or counts.shape != (NUM_COUNTS,):
        raise PackedError("corrupt", "counts are missing")
    used = int(counts[0])
    if not 0 <= used <= capacities.segments:
        raise PackedError("corrupt", f"{used} segments in a batch of at most {capacities.segments}")
    return used


def _copy_in(batch: PackedBatch, name: str, array: NDArray[Any], used: int) -> None:
    """Copies a stored prefix into its field, and repeats the last entry of offsets."""
    field = batch.layout.fields[name]
    exact = {"counts": NUM_COUNTS, **dict.fromkeys(_SEGMENT_FIELDS, used)}
    length = used + 1 if name.endswith("offsets") else exact.get(name)
    if array.dtype != field.dtype or array.shape[1:] != field.shape[1:] or array.ndim != len(field.shape):
        raise PackedError("corrupt", f"{name} is {array.dtype} of shape {list(array.shape)}")
    if array.shape[0] > field.shape[0] or (length is not None and array.shape[0] != length):
        raise PackedError("corrupt", f"{name} has {array.shape[0]} entries, of {length if length is not None else field.shape[0]}")
    into = batch.array(name)
    into[: len(array)] = array
    if name.endswith("offsets"):
        into[len(array) :] = array[-1]


def save_batch(batch: PackedBatch, path: str | os.PathLike[str]) -> None:
    """Writes the batch's file beside `path`, then renames it: whole or not at all."""
    write_whole(path, batch_parts(batch))


def load_batch(path: str | os.PathLike[str]) -> PackedBatch:
    """The batch that `save_batch` wrote.

    Raises:
        PackedError: the file is truncated, altered, or of another format version.
        OSError: there is no such file.
    """
    with open(path, "rb") as file:
        try:
            return _read_batch(file)
        except PackedError as error:
            raise PackedError(error.kind, f"{os.fspath(path)}: {error.detail}") from error


def _read_batch(file: BinaryIO) -> PackedBatch:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    most = MAX_BATCH_BYTES + MAX_STATE_BYTES + MAX_HEADER_BYTES
    if header_bytes(start) and size > most:
        raise PackedError("too_large", f"the file has {size} bytes: at most {most} are read")
    return batch_from_bytes(start + file.read(size - len(start)))


def write_whole(path: str | os.PathLike[str], parts: Iterable[bytes | memoryview]) -> None:
    """Writes the parts, one after the other, as one whole file."""
    with whole_file(path) as file:
        for part in parts:
            file.write(part)
