"""`treadle pack`: reads, decodes and packs shards once, so that training only has to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from treadle.launch.config import ConfigError, Leaf, Tree, locate, read_toml
from treadle.launch.flags import CONTEXT, Suggesting, configuration, flags, take_flags
from treadle.launch.settings import PackSettings

T = TypeVar("T")


_NAMES = ("batch", "data", "late_interaction", "batches_per_shard", "max_batches", "ranks", "workers")


def packing_tree(config: Path | None, sources: tuple[str, ...]) -> Tree:
    """The parts of a training configuration that packing reads, one epoch unless it says otherwise."""
    tree: Tree = {}
    edges: object = None
    if config is not None:
        read = read_toml(config)
        trainer = read.get("trainer")
        if isinstance(trainer, dict):
            tree |= {name: trainer[name] for name in ("batch", "late_interaction") if name in trainer}
            contrastive = trainer.get("contrastive")
            edges = contrastive.get("max_edges_per_device") if isinstance(contrastive, dict) else None
        tree |= {name: read[name] for name in _NAMES if name in read}
    given = tree.get("data")
    data: Tree = {"epochs": 1, **(given if isinstance(given, dict) else {})}
    if edges is not None and not data.get("max_edges"):
        data["max_edges"] = edges  # what the trainer's own stream would be given
    if sources:
        data["sources"] = list(sources)
    tree["data"] = data
    return tree


def configured(owner: type[T], config: Path | None, given: Sequence[tuple[Leaf, object]], tree: Tree) -> T:
    """A configuration of `packing_tree`'s parts and flags; what is wrong with the file is told with the file and the line.

    Raises:
        ConfigError: the file or a flag is wrong.
    """
    try:
        return configuration(owner, None, given, tree)
    except ConfigError as error:
        key = error.key.split("[")[0]
        if config is None or any(leaf.name == key or leaf.name.startswith(f"{key}.") for leaf, _ in given):
            raise
        places = [locate(config, prefix + key) for prefix in ("", "trainer.")]
        place = next((place for place in places if place != str(config)), str(config))
        raise ConfigError(f"--config {place}: {error}", error.key) from error


@click.command("pack", cls=Suggesting, context_settings=CONTEXT)
@click.argument("sources", nargs=-1)
@click.option("--out", required=True, help="Folder or object-store URL of the packed shards. One that is packed in part is gone on with.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="TOML file of a training run, whose batch shape and data settings are taken."
)
@flags(PackSettings)
def pack_command(sources: tuple[str, ...], out: str, config: Path | None, **parameters: Any) -> None:
    """Read, decode and pack SOURCES (URLs, globs, brace ranges of tar shards) into shards of packed batches.

    `treadle train --data.packed FOLDER` then reads batches instead of samples. With --ranks as many as will train, it takes the same
    steps, bit for bit. Interrupted, or killed, the same command goes on where it was.
    """
    given = take_flags(PackSettings, parameters)
    if not sources and config is None and not any(leaf.name == "data.sources" for leaf, _ in given):
        raise click.UsageError("there is nothing to pack: name shards, or a configuration that does")
    settings = configured(PackSettings, config, given, packing_tree(config, sources))
    if not settings.data.sources:
        raise click.UsageError(f"--config {config}: names no sources to pack: name shards")
    if not out or out.rstrip("/").endswith(":"):
        # As `--out "$FOLDER"` or `--out s3://$BUCKET` is where the variable is not set: else the root folder, or one named `s3:` here.
        raise click.UsageError(f"--out is {out!r}: name a folder or an object-store URL")
    _pack(settings, out.rstrip("/") or "/")


def _pack(settings: PackSettings, out: str) -> None:
    from treadle.launch.packing import Packed, already_packed, is_joined, pack_all
    from treadle.launch.report import Bar
    from treadle.launch.samples import named
    from treadle.launch.signals import StopRequest
    from treadle.launch.streams import check_batch
    from treadle.pipeline.storage import public_url

    check_batch(settings.batch, settings.data.max_edges)
    where = public_url(out)
    before = [already_packed(out, part, settings.ranks) for part in range(settings.ranks)]
    batches_before = sum(part.batches for part in before)
    # Killed between the end of the last rank and the joining of their indexes, there is that left to do.
    if all(part.complete for part in before) and is_joined(out, settings.ranks):
        raise ValueError(f"{where} is packed to its end, {batches_before:,} batches: there is nothing left to do; give another folder")
    most = settings.max_batches * settings.ranks
    with StopRequest() as stop, Bar("packing batches", most or None) as bar:
        if batches_before:
            bar.say(f"{where} holds {batches_before:,} batches: going on after them")

        def tell(done: Packed) -> None:
            bar.at(done.batches, f"fill {done.mean_fill:.3f}, {done.segments:,} items")

        done = pack_all(settings, out, tell=tell, stopped=lambda: bool(stop))
    if not done.batches:
        raise ValueError(f"{named(settings.data.sources)}: holds no item that could be packed")
    click.echo(
        f"wrote {done.batches:,} batches to {where}: {done.segments:,} items, {done.tokens:,} tokens, fill {done.mean_fill:.4f}, "
        f"{done.dropped:,} items dropped"
    )
    if done.lost:
        click.echo("left out: " + ", ".join(f"{count} {kind}" for kind, count in sorted(done.lost.items())))
    if stop:
        click.echo(f"stopped by {stop.name}; what is in the folder is whole, and the same command goes on after it")
