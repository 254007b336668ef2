"""Treadle trains one byte-level transformer on text, images, video and audio, straight from sharded tar streams.

Public names load on first use, so that `from treadle import Packer` imports neither torch nor a codec.
"""

from typing import TYPE_CHECKING

from treadle.lazy import lazy_exports

if TYPE_CHECKING:
    from treadle.model import Encoder, Mesh, MeshOptions, Trainer, TrainerConfig, TrainerStepStats, TrainingRecord
    from treadle.model.config import Choices, Contrastive, LateInteraction, Masking, Schedule
    from treadle.pipeline import Edges, PackedBatch, Packer, Relations, ShardStream, StepItems
    from treadle.shape import (
        AudioShape,
        BatchShape,
        ImageShape,
        LateInteractionSide,
        Modality,
        Negatives,
        Objective,
        PairLossForm,
        VideoShape,
    )

__version__ = "0.1.0"

__all__ = [
    "AudioShape",
    "BatchShape",
    "Choices",
    "Contrastive",
    "Edges",
    "Encoder",
    "ImageShape",
    "LateInteraction",
    "LateInteractionSide",
    "Masking",
    "Mesh",
    "MeshOptions",
    "Modality",
    "Negatives",
    "Objective",
    "PackedBatch",
    "Packer",
    "PairLossForm",
    "Relations",
    "Schedule",
    "ShardStream",
    "StepItems",
    "Trainer",
    "TrainerConfig",
    "TrainerStepStats",
    "TrainingRecord",
    "VideoShape",
    "__version__",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "treadle.shape": (
            "AudioShape",
            "BatchShape",
            "ImageShape",
            "LateInteractionSide",
            "Modality",
            "Negatives",
            "Objective",
            "PairLossForm",
            "VideoShape",
        ),
        "treadle.pipeline": ("Edges", "PackedBatch", "Packer", "Relations", "ShardStream", "StepItems"),
        "treadle.model.config": ("Choices", "Contrastive", "LateInteraction", "Masking", "Schedule"),
        "treadle.model": ("Encoder", "Mesh", "MeshOptions", "Trainer", "TrainerConfig", "TrainerStepStats", "TrainingRecord"),
    },
)
