"""Configurations as TOML text: every field written, so that a file says all that a run was."""

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import cast

from treadle.launch.config import Leaf, Tree, describe, field_docs, fields_of, leaves


def to_tree(config: object) -> Tree:
    """The tree of a dataclass; unset optional fields are left out, as TOML has no word for them."""
    tree: Tree = {}
    for name in fields_of(type(config)):
        value: object = getattr(config, name)
        if value is not None:
            tree[name] = _plain(value)
    return tree


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return to_tree(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, bool | int | float):
        return value
    return str(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def value_text(value: object) -> str:
    """A value in TOML's spelling.

    Raises:
        ValueError: it is none of TOML's types.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        text = repr(value)
        return text if any(mark in text for mark in ".en") else f"{text}.0"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(item) for item in cast("list[object]", value)) + "]"
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_key(key)} = {value_text(item)}" for key, item in table.items()) + "}"
    raise ValueError(f"{value!r} has no spelling in TOML")


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in cast("list[object]", value))


def toml_text(tree: Mapping[str, object], path: tuple[str, ...] = ()) -> str:
    """The tree as TOML: a table's own values first, its tables after them."""
    lines = [
        f"{_key(key)} = {value_text(value)}" for key, value in tree.items() if not isinstance(value, Mapping) and not _is_tables(value)
    ]
    blocks = ["\n".join(lines)] if lines else []
    for key, value in tree.items():
        here = (*path, _key(key))
        if isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            if not table:
                blocks.append(f"[{'.'.join(here)}]")
                continue
            inner = toml_text(table, here)
            own = any(not isinstance(item, Mapping) and not _is_tables(item) for item in table.values())
            blocks.append(f"[{'.'.join(here)}]\n{inner}" if own else inner)
        elif _is_tables(value):
            for item in cast("list[Mapping[str, object]]", value):
                blocks.append(f"[[{'.'.join(here)}]]\n{toml_text(item, here)}")
    return "\n".join(block.rstrip("\n") + "\n" for block in blocks)


def template(owner: type) -> str:
    """A TOML file of every field of a configuration: what it means, what it takes and its default, commented out."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for leaf in leaves(owner):
        blocks.setdefault(leaf.path[:-1], []).extend(_template_lines(leaf))
    text: list[str] = []
    for table, lines in blocks.items():
        text += [f"[{'.'.join(table)}]"] * bool(table) + lines + [""]
    return "\n".join(text)


def _template_lines(leaf: Leaf) -> list[str]:
    if leaf.default is dataclasses.MISSING:
        example, note = "", "required"
    else:
        example = "" if leaf.default is None else value_text(_plain(leaf.default))
        note = f"default {example or 'none'}"
    return [f"# {leaf.doc}" if leaf.doc else "#", f"# {describe(leaf.hint)}; {note}", f"# {leaf.path[-1]} = {example}".rstrip()]


__all__ = ["field_docs", "template", "to_tree", "toml_text", "value_text"]
