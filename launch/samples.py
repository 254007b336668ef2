"""Samples of shards in shard order, labelled by a schema: what evaluation, encoding and inspection read.

Training reads through `ShardStream`, which shuffles, resumes and runs ahead; here one pass in order is what is wanted.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.launch.settings import SourceSettings
from treadle.pipeline import Schema, StepItems
from treadle.pipeline.grouping import split_name
from treadle.pipeline.samples import SampleError, sample_id
from treadle.pipeline.shards import Shard, ShardError
from treadle.pipeline.sources import expand_urls
from treadle.pipeline.storage import public_url
from treadle.shape import BatchShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """One sample, ready to be decoded."""

    url: str
    """Its shard, without credentials."""
    key: str
    items: StepItems
    fields: tuple[str, ...]
    """The field of each item."""


def shard_urls(sources: Sequence[SourceSettings]) -> list[str]:
    """The shards of all sources, in order.

    Raises:
        ValueError: a pattern names no shard.
    """
    return [url for source in sources for url in expand_urls(list(source.urls))]


def named(sources: Sequence[SourceSettings]) -> str:
    """What the sources are called in a message: their patterns, without credentials."""
    return ", ".join(public_url(url) for source in sources for url in source.urls)


def read_samples(
    sources: Sequence[SourceSettings],
    shape: BatchShape,
    schema: Schema,
    *,
    limit: int | None = None,
    skipped: Counter[str] | None = None,
) -> Iterator[LabelledSample]:
    """Samples that have an item, in shard order.

    Args:
        limit: stops after that many.
        skipped: counts what is left out, by kind: damaged shards, refused samples, files of no use.

    Raises:
        ValueError: a pattern names no shard.
    """
    counts: Counter[str] = Counter() if skipped is None else skipped
    given = 0
    for place, url in enumerate(shard_urls(sources)):
        shown = public_url(url)
        try:
            for sample in Shard(url).samples():
                if limit is not None and given >= limit:
                    return
                if sample.problem is not None:
                    counts[sample.problem[0]] += 1
                    continue
                try:
                    bag = schema.bag(sample, 0, place, sample_id(url, sample.index), shape)
                except SampleError as error:
                    counts[error.kind] += 1
                    logger.warning("%s: sample %s: %s", shown, sample.key, error)
                    continue
                counts.update(bag.left_out)
                if len(bag.items):
                    given += 1
                    yield LabelledSample(shown, sample.key, bag.items, tuple(split_name(member)[1] for member in bag.members))
        except ShardError as error:
            counts[error.kind] += 1
            logger.warning("%s: %s: the rest of the shard is left out", shown, error)
