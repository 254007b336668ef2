"""`treadle evaluate`: recall at k between modalities, of a checkpoint on shards."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from treadle.launch.config import ConfigError
from treadle.launch.flags import CONTEXT, Suggesting, check_device, configuration, flags, take_flags
from treadle.launch.settings import HeldOutSettings
from treadle.shape import Objective


@click.command("evaluate", cls=Suggesting, context_settings=CONTEXT)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("shards", nargs=-1)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, allow_dash=True), help="Also write the numbers as JSON; - is the screen."
)
@click.option("--dimensions", type=click.IntRange(min=1), help="Leading values of the vectors to compare; all of them when not given.")
@click.option("--device", help="Device to run on; CUDA where there is one when not given.")
@flags(HeldOutSettings)
def evaluate_command(
    checkpoint: Path, shards: tuple[str, ...], json_path: Path | None, dimensions: int | None, device: str | None, **parameters: Any
) -> None:
    """Tell recall at k between modalities on SHARDS (URLs, globs, brace ranges) for a CHECKPOINT (a file, or a run's folder).

    Every item is looked for among all items of the other modality; items of one sample, or of one group, are what should be found. A run's
    own held-out shards and settings are taken where none are given.
    """
    from treadle.launch.held_out import HeldOut
    from treadle.launch.report import recall_table
    from treadle.launch.samples import named
    from treadle.model import Encoder
    from treadle.model.checkpoint_folder import find_checkpoint

    check_device("--device", device)
    path = find_checkpoint(checkpoint)
    defaults = _settings_of_run(path)
    if shards:
        defaults = {**defaults, "sources": list(shards)}
    settings = configuration(HeldOutSettings, None, take_flags(HeldOutSettings, parameters), defaults)
    if not settings.sources:
        raise ConfigError(f"{path}: its run held no shards out: name shards to evaluate on, `treadle evaluate {path} SHARDS`")
    encoder = Encoder.load(path, device)
    if encoder.config.objective == Objective.MASKED:
        click.echo(f"warning: {path} was trained by masked terms alone: nothing drew its vectors together or apart", err=True)
    if dimensions is not None and dimensions > encoder.hidden:
        raise ConfigError(f"--dimensions is {dimensions}: the vectors of {path} have {encoder.hidden} values")
    held_out = HeldOut.read(settings, replace(encoder.config, mesh=None))
    result = held_out.evaluate(encoder.network, encoder.device, bf16=encoder.bf16, dimensions=dimensions)
    if not result.pairs:
        raise ValueError(f"{named(settings.sources)}: no sample holds items of two modalities: there is nothing to look for")
    record = {
        "checkpoint": str(path),
        "samples": held_out.samples,
        "skipped": dict(held_out.skipped),
        "loss": result.loss,
        "losses": dict(result.losses),
        "pairs": [{"query": query, "document": document, **pair.record()} for (query, document), pair in result.pairs.items()],
    }
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(record, indent=1))
        return
    recall_table(result.pairs, f"{path}: {held_out.samples} samples, held-out loss {result.loss:.4g}")
    if held_out.samples == settings.max_samples:
        click.echo(f"these are the first {settings.max_samples} samples: --max-samples asks for more")
    if held_out.skipped:
        click.echo("left out: " + ", ".join(f"{count} {kind}" for kind, count in sorted(held_out.skipped.items())))
    if json_path is not None:
        from treadle.launch.files import write_text

        write_text(json_path, json.dumps(record, indent=1) + "\n")
        click.echo(f"wrote {json_path}")


def _settings_of_run(checkpoint: Path) -> dict[str, object]:
    """The held-out settings of the run that a checkpoint lies in, where its configuration is beside it."""
    from treadle.launch.config import read_toml
    from treadle.launch.training import CONFIG_NAME

    config = checkpoint.parent.parent / CONFIG_NAME
    found = read_toml(config).get("held_out") if config.is_file() else None
    return found if isinstance(found, dict) else {}
