"""pipeline/webdataset.py: WebDataset pipelines into the packer, refusals, and what does not decode."""

import io
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset
from PIL import Image

from treadle.decoders import DecodeError
from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.samples import Schema, sample_id
from treadle.pipeline.stream import ShardStream
from treadle.pipeline.webdataset import from_webdataset
from treadle.shape import BatchShape, ImageShape

SHAPE = BatchShape(max_rows_per_device=2, max_segments_per_device=24, max_columns_per_row=48, image=ImageShape(patch_side=8))


def png(side: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGBA", (side, side), (1, 2, 3, 4)).save(out, "png")
    return out.getvalue()


def write(path: Path, count: int) -> None:
    with tarfile.open(path, "w") as tar:
        for index in range(count):
            for name, data in (("txt", b"caption %d" % index), ("png", png(8 + index % 9))):
                member = tarfile.TarInfo(f"k{index}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


# webdataset leaves the shards that it has read to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_real_pipeline_gives_the_items_that_the_stream_gives(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", 20)
    # The name is exported at run time only.
    pipeline: Any = webdataset
    dataset = pipeline.WebDataset([str(tmp_path / "0.tar")], shardshuffle=False, nodesplitter=None)
    found = Counter(
        (int(batch.id[segment]), int(batch.group[segment]), batch.payload(segment).tobytes())
        for batch in from_webdataset(dataset, SHAPE)
        for segment in range(batch.segments)
    )
    with ShardStream(str(tmp_path / "0.tar"), SHAPE, lanes=1, epochs=1) as stream:
        expected = Counter(
            (int(batch.id[segment]), int(batch.group[segment]), batch.payload(segment).tobytes())
            for batch in stream
            for segment in range(batch.segments)
        )
    assert len(expected) == 40
    assert found == expected


def samples() -> Iterator[Mapping[str, object]]:
    for index in range(6):
        yield {"__key__": f"k{index}", "__url__": "a.tar", "txt": f"text {index}", "png": b"broken" if index == 2 else png(9), "cls": b"3"}


def test_what_does_not_decode_is_left_out_or_raised() -> None:
    quarantine = Quarantine()
    batches = list(from_webdataset(samples(), SHAPE, quarantine=quarantine))
    assert sum(batch.segments for batch in batches) == 11
    assert quarantine.total == 1
    assert all(batch.state is None for batch in batches)
    with pytest.raises(DecodeError) as caught:
        list(from_webdataset(samples(), SHAPE, on_error="raise"))
    assert "in sample 'k2' of a.tar, member 'k2.png'" in caught.value.__notes__[0]
    piped = ({**sample, "__url__": "pipe:curl https://u:hunter2@host/a.tar?sig=s3cr3t"} for sample in samples())
    with pytest.raises(DecodeError) as caught:
        list(from_webdataset(piped, SHAPE, on_error="raise"))
    assert "of pipe:curl https://host/a.tar, member" in caught.value.__notes__[0]


def test_the_schema_selects_and_text_may_be_decoded() -> None:
    batches = list(from_webdataset(samples(), SHAPE, schema=Schema(fields=["txt"])))
    assert sorted(batch.payload(0).tobytes()[:5] for batch in batches) == [b"text "] * len(batches)
    assert sum(batch.segments for batch in batches) == 6
    group = int(batches[0].group[0])
    assert group % 2**64 in {sample_id("a.tar", index) for index in range(6)}


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ((b"png", b"txt"), "sample 0 is tuple"),
        ({"txt": b"x"}, "not a dictionary with __key__"),
        ({"__key__": "k", "png": Image}, "not bytes"),
    ],
)
def test_refusals(sample: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        list(from_webdataset([sample], SHAPE))  # type: ignore[list-item]  # the wrong types are the point
    with pytest.raises(ValueError, match="on_error is 'skip'"):
        from_webdataset([], SHAPE, on_error="skip")  # type: ignore[arg-type]  # the wrong value is the point
