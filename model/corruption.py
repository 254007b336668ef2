"""What the masked objective hides: spans of text and media positions, by draws keyed by item and step alone.

Every draw is Philox4x32-10 under key (seed low, seed high) at counter words `(draw index, item id low, item id high, step * 16 + purpose)`,
the last modulo 2^32, so that it does not matter how items are packed, dealt to ranks or ordered.

| purpose | draw index | words |
|---|---|---|
| SPANS 0 | number of the span, from 0 | 0: start `floor(u n)`; 1: length |
| SHOW 1 | number of the byte in its text | 0: `u` against the fractions, its low byte the random byte |
| MEDIA 2 | number of the token, or tube column `h * W + w` | 0: the k smallest are masked, ties by lower index |

Suffixes: P positions, S segments, T covered text positions, N entries of runs, C segments that take part.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from treadle.kernels.cover_spans import Texts, cover_spans
from treadle.kernels.philox import philox4x32
from treadle.model.config import Masking
from treadle.model.initial import seed_key
from treadle.model.layout import BatchLayout
from treadle.shape import BatchShape, Modality

SPANS, SHOW, MEDIA = 0, 1, 2

MASK_BYTE = 256
"""Row of the byte table that a hidden byte shows."""

_WORD = 2**32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corruption:
    """The positions of a batch that are hidden, each list ascending."""

    covered_T: Tensor
    """int64: text positions that are scored."""
    shown_T: Tensor
    """int64: the byte that each shows, or `MASK_BYTE`."""
    target_T: Tensor
    """int64: the byte that is there."""
    masked_image: Tensor
    """int64: image positions that show the learned vector."""
    masked_video: Tensor
    """int64"""
    masked_audio: Tensor
    """int64"""

    def hidden(self, modality: Modality) -> Tensor:
        """The hidden positions of one modality."""
        return (self.covered_T, self.masked_image, self.masked_video, self.masked_audio)[modality]


def hidden_count(size: Tensor, share: float) -> Tensor:
    """How many of `size` candidates are hidden: `size * round(10000 share) // 10000`, held between 1 and `size - 1`; 0 of one."""
    count = torch.div(size * round(10_000 * share), 10_000, rounding_mode="floor")
    return torch.minimum(count.clamp(min=1), size - 1).clamp(min=0)


def corrupt(layout: BatchLayout, masking: Masking, seed: int, step: int) -> Corruption:
    """Draws what `step` hides of a batch. An item that makes a choice is left as it is."""
    masking = masking.resolved()
    draws = _Draws(layout, seed, step)
    covered_T = _cover_spans(layout, draws, masking)
    segment_T, byte_T = layout.token_of(covered_T)
    target_T = layout.tape.index_select(0, layout.tape_offsets_S1.index_select(0, segment_T) + byte_T).long()
    word_T = draws.words(SHOW, byte_T, segment_T)[0]
    return Corruption(
        covered_T=covered_T,
        shown_T=shown_bytes(word_T, target_T, masking),
        target_T=target_T,
        masked_image=_mask_media(layout, draws, Modality.IMAGE, masking.image_mask_ratio),
        masked_video=_mask_media(layout, draws, Modality.VIDEO, masking.video_mask_ratio),
        masked_audio=_mask_media(layout, draws, Modality.AUDIO, masking.audio_mask_ratio),
    )


def shown_bytes(word_T: Tensor, target_T: Tensor, masking: Masking) -> Tensor:
    """What each covered byte shows by its draw: `MASK_BYTE`, a random byte or itself; `masking` is resolved."""
    replaced = masking.replace_fraction
    shown_T = torch.where(word_T < _threshold(replaced + masking.random_fraction), word_T & 0xFF, target_T)
    return torch.where(word_T < _threshold(replaced), MASK_BYTE, shown_T)


def _threshold(fraction: float) -> int:
    """The word w below which `w / 2^32 < fraction`."""
    return math.ceil(fraction * _WORD)


class _Draws:
    """The draws of one batch at one step."""

    def __init__(self, layout: BatchLayout, seed: int, step: int) -> None:
        self.key = seed_key(seed)
        self._step = step
        self._low_S, self._high_S = layout.id_S & 0xFFFFFFFF, (layout.id_S >> 32) & 0xFFFFFFFF

    def words(self, purpose: int, index_N: Tensor, segment_N: Tensor) -> tuple[Tensor, Tensor]:
        """Words 0 and 1 of draws `index` of the items in `segment`."""
        low_N, high_N = self._low_S.index_select(0, segment_N), self._high_S.index_select(0, segment_N)
        words = philox4x32(self.key, index_N, low_N, high_N, self.last(purpose))
        return words[0], words[1]

    def last(self, purpose: int) -> Tensor:
        """Word 3 of the counters."""
        return torch.tensor((self._step * 16 + purpose) % _WORD, device=self._low_S.device)


def _free_segments(layout: BatchLayout, modality: Modality) -> Tensor:
    """The segments of a modality that make no choice."""
    free_S = (layout.modality_S == modality) & (layout.choice_offsets_S1[1:] == layout.choice_offsets_S1[:-1])
    return free_S.nonzero()[:, 0]


def _spread(count_C: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of `count` entries back to back: the run of every entry, and its number within the run."""
    owner_N = torch.repeat_interleave(count_C)
    first_C = count_C.cumsum(0) - count_C
    return owner_N, torch.arange(owner_N.numel(), device=count_C.device) - first_C.index_select(0, owner_N)


@lru_cache(maxsize=8)
def _length_bounds(mean_span: float, longest: int) -> tuple[int, ...]:
    """Descending bounds b_1, b_2, ...: a span is as long as one plus the number of bounds that `2^32 - word` does not pass.

    `floor(log(1 - u) / log(q)) >= t` where `1 - u <= q^t`, so that lengths come from integers alone, alike on every device.
    """
    q = 1 - 1 / mean_span
    bounds: list[int] = []
    while len(bounds) < longest and (bound := math.floor(_WORD * q ** (len(bounds) + 1))) >= 1:
        bounds.append(bound)
    return tuple(bounds)


def span_bounds(masking: Masking, shape: BatchShape, device: torch.device) -> Tensor:
    """The bounds of spans' lengths, ascending, as `cover_spans` takes them."""
    bounds = _length_bounds(masking.token_mean_span, shape.max_columns_per_row)
    return torch.tensor(bounds[::-1], dtype=torch.int64, device=device)


def _cover_spans(layout: BatchLayout, draws: _Draws, masking: Masking) -> Tensor:
    """The covered text positions: spans in turn, each covering what it finds uncovered, until the text's count is reached."""
    free_S = (layout.modality_S == Modality.TEXT) & (layout.choice_offsets_S1[1:] == layout.choice_offsets_S1[:-1])
    count_S = torch.where(free_S, hidden_count(layout.tokens_S, masking.token_mask_probability), 0)
    texts = Texts(layout.start_S + 1, layout.tokens_S, count_S, layout.id_S)
    bounds = span_bounds(masking, layout.shape, layout.device)
    covered_P = cover_spans(draws.key, texts, draws.last(SPANS), bounds, layout.num_positions)
    return covered_P.nonzero()[:, 0]


def _rank(owner_N: Tensor, num_owners: int) -> Tensor:
    """Number of each entry within its run of equal owners."""
    count_C = torch.bincount(owner_N, minlength=num_owners)
    first_C = count_C.cumsum(0) - count_C
    return torch.arange(owner_N.numel(), device=owner_N.device) - first_C.index_select(0, owner_N)


def _mask_media(layout: BatchLayout, draws: _Draws, modality: Modality, ratio: float) -> Tensor:
    """The masked positions of one modality; a clip's draw is shared by all tubes of a column."""
    segment_C = _free_segments(layout, modality)
    tokens_C = layout.tokens_S.index_select(0, segment_C)
    deep_C = layout.grid_S3[:, 0].long().index_select(0, segment_C) if modality is Modality.VIDEO else torch.ones_like(tokens_C)
    size_C = torch.div(tokens_C, deep_C, rounding_mode="floor")
    owner_N, index_N = _spread(size_C)
    word_N = draws.words(MEDIA, index_N, segment_C.index_select(0, owner_N))[0]
    order_N = torch.argsort((owner_N << 32) | word_N, stable=True)
    chosen_N = order_N[_rank(owner_N, segment_C.numel()) < hidden_count(size_C, ratio).index_select(0, owner_N)]
    owner_N, index_N = owner_N.index_select(0, chosen_N), index_N.index_select(0, chosen_N)
    column_N, tube_N = _spread(deep_C.index_select(0, owner_N))
    owner_N = owner_N.index_select(0, column_N)
    token_N = tube_N * size_C.index_select(0, owner_N) + index_N.index_select(0, column_N)
    return (layout.start_S.index_select(0, segment_C).index_select(0, owner_N) + 1 + token_N).sort().values
