"""The demo's dataset: the same bytes every time, files that really decode, captions that say what is shown, a split that holds out combinations."""

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.decoders import decode
from treadle.launch.demo_captions import AXES, LANGUAGES, SECOND_LANGUAGES, Kind, caption
from treadle.launch.demo_data import DatasetPlan, combinations, scenes, split, write_dataset
from treadle.launch.demo_encode import ENCODERS, FORMATS
from treadle.launch.demo_scenes import CLIP_FRAMES, CLIP_SIDE_PX, COLOURS, PICTURE_SIDE_PX, SOUND_RATE_HZ, SOUND_SAMPLES, draw_scene
from treadle.pipeline import Schema
from treadle.pipeline.samples import modality_of
from treadle.pipeline.shards import Shard
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

SHAPE = BatchShape(
    max_rows_per_device=1,
    max_segments_per_device=8,
    max_columns_per_row=512,
    image=ImageShape(patch_side=16, channels=3),
    video=VideoShape(patch_side=16),
    audio=AudioShape(chunk_samples=400, sample_rate=SOUND_RATE_HZ),
)
PLAN = DatasetPlan(
    pictures=12,
    clips=6,
    sounds=8,
    held_out_pictures=6,
    held_out_clips=4,
    held_out_sounds=4,
    samples_per_shard=10,
    second_language_share=0.5,
    seed=3,
)
FILES = [(kind, extension) for kind, extensions in FORMATS.items() for extension in extensions]


def every(kind: Kind) -> Iterator[tuple[int, ...]]:
    sizes = tuple(AXES[kind].values())
    for number in range(combinations(kind)):
        yield tuple(int(value) for value in np.unravel_index(number, sizes))


@pytest.mark.parametrize("language", list(LANGUAGES))
@pytest.mark.parametrize("kind", list(Kind))
def test_every_combination_has_its_own_caption(kind: Kind, language: str) -> None:
    captions = [caption(kind, attributes, language) for attributes in every(kind)]
    assert len(set(captions)) == combinations(kind)
    assert not any("{" in text or "/" in text for text in captions)


def test_captions_agree_with_their_nouns() -> None:
    # shapes: 1 is a square, 4 a star, 7 a heart; colour 0 is red, size 1 large, place 0 top left
    assert caption(Kind.PICTURE, (4, 0, 1, 0)) == "large red star, top left"
    assert caption(Kind.PICTURE, (7, 0, 1, 0), "el") == "μεγάλη κόκκινη καρδιά, πάνω αριστερά"
    assert caption(Kind.PICTURE, (1, 0, 1, 0), "el") == "μεγάλο κόκκινο τετράγωνο, πάνω αριστερά"
    assert caption(Kind.PICTURE, (0, 0, 1, 0), "el") == "μεγάλος κόκκινος κύκλος, πάνω αριστερά"
    assert caption(Kind.CLIP, (4, 0, 0, 1), "hi") == "लाल तारा बाएँ जाता तेज़"
    assert caption(Kind.SOUND, (1, 0, 1, 2, 0), "zh") == "低沉的嗡声,上升,缓慢三拍"


def test_scripts_are_several() -> None:
    letters = {language: caption(Kind.PICTURE, (4, 0, 1, 0), language) for language in LANGUAGES}
    blocks = {
        language: Counter(ord(letter) // 128 for letter in text if letter.isalpha()).most_common(1)[0][0]
        for language, text in letters.items()
    }
    assert len(set(blocks.values())) == len(LANGUAGES) == 4


@pytest.mark.parametrize(("kind", "extension"), FILES)
def test_every_format_decodes_to_what_was_drawn(kind: Kind, extension: str) -> None:
    drawn = draw_scene(kind, tuple(0 for _ in AXES[kind]), 7)
    modality = modality_of(extension)
    assert modality is not None
    payload = decode(modality, ENCODERS[kind](drawn, extension), SHAPE)
    assert not payload.truncated
    if kind is Kind.SOUND:
        assert payload.array.shape == (SOUND_SAMPLES,)
        # Lossy formats change the phase a little; LAME also turns everything down by 5 %.
        assert np.std(payload.array) == pytest.approx(np.std(drawn) * (0.95 if extension == "mp3" else 1), rel=0.02)
        if extension in ("wav", "flac"):
            assert np.abs(payload.array - drawn).max() < 2 / 32768
    else:
        expected = (PICTURE_SIDE_PX, PICTURE_SIDE_PX, 3) if kind is Kind.PICTURE else (CLIP_FRAMES, CLIP_SIDE_PX, CLIP_SIDE_PX, 3)
        assert payload.array.shape == expected
        # Lossy formats subsample colour: edges blur, areas stay.
        assert np.abs(payload.array.astype(int) - drawn).mean() < (0.001 if extension == "png" else 8)


@pytest.mark.parametrize(("kind", "extension"), FILES)
def test_encoding_is_deterministic(kind: Kind, extension: str) -> None:
    drawn = draw_scene(kind, tuple(1 for _ in AXES[kind]), 7)
    assert ENCODERS[kind](drawn, extension) == ENCODERS[kind](drawn, extension)


@pytest.mark.parametrize("kind", list(Kind))
def test_one_seed_draws_one_content(kind: Kind) -> None:
    attributes = tuple(1 for _ in AXES[kind])
    np.testing.assert_array_equal(draw_scene(kind, attributes, 5), draw_scene(kind, attributes, 5))
    assert (draw_scene(kind, attributes, 5) != draw_scene(kind, attributes, 6)).any()


class TestScenesShowWhatCaptionsSay:
    @pytest.mark.parametrize("shape", range(AXES[Kind.PICTURE]["shape"]))
    def test_colour_and_place(self, shape: int) -> None:
        for colour in (0, 4):
            for place in (0, 4, 8):
                picture = draw_scene(Kind.PICTURE, (shape, colour, 1, place), 11 * place + colour).astype(float)
                near = np.linalg.norm(picture - COLOURS[colour], axis=2) < 60
                rows, columns = np.nonzero(near)
                assert len(rows) > 40
                assert int(rows.mean() * 3 / PICTURE_SIDE_PX) == place // 3
                assert int(columns.mean() * 3 / PICTURE_SIDE_PX) == place % 3

    def test_size(self) -> None:
        areas = []
        for size in (0, 1):
            picture = draw_scene(Kind.PICTURE, (0, 0, size, 4), 3).astype(float)
            areas.append((np.linalg.norm(picture - COLOURS[0], axis=2) < 60).sum())
        assert areas[1] > 1.7 * areas[0]

    @pytest.mark.parametrize(("direction", "axis", "sign"), [(0, 1, -1), (1, 1, 1), (2, 0, -1), (3, 0, 1)])
    def test_motion(self, direction: int, axis: int, sign: int) -> None:
        travelled = []
        for pace in (0, 1):
            clip = draw_scene(Kind.CLIP, (0, 0, direction, pace), 4).astype(float)
            places = [np.argwhere(np.linalg.norm(frame - COLOURS[0], axis=1 + 1) < 60).mean(axis=0) for frame in clip[1:-1]]
            way = places[-1] - places[0]
            assert way[axis] * sign > 1
            assert abs(way[axis]) > 2 * abs(way[1 - axis])
            travelled.append(abs(way[axis]))
        assert travelled[1] > 1.8 * travelled[0]

    @pytest.mark.parametrize("pitch", range(AXES[Kind.SOUND]["pitch"]))
    def test_pitch(self, pitch: int) -> None:
        sound = draw_scene(Kind.SOUND, (0, pitch, 0, 0, 0), 9)
        spectrum = np.abs(np.fft.rfft(sound))
        assert 110 * 1.86**pitch * 0.87 < spectrum.argmax() * SOUND_RATE_HZ / SOUND_SAMPLES < 110 * 1.86**pitch * 1.13

    @pytest.mark.parametrize("beats", range(AXES[Kind.SOUND]["beats"]))
    def test_beats(self, beats: int) -> None:
        sound = draw_scene(Kind.SOUND, (0, 3, 0, beats, 0), 9)
        loud = np.abs(sound).reshape(-1, 100).max(axis=1) > 0.1
        assert (np.diff(loud.astype(int)) == 1).sum() + loud[0] == beats + 1


def test_the_split_holds_out_combinations() -> None:
    for kind in Kind:
        train, held_out = split(kind, 40, 0)
        assert len(held_out) == 40
        assert len(train) + len(held_out) == combinations(kind) == len(set(train) | set(held_out))
        # Every value of every attribute is still trained on.
        for axis, size in enumerate(AXES[kind].values()):
            assert {attributes[axis] for attributes in train} == set(range(size))


def test_scenes_of_the_full_plan() -> None:
    plan = DatasetPlan()
    train, held_out = scenes(plan, held_out=False), scenes(plan, held_out=True)
    assert len(train) + len(held_out) >= 2000
    assert sum(scene.kind is Kind.PICTURE for scene in held_out) == 200
    shown = {(scene.kind, scene.attributes) for scene in train}
    assert not shown & {(scene.kind, scene.attributes) for scene in held_out}
    assert len({(scene.kind, scene.attributes) for scene in held_out}) == len(held_out)
    assert len({scene.seed for scene in (*train, *held_out)}) == len(train) + len(held_out)
    assert {scene.language for scene in held_out} == set(SECOND_LANGUAGES)
    assert {scene.extension for scene in train} == {extension for extensions in FORMATS.values() for extension in extensions}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    told: list[tuple[int, int]] = []
    train, held_out = write_dataset(folder, PLAN, lambda done, total: told.append((done, total)))
    assert [path.name for path in train] == ["train-000.tar", "train-001.tar", "train-002.tar"]
    assert [path.name for path in held_out] == ["held-out-000.tar", "held-out-001.tar"]
    assert told == [(done, 40) for done in range(1, 41)]
    return folder


def test_the_same_plan_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path, PLAN)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    assert {path.name for path in folder.iterdir()} == {path.name for path in tmp_path.iterdir()}


def test_every_file_of_the_shards_is_an_item_that_decodes(folder: Path) -> None:
    found: Counter[str] = Counter()
    for path in sorted(folder.glob("*.tar")):
        for sample in Shard(str(path)).samples():
            bag = Schema().bag(sample, 0, 0, 1, SHAPE)
            assert not bag.left_out
            assert len(set(bag.items.groups.tolist() if bag.items.groups is not None else [])) == 1
            for place in range(len(bag.items)):
                modality = Modality(int(bag.items.modalities[place]))
                decode(modality, bag.items.content(place), SHAPE)
                found[str(modality)] += 1
    assert (found["image"], found["video"], found["audio"]) == (18, 10, 12)
    assert found["text"] > 40


def test_samples_of_one_caption_share_a_group_and_nothing_else() -> None:
    plan = DatasetPlan(sounds=500)  # more than the combinations that are left to train on
    listed = [scene for scene in scenes(plan, held_out=False) if scene.kind is Kind.SOUND]
    one = listed[0]
    other = next(scene for scene in listed[1:] if scene.attributes == one.attributes)
    ours, theirs = one.files(), other.files()
    assert group(ours) == group(theirs) and ours["txt"] == theirs["txt"]
    assert ours[one.extension] != theirs[other.extension]
    different = next(scene for scene in listed if scene.attributes != one.attributes)
    assert group(different.files()) != group(ours)


def group(files: dict[str, bytes]) -> str:
    return str(json.loads(files["relations.json"])["group"])


def test_second_captions_attract_the_first_alone() -> None:
    scene = next(scene for scene in scenes(DatasetPlan(), held_out=True) if scene.extension == "png" and scene.language == "el")
    named = {tuple(edge[:2]) for edge in json.loads(scene.files()["relations.json"])["attract"]}
    assert named == {("txt", "png"), ("png", "txt"), ("txt", "el.txt"), ("el.txt", "txt")}


def test_members_are_plain_files_without_a_date(folder: Path) -> None:
    with tarfile.open(folder / "train-000.tar") as tar:
        for member in tar:
            assert member.isfile() and member.mtime == 0 and member.uid == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pictures", 0, "DatasetPlan.pictures is 0"),
        ("held_out_clips", 300, "DatasetPlan.held_out_clips is 300: it must lie between 2 and 256"),
        ("second_language_share", 1.5, "DatasetPlan.second_language_share is 1.5"),
        ("samples_per_shard", 0, "DatasetPlan.samples_per_shard is 0"),
    ],
)
def test_plans_that_make_no_sense(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetPlan(**{field: value})


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        write_dataset(tmp_path / "file" / "shards", PLAN)
