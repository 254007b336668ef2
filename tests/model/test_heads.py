"""The heads that a run has."""

from typing import Any

import pytest
import torch

from treadle.model.heads import Heads
from treadle.shape import BatchShape, Modality


def test_one_head_per_modality_with_its_values(handmade: Any) -> None:
    heads = Heads(128, handmade.shape, list(Modality), 0)
    # 256 bytes; 5 x 5 x 3 pixels; 2 x 4 x 4 x 1 pixels; 7 samples
    assert {name: tuple(p.shape) for name, p in heads.named_parameters()} == {
        "text.weight": (256, 128),
        "image.weight": (75, 128),
        "video.weight": (32, 128),
        "audio.weight": (7, 128),
    }
    states = torch.randn(3, 128)
    torch.testing.assert_close(heads.text(states), states @ heads.text.weight.T)


def test_heads_that_a_run_does_not_need_do_not_exist(handmade: Any) -> None:
    heads = Heads(128, handmade.shape, (Modality.TEXT,), 0)
    assert [name for name, _ in heads.named_parameters()] == ["text.weight"]
    assert heads.of(Modality.IMAGE) is None
    assert list(Heads(128, handmade.shape, (), 0).parameters()) == []


def test_initial_values_do_not_depend_on_the_other_heads(handmade: Any) -> None:
    one = Heads(128, handmade.shape, (Modality.AUDIO,), 4)
    all_of_them = Heads(128, handmade.shape, list(Modality), 4)
    assert torch.equal(one.get_parameter("audio.weight"), all_of_them.get_parameter("audio.weight"))


def test_a_modality_without_a_slice_is_refused() -> None:
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=8)
    with pytest.raises(ValueError, match="Heads: video has no live slice in the batch's shape"):
        Heads(128, shape, (Modality.VIDEO,), 0)
