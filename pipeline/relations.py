"""`<key>.relations.json`: what one sample says of its own items, checked.

    {"items": {"png": {"side": "document", "temperature_group": 0}},
     "attract": [["txt", "png", 1.0]], "repel": [], "ignore": [],
     "choices": {"txt": {"bytes": "AB", "targets": [0.7, 0.3]}},
     "group": "any string"}

Every part may be missing; what is there takes the place of what the schema says. Items go by field name. An edge
`[from, to]` or `[from, to, weight]` is directed, as everywhere.
"""

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treadle.pipeline.items import TARGET_SUM_TOLERANCE, Edges
from treadle.shape import MAX_CHOICES_PER_ITEM, LateInteractionSide

MAX_RELATIONS_BYTES = 1 << 20
"""Bytes of one such file."""

MAX_EDGES = 1 << 16
"""Edges of one set in it."""

MAX_TEMPERATURE_GROUP = 2**31 - 1

NamedEdge = tuple[str, str, float]
"""From, to, weight."""


class SampleError(Exception):
    """A sample that is left out whole: `duplicate_field`, `sparse`, `too_large`, `incomplete`, `bad_relations`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(slots=True)
class Overrides:
    """A parsed relations file; None and missing names override nothing."""

    sides: dict[str, LateInteractionSide] = field(default_factory=dict)
    temperature_groups: dict[str, int] = field(default_factory=dict)
    attract: list[NamedEdge] | None = None
    repel: list[NamedEdge] | None = None
    ignore: list[NamedEdge] | None = None
    choices: dict[str, tuple[bytes, list[float]]] = field(default_factory=dict)
    group: str | None = None


def parse_relations(data: bytes, names: Collection[str]) -> Overrides:
    """The overrides in `data`, for a sample whose files have the field names `names`.

    Raises:
        SampleError: `bad_relations`, with the part of the file and its rule.
    """
    if len(data) > MAX_RELATIONS_BYTES:
        raise _bad(f"the file has {len(data)} bytes; at most {MAX_RELATIONS_BYTES} are read")
    try:
        root: Any = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the file is no JSON: {str(error)[:200]}") from None
    _object(root, "the file", {"items", "attract", "repel", "ignore", "choices", "group"})
    found = Overrides()
    for given, labels in _object(root.get("items", {}), "items").items():
        name = _name(given, "items", names)
        _object(labels, f"items.{given}", {"side", "temperature_group"})
        if "side" in labels:
            found.sides[name] = _side(labels["side"], f"items.{given}.side")
        if "temperature_group" in labels:
            found.temperature_groups[name] = _count(labels["temperature_group"], f"items.{given}.temperature_group")
    if "attract" in root:
        found.attract = _edges(root["attract"], "attract", names)
    if "repel" in root:
        found.repel = _edges(root["repel"], "repel", names)
    if "ignore" in root:
        found.ignore = _edges(root["ignore"], "ignore", names)
    for given, choice in _object(root.get("choices", {}), "choices").items():
        found.choices[_name(given, "choices", names)] = _choice(choice, f"choices.{given}")
    group = root.get("group")
    if group is not None and not isinstance(group, str):
        raise _bad(f"group is {_shown(group)}: it must be a string")
    found.group = group
    return found


def named_edges(edges: Iterable[NamedEdge], places: dict[str, int], num_items: int) -> Edges:
    """The edges whose both ends are items, as compressed sparse rows; others name files that were left out."""
    kept = sorted((places[source], places[target], weight) for source, target, weight in edges if source in places and target in places)
    if not kept:
        return Edges()
    offsets = np.zeros(num_items + 1, np.int64)
    np.cumsum(np.bincount([source for source, _, _ in kept], minlength=num_items), out=offsets[1:])
    weights = np.array([weight for _, _, weight in kept], np.float32)
    return Edges(offsets, np.array([target for _, target, _ in kept], np.uint32), () if (weights == 1).all() else weights)


def _bad(detail: str) -> SampleError:
    return SampleError("bad_relations", f"relations.json: {detail}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _object(value: Any, where: str, known: Collection[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{where} is {_shown(value)}: it must be an object")
    unknown = sorted(set(value) - set(known)) if known is not None else []
    if unknown:
        raise _bad(f"{where} has {_shown(unknown[0])}: it may hold {', '.join(sorted(known or ()))}")
    return value


def _name(given: object, where: str, names: Collection[str]) -> str:
    if not isinstance(given, str):
        raise _bad(f"{where} names {_shown(given)}: an item goes by its field name, a string")
    name = given.lower()
    if name not in names:
        raise _bad(f"{where} names {_shown(given)}, which this sample does not have; it has {_shown(sorted(names))}")
    return name


def _side(value: object, where: str) -> LateInteractionSide:
    if not isinstance(value, str):
        raise _bad(f"{where} is {_shown(value)}: it must be none, query, document or query_and_document")
    try:
        return LateInteractionSide.parse(value)
    except ValueError as error:
        raise _bad(f"{where}: {str(error)[:200]}") from None


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TEMPERATURE_GROUP:
        raise _bad(f"{where} is {_shown(value)}: it must be a temperature group's number, from 0")
    return value


def _weight(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float(np.finfo(np.float32).max):
        raise _bad(f"{where} is {_shown(value)}: a weight must be a finite number, not negative")
    return float(value)


def _edges(value: Any, where: str, names: Collection[str]) -> list[NamedEdge]:
    if not isinstance(value, list):
        raise _bad(f"{where} is {_shown(value)}: it must be a list of [from, to, weight]")
    if len(value) > MAX_EDGES:
        raise _bad(f"{where} has {len(value)} edges; at most {MAX_EDGES} are read")
    found: list[NamedEdge] = []
    seen: set[tuple[str, str]] = set()
    for place, edge in enumerate(value):
        here = f"{where}[{place}]"
        if not isinstance(edge, list) or len(edge) not in (2, 3):
            raise _bad(f"{here} is {_shown(edge)}: it must be [from, to] or [from, to, weight]")
        source, target = _name(edge[0], here, names), _name(edge[1], here, names)
        if source == target:
            raise _bad(f"{here} links {_shown(source)} to itself")
        if (source, target) in seen:
            raise _bad(f"{here} links {_shown(source)} to {_shown(target)} a second time")
        seen.add((source, target))
        found.append((source, target, _weight(edge[2], here) if len(edge) == 3 else 1.0))
    return found


def _choice(value: Any, where: str) -> tuple[bytes, list[float]]:
    choice = _object(value, where, {"bytes", "targets"})
    given, targets = choice.get("bytes"), choice.get("targets")
    if isinstance(given, str):
        codes: list[Any] = [ord(letter) for letter in given[: MAX_CHOICES_PER_ITEM + 1]]
    elif isinstance(given, list):
        codes = given
    else:
        raise _bad(f"{where}.bytes is {_shown(given)}: it must be a string of one-byte letters, or a list of numbers from 0 to 255")
    if not 1 <= len(codes) <= MAX_CHOICES_PER_ITEM or len(set(map(repr, codes))) < len(codes):
        raise _bad(f"{where}.bytes is {_shown(given)}: it must hold 1 to {MAX_CHOICES_PER_ITEM} different bytes")
    if not all(isinstance(code, int) and not isinstance(code, bool) and 0 <= code <= 255 for code in codes):
        raise _bad(f"{where}.bytes is {_shown(given)}: every choice must be one byte, 0 to 255")
    if not isinstance(targets, list) or len(targets) != len(codes):
        raise _bad(f"{where}.targets is {_shown(targets)}: it must be a list with one number per byte, {len(codes)}")
    shares = [_weight(target, f"{where}.targets") for target in targets]
    if abs(math.fsum(shares) - 1.0) > TARGET_SUM_TOLERANCE:
        raise _bad(f"{where}.targets sum to {math.fsum(shares):.6g}: they must sum to one within {TARGET_SUM_TOLERANCE}")
    return bytes(codes), shares
