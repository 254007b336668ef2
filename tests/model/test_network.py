"""The network: which modules a run has, and names that checkpoints rely on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from treadle.model.config import Choices, Contrastive, LateInteraction, TrainerConfig
from treadle.model.network import Network
from treadle.shape import BatchShape, Objective

Tiny = Callable[..., TrainerConfig]


def prefixes(network: Network) -> set[str]:
    """The first parts of parameter names, and the head's name where it is one."""
    return {".".join(name.split(".")[: 2 if name.startswith("heads") else 1]) for name, _ in network.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"objective": Objective.MASKED}, {"tower", "heads.text", "heads.image", "heads.audio"}),
        ({"objective": Objective.CONTRASTIVE}, {"tower", "temperatures"}),
        ({"objective": Objective.CONTRASTIVE, "choices": Choices(weight=1)}, {"tower", "temperatures", "heads.text"}),
        ({"objective": Objective.JOINT}, {"tower", "heads.text", "heads.image", "heads.audio", "temperatures"}),
        (
            {"objective": Objective.MASKED, "late_interaction": LateInteraction(weight=1)},
            {"tower", "heads.text", "heads.image", "heads.audio", "token_head", "token_temperatures"},
        ),
    ],
    ids=["masked", "contrastive", "contrastive_choices", "joint", "masked_late"],
)
def test_a_run_has_the_modules_that_its_terms_need(changes: dict[str, object], expected: set[str], tiny: Tiny) -> None:
    assert prefixes(Network(tiny(**changes))) == expected


def test_media_without_a_slice_have_no_head(tiny: Tiny, shape: BatchShape) -> None:
    text_only = BatchShape(max_rows_per_device=2, max_segments_per_device=4, max_columns_per_row=32)
    assert prefixes(Network(tiny(batch=text_only))) == {"tower", "heads.text"}


def test_temperatures_start_as_configured(tiny: Tiny) -> None:
    config = tiny(
        objective=Objective.CONTRASTIVE,
        contrastive=Contrastive(temperature_groups=3),
        late_interaction=LateInteraction(weight=1, inverse_temperature=2.0, bias=0.5),
    )
    network = Network(config)
    assert network.temperatures is not None and network.token_temperatures is not None
    torch.testing.assert_close(network.temperatures.log_scale_G.detach().exp(), torch.full((3,), 10.0))
    torch.testing.assert_close(network.temperatures.bias_G.detach(), torch.full((3,), -10.0))
    torch.testing.assert_close(network.token_temperatures.log_scale_G.detach().exp(), torch.full((3,), 2.0))
    torch.testing.assert_close(network.token_temperatures.bias_G.detach(), torch.full((3,), 0.5))


def test_initial_values_depend_on_seed_and_name_alone(tiny: Tiny) -> None:
    joint = dict(Network(tiny(objective=Objective.JOINT)).named_parameters())
    masked = dict(Network(tiny(objective=Objective.MASKED)).named_parameters())
    other = dict(Network(replace(tiny(objective=Objective.MASKED), seed=1)).named_parameters())
    # A run with more heads draws the same values for what both have.
    assert all(torch.equal(joint[name], value) for name, value in masked.items())
    assert not torch.equal(other["tower.blocks.0.qkv"], masked["tower.blocks.0.qkv"])
