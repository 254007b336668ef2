"""Buffers of batches that nobody can see any more, handed out again.

A batch's buffer is tens of megabytes. Fresh memory costs a page fault per 4 KiB, more than copying the payloads into it.
So memory goes back when the last view of it is gone: of the batch, of its arrays, of tensors made from them.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.layout import EDGE_SETS, Layout, allocate

KEPT_BUFFERS = 3
"""Unused buffers that are kept: what a consumer with a batch in hand and one in flight gives back at once."""


class _Memory:
    """One buffer, and the parts of it that are cleared before it is used again."""

    __slots__ = ("buffer", "edges", "leading", "tape_offsets", "trailing")

    def __init__(self, layout: Layout) -> None:
        self.buffer = allocate(layout)
        views = {name: field.view(self.buffer) for name, field in layout.fields.items()}
        self.tape_offsets = views["tape_offsets"]
        self.edges = [(views[f"{name}_offsets"], views[f"{name}_ids"], views[f"{name}_weights"]) for name in EDGE_SETS]
        # One write each for what lies before `position_segment` and between the edges and the tape.
        self.leading = self.buffer[: layout.fields["position_segment"].offset]
        self.trailing = self.buffer[layout.fields["choice_offsets"].offset : layout.tape_offset]

    def clear(self) -> int:
        """Zeroes all that a batch may have written but `position_segment` and the tape, which the next one overwrites; bytes of its tape."""
        stale = int(self.tape_offsets[-1])
        for offsets, ids, weights in self.edges:
            used = offsets[-1]
            if used:
                ids[:used] = 0
                weights[:used] = 0
                offsets.fill(0)
        self.leading.fill(0)
        self.trailing.fill(0)
        return stale


class _Owner:
    """What every view of a buffer keeps alive: when it dies, nobody sees the memory. Arrays themselves do not serve, numpy skips over them."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: _Memory) -> None:
        self.__array_interface__: Mapping[str, Any] = memory.buffer.__array_interface__


class Recycler:
    """Buffers of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._unused: list[_Memory] = []

    @property
    def unused(self) -> int:
        """Buffers that wait to be handed out again."""
        return len(self._unused)

    def take(self) -> tuple[NDArray[np.uint8], int]:
        """A buffer that is zero but for `position_segment` and the first bytes of its tape; how many those are."""
        stale = 0
        try:
            memory = self._unused.pop()
        except IndexError:
            memory = _Memory(self.layout)
        else:
            stale = memory.clear()
        owner = _Owner(memory)
        weakref.finalize(owner, _give_back, self._unused, memory).atexit = False
        return np.asarray(owner), stale


def _give_back(unused: list[_Memory], memory: _Memory) -> None:
    if len(unused) < KEPT_BUFFERS:
        unused.append(memory)
