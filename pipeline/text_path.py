"""The short way for samples of texts alone: file bytes to a decoded bag, without columns in between.

The first sample of each set of field names goes the general way, through schema and decoder, and shows how such samples are
labelled; the following ones differ in their bytes and their ids alone. The result is the same; a caption costs a few
microseconds in place of a hundred.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treadle.decoders import DecodeOptions, Payload
from treadle.pipeline.bag import DecodedBag, RelationColumns, relation_columns
from treadle.pipeline.samples import SampleError, Schema, item_ids
from treadle.pipeline.shards import RawSample
from treadle.shape import BatchShape

MAX_FORMS = 4096
"""Sets of field names that are remembered; data with more takes the general way for the rest."""


class _Form(NamedTuple):
    """How samples with these field names are labelled."""

    modalities: list[int]
    items: list[int]
    temperature_groups: list[int]
    sides: list[int]
    choices: list[bytes]
    choice_targets: list[NDArray[np.float32]]
    relations: RelationColumns


class TextPath:
    """Answers the bag of a sample of texts that fit a row, and None for every other sample."""

    def __init__(self, schema: Schema, shape: BatchShape, options: DecodeOptions) -> None:
        self._schema = schema
        self._shape = shape
        self._longest = min(shape.token_capacity(), options.max_input_bytes)
        self._forms: dict[tuple[str, ...], _Form | None] = {}

    def bag(self, sample: RawSample, sample_id: int) -> DecodedBag | None:
        """What schema and decoder would make of the sample, or None where they have to."""
        fields = sample.fields
        longest = self._longest
        for field in fields:
            if not 0 < len(field.data) <= longest:
                return None
        names = (fields[0].name,) if len(fields) == 1 else tuple([field.name for field in fields])
        try:
            form = self._forms[names]
        except KeyError:
            form = self._learn(names, sample, sample_id)
        if form is None or sample.problem is not None:
            return None
        payloads: list[Payload] = []
        lengths: list[int] = []
        for field in fields:
            array = np.frombuffer(field.data, np.uint8)
            size = len(array)
            payloads.append(Payload(array, (size, 1, 1), (1, 1, size)))
            lengths.append(size + 1)
        modalities, items, temperature_groups, sides, choices, choice_targets, relations = form
        # The group of a sample without another is its id, as a signed integer other than zero.
        group = (sample_id - 2**64 if sample_id >= 2**63 else sample_id) or 1
        return DecodedBag(
            modalities=modalities,
            payloads=payloads,
            lengths=lengths,
            items=items,
            ids=item_ids(sample_id, len(fields)),
            groups=[group] * len(fields),
            temperature_groups=temperature_groups,
            sides=sides,
            choices=choices,
            choice_targets=choice_targets,
            relations=relations,
        )

    def _learn(self, names: tuple[str, ...], sample: RawSample, sample_id: int) -> _Form | None:
        if len(self._forms) >= MAX_FORMS or sample.problem is not None or not names:
            return None
        try:
            labelled = self._schema.bag(sample, 0, 0, sample_id, self._shape)
        except SampleError:
            return None
        items, count = labelled.items, len(labelled.items)
        form = None
        # Content labels a sample through its relations and its group field; what is left out has to be counted.
        plain = count == len(names) and not labelled.left_out and self._schema.group_field is None and items.choices is None
        if plain and not items.modalities.any():
            form = _Form(
                modalities=items.modalities.tolist(),
                items=list(range(count)),
                temperature_groups=[0] * count if items.temperature_groups is None else items.temperature_groups.tolist(),
                sides=[0] * count if items.sides is None else items.sides.tolist(),
                choices=[b""] * count,
                choice_targets=[np.zeros(0, np.float32)] * count,
                relations=relation_columns(items.relations),
            )
        self._forms[names] = form
        return form
