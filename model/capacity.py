"""What a batch may hold, checked on the host before a trainer spends device time on it."""

import numpy as np

from treadle.model.config import TrainerConfig
from treadle.pipeline import PackedBatch
from treadle.shape import LateInteractionSide, Objective

_SIZES = (
    "max_rows_per_device",
    "max_segments_per_device",
    "max_columns_per_row",
    "max_bags_per_device",
    "max_choices_per_item",
)

MAX_MICRO_BATCHES = 256
"""Micro-batches of one step: their number takes eight bits of a defaulted item id."""


def check_batch(batch: PackedBatch, config: TrainerConfig) -> None:
    """Checks that a batch lies within a trainer's capacities.

    Raises:
        ValueError: it does not; the message holds what the batch has and what the trainer allows.
    """
    _check_shape(batch, config)
    scores_pairs = config.objective is not Objective.MASKED
    scores_tokens = config.late_interaction.weight > 0
    if scores_pairs or scores_tokens:
        _check_edges(batch, config)
        _check_temperature_groups(batch, config)
    if scores_tokens:
        _check_late_interaction(batch, config)


def _check_shape(batch: PackedBatch, config: TrainerConfig) -> None:
    theirs, ours = batch.shape.resolved(), config.batch.resolved()
    for name in _SIZES:
        if getattr(theirs, name) > getattr(ours, name):
            raise ValueError(
                f"the batch's {name} is {getattr(theirs, name)}, the trainer's {getattr(ours, name)}: "
                "pack with the trainer's shape, or raise TrainerConfig.batch"
            )
    for name in ("image", "video", "audio"):
        their_slice, our_slice = getattr(theirs, name), getattr(ours, name)
        if their_slice.live and their_slice != our_slice:
            raise ValueError(
                f"the batch's {name} slice is {their_slice}, the trainer's {our_slice if our_slice.live else 'off'}: "
                "pack with the trainer's shape"
            )


def _check_edges(batch: PackedBatch, config: TrainerConfig) -> None:
    most = config.contrastive.max_edges_per_device
    for name, edges in (("attract", batch.attract), ("repel", batch.repel), ("ignore", batch.ignore)):
        if most and len(edges.ids) > most:
            raise ValueError(
                f"the batch names {len(edges.ids)} {name} edges, contrastive.max_edges_per_device is {most}: "
                "raise it, or pack with max_edges"
            )


def _check_temperature_groups(batch: PackedBatch, config: TrainerConfig) -> None:
    groups = batch.temperature_group[: batch.segments]
    allowed = config.contrastive.temperature_groups or 1
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < allowed:
        worst = int(groups.max()) if int(groups.max()) >= allowed else int(groups.min())
        raise ValueError(
            f"the batch holds an item of temperature group {worst}, contrastive.temperature_groups is {allowed}: "
            "groups count from 0 up to one less"
        )


def _check_late_interaction(batch: PackedBatch, config: TrainerConfig) -> None:
    late = config.late_interaction.resolved(config.batch.resolved())
    used = batch.segments
    side = batch.side[:used]
    tokens = batch.grid[:used].astype(np.int64).prod(axis=1)
    queries = (side & LateInteractionSide.QUERY) != 0
    documents = (side & LateInteractionSide.DOCUMENT) != 0
    for name, held in (
        ("max_query_tokens_per_device", int(np.minimum(tokens[queries], late.max_query_span).sum())),
        ("max_documents_per_device", int(documents.sum())),
        ("max_document_tokens_per_device", int(tokens[documents].sum())),
    ):
        if held > getattr(late, name):
            raise ValueError(
                f"the batch holds {held}, late_interaction.{name} is {getattr(late, name)}: "
                "raise it, or pack with the trainer's late_interaction"
            )
