"""Decoding a bag: lengths, what is dropped, and relations by place in the bag."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from treadle.decoders import DecodeError, DecodeOptions
from treadle.pipeline import AudioShape, BatchShape, Edges, ImageShape, Modality, Relations, StepItems
from treadle.pipeline.bag import EdgeColumns, ItemDecodeError, assemble_bag, decode_bag, decode_items

SHAPE = BatchShape(
    max_rows_per_device=2,
    max_segments_per_device=8,
    max_columns_per_row=16,
    max_choices_per_item=4,
    image=ImageShape(patch_side=4, channels=3),
    audio=AudioShape(chunk_samples=100),
).resolved()


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


def test_lengths_count_prefix_tokens_and_mask() -> None:
    # 9 x 5 pixels of patches of 4: 3 x 2 = 6 tokens and a prefix. A choice adds one position.
    bag = decode_bag(
        StepItems([0, 1, 0], [b"hello", png(9, 5), b"xyz"], choices=[None, None, b"AB"], choice_targets=[None, None, [0.5, 0.5]]), SHAPE
    )
    assert bag.lengths == [6, 7, 5]
    assert [bag.tokens(place) for place in range(3)] == [5, 6, 3]
    assert bag.modalities == [0, 1, 0] and bag.items == [0, 1, 2] and bag.ids is None
    assert bag.choices == [b"", b"", b"AB"] and bag.choice_targets[2].tolist() == [0.5, 0.5]
    assert bag.payloads[1].array.shape == (5, 9, 3)


def test_text_with_choices_keeps_its_end_and_leaves_room_for_the_mask() -> None:
    long = bytes(range(64, 64 + 40))
    bag = decode_bag(StepItems([0, 0], [long, long], choices=[b"A", None], choice_targets=[[1.0], None]), SHAPE)
    # A row of 16 holds the prefix, 14 bytes and the mask; without choices the prefix and 15 bytes.
    assert bag.payloads[0].array.tobytes() == long[-14:] and bag.lengths[0] == 16
    assert bag.payloads[1].array.tobytes() == long[:15] and bag.lengths[1] == 16
    assert [payload.truncated for payload in bag.payloads] == [True, True]


def test_an_undecodable_item_is_named() -> None:
    items = StepItems([0, 1, 0], [b"ok", b"not a picture", b"fine"])
    with pytest.raises(DecodeError, match="item 1: ") as caught:
        decode_bag(items, SHAPE)
    assert isinstance(caught.value, ItemDecodeError)
    assert caught.value.index == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.index, again.kind, again.detail) == (1, caught.value.kind, caught.value.detail)


def test_dropping_an_item_moves_relations_and_counts() -> None:
    relations = Relations(
        attract=Edges([0, 2, 3, 5, 6], [1, 2, 3, 0, 3, 0], [1, 2, 3, 4, 5, 6]),
        ignore=Edges([0, 0, 1, 1, 1], [0]),
    )
    items = StepItems(
        [0, 0, 0, 0], [b"a", b"", b"c", b"d"], ids=[10, 11, 12, 13], groups=[1, 2, 3, 4], sides=[0, 1, 2, 3], relations=relations
    )
    told: list[tuple[int, str]] = []
    bag = decode_bag(items, SHAPE, on_error="drop", on_drop=lambda item, error: told.append((item, error.kind)))
    assert told == [(1, "empty")]
    assert bag.items == [0, 2, 3] and bag.ids == [10, 12, 13] and bag.groups == [1, 3, 4] and bag.sides == [0, 2, 3]
    # Item 2 is place 1 now and item 3 place 2: 0 -> 2, 2 -> 0, 2 -> 3, 3 -> 0 stay; 0 -> 1, 1 -> 3 and the ignored 1 -> 0 go.
    attract = bag.relations[0]
    assert list(zip(attract.sources.tolist(), attract.targets.tolist(), attract.weights.tolist(), strict=True)) == [
        (0, 1, 2.0),
        (1, 0, 4.0),
        (1, 2, 5.0),
        (2, 0, 6.0),
    ]
    assert len(bag.relations[2].sources) == 0
    assert bag.dropped == 1 and bag.dropped_edges == 3


def test_a_bag_of_which_nothing_decodes_is_empty() -> None:
    bag = decode_bag(StepItems([0, 0], [b"", b""]), SHAPE, on_error="drop")
    assert len(bag) == 0 and bag.dropped == 2


def test_assembling_some_of_a_steps_items_leaves_relations_to_the_step() -> None:
    items = StepItems([0, 0, 0], [b"a", b"b", b"c"], relations=Relations(attract=Edges([0, 1, 2, 2], [2, 0])))
    payloads = decode_items(items, SHAPE, DecodeOptions())
    bag = assemble_bag(items, payloads, [2, 0])
    assert bag.items == [2, 0]
    assert all(len(edges.sources) == 0 for edges in bag.relations)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="modalities: item 0 is video, which this batch shape leaves out"):
        decode_bag(StepItems([Modality.VIDEO], [b"x"]), SHAPE)
    with pytest.raises(ValueError, match='on_error is \'skip\': it must be "raise" or "drop"'):
        decode_bag(StepItems([0], [b"x"]), SHAPE, on_error="skip")  # type: ignore[arg-type]  # what is refused


def test_remapping_keeps_rows_in_order() -> None:
    edges = EdgeColumns(np.array([0, 0, 1, 2]), np.array([1, 2, 0, 1]), np.array([1, 2, 3, 4], np.float32))
    moved = edges.remapped(np.array([2, -1, 0]))
    assert (moved.sources.tolist(), moved.targets.tolist(), moved.weights.tolist()) == ([2], [0], [2.0])
    moved = edges.remapped(np.array([2, 1, 0]))
    assert (moved.sources.tolist(), moved.targets.tolist(), moved.weights.tolist()) == ([0, 1, 2, 2], [1, 2, 0, 1], [4.0, 3.0, 2.0, 1.0])
