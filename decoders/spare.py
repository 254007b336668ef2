"""What is dear to make and can be used again: kept while it is idle, one user's at a time."""

import atexit
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


class Spares(Generic[Key, Thing]):
    """One idle thing a key, of at most `most` keys; of those the one used longest ago gives way.

    There is no lock, which a fork in another thread could leave locked: each step is one that the interpreter does not interrupt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: OrderedDict[Key, Thing] = OrderedDict()
        # Libraries complain about what of theirs is left when they are unloaded.
        atexit.register(self._idle.clear)

    def take(self, key: Key) -> Thing | None:
        """The thing of this key, the caller's alone until it is given back; None where none is idle."""
        return self._idle.pop(key, None)

    def give(self, key: Key, thing: Thing) -> None:
        """Takes a thing back, in a state to begin anew with."""
        self._idle[key] = thing
        with suppress(KeyError):
            while len(self._idle) > self._most:
                self._idle.popitem(last=False)
