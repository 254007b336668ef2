"""Fuzzes the decoders for as long as you like, guided by the coverage of their own code: `make fuzz FUZZ_S=3600`.

    seeds of test_fuzz.py ──> corpus (a folder outside the repository) ──> libFuzzer picks, test_fuzz.py or libFuzzer mutates
                                          ^── whatever reaches new code <──┘  decode and probe, as every modality that fits

Only `DecodeError` may come out, within the wall clock and the memory; anything else, a crash of a library included, ends the run
with the input beside the corpus (`crash-*`, `timeout-*`, `oom-*`). Needs atheris, which `make fuzz` installs.
"""

import argparse
import importlib
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# No dependency of the project, nor of its development: found where `make fuzz` has installed it.
atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["treadle.decoders"]):
    from treadle.decoders import DecodeError, DecodeOptions, decode, probe
    from treadle.decoders.sniff import AUDIO_FORMATS, IMAGE_FORMATS, VIDEO_FORMATS, sniff
    from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape

SHAPE = BatchShape(
    max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=129,
    image=ImageShape(patch_side=8), video=VideoShape(patch_side=8), audio=AudioShape(chunk_samples=160),
)  # fmt: skip
OPTIONS = [DecodeOptions(isolate=False, strict=strict, max_pixels=1 << 22, max_wall_s=20) for strict in (True, False)]
MOST_BYTES = 1 << 16


def sibling(name: str) -> ModuleType:
    """A file of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_input(data: bytes) -> None:
    """Decodes it as whatever it may be."""
    kind = sniff(memoryview(data)) if data else None
    families = ((Modality.IMAGE, IMAGE_FORMATS), (Modality.VIDEO, VIDEO_FORMATS), (Modality.AUDIO, AUDIO_FORMATS))
    for modality, formats in families:
        if kind not in formats:
            continue
        for options in OPTIONS:
            for call in (decode, probe):
                try:
                    answer = call(modality, data, SHAPE, options)
                except DecodeError as error:
                    if error.kind == "timeout":
                        raise RuntimeError("the wall clock ran out") from error
                    continue
                t, h, w = answer.grid
                if not 1 <= t * h * w <= 128:
                    raise RuntimeError(f"a grid of {answer.grid} in a row of 128 tokens")


def write_seeds(corpus: Path) -> None:
    """The files that test_fuzz.py starts from, where the corpus has none of them yet."""
    make, seeds = sibling("conftest").Maker(), sibling("test_fuzz")
    for family in (seeds.picture_seeds, seeds.clip_seeds, seeds.sound_seeds):
        for name, data in family(make).items():
            path = corpus / f"seed-{name}"
            if not path.exists():
                path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder that keeps inputs which reach new code; made where it is missing")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--rss-mib", type=int, default=2048)
    arguments = parser.parse_args()
    arguments.corpus.mkdir(parents=True, exist_ok=True)
    write_seeds(arguments.corpus)
    mutated = sibling("test_fuzz").mutated

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        # The fuzzer's own mutations know comparisons that failed; ours know what files look like.
        if draw.random() < 0.5 or not data:
            return bytes(atheris.Mutate(data, most))
        return bytes(mutated(data, draw)[:most])

    flags = [
        f"-max_total_time={arguments.seconds}", f"-rss_limit_mb={arguments.rss_mib}", f"-max_len={MOST_BYTES}", "-timeout=60",
        f"-artifact_prefix={arguments.corpus.parent}/", "-print_final_stats=1", "-reload=0",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags, str(arguments.corpus)], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
