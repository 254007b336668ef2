"""Samples to bags: which files are items, their labels, ids, groups and relations, and what a relations file may say."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.pipeline.items import Edges
from treadle.pipeline.relations import MAX_RELATIONS_BYTES, SampleError, parse_relations
from treadle.pipeline.samples import EXTENSIONS, SampleBag, Schema, group_of, item_ids, modality_of, sample_id
from treadle.pipeline.shards import RawField, RawSample
from treadle.shape import AudioShape, BatchShape, ImageShape, LateInteractionSide, Modality, VideoShape

ALL = BatchShape(
    max_rows_per_device=2,
    max_segments_per_device=16,
    max_columns_per_row=64,
    max_choices_per_item=4,
    image=ImageShape(patch_side=16),
    video=VideoShape(patch_side=16),
    audio=AudioShape(chunk_samples=160),
)
TEXT_AND_IMAGES = BatchShape(max_rows_per_device=2, max_segments_per_device=16, max_columns_per_row=64, image=ImageShape(patch_side=16))


def sample(files: dict[str, bytes], *, problem: tuple[str, str] | None = None) -> RawSample:
    fields = tuple(RawField(name, 1024 * place + 512, data) for place, (name, data) in enumerate(files.items()))
    return RawSample("d/0001", 3, 0, 1024 * len(files), fields, problem)


def bag(files: dict[str, bytes], schema: Schema | None = None, shape: BatchShape = ALL, number: int = 77) -> SampleBag:
    return (schema or Schema()).bag(sample(files), 0, 0, number, shape)


def pairs(edges: Edges) -> list[tuple[int, int, float]]:
    return [
        (int(one), int(other), float(weight))
        for one, other, weight in zip(edges.sources(), edges.ids, edges.weights_or_ones(), strict=True)
    ]


def related(**said: Any) -> dict[str, bytes]:
    """A text and two pictures, and a relations file."""
    return {"txt": b"caption", "png": b"p", "jpg": b"j", "relations.json": json.dumps(said).encode()}


def test_a_sample_is_a_bag() -> None:
    found = bag({"txt": b"caption", "png": b"picture", "es.ogg": b"sound", "mp4": b"clip"})
    assert found.items.modalities.tolist() == [Modality.TEXT, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO]
    assert found.items.contents == [b"caption", b"picture", b"sound", b"clip"]
    assert found.members == ["d/0001.txt", "d/0001.png", "d/0001.es.ogg", "d/0001.mp4"]
    assert found.offsets == [512, 1536, 2560, 3584]
    assert found.items.bags is not None and found.items.bags.tolist() == [0, 0, 0, 0]
    assert found.items.groups is not None and found.items.groups.tolist() == [77] * 4
    assert pairs(found.items.relations.attract) == [(i, j, 1.0) for i in range(4) for j in range(4) if i != j]
    assert not found.left_out


def test_every_extension() -> None:
    for extension, modality in EXTENSIONS.items():
        assert modality_of(extension) is modality
        assert modality_of(f"a.b.{extension}") is modality
    expected = {"txt": 0, "caption": 0, "jpg": 1, "jpeg": 1, "png": 1, "webp": 1, "mp4": 2, "webm": 2, "mkv": 2, "mov": 2}
    expected |= {"wav": 3, "flac": 3, "mp3": 3, "opus": 3, "ogg": 3, "oga": 3, "m4a": 3}
    assert {name: EXTENSIONS[name] for name in expected} == expected
    assert modality_of("json") is modality_of("relations.json") is modality_of("cls") is modality_of("") is None


def test_what_is_left_out_is_counted() -> None:
    found = bag({"txt": b"a", "json": b"{}", "cls": b"1", "wav": b"", "mp4": b"", "mkv": b"", "png": b""}, shape=TEXT_AND_IMAGES)
    assert found.members == ["d/0001.txt", "d/0001.png"]
    assert found.left_out == {"unknown_extension": 2, "audio": 1, "video": 2}
    nothing = bag({"json": b"{}"})
    assert len(nothing.items) == 0


def test_fields_select() -> None:
    found = bag({"txt": b"a", "png": b"b", "seg.png": b"c"}, Schema(fields=["PNG", ".txt"]))
    assert found.members == ["d/0001.txt", "d/0001.png"]
    assert found.left_out == {"not_selected": 1}


def test_labels_go_by_field() -> None:
    schema = Schema(sides={"txt": "query", "PNG": LateInteractionSide.DOCUMENT}, temperature_groups={"png": 2})
    found = bag({"txt": b"a", "png": b"b", "wav": b"c"}, schema).items
    assert found.sides is not None and found.sides.tolist() == [1, 2, 0]
    assert found.temperature_groups is not None and found.temperature_groups.tolist() == [0, 2, 0]
    plain = bag({"txt": b"a"}).items
    assert plain.sides is None and plain.temperature_groups is None


def test_pairs_restrict_attraction() -> None:
    found = bag({"txt": b"a", "png": b"b", "wav": b"c"}, Schema(pairs=[("txt", "PNG"), ("txt", "flac")]))
    assert pairs(found.items.relations.attract) == [(0, 1, 1.0), (1, 0, 1.0)]
    assert not pairs(bag({"txt": b"a", "png": b"b"}, Schema(pairs=[])).items.relations.attract)


def test_groups() -> None:
    schema = Schema(group_field="cls")
    one, same, other = (
        bag({"txt": b"a", "cls": content}, schema, number=number) for number, content in ((1, b"cat"), (2, b"cat"), (3, b"dog"))
    )
    assert one.items.groups is not None and same.items.groups is not None and other.items.groups is not None
    assert one.items.groups.tolist() == same.items.groups.tolist() == [group_of(b"cat")]
    assert other.items.groups.tolist() == [group_of(b"dog")] != one.items.groups.tolist()
    assert not one.left_out
    # without the field, its own id
    assert bag({"txt": b"a"}, schema, number=5).items.groups.tolist() == [5]  # type: ignore[union-attr]
    # a field that is an item too stays one
    assert bag({"txt": b"a", "png": b""}, Schema(group_field="txt")).members == ["d/0001.txt", "d/0001.png"]


@pytest.mark.parametrize(("number", "group"), [(0, 1), (1, 1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_a_group_is_a_signed_number_other_than_zero(number: int, group: int) -> None:
    assert bag({"txt": b"a"}, number=number).items.groups.tolist() == [group]  # type: ignore[union-attr]


def test_ids_do_not_depend_on_what_is_selected() -> None:
    files = {"txt": b"a", "png": b"b", "wav": b"c"}
    every, some = bag(files).items.ids, bag(files, Schema(fields=["wav", "txt"])).items.ids
    assert every is not None and some is not None
    assert some.tolist() == [every[0], every[2]]
    assert bag(files, number=78).items.ids.tolist() != every.tolist()  # type: ignore[union-attr]


def test_ids_are_fixed_and_apart() -> None:
    assert sample_id("s3://bucket/a.tar", 0) == sample_id("s3://bucket/a.tar", 0)
    assert sample_id("https://u:p@host/a.tar?sig=x", 1) == sample_id("https://host/a.tar?sig=y", 1)
    ids = [sample_id(url, index) for url in ("a.tar", "b.tar") for index in range(500)]
    every = ids + [number for sample in ids for number in item_ids(sample, 3)]
    assert len(set(every)) == len(every)
    assert item_ids(7, 20)[:5] == item_ids(7, 5)
    assert len(set(item_ids(7, 20))) == 20
    assert all(0 <= number < 2**64 for number in every)


def test_a_refused_sample_is_told() -> None:
    with pytest.raises(SampleError, match="duplicate_field: twice") as raised:
        Schema().bag(sample({}, problem=("duplicate_field", "twice")), 0, 0, 1, ALL)
    assert raised.value.kind == "duplicate_field"
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.kind, again.detail) == ("duplicate_field", "twice")


def test_relations_take_the_place_of_the_schema() -> None:
    schema = Schema(sides={"txt": "query", "png": "document"}, temperature_groups={"jpg": 1})
    found = bag(
        related(
            items={"PNG": {"side": "query_and_document", "temperature_group": 3}, "jpg": {"side": "none"}},
            attract=[["txt", "png", 0.5], ["png", "txt"]],
            repel=[["txt", "jpg"]],
            ignore=[["jpg", "png", 0.0], ["jpg", "txt"]],
            group="a name",
        ),
        schema,
    ).items
    assert found.sides is not None and found.sides.tolist() == [1, 3, 0]
    assert found.temperature_groups is not None and found.temperature_groups.tolist() == [0, 3, 1]
    assert pairs(found.relations.attract) == [(0, 1, 0.5), (1, 0, 1.0)]
    assert pairs(found.relations.repel) == [(0, 2, 1.0)]
    assert pairs(found.relations.ignore) == [(2, 0, 1.0), (2, 1, 0.0)]
    assert found.groups is not None and found.groups.tolist() == [group_of(b"a name")] * 3


def test_relations_override_only_what_they_say() -> None:
    assert bag(related(repel=[])).items.relations == bag({"txt": b"", "png": b"", "jpg": b""}).items.relations
    assert not pairs(bag(related(attract=[])).items.relations.attract)
    # a repelling edge does not take attraction away: the pair attracts, as relations are read in that order
    assert len(pairs(bag(related(repel=[["txt", "png"]])).items.relations.attract)) == 6


def test_relations_may_name_what_is_left_out() -> None:
    files = {
        "txt": b"a",
        "png": b"b",
        "wav": b"c",
        "relations.json": b'{"attract": [["txt", "wav"], ["txt", "png"]], "items": {"wav": {"side": "query"}}}',
    }
    assert pairs(bag(files, shape=TEXT_AND_IMAGES).items.relations.attract) == [(0, 1, 1.0)]


def test_choices() -> None:
    found = bag(related(choices={"txt": {"bytes": "AB", "targets": [0.7, 0.3]}})).items
    assert found.choices is not None and found.choice_targets is not None
    assert found.choices.data.tobytes() == b"AB"
    assert found.choices.offsets.tolist() == [0, 2, 2, 2]
    np.testing.assert_array_equal(found.choice_targets.data, np.float32([0.7, 0.3]))  # type: ignore[arg-type]
    listed = bag(related(choices={"txt": {"bytes": [0, 255], "targets": [1, 0]}})).items
    assert listed.choices is not None and listed.choices.data.tolist() == [0, 255]
    off = bag(related(choices={"txt": {"bytes": "AB", "targets": [0.7, 0.3]}}), shape=TEXT_AND_IMAGES)
    assert off.items.choices is None
    assert off.left_out == {"choices": 1}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([], "the file is []"),
        ({"item": {}}, "the file has 'item'"),
        ({"items": []}, "items is []"),
        ({"items": {"gif": {}}}, "items names 'gif', which this sample does not have; it has ['jpg', 'png', 'txt']"),
        ({"items": {"png": []}}, "items.png is []"),
        ({"items": {"png": {"colour": 1}}}, "items.png has 'colour'"),
        ({"items": {"png": {"side": 1}}}, "items.png.side is 1"),
        (
            {"items": {"png": {"side": "left"}}},
            "items.png.side: LateInteractionSide: 'left' is not one of none, query, document, query_and_document",
        ),
        ({"items": {"png": {"temperature_group": -1}}}, "items.png.temperature_group is -1"),
        ({"items": {"png": {"temperature_group": True}}}, "temperature_group is True"),
        ({"items": {"png": {"temperature_group": 2**31}}}, "temperature_group is 2147483648"),
        ({"attract": {}}, "attract is {}"),
        ({"attract": ["txt"]}, "attract[0] is 'txt'"),
        ({"attract": [["txt"]]}, "attract[0] is ['txt']"),
        ({"attract": [["txt", 1]]}, "attract[0] names 1"),
        ({"attract": [["txt", "gif"]]}, "attract[0] names 'gif'"),
        ({"attract": [["txt", "txt"]]}, "attract[0] links 'txt' to itself"),
        ({"attract": [["txt", "png"], ["txt", "PNG"]]}, "attract[1] links 'txt' to 'png' a second time"),
        ({"repel": [["txt", "png", -1]]}, "repel[0] is -1: a weight"),
        ({"repel": [["txt", "png", "1"]]}, "repel[0] is '1': a weight"),
        ({"repel": [["txt", "png", 1e39]]}, "repel[0] is 1e+39: a weight"),
        ({"ignore": [["txt", "png", True]]}, "ignore[0] is True: a weight"),
        ({"attract": [["txt", "png"]] * 65_537}, "attract has 65537 edges"),
        ({"choices": {"png": {"bytes": "A", "targets": [1]}}}, "choices names 'png': only text"),
        ({"choices": {"txt": {"bytes": "", "targets": []}}}, "choices.txt.bytes is ''"),
        ({"choices": {"txt": {"bytes": "AA", "targets": [0.5, 0.5]}}}, "different bytes"),
        ({"choices": {"txt": {"bytes": "Aé€", "targets": [1, 0, 0]}}}, "one byte, 0 to 255"),
        ({"choices": {"txt": {"bytes": [256], "targets": [1]}}}, "one byte, 0 to 255"),
        ({"choices": {"txt": {"bytes": [True], "targets": [1]}}}, "one byte, 0 to 255"),
        ({"choices": {"txt": {"bytes": {}, "targets": [1]}}}, "choices.txt.bytes is {}"),
        ({"choices": {"txt": {"bytes": "AB"}}}, "choices.txt.targets is None"),
        ({"choices": {"txt": {"bytes": "AB", "targets": [1]}}}, "one number per byte, 2"),
        ({"choices": {"txt": {"bytes": "AB", "targets": [0.5, 0.4]}}}, "targets sum to 0.9"),
        ({"choices": {"txt": {"bytes": "AB", "targets": [1.5, -0.5]}}}, "targets is -0.5"),
        ({"choices": {"txt": {"bytes": "ABCDE", "targets": [1, 0, 0, 0, 0]}}}, "max_choices_per_item allows 4"),
        ({"group": 3}, "group is 3"),
    ],
)
def test_bad_relations_refuse_the_sample(said: Any, told: str) -> None:
    files = {"txt": b"caption", "png": b"p", "jpg": b"j", "relations.json": json.dumps(said, separators=(",", ":")).encode()}
    with pytest.raises(SampleError) as raised:
        bag(files)
    assert raised.value.kind == "bad_relations"
    assert told in raised.value.detail
    assert len(raised.value.detail) < 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"group": NaN}',
        b'{"attract": [["txt", "png", Infinity]]}',
        b'{"items": {}, "items": {}}',
        b"[" * 100_000,
        b"9" * 10_000,
        b" " * (MAX_RELATIONS_BYTES + 1),
    ],
)
def test_no_relations_at_all(data: bytes) -> None:
    with pytest.raises(SampleError) as raised:
        parse_relations(data, {"txt"})
    assert raised.value.kind == "bad_relations"
    assert len(raised.value.detail) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "txt", "png", "AB", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["txt", "png", "side", "bytes", "targets", "temperature_group"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["items", "attract", "repel", "ignore", "choices", "group"]), JSON, max_size=6))
def test_any_relations_are_taken_or_refused(said: dict[str, Any]) -> None:
    files = {"txt": b"caption", "png": b"p", "relations.json": json.dumps(said).encode()}
    try:
        bag(files).items.check(ALL)
    except SampleError as error:
        assert error.kind == "bad_relations"


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"fields": "jpg"}, "Schema.fields is 'jpg': it must be a list"),
        ({"fields": [3]}, "Schema.fields holds 3"),
        ({"fields": ["a/b"]}, "Schema.fields holds 'a/b'"),
        ({"sides": ["txt"]}, "Schema.sides"),
        ({"sides": {"txt": "left"}}, "'left' is not one of"),
        ({"sides": {"txt": 9}}, r"Schema.sides\['txt'\] is 9"),
        ({"pairs": [("txt",)]}, "Schema.pairs holds"),
        ({"pairs": [("txt", "TXT")]}, "cannot attract itself"),
        ({"pairs": ["ab"]}, "two field names"),
        ({"temperature_groups": {"txt": -1}}, r"Schema.temperature_groups\['txt'\] is -1"),
        ({"temperature_groups": {"txt": 1.5}}, r"Schema.temperature_groups\['txt'\] is 1.5"),
        ({"group_field": ""}, "Schema.group_field holds ''"),
    ],
)
def test_a_schema_is_checked(given_: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Schema(**given_)


def test_a_schema_is_plain_data() -> None:
    schema = Schema(fields=["JPG"], sides={"jpg": "query"}, pairs=[("a.txt", "jpg")], temperature_groups={"jpg": 1}, group_field="cls")
    assert pickle.loads(pickle.dumps(schema)) == schema
    plain = json.loads(json.dumps(schema.to_dict()))
    assert plain == {
        "fields": ["jpg"],
        "sides": {"jpg": "query"},
        "pairs": [["a.txt", "jpg"]],
        "temperature_groups": {"jpg": 1},
        "group_field": "cls",
        "required": [],
    }
    assert Schema(**plain) == schema


def test_a_sample_without_a_required_field_is_incomplete() -> None:
    schema = Schema(required=["txt", ".PNG"])
    assert schema.required == ("txt", "png") and schema.to_dict()["required"] == ("txt", "png")
    assert len(bag({"txt": b"caption", "png": b"picture", "json": b"{}"}, schema).items) == 2
    with pytest.raises(SampleError, match=r"incomplete: it has txt, jpg; Schema\.required asks for png too"):
        bag({"txt": b"caption", "jpg": b"picture"}, schema)
    with pytest.raises(SampleError, match=r"asks for txt, png too"):
        bag({"json": b"{}"}, schema)
    with pytest.raises(ValueError, match=r"Schema\.required is 'txt': it must be a list"):
        Schema(required="txt")
