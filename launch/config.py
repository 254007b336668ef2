"""Configuration from TOML and flags into frozen dataclasses, and back: one generic walk, so that no field is out of reach.

A configuration is a tree: a TOML table per nested dataclass, a flag per leaf (`--trainer.contrastive.bias 0.5`). Keys that name
nothing are refused with the nearest key that exists; a value of the wrong type or range is refused with its path and the rule.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

T = TypeVar("T")

Tree = dict[str, object]
"""A configuration as TOML holds it: text keys; numbers, text, booleans, lists and trees."""

NONE_WORD = "none"
"""What a flag or a file says to leave an optional field unset."""


class ConfigError(ValueError):
    """A configuration that cannot be read: says where, what and how to mend it."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key
        """The dotted path of the value at fault, where one is."""


class _Opaque:
    """Stands for a type that exists only at run time (a mesh, a device object), which no text can name."""

    device: "type[_Opaque]"


_Opaque.device = _Opaque


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a configuration."""

    path: tuple[str, ...]
    hint: object
    """The field's type, without what no text can express."""
    default: object
    """`dataclasses.MISSING` where a value must be given."""
    doc: str

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)


def _is_opaque(hint: object) -> bool:
    return hint is _Opaque or get_origin(hint) is cast("object", Callable) or hint is object


def _members(hint: object) -> tuple[object, ...]:
    """The types that `hint` is a union of, without what no text can express."""
    parts: tuple[object, ...] = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(part for part in parts if not _is_opaque(part))


@cache
def _hints(owner: type) -> dict[str, object]:
    """The field types of a dataclass, with stand-ins for names that its module imports for type checkers only."""
    module = vars(sys.modules[owner.__module__])
    unknown: dict[str, object] = {}
    while True:
        try:
            return dict(typing.get_type_hints(owner, dict(module), unknown))
        except NameError as error:
            name = str(error.name)
            if name in unknown or not name:
                raise
            unknown[name] = _Opaque


@cache
def field_docs(owner: type) -> dict[str, str]:
    """The text under each field of a dataclass, on one line; empty where its source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        return {}
    body = cast("ast.ClassDef", ast.parse(source).body[0]).body
    docs: dict[str, str] = {}
    for this, following in itertools.pairwise(body):
        if not isinstance(this, ast.AnnAssign) or not isinstance(this.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
            docs[this.target.id] = " ".join(following.value.value.split())
    return docs


def _default(field: "dataclasses.Field[Any]") -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _nested(hint: object) -> type | None:
    """The dataclass that a field holds, if it holds one."""
    for member in _members(hint):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def fields_of(owner: type) -> dict[str, tuple[object, object]]:
    """Name to (type, default) of the fields of a dataclass that text can set."""
    found: dict[str, tuple[object, object]] = {}
    for field in dataclasses.fields(owner):
        hint = _hints(owner)[field.name]
        if field.init and any(member is not type(None) for member in _members(hint)):
            found[field.name] = (hint, _default(field) if _nested(hint) is None else field.default)
    return found


def leaves(owner: type, prefix: tuple[str, ...] = ()) -> list[Leaf]:
    """Every value that a configuration of this class holds, in declaration order."""
    found: list[Leaf] = []
    for name, (hint, default) in fields_of(owner).items():
        nested = _nested(hint)
        if nested is not None:
            found += leaves(nested, (*prefix, name))
        else:
            found.append(Leaf((*prefix, name), hint, default, field_docs(owner).get(name, "")))
    return found


def describe(hint: object) -> str:
    """A type in words, for messages and help."""
    words: list[str] = []
    for member in _members(hint):
        origin = get_origin(member)
        if origin is Literal:
            words.append("one of " + ", ".join(str(value) for value in get_args(member)))
        elif isinstance(member, type) and issubclass(member, Enum):
            words.append("one of " + ", ".join(str(value) for value in member))
        elif origin in (tuple, list, Sequence):
            words.append(f"a list, each {describe(get_args(member)[0])}")
        elif origin in (dict, Mapping):
            words.append(f"a table, each value {describe(get_args(member)[1])}")
        else:
            names: dict[object, str] = {
                int: "an integer",
                float: "a number",
                bool: "true or false",
                str: "text",
                Path: "a path",
                type(None): NONE_WORD,
            }
            words.append(names.get(member, f"a table of {getattr(member, '__name__', member)}"))
    return " or ".join(dict.fromkeys(words))


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that an unknown one was probably meant to be, as the end of a message."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


class _Refused(Exception):
    """A value that is not of the type asked for."""


def _convert_sequence(element: object, value: object, path: str) -> tuple[object, ...]:
    listed: list[object] = list(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else [value]
    nested = _nested(element)
    if nested is not None and listed and not any(isinstance(item, Mapping) or isinstance(item, nested) for item in listed):
        # A plain list stands for one element, whose first field it is: `sources = ["a.tar", "b.tar"]`.
        return (build(nested, {dataclasses.fields(nested)[0].name: listed}, path=path),)
    return tuple(convert(element, item, f"{path}[{number}]") for number, item in enumerate(listed))


def _convert_one(member: object, value: object, path: str) -> object:
    origin = get_origin(member)
    if origin is Literal:
        for allowed in get_args(member):
            if value == allowed and type(value) is type(allowed):
                return allowed
        raise _Refused
    if origin in (tuple, list, Sequence) and (isinstance(value, list | tuple | str) or not isinstance(value, Mapping)):
        listed = _convert_sequence(get_args(member)[0], value, path)
        return listed if origin is not list else list(listed)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _Refused
        table = cast("Mapping[str, object]", value)
        return {key: convert(get_args(member)[1], item, f"{path}.{key}") for key, item in table.items()}
    if not isinstance(member, type):
        raise _Refused
    if dataclasses.is_dataclass(member):
        if isinstance(value, member):
            return value
        if not isinstance(value, Mapping):
            raise _Refused
        return build(member, cast("Mapping[str, object]", value), path=path)
    if issubclass(member, Enum):
        for choice in member:
            if value is choice or (isinstance(value, str) and value.strip().lower() == str(choice)):
                return choice
        raise _Refused
    if member is Path and isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        return Path(value)
    if member is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if member in (int, str, bool) and type(value) is member:
        return value
    raise _Refused


def convert(hint: object, value: object, path: str) -> object:
    """The value as the type `hint` holds it.

    Raises:
        ConfigError: it is of another type.
    """
    members = _members(hint)
    if type(None) in members and (value is None or value == NONE_WORD):
        return None
    # `str` takes anything that is text, so whatever else the union names gets the first look.
    for member in sorted(members, key=lambda kind: kind is str or kind is Path):
        if member is type(None):
            continue
        try:
            return _convert_one(member, value, path)
        except _Refused:
            continue
    raise ConfigError(f"{path} is {value!r}: it must be {describe(hint)}", path)


def build(owner: type[T], tree: Mapping[str, object], *, path: str = "") -> T:
    """A dataclass from a tree.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of the wrong type or range; the message names the key's path.
    """
    known = fields_of(owner)
    docs = field_docs(cast("Any", owner))
    given: dict[str, object] = {}
    for key, value in tree.items():
        name = key.replace("-", "_")
        here = f"{path}.{name}" if path else name
        if name not in known:
            raise ConfigError(f"{here} is not a key of {path or 'the configuration'}: {nearest(name, list(known))}", here)
        given[name] = convert(known[name][0], value, here)
    for name, (hint, default) in known.items():
        nested = _nested(hint)
        here = f"{path}.{name}" if path else name
        if name not in given and nested is not None and default is dataclasses.MISSING:
            given[name] = build(nested, {}, path=here)
        elif name not in given and default is dataclasses.MISSING:
            doc = docs.get(name, "").rstrip(".")
            raise ConfigError(
                f"{here} is missing: give {describe(hint)}{f' ({doc})' if doc else ''}, in the file or as --{here} VALUE", here
            )
    try:
        return owner(**given)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error), path) from error


def parse_flag(leaf: Leaf, text: str) -> object:
    """What a flag's text stands for: the shapes of TOML, with commas enough for a list and no quotes needed for text."""
    members = _members(leaf.hint)
    if type(None) in members and text.lower() == NONE_WORD:
        return None
    origins = {get_origin(member) for member in members}
    if origins & {tuple, list, Sequence, dict, Mapping}:
        if text[:1] in "[{" or text[:1] == '"':
            try:
                return tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"--{leaf.name} {text!r} is not valid TOML: {error}") from error
        element = next((get_args(member)[0] for member in members if get_origin(member) in (tuple, list, Sequence)), str)
        if _nested(element) is not None or "{" in text:
            return [text]  # a URL pattern: its commas belong to its braces
        if any(get_origin(member) in (tuple, list, Sequence) for member in _members(element)):
            return [[part.strip() for part in text.split(",")]]
        return [_scalar(_members(element), part.strip()) for part in text.split(",") if part.strip()]
    return _scalar(members, text)


def _scalar(members: tuple[object, ...], text: str) -> object:
    if bool in members and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in members:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def set_path(tree: Tree, path: tuple[str, ...], value: object) -> None:
    """Sets one value of a tree, making the tables above it."""
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{name} is {below!r} in the file: it must be a table for --{'.'.join(path)} to set")
        tree = cast("Tree", below)
    tree[path[-1]] = value


def read_toml(path: Path) -> Tree:
    """The tree of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def locate(path: Path, key: str) -> str:
    """Where a file sets a dotted key: `FILE:LINE`, or `FILE` where one line cannot be told."""
    table: tuple[str, ...] = ()
    wanted = tuple(key.split("."))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([^\]\[]+?)\s*\]\]?", line):
            table = tuple(part.strip().strip("\"'") for part in header.group(1).split("."))
            if table == wanted:
                return f"{path}:{number}"
        elif assignment := re.match(r"\s*([A-Za-z0-9_\-.\"']+)\s*=", line):
            name = tuple(part.strip("\"'").replace("-", "_") for part in assignment.group(1).split("."))
            if (*table, *name) == wanted:
                return f"{path}:{number}"
    return str(path)
