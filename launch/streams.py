"""A rank's stream of shards, from the settings of a run; torch is not needed."""

import json
import zlib
from dataclasses import replace
from typing import Protocol

from treadle.launch.config import ConfigError
from treadle.launch.settings import DataSettings, SourceSettings
from treadle.model.config import LateInteraction
from treadle.pipeline import ShardCache, ShardStream, Source
from treadle.pipeline.layout import Capacities, batch_layout
from treadle.pipeline.memory import check_memory
from treadle.pipeline.sources import MAX_SHARDS, ListedUrls, expand_urls
from treadle.shape import BatchShape

MAX_LISTING_BYTES = 256 * MAX_SHARDS
"""Most bytes of a listing that another rank is taken at its word for."""


class Shares(Protocol):
    """What a listing needs of a world of ranks."""

    @property
    def rank(self) -> int: ...

    def share_bytes(self, data: bytes) -> bytes: ...


def with_listed_sources(data: DataSettings, world: Shares) -> DataSettings:
    """The settings with every pattern resolved by rank 0 (collective): one listing of the storage, and the same shards on every rank.

    Raises:
        ValueError: a pattern names no shard; on every rank.
    """
    listed: dict[str, object] = {}
    if world.rank == 0:
        try:
            listed = {"urls": [expand_urls(source.urls) for source in data.sources]}
        except ValueError as error:
            listed = {"refused": str(error)}
    packed = world.share_bytes(zlib.compress(json.dumps(listed).encode("utf-8", "surrogatepass"), 1))
    unpacked = zlib.decompressobj().decompress(packed, MAX_LISTING_BYTES)
    answer = json.loads(unpacked.decode("utf-8", "surrogatepass"))
    if "refused" in answer:
        raise ValueError(answer["refused"])
    sources: list[SourceSettings] = [
        replace(source, urls=ListedUrls(urls)) for source, urls in zip(data.sources, answer["urls"], strict=True)
    ]
    return replace(data, sources=tuple(sources))


def open_stream(
    data: DataSettings,
    shape: BatchShape,
    late_interaction: LateInteraction | None = None,
    *,
    max_edges: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> ShardStream:
    """The stream of one rank.

    Raises:
        ValueError: a pattern names no shard, or there are more ranks than lanes.
    """
    return ShardStream(
        stream_sources(data),
        shape,
        seed=data.seed,
        rank=rank,
        world_size=world_size,
        lanes=data.lanes,
        shuffle=data.shuffle,
        shuffle_bytes=data.shuffle_bytes,
        epochs=data.epochs,
        threads=data.threads,
        processes=data.processes,
        schema=data.schema,
        options=data.decode,
        on_error=data.on_error,
        quarantine=quarantine_path(data, rank, world_size),
        max_quarantined=data.max_quarantined,
        quarantine_probation=data.quarantine_probation,
        cache=None if data.cache is None else ShardCache(folder=data.cache, max_bytes=data.cache_bytes),
        window=data.window,
        max_edges=data.max_edges or max_edges,
        late_interaction=late_interaction,
    )


def check_batch(shape: BatchShape, max_edges: int = 0) -> None:
    """Checks that this machine can hold a batch of the configured capacities, before anything is started.

    Raises:
        ConfigError: it cannot.
    """
    whole = shape.resolved()
    capacities = Capacities.of(whole, max_edges)
    try:
        check_memory(whole, capacities, batch_layout(whole, capacities.edges))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def stream_sources(data: DataSettings) -> list[str] | list[Source]:
    """The sources of a stream: one that is neither weighted nor repeats is plain URLs, which need no blend."""
    first = data.sources[0] if len(data.sources) == 1 else None
    if first is not None and first.weight == 1 and not first.repeat and not isinstance(first.urls, ListedUrls):
        return list(data.sources[0].urls)
    return [Source(source.urls, weight=source.weight, repeat=source.repeat) for source in data.sources]


def quarantine_path(data: DataSettings, rank: int, world_size: int) -> str | None:
    """Ranks write a file each: appending from several machines to one would tear lines."""
    return None if data.quarantine is None else f"{data.quarantine}{f'.{rank}' if world_size > 1 else ''}"
