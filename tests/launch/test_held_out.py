"""Held-out samples: what is read, the loss that a training step would report, and which items count as partners."""

import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treadle.launch.held_out import HeldOut
from treadle.launch.samples import read_samples
from treadle.launch.settings import HeldOutSettings, SourceSettings
from treadle.launch.survey import packed_examples, suggest, survey
from treadle.model import Trainer
from treadle.model.config import Masking, Schedule, TrainerConfig
from treadle.pipeline import Schema
from treadle.shape import BatchShape, ImageShape, Modality, Objective

BATCH = BatchShape(max_rows_per_device=4, max_segments_per_device=32, max_columns_per_row=64, image=ImageShape(patch_side=8, channels=3))
CONFIG = TrainerConfig(
    depth=1, hidden=128, batch=BATCH, schedule=Schedule(steps=10), objective=Objective.CONTRASTIVE, masking=Masking(), device="cpu"
)


def picture(number: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (24, 16), (number * 20 % 256, 255 - number * 20 % 256, 90)).save(out, "PNG")
    return out.getvalue()


def shard(path: Path, files: Mapping[str, bytes]) -> SourceSettings:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return SourceSettings(urls=(str(path),))


def pairs(count: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for number in range(count):
        files |= {f"{number}.txt": f"picture number {number}".encode(), f"{number}.png": picture(number)}
    return files


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("objective", list(Objective))
def test_the_loss_is_the_one_a_step_reports(tmp_path: Path, objective: Objective) -> None:
    config = replace(CONFIG, objective=objective)
    held_out = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", pairs(6)),)), config)
    assert len(held_out.batches) == 1 and held_out.samples == 6
    with Trainer(config) as trainer:
        result = held_out.evaluate(trainer.network, trainer.device)
        stats = trainer.step(held_out.batches[0]).stats
    if objective is Objective.CONTRASTIVE:
        assert result.loss == pytest.approx(stats.loss, rel=1e-5)
        assert set(result.losses) == {"contrastive"}
    else:
        # Masked terms draw their positions anew for step 0: near, not equal.
        assert result.losses["text"] == pytest.approx(stats.masked_text_loss, rel=0.2)
        assert set(result.losses) == {"text", "image"} | ({"contrastive"} if objective is Objective.JOINT else set())
        assert result.loss == pytest.approx(sum(result.losses.values()))


def test_an_evaluation_repeats_itself_and_changes_nothing(tmp_path: Path) -> None:
    config = replace(CONFIG, objective=Objective.JOINT)
    held_out = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", pairs(6)),)), config)
    with Trainer(config) as trainer:
        before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
        first, second = (held_out.evaluate(trainer.network, trainer.device) for _ in range(2))
        assert first == second
        for name, value in trainer.network.state_dict().items():
            assert torch.equal(value, before[name])


def test_pairs_and_kinds(tmp_path: Path) -> None:
    files = pairs(5)
    files |= {f"{number}.el.txt": f"εικόνα {number}".encode() for number in range(5)}
    source = shard(tmp_path / "a.tar", dict(sorted(files.items())))
    with Trainer(CONFIG) as trainer:
        plain = HeldOut.read(HeldOutSettings(sources=(source,)), CONFIG).evaluate(trainer.network, trainer.device)
        named = HeldOut.read(HeldOutSettings(sources=(source,), kinds={"el.txt": "greek"}), CONFIG).evaluate(
            trainer.network, trainer.device
        )
    assert set(plain.pairs) == {("text", "image"), ("image", "text"), ("text", "text")}
    assert (plain.pairs["text", "image"].queries, plain.pairs["text", "image"].documents) == (10, 5)
    assert set(named.pairs) == {(a, b) for a in ("text", "image", "greek") for b in ("text", "image", "greek") if a != b}
    assert named.mean_recall == pytest.approx(sum(pair.recall[1] for pair in named.pairs.values()) / 6)
    assert named.value("loss", Objective.CONTRASTIVE) == -named.loss
    assert named.value("derived", Objective.CONTRASTIVE) == named.mean_recall
    assert named.value("derived", Objective.MASKED) == -named.loss


def test_samples_of_one_group_are_partners(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for number in range(4):
        files |= {
            f"{number}.txt": f"{number}".encode(),
            f"{number}.png": picture(number),
            f"{number}.relations.json": b'{"group": "%d"}' % (number // 2),
        }
    with Trainer(CONFIG) as trainer:
        result = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", files),)), CONFIG).evaluate(
            trainer.network, trainer.device
        )
    # Two of four pictures are right: chance at one is a half.
    assert result.pairs["text", "image"].chance[1] == pytest.approx(0.5)


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    files = pairs(3) | {
        "bad.txt": b"half",
        "bad.png": picture(1)[:40],
        "odd.xyz": b"?",
        "odd.txt": b"text",
        "w.relations.json": b"{",
        "w.txt": b"x",
    }
    held_out = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", files),)), CONFIG)
    assert held_out.samples == 5
    assert held_out.skipped["unknown_extension"] == 1
    assert sum(held_out.skipped.values()) == 3, held_out.skipped


def test_the_limit_is_kept(tmp_path: Path) -> None:
    source = shard(tmp_path / "a.tar", pairs(9))
    assert HeldOut.read(HeldOutSettings(sources=(source,), max_samples=4), CONFIG).samples == 4


def test_too_little_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"held_out.sources: 1 samples could be read \(1 unknown_extension\): recall needs at least 2"):
        HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", pairs(1) | {"0.xyz": b"?"}),)), CONFIG)
    with pytest.raises(ValueError, match="matches nothing"):
        HeldOut.read(HeldOutSettings(sources=(SourceSettings(urls=(f"{tmp_path}/none-*.tar",)),)), CONFIG)


def test_many_batches_keep_every_item(tmp_path: Path) -> None:
    small = replace(CONFIG, batch=replace(BATCH, max_rows_per_device=1))
    held_out = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", pairs(12)),)), small)
    assert len(held_out.batches) > 3
    assert sorted((item.key, item.field) for items in held_out.items for item in items) == sorted(
        (str(number), field) for number in range(12) for field in ("txt", "png")
    )
    with Trainer(CONFIG) as trainer:
        one = HeldOut.read(HeldOutSettings(sources=(shard(tmp_path / "a.tar", pairs(12)),)), CONFIG).evaluate(
            trainer.network, trainer.device
        )
        several = held_out.evaluate(trainer.network, trainer.device)
    # What an item is packed with does not change its vector beyond rounding.
    assert one.pairs["text", "image"].recall == several.pairs["text", "image"].recall


def test_samples_come_in_shard_order(tmp_path: Path) -> None:
    shard(tmp_path / "b-1.tar", {"x/2.txt": b"2", "x/2.png": picture(2)})
    shard(tmp_path / "b-0.tar", {"x/0.txt": b"0", "x/1.PNG": picture(1), "x/1.es.txt": b"uno"})
    source = SourceSettings(urls=(f"{tmp_path}/b-*.tar",))
    found = list(read_samples((source,), BATCH, Schema()))
    assert [(sample.key, sample.fields) for sample in found] == [("x/0", ("txt",)), ("x/1", ("png", "es.txt")), ("x/2", ("txt", "png"))]


class TestSurvey:
    def test_lengths_are_those_of_the_decoder(self, tmp_path: Path) -> None:
        found = survey((shard(tmp_path / "a.tar", pairs(6)),), BATCH, Schema(), HeldOutSettings().decode, None)
        assert found.fields["png"].modality is Modality.IMAGE
        assert found.fields["png"].tokens == [6] * 6  # 24 x 16 pixels in patches of 8
        assert found.fields["txt"].tokens == [16] * 6
        assert found.samples == 6 and found.items_of_samples == [2] * 6

    def test_the_suggestion_holds_what_was_found(self, tmp_path: Path) -> None:
        files = pairs(20) | {"long.txt": b"a" * 700}
        found = survey((shard(tmp_path / "a.tar", files),), None, Schema(), HeldOutSettings().decode, None)
        shape = suggest(found)
        assert shape.image.live and not shape.video.live and not shape.audio.live
        assert shape.max_columns_per_row % 64 == 0 and 64 <= shape.max_columns_per_row <= 768
        batches = packed_examples(found, shape, HeldOutSettings().decode, 3)
        assert sum(batch.segments for batch in batches) == 41

    def test_nothing_readable_has_no_suggestion(self, tmp_path: Path) -> None:
        found = survey((shard(tmp_path / "a.tar", {"a.png": b"no picture"}),), None, Schema(), HeldOutSettings().decode, None)
        assert found.fields["png"].failures.total() == 1
        with pytest.raises(ValueError, match="no item could be read"):
            suggest(found)
