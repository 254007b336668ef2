"""One sample to one bag of items: which of its files are items, how they are labelled, and how they relate."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from treadle.pipeline.identity import as_group, item_ids, sample_id, shard_key
from treadle.pipeline.items import Relations, StepItems, all_attract
from treadle.pipeline.relations import MAX_TEMPERATURE_GROUP, Overrides, SampleError, named_edges, parse_relations
from treadle.pipeline.shards import RawSample
from treadle.shape import BatchShape, LateInteractionSide, Modality

__all__ = ["EXTENSIONS", "RawSample", "SampleBag", "SampleError", "Schema", "group_of", "item_ids", "modality_of", "sample_id", "shard_key"]

RELATIONS_FIELD = "relations.json"

EXTENSIONS: Mapping[str, Modality] = {
    extension: modality
    for modality, extensions in (
        (Modality.TEXT, "txt text caption transcript md"),
        (Modality.IMAGE, "jpg jpeg jpe jfif png apng webp gif bmp dib tif tiff avif"),
        (Modality.VIDEO, "mp4 m4v webm mkv mov avi 3gp mpg mpeg m2ts"),
        (Modality.AUDIO, "wav wave flac mp3 opus ogg oga m4a aac mka"),
    )
    for extension in extensions.split()
}
"""What a file's last extension says it holds. Its bytes decide how it is decoded."""


@lru_cache(maxsize=4096)
def modality_of(name: str) -> Modality | None:
    """What the file of field `name` holds, by its last extension; None where that is unknown."""
    return EXTENSIONS.get(name.rpartition(".")[2])


def group_of(content: bytes) -> int:
    """The group of everything that carries this content."""
    return as_group(int.from_bytes(blake2b(content, digest_size=8, person=b"treadle group").digest(), "little"))


@dataclass(frozen=True, slots=True)
class SampleBag:
    """The items of one sample, in member order. No items: the sample gives no bag."""

    items: StepItems
    members: list[str]
    """The file that each item is."""
    offsets: list[int]
    """Byte of the unpacked tar where its content begins."""
    left_out: Counter[str]
    """Files that became no item: `unknown_extension`, `not_selected`, or the modality that has no live slice; and `choices`
    where the batch shape makes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Which files of a sample are items, and how they are labelled. Fields go by name without the key (`jpg`, `es.ogg`).

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    fields: Sequence[str] | None = None
    """The fields that become items; None takes every one whose extension is known."""
    sides: Mapping[str, LateInteractionSide | str] = field(default_factory=dict)
    """Roles in late interaction by field, others have none."""
    pairs: Sequence[tuple[str, str]] | None = None
    """The pairs of fields that attract each other, both ways; None: all items of a sample do."""
    temperature_groups: Mapping[str, int] = field(default_factory=dict)
    """Temperature groups by field, others have 0."""
    group_field: str | None = None
    """A field whose content is the sample's group: samples with the same content there never repel each other."""
    required: Sequence[str] = ()
    """Fields without one of which a sample is refused as `incomplete`, as the halves are of one that is split over two shards or whose
    files do not lie side by side. None are: a sample is what it has."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.fields is not None:
            put(self, "fields", tuple(_field_name("fields", name) for name in _listed("fields", self.fields)))
        put(self, "sides", {_field_name("sides", name): _side(name, side) for name, side in _mapped("sides", self.sides).items()})
        if self.pairs is not None:
            put(self, "pairs", tuple(_pair(pair) for pair in _listed("pairs", self.pairs)))
        groups = _mapped("temperature_groups", self.temperature_groups)
        put(self, "temperature_groups", {_field_name("temperature_groups", name): _group(name, number) for name, number in groups.items()})
        if self.group_field is not None:
            put(self, "group_field", _field_name("group_field", self.group_field))
        put(self, "required", tuple(_field_name("required", name) for name in _listed("required", self.required)))

    def to_dict(self) -> dict[str, Any]:
        """This schema as JSON has it."""
        plain = asdict(self)
        plain["sides"] = {name: str(LateInteractionSide(side)) for name, side in plain["sides"].items()}
        return plain

    def bag(self, sample: RawSample, source: int, shard: int, sample_id: int, shape: BatchShape) -> SampleBag:
        """The items of one sample.

        Args:
            sample: its files.
            source: number of its source.
            shard: number of its shard in the source.
            sample_id: see `sample_id`; keys the ids of the items, and is the group of a sample that has no other.
            shape: says which modalities take part.

        Raises:
            SampleError: the sample is refused whole.
        """
        del source, shard  # both are in sample_id
        if sample.problem is not None:
            raise SampleError(*sample.problem)
        self._require_whole(sample)
        left_out: Counter[str] = Counter()
        chosen, modalities, group = self._choose(sample, shape, left_out)
        names = [sample.fields[place].name for place in chosen]
        overrides = _overrides_of(sample)
        if overrides is not None and overrides.group is not None:
            group = group_of(overrides.group.encode("utf-8", "surrogatepass"))
        ids = item_ids(sample_id, len(sample.fields))
        choices, targets = self._choices(names, overrides, shape, left_out)
        items = StepItems(
            np.array(modalities, np.uint8),
            [sample.fields[place].data for place in chosen],
            bags=np.zeros(len(names), np.int64),
            temperature_groups=self._temperature_groups(names, overrides),
            sides=self._sides(names, overrides),
            groups=np.full(len(names), group or as_group(sample_id), np.int64),
            ids=np.array([ids[place] for place in chosen], np.uint64),
            choices=choices,
            choice_targets=targets,
            relations=self._relations(names, overrides),
        )
        return SampleBag(
            items,
            [f"{sample.key}.{name}" for name in names],
            [sample.fields[place].offset for place in chosen],
            +left_out,
        )

    def _require_whole(self, sample: RawSample) -> None:
        if not self.required:
            return
        found = [file.name for file in sample.fields]
        missing = [name for name in self.required if name not in found]
        if missing:
            raise SampleError("incomplete", f"it has {', '.join(found) or 'no files'}; Schema.required asks for {', '.join(missing)} too")

    def _choose(self, sample: RawSample, shape: BatchShape, left_out: Counter[str]) -> tuple[list[int], list[Modality], int]:
        """Places of the files that become items, what they hold, and the sample's group by its group field, 0 without; counts the others."""
        chosen: list[int] = []
        modalities: list[Modality] = []
        group = 0
        for place, file in enumerate(sample.fields):
            name = file.name
            if name == RELATIONS_FIELD:
                continue
            labels_group = name == self.group_field
            if labels_group:
                group = group_of(file.data)
            if self.fields is not None and name not in self.fields:
                left_out["not_selected"] += not labels_group
                continue
            modality = modality_of(name)
            if modality is None:
                left_out["unknown_extension"] += not labels_group
            elif not shape.is_live(modality):
                left_out[str(modality)] += 1
            else:
                chosen.append(place)
                modalities.append(modality)
        return chosen, modalities, group

    def _temperature_groups(self, names: list[str], overrides: Overrides | None) -> list[int] | None:
        given = self.temperature_groups if overrides is None else {**self.temperature_groups, **overrides.temperature_groups}
        return [given.get(name, 0) for name in names] if given else None

    def _sides(self, names: list[str], overrides: Overrides | None) -> list[int] | None:
        given = self.sides if overrides is None else {**self.sides, **overrides.sides}
        return [int(given.get(name, LateInteractionSide.NONE)) for name in names] if given else None

    def _relations(self, names: list[str], overrides: Overrides | None) -> Relations:
        count = len(names)
        if overrides is None and self.pairs is None:
            return all_attract(count)
        places = {name: place for place, name in enumerate(names)}
        if overrides is not None and overrides.attract is not None:
            attract = named_edges(overrides.attract, places, count)
        elif self.pairs is not None:
            both = {pair for one, other in self.pairs for pair in ((one, other), (other, one))}
            attract = named_edges(((one, other, 1.0) for one, other in both), places, count)
        else:
            attract = all_attract(count).attract
        if overrides is None:
            return Relations(attract)
        repel = named_edges(overrides.repel or (), places, count)
        return Relations(attract, repel, named_edges(overrides.ignore or (), places, count))

    def _choices(
        self, names: list[str], overrides: Overrides | None, shape: BatchShape, left_out: Counter[str]
    ) -> tuple[list[bytes] | None, list[list[float]] | None]:
        if overrides is None or not overrides.choices:
            return None, None
        legal: list[bytes] = [b""] * len(names)
        targets: list[list[float]] = [[] for _ in names]
        for name, (given, shares) in overrides.choices.items():
            if modality_of(name) is not Modality.TEXT:
                raise SampleError("bad_relations", f"relations.json: choices names {name!r}: only text items make choices")
            if not shape.max_choices_per_item:
                left_out["choices"] += 1
            elif len(given) > shape.max_choices_per_item:
                most = f"BatchShape.max_choices_per_item allows {shape.max_choices_per_item}"
                raise SampleError("bad_relations", f"relations.json: choices.{name} offers {len(given)} bytes: {most}")
            elif name in names:
                place = names.index(name)
                legal[place], targets[place] = given, shares
        return (legal, targets) if any(legal) else (None, None)


def _overrides_of(sample: RawSample) -> Overrides | None:
    """What the last relations file of a sample says; None without one.

    Raises:
        SampleError: it is malformed.
    """
    data = next((file.data for file in reversed(sample.fields) if file.name == RELATIONS_FIELD), None)
    return None if data is None else parse_relations(data, {file.name for file in sample.fields if file.name != RELATIONS_FIELD})


def _listed(where: str, value: object) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"Schema.{where} is {value!r}: it must be a list")
    return value


def _mapped(where: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"Schema.{where} is {value!r}: it must map field names to labels")
    return value


def _field_name(where: str, name: object) -> str:
    if not isinstance(name, str) or not name.strip(".") or "/" in name:
        raise ValueError(f"Schema.{where} holds {name!r}: a field is named by what follows the key's dot, as in 'jpg' or 'es.ogg'")
    return name.lstrip(".").lower()


def _side(name: str, side: object) -> LateInteractionSide:
    if isinstance(side, str):
        return LateInteractionSide.parse(side)
    try:
        return LateInteractionSide(side)  # type: ignore[arg-type]  # refused below where it is no side
    except ValueError:
        raise ValueError(f"Schema.sides[{name!r}] is {side!r}: it must be a LateInteractionSide or its name") from None


def _pair(pair: object) -> tuple[str, str]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"Schema.pairs holds {pair!r}: it must be two field names")
    one, other = (_field_name("pairs", name) for name in pair)
    if one == other:
        raise ValueError(f"Schema.pairs holds {pair!r}: a field cannot attract itself")
    return one, other


def _group(name: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TEMPERATURE_GROUP:
        raise ValueError(f"Schema.temperature_groups[{name!r}] is {number!r}: it must be a temperature group's number, from 0")
    return number
