"""Configurations: what is derived, what is refused, and their record in JSON."""

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from treadle.model.config import Choices, Contrastive, LateInteraction, Masking, OptimizerConfig, Schedule, TrainerConfig
from treadle.model.config_json import geometry, geometry_differences, to_json, trainer_config_from_json
from treadle.shape import AudioShape, BatchShape, ImageShape, Negatives, Objective, PairLossForm

BATCH = BatchShape(max_rows_per_device=4, max_segments_per_device=16, max_columns_per_row=64, max_choices_per_item=4)


def _config(**changes: object) -> TrainerConfig:
    fields: dict[str, object] = {"depth": 1, "hidden": 128, "batch": BATCH, "schedule": Schedule(steps=10)}
    return TrainerConfig(**(fields | changes))  # type: ignore[arg-type]  # fields are given by name


def test_masking_derives_what_is_zero() -> None:
    shown = Masking(image_mask_ratio=0.5).resolved()
    assert (shown.token_mask_probability, shown.token_mean_span, shown.image_mask_ratio) == (0.15, 16.0, 0.5)
    assert (shown.replace_fraction, shown.random_fraction, shown.video_mask_ratio, shown.text_weight) == (0.8, 0.1, 0.75, 1.0)


def test_random_bytes_take_what_a_given_replacement_leaves() -> None:
    shown = Masking(replace_fraction=1.0).resolved()
    assert (shown.replace_fraction, shown.random_fraction) == (1.0, 0.0)
    assert shown.resolved() == shown
    assert Masking(replace_fraction=0.95).resolved().random_fraction == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("form", "start"),
    [
        (PairLossForm.DERIVED, (10.0, -10.0)),
        (PairLossForm.SIGMOID, (10.0, -10.0)),
        (PairLossForm.BALANCED, (1.0, 0.0)),
        (PairLossForm.RANKED, (1.0, 0.0)),
    ],
)
def test_contrastive_starts_as_its_form_wants(form: PairLossForm, start: tuple[float, float]) -> None:
    shown = Contrastive(pair_loss=form).resolved(256)
    assert (shown.inverse_temperature, shown.bias) == start
    assert shown.matryoshka_dimensions == (256,)


def test_late_interaction_derives_from_the_batch() -> None:
    shown = LateInteraction(weight=1.0).resolved(BATCH.resolved())
    assert (shown.width, shown.max_query_span, shown.pair_loss) == (128, 64, PairLossForm.RANKED)
    assert (shown.max_query_tokens_per_device, shown.max_documents_per_device, shown.max_document_tokens_per_device) == (64 * 16, 16, 256)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Masking(token_mask_probability=1.5), "token_mask_probability is 1.5"),
        (lambda: Masking(replace_fraction=0.95, random_fraction=0.1), "add up to more than 1"),
        (lambda: Masking(text_weight=10**400), "text_weight is a number of no use: it must lie between 0"),
        (lambda: Contrastive(ambient_repulsion_weight=1e39), "must lie between 0 and 3.4"),
        (lambda: Contrastive(matryoshka_dimensions=cast(Any, 64)), "matryoshka_dimensions is 64: it must be a tuple"),
        (lambda: _config(resume=True), "resume is True: it must be the path"),
        (lambda: _config(init=b"x"), "init is b'x': it must be the path"),
        (lambda: _config(mesh="here"), "mesh is 'here': it must be a Mesh"),
        (lambda: _config(progress=3), "progress is 3: it must be called"),
        (lambda: _config(precision=["fp32"]), "precision is"),
        (lambda: Contrastive(matryoshka_dimensions=(64, 32)), "strictly ascending"),
        (lambda: Contrastive(matryoshka_dimensions=(12,)), "multiple of 8"),
        (lambda: Contrastive(inverse_temperature=float("nan")), "finite number"),
        (lambda: LateInteraction(width=12), "multiple of 8"),
        (lambda: Choices(weight=-1), "Choices.weight is -1"),
        (lambda: OptimizerConfig(beta1=1), "beta1 is 1"),
        (lambda: OptimizerConfig(eps=0), "eps is 0"),
        (lambda: _config(hidden=100), "multiple of 128|between 128"),
        (lambda: _config(hidden=192), "multiple of 128"),
        (lambda: _config(depth=0), "depth is 0"),
        (lambda: _config(seed=-1), "seed is -1"),
        (lambda: _config(resume="a", init="b"), "name one"),
        (lambda: _config(precision="fp16"), "precision is 'fp16'"),
        (lambda: _config(choices=Choices(weight=1), batch=replace(BATCH, max_choices_per_item=0)), "max_choices_per_item is 0"),
        (lambda: _config(objective=Objective.CONTRASTIVE, contrastive=Contrastive(matryoshka_dimensions=(256,))), "exceed hidden"),
        (lambda: _config(batch=None), "batch is None"),
    ],
)
def test_refusals(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()


def test_numpys_numbers_become_pythons_own() -> None:
    """They come out of tables and sweeps; kept as they are they would overflow, and have no JSON form."""
    config = _config(
        depth=np.int32(2),
        hidden=np.uint8(128),
        batch=replace(BATCH, max_columns_per_row=np.uint8(64), image=ImageShape(patch_side=np.int64(8))),  # type: ignore[arg-type]
        schedule=Schedule(steps=np.int64(10), learning_rate=np.float32(0.5)),  # type: ignore[arg-type]
        contrastive=Contrastive(matryoshka_dimensions=(np.int16(32), np.int16(128)), bias=np.float64(1.5)),  # type: ignore[arg-type]
        objective=Objective.CONTRASTIVE,
        seed=np.uint64(2**64 - 1),
    )
    assert [type(x) for x in (config.depth, config.hidden, config.seed, config.batch.max_columns_per_row)] == [int] * 4
    assert [type(x) for x in config.contrastive.matryoshka_dimensions] == [int, int]
    assert type(config.schedule.learning_rate) is float
    assert config.batch.resolved().positions == 4 * 64
    assert trainer_config_from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("value", [np.bool_(True), np.float64(2.0), "2", None])
def test_what_is_no_integer_stays_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.depth is .*: it must be an integer"):
        _config(depth=value)


def test_json_keeps_every_field() -> None:
    config = _config(
        objective=Objective.JOINT,
        batch=replace(BATCH, image=ImageShape(patch_side=8), audio=AudioShape(chunk_samples=80)),
        contrastive=Contrastive(matryoshka_dimensions=(32, 128), negatives=Negatives.NAMED, pair_loss=PairLossForm.RANKED),
        late_interaction=LateInteraction(weight=0.5),
        optimizer=OptimizerConfig(beta2=0.99),
        precision="fp32",
        seed=2**64 - 1,
    )
    assert trainer_config_from_json(json.loads(json.dumps(to_json(config)))) == config


def test_json_leaves_a_process_out() -> None:
    assert to_json(_config(device="cpu", resume="x", progress=lambda done, total: None)) == to_json(_config())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"wings": 2}, "unknown fields wings"),
        ({"depth": -1}, "depth is -1"),
        ({"batch": 3}, "batch is 3"),
        ({"objective": "flying"}, "flying"),
    ],
)
def test_json_refuses_what_it_does_not_know(edit: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_config_from_json(to_json(_config()) | edit)


def test_json_refuses_missing_fields() -> None:
    record = to_json(_config())
    del record["depth"]
    with pytest.raises(ValueError, match="depth"):
        trainer_config_from_json(record)


def test_geometry_compares_what_counts() -> None:
    base = _config()
    assert geometry_differences(base, _config(schedule=Schedule(steps=99), masking=Masking(text_weight=2.0))) == []
    assert geometry_differences(base, _config(depth=2)) == ["depth is 2, the checkpoint has 1"]
    assert geometry_differences(base, _config(seed=1)) == ["seed is 1, the checkpoint has 0"]
    live = _config(batch=replace(BATCH, image=ImageShape(patch_side=8)))
    [phrase] = geometry_differences(base, live)
    assert phrase.startswith("batch.image is {'patch_side': 8") and phrase.endswith("the checkpoint has off")
    late = geometry_differences(base, _config(late_interaction=LateInteraction(weight=1.0)))
    assert late == [
        "late_interaction.width is 128, the checkpoint has off",
        "contrastive.temperature_groups is 1, the checkpoint has off",
    ]
    # What a masked run does not read does not bind it.
    assert geometry(base) == geometry(_config(contrastive=Contrastive(matryoshka_dimensions=(32,))))
    wide = replace(BATCH, image=ImageShape(patch_side=16))
    assert geometry_differences(base, live, only=("batch.image",)) == []
    assert len(geometry_differences(live, _config(batch=wide), only=("batch.image",))) == 1
