"""64-bit ids of samples and items: a keyed hash of the shard's URL, then one mixing step per place, for one or for many at once."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from treadle.pipeline.storage import public_url

MASK: Final = 2**64 - 1
SAMPLE_STEP: Final = 0x9E3779B97F4A7C15
ITEM_STEP: Final = 0xD1B54A32D192ED03
"""Odd, so that no two places of a shard, or of a sample, meet before they are mixed."""

_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_THIRTY, _TWENTY_SEVEN, _THIRTY_ONE = np.uint64(30), np.uint64(27), np.uint64(31)
_FIRST, _SECOND = (np.uint64(factor) for factor in _FACTORS)


def mixed(value: int) -> int:
    """A 64-bit integer with its bits mixed, one to one: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 16)."""
    value = (value ^ value >> 30) * _FACTORS[0] & MASK
    value = (value ^ value >> 27) * _FACTORS[1] & MASK
    return value ^ value >> 31


def all_mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mixed` of each."""
    values = (values ^ (values >> _THIRTY)) * _FIRST
    values = (values ^ (values >> _TWENTY_SEVEN)) * _SECOND
    return values ^ (values >> _THIRTY_ONE)


@lru_cache(maxsize=65_536)
def shard_key(url: str) -> int:
    """A 64-bit hash of a shard's URL without credentials."""
    digest = blake2b(public_url(url).encode("utf-8", "surrogateescape"), digest_size=8, person=b"treadle sample")
    return int.from_bytes(digest.digest(), "little")


def sample_seed(url: str, index: int) -> int:
    """What `sample_id` mixes."""
    return shard_key(url) + (index + 1) * SAMPLE_STEP & MASK


def sample_id(url: str, index: int) -> int:
    """The 64-bit id of sample `index` of a shard; the shard goes by its URL without credentials."""
    return mixed(sample_seed(url, index))


def item_ids(sample: int, num_places: int) -> list[int]:
    """The 64-bit ids of the files of a sample, by their place in it."""
    return [mixed(sample + place * ITEM_STEP & MASK) for place in range(1, num_places + 1)]


def as_group(value: int) -> int:
    """A 64-bit id as a group: a signed integer other than zero."""
    return (value - 2**64 if value >= 2**63 else value) or 1


def identities(seeds: Sequence[int], counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Groups and item ids of samples whose ids `seeds` are mixed to, each of `counts[i]` items, at places 0, 1, ...

    Returns:
        int64 `[items]` and uint64 `[items]`, sample by sample: what `as_group` and `item_ids` answer one by one.
    """
    samples = all_mixed(np.array(seeds, np.uint64))
    groups = samples.view(np.int64)
    groups = np.where(groups == 0, 1, groups)
    if max(counts, default=1) == 1:
        return groups, all_mixed(samples + np.uint64(ITEM_STEP))
    sizes = np.array(counts, np.int64)
    firsts = np.cumsum(sizes) - sizes
    places = (np.arange(int(sizes.sum())) - np.repeat(firsts, sizes) + 1).astype(np.uint64)
    return np.repeat(groups, sizes), all_mixed(np.repeat(samples, sizes) + places * np.uint64(ITEM_STEP))
