"""A micro-batch with every size fixed by the configuration, in one buffer, so that one copy moves it and one graph serves every step.

The host settles what a batch is while the device works on the step before: its segments and positions, named pairs, token lists. What a
step makes of it, the device draws and counts for itself (`device_corruption.py`, `device_counts.py`). On the device there is then nothing to
compact or to read back, and nothing that a captured graph could have frozen.

Padding is a valid read that counts for nothing: position P (a row that is thrown away), segments of length 0, places of 0 rows, targets of -1,
anchors and candidates that take no part.

Suffixes: P positions, S segments, N candidates of all ranks or entries of a list, E named pairs, L legal bytes, C classes of a byte.
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
from treadle.kernels.tape_reference import Chunks, Patches, locate_chunks, locate_patches
from treadle.model.config import TrainerConfig
from treadle.model.contrastive import ambient_weight
from treadle.model.corruption import MASK_BYTE
from treadle.model.late_interaction import late_sides, late_tokens
from treadle.model.layout import BatchLayout
from treadle.model.objectives import CHOICES, LATE_INTERACTION, term_weights
from treadle.model.relations import named_pairs
from treadle.pipeline import PackedBatch
from treadle.pipeline.layout import EDGES_PER_SEGMENT
from treadle.shape import Modality, Objective

ALIGNMENT = 256
BYTES = 256
MEDIA = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)


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
        masking = config.masking.resolved()
        self.hidden_shares = {
            Modality.TEXT: masking.token_mask_probability,
            Modality.IMAGE: masking.image_mask_ratio,
            Modality.VIDEO: masking.video_mask_ratio,
            Modality.AUDIO: masking.audio_mask_ratio,
        }
        """Which part of a modality's tokens is hidden, about."""
        self.fields: dict[str, _Field] = {}
        self._end = 0
        self._declare()
        self.tape_offset = self._end
        self.bytes = -(-(self._end + self.shape.tape_bytes) // ALIGNMENT) * ALIGNMENT

    def _declare(self) -> None:
        positions, segments = self.positions, self.segments
        for name in ("start", "length", "tokens", "modality", "id", "deep", "payload"):
            self._add(name, np.int64, segments)
        self._add("free", np.uint8, segments)
        for name in ("grid", "extent"):
            self._add(name, np.int32, segments, 3)
        self._add("segment", np.int64, positions)
        self._add("coord", np.int32, positions, 3)
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

    def most_hidden(self, modality: Modality) -> int:
        """Positions that can be hidden: of n tokens `share n`, rounded as counts are, or 1 where that is less, and each segment has a prefix too.

        Of a clip one column of two may go, half of its tokens.
        """
        share = round(10_000 * self.hidden_shares[modality]) / 10_000
        return math.ceil(self.positions * max(1 / 2 if modality is Modality.VIDEO else 1 / 3, share))

    def _add(self, name: str, dtype: Any, *shape: int) -> None:
        self.fields[name] = field = _Field(self._end, dtype, shape)
        self._end = -(-(self._end + field.bytes) // ALIGNMENT) * ALIGNMENT

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

    def write(self, batch: PackedBatch, layout: BatchLayout, groups: Sequence[Sequence[int]], rank: int) -> int:
        """Writes everything.

        Args:
            layout: of the batch, on the CPU.
            groups: of every rank's segments, by rank.

        Returns:
            Bytes to copy.

        Raises:
            DoesNotFitError: something passes its capacity.
        """
        plan, segments = self._plan, layout.num_segments
        columns = {"start": layout.start_S, "length": layout.length_S, "tokens": layout.tokens_S, "id": layout.id_S}
        for name, values in columns.items():
            self.fill(name, values)
        self.fill("modality", layout.modality_S, -1)
        self.fill("deep", torch.where(layout.modality_S == Modality.VIDEO, layout.grid_S3[:, 0].long(), 1), 1)
        self.fill("payload", layout.tape_offsets_S1[:segments])
        self.fill("free", (torch.diff(layout.choice_offsets_S1) == 0)[:segments].to(torch.uint8))
        self.fill("grid", layout.grid_S3)
        self.fill("extent", layout.extent_S3)
        self.fill("segment", layout.segment_P)
        self.fill("coord", layout.coord_P3)
        if plan.scores_pairs:
            self._fill_contrastive(layout, groups, rank)
        if plan.weights_K[LATE_INTERACTION]:
            self._fill_late(layout)
        if plan.weights_K[CHOICES]:
            self._fill_choices(layout)
        used = batch.used_bytes - batch.layout.tape_offset
        end = plan.tape_offset + used
        self._buffer[plan.tape_offset : end].copy_(torch.from_numpy(batch.tape[:used]))
        return end

    def _fill_named(self, name: str, named: NamedPairs, anchors: int) -> None:
        self.fill(f"{name}_offsets", named.offsets_M1, int(named.offsets_M1[-1]) if anchors else 0)
        self.fill(f"{name}_ids", named.ids_E)
        self.fill(f"{name}_attract", named.attract_E)
        self.fill(f"{name}_repel", named.repel_E)

    def _fill_contrastive(self, layout: BatchLayout, groups: Sequence[Sequence[int]], rank: int) -> None:
        most = self._plan.segments
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

    def _fill_late(self, layout: BatchLayout) -> None:
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

    def _fill_choices(self, layout: BatchLayout) -> None:
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

    @property
    def zero_row(self) -> int:
        """The last row of the table of vectors, zeros: what stands where nothing is, and where a payload is added."""
        return table_rows(self.plan) - 1

    def places(self, modality: Modality, position_N: Tensor) -> Patches | Chunks:
        """Where the payloads of positions of one modality lie; of P, at the tape's start and of no rows."""
        shape, positions = self.plan.shape, self.plan.positions
        live_N = position_N < positions
        segment_N = self["segment"].index_select(0, position_N.clamp(max=positions - 1))
        token_N = torch.where(live_N, position_N - self["start"].index_select(0, segment_N) - 1, 0)
        offset_N, extent_N3 = self["payload"].index_select(0, segment_N), self["extent"].index_select(0, segment_N)
        if modality is Modality.AUDIO:
            chunks = locate_chunks(offset_N, extent_N3, token_N, shape.audio.chunk_samples)
            return Chunks(torch.where(live_N, chunks.offset_N, 0), torch.where(live_N, chunks.samples_N, 0), chunks.size)
        grid_N3 = self["grid"].index_select(0, segment_N).clamp(min=1)
        slice_ = shape.image if modality is Modality.IMAGE else shape.video
        frames = 1 if modality is Modality.IMAGE else shape.video.tube_frames
        patches = locate_patches(offset_N, extent_N3, grid_N3, token_N, frames, slice_.patch_side, slice_.channels)
        offset, row_pitch, frame_pitch, rows, columns = (torch.where(live_N, column, 0) for column in patches[:5])
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
