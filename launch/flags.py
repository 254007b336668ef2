"""One flag for every value of a configuration, and the configuration from a file and the flags over it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin

import click

from treadle.launch.config import ConfigError, Leaf, Tree, build, describe, leaves, locate, nearest, parse_flag, read_toml, set_path
from treadle.launch.toml_text import value_text

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Command = Callable[..., object]

CONTEXT = {"token_normalize_func": lambda token: token.replace("-", "_"), "help_option_names": ["-h", "--help"], "max_content_width": 120}
"""Lets a flag be typed with hyphens or underscores; TOML keys have underscores."""


def check_device(name: str, device: "str | torch.device | None") -> None:
    """Checks the device that a command is told to run on, before anything is read.

    Raises:
        ConfigError: there is no such device here.
    """
    if device is not None:
        from treadle.model.device import pick_device

        try:
            pick_device(name, device)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _is_list(leaf: Leaf) -> bool:
    kinds = get_args(leaf.hint) if get_origin(leaf.hint) not in (tuple, list, Sequence) else (leaf.hint,)
    return any(get_origin(kind) in (tuple, list, Sequence) for kind in kinds)


def _shown_default(leaf: Leaf) -> str:
    if leaf.default is None:
        return "none"
    try:
        return value_text(leaf.default)
    except ValueError:
        return "required" if not isinstance(leaf.default, tuple) else "[]"


def flags(owner: type) -> Callable[[Command], Command]:
    """Adds a flag to a click command for every value of `owner`."""

    def add(command: Command) -> Command:
        for leaf in reversed(leaves(owner)):
            note = f"[{describe(leaf.hint)}; {_shown_default(leaf)}]"
            command = click.option(
                f"--{leaf.name}",
                _parameter(leaf),
                multiple=_is_list(leaf),
                metavar="VALUE",
                help=f"{leaf.doc} {note}".strip(),
            )(command)
        return command

    return add


def _parameter(leaf: Leaf) -> str:
    return "flag_" + "__".join(leaf.path)


def take_flags(owner: type, parameters: dict[str, Any]) -> list[tuple[Leaf, object]]:
    """Takes the values that flags gave out of a command's parameters."""
    given: list[tuple[Leaf, object]] = []
    for leaf in leaves(owner):
        value = parameters.pop(_parameter(leaf), None)
        if isinstance(value, tuple):
            texts = cast("tuple[str, ...]", value)
            parts = [parse_flag(leaf, text) for text in texts]
            if parts:
                given.append((leaf, _joined(parts)))
        elif value is not None:
            given.append((leaf, parse_flag(leaf, cast("str", value))))
    return given


def _joined(parts: list[object]) -> object:
    if len(parts) == 1:
        return parts[0]
    joined: list[object] = []
    for part in parts:
        joined += cast("list[object]", part) if isinstance(part, list) else [part]
    return joined


def configuration(
    owner: type[T], file: Path | None, given: Sequence[tuple[Leaf, object]], defaults: Mapping[str, object] | None = None
) -> T:
    """The configuration of a file with flags over it.

    Raises:
        ConfigError: the file or a flag is wrong; the message says which, with the line where it is the file.
    """
    tree: Tree = dict(defaults or {})
    if file is not None:
        tree |= read_toml(file)
    for leaf, value in given:
        set_path(tree, leaf.path, value)
    flagged = {leaf.name for leaf, _ in given}
    try:
        return build(owner, tree)
    except ConfigError as error:
        key = error.key.split("[")[0]
        if any(name == key or name.startswith(f"{key}.") for name in flagged) or file is None:
            raise
        place = locate(file, key)
        raise ConfigError(f"{place}: {error}", error.key) from error


class Suggesting(click.Command):
    """A command that answers an unknown flag with the nearest one, counting hyphens as underscores."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.params for name in parameter.opts]
            hint = nearest(error.option_name, known)
            if not hint.startswith("did you mean"):
                hint = f"see `{ctx.command_path} --help`"
            raise click.UsageError(f"{error.option_name} is not a flag of {ctx.command_path}: {hint}", ctx) from error
