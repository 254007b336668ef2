"""pipeline/text_path.py: the short way gives exactly what schema and decoder give, or leaves the sample to them."""

from dataclasses import fields as fields_of

import numpy as np
import pytest

from treadle.decoders import DecodeOptions
from treadle.pipeline.bag import DecodedBag, decode_bag
from treadle.pipeline.identity import mixed
from treadle.pipeline.samples import Schema
from treadle.pipeline.shards import RawField, RawSample
from treadle.pipeline.text_path import MAX_FORMS, TextPath
from treadle.shape import BatchShape, ImageShape, LateInteractionSide

SHAPE = BatchShape(
    max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=16, max_choices_per_item=4, image=ImageShape(patch_side=8)
).resolved()
OPTIONS = DecodeOptions()


def sample(index: int = 0, **files: bytes) -> RawSample:
    fields = tuple(RawField(name.replace("_", "."), 512 * place, data) for place, (name, data) in enumerate(files.items()))
    return RawSample(key=f"k{index}", index=index, offset=0, size=1024, fields=fields)


def assert_same(found: DecodedBag, expected: DecodedBag) -> None:
    for field in fields_of(DecodedBag):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "payloads":
            for left, right in zip(mine, theirs, strict=True):
                assert (left.grid, left.extent, left.truncated) == (right.grid, right.extent, right.truncated)
                assert left.array.dtype == right.array.dtype
                assert np.array_equal(left.array, right.array)
        elif field.name == "relations":
            for edges, others in zip(mine, theirs, strict=True):
                assert all(np.array_equal(left, right) for left, right in zip(edges, others, strict=True))
        elif field.name == "choice_targets":
            assert [target.tolist() for target in mine] == [target.tolist() for target in theirs]
        elif field.name == "lengths":
            assert list(mine) == list(theirs)
        else:
            assert mine == theirs, field.name


@pytest.mark.parametrize(
    "schema",
    [
        Schema(),
        Schema(sides={"txt": "query", "en.txt": LateInteractionSide.DOCUMENT}, temperature_groups={"txt": 2}),
        Schema(pairs=[("txt", "en.txt")]),
    ],
)
def test_it_gives_what_schema_and_decoder_give(schema: Schema) -> None:
    path = TextPath(schema, SHAPE, OPTIONS)
    for number, seed in enumerate([1, 2**63 + 5, 2**64 - 1, 0]):
        for files in ({"txt": b"one"}, {"txt": b"a" * 15, "en_txt": b"\xff\x00", "de_txt": b"\xc3\xa4"}, {"txt": b"x", "md": b"y"}):
            raw = sample(number, **files)
            found = path.bag(raw, seed)
            assert found is not None
            assert_same(found, decode_bag(schema.bag(raw, 0, 0, mixed(seed), SHAPE).items, SHAPE, OPTIONS))


@pytest.mark.parametrize(
    "files",
    [
        {"txt": b""},
        {"png": b"picture"},
        {"txt": b"a", "png": b"picture"},
        {"txt": b"a", "mp4": b"no slice"},
        {"txt": b"a", "bin": b"unknown"},
        {"txt": b"a", "relations_json": b"{}"},
        {},
    ],
)
def test_everything_else_is_left_to_them(files: dict[str, bytes]) -> None:
    path = TextPath(Schema(), SHAPE, OPTIONS)
    for number in range(2):
        assert path.bag(sample(number, **files), 7) is None


def test_labels_by_content_are_left_to_them() -> None:
    assert TextPath(Schema(group_field="txt"), SHAPE, OPTIONS).bag(sample(txt=b"a"), 7) is None
    assert TextPath(Schema(fields=["md"]), SHAPE, OPTIONS).bag(sample(txt=b"a"), 7) is None
    refused = RawSample(key="k", index=0, offset=0, size=512, fields=(), problem=("duplicate_field", "twice"))
    assert TextPath(Schema(), SHAPE, OPTIONS).bag(refused, 7) is None


def test_a_text_longer_than_a_row_is_cut_as_the_decoder_cuts() -> None:
    path = TextPath(Schema(), SHAPE, OPTIONS)
    for text in (b"sixteen bytes !!", b"fourteen and a\xc3\xa4", b"\xff" * 40):
        raw = sample(0, txt=text, md=b"short")
        found = path.bag(raw, 7)
        assert found is not None
        assert found.lengths[0] <= 16
        assert_same(found, decode_bag(Schema().bag(raw, 0, 0, mixed(7), SHAPE).items, SHAPE, OPTIONS))
    assert TextPath(Schema(), SHAPE, DecodeOptions(max_input_bytes=15)).bag(sample(txt=b"sixteen bytes !!"), 7) is None


def test_the_limit_of_the_options_holds() -> None:
    assert TextPath(Schema(), SHAPE, DecodeOptions(max_input_bytes=3)).bag(sample(txt=b"four"), 7) is None


def test_names_without_end_are_not_all_remembered() -> None:
    path = TextPath(Schema(), SHAPE, OPTIONS)
    found = [path.bag(sample(0, **{f"f{number}_txt": b"a"}), 7) is not None for number in range(MAX_FORMS + 3)]
    assert found == [True] * MAX_FORMS + [False] * 3
