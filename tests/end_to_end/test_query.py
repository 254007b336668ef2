"""A trained model is asked: vectors, recall, pages; on the run that the demo's own code trains."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from treadle.launch.demo import run_demo
from treadle.launch.demo_data import DatasetPlan

Run = Callable[..., Any]

PLAN = DatasetPlan(
    pictures=36,
    clips=12,
    sounds=12,
    held_out_pictures=12,
    held_out_clips=6,
    held_out_sounds=8,
    samples_per_shard=20,
    second_language_share=0.5,
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo of four steps."""
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder, PLAN, steps=4, device="cpu", again=False)
    return folder


def test_the_demo_leaves_what_it_says(demo: Path) -> None:
    names = {path.relative_to(demo).as_posix() for path in demo.rglob("*") if path.is_file()}
    assert {
        "packed_batch.png",
        "run/config.toml",
        "run/metrics.jsonl",
        "run/checkpoints/last.safetensors",
        "run/checkpoints/best.safetensors",
        "shards/train-000.tar",
        "shards/held-out-000.tar",
    } <= names
    assert not any(name.endswith(".part") for name in names)
    kinds = [json.loads(line)["kind"] for line in (demo / "run/metrics.jsonl").read_text().splitlines()]
    assert kinds.count("held_out") == 4


def test_the_demo_says_what_to_type_next_and_it_works(treadle: Run, demo: Path, tmp_path: Path) -> None:
    done = treadle("demo", "--out", tmp_path / "d", "--steps", 2, *plan_flags(), "--device", "cpu")
    assert "caption → image" in done.out and "A step takes" not in done.out
    commands = [line.strip() for line in done.out.splitlines() if line.startswith("  treadle ")]
    assert [command.split()[1] for command in commands] == ["encode", "evaluate", "inspect", "train"]
    import shlex

    for command in commands:
        treadle(*shlex.split(command)[1:])
    assert np.load(tmp_path / "d/query.npy").shape == (1, 128)
    assert json.loads((tmp_path / "d/run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


def plan_flags() -> list[str]:
    return [part for name in PLAN.__slots__ for part in (f"--{name.replace('_', '-')}", str(getattr(PLAN, name)))]


def test_the_demo_does_not_write_over_a_run(treadle: Run, demo: Path) -> None:
    before = (demo / "run/checkpoints/last.safetensors").read_bytes()
    done = treadle("demo", "--out", demo, *plan_flags(), code=2)
    assert "holds a run already" in done.err
    assert (demo / "run/checkpoints/last.safetensors").read_bytes() == before


def test_encode_shards(treadle: Run, demo: Path, tmp_path: Path) -> None:
    done = treadle("encode", demo / "run", demo / "shards/held-out-*.tar", "--out", "all.safetensors", "--dimensions", 64)
    vectors = load_file(tmp_path / "all.safetensors")["vectors"]
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    # 26 held-out samples of two captions and one picture, clip or sound.
    assert vectors.shape == (78, 64) and len(lines) == 78
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert {line["modality"] for line in lines} == {"text", "image", "video", "audio"}
    assert "wrote 78 vectors of 64 values" in done.out


def test_encode_files_and_texts(treadle: Run, demo: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "note.txt").write_text("a red picture", encoding="utf-8")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    done = treadle("encode", demo / "run", "red.png", "note.txt", "broken.jpg", "--text", "a red picture", "--out", "some.npy")
    lines = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text(encoding="utf-8").splitlines()]
    by_key = {line["key"]: vector for line, vector in zip(lines, np.load(tmp_path / "some.npy"), strict=True)}
    assert set(by_key) == {"red", "note", "text-0"}
    np.testing.assert_allclose(by_key["note"], by_key["text-0"], atol=1e-6)
    assert "broken.jpg" in done.err and "1 inputs could not be encoded" in done.err


def test_evaluate_agrees_with_the_run(treadle: Run, demo: Path, tmp_path: Path) -> None:
    done = treadle("evaluate", demo / "run", "--json", "recall.json")
    assert "caption → image" in done.out and "wrote recall.json" in done.out
    record = json.loads((tmp_path / "recall.json").read_text())
    found = {(pair["query"], pair["document"]): pair for pair in record["pairs"]}
    logged = [json.loads(line) for line in (demo / "run/metrics.jsonl").read_text().splitlines()]
    last = [row for row in logged if row["kind"] == "held_out"][-1]
    assert record["samples"] == 26
    assert found["caption", "image"]["queries"] == 12 and found["caption", "audio"]["documents"] == 8
    assert found["caption", "image"]["recall_at_5"] == last["caption_to_image/recall_at_5"]
    assert record["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_evaluate_with_other_words(treadle: Run, demo: Path) -> None:
    done = treadle(
        "evaluate", demo / "run", demo / "shards/held-out-000.tar", "--json", "-", "--schema.fields", "txt,png,jpg,webp", "--dimensions", 32
    )
    record = json.loads(done.out)
    assert {pair["document"] for pair in record["pairs"]} == {"caption", "image"}
    assert done.err == ""
    few = treadle("evaluate", demo / "run", "--max-samples", 8)
    assert "these are the first 8 samples: --max-samples asks for more" in few.out


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.pictures += tag == "img" and str(dict(attrs).get("src")).startswith("data:image/png;base64,")


def test_inspect_tells_and_draws(treadle: Run, demo: Path, tmp_path: Path) -> None:
    done = treadle("inspect", demo / "shards/train-*.tar", "--html", "page.html")
    assert "60 samples of 3 shards" in done.out
    assert "max_columns_per_row" in done.out and "[trainer.batch.audio]" in done.out and "fill of" in done.out
    page = _Tags()
    page.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.pictures > 5
    done = treadle("inspect", demo / "shards/train-*.tar", "--config", demo / "run/config.toml")
    assert "the batch shape that was given" in done.out and "max_columns_per_row = 128" in done.out


def test_inspect_escapes_what_shards_say(treadle: Run, tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        for name, data in {"<script>k.txt": b"<script>alert(1)</script> [bold]x[/nothing]", "b.txt": b"plain"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    treadle("inspect", "evil.tar", "--html", "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
