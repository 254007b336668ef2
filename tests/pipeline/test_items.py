"""StepItems, Relations and Edges: coercion, and every refusal by its message."""

import pickle
from typing import Any

import numpy as np
import pytest

from treadle.pipeline import BatchShape, Edges, ImageShape, LateInteractionSide, Modality, Relations, StepItems
from treadle.pipeline.columns import Tape


def three(**columns: Any) -> StepItems:
    """Three texts with the given columns."""
    return StepItems([0, 0, 0], [b"a", b"bc", b"def"], **columns)


def test_no_items_at_all_is_legal() -> None:
    listed: list[Any] = [[], (b"", []), (b"", [0])]
    for contents in listed:
        items = StepItems([], contents)
        assert len(items) == 0
        items.check(BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=4))
    assert len(StepItems([], [], relations=Relations(attract=Edges([0])))) == 0
    assert "0 items" in repr(StepItems([], []))


def test_first_fields_go_by_position_and_the_rest_are_optional() -> None:
    items = StepItems([Modality.TEXT, Modality.IMAGE], [b"x", b"y"], [3, 3])
    assert items.modalities.dtype == np.uint8 and items.modalities.tolist() == [0, 1]
    assert items.bags is not None and items.bags.dtype == np.int64 and items.bags.tolist() == [3, 3]
    assert items.sides is None and items.groups is None and items.ids is None and items.temperature_groups is None
    edges = Edges([0, 1, 1], [1], [0.5])
    assert [array.dtype.name for array in (edges.offsets, edges.ids, edges.weights)] == ["int64", "uint32", "float32"]
    assert len(edges) == 1 and edges == Edges(np.array([0, 1, 1]), [1], (0.5,)) and edges != Edges([0, 1, 1], [1])


def test_modalities_and_sides_are_members_numbers_or_names() -> None:
    items = StepItems(
        ["text", 1, Modality.VIDEO, np.int64(3)], [b"a"] * 4, sides=["query", 0, LateInteractionSide.DOCUMENT, "Query_And_Document"]
    )
    assert items.modalities.tolist() == [0, 1, 2, 3]
    assert items.sides is not None and items.sides.tolist() == [1, 0, 2, 3]


def test_contents_are_a_list_or_a_tape_and_are_not_copied() -> None:
    data = np.frombuffer(b"hello world", np.uint8).copy()
    taped = StepItems([0, 0, 0], (data, [0, 5, 5, 11]))
    assert [bytes(taped.content(item)) for item in range(3)] == [b"hello", b"", b" world"]
    data[0] = ord("J")
    assert bytes(taped.content(0)) == b"Jello"
    assert bytes(StepItems([0], (b"abc", [1, 3])).content(0)) == b"bc"
    assert bytes(StepItems([0], [memoryview(b"abcdef")[::2]]).content(0)) == b"ace"
    listed = StepItems([0, 0], (b"a", bytearray(b"b")))
    assert [bytes(listed.content(item)) for item in range(2)] == [b"a", b"b"]
    assert bytes(StepItems([0], [np.arange(3, dtype=np.uint8)]).content(0)) == b"\0\1\2"


def test_ids_and_groups_hold_all_64_bits() -> None:
    items = three(ids=[0, 1, 2**64 - 1], groups=[-1, 2**63 - 1, 0])
    assert items.ids is not None and items.ids.tolist() == [0, 1, 2**64 - 1]
    assert items.groups is not None and items.groups.tolist() == [-1, 2**63 - 1, 0]
    unsigned = three(groups=[2**64 - 1, 1, 0])
    assert unsigned.groups is not None and unsigned.groups.tolist() == [-1, 1, 0]


def test_choices_are_tapes_or_lists() -> None:
    listed = three(choices=[b"AB", None, b""], choice_targets=[[0.25, 0.75], None, []])
    taped = three(choices=(b"AB", [0, 2, 2, 2]), choice_targets=([0.25, 0.75], [0, 2, 2, 2]))
    for items in (listed, taped):
        assert items.choices is not None and items.choice_targets is not None
        assert items.choices.data.tobytes() == b"AB" and items.choices.offsets.tolist() == [0, 2, 2, 2]
        assert items.choice_targets.data.tolist() == [0.25, 0.75] and items.choice_targets.data.dtype == np.float32
        assert isinstance(items.choices, Tape)
    numbers = StepItems([0, 0], ([97, 98], [0, 1, 2]), choices=([65, 66], [0, 2, 2]), choice_targets=([0.5, 0.5], [0, 2, 2]))
    assert bytes(numbers.content(1)) == b"b" and numbers.choices is not None and numbers.choices.data.tobytes() == b"AB"
    two = StepItems([0, 0], [b"a", b"b"], choices=[b"AB", b"CD"], choice_targets=([0.5, 0.5], [0.1, 0.9]))
    assert two.choice_targets is not None and two.choice_targets.offsets.tolist() == [0, 2, 4]


def test_items_survive_pickling() -> None:
    items = three(
        ids=[5, 6, 7], relations=Relations(attract=Edges([0, 1, 1, 1], [2])), choices=[b"A", None, None], choice_targets=[[1], None, None]
    )
    again = pickle.loads(pickle.dumps(items))
    assert again.relations == items.relations and again.ids.tolist() == [5, 6, 7] and again.choices.data.tobytes() == b"A"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"bags": [0, 1]}, "bags has 2 entries for 3 items: there must be one per item"),
        ({"bags": [0.5, 1, 2]}, r"bags\[0\] is 0.5: it must be an integer"),
        ({"bags": [True, False, True]}, r"bags\[0\] is True: it must be an integer"),
        ({"bags": [[0, 1, 2]]}, r"bags has shape \(1, 3\): it must be one-dimensional"),
        ({"bags": [0, 1, 2**63]}, r"bags\[2\] is 9223372036854775808: it must lie between -9223372036854775808 and 9223372036854775807"),
        ({"temperature_groups": [0, -1, 0]}, "temperature_groups: item 1 has group -1: it must not be negative"),
        ({"temperature_groups": [0]}, "temperature_groups has 1 entries for 3 items"),
        ({"sides": [0, 4, 0]}, "sides: item 1 has 4: it must be one of 0 none, 1 query, 2 document, 3 query_and_document"),
        ({"sides": ["none", "none", "doc"]}, "sides: item 2 has 'doc': it must be one of"),
        ({"sides": [0]}, "sides has 1 entries for 3 items"),
        ({"groups": [0]}, "groups has 1 entries for 3 items"),
        ({"groups": [0, 0, 2**64]}, r"groups\[2\] is 18446744073709551616: it must lie between"),
        ({"ids": [0, 1, -1]}, r"ids\[2\] is -1: it must lie between 0 and 18446744073709551615"),
        ({"ids": [0, 1]}, "ids has 2 entries for 3 items"),
        ({"relations": Edges()}, "relations is Edges.*: it must be a Relations"),
        ({"choices": [b"A", None, None]}, "choices are given without choice_targets"),
        ({"choice_targets": [[1.0], None, None]}, "choice_targets are given without choices"),
        ({"choices": [b"A", None], "choice_targets": [[1.0], None, None]}, "choices has 2 entries for 3 items"),
        ({"choices": ["A", None, None], "choice_targets": [[1.0], None, None]}, "choices: item 0 is str: it must be bytes"),
        ({"choices": [b"AB", None, None], "choice_targets": [[1.0], None, None]}, "choice_targets: item 0 has 1 targets for 2 choices"),
        (
            {"choices": [None, b"AA", None], "choice_targets": [None, [0.5, 0.5], None]},
            "choices: item 1 offers b'AA': its bytes must be distinct",
        ),
        (
            {"choices": [None, None, b"AB"], "choice_targets": [None, None, [1.5, -0.5]]},
            "item 2 has .*: every target must be finite and not negative",
        ),
        (
            {"choices": [None, None, b"AB"], "choice_targets": [None, None, [np.nan, 1]]},
            "item 2 has .*: every target must be finite and not negative",
        ),
        (
            {"choices": [b"AB", None, None], "choice_targets": [[0.5, 0.4], None, None]},
            "item 0 sums to 0.9: targets must sum to one within 0.001",
        ),
        ({"choices": (b"A", [0, 1]), "choice_targets": [[1.0], None, None]}, "choices: a tape of 2 offsets for 3 items: there must be 4"),
    ],
)
def test_a_bad_column_is_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        three(**columns)


def test_targets_within_the_tolerance_are_kept() -> None:
    three(choices=[b"AB", None, None], choice_targets=[[0.5, 0.5009], None, None])
    with pytest.raises(ValueError, match=r"sums to 1\.0011"):
        three(choices=[b"AB", None, None], choice_targets=[[0.5, 0.5011], None, None])


@pytest.mark.parametrize(
    ("modalities", "contents", "message"),
    [
        ([0, 4], [b"a", b"b"], "modalities: item 1 has 4: it must be one of 0 text, 1 image, 2 video, 3 audio"),
        (["txt"], [b"a"], "modalities: item 0 has 'txt': it must be one of"),
        ([0], [], "contents has 0 entries for 1 items: there must be one per item"),
        ([0], ["text"], "contents: item 0 is str: it must be bytes; encode the text first"),
        ([0, 0], [b"a", None], "contents: item 1 is NoneType: it must be bytes"),
        ([0], (b"abc", [0, 2, 3]), "contents: a tape of 3 offsets for 1 items: there must be 2"),
        ([0], (b"abc", [-1, 2]), r"contents: offsets\[0\] is -1: it must not be negative"),
        ([0, 0], (b"abc", [0, 2, 1]), "contents: offsets fall from 2 to 1 at item 1"),
        ([0], (b"abc", [0, 4]), "contents: offsets end at 4 but the tape's data has 3 entries"),
        ([0], ([97, 256], [0, 2]), r"contents data\[1\] is 256: it must lie between 0 and 255"),
        ([0], (np.zeros(3, np.int16), [0, 3]), "a tape's data is int16 of shape .3,.: it must be bytes or a flat uint8 array"),
    ],
)
def test_bad_contents_are_refused(modalities: Any, contents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepItems(modalities, contents)


EDGE_REFUSALS: list[tuple[Edges, str]] = [
    (Edges((), [1]), "1 ids and 0 weights but no offsets; give 4 offsets"),
    (Edges([0, 1], [1]), "2 offsets for 3 items: there must be 4, or none at all"),
    (Edges([1, 1, 1, 1], [1]), r"offsets\[0\] is 1 \(item 0\): it must be 0"),
    (Edges([0, 2, 1, 2], [1, 2]), "offsets fall from 2 to 1 at item 1: they must never decrease"),
    (Edges([0, 1, 1, 1], [1, 2]), r"offsets end at 1 \(item 2\) but there are 2 ids"),
    (Edges([0, 1, 1, 1], [1], [1.0, 2.0]), "2 weights for 1 ids: give one per edge"),
    (Edges([0, 0, 1, 1], [3]), r"item 1 links to 3 \(edge 0\): it must be an item's index, 0 to 2"),
    (Edges([0, 0, 1, 1], [-1]), r"item 1 links to -1 \(edge 0\): it must be an item's index, 0 to 2"),
    (Edges([0, 0, 0, 1], [2**32]), r"item 2 links to 4294967296 \(edge 0\): it must be an item's index"),
    (Edges([0, 0, 1, 1], [1]), r"item 1 links to 1 \(edge 0\): no item may link to itself"),
    (Edges([0, 2, 2, 2], [2, 1]), r"item 0 links to 1 \(edge 1\): ids must ascend strictly within an item's run"),
    (Edges([0, 2, 2, 2], [1, 1]), r"item 0 links to 1 \(edge 1\): ids must ascend strictly within an item's run"),
    (Edges([0, 1, 2, 2], [1, 0], [1.0, -2.0]), "item 1 links to 0 with weight -2.0: it must be finite and not negative"),
    (Edges([0, 1, 2, 2], [1, 0], [np.inf, 1.0]), "item 0 links to 1 with weight inf: it must be finite and not negative"),
    (Edges([0, 1, 2, 2], [1, 0], [np.nan, 1.0]), "item 0 links to 1 with weight nan: it must be finite and not negative"),
    (Edges([0, 1, 2, 2], [1, 0], [1e39, 1.0]), "item 0 links to 1 with weight inf: it must be finite and not negative"),
]


@pytest.mark.parametrize("name", ["attract", "repel", "ignore"])
@pytest.mark.parametrize(("edges", "message"), EDGE_REFUSALS)
def test_bad_edges_are_refused_with_their_set_and_item(name: str, edges: Edges, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        three(relations=Relations(**{name: edges}))


def test_edges_refuse_what_no_array_of_them_could_hold() -> None:
    with pytest.raises(ValueError, match=r"Edges.ids\[0\] is 0.5: it must be an integer"):
        Edges([0, 1], [0.5])
    with pytest.raises(ValueError, match=r"Edges.offsets has shape \(1, 2\)"):
        Edges([[0, 1]], [0])
    with pytest.raises(ValueError, match=r"Edges.weights holds <U1: it must hold numbers"):
        Edges([0, 1], [0], ["w"])
    with pytest.raises(ValueError, match=r"Relations.repel is \(\): it must be an Edges"):
        Relations(repel=())  # type: ignore[arg-type]  # what is refused
    with pytest.raises(TypeError, match="not hashable"):
        hash(Edges())


def test_a_zero_weight_and_descending_runs_of_different_items_are_legal() -> None:
    edges = Edges([0, 1, 2, 3], [2, 0, 1], [0.0, 1.0, 1e-30])
    edges.check(3, "attract")
    assert edges.sources().tolist() == [0, 1, 2]
    assert Edges([0, 1, 1, 1], [1]).weights_or_ones().tolist() == [1.0]


def test_what_depends_on_the_shape_is_checked_before_use() -> None:
    texts = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32, max_choices_per_item=1)
    pictures = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32, image=ImageShape(patch_side=4))
    items = StepItems([0, 1], [b"a", b"b"])
    items.check(pictures)
    with pytest.raises(
        ValueError, match=r"modalities: item 1 is image, which this batch shape leaves out: make its slice live \(BatchShape.image\)"
    ):
        items.check(texts)
    choosing = three(choices=[b"A", b"AB", None], choice_targets=[[1.0], [0.5, 0.5], None])
    with pytest.raises(ValueError, match=r"choices: item 1 offers 2 bytes: BatchShape\.max_choices_per_item allows 1"):
        choosing.check(texts)
    grouped = three(temperature_groups=[0, 2, 1])
    grouped.check(texts, num_temperature_groups=3)
    with pytest.raises(ValueError, match="temperature_groups: item 1 has group 2: there are 2, 0 to 1"):
        grouped.check(texts, num_temperature_groups=2)
