"""What shards hold, measured item by item from headers, and the batch capacities that would suit it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treadle.decoders import DecodeError, DecodeOptions, probe
from treadle.launch.samples import LabelledSample, read_samples
from treadle.launch.settings import SourceSettings
from treadle.pipeline import PackedBatch, Packer, Schema
from treadle.pipeline.bag import decode_bag
from treadle.shape import MAX_TAPE_BYTES, AudioShape, BatchShape, ImageShape, Modality, VideoShape

KEPT_SAMPLES = 512
"""Samples whose bytes are kept, to be packed and shown."""

KEPT_BYTES = 2**28
POSITIONS = 16_384
"""Positions of a suggested batch."""

COLUMN_STEP = 64


@dataclass(slots=True)
class FieldSurvey:
    """The items of one field."""

    modality: Modality
    sizes: list[int] = field(default_factory=list)
    """Bytes as stored."""
    tokens: list[int] = field(default_factory=list)
    """Tokens uncut, for those whose header could be read."""
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Survey:
    """What was found."""

    measured_with: BatchShape
    """The slices that tokens were counted with; its row is as long as it can be."""
    samples: int = 0
    shards: set[str] = field(default_factory=set)
    fields: dict[str, FieldSurvey] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    kept: list[LabelledSample] = field(default_factory=list)
    items_of_samples: list[int] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Positions of every item that could be read: its tokens and its prefix."""
        return [count + 1 for found in self.fields.values() for count in found.tokens]


def probing_shape(slices: BatchShape | None) -> BatchShape:
    """A shape that cuts next to nothing, with the slices of `slices`, or usual ones."""
    narrow = BatchShape(
        max_rows_per_device=1,
        max_segments_per_device=1,
        max_columns_per_row=2,
        image=slices.image if slices is not None else ImageShape(patch_side=16),
        video=slices.video if slices is not None else VideoShape(patch_side=16),
        audio=slices.audio if slices is not None else AudioShape(chunk_samples=400),
    )
    columns = min(2**20, (MAX_TAPE_BYTES - 64) // narrow.bytes_per_position)
    return replace(narrow, max_columns_per_row=columns)


def survey(
    sources: Sequence[SourceSettings], slices: BatchShape | None, schema: Schema, options: DecodeOptions, limit: int | None
) -> Survey:
    """Reads samples and measures their items by their headers.

    Raises:
        ValueError: a pattern names no shard.
    """
    found = Survey(probing_shape(slices))
    kept_bytes = 0
    for sample in read_samples(sources, found.measured_with, schema, limit=limit, skipped=found.left_out):
        found.samples += 1
        found.shards.add(sample.url)
        found.items_of_samples.append(len(sample.fields))
        size = 0
        for place, name in enumerate(sample.fields):
            data = sample.items.content(place)
            modality = Modality(int(sample.items.modalities[place]))
            entry = found.fields.setdefault(name, FieldSurvey(modality))
            entry.sizes.append(len(data))
            size += len(data)
            try:
                entry.tokens.append(math.prod(probe(modality, data, found.measured_with, options).grid))
            except DecodeError as error:
                entry.failures[error.kind] += 1
        if len(found.kept) < KEPT_SAMPLES and kept_bytes + size <= KEPT_BYTES:
            found.kept.append(sample)
            kept_bytes += size
    return found


def suggest(found: Survey) -> BatchShape:
    """A shape whose rows hold the 99th percentile of items whole, with about `POSITIONS` positions.

    Raises:
        ValueError: nothing could be read.
    """
    lengths = np.array(found.lengths)
    if not len(lengths):
        raise ValueError("no item could be read: there is nothing to suggest capacities for")
    # A row of twice the usual item leaves the packer room; a row of the 99th percentile cuts almost nothing.
    row = max(float(np.quantile(lengths, 0.99)), 2 * float(np.median(lengths)), COLUMN_STEP)
    columns = math.ceil(row / COLUMN_STEP) * COLUMN_STEP
    live = {entry.modality for entry in found.fields.values() if entry.tokens}
    shape = replace(
        found.measured_with,
        max_columns_per_row=columns,
        image=found.measured_with.image if Modality.IMAGE in live else ImageShape(),
        video=found.measured_with.video if Modality.VIDEO in live else VideoShape(),
        audio=found.measured_with.audio if Modality.AUDIO in live else AudioShape(),
    )
    positions = min(POSITIONS, MAX_TAPE_BYTES // 2 // shape.bytes_per_position)
    rows = max(1, positions // columns)
    usual = float(np.minimum(lengths, columns).mean())
    segments = math.ceil(1.25 * rows * columns / usual / 8) * 8
    return replace(shape, max_rows_per_device=rows, max_segments_per_device=max(8, segments))


def packed_examples(found: Survey, shape: BatchShape, options: DecodeOptions, count: int) -> list[PackedBatch]:
    """Batches of the kept samples, as a stream would pack them, at most `count`."""
    packer = Packer(shape)
    batches: list[PackedBatch] = []
    for sample in found.kept:
        try:
            packer.add_decoded(decode_bag(sample.items, shape, options, on_error="drop"))
        except ValueError:
            continue  # a modality that the shape leaves out, or a choice that it makes none of
        while packer.ready() and len(batches) < count:
            batches.append(packer.take())
        if len(batches) >= count:
            return batches
    while packer.num_pending and len(batches) < count:
        batches.append(packer.take())
    return batches
