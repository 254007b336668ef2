"""`treadle inspect`: tables of what shards hold, capacities that suit it, and a page that shows packed rows as pictures."""

import base64
import html
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.launch.flags import CONTEXT, Suggesting, flags, take_flags
from treadle.launch.pack import configured, packing_tree
from treadle.launch.settings import DataSettings
from treadle.launch.toml_text import to_tree, toml_text
from treadle.shape import BatchShape, require_count, settle_numbers

if TYPE_CHECKING:
    from treadle.launch.survey import Survey
    from treadle.pipeline import PackedBatch

DRAWN_BATCHES = 3
SHOWN_SAMPLES = 24
SHOWN_TEXT = 300
THUMBNAIL_PX = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectSettings:
    """What to look at."""

    batch: BatchShape | None = None
    """The shape to pack into; a fitting one is suggested where none is given."""
    data: DataSettings = field(default_factory=DataSettings)
    limit: int = 2000
    """Samples that are read, the first ones; 0 reads all."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("InspectSettings", "limit", self.limit, 0)


@click.command("inspect", cls=Suggesting, context_settings=CONTEXT)
@click.argument("sources", nargs=-1)
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML file of a training run, whose batch shape and data settings are taken."
)
@click.option("--toml", "only_toml", is_flag=True, help="Print the batch shape alone, as TOML for a training run's file.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="Also write a page with packed rows as pictures.")
@flags(InspectSettings)
def inspect_command(sources: tuple[str, ...], config: Path | None, page: Path | None, only_toml: bool, **parameters: Any) -> None:
    """Tell what SOURCES hold (URLs, globs, brace ranges of tar shards): fields, sizes, lengths in tokens, damage, and how it all packs.

    Lengths come from headers; nothing is changed.
    """
    from treadle.launch.samples import named
    from treadle.launch.streams import check_batch
    from treadle.launch.survey import packed_examples, suggest, survey

    tree = packing_tree(config, sources)
    tree = {name: tree[name] for name in ("batch", "data") if name in tree}
    settings = configured(InspectSettings, config, take_flags(InspectSettings, parameters), tree)
    data = settings.data
    if not data.sources:
        raise click.UsageError("there is nothing to inspect: name shards, or a configuration that does")
    if settings.batch is not None:
        check_batch(settings.batch)
    found = survey(data.sources, settings.batch, data.schema, data.decode, settings.limit or None)
    if not found.samples:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.left_out.items())) or "they are empty"
        raise ValueError(f"{named(data.sources)}: no sample could be read ({kinds})")
    shape = settings.batch or suggest(found)
    if only_toml:
        click.echo(shape_toml(shape), nl=False)
        return
    batches = packed_examples(found, shape, data.decode, DRAWN_BATCHES)
    _print(found, shape, batches, given=settings.batch is not None)
    if page is not None:
        from treadle.launch.files import make_folder, write_text

        make_folder(page.parent)
        write_text(page, _page(found, shape, batches))
        click.echo(f"wrote {page}")


def shape_toml(shape: BatchShape) -> str:
    """A batch shape as a training run's file has it: what is not derived, and no slice that is not live."""
    tree: dict[str, object] = {}
    for name, value in to_tree(shape).items():
        if isinstance(value, dict):
            value = {inner: size for inner, size in value.items() if size}
        if value:
            tree[name] = value
    return toml_text({"trainer": {"batch": tree}})


def _rows(found: "Survey") -> list[list[str]]:
    import numpy as np

    rows: list[list[str]] = []
    for name, entry in sorted(found.fields.items(), key=lambda item: (item[1].modality, item[0])):
        lengths = ["–"] * 4
        if entry.tokens:
            lengths = [f"{value:,.0f}" for value in np.quantile(entry.tokens, [0, 0.5, 0.99, 1])]
        failures = ", ".join(f"{count} {kind}" for kind, count in sorted(entry.failures.items()))
        rows.append([name, str(entry.modality), f"{len(entry.sizes):,}", f"{np.mean(entry.sizes):,.0f}", *lengths, failures])
    return rows


_HEADER = ("field", "modality", "items", "mean bytes", "tokens: least", "median", "99 %", "most", "unreadable")


def _fill(batches: "Sequence[PackedBatch]") -> str:
    full = batches[:-1] or batches
    shown = {name: sum(batch.fill[name] for batch in full) / len(full) for name in full[0].fill} if full else {}
    return ", ".join(f"{name} {value:.3f}" for name, value in shown.items())


def _print(found: "Survey", shape: BatchShape, batches: "Sequence[PackedBatch]", *, given: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from treadle.launch.report import console

    table = Table(title=f"{found.samples:,} samples of {len(found.shards):,} shards", title_justify="left")
    for name in _HEADER:
        table.add_column(name, justify="left" if name in ("field", "modality", "unreadable") else "right")
    for row in _rows(found):
        table.add_row(*map(escape, row))
    console().print(table)
    if found.left_out:
        click.echo("left out: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.left_out.items())))
    click.echo("the batch shape that was given:" if given else "a batch shape that suits these samples:")
    click.echo(shape_toml(shape), nl=False)
    if batches:
        cut = sum(batch.truncated for batch in batches)
        closed = Counter(batch.closed_by for batch in batches)
        click.echo(f"fill of {len(batches)} batches: {_fill(batches)}; {cut} items cut, {sum(batch.dropped for batch in batches)} dropped")
        click.echo("closed by: " + ", ".join(f"{name} ({count})" for name, count in closed.most_common()))


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}img{max-width:100%}"
    ".samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(240px,1fr));gap:1em}.samples div{border:1px solid #ddd;padding:.6em}"
)


def _page(found: "Survey", shape: BatchShape, batches: "Sequence[PackedBatch]") -> str:
    head = "".join(f"<th>{name}</th>" for name in _HEADER)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in _rows(found))
    pictures = "".join(f'<p><img alt="packed batch" src="{_drawn(batch)}"></p>' for batch in batches)
    left_out = ", ".join(f"{count:,} {html.escape(kind)}" for kind, count in sorted(found.left_out.items())) or "nothing"
    samples = "".join(_sample(found, number) for number in range(min(SHOWN_SAMPLES, len(found.kept))))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>treadle inspect</title><style>{_STYLE}</style>'
        f"<h1>{found.samples:,} samples of {len(found.shards):,} shards</h1><table><tr>{head}</tr>{body}</table><p>Left out: {left_out}.</p>"
        f"<h2>How they pack</h2><pre>{html.escape(shape_toml(shape))}</pre><p>{html.escape(_fill(batches))}</p>"
        f'{pictures}<h2>The first samples</h2><div class="samples">{samples}</div></html>\n'
    )


def _drawn(batch: "PackedBatch") -> str:
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        path = Path(folder) / "batch.png"
        batch.draw(path)
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _sample(found: "Survey", number: int) -> str:
    """One sample: its texts, its pictures small, and the names of its other files. All of it comes from the shards, so all is escaped."""
    from treadle.shape import Modality

    sample = found.kept[number]
    parts = [f"<b>{html.escape(sample.key)}</b>"]
    for place, name in enumerate(sample.fields):
        data = bytes(sample.items.content(place))
        modality = Modality(int(sample.items.modalities[place]))
        if modality is Modality.TEXT:
            parts.append(f"<p>{html.escape(data[: 4 * SHOWN_TEXT].decode('utf-8', 'replace')[:SHOWN_TEXT])}</p>")
        elif modality is Modality.IMAGE and (picture := _thumbnail(data)):
            parts.append(f'<img alt="{html.escape(name)}" src="{picture}">')
        else:
            parts.append(f"<p>{html.escape(name)}, {len(data):,} bytes</p>")
    return f"<div>{''.join(parts)}</div>"


def _thumbnail(data: bytes) -> str:
    """A small picture of an image, decoded by our own decoder and written anew; empty where it cannot be read."""
    import io

    from PIL import Image

    from treadle.decoders import DecodeError, decode
    from treadle.shape import ImageShape, Modality

    # One token a pixel of 8: the decoder itself scales the picture down to fit the row.
    side = ImageShape(patch_side=8, channels=3)
    columns = (THUMBNAIL_PX // 8) ** 2 + 1
    shape = BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=columns, image=side)
    try:
        payload = decode(Modality.IMAGE, data, shape)
    except DecodeError:
        return ""
    out = io.BytesIO()
    Image.fromarray(payload.array).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
