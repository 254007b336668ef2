"""A run's configuration as JSON, for checkpoints and for comparing ranks; no code, no paths, no devices."""

import dataclasses
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, TypeVar

from treadle.model.config import Choices, Contrastive, LateInteraction, Masking, OptimizerConfig, Schedule, TrainerConfig
from treadle.shape import AudioShape, BatchShape, ImageShape, Negatives, Objective, PairLossForm, VideoShape

NOT_RECORDED = ("mesh", "resume", "init", "device", "recompute_blocks", "parallel", "shard_ranks", "progress", "progress_steps")
"""Fields that belong to a process, not to a run."""

_NESTED: dict[str, type[Any]] = {
    "batch": BatchShape,
    "image": ImageShape,
    "video": VideoShape,
    "audio": AudioShape,
    "schedule": Schedule,
    "masking": Masking,
    "contrastive": Contrastive,
    "late_interaction": LateInteraction,
    "choices": Choices,
    "optimizer": OptimizerConfig,
    "objective": Objective,
    "negatives": Negatives,
    "pair_loss": PairLossForm,
}

T = TypeVar("T")


def to_json(config: object) -> dict[str, object]:
    """A configuration dataclass as nested dicts of numbers, strings and lists; enumerations by name."""
    assert dataclasses.is_dataclass(config)
    out: dict[str, object] = {}
    for field in dataclasses.fields(config):
        if field.name in NOT_RECORDED:
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out[field.name] = to_json(value)
        elif isinstance(value, IntEnum):
            out[field.name] = str(value)
        else:
            out[field.name] = list(value) if isinstance(value, tuple) else value
    return out


def trainer_config_from_json(record: Mapping[str, object]) -> TrainerConfig:
    """The configuration that `to_json` recorded; its resume, device and the like are left at their defaults.

    Raises:
        ValueError: a field is unknown, missing or out of range.
    """
    return _build(TrainerConfig, "TrainerConfig", record)


def _build(kind: type[T], where: str, record: object) -> T:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is {record!r}: it must be an object")
    known = {f.name for f in dataclasses.fields(kind) if f.name not in NOT_RECORDED}  # type: ignore[arg-type]  # T is one of the dataclasses
    unknown = sorted(set(record) - known)
    if unknown:
        raise ValueError(f"{where} has the unknown fields {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, value in record.items():
        nested = _NESTED.get(name)
        if nested is not None and issubclass(nested, IntEnum):
            values[name] = nested(value)
        elif nested is not None:
            values[name] = _build(nested, f"{where}.{name}", value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def geometry(config: TrainerConfig) -> dict[str, object]:
    """What must match between a checkpoint and the run that resumes it, by name."""
    batch = config.batch.resolved()
    contrastive = config.contrastive.resolved(config.hidden)
    scores = config.objective is not Objective.MASKED
    late = config.late_interaction.weight > 0
    return {
        "depth": config.depth,
        "hidden": config.hidden,
        "batch.image": to_json(batch.image) if batch.image.live else None,
        "batch.video": to_json(batch.video) if batch.video.live else None,
        "batch.audio": to_json(batch.audio) if batch.audio.live else None,
        "late_interaction.width": config.late_interaction.resolved(batch).width if late else None,
        "contrastive.matryoshka_dimensions": list(contrastive.matryoshka_dimensions) if scores else None,
        "contrastive.temperature_groups": contrastive.temperature_groups if scores or late else None,
        "objective": str(config.objective),
        "seed": config.seed,
    }


def geometry_differences(recorded: TrainerConfig, wanted: TrainerConfig, *, only: tuple[str, ...] = ()) -> list[str]:
    """What of the geometry differs, a phrase each; `only` names fields to compare, where a dead slice fits a live one."""
    before, after = geometry(recorded), geometry(wanted)
    phrases: list[str] = []
    for name in only or tuple(before):
        if before[name] == after[name] or (only and None in (before[name], after[name])):
            continue
        phrases.append(f"{name} is {_shown(after[name])}, the checkpoint has {_shown(before[name])}")
    return phrases


def _shown(value: object) -> str:
    return "off" if value is None else str(value)
