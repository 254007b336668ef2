"""`treadle pack`: reads, decodes and packs shards once, so that training only has to read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from treadle.launch.config import Tree, read_toml
from treadle.launch.flags import CONTEXT, Suggesting, configuration, flags, take_flags
from treadle.launch.settings import DataSettings
from treadle.model.config import LateInteraction
from treadle.shape import BatchShape, require_count


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """What to pack, and into what."""

    batch: BatchShape
    """What one device's step carries at most."""
    data: DataSettings = field(default_factory=DataSettings)
    late_interaction: LateInteraction = field(default_factory=LateInteraction)
    """Whose capacities batches keep to, where its weight is positive."""
    batches_per_shard: int = 64
    """Batches of one packed shard."""
    max_batches: int = 0
    """Batches to write at most; 0 goes on to the data's end."""

    def __post_init__(self) -> None:
        require_count("PackSettings", "batches_per_shard", self.batches_per_shard, 1)
        require_count("PackSettings", "max_batches", self.max_batches, 0)
        if self.data.packed:
            raise ValueError(f"data.packed is {self.data.packed!r}: that is packed already; name shards of samples as sources")
        if self.data.sources and not self.max_batches and self.data.epochs is None:
            raise ValueError("data.epochs is none and max_batches is 0: packing would never end; give --data.epochs 1 or --max_batches N")


def packing_tree(config: Path | None, sources: tuple[str, ...]) -> Tree:
    """The parts of a training configuration that packing reads, one epoch unless it says otherwise."""
    tree: Tree = {}
    if config is not None:
        read = read_toml(config)
        trainer = read.get("trainer")
        if isinstance(trainer, dict):
            tree |= {name: trainer[name] for name in ("batch", "late_interaction") if name in trainer}
        tree |= {name: read[name] for name in ("batch", "data", "late_interaction", "batches_per_shard", "max_batches") if name in read}
    given = tree.get("data")
    data: Tree = {"epochs": 1, **(given if isinstance(given, dict) else {})}
    if sources:
        data["sources"] = list(sources)
    tree["data"] = data
    return tree


@click.command("pack", cls=Suggesting, context_settings=CONTEXT)
@click.argument("sources", nargs=-1)
@click.option("--out", required=True, help="Folder of the packed shards, which must hold none.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML file of a training run, whose batch shape and data settings are taken."
)
@flags(PackSettings)
def pack_command(sources: tuple[str, ...], out: str, config: Path | None, **parameters: Any) -> None:
    """Read, decode and pack SOURCES (URLs, globs, brace ranges of tar shards) into shards of packed batches.

    `treadle train --data.packed FOLDER` then reads batches instead of samples, and takes the same steps bit for bit.
    """
    given = take_flags(PackSettings, parameters)
    if not sources and config is None and not any(leaf.name == "data.sources" for leaf, _ in given):
        raise click.UsageError("there is nothing to pack: name shards, or a configuration that does")
    settings = configuration(PackSettings, None, given, packing_tree(config, sources))
    if not settings.data.sources:
        raise click.UsageError(f"{config}: names no sources to pack: name shards")
    _pack(settings, out)


def _pack(settings: PackSettings, out: str) -> None:
    from treadle.launch.report import Bar
    from treadle.launch.signals import StopRequest
    from treadle.launch.training import open_stream
    from treadle.pipeline import PackedWriter

    late = settings.late_interaction.resolved(settings.batch.resolved()) if settings.late_interaction.weight > 0 else None
    batches = segments = tokens = dropped = 0
    fill = 0.0
    with StopRequest() as stop, open_stream(settings.data, settings.batch, late) as stream:
        with (
            PackedWriter(out, batches_per_shard=settings.batches_per_shard) as writer,
            Bar("packing batches", settings.max_batches or None) as bar,
        ):
            for batch in stream:
                writer.write(batch)
                batches += 1
                segments, tokens, dropped = segments + batch.segments, tokens + batch.tokens, dropped + batch.dropped
                fill += max(batch.fill.values())
                bar.at(batches, f"fill {fill / batches:.3f}, {segments:,} items")
                if stop or batches == settings.max_batches:
                    break
        counts = stream.quarantine.counts
    if not batches:
        raise ValueError(f"{', '.join(url for source in settings.data.sources for url in source.urls)}: holds no item that could be packed")
    click.echo(
        f"wrote {batches:,} batches to {out}: {segments:,} items, {tokens:,} tokens, fill {fill / batches:.4f}, {dropped:,} items dropped"
    )
    if counts:
        click.echo("left out: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    if stop:
        click.echo(f"stopped by {stop.name}; what is in the folder is whole")
