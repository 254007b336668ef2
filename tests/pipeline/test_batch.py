"""PackedBatch: one buffer, views, equality, files, tensors."""

import copy
import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from treadle.decoders import Payload
from treadle.pipeline import AudioShape, BatchShape, Edges, ImageShape, PackedBatch, Packer, Relations, StepItems, VideoShape
from treadle.pipeline.bag import DecodedBag
from treadle.pipeline.batch_file import batch_from_bytes, batch_parts
from treadle.pipeline.layout import FIELD_ALIGNMENT_BYTES, batch_layout
from treadle.pipeline.tensor_file import PackedError, read_tensors, tensor_parts

SHAPE = BatchShape(
    max_rows_per_device=3,
    max_segments_per_device=12,
    max_columns_per_row=40,
    max_choices_per_item=3,
    image=ImageShape(patch_side=4),
    video=VideoShape(patch_side=4),
    audio=AudioShape(chunk_samples=10),
).resolved()


def payload_of(kind: int, rng: np.random.Generator) -> Payload:
    """A decoded item of odd size."""
    if kind == 0:
        count = int(rng.integers(1, 20))
        return Payload(rng.integers(0, 256, count, dtype=np.uint8), (count, 1, 1), (1, 1, count), count == 7)
    if kind == 3:
        count = int(rng.integers(1, 95))
        return Payload(rng.normal(size=count).astype(np.float32), (-(-count // 10), 1, 1), (1, 1, count))
    high, wide = (int(size) for size in rng.integers(1, 13, 2))
    if kind == 1:
        return Payload(rng.integers(0, 256, (high, wide, 4), dtype=np.uint8), (1, -(-high // 4), -(-wide // 4)), (1, high, wide))
    return Payload(rng.integers(0, 256, (4, high, wide, 3), dtype=np.uint8), (2, -(-high // 4), -(-wide // 4)), (4, high, wide))


def bag_of(kinds: list[int], rng: np.random.Generator, number: int = 0) -> DecodedBag:
    payloads = [payload_of(kind, rng) for kind in kinds]
    return DecodedBag(
        modalities=kinds,
        payloads=payloads,
        lengths=[1 + payload.tokens for payload in payloads],
        items=list(range(len(kinds))),
        ids=[2**63 + number * 100 + place for place in range(len(kinds))],
        groups=[-number] * len(kinds),
        temperature_groups=[number] * len(kinds),
        sides=[(number + place) % 4 for place in range(len(kinds))],
        choices=[b""] * len(kinds),
        choice_targets=[np.zeros(0, np.float32)] * len(kinds),
    )


def mixed_batch(seed: int = 0) -> tuple[PackedBatch, list[Payload]]:
    rng = np.random.default_rng(seed)
    packer = Packer(SHAPE)
    bags = [bag_of([0, 1], rng, 1), bag_of([2], rng, 2), bag_of([3, 0, 1], rng, 3)]
    for bag in bags:
        assert packer.add_decoded(bag)
    batch = packer.take()
    assert batch.bags == 3
    return batch, [payload for bag in bags for payload in bag.payloads]


def choosing_batch() -> PackedBatch:
    items = StepItems(
        [0, 0, 0],
        [b"abc", b"de", b"f"],
        choices=[None, b"AB", b"xyz"],
        choice_targets=[None, [0.25, 0.75], [0.5, 0.5, 0]],
        relations=Relations(attract=Edges([0, 1, 2, 2], [2, 0], [0.5, 2]), ignore=Edges([0, 0, 0, 2], [0, 1])),
    )
    return Packer(SHAPE).pack(items)


def test_the_layout_is_a_function_of_the_shape_and_the_edges() -> None:
    layout = batch_layout(SHAPE, 96)
    assert next(iter(layout.fields)) == "counts" and list(layout.fields)[-1] == "tape"
    end = 0
    for field in layout.fields.values():
        assert field.offset % FIELD_ALIGNMENT_BYTES == 0 and 0 <= field.offset - end < FIELD_ALIGNMENT_BYTES
        end = field.offset + field.nbytes
    assert layout.total_bytes == end
    # b is the largest payload of a position: a tube of 2 x 4 x 4 pixels of 3 bytes against 4 x 4 x 4 and 4 x 10.
    assert layout.fields["tape"].nbytes == 3 * 40 * 96 + 16 * 12 + 16
    assert batch_layout(SHAPE, 97).tape_offset > layout.tape_offset


def test_the_arrays_are_views_of_one_buffer_with_the_promised_types() -> None:
    batch, _ = mixed_batch()
    expected: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        "tape": (np.uint8, (SHAPE.tape_bytes,)),
        "tape_offsets": (np.int64, (13,)),
        "modality": (np.uint8, (12,)),
        "grid": (np.int32, (12, 3)),
        "extent": (np.int32, (12, 3)),
        "row": (np.int32, (12,)),
        "start": (np.int32, (12,)),
        "length": (np.int32, (12,)),
        "item": (np.int64, (12,)),
        "id": (np.uint64, (12,)),
        "bag": (np.int32, (12,)),
        "group": (np.int64, (12,)),
        "temperature_group": (np.int32, (12,)),
        "side": (np.uint8, (12,)),
        "position_segment": (np.int32, (3, 40)),
    }
    for name, (dtype, size) in expected.items():
        array = getattr(batch, name)
        assert array.dtype == dtype and array.shape == size
        assert np.shares_memory(array, batch.buffer)
    assert batch.buffer.ctypes.data % FIELD_ALIGNMENT_BYTES == 0
    for edges in (batch.attract, batch.repel, batch.ignore):
        assert edges.offsets.dtype == np.int64 and edges.ids.dtype == np.uint32 and edges.offsets.shape == (13,)
        assert np.shares_memory(edges.offsets, batch.buffer)


def test_payloads_lie_aligned_with_zeros_between() -> None:
    batch, payloads = mixed_batch()
    for seed in range(20):
        batch, payloads = mixed_batch(seed)
        covered = np.zeros(len(batch.tape), bool)
        for segment, payload in enumerate(payloads):
            begin = int(batch.tape_offsets[segment])
            assert begin % 16 == 0
            found = batch.payload(segment)
            assert found.dtype == payload.array.dtype and np.array_equal(found, payload.array) and np.shares_memory(found, batch.tape)
            covered[begin : begin + found.nbytes] = True
        assert not batch.tape[~covered].any()
        end = int(batch.tape_offsets[len(payloads)])
        assert 0 <= end - np.flatnonzero(covered)[-1] - 1 < 16 and (batch.tape_offsets[len(payloads) :] == end).all()
        assert batch.used_bytes == batch.layout.tape_offset + end
        assert batch.truncated == sum(payload.truncated for payload in payloads)
        for name in ("modality", "grid", "extent", "row", "start", "length", "item", "id", "bag", "group", "temperature_group", "side"):
            assert not batch.array(name)[len(payloads) :].any()
    with pytest.raises(IndexError, match="segment 6 of a batch of 6"):
        batch.payload(6)


def test_a_full_batch_never_passes_its_tape() -> None:
    """Whole rows of one-pixel-over pictures and of full tubes: the tape's bound is R * C * b + 16 * S + 16."""
    for wide in (4, 5, 16):
        shape = BatchShape(max_rows_per_device=2, max_segments_per_device=64, max_columns_per_row=9, image=ImageShape(patch_side=4))
        packer = Packer(shape)
        picture = Payload(np.full((4, wide, 4), 255, np.uint8), (1, 1, -(-wide // 4)), (1, 4, wide))
        bag = bag_of([1], np.random.default_rng(0))
        while True:
            bag.payloads, bag.lengths = [picture], [1 + picture.tokens]
            packer.add_decoded(bag)
            if packer.num_pending > 20:
                break
        for batch in packer.flush():
            assert batch.tape_offsets[-1] <= len(batch.tape) == 2 * 9 * 64 + 16 * 64 + 16


def test_positions_sequences_and_documents() -> None:
    batch, payloads = mixed_batch()
    bounds = batch.cu_seqlens()
    documents = batch.document_ids()
    assert bounds.dtype == np.int32 and bounds[0] == 0 and bounds[-1] == batch.positions == sum(1 + payload.tokens for payload in payloads)
    used = documents.reshape(-1)[documents.reshape(-1) >= 0]
    # Between two bounds every position is of one segment: what variable-length attention is told.
    for begin, end in pairwise(bounds.tolist()):
        assert len(set(used[begin:end].tolist())) == 1
    assert sorted(np.diff(bounds).tolist()) == sorted(batch.length[: batch.segments].tolist())
    assert documents is not batch.position_segment and np.array_equal(documents, batch.position_segment)
    assert batch.cu_seqlens().tolist() != [] and PackedBatch(SHAPE).cu_seqlens().tolist() == [0]


def test_equality_is_by_content() -> None:
    batch, _ = mixed_batch()
    same, _ = mixed_batch()
    assert batch == same and batch != mixed_batch(1)[0] and batch != "batch"
    same.tape[0] ^= 1
    assert batch != same
    assert PackedBatch(SHAPE) == PackedBatch(SHAPE) and PackedBatch(SHAPE) != PackedBatch(SHAPE, max_edges=5)
    with pytest.raises(TypeError, match="not hashable"):
        hash(batch)


def test_copies_own_their_buffer() -> None:
    batch, _ = mixed_batch()
    for again in (copy.deepcopy(batch), copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert again == batch and again.state is None
        assert not np.shares_memory(again.buffer, batch.buffer) and np.shares_memory(again.tape, again.buffer)
        again.tape[0] ^= 1
        assert again != batch
    assert len(pickle.dumps(batch)) < batch.used_bytes + 4096


def test_repr_tells_what_is_in_it() -> None:
    text = repr(choosing_batch())
    assert text == (
        "PackedBatch(3x40: 3 segments (3 text) in 3 bags, 6 tokens, 9.2% of positions, edges 2 attract, 2 ignore, closed by end)"
    )
    assert "0 segments in 0 bags" in repr(PackedBatch(SHAPE))
    assert "2 text, 2 image, 1 video, 1 audio" in repr(mixed_batch()[0])


def test_tensors_come_by_one_copy() -> None:
    batch, _ = mixed_batch()
    tensors = batch.to("cpu")
    assert set(tensors) == set(batch.layout.fields)
    storage = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(storage) == 1 and storage != {batch.buffer.ctypes.data}
    assert tensors["id"].dtype == torch.int64 and np.array_equal(tensors["id"].numpy().view(np.uint64), batch.id)
    assert tensors["attract_ids"].dtype == torch.int32
    assert tensors["position_segment"].shape == (3, 40) and np.array_equal(tensors["grid"].numpy(), batch.grid)
    assert len(tensors["tape"]) == batch.tape_offsets[-1] and np.array_equal(tensors["tape"].numpy(), batch.tape[: len(tensors["tape"])])
    assert len(PackedBatch(SHAPE).to("cpu")["tape"]) == 0


@pytest.mark.parametrize("make", [lambda: mixed_batch()[0], choosing_batch, lambda: PackedBatch(SHAPE)])
def test_a_file_gives_the_batch_back(make: Callable[[], PackedBatch], tmp_path: Path) -> None:
    batch = make()
    batch.save(tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    again = PackedBatch.load(tmp_path / "a.safetensors")
    assert again == batch and again.fill == batch.fill and repr(again) == repr(batch) and again.state is None
    assert (tmp_path / "a.safetensors").stat().st_size < batch.tape_offsets[-1] + 8192


def test_any_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    batch = choosing_batch()
    batch.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert file.get_tensor("item").tolist() == [0, 1, 2]
        assert file.get_tensor("attract_weights").tolist() == [0.5, 2.0]
        about = json.loads(file.metadata()["treadle.packed_batch"])
    assert about["version"] == 1 and about["shape"]["max_columns_per_row"] == 40


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = choosing_batch()
    batch.save(tmp_path / "a.safetensors")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        mixed_batch()[0].save(tmp_path / "a.safetensors")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.safetensors"] and PackedBatch.load(tmp_path / "a.safetensors") == batch


def test_a_refused_file_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"no batch at all")
    with pytest.raises(PackedError, match=r"a\.safetensors: the header claims") as caught:
        PackedBatch.load(tmp_path / "a.safetensors")
    assert caught.value.kind == "corrupt"


def test_every_truncation_is_refused() -> None:
    data = b"".join(batch_parts(choosing_batch()))
    assert batch_from_bytes(data) == choosing_batch()
    for size in [*range(0, 64), *range(64, len(data), 37), len(data) - 1]:
        with pytest.raises(PackedError) as caught:
            batch_from_bytes(data[:size])
        assert caught.value.kind in ("truncated", "corrupt")
    with pytest.raises(PackedError, match="1 bytes follow the last tensor"):
        batch_from_bytes(data + b"\0")


def test_every_flipped_byte_is_refused() -> None:
    data = b"".join(batch_parts(choosing_batch()))
    header = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(0)
    for place in [*range(8), *rng.integers(8, header, 200).tolist(), *rng.integers(header, len(data), 200).tolist()]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(0, 8))
        try:
            again = batch_from_bytes(bytes(damaged))
        except PackedError:
            continue
        # Only padding between the header's own values may change without harm.
        assert again == choosing_batch() or place < header


def rewritten(change: Callable[[dict[str, np.ndarray], dict[str, Any]], None], batch: PackedBatch | None = None) -> bytes:
    """A file whose arrays or metadata are not what a batch would write, with a checksum that fits."""
    from zlib import crc32

    arrays, metadata = read_tensors(b"".join(batch_parts(batch or mixed_batch()[0])))
    arrays = {name: array.copy() for name, array in arrays.items()}
    about = json.loads(metadata["treadle.packed_batch"])
    change(arrays, about)
    found = 0
    for array in arrays.values():
        found = crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    about["crc32"] = found
    return b"".join(tensor_parts(arrays, {"treadle.packed_batch": json.dumps(about)}))


def put(name: str, place: Any, value: Any) -> Callable[[dict[str, np.ndarray], dict[str, Any]], None]:
    def change(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        arrays[name][place] = value

    return change


def tell(path: tuple[str, ...], value: Any) -> Callable[[dict[str, np.ndarray], dict[str, Any]], None]:
    def change(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        for key in path[:-1]:
            about = about[key]
        about[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (tell(("version",), 2), "version", "format version 2: this reads version 1"),
        (tell(("format",), "other"), "corrupt", "the file holds no treadle.packed_batch"),
        (tell(("shape", "max_rows_per_device"), 0), "corrupt", "BatchShape.max_rows_per_device is 0"),
        (tell(("shape", "surprise"), 1), "corrupt", "the batch shape is malformed"),
        (tell(("shape", "image"), 5), "corrupt", "the batch shape is malformed"),
        (tell(("capacities", "edges"), 2**31 - 1), "too_large", "a batch of that shape takes"),
        (tell(("capacities", "positions"), 5), "corrupt", "capacities do not suit the shape"),
        (tell(("capacities",), {}), "corrupt", "the batch shape is malformed"),
        (put("counts", 0, 13), "corrupt", "13 segments in a batch of at most 12"),
        (put("counts", 0, 5), "corrupt", "tape_offsets has 7 entries, of 6"),
        (put("counts", 1, 9), "corrupt", "the number of bags does not match"),
        (put("counts", 2, 9), "corrupt", "the count of tokens is 9"),
        (put("counts", 8, 9), "corrupt", "the count of tape_used is 9"),
        (put("counts", 10, 99), "corrupt", "closed_by is unknown"),
        (put("counts", 15, 1), "corrupt", "a reserved count is set"),
        (put("counts", 4, -1), "corrupt", "a count is out of range"),
        (put("modality", 0, 4), "corrupt", "a modality is unknown"),
        (put("grid", (0, 0), 39), "corrupt", "a grid does not follow from its extent"),
        (put("extent", (0, 2), 2**31 - 1), "corrupt", "a grid does not follow from its extent"),
        (put("extent", (0, 2), -1), "corrupt", "an extent is not positive"),
        (put("length", 0, 3), "corrupt", "a length is not its prefix"),
        (put("row", 0, 3), "corrupt", "a row is out of range"),
        (put("row", 0, -1), "corrupt", "a row is out of range"),
        (put("start", 0, 39), "corrupt", "a segment passes its row"),
        (put("bag", 0, 1), "corrupt", "bags are not numbered in turn"),
        (put("side", 0, 4), "corrupt", "a side is unknown"),
        (put("temperature_group", 0, -1), "corrupt", "a temperature group is negative"),
        (put("item", 0, 6), "corrupt", "an item is out of range"),
        (put("tape_offsets", 1, 2**40), "corrupt", "tape_offsets fall, or pass"),
        (put("tape_offsets", 1, 0), "corrupt", "the tape does not follow the extents"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: Callable[..., None], kind: str, message: str) -> None:
    with pytest.raises(PackedError, match=message) as caught:
        batch_from_bytes(rewritten(change))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("attract_ids", 0, 3), "attract names a segment that is not there"),
        (put("attract_ids", 0, 0), "attract: item 0 links to 0"),
        (put("attract_weights", 0, np.nan), "weight nan"),
        (put("ignore_offsets", -1, 10**6), "ignore_offsets fall, or pass"),
        (put("choice_data", 1, ord("A")), "its bytes must be distinct"),
        (put("choice_target_data", 0, 2.0), "sums to 2.75"),
        (put("choice_offsets", 2, 9), "choice_offsets fall"),
    ],
)
def test_relations_and_choices_of_a_file_are_checked(change: Callable[..., None], message: str) -> None:
    with pytest.raises(PackedError, match=message):
        batch_from_bytes(rewritten(change, choosing_batch()))


def test_overlapping_segments_are_refused() -> None:
    batch = Packer(SHAPE).pack(StepItems([0, 0], [b"abc", b"de"]))
    assert batch.row[:2].tolist() == [0, 0]
    with pytest.raises(PackedError, match="segments overlap"):
        batch_from_bytes(rewritten(put("start", 1, 2), batch))


def test_headers_are_bounded_and_strict() -> None:
    with pytest.raises(PackedError, match="the header claims"):
        batch_from_bytes(struct.pack("<Q", 2**60) + b"{}")
    for header, message in [
        (b"[]", "the header is no JSON table"),
        (b"{{", "the header is no JSON"),
        (b'{"a":1}', "a: the header entry is no table"),
        (b'{"a":{"dtype":"F16","shape":[],"data_offsets":[0,0]}}', "a: dtype 'F16' is not one of"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}', "a: shape .* is no list"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}}', "a: data_offsets 0 to 3 do not hold U8 of shape"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', r"a ends at byte \d+, the file at \d+"),
        (b'{"__metadata__":{"a":1}}', "__metadata__ is not a table of strings"),
        (b"{}", "the file holds no treadle.packed_batch"),
    ]:
        with pytest.raises(PackedError, match=message):
            batch_from_bytes(struct.pack("<Q", len(header)) + header)


def test_a_drawn_batch_is_a_png_of_its_rows(tmp_path: Path) -> None:
    from treadle.pipeline.picture import COLOURS, MARGIN_PX
    from treadle.shape import Modality

    batch, _ = mixed_batch()
    batch.draw(tmp_path / "batch.png")
    with Image.open(io.BytesIO((tmp_path / "batch.png").read_bytes())) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    # Columns are 1024 // 40 = 25 pixels wide, rows 26 apart; a text segment shows its colour on every position.
    text = int(np.flatnonzero(batch.modality[: batch.segments] == 0)[0])
    across = MARGIN_PX + int(batch.start[text]) * 25 + 12
    down = MARGIN_PX + int(batch.row[text]) * 26 + 12
    assert tuple(pixels[down, across]) == COLOURS[Modality.TEXT]
    PackedBatch(SHAPE).draw(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0
