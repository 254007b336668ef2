"""Package exports that load on first use, so that importing one name does not import every library behind the others."""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules


def lazy_exports(package: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names live in the modules that `homes` maps to names."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        setattr(modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(set(home_of) | set(vars(modules[package])))

    return load, names
