"""pipeline/draws.py: the published Philox4x32-10 vectors, and draws that depend on nothing but their names."""

import numpy as np
import pytest

from treadle.pipeline.draws import BLEND, HOLD, PERMUTE, DrawSequence, key_of, permutation, philox

ONES = 0xFFFFFFFF

# kat_vectors of Random123: counter words, key words, result words.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox(key, *counter)
    assert tuple(int(word) for word in words) == expected
    assert all(word.dtype == np.uint32 for word in words)


def test_vectorised_equals_one_by_one() -> None:
    together = philox((7, 9), np.arange(100), 3, np.arange(100) * 5, 11)
    for i in (0, 1, 42, 99):
        alone = philox((7, 9), i, 3, i * 5, 11)
        assert [int(w[i]) for w in together] == [int(w) for w in alone]


def test_counter_words_are_taken_modulo_32_bits() -> None:
    assert int(philox((1, 2), 2**32 + 5)[0]) == int(philox((1, 2), 5)[0])


def test_key_of_splits_a_seed() -> None:
    assert key_of(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 511, 512, 513, 2047, 1_000_003])
def test_draw_n_is_word_n_mod_4_of_counter_n_div_4(n: int) -> None:
    words = philox(key_of(99), n // 4, 5, 2, HOLD)
    assert DrawSequence(99, HOLD, lane=5, source=2).at(n) == int(words[n % 4])


def test_draws_do_not_depend_on_what_was_asked_before() -> None:
    sequence = DrawSequence(3, BLEND, lane=1)
    forward = [sequence.at(n) for n in range(2000)]
    assert [sequence.at(n) for n in reversed(range(2000))] == forward[::-1]


def test_draws_are_uniform_enough() -> None:
    sequence = DrawSequence(0, HOLD, lane=0)
    buckets = np.bincount([sequence.at(n) >> 28 for n in range(16_000)], minlength=16)
    # 16 cells of 1000 expected: chi-square with 15 degrees of freedom stays below 37.7 with probability 0.999.
    assert float(((buckets - 1000.0) ** 2 / 1000.0).sum()) < 37.7


def test_permutation_is_a_permutation_by_ascending_draw() -> None:
    order = permutation(5, source=1, epoch=3, count=1000)
    draws = philox(key_of(5), np.arange(1000), 3, 1, PERMUTE)[0]
    assert sorted(order.tolist()) == list(range(1000))
    assert bool((np.diff(draws[order].astype(np.int64)) >= 0).all())
    assert permutation(5, 1, 4, 1000).tolist() != order.tolist()
    assert permutation(5, 0, 3, 1000).tolist() != order.tolist()
