"""from_webdataset: an existing WebDataset pipeline into the packer."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treadle.decoders import DecodeOptions
from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.feed_config import OnStreamError
from treadle.pipeline.layout import LateInteractionCapacities
from treadle.pipeline.packer import Packer
from treadle.pipeline.prepare import Place, Preparer, Read
from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.samples import Schema, sample_id
from treadle.pipeline.shards import RawField, RawSample
from treadle.pipeline.storage import public_url
from treadle.shape import BatchShape, require_choice, require_member, shown


def from_webdataset(
    dataset: Iterable[Mapping[str, Any]],
    shape: BatchShape,
    *,
    schema: Schema | None = None,
    options: DecodeOptions | None = None,
    on_error: OnStreamError = "quarantine",
    quarantine: Quarantine | None = None,
    window: int = 4,
    max_edges: int = 0,
    late_interaction: LateInteractionCapacities | None = None,
) -> Iterator[PackedBatch]:
    """Packs the samples of a WebDataset pipeline: dictionaries of `__key__` and one entry of bytes per file.

    The pipeline stops before decoding (no `.decode()`, no `.to_tuple()`); its shuffling, splitting and filtering stay as they are.
    Samples are decoded as they come, and the batches carry no state: an order that another library makes cannot be resumed here.

    Args:
        quarantine: counts what cannot be decoded; None counts nothing.

    Raises:
        ValueError: an argument is of another type; a sample is no dictionary with a key, or holds something that is neither bytes nor text.
        SampleError | DecodeError: under `on_error="raise"`, with a note that says which sample.
    """
    if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
        raise ValueError(f"from_webdataset.dataset is {shown(dataset)}: it must be a WebDataset pipeline, or a list of its samples")
    require_member("from_webdataset", "shape", shape, BatchShape)
    require_choice("from_webdataset", "on_error", on_error, ("quarantine", "raise"))
    for name, value, kind in (("schema", schema, Schema), ("options", options, DecodeOptions), ("quarantine", quarantine, Quarantine)):
        require_member("from_webdataset", name, value, kind, optional=True)
    preparer = Preparer(schema or Schema(), shape.resolved(), options or DecodeOptions())
    packer = Packer(shape, window=window, max_edges=max_edges, late_interaction=late_interaction, options=preparer.options)
    return _packed(dataset, preparer, packer, on_error, quarantine or Quarantine())


def _packed(
    dataset: Iterable[Mapping[str, Any]], preparer: Preparer, packer: Packer, on_error: OnStreamError, quarantine: Quarantine
) -> Iterator[PackedBatch]:
    seen: Counter[str] = Counter()
    for number, sample in enumerate(dataset):
        url, raw = _raw_sample(sample, number, seen)
        outcome = preparer(Read(Place(0, 0, url, sample_id(url, raw.index)), raw))
        for error, member, offset in outcome.problems():
            if on_error == "raise":
                error.add_note(f"in sample {raw.key!r} of {public_url(url) or 'the dataset'}{f', member {member!r}' if member else ''}")
                raise error
            quarantine.record(url=url, key=raw.key, member=member, offset=offset, kind=error.kind, reason=error.detail)
        if outcome.bag is None:
            continue
        packer.add_decoded(outcome.bag)
        while packer.ready():
            yield packer.take()
    yield from packer.flush()


def _raw_sample(sample: Any, number: int, seen: Counter[str]) -> tuple[str, RawSample]:
    """The URL and the files of a WebDataset sample; its index counts the samples of its shard as they come."""
    if not isinstance(sample, Mapping) or "__key__" not in sample:
        raise ValueError(
            f"from_webdataset: sample {number} is {type(sample).__name__}, not a dictionary with __key__: pass the pipeline before "
            ".decode(), .to_tuple() and .batched()"
        )
    url = str(sample.get("__url__", ""))
    fields: list[RawField] = []
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, bytes | bytearray | memoryview):
            raise ValueError(
                f"from_webdataset: field {name!r} of sample {sample['__key__']!r} is {type(value).__name__}, not bytes: leave decoding to "
                "treadle, without .decode() in the pipeline"
            )
        fields.append(RawField(name.lower(), -1, bytes(value)))
    index = seen[url]
    seen[url] += 1
    return url, RawSample(str(sample["__key__"]), index, -1, 0, tuple(fields))
