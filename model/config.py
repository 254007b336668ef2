"""What to train: the frozen configuration of objectives, schedule, optimizer and run. Imports no torch.

A field left at zero derives the value in brackets; `resolved` methods answer a configuration with nothing left to derive.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from treadle.shape import (
    BatchShape,
    Negatives,
    Objective,
    PairLossForm,
    require_choice,
    require_count,
    require_member,
    require_number,
    require_path,
    settle_numbers,
    shown,
)

if TYPE_CHECKING:
    import torch

    from treadle.model.mesh import Mesh

HEAD_WIDTH = 64
"""Width of an attention head; `hidden` is a multiple of 128, so heads come in pairs."""

MAX_INVERSE_TEMPERATURE = 100.0
MAX_MATRYOSHKA_DIMENSIONS = 8
MAX_TIMEOUT_S = 1e9

Progress = Callable[[int, int], bool | None]
"""`progress(done, total)` counts tensors; answering False stops the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """How the masked objective corrupts a batch and weighs its terms.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    token_mask_probability: float = 0.0
    """Share of a text's bytes covered by spans [0.15]."""
    token_mean_span: float = 0.0
    """Mean of the geometric span length, bytes [16]."""
    replace_fraction: float = 0.0
    """Of covered positions, the share shown as MASK [0.8]."""
    random_fraction: float = 0.0
    """Of covered positions, the share shown as a random byte [0.1, or what `replace_fraction` leaves]; the rest stay as they are."""
    image_mask_ratio: float = 0.0
    """Share of an image's patches masked [0.75]."""
    video_mask_ratio: float = 0.0
    """Share of a clip's tube columns masked [0.75]."""
    audio_mask_ratio: float = 0.0
    """Share of a recording's chunks masked [0.75]."""
    text_weight: float = 0.0
    """Weight of the text term [1]."""
    image_weight: float = 0.0
    """Weight of the image term [1]."""
    video_weight: float = 0.0
    """Weight of the video term [1]."""
    audio_weight: float = 0.0
    """Weight of the audio term [1]."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name in (
            "token_mask_probability",
            "replace_fraction",
            "random_fraction",
            "image_mask_ratio",
            "video_mask_ratio",
            "audio_mask_ratio",
        ):
            require_number("Masking", name, getattr(self, name), 0, 1)
        require_number("Masking", "token_mean_span", self.token_mean_span, 0)
        if 0 < self.token_mean_span < 1:
            raise ValueError(f"Masking.token_mean_span is {self.token_mean_span}: a span is at least 1 byte long")
        for name in ("text_weight", "image_weight", "video_weight", "audio_weight"):
            require_number("Masking", name, getattr(self, name), 0)
        replaced, random = self._fractions()
        if replaced + random > 1 + 1e-9:
            raise ValueError(
                f"Masking.replace_fraction {replaced} and random_fraction {random} add up to more than 1: they share the covered positions"
            )

    def _fractions(self) -> tuple[float, float]:
        """Both fractions, derived where they are zero: the random bytes take what a given `replace_fraction` leaves of their share."""
        replaced = self.replace_fraction or 0.8
        return replaced, self.random_fraction or min(0.1, 1 - replaced)

    def resolved(self) -> "Masking":
        """This configuration with nothing left to derive."""
        replaced, random = self._fractions()
        return replace(
            self,
            token_mask_probability=self.token_mask_probability or 0.15,
            token_mean_span=self.token_mean_span or 16.0,
            replace_fraction=replaced,
            random_fraction=random,
            image_mask_ratio=self.image_mask_ratio or 0.75,
            video_mask_ratio=self.video_mask_ratio or 0.75,
            audio_mask_ratio=self.audio_mask_ratio or 0.75,
            text_weight=self.text_weight or 1.0,
            image_weight=self.image_weight or 1.0,
            video_weight=self.video_weight or 1.0,
            audio_weight=self.audio_weight or 1.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrastive:
    """How the contrastive term scores pooled vectors.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    matryoshka_dimensions: tuple[int, ...] = ()
    """Widths scored, each a prefix of the pooled vector: strictly ascending multiples of 8, at most 8; empty scores all of it."""
    temperature_groups: int = 1
    """Learnable pairs of inverse temperature and bias; an item's group selects its pair when it is the anchor. 0 derives 1."""
    inverse_temperature: float = 0.0
    """Starting inverse temperature [10 under SIGMOID, else 1]."""
    bias: float = 0.0
    """Starting bias [-10 under SIGMOID, else 0]."""
    negatives: Negatives = Negatives.AMBIENT
    """Which pairs repel."""
    ambient_repulsion_weight: float = 0.0
    """Weight of a pair that no edge names, under AMBIENT [1]."""
    max_edges_per_device: int = 0
    """Edges per edge set that a batch may name [the batch's edge capacity]."""
    pair_loss: PairLossForm = PairLossForm.DERIVED
    """The loss of a row of scores [SIGMOID]."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        widths = self.matryoshka_dimensions
        if not isinstance(widths, tuple | list):
            raise ValueError(f"Contrastive.matryoshka_dimensions is {widths!r}: it must be a tuple of widths, such as (64, 128)")
        if len(widths) > MAX_MATRYOSHKA_DIMENSIONS:
            raise ValueError(
                f"Contrastive.matryoshka_dimensions names {len(widths)} widths: at most {MAX_MATRYOSHKA_DIMENSIONS} are scored"
            )
        widths = tuple(require_count("Contrastive", "matryoshka_dimensions", width, 8) for width in widths)
        object.__setattr__(self, "matryoshka_dimensions", widths)
        for width in widths:
            if width % 8:
                raise ValueError(f"Contrastive.matryoshka_dimensions holds {width}: each width must be a multiple of 8")
        if any(a >= b for a, b in pairwise(widths)):
            raise ValueError(f"Contrastive.matryoshka_dimensions is {widths}: widths must be strictly ascending")
        require_count("Contrastive", "temperature_groups", self.temperature_groups, 0, 2**16)
        require_number("Contrastive", "inverse_temperature", self.inverse_temperature, 0, MAX_INVERSE_TEMPERATURE)
        require_number("Contrastive", "bias", self.bias)
        require_member("Contrastive", "negatives", self.negatives, Negatives)
        require_number("Contrastive", "ambient_repulsion_weight", self.ambient_repulsion_weight, 0)
        require_count("Contrastive", "max_edges_per_device", self.max_edges_per_device)
        require_member("Contrastive", "pair_loss", self.pair_loss, PairLossForm)

    def resolved(self, hidden: int) -> "Contrastive":
        """This configuration with nothing left to derive but `max_edges_per_device`, which the batch derives.

        Raises:
            ValueError: `hidden` is no width, or a matryoshka width exceeds it.
        """
        hidden = require_count("Contrastive.resolved", "hidden", hidden, 8)
        widths = self.matryoshka_dimensions or (hidden,)
        if widths[-1] > hidden:
            raise ValueError(f"Contrastive.matryoshka_dimensions holds {widths[-1]}: no width may exceed hidden, {hidden}")
        form = PairLossForm.SIGMOID if self.pair_loss is PairLossForm.DERIVED else self.pair_loss
        sigmoid = form is PairLossForm.SIGMOID
        return replace(
            self,
            matryoshka_dimensions=widths,
            temperature_groups=self.temperature_groups or 1,
            inverse_temperature=self.inverse_temperature or (10.0 if sigmoid else 1.0),
            bias=self.bias or (-10.0 if sigmoid else 0.0),
            ambient_repulsion_weight=self.ambient_repulsion_weight or 1.0,
            pair_loss=form,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LateInteraction:
    """How the late-interaction term scores the token vectors of queries against documents.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    weight: float = 0.0
    """Weight of the term; 0 trains no token head."""
    width: int = 128
    """Width of a token vector, a multiple of 8; 0 derives 128."""
    inverse_temperature: float = 1.0
    """Starting inverse temperature of every temperature group; 0 derives 1."""
    bias: float = 0.0
    """Starting bias of every temperature group; zero is zero."""
    max_query_span: int = 64
    """Tokens that one query contributes at most, its first past the prefix; 0 derives 64."""
    max_query_tokens_per_device: int = 0
    """Query tokens of a batch [`max_query_span` of every segment]."""
    max_documents_per_device: int = 0
    """Documents of a batch [its segments]."""
    max_document_tokens_per_device: int = 0
    """Document tokens of a batch [its positions]."""
    pair_loss: PairLossForm = PairLossForm.DERIVED
    """The loss of a query's row of scores [RANKED]."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_number("LateInteraction", "weight", self.weight, 0)
        require_count("LateInteraction", "width", self.width)
        if self.width % 8:
            raise ValueError(f"LateInteraction.width is {self.width}: it must be a multiple of 8")
        require_number("LateInteraction", "inverse_temperature", self.inverse_temperature, 0, MAX_INVERSE_TEMPERATURE)
        require_number("LateInteraction", "bias", self.bias)
        for name in ("max_query_span", "max_query_tokens_per_device", "max_documents_per_device", "max_document_tokens_per_device"):
            require_count("LateInteraction", name, getattr(self, name))
        require_member("LateInteraction", "pair_loss", self.pair_loss, PairLossForm)

    def resolved(self, batch: BatchShape) -> "LateInteraction":
        """This configuration with nothing left to derive.

        Raises:
            ValueError: `batch` is no `BatchShape`.
        """
        require_member("LateInteraction.resolved", "batch", batch, BatchShape)
        span = self.max_query_span or 64
        return replace(
            self,
            width=self.width or 128,
            inverse_temperature=self.inverse_temperature or 1.0,
            max_query_span=span,
            max_query_tokens_per_device=self.max_query_tokens_per_device or span * batch.max_segments_per_device,
            max_documents_per_device=self.max_documents_per_device or batch.max_segments_per_device,
            max_document_tokens_per_device=self.max_document_tokens_per_device or batch.positions,
            pair_loss=PairLossForm.RANKED if self.pair_loss is PairLossForm.DERIVED else self.pair_loss,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The calibrated choices term.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    weight: float = 0.0
    """Weight of the term; positive needs the batch's `max_choices_per_item`."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_number("Choices", "weight", self.weight, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate over a run: linear warm-up to the peak, then a cosine to the floor.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    steps: int
    """Steps of the run across resumes, which the cosine spans."""
    learning_rate: float = 0.0
    """The peak [5e-4]."""
    min_learning_rate: float = 0.0
    """The floor [1e-5]."""
    warmup_steps: int = 0
    """Steps up to the peak [min(400, steps // 10)]; none when derived below 10 steps."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if self.steps == 0:
            raise ValueError("Schedule.steps is 0: a run takes at least one step")
        require_count("Schedule", "steps", self.steps, 1, 2**40)
        require_number("Schedule", "learning_rate", self.learning_rate, 0)
        require_number("Schedule", "min_learning_rate", self.min_learning_rate, 0)
        require_count("Schedule", "warmup_steps", self.warmup_steps, 0, 2**40)
        peak = self.learning_rate or 5e-4
        if self.min_learning_rate > peak:
            raise ValueError(f"Schedule.min_learning_rate is {self.min_learning_rate}: the floor must not exceed the peak, {peak}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"Schedule.warmup_steps is {self.warmup_steps}: warm-up must end within the run's {self.steps} steps")

    def resolved(self) -> "Schedule":
        """This schedule with nothing left to derive."""
        peak = self.learning_rate or 5e-4
        return replace(
            self,
            learning_rate=peak,
            min_learning_rate=self.min_learning_rate or min(1e-5, peak),
            warmup_steps=self.warmup_steps or min(400, self.steps // 10),
        )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from one.

        Raises:
            ValueError: `step` is no integer, or below one.
        """
        step = require_count("Schedule.learning_rate_at", "step", step, 1, 2**63 - 1)
        whole = self.resolved()
        if step < whole.warmup_steps:
            return whole.learning_rate * step / whole.warmup_steps
        peak = max(1, whole.warmup_steps)
        if step <= peak:
            return whole.learning_rate
        if step >= whole.steps:
            return whole.min_learning_rate
        done = (step - peak) / (whole.steps - peak)
        return whole.min_learning_rate + (whole.learning_rate - whole.min_learning_rate) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, and the bound on the gradient's norm.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    beta1: float = 0.9
    """Decay of the first moment, per step."""
    beta2: float = 0.95
    """Decay of the second moment, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.05
    """Decay of matrices; norms, biases, embeddings of one row and temperatures have none."""
    max_gradient_norm: float = 1.0
    """The gradient's norm is clipped to this; 0 clips nothing."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name in ("beta1", "beta2"):
            require_number("OptimizerConfig", name, getattr(self, name), 0, 1)
            if getattr(self, name) == 1:
                raise ValueError(f"OptimizerConfig.{name} is 1: it must be below 1, or moments never move")
        require_number("OptimizerConfig", "eps", self.eps, 0)
        if self.eps == 0:
            raise ValueError("OptimizerConfig.eps is 0: it must be positive, or a zero gradient divides by zero")
        require_number("OptimizerConfig", "weight_decay", self.weight_decay, 0)
        require_number("OptimizerConfig", "max_gradient_norm", self.max_gradient_norm, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshOptions:
    """How this process finds its world.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    host_domain_index: int = 0
    """This process's number among those that meet in `directory`; its rank."""
    host_domain_count: int = 1
    """Processes that meet in `directory`."""
    directory: str | Path | None = None
    """A folder that all processes see; None reads torchrun's environment, and without one runs this process alone."""
    job: str = ""
    """The run's name: processes of other jobs may use the same folder."""
    timeout_s: float = 300.0
    """How long to wait for the others before naming the missing, seconds."""
    collective_timeout_s: float = 1800.0
    """How long a collective may wait for a rank, seconds."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if self.directory is not None:
            require_path("MeshOptions", "directory", self.directory)
        require_member("MeshOptions", "job", self.job, str)
        require_count("MeshOptions", "host_domain_count", self.host_domain_count, 1, 2**24 - 1)
        require_count("MeshOptions", "host_domain_index", self.host_domain_index, 0)
        if self.host_domain_index >= self.host_domain_count:
            raise ValueError(
                f"MeshOptions.host_domain_index is {self.host_domain_index}: it must be below host_domain_count, {self.host_domain_count}"
            )
        if self.directory is None and self.host_domain_count > 1:
            raise ValueError(
                f"MeshOptions.host_domain_count is {self.host_domain_count} but directory is None: name a folder to meet in, or use torchrun"
            )
        require_number("MeshOptions", "timeout_s", self.timeout_s, 0, MAX_TIMEOUT_S)
        require_number("MeshOptions", "collective_timeout_s", self.collective_timeout_s, 1, MAX_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The geometry, objective and starting point of a run.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    depth: int
    """Transformer blocks."""
    hidden: int
    """Width of the tower, a multiple of 128."""
    batch: BatchShape
    """What one device's step carries at most."""
    schedule: Schedule
    objective: Objective = Objective.MASKED
    """Which losses a step relaxes; masked alone trains no vectors to search with."""
    masking: Masking = field(default_factory=Masking)
    """Read unless the objective is CONTRASTIVE."""
    contrastive: Contrastive = field(default_factory=Contrastive)
    """Read unless the objective is MASKED."""
    late_interaction: LateInteraction = field(default_factory=LateInteraction)
    """Read when its weight is positive."""
    choices: Choices = field(default_factory=Choices)
    """Read when its weight is positive."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: "Mesh | None" = None
    """The world that this process trains in; None runs it alone."""
    seed: int = 0
    """Keys every draw: initial values and corruption. 64 bits."""
    resume: str | Path | None = None
    """Checkpoint to go on from, at its saved step."""
    init: str | Path | None = None
    """Checkpoint whose weights start a new run, with a new objective and schedule."""
    device: "str | torch.device | None" = None
    """None takes CUDA where there is one, else the CPU."""
    precision: Literal["fp32", "bf16"] | None = None
    """Compute type; None takes bf16 on CUDA and fp32 on the CPU. Master weights are fp32 either way."""
    parallel: Literal["replicate", "shard", "hybrid"] = "replicate"
    """Whether every rank holds the tower's blocks whole, shares them out over all ranks, or over groups of ranks."""
    shard_ranks: int = 0
    """Ranks that share one copy of the blocks under `hybrid`; 0 derives the ranks of a machine."""
    recompute_blocks: bool = False
    """Keep each block's input alone and run it again in the backward pass: memory of one block instead of all, a third more work, the same
    bits."""
    progress: Progress | None = None
    """Reports the tensors placed on a resume; answering False raises `Stopped`."""
    progress_steps: int = 0
    """Reports at most, the last at completion [10]."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("TrainerConfig", "depth", self.depth, 1, 1024)
        require_count("TrainerConfig", "hidden", self.hidden, 128, 2**16)
        if self.hidden % 128:
            raise ValueError(f"TrainerConfig.hidden is {self.hidden}: it must be a multiple of 128")
        for name, kind in (
            ("batch", BatchShape),
            ("schedule", Schedule),
            ("objective", Objective),
            ("masking", Masking),
            ("contrastive", Contrastive),
            ("late_interaction", LateInteraction),
            ("choices", Choices),
            ("optimizer", OptimizerConfig),
        ):
            require_member("TrainerConfig", name, getattr(self, name), kind)
        require_count("TrainerConfig", "seed", self.seed, 0, 2**64 - 1)
        for name in ("resume", "init"):
            if getattr(self, name) is not None:
                require_path("TrainerConfig", name, getattr(self, name))
        if self.device is not None and not isinstance(self.device, str):
            import torch

            if not isinstance(self.device, torch.device):
                raise ValueError(f"TrainerConfig.device is {shown(self.device)}: it must be a device such as 'cpu' or 'cuda:1', or None")
        if self.mesh is not None:
            from treadle.model.mesh import Mesh

            require_member("TrainerConfig", "mesh", self.mesh, Mesh)
        if self.progress is not None and not callable(self.progress):
            raise ValueError(f"TrainerConfig.progress is {self.progress!r}: it must be called with (done, total), or None")
        require_count("TrainerConfig", "progress_steps", self.progress_steps)
        require_choice("TrainerConfig", "parallel", self.parallel, ("replicate", "shard", "hybrid"))
        require_count("TrainerConfig", "shard_ranks", self.shard_ranks, 0, 2**17)
        require_member("TrainerConfig", "recompute_blocks", self.recompute_blocks, bool)
        if self.precision is not None:
            require_choice("TrainerConfig", "precision", self.precision, ("fp32", "bf16"))
        if self.resume is not None and self.init is not None:
            raise ValueError(
                f"TrainerConfig.resume is {str(self.resume)!r} and init is {str(self.init)!r}: name one, resume to go on with "
                "a run or init to start another from its weights"
            )
        if self.choices.weight > 0 and not self.batch.max_choices_per_item:
            raise ValueError(
                f"TrainerConfig.choices.weight is {self.choices.weight} but batch.max_choices_per_item is 0: "
                "set how many choices an item may offer"
            )
        if self.objective is not Objective.MASKED:
            self.contrastive.resolved(self.hidden)
