"""The trainer on one process: every objective learns; splitting, skipping, refusing, embedding, accumulating and ordering as promised."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.model.config import Choices, Contrastive, LateInteraction, OptimizerConfig, Schedule, TrainerConfig
from treadle.model.statistics import TrainerStepStats
from treadle.model.trainer import Trainer
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import AudioShape, BatchShape, ImageShape, LateInteractionSide, Modality, Negatives, Objective, PairLossForm

Tiny = Callable[..., TrainerConfig]
Pairs = Callable[[list[int]], StepItems]
Packed = Callable[[StepItems], PackedBatch]

JOINT = {"objective": Objective.JOINT, "late_interaction": LateInteraction(weight=0.3, width=16), "choices": Choices(weight=0.5)}
NAMED = Contrastive(negatives=Negatives.NAMED)


def choosers(count: int) -> StepItems:
    """Texts that end in a question whose answer their content tells."""
    texts = [f"{'ab'[i % 2]} item {i}: ".encode() for i in range(count)]
    targets = [[0.9, 0.1] if i % 2 == 0 else [0.1, 0.9] for i in range(count)]
    return StepItems([Modality.TEXT] * count, texts, ids=range(7000, 7000 + count), choices=[b"AB"] * count, choice_targets=targets)


def losses(config: TrainerConfig, batches: list[PackedBatch], steps: int) -> list[float]:
    with Trainer(config) as trainer:
        return [trainer.step(batches[i % len(batches)]).stats.loss for i in range(steps)]


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"objective": Objective.MASKED}, 0.75),
        ({"objective": Objective.CONTRASTIVE}, 0.5),
        (
            {
                "objective": Objective.CONTRASTIVE,
                "contrastive": Contrastive(pair_loss=PairLossForm.RANKED, matryoshka_dimensions=(32, 128)),
            },
            0.7,
        ),
        ({"objective": Objective.CONTRASTIVE, "contrastive": Contrastive(pair_loss=PairLossForm.BALANCED)}, 0.9),
        (JOINT, 0.85),
    ],
    ids=["masked", "sigmoid", "ranked", "balanced", "joint"],
)
def test_every_objective_learns(changes: dict[str, object], share: float, tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batches = [packed(pairs(list(range(first, first + 8)))) for first in (0, 8)]
    seen = losses(tiny(**changes), batches, 40)
    assert all(math.isfinite(x) for x in seen)
    assert np.mean(seen[-4:]) < share * np.mean(seen[:4]), seen


def test_choices_learn(tiny: Tiny) -> None:
    batch = Packer(tiny().batch).pack(choosers(16))
    config = tiny(objective=Objective.CONTRASTIVE, choices=Choices(weight=1.0), schedule=Schedule(steps=60, learning_rate=3e-3))
    with Trainer(config) as trainer:
        seen = [trainer.step(batch).stats for _ in range(60)]
    # The choices term starts near log 2 plus what the start adds and ends near the targets' own entropy, 0.325.
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert seen[0].choices_loss > 0.5
    assert entropy <= seen[-1].choices_loss + 1e-6 < 0.45


def test_statistics_add_up(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    config = tiny(**JOINT)
    with Trainer(config) as trainer:
        result = trainer.step(packed(pairs([0, 1, 2, 3])))
        stats = result.stats
    assert result.stats is stats
    assert (stats.step, stats.dropped, stats.skipped, stats.truncated) == (1, 0, 0, 0)
    assert stats.learning_rate == pytest.approx(2e-3 / 3)
    parts = (
        stats.masked_text_loss + stats.masked_image_loss + stats.contrastive_loss + stats.late_interaction_loss + 0.5 * stats.choices_loss
    )
    assert stats.loss == pytest.approx(parts, rel=1e-6)
    assert stats.masked_audio_loss == stats.masked_video_loss == stats.choices_loss == 0
    assert stats.masked_text_loss > 3 and stats.masked_image_loss > 0.3 and stats.late_interaction_loss > 0
    assert stats.gradient_norm > 0


@pytest.mark.parametrize("changes", [{"objective": Objective.MASKED}, {**JOINT, "contrastive": NAMED}], ids=["masked", "joint"])
def test_splitting_into_micro_batches_changes_nothing(changes: dict[str, object], tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    # Adam divides by a gradient's size, so that rounding grows with the rate: a low one, and an eps above the rounding.
    config = tiny(**changes, optimizer=OptimizerConfig(eps=1e-6), schedule=Schedule(steps=50, learning_rate=2e-4, warmup_steps=1))
    whole, halves = packed(pairs(list(range(6)))), [packed(pairs([0, 1])), packed(pairs([2, 3, 4, 5]))]
    seen: list[tuple[list[TrainerStepStats], dict[str, torch.Tensor]]] = []
    for batch in (whole, halves, halves[::-1]):
        with Trainer(config) as trainer:
            seen.append(([trainer.step(batch).stats for _ in range(3)], trainer.network.state_dict()))
    for stats, state in seen[1:]:
        for ours, expected in zip(stats, seen[0][0], strict=True):
            assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
            assert ours.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, seen[0][1][name], rtol=0, atol=1e-5)


def test_ambient_pairs_are_those_of_a_micro_batch(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    config = tiny(objective=Objective.CONTRASTIVE)
    halves = [packed(pairs([0, 1])), packed(pairs([2, 3]))]
    with Trainer(config) as trainer:
        split = trainer.step(halves).stats.contrastive_loss
    alone = []
    for half in halves:
        with Trainer(config) as trainer:
            alone.append(trainer.step(half).stats.contrastive_loss)
    # Four anchors in each: the world mean of the split step is the mean of the two.
    assert split == pytest.approx(sum(alone) / 2, rel=1e-6)


def test_accumulating_equals_a_list(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    config = tiny(**JOINT)
    first, second, third = (packed(pairs([2 * i, 2 * i + 1])) for i in range(3))
    with Trainer(config) as listed, Trainer(config) as accumulated:
        for _ in range(2):
            a = listed.step([first, second, third]).stats
            accumulated.accumulate(first)
            accumulated.accumulate([second])
            b = accumulated.step(third).stats
            assert a.step == b.step
            assert a.loss == pytest.approx(b.loss, rel=1e-6)
            assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)
            assert a.masked_text_loss == pytest.approx(b.masked_text_loss, rel=1e-6)
        for (name, x), (_, y) in zip(listed.network.state_dict().items(), accumulated.network.state_dict().items(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5, msg=name)
        # Late interaction is RANKED here: its bias cancels, and not even rounding moves it.
        assert listed.network.token_temperatures is not None and not listed.network.token_temperatures.bias_G.any()


def test_two_runs_are_equal_bit_for_bit(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batch = packed(pairs([0, 1, 2, 3]))
    states = []
    for _ in range(2):
        with Trainer(tiny(**JOINT)) as trainer:
            for _ in range(3):
                trainer.step(batch)
            states.append(trainer.network.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_no_items_take_part_with_nothing(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    with Trainer(tiny(**JOINT)) as trainer:
        empty: list[PackedBatch | list[PackedBatch] | None] = [None, [], packed(StepItems([], []))]
        for nothing in empty:
            stats = trainer.step(nothing).stats
            assert (stats.loss, stats.gradient_norm, stats.skipped) == (0, 0, 0)
        assert trainer.step(packed(pairs([0]))).stats.step == 4


def test_single_and_ignored_items_give_no_nan(tiny: Tiny) -> None:
    alone = StepItems([Modality.TEXT], [b"x"])
    ignored = StepItems([0, 0], [b"one", b"two"], relations=Relations(ignore=Edges([0, 1, 2], [1, 0])))
    with Trainer(tiny(**JOINT)) as trainer:
        for items in (alone, ignored):
            stats = trainer.step(items).stats
            assert math.isfinite(stats.loss) and stats.contrastive_loss == 0 and stats.skipped == 0


def test_items_straight_in_equal_their_packed_batch(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    items = pairs([0, 1, 2])
    with Trainer(tiny(**JOINT)) as a, Trainer(tiny(**JOINT)) as b:
        assert a.step(items).stats == b.step(packed(items)).stats


def test_defaulted_ids_draw_apart_in_micro_batches(tiny: Tiny, packed: Packed) -> None:
    items = StepItems([Modality.TEXT] * 2, [b"the same text in both of the batches"] * 2)
    given = StepItems([Modality.TEXT] * 2, items.contents, ids=[0, 1])
    with Trainer(tiny()) as trainer:
        once = trainer.step(packed(items)).stats.loss
    with Trainer(tiny()) as trainer:
        twice = trainer.step([packed(items), packed(items)]).stats.loss
    with Trainer(tiny()) as trainer:
        same = trainer.step([packed(given), packed(given)]).stats.loss
    assert same == pytest.approx(once, rel=1e-6)
    assert twice != pytest.approx(once, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_embeddings_come_in_item_order_with_nan_for_dropped_items(dtype: torch.dtype, tiny: Tiny) -> None:
    # Three texts fill three of the four rows; the one that asks for two rows' worth is cut, the last bag finds no room.
    texts = [b"a" * 63, b"b" * 63, b"c" * 63, b"d" * 63, b"e" * 63]
    items = StepItems([Modality.TEXT] * 5, texts)
    config = tiny(objective=Objective.CONTRASTIVE)
    with Trainer(config) as trainer:
        vectors = trainer.step(items, embeddings=dtype).embeddings
        untouched = trainer.step(items).embeddings
    assert vectors is not None and untouched is None
    assert vectors.shape == (5, 128) and vectors.dtype == dtype and not vectors.requires_grad
    dropped = vectors.isnan().all(dim=1)
    assert int(dropped.sum()) == 1
    norms = vectors[~dropped].double().norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-5)


def test_embeddings_are_those_before_the_update(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batch = packed(pairs([0, 1]))
    config = tiny(objective=Objective.CONTRASTIVE)
    with Trainer(config) as trainer:
        two = trainer.step([batch, packed(pairs([2]))], embeddings=torch.float32).embeddings
    with Trainer(config) as trainer:
        one = trainer.step(batch, embeddings=torch.float32).embeddings
        later = trainer.step(batch, embeddings=torch.float32).embeddings
    assert one is not None and two is not None and later is not None
    assert two.shape == (6, 128)
    torch.testing.assert_close(two[:4], one, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one, later, atol=1e-4)


def test_embeddings_must_be_a_floating_type(tiny: Tiny, pairs: Pairs) -> None:
    with Trainer(tiny()) as trainer, pytest.raises(ValueError, match="must be a floating torch type"):
        trainer.step(pairs([0]), embeddings=torch.int32)


def test_truncated_and_dropped_are_counted_since_the_last_read(tiny: Tiny) -> None:
    long = StepItems([Modality.TEXT] * 5, [b"x" * 100] * 5)
    with Trainer(tiny()) as trainer:
        first, second, third = (trainer.step(long) for _ in range(3))
        # 63 bytes fit a row, four rows hold four texts: one is dropped in every step.
        assert (first.stats.truncated, first.stats.dropped) == (4, 1)
        assert (third.stats.truncated, third.stats.dropped) == (4, 2)
        assert second.stats.dropped == 0


def _spoil(batch: PackedBatch, segment: int) -> None:
    samples = batch.payload(segment)
    assert samples.dtype == np.float32
    samples[3] = np.nan


def test_a_non_finite_step_is_skipped_and_explained(tiny: Tiny, pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    import io
    import wave

    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((1000 * np.sin(np.arange(800))).astype("<i2").tobytes())
    items = StepItems([Modality.TEXT, Modality.AUDIO], [b"a tone", out.getvalue()], ids=[41, 42])
    config = tiny(objective=Objective.JOINT)
    packer = Packer(config.batch)
    good, bad = packer.pack(items), packer.pack(items)
    _spoil(bad, int(np.flatnonzero(bad.modality[: bad.segments] == Modality.AUDIO)[0]))
    with Trainer(config) as trainer:
        trainer.step(good)
        before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
        result = trainer.step(bad)
        assert all(torch.equal(value, before[name]) for name, value in trainer.network.state_dict().items())
        with caplog.at_level(logging.WARNING):
            stats = result.stats
        assert stats.skipped == 1 and stats.step == 2 and not math.isfinite(stats.loss)
        [told] = stats.refusals
        assert "step 2: update refused" in told and "audio" in told and "1 of 2 items (42)" in told and "text" not in told
        assert told in caplog.text
        later = trainer.step(good).stats
        assert (later.step, later.skipped, later.refusals) == (3, 0, ())
        assert math.isfinite(later.loss)
        assert later.learning_rate == pytest.approx(2e-3)


def test_unread_refusals_are_told_later(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    with Trainer(tiny()) as trainer:
        batch = packed(pairs([0, 1]))
        parameter = trainer.network.tower.norm
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[0] = torch.inf
        trainer.step(batch)
        trainer.step(batch)
        with torch.no_grad():
            parameter.copy_(kept)
        stats = trainer.step(batch).stats
    assert stats.skipped == 2 and len(stats.refusals) == 2 and "step 1" in stats.refusals[0]


def test_submitted_steps_run_in_order(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batches = [packed(pairs([i, i + 1])) for i in range(5)]
    with Trainer(tiny(**JOINT)) as trainer:
        blocking = [trainer.step(b).stats for b in batches]
    with Trainer(tiny(**JOINT)) as trainer:
        deferred = [trainer.submit(b) for b in batches]
        results = [d.result() for d in deferred]
        assert all(d.done() for d in deferred)
        assert [r.stats for r in results] == blocking
        assert [r.step for r in results] == [1, 2, 3, 4, 5]


def test_an_error_comes_with_the_result_and_leaves_the_trainer_usable(tiny: Tiny, pairs: Pairs) -> None:
    with Trainer(tiny()) as trainer:
        broken = trainer.submit(StepItems([Modality.IMAGE], [b"no picture"]))
        fine = trainer.submit(pairs([0]))
        with pytest.raises(Exception, match="item 0"):
            broken.result()
        assert fine.result().stats.step == 1


def test_a_parameter_that_nothing_used_still_takes_part(tiny: Tiny) -> None:
    texts = StepItems([Modality.TEXT] * 2, [b"one text", b"another"])
    with Trainer(tiny(**JOINT)) as trainer:
        trainer.step(texts)
        for name, parameter in trainer.network.named_parameters():
            assert parameter.grad is not None, name
        image_head = trainer.network.heads.of(Modality.IMAGE)
        assert image_head is not None and image_head.weight.grad is not None and not image_head.weight.grad.any()


def test_temperatures_stay_below_their_bound_and_can_come_back(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    config = tiny(
        objective=Objective.CONTRASTIVE,
        contrastive=Contrastive(inverse_temperature=100.0, bias=-10.0, temperature_groups=1),
        optimizer=OptimizerConfig(max_gradient_norm=0),
        schedule=Schedule(steps=100, learning_rate=0.05, warmup_steps=1),
    )
    bound = math.log(100)
    with Trainer(config) as trainer:
        temperatures = trainer.network.temperatures
        assert temperatures is not None
        for _ in range(5):
            trainer.step(packed(pairs([0, 1, 2, 3])))
            assert float(temperatures.log_scale_G.detach()[0]) <= bound + 1e-6
        # Attracting only what repels pulls the scale down from the bound.
        assert float(temperatures.log_scale_G.detach()[0]) < bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows_per_device": 5}, "max_rows_per_device is 5, the trainer's 4"),
        ({"max_columns_per_row": 65}, "max_columns_per_row is 65, the trainer's 64"),
        ({"max_segments_per_device": 33, "max_bags_per_device": 32}, "max_segments_per_device is 33, the trainer's 32"),
        ({"max_choices_per_item": 5}, "max_choices_per_item is 5, the trainer's 4"),
        ({"image": ImageShape(patch_side=16, channels=3)}, "image slice is .*patch_side=16.*, the trainer's .*patch_side=8"),
        ({"audio": AudioShape(chunk_samples=80)}, "audio slice is .*sample_rate=16000"),
    ],
)
def test_a_batch_beyond_the_capacities_is_refused(changes: dict[str, object], message: str, tiny: Tiny, shape: BatchShape) -> None:
    batch = Packer(replace(shape, **changes)).pack(StepItems([Modality.TEXT], [b"x"]))  # type: ignore[arg-type]  # fields by name
    with Trainer(tiny()) as trainer:
        with pytest.raises(ValueError, match=message):
            trainer.step(batch)
        assert trainer.steps_done == 0


def test_edges_groups_and_token_capacities_are_refused(tiny: Tiny, shape: BatchShape, pairs: Pairs) -> None:
    batch = Packer(shape).pack(pairs([0, 1, 2]))
    many = tiny(objective=Objective.CONTRASTIVE, contrastive=Contrastive(max_edges_per_device=4))
    with Trainer(many) as trainer, pytest.raises(ValueError, match=r"names 6 attract edges, contrastive.max_edges_per_device is 4"):
        trainer.step(batch)
    grouped = Packer(shape).pack(StepItems([0, 0], [b"x", b"y"], temperature_groups=[0, 2]))
    with Trainer(tiny(objective=Objective.CONTRASTIVE, contrastive=Contrastive(temperature_groups=2))) as trainer:
        with pytest.raises(ValueError, match=r"temperature group 2, contrastive.temperature_groups is 2"):
            trainer.step(grouped)
    with Trainer(tiny()) as trainer:
        # A masked run reads no temperatures.
        trainer.step(grouped)
    sided = Packer(shape).pack(StepItems([0, 0], [b"query", b"document"], sides=[LateInteractionSide.QUERY, LateInteractionSide.DOCUMENT]))
    for late, message in (
        (LateInteraction(weight=1.0, max_query_tokens_per_device=4), r"holds 5, late_interaction.max_query_tokens_per_device is 4"),
        (LateInteraction(weight=1.0, max_document_tokens_per_device=4), r"holds 8, late_interaction.max_document_tokens_per_device is 4"),
    ):
        with Trainer(tiny(late_interaction=late)) as trainer, pytest.raises(ValueError, match=message):
            trainer.step(sided)


def test_a_closed_trainer_says_so(tiny: Tiny, tmp_path: Path) -> None:
    trainer = Trainer(tiny())
    trainer.close()
    for call in (lambda: trainer.step(None), lambda: trainer.save(tmp_path / "a")):
        with pytest.raises(RuntimeError, match="this trainer was closed"):
            call()


def test_a_device_must_be_one(tiny: Tiny) -> None:
    for device in (True, 3, "abacus"):
        with pytest.raises(ValueError, match=r"TrainerConfig.device is .* must be a device"):
            Trainer(tiny(device=device))


def test_wrong_types_are_refused(tiny: Tiny) -> None:
    with Trainer(tiny()) as trainer, pytest.raises(ValueError, match="takes a PackedBatch, a list of them"):
        trainer.step(["a text"])  # type: ignore[list-item]  # what a user may try


def test_fit_ends_with_the_schedule_the_stream_or_the_callback(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batches = [packed(pairs([i])) for i in range(6)]
    with Trainer(tiny(schedule=Schedule(steps=4))) as trainer:
        last = trainer.fit(batches)
        assert last is not None and last.step == trainer.steps_done == 4
        assert trainer.fit(batches) is None
    with Trainer(tiny()) as trainer:
        seen: list[int] = []
        trainer.fit(batches, on_step=lambda result: seen.append(result.step))
        assert seen == [1, 2, 3, 4, 5, 6]
    with Trainer(tiny()) as trainer:
        last = trainer.fit(batches, on_step=lambda result: result.step < 3)
        assert last is not None and last.step == 3


def test_bf16_computes_on_fp32_masters(tiny: Tiny, pairs: Pairs, packed: Packed) -> None:
    batches = [packed(pairs(list(range(8))))]
    full, half = (losses(tiny(**JOINT, precision=p), batches, 12) for p in ("fp32", "bf16"))
    assert half[0] == pytest.approx(full[0], rel=0.02) and half[0] != full[0]
    assert half[-1] < half[0]
    with Trainer(tiny(**JOINT, precision="bf16")) as trainer:
        trainer.step(batches[0])
        assert all(p.dtype == torch.float32 for p in trainer.network.parameters())
