"""Philox4x32-10 in numpy: every random choice of the stream is a keyed draw, a pure function of what it is drawn for.

The key is the seed; the four counter words name the draw: `(draw index, id low, id high, step * 16 + purpose)`.
The stream's draws have no step and use the id words for what the choice belongs to, as each function below says.

Formula source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants of Random123.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

PERMUTE: Final = 8
"""Purpose: the order of a source's shards in an epoch."""
HOLD: Final = 9
"""Purpose: which held-back sample a lane emits."""
BLEND: Final = 10
"""Purpose: which source a lane takes its next sample from."""

_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)
_ROUNDS: Final = 10

_BLOCK_COUNTERS: Final = 128
BLOCK_DRAWS: Final = 4 * _BLOCK_COUNTERS
"""Draws computed at once: numpy's fixed cost of a block is spread over them (about 0.2 us a draw)."""

Words = NDArray[np.uint32]


def key_of(seed: int) -> tuple[int, int]:
    """The Philox key `(low, high)` of a 64-bit seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def philox(
    key: tuple[int, int], c0: ArrayLike, c1: ArrayLike = 0, c2: ArrayLike = 0, c3: ArrayLike = 0
) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words per counter; the counter words broadcast against each other, taken modulo 2^32."""
    words = np.broadcast_arrays(*(np.asarray(c).astype(np.uint64) & _LOW for c in (c0, c1, c2, c3)))
    x0, x1, x2, x3 = (np.array(word) for word in words)
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        product_0 = x0 * _MULTIPLIER_0
        product_1 = x2 * _MULTIPLIER_1
        x0 = (product_1 >> _SHIFT) ^ x1 ^ np.uint64(k0)
        x1 = product_1 & _LOW
        x2 = (product_0 >> _SHIFT) ^ x3 ^ np.uint64(k1)
        x3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return x0.astype(np.uint32), x1.astype(np.uint32), x2.astype(np.uint32), x3.astype(np.uint32)


def permutation(seed: int, source: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of a source's `count` shards in an epoch: shards by ascending draw, ties by number.

    Counter words: (shard, epoch, source, PERMUTE); word 0 is the draw.
    """
    draws = philox(key_of(seed), np.arange(count), epoch, source, PERMUTE)[0]
    return np.argsort(draws, kind="stable").astype(np.int64)


class DrawSequence:
    """Draws number 0, 1, 2, ... of one purpose, lane and source, as 32-bit integers.

    Draw `n` is word `n % 4` at counter words (n // 4, lane, source, purpose). Holds a block of draws, and no position.
    """

    __slots__ = ("_block", "_key", "_lane", "_purpose", "_source", "_words")

    def __init__(self, seed: int, purpose: int, lane: int, source: int = 0) -> None:
        self._key = key_of(seed)
        self._purpose = purpose
        self._lane = lane
        self._source = source
        self._block = -1
        self._words: list[int] = []

    def at(self, n: int) -> int:
        """Draw number `n`."""
        block, place = divmod(n, BLOCK_DRAWS)
        if block != self._block:
            self._words, self._block = self.block(block), block
        return self._words[place]

    def block(self, number: int) -> list[int]:
        """The draws from `number * BLOCK_DRAWS` on, as many."""
        first = number * _BLOCK_COUNTERS
        counters = np.arange(first, first + _BLOCK_COUNTERS, dtype=np.uint64)
        words: list[int] = np.stack(philox(self._key, counters, self._lane, self._source, self._purpose), axis=1).ravel().tolist()
        return words
