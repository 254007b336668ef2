"""The learner: tower, objectives, trainer, checkpoints, encoder, training records."""

from typing import TYPE_CHECKING

from treadle.lazy import lazy_exports

if TYPE_CHECKING:
    from treadle.model.accumulate import (
        AccumulatedGradients,
        GradientsAccumulator,
        WeightedAccumulationState,
        WeightedGradientsAccumulator,
    )
    from treadle.model.checkpoint_folder import CheckpointFolder
    from treadle.model.config import (
        Choices,
        Contrastive,
        LateInteraction,
        Masking,
        MeshOptions,
        OptimizerConfig,
        Schedule,
        TrainerConfig,
    )
    from treadle.model.encoder import Encoder
    from treadle.model.mesh import Mesh, MeshDescription
    from treadle.model.record import (
        ModelStateTrainingRecord,
        RestoredTraining,
        RestoredWeightedTraining,
        TrainableParameterContract,
        TrainingRecord,
    )
    from treadle.model.statistics import StepResult, TrainerStepStats
    from treadle.model.tower import Tower
    from treadle.model.trainer import Deferred, Stopped, Trainer

__all__ = [
    "AccumulatedGradients",
    "CheckpointFolder",
    "Choices",
    "Contrastive",
    "Deferred",
    "Encoder",
    "GradientsAccumulator",
    "LateInteraction",
    "Masking",
    "Mesh",
    "MeshDescription",
    "MeshOptions",
    "ModelStateTrainingRecord",
    "OptimizerConfig",
    "RestoredTraining",
    "RestoredWeightedTraining",
    "Schedule",
    "StepResult",
    "Stopped",
    "Tower",
    "TrainableParameterContract",
    "Trainer",
    "TrainerConfig",
    "TrainerStepStats",
    "TrainingRecord",
    "WeightedAccumulationState",
    "WeightedGradientsAccumulator",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "treadle.model.accumulate": (
            "AccumulatedGradients",
            "GradientsAccumulator",
            "WeightedAccumulationState",
            "WeightedGradientsAccumulator",
        ),
        "treadle.model.checkpoint_folder": ("CheckpointFolder",),
        "treadle.model.config": (
            "Choices",
            "Contrastive",
            "LateInteraction",
            "Masking",
            "MeshOptions",
            "OptimizerConfig",
            "Schedule",
            "TrainerConfig",
        ),
        "treadle.model.encoder": ("Encoder",),
        "treadle.model.mesh": ("Mesh", "MeshDescription"),
        "treadle.model.record": (
            "ModelStateTrainingRecord",
            "RestoredTraining",
            "RestoredWeightedTraining",
            "TrainableParameterContract",
            "TrainingRecord",
        ),
        "treadle.model.statistics": ("StepResult", "TrainerStepStats"),
        "treadle.model.tower": ("Tower",),
        "treadle.model.trainer": ("Deferred", "Stopped", "Trainer"),
    },
)
