"""What the device draws and counts at fixed sizes against the path of free sizes: the same lists, rows, places and denominators."""

from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels.tape_reference import Patches
from treadle.model.config import Choices, Contrastive, LateInteraction, Masking, Schedule, TrainerConfig
from treadle.model.contrastive import Candidates
from treadle.model.corruption import MASK_BYTE, corrupt
from treadle.model.device_batch import BatchPlan, BatchWriter, DeviceBatch
from treadle.model.device_clock import DeviceClock
from treadle.model.device_corruption import DeviceCorruption, Hidden, listed
from treadle.model.device_counts import term_counts
from treadle.model.embedding import Embedding, payload_places
from treadle.model.layout import MASK, PREFIX, BatchLayout
from treadle.model.objectives import MicroBatch, Objectives
from treadle.pipeline import Edges, PackedBatch, Packer, Relations, StepItems
from treadle.shape import BatchShape, Modality, Negatives, Objective, PairLossForm

SEED = 0x1234_5678_9ABC_DEF0
MEDIA = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)


def settled(config: TrainerConfig, batch: PackedBatch) -> tuple[DeviceBatch, BatchLayout]:
    """The batch in a buffer that held something else before."""
    plan = BatchPlan(config, 1)
    buffer = torch.full((plan.bytes,), 255, dtype=torch.uint8)
    layout = BatchLayout.from_batch(batch, "cpu")
    BatchWriter(plan, buffer).write(batch, layout, [layout.group_S.tolist()], 0)
    return DeviceBatch(plan, buffer), layout


def config_of(shape: BatchShape, **changes: Any) -> TrainerConfig:
    return TrainerConfig(depth=1, hidden=128, batch=shape, schedule=Schedule(steps=10), seed=SEED, device="cpu", **changes)


def held(list_N: Tensor, positions: int) -> Tensor:
    """A list without its padding, which is all at its end."""
    count = int((list_N < positions).sum())
    assert bool((list_N[count:] == positions).all())
    return list_N[:count]


@pytest.mark.parametrize("reversed_rows", [False, True])
@pytest.mark.parametrize(
    "masking",
    [
        Masking(),
        Masking(token_mask_probability=0.9, token_mean_span=2.5, replace_fraction=0.3, random_fraction=0.6, image_mask_ratio=0.1),
        Masking(token_mask_probability=1.0, token_mean_span=1.0, video_mask_ratio=0.01, audio_mask_ratio=0.5),
    ],
)
def test_the_draws_of_the_free_path(handmade: Any, masking: Masking, reversed_rows: bool) -> None:
    """Every list of every modality over three steps, in a batch whose segments lie in their order and in one where they do not."""
    segments = handmade.mixed()
    if reversed_rows:
        names = segments[0].__dataclass_fields__
        segments = [type(s)(**({name: getattr(s, name) for name in names} | {"row": 5 - s.row})) for s in reversed(segments)]
    batch = handmade.batch(segments)
    device_batch, layout = settled(config_of(batch.shape, masking=masking), batch)
    corruption, clock = DeviceCorruption(device_batch, SEED), DeviceClock(Schedule(steps=10), torch.device("cpu"))
    clock.place(6)
    for step in (7, 8, 9):
        clock.advance()
        hidden, want = corruption.draw(clock.counter), corrupt(layout, masking, SEED, step)
        positions = device_batch.plan.positions
        covered = held(hidden.covered_N, positions)
        assert torch.equal(covered, want.covered_T)
        assert torch.equal(hidden.target_N[: len(covered)], want.target_T) and bool((hidden.target_N[len(covered) :] == -1).all())
        assert torch.equal(hidden.row_P[covered], want.shown_T)
        for modality in MEDIA:
            shown_N, hidden_N = Embedding.split(layout, want, modality)
            assert torch.equal(held(hidden.hidden[modality], positions), hidden_N)
            assert torch.equal(held(hidden.shown[modality], positions), shown_N)
        assert [int(n) for n in hidden.counts] == [want.hidden(m).numel() for m in Modality]
        check_rows(layout, hidden, device_batch)
        check_places(layout, hidden, device_batch)


def check_rows(layout: BatchLayout, hidden: Hidden, batch: DeviceBatch) -> None:
    """The table's rows where no draw decides."""
    row_P, used = hidden.row_P, layout.num_positions
    assert bool((row_P[used:] == batch.zero_row).all())
    prefix = layout.positions[PREFIX]
    assert torch.equal(row_P[prefix], MASK_BYTE + 1 + layout.modality_S[layout.segment_P[prefix]])
    assert bool((row_P[layout.positions[MASK]] == MASK_BYTE).all())
    for k, modality in enumerate(MEDIA):
        assert bool((row_P[held(hidden.shown[modality], batch.plan.positions)] == batch.zero_row).all())
        assert bool((row_P[held(hidden.hidden[modality], batch.plan.positions)] == MASK_BYTE + 1 + len(Modality) + k).all())


def check_places(layout: BatchLayout, hidden: Hidden, batch: DeviceBatch) -> None:
    for modality in MEDIA:
        found = batch.places(modality, hidden.shown[modality])
        shown_N = held(hidden.shown[modality], batch.plan.positions)
        want = payload_places(layout, modality, shown_N)
        for one, other in zip(found[: 5 if isinstance(found, Patches) else 2], want, strict=False):
            assert isinstance(one, Tensor) and isinstance(other, Tensor)
            assert torch.equal(one[: len(shown_N)], other) and not one[len(shown_N) :].any()


def test_a_contrastive_run_hides_nothing(handmade: Any) -> None:
    batch = handmade.batch(handmade.mixed())
    device_batch, layout = settled(config_of(batch.shape, objective=Objective.CONTRASTIVE), batch)
    hidden = DeviceCorruption(device_batch, SEED).draw(DeviceClock(Schedule(steps=10), torch.device("cpu")).counter)
    text = layout.positions[Modality.TEXT + 1]
    assert torch.equal(hidden.row_P[text], Embedding.shown(layout, None, text, text[:0]))
    for modality in MEDIA:
        assert torch.equal(held(hidden.shown[modality], device_batch.plan.positions), layout.positions[modality + 1])
    assert not any(int(n) for n in hidden.counts)


def test_lists_are_cut_at_their_capacity() -> None:
    flag_P = torch.tensor([True, False, True, True, False])
    assert listed(flag_P, 5).tolist() == [0, 2, 3, 5, 5]
    assert listed(flag_P, 2).tolist() == [0, 2]
    assert listed(torch.zeros(3, dtype=torch.bool), 2).tolist() == [3, 3]


SHAPE = BatchShape(max_rows_per_device=8, max_segments_per_device=24, max_columns_per_row=64, max_choices_per_item=4)


def related(count: int) -> PackedBatch:
    """Texts in groups, some of which attract, repel and ignore each other, some alone; two make a choice."""
    rows = [[i ^ 1] if i % 3 else [] for i in range(count)]
    repels = [[(i + 3) % count] if i % 2 else [] for i in range(count)]
    ignores = [[i ^ 1] if i % 4 == 1 else [] for i in range(count)]

    def edges(lists: list[list[int]]) -> Edges:
        offsets = [sum(len(held) for held in lists[:i]) for i in range(count + 1)]
        return Edges(offsets, [j for held in lists for j in held])

    items = StepItems(
        [Modality.TEXT] * count,
        [b"text number %d" % i for i in range(count)],
        bags=[0] * count,
        ids=[7 * i + 1 for i in range(count)],
        groups=[i % 5 for i in range(count)],
        sides=[i % 4 for i in range(count)],
        choices=[b"yn" if i in (3, 4) else b"" for i in range(count)],
        choice_targets=[(0.25, 0.75) if i in (3, 4) else () for i in range(count)],
        relations=Relations(attract=edges(rows), repel=edges(repels), ignore=edges(ignores)),
    )
    return Packer(SHAPE).pack(items)


@pytest.mark.parametrize("form", [PairLossForm.SIGMOID, PairLossForm.BALANCED, PairLossForm.RANKED])
@pytest.mark.parametrize("negatives", [Negatives.AMBIENT, Negatives.NAMED])
@pytest.mark.parametrize("count", [1, 2, 12, 18])
def test_denominators_are_those_of_the_free_path(form: PairLossForm, negatives: Negatives, count: int) -> None:
    batch = related(count) if count > 4 else Packer(SHAPE).pack(StepItems([Modality.TEXT] * count, [b"abc"] * count, groups=[3] * count))
    config = config_of(
        SHAPE,
        objective=Objective.JOINT,
        contrastive=Contrastive(pair_loss=form, negatives=negatives),
        late_interaction=LateInteraction(weight=1.0, width=16, pair_loss=form),
        choices=Choices(weight=1.0),
    )
    device_batch, layout = settled(config, batch)
    clock = DeviceClock(config.schedule, torch.device("cpu"))
    clock.advance()
    found = term_counts(device_batch, DeviceCorruption(device_batch, SEED).draw(clock.counter))
    drawn = corrupt(layout, config.masking, SEED, 1)
    candidates = Candidates(count=layout.num_segments, first=0, group_N=layout.group_S)
    want = Objectives(config).counts(MicroBatch(0, layout, drawn, candidates, [layout.num_segments]))
    assert found.tolist() == want.tolist()
    assert found.dtype == torch.float64 and (count < 12 or int((found > 0).sum()) == 4)


@pytest.mark.parametrize(
    "schedule",
    [Schedule(steps=1), Schedule(steps=7), Schedule(steps=40, warmup_steps=40), Schedule(steps=60, learning_rate=3e-3, warmup_steps=9),
     Schedule(steps=30, learning_rate=1e-3, min_learning_rate=1e-3, warmup_steps=1)],
)  # fmt: skip
def test_the_learning_rate_is_the_schedule_s(schedule: Schedule) -> None:
    """Every step of a run and some past its end; cosines of two libraries may differ in the last bit."""
    clock = DeviceClock(schedule, torch.device("cpu"))
    for step in range(1, schedule.steps + 5):
        clock.advance()
        assert int(clock.step) == step
        assert float(clock.learning_rate()) == pytest.approx(schedule.learning_rate_at(step), rel=1e-14, abs=1e-18)


def test_counters_are_taken_modulo_a_word() -> None:
    """Step 2^28 + 3 and purpose 2: (16 (2^28 + 3) + 2) mod 2^32 = 50."""
    clock = DeviceClock(Schedule(steps=1), torch.device("cpu"))
    clock.place(2**28 + 2)
    clock.advance()
    assert int(clock.counter(2)) == 50
