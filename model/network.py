"""Everything that learns: the tower, the heads that a run's objectives need, and their temperatures.

Parameter names are the keys of checkpoints: `tower.*`, `heads.*`, `temperatures.*`, `token_head.*`, `token_temperatures.*`.
"""

from torch import nn

from treadle.model.config import TrainerConfig
from treadle.model.contrastive import Temperatures
from treadle.model.heads import Heads
from treadle.model.late_interaction import TokenHead
from treadle.model.tower import Tower
from treadle.shape import Modality, Objective


def live_heads(config: TrainerConfig) -> tuple[Modality, ...]:
    """The modalities that a run reconstructs; text too where it makes choices."""
    if config.objective is not Objective.CONTRASTIVE:
        return tuple(m for m in Modality if config.batch.is_live(m))
    return (Modality.TEXT,) if config.choices.weight > 0 else ()


class Network(nn.Module):
    """A run's modules, initialised by draws keyed by the seed and each parameter's name."""

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__()
        batch = config.batch.resolved()
        contrastive = config.contrastive.resolved(config.hidden)
        late = config.late_interaction.resolved(batch)
        self.hidden = config.hidden
        self.runs_when_empty = False
        """Whether ranks without items run the tower too, because collectives run within it."""
        self.tower = Tower(config.depth, config.hidden, batch, config.seed, checkpoint=config.recompute_blocks)
        self.heads = Heads(config.hidden, batch, live_heads(config), config.seed)
        self.temperatures: Temperatures | None = None
        if config.objective is not Objective.MASKED:
            self.temperatures = Temperatures(contrastive.temperature_groups, contrastive.inverse_temperature, contrastive.bias)
        self.token_head: TokenHead | None = None
        self.token_temperatures: Temperatures | None = None
        if config.late_interaction.weight > 0:
            self.token_head = TokenHead(config.hidden, late.width, config.seed)
            self.token_temperatures = Temperatures(contrastive.temperature_groups, late.inverse_temperature, late.bias)

    def clamp_(self) -> None:
        """Holds the temperatures within their bound; called after every update, so that no gradient is ever cut."""
        for temperatures in (self.temperatures, self.token_temperatures):
            if temperatures is not None:
                temperatures.clamp_()
