"""Builds tar shards from the Debian package `tuxpaint-stamps-default`: pictures, captions in five languages, spoken descriptions.

    apt-get download tuxpaint-stamps-default && dpkg -x tuxpaint-stamps-default_*.deb stamps
    python examples/stamps/build.py stamps --out shards

A sample is one stamp: `png`, up to five captions (`en.txt` ... `el.txt`) and up to two spoken descriptions (`fr.ogg` ...). Stamps are
held out by whole folders (every fifth, in sorted order), so that no near copy of a held-out stamp is trained on.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import webdataset

CAPTION_LANGUAGES = ("en", "fr", "es", "ru", "el")
SPOKEN_LANGUAGES = ("fr", "ru", "es", "el", "ca", "bg", "ro", "be")
"""In order of preference: a stamp takes the first two that it has."""
SPOKEN_PER_STAMP = 2
HELD_OUT_EVERY = 5
TRAIN_SHARDS = 8
HELD_OUT_SHARDS = 2
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """One stamp's files."""

    key: str
    folder: str
    picture: Path
    captions: dict[str, str]
    recordings: dict[str, Path]


def read_captions(path: Path) -> dict[str, str]:
    """The captions of a stamp's text file: English on its first line, then `language.utf8=caption` lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    captions = {"en": lines[0].strip()} if lines else {}
    for line in lines[1:]:
        language, mark, caption = line.partition(".utf8=")
        if mark and caption.strip():
            captions[language] = caption.strip()
    return {language: captions[language] for language in CAPTION_LANGUAGES if captions.get(language)}


def find_stamps(root: Path) -> Iterator[Stamp]:
    """Every stamp below `root` that has a picture and a caption, in sorted order."""
    for picture in sorted(root.rglob("*.png")):
        text = picture.with_suffix(".txt")
        if picture.stem.endswith("_mirror") or not text.is_file():
            continue
        captions = read_captions(text)
        if not captions:
            continue
        recordings: dict[str, Path] = {}
        for language in SPOKEN_LANGUAGES:
            path = picture.with_name(f"{picture.stem}_desc_{language}.ogg")
            if path.is_file() and len(recordings) < SPOKEN_PER_STAMP:
                recordings[language] = path
        place = picture.relative_to(root).with_suffix("")
        yield Stamp(
            key=place.as_posix().replace("/", "_").replace(".", "_"),
            folder=place.parent.as_posix(),
            picture=picture,
            captions=captions,
            recordings=recordings,
        )


def split_by_folder(stamps: list[Stamp]) -> tuple[list[Stamp], list[Stamp]]:
    """The stamps to train on, and those of every `HELD_OUT_EVERY`-th folder."""
    folders = sorted({stamp.folder for stamp in stamps})
    held_out = set(folders[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    return [s for s in stamps if s.folder not in held_out], [s for s in stamps if s.folder in held_out]


def write_shards(stamps: list[Stamp], out: Path, name: str, num_shards: int) -> None:
    """Writes `stamps`, shuffled once, as `num_shards` shards of nearly equal counts."""
    out.mkdir(parents=True, exist_ok=True)
    order = random.Random(SEED).sample(stamps, len(stamps))
    for shard in range(num_shards):
        with webdataset.TarWriter(str(out / f"{name}-{shard:03d}.tar"), mtime=0) as writer:
            for stamp in order[shard::num_shards]:
                fields: dict[str, object] = {"__key__": stamp.key, "png": stamp.picture.read_bytes()}
                fields |= {f"{language}.txt": caption.encode() for language, caption in stamp.captions.items()}
                fields |= {f"{language}.ogg": path.read_bytes() for language, path in stamp.recordings.items()}
                writer.write(fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="folder that the Debian package was unpacked into")
    parser.add_argument("--out", type=Path, default=Path("shards"), help="folder that the shards are written to [shards]")
    arguments = parser.parse_args()
    root = next((p for p in (arguments.package / "usr/share/tuxpaint/stamps", arguments.package) if p.is_dir()), None)
    stamps = list(find_stamps(root)) if root else []
    if not stamps:
        parser.error(f"no stamps below {arguments.package}: name the folder that dpkg -x wrote")
    train, held_out = split_by_folder(stamps)
    write_shards(train, arguments.out, "train", TRAIN_SHARDS)
    write_shards(held_out, arguments.out, "held-out", HELD_OUT_SHARDS)
    recordings = sum(len(stamp.recordings) for stamp in stamps)
    captions = sum(len(stamp.captions) for stamp in stamps)
    print(
        f"{len(stamps)} stamps, {captions} captions, {recordings} recordings: {len(train)} to train on, "
        f"{len(held_out)} held out from {len({s.folder for s in held_out})} folders, in {arguments.out}"
    )


if __name__ == "__main__":
    main()
