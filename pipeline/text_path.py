"""The short way for samples of texts alone: file bytes to a decoded bag, without columns in between.

The first sample of each set of field names goes the general way, through schema and decoder, and shows how such samples are
labelled; the following ones differ in their bytes and their ids alone. The result is the same; a caption costs a few
microseconds in place of a hundred.
"""

from collections.abc import Callable, Sequence

import numpy as np

from treadle.decoders import DecodeError, DecodeOptions, decode
from treadle.pipeline.bag import NO_RELATIONS, TextBag, TextForm, TextRun, relation_columns
from treadle.pipeline.identity import mixed
from treadle.pipeline.samples import SampleError, Schema
from treadle.pipeline.shards import RawSample
from treadle.pipeline.sub_lane import Drawable, Located
from treadle.shape import BatchShape, Modality

MAX_FORMS = 4096
"""Sets of field names that are remembered; data with more takes the general way for the rest."""


class TextPath:
    """Answers the bag of a sample of texts, and None for every other sample."""

    def __init__(self, schema: Schema, shape: BatchShape, options: DecodeOptions) -> None:
        self._schema = schema
        self._shape = shape
        self._options = options
        self._capacity = shape.token_capacity()
        self._longest = min(self._capacity, options.max_input_bytes)
        self._forms: dict[tuple[str, ...], TextForm | None] = {}

    def run(self, samples: Sequence[Drawable], seeds: Sequence[int], token: Callable[[int], object]) -> TextRun | None:
        """The samples in columns, where each is one text of a form that is known; see `TextRun`."""
        texts: list[bytes] = []
        forms: list[TextForm] = []
        add_text, add_form, longest, form = texts.append, forms.append, self._longest, None
        known = ""
        for sample in samples:
            if isinstance(sample, tuple):
                _, name, _, text = sample
            elif isinstance(sample, RawSample) and len(sample.fields) == 1 and sample.problem is None:
                name, _, text = sample.fields[0]
            else:
                return None
            if name != known or form is None:
                known, form = name, self._forms.get((name,))
                if form is None or form.relations is not NO_RELATIONS:
                    return None
            if not 0 < len(text) <= longest:
                return None
            add_text(text)
            add_form(form)
        return TextRun(forms, texts, seeds, token)

    def bags(self, samples: Sequence[Located], seeds: Sequence[int]) -> list[TextBag]:
        """The bags of as many of the first samples as have one this way."""
        found: list[TextBag] = []
        for sample, seed in zip(samples, seeds, strict=True):
            bag = self.bag(sample, seed) if isinstance(sample, RawSample) else None
            if bag is None:
                break
            found.append(bag)
        return found

    def bag(self, sample: RawSample, seed: int) -> TextBag | None:
        """What schema and decoder would make of the sample whose id `seed` is mixed to, or None where they have to."""
        names = tuple([field.name for field in sample.fields])
        form = self._forms.get(names)
        texts = tuple([field.data for field in sample.fields])
        lengths = tuple([len(text) + 1 for text in texts])
        if form is None or sample.problem is not None or min(lengths) < 2 or max(lengths) - 1 > self._longest:
            return self._general(names, sample, seed)
        return TextBag(form, texts, lengths, seed)

    def _general(self, names: tuple[str, ...], sample: RawSample, seed: int) -> TextBag | None:
        """The same for the first sample of a set of names, and for texts that do not fit a row."""
        most = self._options.max_input_bytes
        for field in sample.fields:
            if not 0 < len(field.data) <= most:
                return None
        try:
            form = self._forms[names]
        except KeyError:
            form = self._learn(names, sample, seed)
        if form is None or sample.problem is not None:
            return None
        texts: list[bytes] = []
        for field in sample.fields:
            data = field.data
            if len(data) > self._capacity:
                try:
                    data = decode(Modality.TEXT, data, self._shape, self._options).array.tobytes()
                except DecodeError:
                    return None
            texts.append(data)
        bag = TextBag(form, tuple(texts), tuple([len(text) + 1 for text in texts]), seed)
        bag.cuts = [len(text) < len(field.data) for text, field in zip(texts, sample.fields, strict=True)]
        return bag

    def _learn(self, names: tuple[str, ...], sample: RawSample, seed: int) -> TextForm | None:
        if len(self._forms) >= MAX_FORMS or sample.problem is not None or not names:
            return None
        try:
            labelled = self._schema.bag(sample, 0, 0, mixed(seed), self._shape)
        except SampleError:
            return None
        items, count = labelled.items, len(labelled.items)
        form = None
        # Content labels a sample through its relations and its group field; what is left out has to be counted.
        plain = count == len(names) and not labelled.left_out and self._schema.group_field is None and items.choices is None
        if plain and not items.modalities.any():
            form = TextForm(
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
