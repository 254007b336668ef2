"""What a step hides of a batch, drawn on the device at fixed sizes: the draws of `corruption.py`, keyed by the step that the device counts.

Nothing is counted, compacted or read back on the host: what is hidden is a flag of every position, and lists are those flags' places, padded
to capacity with position P.

Suffixes: P positions, S segments, N entries of a list.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.kernels.cover_spans import Texts, cover_spans
from treadle.kernels.philox import philox4x32
from treadle.model.corruption import MASK_BYTE, MEDIA, SHOW, SPANS, hidden_count, shown_bytes, span_bounds
from treadle.model.device_batch import DeviceBatch
from treadle.model.initial import seed_key
from treadle.shape import Modality


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """The lists of a step, each ascending and padded with P."""

    row_P: Tensor
    """int64: row of the table of vectors at each position: bytes, prefixes, what hides media, and a row of zeros."""
    covered_N: Tensor
    """int64: text positions that are scored."""
    target_N: Tensor
    """int64: the byte that is there, -1 past the list's end."""
    shown: dict[Modality, Tensor]
    """int64: media positions that show their payload."""
    hidden: dict[Modality, Tensor]
    """int64: media positions that show the learned vector."""
    counts: tuple[Tensor, Tensor, Tensor, Tensor]
    """int64 scalars: hidden positions, by modality."""


class DeviceCorruption:
    """Draws what each step hides; every address and size is fixed."""

    def __init__(self, batch: DeviceBatch, seed: int) -> None:
        self._batch, self._plan = batch, batch.plan
        self._masking = batch.plan.config.masking.resolved()
        self._key = seed_key(seed)
        device = batch.buffer.device
        self._bounds = span_bounds(self._masking, self._plan.shape, device)
        self._at_P = torch.arange(self._plan.positions, device=device)
        self._no = torch.zeros((), dtype=torch.int64, device=device)

    def draw(self, counter: Callable[[int], Tensor]) -> Hidden:
        """What this step hides.

        Args:
            counter: word 3 of the draws' counters, by purpose, on the device.
        """
        batch, plan, positions = self._batch, self._plan, self._plan.positions
        segment_P = batch["segment"]
        token_P = self._at_P - batch["start"][segment_P] - 1
        tokens_P, modality_P = batch["tokens"][segment_P], batch["modality"][segment_P]
        used_P = self._at_P < batch["length"].sum()
        inside_P = used_P & (token_P >= 0) & (token_P < tokens_P)
        of = {m: inside_P & (modality_P == m) for m in Modality}

        byte_P = batch.tape.index_select(0, (batch["payload"][segment_P] + token_P).clamp(0, len(batch.tape) - 1)).long()
        row_P = torch.where(of[Modality.TEXT], byte_P, batch.zero_row)
        row_P = torch.where(used_P & (token_P < 0), MASK_BYTE + 1 + modality_P, row_P)
        row_P = torch.where(used_P & (token_P >= tokens_P), MASK_BYTE, row_P)
        if not plan.masks:
            nothing = self._at_P[:0]
            shown = {m: listed(of[m], positions) for m in plan.media}
            return Hidden(row_P, nothing, nothing, shown, {}, (self._no, self._no, self._no, self._no))

        covered_P = self._cover(counter(SPANS))
        veiled_P = self._veil(counter(MEDIA), token_P, inside_P & (modality_P != Modality.TEXT))
        covered_N = listed(covered_P, plan.most_hidden(Modality.TEXT))
        at_N = covered_N.clamp(max=positions - 1)
        target_N = torch.where(covered_N < positions, row_P.index_select(0, at_N), -1)
        word_N = self._words(counter(SHOW), token_P.index_select(0, at_N), segment_P.index_select(0, at_N))
        shown_N = shown_bytes(word_N, target_N, self._masking)
        row_P = torch.cat([row_P, self._no[None]]).index_copy_(0, covered_N, shown_N)[:positions]
        hidden: dict[Modality, Tensor] = {}
        shown = {}
        counts = [covered_P.sum(), self._no, self._no, self._no]
        for k, modality in enumerate(plan.media):
            veiled = of[modality] & veiled_P
            row_P = torch.where(veiled, MASK_BYTE + 1 + len(Modality) + k, row_P)
            hidden[modality] = listed(veiled, plan.most_hidden(modality))
            shown[modality] = listed(of[modality] & ~veiled, positions)
            counts[modality] = veiled.sum()
        return Hidden(row_P, covered_N, target_N, shown, hidden, (counts[0], counts[1], counts[2], counts[3]))

    def _words(self, last: Tensor, index_N: Tensor, segment_N: Tensor) -> Tensor:
        id_N = self._batch["id"].index_select(0, segment_N)
        return philox4x32(self._key, index_N, id_N & 0xFFFFFFFF, (id_N >> 32) & 0xFFFFFFFF, last)[0]

    def _cover(self, last: Tensor) -> Tensor:
        """bool `[P]`: text positions that are covered."""
        batch, size_S = self._batch, self._batch["tokens"]
        free_S = (batch["free"] != 0) & (batch["modality"] == Modality.TEXT)
        count_S = torch.where(free_S, hidden_count(size_S, self._masking.token_mask_probability), 0)
        return (
            cover_spans(self._key, Texts(batch["start"] + 1, size_S, count_S, batch["id"]), last, self._bounds, self._plan.positions) != 0
        )

    def _veil(self, last: Tensor, token_P: Tensor, media_P: Tensor) -> Tensor:
        """bool `[P]`: media positions that are hidden; all tubes of a column share its draw."""
        batch, positions = self._batch, self._plan.positions
        if not self._plan.media:
            return torch.zeros_like(media_P)
        segment_P, modality_S = batch["segment"], batch["modality"]
        size_S = torch.div(batch["tokens"], batch["deep"].clamp(min=1), rounding_mode="floor")
        count_S = torch.zeros_like(size_S)
        for modality in self._plan.media:
            free_S = (batch["free"] != 0) & (modality_S == modality)
            count_S = torch.where(free_S, hidden_count(size_S, self._plan.hidden_shares[modality]), count_S)
        size_P = size_S[segment_P]
        front_P = media_P & (token_P < size_P)
        # Segments in turn; in each, columns by their draws, ties by number.
        key_P = torch.where(front_P, segment_P << 32 | self._words(last, token_P, segment_P), torch.iinfo(torch.int64).max)
        order_P = torch.sort(key_P, stable=True).indices
        place_P = torch.empty_like(order_P).scatter_(0, order_P, self._at_P)
        drawn_S = torch.where((modality_S > Modality.TEXT) & (batch["length"] > 0), size_S, 0)
        first_S = drawn_S.cumsum(0) - drawn_S
        chosen_P = front_P & (place_P - first_S[segment_P] < count_S[segment_P])
        column_P = torch.remainder(token_P, size_P.clamp(min=1))
        return media_P & chosen_P.index_select(0, (batch["start"][segment_P] + 1 + column_P).clamp(max=positions - 1))


def listed(flag_P: Tensor, capacity: int) -> Tensor:
    """int64 `[capacity]`: the places of a flag, ascending, padded with P."""
    positions = len(flag_P)
    place_P = flag_P.cumsum(0) - 1
    # What is not listed goes to an entry that is thrown away.
    place_P = torch.where(flag_P & (place_P < capacity), place_P, capacity)
    entries = torch.full((capacity + 1,), positions, dtype=torch.int64, device=flag_P.device)
    return entries.scatter_(0, place_P, torch.arange(positions, device=flag_P.device))[:capacity]
