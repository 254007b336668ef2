"""Lengths of bags, in positions, that stand for kinds of data: what the packer's benchmarks draw from.

A bag is a list of lengths, prefix included, none longer than a row of `columns`. The generator's seed fixes all of it.
"""

import numpy as np

KINDS = ("captions", "stamps", "mix", "clips", "captioned clips")
"""Short texts; samples of a picture, a caption and two short sounds; all four modalities; clips alone; clips with a caption."""


def draw_bags(kind: str, positions: int, columns: int, seed: int) -> list[list[int]]:
    """Bags of `kind` with at least `positions` positions in all.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of lengths: it must be one of {', '.join(KINDS)}")
    rng = np.random.default_rng(seed)
    bags: list[list[int]] = []
    total = 0
    while total < positions:
        lengths = [max(2, min(columns, length)) for length in _bag(kind, columns, rng)]
        bags.append(lengths)
        total += sum(lengths)
    return bags


def _text(rng: np.random.Generator, mean: float, spread: float) -> int:
    return 2 + int(rng.lognormal(mean, spread))


def _bag(kind: str, columns: int, rng: np.random.Generator) -> list[int]:
    if kind == "captions":
        return [_text(rng, 4.0, 0.9)]
    if kind == "clips":
        return [int(rng.integers(columns // 5, columns + 1))]
    if kind == "captioned clips":
        return [int(rng.integers(columns // 5, columns + 1)), _text(rng, 3.5, 0.5)]
    if kind == "stamps":
        wide, high = np.ceil(np.clip(rng.lognormal(4.9, 0.55, 2), 12, 511) / 16)
        sounds = [1 + int(length) for length in rng.gamma(3, columns / 40, 2)]
        return [1 + int(wide * high), 1 + int(rng.lognormal(2.7, 0.6)), *(sounds if rng.random() < 0.93 else [])]
    part = rng.random()
    if part < 0.5:
        return [_text(rng, 4.0, 1.0)]
    if part < 0.8:
        return [1 + int(rng.integers(2, 17)) * int(rng.integers(2, 17)), _text(rng, 3.0, 0.6)]
    if part < 0.9:
        return [int(rng.integers(columns // 5, columns + 1)), _text(rng, 3.0, 0.6)]
    return [1 + int(rng.gamma(3, columns / 24)), _text(rng, 3.5, 0.8)]
