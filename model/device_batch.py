"""A micro-batch with every size fixed by the configuration, in one buffer, so that one copy moves it and one graph serves every step.

The host settles all integers while the device works on the step before: positions, what is hidden (the same keyed draws), named pairs,
token lists, counts, the learning rate. They are the CPU path's own, padded to capacity. On the device there is then nothing to count, to
compact or to read back, and nothing that a captured graph could have frozen.

Padding is a valid read that counts for nothing: position P (a row that is thrown away), segments of length 0, places of 0 rows, targets of -1,
anchors and candidates that take no part.

Suffixes: P positions, S segments, N candidates of all ranks, E named pairs, L late-interaction documents, C classes of a byte.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.kernels.pair_loss import NamedPairs, PairRows
from treadle.kernels.tape_reference import Chunks, Patches
from treadle.model.config import TrainerConfig
from treadle.model.contrastive import ambient_weight
from treadle.model.corruption import MASK_BYTE
from treadle.model.embedding import Embedding, payload_places
from treadle.model.late_interaction import late_sides, late_tokens
from treadle.model.layout import MASK, PREFIX
from treadle.model.objectives import CHOICES, LATE_INTERACTION, TERMS, MicroBatch, term_weights
from treadle.model.relations import named_pairs
from treadle.pipeline import PackedBatch
from treadle.pipeline.layout import EDGES_PER_SEGMENT
from treadle.shape import Modality, Objective

ALIGNMENT = 256
BYTES = 256
MEDIA = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
_PLACES = ("offset", "row_pitch", "frame_pitch", "rows", "columns")


class DoesNotFitError(ValueError):
    """A batch names more than the fixed sizes hold: it takes the path of free sizes."""


@dataclass(frozen=True, slots=True)
class _Field:
    offset: int
    dtype: Any
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))


class BatchPlan:
    """Where each array lies in the buffer, and how much each can hold."""

    def __init__(self, config: TrainerConfig, world_size: int) -> None:
        self.config = config
        self.shape = config.batch.resolved()
        self.masks = config.objective is not Objective.CONTRASTIVE
        self.weights_K = term_weights(config)
        self.scores_pairs = config.objective is not Objective.MASKED
        self.contrastive = config.contrastive.resolved(config.hidden)
        self.late = config.late_interaction.resolved(self.shape)
        self.positions, self.segments = self.shape.positions, self.shape.max_segments_per_device
        self.candidates = world_size * self.segments
        self.edges = 3 * (config.contrastive.max_edges_per_device or EDGES_PER_SEGMENT * self.segments)
        self.media = tuple(m for m in MEDIA if self.shape.is_live(m))
        self.fields: dict[str, _Field] = {}
        self._end = 0
        self._declare(config)
        self.tape_offset = self._end
        self.bytes = -(-(self._end + self.shape.tape_bytes) // ALIGNMENT) * ALIGNMENT

    def _declare(self, config: TrainerConfig) -> None:
        positions, segments = self.positions, self.segments
        self._add("learning_rate", np.float32, 1)
        self._add("counts", np.float64, len(TERMS))
        for name in ("start", "length", "tokens"):
            self._add(name, np.int64, segments)
        self._add("coord", np.int32, positions, 3)
        self._add("row", np.int64, positions)
        masking = config.masking.resolved()
        ratios = (masking.image_mask_ratio, masking.video_mask_ratio, masking.audio_mask_ratio)
        for modality, ratio in zip(MEDIA, ratios, strict=True):
            if modality in self.media:
                self._add_places(f"shown_{modality}", positions, modality)
                if self.masks:
                    self._add_places(f"hidden_{modality}", self.most_hidden(ratio), modality)
        if self.masks:
            covered = self.most_hidden(masking.token_mask_probability)
            self._add("covered", np.int64, covered)
            self._add("target", np.int64, covered)
        if self.scores_pairs:
            self._add_pairs("pair", segments, self.candidates, self.edges)
        if self.weights_K[LATE_INTERACTION]:
            late = self.late
            self._add("query_token", np.int64, late.max_query_tokens_per_device)
            self._add("query_offsets", np.int64, segments + 1)
            self._add("document_token", np.int64, late.max_document_tokens_per_device)
            self._add("document_offsets", np.int64, late.max_documents_per_device + 1)
            self._add_pairs("late", segments, late.max_documents_per_device, self.edges)
        if self.weights_K[CHOICES]:
            self._add("choice_position", np.int64, segments)
            self._add("choice_legal", np.uint8, segments, BYTES)
            self._add("choice_target", np.float32, segments, BYTES)

    def most_hidden(self, share: float) -> int:
        """Positions that can be hidden: of n tokens `share n`, or 1 where that is less, and each segment has a prefix too."""
        return math.ceil(self.positions * max(1 / 3, share))

    def _add(self, name: str, dtype: Any, *shape: int) -> None:
        self.fields[name] = field = _Field(self._end, dtype, shape)
        self._end = -(-(self._end + field.bytes) // ALIGNMENT) * ALIGNMENT

    def _add_places(self, name: str, count: int, modality: Modality) -> None:
        self._add(name, np.int64, count)
        for column in ("offset", "samples") if modality is Modality.AUDIO else _PLACES:
            self._add(f"{name}_{column}", np.int64, count)

    def _add_pairs(self, name: str, anchors: int, candidates: int, edges: int) -> None:
        for column in ("self", "group", "temperature"):
            self._add(f"{name}_{column}", np.int64, anchors)
        self._add(f"{name}_live", np.uint8, anchors)
        self._add(f"{name}_candidate_group", np.int64, candidates)
        self._add(f"{name}_candidate_live", np.uint8, candidates)
        self._add(f"{name}_offsets", np.int64, anchors + 1)
        self._add(f"{name}_ids", np.int64, edges)
        self._add(f"{name}_attract", np.float32, edges)
        self._add(f"{name}_repel", np.float32, edges)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """A field of a buffer of this plan."""
        field = self.fields[name]
        part = buffer[field.offset : field.offset + field.bytes]
        return part.view(torch.from_numpy(np.empty(0, field.dtype)).dtype).view(field.shape)


class BatchWriter:
    """Fills a host buffer from a micro-batch that lies on the CPU."""

    def __init__(self, plan: BatchPlan, buffer: Tensor) -> None:
        self._plan = plan
        self._buffer = buffer

    def fill(self, name: str, values: Tensor | NDArray[Any] | float, padding: float = 0) -> None:
        """Writes a field, `padding` past the values.

        Raises:
            DoesNotFitError: there are more values than the field holds.
        """
        view = self._plan.view(self._buffer, name)
        values = torch.as_tensor(values)
        values = values.reshape(1) if values.ndim == 0 else values
        if len(values) > len(view):
            raise DoesNotFitError(f"{name}: {len(values)} of at most {len(view)}")
        view[: len(values)].copy_(values)
        view[len(values) :].fill_(padding)

    def write(
        self, batch: PackedBatch, micro: MicroBatch, counts_K: Tensor, learning_rate: float, groups: Sequence[Sequence[int]], rank: int
    ) -> int:
        """Writes everything.

        Args:
            micro: of the same batch, prepared on the CPU.
            counts_K: this rank's denominators.
            groups: of every rank's segments, by rank.

        Returns:
            Bytes to copy.

        Raises:
            DoesNotFitError: something passes its capacity.
        """
        plan, layout, corruption = self._plan, micro.layout, micro.corruption
        self.fill("learning_rate", learning_rate)
        self.fill("counts", counts_K)
        for name, values in (("start", layout.start_S), ("length", layout.length_S), ("tokens", layout.tokens_S)):
            self.fill(name, values)
        self.fill("coord", layout.coord_P3)
        self.fill("row", self._rows(micro), table_rows(plan) - 1)
        for modality in plan.media:
            shown_N, hidden_N = Embedding.split(layout, corruption, modality)
            self._fill_places(f"shown_{modality}", micro, modality, shown_N)
            if plan.masks:
                self._fill_places(f"hidden_{modality}", micro, modality, hidden_N)
        if plan.masks:
            nothing = torch.zeros(0, dtype=torch.int64)
            self.fill("covered", nothing if corruption is None else corruption.covered_T, plan.positions)
            self.fill("target", nothing if corruption is None else corruption.target_T, -1)
        if plan.scores_pairs:
            self._fill_contrastive(micro, groups, rank)
        if plan.weights_K[LATE_INTERACTION]:
            self._fill_late(micro)
        if plan.weights_K[CHOICES]:
            self._fill_choices(micro)
        used = batch.used_bytes - batch.layout.tape_offset
        end = plan.tape_offset + used
        self._buffer[plan.tape_offset : end].copy_(torch.from_numpy(batch.tape[:used]))
        return end

    def _rows(self, micro: MicroBatch) -> Tensor:
        """Row of the table of vectors (`table_rows`) at each position: bytes, prefixes, what hides media, and a row of zeros."""
        layout, plan = micro.layout, self._plan
        rows = torch.full((layout.num_positions,), table_rows(plan) - 1, dtype=torch.int64)
        if layout.num_segments:
            prefix = layout.positions[PREFIX]
            rows[prefix] = MASK_BYTE + 1 + layout.modality_S[layout.segment_P[prefix]]
            text, mask = layout.positions[Modality.TEXT + 1], layout.positions[MASK]
            rows[torch.cat([text, mask])] = Embedding.shown(layout, micro.corruption, text, mask)
            for k, modality in enumerate(plan.media):
                rows[Embedding.split(layout, micro.corruption, modality)[1]] = MASK_BYTE + 1 + len(Modality) + k
        return rows

    def _fill_places(self, name: str, micro: MicroBatch, modality: Modality, position_N: Tensor) -> None:
        self.fill(name, position_N, self._plan.positions)
        places = payload_places(micro.layout, modality, position_N)
        if isinstance(places, Patches):
            for column, values in zip(_PLACES, places[:5], strict=True):
                self.fill(f"{name}_{column}", values)
        else:
            self.fill(f"{name}_offset", places.offset_N)
            self.fill(f"{name}_samples", places.samples_N)

    def _fill_named(self, name: str, named: NamedPairs, anchors: int) -> None:
        self.fill(f"{name}_offsets", named.offsets_M1, int(named.offsets_M1[-1]) if anchors else 0)
        self.fill(f"{name}_ids", named.ids_E)
        self.fill(f"{name}_attract", named.attract_E)
        self.fill(f"{name}_repel", named.repel_E)

    def _fill_contrastive(self, micro: MicroBatch, groups: Sequence[Sequence[int]], rank: int) -> None:
        layout, most = micro.layout, self._plan.segments
        # Each rank's candidates have a place of their own, whether it fills it or not.
        rank_first = most * rank
        own_S = torch.arange(layout.num_segments)
        self.fill("pair_self", own_S + rank_first, -1)
        self.fill("pair_group", layout.group_S)
        self.fill("pair_temperature", layout.temperature_group_S)
        self.fill("pair_live", torch.ones(layout.num_segments, dtype=torch.uint8))
        all_groups, live = torch.zeros(self._plan.candidates, dtype=torch.int64), torch.zeros(self._plan.candidates, dtype=torch.uint8)
        for rank, held in enumerate(groups):
            all_groups[rank * most : rank * most + len(held)] = torch.tensor(held, dtype=torch.int64)
            live[rank * most : rank * most + len(held)] = 1
        self.fill("pair_candidate_group", all_groups)
        self.fill("pair_candidate_live", live)
        self._fill_named("pair", named_pairs(layout, own_S, layout.num_segments, own_S + rank_first), layout.num_segments)

    def _fill_late(self, micro: MicroBatch) -> None:
        layout = micro.layout
        sides = late_sides(layout, self._plan.contrastive)
        queries, documents = len(sides.query_Q), len(sides.document_N)
        for name, segments, most in (("query", sides.query_Q, self._plan.late.max_query_span), ("document", sides.document_N, None)):
            tokens, offsets = late_tokens(layout, segments, most)
            self.fill(f"{name}_token", tokens, self._plan.positions)
            self.fill(f"{name}_offsets", offsets, int(offsets[-1]))
        self.fill("late_self", sides.pairs.self_M, -1)
        self.fill("late_group", sides.pairs.group_M)
        self.fill("late_temperature", layout.temperature_group_S[sides.query_Q])
        self.fill("late_live", torch.ones(queries, dtype=torch.uint8))
        self.fill("late_candidate_group", sides.pairs.group_N)
        self.fill("late_candidate_live", torch.ones(documents, dtype=torch.uint8))
        self._fill_named("late", sides.pairs.named, queries)

    def _fill_choices(self, micro: MicroBatch) -> None:
        layout = micro.layout
        counts_S = torch.diff(layout.choice_offsets_S1)
        chooser_C = (counts_S > 0).nonzero()[:, 0]
        item_L = torch.repeat_interleave(torch.arange(len(chooser_C)), counts_S[chooser_C])
        byte_L = layout.choice_bytes[: len(item_L)]
        legal = torch.zeros(len(chooser_C), BYTES, dtype=torch.uint8)
        target = torch.zeros(len(chooser_C), BYTES)
        legal[item_L, byte_L] = 1
        target[item_L, byte_L] = layout.choice_targets[: len(item_L)]
        self.fill("choice_position", layout.start_S[chooser_C] + layout.length_S[chooser_C] - 1, self._plan.positions)
        self.fill("choice_legal", legal)
        self.fill("choice_target", target)


def table_rows(plan: BatchPlan) -> int:
    """Rows of the table of vectors: 256 bytes and MASK, a prefix per modality, what hides each live medium, zeros."""
    return MASK_BYTE + 1 + len(Modality) + len(plan.media) + 1


class DeviceBatch:
    """The fields of a buffer on the device, as the ops take them."""

    def __init__(self, plan: BatchPlan, buffer: Tensor) -> None:
        self.plan = plan
        self.buffer = buffer
        self.tape = buffer[plan.tape_offset : plan.tape_offset + plan.shape.tape_bytes]
        self._views = {name: plan.view(buffer, name) for name in plan.fields}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def places(self, name: str, modality: Modality) -> Patches | Chunks:
        """Where the payloads of a list of positions lie."""
        shape = self.plan.shape
        if modality is Modality.AUDIO:
            return Chunks(self[f"{name}_offset"], self[f"{name}_samples"], shape.audio.chunk_samples)
        offset, row_pitch, frame_pitch, rows, columns = (self[f"{name}_{column}"] for column in _PLACES)
        slice_ = shape.image if modality is Modality.IMAGE else shape.video
        frames = 1 if modality is Modality.IMAGE else shape.video.tube_frames
        return Patches(offset, row_pitch, frame_pitch, rows, columns, frames, slice_.patch_side, slice_.channels)

    def pairs(self, name: str) -> PairRows:
        """The pairs of a term."""
        named = NamedPairs(self[f"{name}_offsets"], self[f"{name}_ids"], self[f"{name}_attract"], self[f"{name}_repel"])
        return PairRows(
            self[f"{name}_self"],
            self[f"{name}_group"],
            self[f"{name}_candidate_group"],
            named,
            ambient_weight(self.plan.contrastive),
            self[f"{name}_live"].bool(),
            self[f"{name}_candidate_live"].bool(),
        )
