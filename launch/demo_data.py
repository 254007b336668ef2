"""Writes the demo's dataset: tar shards of captioned pictures, clips and sounds, and others of combinations never trained on.

A sample is `<key>.txt` (English), `<key>.<language>.txt` for some, its picture, clip or recording, and `<key>.relations.json`, whose
group is the scene's attributes, so that two samples of one caption never repel each other.
"""

import io
import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treadle.launch.demo_captions import AXES, SECOND_LANGUAGES, Kind, caption
from treadle.launch.demo_encode import ENCODERS, FORMATS
from treadle.launch.demo_scenes import draw_scene
from treadle.pipeline.whole_file import whole_file
from treadle.shape import require_count, require_number, settle_numbers

logger = logging.getLogger(__name__)

HELD_OUT_SEED = 2**40
"""Added to the seed of held-out scenes, so that no held-out content repeats a trained one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """How many samples of each kind to write."""

    pictures: int = 1700
    """Captioned pictures to train on."""
    clips: int = 900
    """Captioned clips to train on."""
    sounds: int = 1200
    """Captioned recordings to train on."""
    held_out_pictures: int = 200
    """Pictures of combinations that no training sample shows; each shows another one."""
    held_out_clips: int = 160
    """Clips of combinations never trained on."""
    held_out_sounds: int = 160
    """Recordings of combinations never trained on."""
    second_language_share: float = 0.25
    """Share of the training samples that also bring a caption in another script; held-out samples all do."""
    samples_per_shard: int = 350
    """Samples of one tar file."""
    seed: int = 0
    """Keys the scenes, the split and their order."""

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return sum(getattr(self, f"{prefix}{kind.value}s") for kind in Kind for prefix in ("", "held_out_"))

    def __post_init__(self) -> None:
        settle_numbers(self)
        for kind in Kind:
            name = f"{kind.value}s"
            require_count("DatasetPlan", name, getattr(self, name), 1)
            require_count("DatasetPlan", f"held_out_{name}", getattr(self, f"held_out_{name}"), 2, combinations(kind) // 2)
        require_number("DatasetPlan", "second_language_share", self.second_language_share, 0, 1)
        require_count("DatasetPlan", "samples_per_shard", self.samples_per_shard, 1)
        require_count("DatasetPlan", "seed", self.seed, 0, 2**32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One sample to write."""

    kind: Kind
    attributes: tuple[int, ...]
    extension: str
    language: str
    """Of its second caption; empty for none."""
    seed: int

    def files(self) -> dict[str, bytes]:
        """The sample's files by field."""
        content = ENCODERS[self.kind](draw_scene(self.kind, self.attributes, self.seed), self.extension)
        files = {"txt": caption(self.kind, self.attributes).encode()}
        if self.language:
            files[f"{self.language}.txt"] = caption(self.kind, self.attributes, self.language).encode()
        files[self.extension] = content
        relations: dict[str, object] = {"group": f"{self.kind.value} {' '.join(map(str, self.attributes))}"}
        if self.language:
            # The second caption attracts the first one alone, and by it finds the content: few samples have one, and what a picture
            # should look for is better learned from the many.
            second = f"{self.language}.txt"
            pairs = (("txt", self.extension), ("txt", second))
            relations["attract"] = [[a, b, 1.0] for one, other in pairs for a, b in ((one, other), (other, one))]
        files["relations.json"] = json.dumps(relations).encode()
        return files


def combinations(kind: Kind) -> int:
    """How many combinations of attributes a kind has."""
    return int(np.prod(list(AXES[kind].values())))


def split(kind: Kind, held_out: int, seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The combinations of a kind, dealt to training and to the held-out set."""
    order = np.random.default_rng(np.random.Philox((seed, list(Kind).index(kind)))).permutation(combinations(kind))
    sizes = tuple(AXES[kind].values())
    dealt = [tuple(int(value) for value in np.unravel_index(number, sizes)) for number in order]
    return dealt[held_out:], dealt[:held_out]


def scenes(plan: DatasetPlan, *, held_out: bool) -> list[Scene]:
    """The samples of the training or the held-out shards, in the order they are written."""
    listed: list[Scene] = []
    draw = np.random.default_rng(np.random.Philox((plan.seed, 100 + held_out)))
    for number, kind in enumerate(Kind):
        train, held = split(kind, getattr(plan, f"held_out_{kind.value}s"), plan.seed)
        pool = held if held_out else train
        count = len(held) if held_out else getattr(plan, f"{kind.value}s")
        for place in range(count):
            second = held_out or draw.random() < plan.second_language_share
            listed.append(
                Scene(
                    kind=kind,
                    attributes=pool[place % len(pool)],
                    extension=FORMATS[kind][place % len(FORMATS[kind])],
                    language=SECOND_LANGUAGES[int(draw.integers(len(SECOND_LANGUAGES)))] if second else "",
                    seed=(plan.seed << 48) + (HELD_OUT_SEED if held_out else 0) + (number << 32) + place,
                )
            )
    return [listed[place] for place in draw.permutation(len(listed))]


def write_dataset(folder: Path, plan: DatasetPlan, progress: Callable[[int, int], None] | None = None) -> tuple[list[Path], list[Path]]:
    """Writes the shards and answers the training and the held-out ones.

    Args:
        folder: where they go; made when missing.
        progress: told after each sample how many of all are written.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sets = {"train": scenes(plan, held_out=False), "held-out": scenes(plan, held_out=True)}
    total = sum(map(len, sets.values()))
    written: dict[str, list[Path]] = {name: [] for name in sets}
    done = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for name, listed in sets.items():
            for first in range(0, len(listed), plan.samples_per_shard):
                part = listed[first : first + plan.samples_per_shard]
                path = folder / f"{name}-{len(written[name]):03d}.tar"
                with whole_file(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                    for place, files in enumerate(pool.map(Scene.files, part)):
                        _add(tar, f"{part[place].kind.value}-{first + place:06d}", files)
                        done += 1
                        if progress is not None:
                            progress(done, total)
                written[name].append(path)
                logger.info("wrote %s: %d samples", path, len(part))
    return written["train"], written["held-out"]


def _add(tar: tarfile.TarFile, key: str, files: dict[str, bytes]) -> None:
    for field, data in files.items():
        member = tarfile.TarInfo(f"{key}.{field}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def captions(plan: DatasetPlan) -> Iterator[tuple[str, Kind, str]]:
    """Every held-out caption in English, with its kind and key, in shard order."""
    for place, scene in enumerate(scenes(plan, held_out=True)):
        yield f"{scene.kind.value}-{place:06d}", scene.kind, caption(scene.kind, scene.attributes)
