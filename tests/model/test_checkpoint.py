"""Checkpoints: going on bit for bit, saving beside further steps, and every way a file can be wrong."""

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from treadle.model.checkpoint import CheckpointMismatchError, RankState, fold_ranks, read_checkpoint
from treadle.model.checkpoint_folder import CheckpointFolder
from treadle.model.config import Choices, Contrastive, LateInteraction, Schedule, TrainerConfig
from treadle.model.statistics import StepResult
from treadle.model.storage_errors import (
    DamagedFileError,
    MissingFileError,
    NewerFormatError,
    TruncatedFileError,
    UnwritableFileError,
    WrongFormatError,
)
from treadle.model.storage_file import read_tensors, write_tensors
from treadle.model.trainer import Stopped, Trainer
from treadle.pipeline import PackedBatch, ShardStream, StepItems
from treadle.shape import BatchShape, ImageShape, Objective

Tiny = Callable[..., TrainerConfig]
Pairs = Callable[[list[int]], StepItems]
Packed = Callable[[StepItems], PackedBatch]

JOINT = {"objective": Objective.JOINT, "late_interaction": LateInteraction(weight=0.3, width=16), "choices": Choices(weight=0.5)}


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    runner = trainer._runner
    state = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    return state | {
        "first": runner.optimizer.first.clone(),
        "second": runner.optimizer.second.clone(),
        "updates": runner.optimizer.updates.clone(),
    }


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture
def batches(pairs: Pairs, packed: Packed) -> list[PackedBatch]:
    return [packed(pairs([i, i + 3])) for i in range(8)]


@pytest.fixture
def saved(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> Path:
    """A checkpoint of a joint run after one step."""
    path = tmp_path / "saved.safetensors"
    with Trainer(tiny(**JOINT)) as trainer:
        trainer.step(batches[0])
        trainer.save(path)
    return path


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside"])
def test_a_resumed_run_goes_on_bit_for_bit(wait: bool, tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    config = tiny(**JOINT)
    path = tmp_path / "c.safetensors"
    with Trainer(config) as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        saving = trainer.save(path, wait=wait)
        # Steps after the call must not reach the file.
        after = [trainer.step(batch).stats for batch in batches[3:]]
        saving.result()
        end = everything(trainer)
    with Trainer(replace(config, resume=path)) as resumed:
        assert resumed.steps_done == 3
        assert [resumed.step(batch).stats for batch in batches[3:]] == after
        assert_same(everything(resumed), end)


def test_an_open_window_is_resumed_bit_for_bit(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    config = tiny(**JOINT)
    path = tmp_path / "c.safetensors"
    with Trainer(config) as trainer:
        trainer.step(batches[0])
        trainer.accumulate(batches[1])
        trainer.accumulate(batches[2])
        trainer.save(path)
        trainer.accumulate(batches[3])
        stats = trainer.step(batches[4]).stats
        end = everything(trainer)
    with Trainer(replace(config, resume=path)) as resumed:
        resumed.accumulate(batches[3])
        assert resumed.step(batches[4]).stats == stats
        assert_same(everything(resumed), end)


def _shards(folder: Path, pairs: Pairs) -> str:
    for shard in range(2):
        with tarfile.open(folder / f"pairs-{shard}.tar", "w") as file:
            for seed in range(20 * shard, 20 * shard + 20):
                items = pairs([seed])
                for extension, item in (("txt", 0), ("png", 1)):
                    content = bytes(items.content(item))
                    member = tarfile.TarInfo(f"{seed:03}.{extension}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return str(folder / "pairs-{0..1}.tar")


def test_a_stream_goes_on_where_the_trainer_was(tmp_path: Path, tiny: Tiny, pairs: Pairs, shape: BatchShape) -> None:
    sources = _shards(tmp_path, pairs)
    path = tmp_path / "c.safetensors"
    config = tiny(objective=Objective.JOINT)
    numbers: list[float] = []

    def note(result: StepResult) -> None:
        numbers.append(result.stats.loss)

    with Trainer(config) as trainer, ShardStream(sources, shape, seed=3, lanes=4, shuffle=8, epochs=3, threads=1) as stream:
        trainer.fit(stream, on_step=note)
        end = everything(trainer)
    whole, numbers = numbers, []
    assert len(whole) > 6
    with Trainer(config) as trainer, ShardStream(sources, shape, seed=3, lanes=4, shuffle=8, epochs=3, threads=1) as stream:

        def stop(result: StepResult) -> bool:
            note(result)
            return result.step < 4

        trainer.fit(stream, on_step=stop)
        trainer.save(path)
    resumed = Trainer(replace(config, resume=path))
    with resumed, ShardStream(sources, shape, seed=3, lanes=4, shuffle=8, epochs=3, threads=1) as stream:
        assert resumed.stream_state is not None
        stream.load_state(resumed.stream_state)
        resumed.fit(stream, on_step=note)
        assert numbers == whole
        assert_same(everything(resumed), end)
        resumed.save(path, stream=stream)
        assert read_checkpoint(path).ranks[0].stream == stream.state.to_bytes()


def test_saving_changes_nothing(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    with Trainer(tiny(**JOINT)) as a, Trainer(tiny(**JOINT)) as b:
        for batch in batches[:3]:
            a.step(batch)
            b.step(batch)
            b.save(tmp_path / "c.safetensors", wait=False)
        assert_same(everything(a), everything(b))


def test_a_checkpoint_of_a_checkpoint_is_the_same_file(saved: Path, tmp_path: Path, tiny: Tiny) -> None:
    again = tmp_path / "again.safetensors"
    with Trainer(tiny(**JOINT, resume=saved)) as trainer:
        trainer.save(again)
    assert saved.read_bytes() == again.read_bytes()


def test_nothing_in_it_grows_with_steps(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    sizes = []
    with Trainer(tiny(**JOINT)) as trainer:
        for batch in batches:
            trainer.step(batch)
            trainer.save(tmp_path / "c.safetensors")
            sizes.append(os.path.getsize(tmp_path / "c.safetensors"))
    assert len(set(sizes)) == 1


def test_what_a_reader_finds(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        keys, metadata = set(file.keys()), file.metadata()
    assert {"updates", "counters", "weights.tower.norm", "moments.first.tower.norm", "moments.second.tower.norm"} <= keys
    assert {"weights.temperatures.log_scale_G", "weights.token_temperatures.bias_G", "weights.heads.text.weight"} <= keys
    record = json.loads(metadata["record"])
    assert (metadata["format"], metadata["format_version"], record["step"], len(record["ranks"])) == (
        "treadle.checkpoint",
        "1",
        1,
        1,
    )
    assert (metadata["step"], metadata["world_size"], json.loads(metadata["config"])) == ("1", "1", record["config"])
    assert record["config"]["hidden"] == 128 and record["versions"]["torch"] == torch.__version__
    assert record["groups"]["weights"] == record["groups"]["moments.first"]
    assert sorted(f"weights.{name}" for name in record["groups"]["weights"]) == sorted(key for key in keys if key.startswith("weights."))
    content = read_checkpoint(saved)
    assert content.step == 1 and float(content.updates) == 1.0


def test_drops_and_refusals_not_yet_told_are_told_after_a_resume(tmp_path: Path, tiny: Tiny) -> None:
    long = StepItems([0] * 5, [b"x" * 100] * 5)
    path = tmp_path / "c.safetensors"
    with Trainer(tiny()) as trainer:
        assert trainer.step(long).stats.dropped == 1
        trainer.step(long)
        trainer.save(path)
    with Trainer(tiny(resume=path)) as resumed:
        assert resumed.step(long).stats.dropped == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 2}, "depth is 2, the checkpoint has 1"),
        ({"hidden": 256}, "hidden is 256, the checkpoint has 128"),
        ({"seed": 5}, "seed is 5, the checkpoint has 0"),
        ({"objective": Objective.CONTRASTIVE}, "objective is contrastive, the checkpoint has joint"),
        ({"late_interaction": LateInteraction(weight=0.3, width=32)}, "late_interaction.width is 32, the checkpoint has 16"),
        (
            {"contrastive": Contrastive(matryoshka_dimensions=(64, 128))},
            r"matryoshka_dimensions is \[64, 128\], the checkpoint has \[128\]",
        ),
        ({"contrastive": Contrastive(temperature_groups=2)}, "temperature_groups is 2, the checkpoint has 1"),
    ],
)
def test_another_geometry_is_refused(changes: dict[str, object], message: str, saved: Path, tiny: Tiny) -> None:
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        Trainer(tiny(**(JOINT | changes), resume=saved))
    assert str(saved) in str(caught.value) and "init" in str(caught.value)


def test_another_slice_is_refused(saved: Path, tiny: Tiny, shape: BatchShape) -> None:
    other = replace(shape, image=ImageShape(patch_side=16, channels=3))
    with pytest.raises(CheckpointMismatchError, match=r"batch.image is .*16.*, the checkpoint has .*8"):
        Trainer(tiny(**JOINT, batch=other, resume=saved))


def test_the_rest_may_change(saved: Path, tiny: Tiny, shape: BatchShape, batches: list[PackedBatch]) -> None:
    larger = replace(shape, max_rows_per_device=6)
    config = tiny(**(JOINT | {"choices": Choices()}), batch=larger, schedule=Schedule(steps=500, learning_rate=1e-4), resume=saved)
    with Trainer(config) as trainer:
        stats = trainer.step(batches[1]).stats
        assert stats.step == 2 and stats.learning_rate == pytest.approx(1e-4 * 2 / 50)


def test_choices_may_be_switched_on(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    path = tmp_path / "c.safetensors"
    with Trainer(tiny(objective=Objective.CONTRASTIVE)) as trainer:
        trainer.step(batches[0])
        trainer.save(path)
    with Trainer(tiny(objective=Objective.CONTRASTIVE, choices=Choices(weight=1.0), resume=path)) as trainer:
        assert trainer.step(batches[1]).stats.step == 2
        trainer.save(path)
    with Trainer(tiny(objective=Objective.CONTRASTIVE, resume=path)) as trainer:
        assert trainer.steps_done == 2


def test_init_starts_another_run_from_the_weights(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    path = tmp_path / "c.safetensors"
    with Trainer(tiny(objective=Objective.MASKED, seed=1)) as trainer:
        for batch in batches[:4]:
            trainer.step(batch)
        trainer.save(path)
        weights = {name: value.clone() for name, value in trainer.network.tower.state_dict().items()}
    config = tiny(objective=Objective.CONTRASTIVE, contrastive=Contrastive(temperature_groups=3), init=path)
    with Trainer(config) as trainer:
        assert trainer.steps_done == 0 and trainer.stream_state is None
        for name, value in trainer.network.tower.state_dict().items():
            assert torch.equal(value, weights[name]), name
        assert trainer.network.temperatures is not None
        assert torch.allclose(trainer.network.temperatures.log_scale_G.detach().exp(), torch.tensor(10.0))
        assert not trainer._runner.optimizer.first.any()
        assert trainer.step(batches[0]).stats.step == 1
    with pytest.raises(CheckpointMismatchError, match="depth is 2, the checkpoint has 1"):
        Trainer(tiny(depth=2, init=path))


def test_progress_counts_tensors_on_both_ways(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "c.safetensors"
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    with Trainer(tiny()) as trainer:
        trainer.save(path, progress=lambda done, total: written.append((done, total)), progress_steps=4)
    with Trainer(tiny(resume=path, progress=lambda done, total: read.append((done, total)), progress_steps=3)):
        pass
    tensors = len(read_tensors(path)[0])
    assert len(written) == 4 and written[-1] == (tensors, tensors)
    assert len(read) == 3 and read[-1] == (tensors, tensors)


@pytest.mark.parametrize("last", [False, True])
def test_a_stopped_save_leaves_the_old_file(last: bool, saved: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    before = saved.read_bytes()

    def stop(done: int, total: int) -> bool:
        return done < (total if last else total // 2)

    with Trainer(tiny(**JOINT)) as trainer:
        trainer.step(batches[0])
        with pytest.raises(Stopped, match="was stopped after"):
            trainer.save(saved, progress=stop)
        trainer.step(batches[1])
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_stopped_resume_makes_no_trainer(saved: Path, tiny: Tiny) -> None:
    with pytest.raises(Stopped, match="resuming"):
        Trainer(tiny(**JOINT, resume=saved, progress=lambda done, total: False))


def test_wrong_arguments_of_a_save_are_refused(tmp_path: Path, tiny: Tiny) -> None:
    with Trainer(tiny()) as trainer:
        for given, message in (
            ({"progress_steps": -1}, "progress_steps is -1"),
            ({"progress": 3}, "progress is 3: it must be called"),
            ({"stream": 3}, "stream is 3: it must be a stream"),
        ):
            with pytest.raises(ValueError, match=message):
                trainer.save(tmp_path / "a", **given)  # type: ignore[arg-type]  # what a user may try
    assert not any(tmp_path.iterdir())


def test_a_failed_save_says_why_and_training_goes_on(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    with Trainer(tiny()) as trainer:
        with pytest.raises(UnwritableFileError, match="there is no folder"):
            trainer.save(tmp_path / "missing" / "c.safetensors")
        beside = trainer.save(tmp_path / "missing" / "c.safetensors", wait=False)
        with pytest.raises(UnwritableFileError, match="there is no folder"):
            beside.result()
        assert trainer.step(batches[0]).stats.step == 1
        trainer.save(tmp_path / "c.safetensors")


def test_wrong_files_are_refused(saved: Path, tmp_path: Path, tiny: Tiny) -> None:
    data = saved.read_bytes()
    bad = tmp_path / "bad.safetensors"

    def resume() -> None:
        Trainer(tiny(**JOINT, resume=bad))

    with pytest.raises(MissingFileError, match="there is no such file"):
        resume()
    for size in (0, 5, 100, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:size])
        with pytest.raises(TruncatedFileError):
            resume()
    flipped = bytearray(data)
    flipped[-1000] ^= 1
    bad.write_bytes(flipped)
    with pytest.raises(DamagedFileError, match="checksum"):
        resume()
    bad.write_bytes(struct.pack("<Q", 2**60) + data[8:])
    with pytest.raises(DamagedFileError, match="no safetensors file"):
        resume()
    tensors, metadata = read_tensors(saved)
    write_tensors(bad, tensors, metadata | {"format_version": "2"})
    with pytest.raises(NewerFormatError, match="format 2, this version reads up to 1"):
        resume()
    write_tensors(bad, tensors, {"format": "other"})
    with pytest.raises(WrongFormatError, match="holds other"):
        resume()


def test_edited_entries_are_refused_with_what_differs(saved: Path, tmp_path: Path, tiny: Tiny) -> None:
    tensors, metadata = read_tensors(saved)
    bad = tmp_path / "bad.safetensors"
    norm = tensors["weights.tower.norm"]
    edits: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"weights.tower.norm": None}, "weights.tower.norm is missing"),
        ({"weights.tower.norm": norm[:-1]}, r"weights.tower.norm has shape \[127\], this run's has \[128\]"),
        ({"weights.wings": norm}, "weights.wings is extra"),
        ({"weights.tower.norm": norm.double()}, "it must be float32"),
        ({"updates": None, "wings": norm}, "updates is missing; wings is extra"),
        ({"counters": tensors["counters"][:2]}, r"'counters' is torch.int64 \[2\]: it must be torch.int64 \[4\]"),
        ({"ranks.0.state.0": norm}, "bytes are kept in another type"),
        ({"ranks.0.state.0": None}, "ranks.0.state.0 is missing"),
    ]
    for changed, message in edits:
        merged = {name: value for name, value in (tensors | changed).items() if value is not None}
        write_tensors(bad, merged, metadata)
        with pytest.raises(ValueError, match=message):
            Trainer(tiny(**JOINT, resume=bad))


def test_edited_structures_are_refused(saved: Path, tmp_path: Path, tiny: Tiny) -> None:
    tensors, metadata = read_tensors(saved)
    bad = tmp_path / "bad.safetensors"
    record = json.loads(metadata["record"])
    part = record["ranks"][0]
    window = {"micro_batches": 1, "truncated": 0, "dropped": 0, "counts": ["0x1p+0"] * 7, "sums": ["0x1p+0"] * 7}
    edits: list[tuple[dict[str, object], str]] = [
        ({"ranks": []}, "holds a part for each rank"),
        ({"ranks": [part] * (2**17 + 1)}, "holds a part for each rank"),
        ({"ranks": [{}]}, "the part of rank 0 is malformed"),
        ({"ranks": [part | {"window": [1]}]}, "window of rank 0 is malformed"),
        ({"ranks": [part | {"window": window | {"counts": ["x"]}}]}, "'counts' is malformed"),
        ({"ranks": [part | {"window": window | {"sums": None}}]}, "'sums' is malformed"),
        ({"ranks": [part | {"window": window | {"micro_batches": -1}}]}, "'micro_batches' is -1"),
        ({"ranks": [part | {"window": window | {"sums": [], "counts": []}}]}, "holds other terms than this version has"),
        ({"ranks": [part | {"gradients": ["text.tower.norm"]}]}, "ranks.0.gradients.text.tower.norm is missing"),
        ({"ranks": [part | {"state": ["none"]}]}, "ranks.0.state.0 is extra"),
        ({"step": 2**61}, "'step' is"),
        ({"step": True}, "'step' is True"),
        ({"groups": {}}, "'groups' is malformed"),
        ({"groups": 3}, "'groups' is malformed"),
        ({"config": {"hidden": 128}}, "its configuration cannot be read"),
        ({"config": 3}, "'config' is malformed"),
    ]
    for changed, message in edits:
        write_tensors(bad, tensors, metadata | {"record": json.dumps(record | changed)})
        with pytest.raises(ValueError, match=message):
            Trainer(tiny(**JOINT, resume=bad))


def test_an_editor_of_weights_is_noticed(saved: Path, tmp_path: Path, tiny: Tiny) -> None:
    bad = tmp_path / "bad.safetensors"
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    tensors["weights.tower.norm"] += 1
    save_file(tensors, bad, metadata=metadata)
    with pytest.raises(DamagedFileError, match="it was changed"):
        Trainer(tiny(**JOINT, resume=bad))
    del metadata["treadle.crc32"]
    save_file(tensors, bad, metadata=metadata)
    with pytest.raises(DamagedFileError, match="lacks its checksums"):
        Trainer(tiny(**JOINT, resume=bad))


def test_a_folder_of_checkpoints_resumes_its_newest(tmp_path: Path, tiny: Tiny, batches: list[PackedBatch]) -> None:
    folder = CheckpointFolder(tmp_path / "runs" / "checkpoints", keep=2)
    assert folder.latest is None
    config = tiny(schedule=Schedule(steps=5))
    with Trainer(config) as trainer:
        for batch in batches[:4]:
            trainer.step(batch)
            folder.save(trainer, wait=False)
        folder.wait()
        end = everything(trainer)
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "LATEST",
        "last.safetensors",
        "step-00000003.safetensors",
        "step-00000004.safetensors",
    ]
    for path in (folder.folder, tmp_path / "runs", folder.latest, folder.last):
        with Trainer(replace(config, resume=path)) as resumed:
            assert resumed.steps_done == 4
            assert_same(everything(resumed), end)
    with pytest.raises(ValueError, match=r"best\.safetensors: there is no such file; a run keeps a best only where held-out samples"):
        Trainer(replace(config, resume=folder.folder / "best.safetensors"))


def _window(rank: int, gradient: float) -> RankState:
    return RankState(
        pending={"text": {"p": torch.full((2,), gradient)}},
        counts=torch.full((7,), float(rank + 1), dtype=torch.float64),
        sums=torch.full((7,), 10.0 * rank, dtype=torch.float64),
        micro_batches=2,
        truncated=rank,
        dropped=1,
    )


def test_windows_of_another_world_fold_to_the_same_sums() -> None:
    states = [_window(0, 1.0), _window(1, 2.0), _window(2, 4.0)]
    assert fold_ranks(states, 1, 3) is states[1]
    for world_size in (1, 2):
        folded = [fold_ranks(states, rank, world_size) for rank in range(world_size)]
        assert [f.micro_batches for f in folded] == [2] * world_size
        total = sum(sum(parts["p"]) for f in folded for parts in f.pending.values())
        assert float(total) == 14.0
        assert float(sum(f.counts.sum() for f in folded if f.counts is not None)) == 7 * 6.0
        assert float(sum(f.sums.sum() for f in folded if f.sums is not None)) == 7 * 30.0
        assert sum(f.truncated for f in folded) == 3 and sum(f.dropped for f in folded) == 3
    # Folding must not change what it was given.
    assert float(states[0].pending["text"]["p"][0]) == 1.0
