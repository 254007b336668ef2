"""The demo's last page: captions that nobody trained on, and what the tower finds for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.launch.demo_captions import Kind

if TYPE_CHECKING:
    from treadle.launch.settings import RunSettings

ASKED_OF_EACH = 2
SHOWN = 3
MODALITIES = {Kind.PICTURE: "image", Kind.CLIP: "video", Kind.SOUND: "audio"}


def ask(checkpoint: Path, settings: "RunSettings") -> None:
    """Prints the first things found for a few held-out captions, by what their own captions say."""
    from rich.table import Table

    from treadle.launch.report import console
    from treadle.launch.samples import read_samples
    from treadle.model import Encoder
    from treadle.pipeline import Schema
    from treadle.shape import Modality

    encoder = Encoder.load(checkpoint, settings.trainer.device)
    captions: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    contents: dict[Kind, list[bytes]] = {kind: [] for kind in Kind}
    for sample in read_samples(settings.held_out.sources, settings.trainer.batch, Schema()):
        kind = Kind(sample.key.split("-")[0])
        listed = [sample.items.content(place) for place in range(len(sample.items))]
        by_field = dict(zip(sample.fields, listed, strict=True))
        captions[kind].append(bytes(by_field.pop("txt")).decode())
        contents[kind].append(next(bytes(data) for field, data in by_field.items() if not field.endswith("txt")))
    table = Table(title="Questions nobody trained it on, and the captions of what it finds", title_justify="left")
    table.add_column("asked")
    for place in range(SHOWN):
        table.add_column(f"found {place + 1}")
    for kind in Kind:
        questions = captions[kind][:ASKED_OF_EACH]
        asked = encoder.encode(Modality.TEXT, questions)
        found = encoder.encode(MODALITIES[kind], contents[kind])
        for question, order in zip(questions, (asked @ found.T).argsort(dim=1, descending=True).tolist(), strict=True):
            table.add_row(question, *_cells([captions[kind][place] for place in order[:SHOWN]], question))
    console().print(table)


def _cells(found: Sequence[str], asked: str) -> list[str]:
    return [f"[green]{caption} ✓[/green]" if caption == asked else caption for caption in found]
