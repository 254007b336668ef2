"""`treadle train`: a run from a TOML file and/or flags; alone, as one process per GPU, or as a rank."""

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import click

from treadle.launch.config import ConfigError
from treadle.launch.flags import CONTEXT, Suggesting, check_device, configuration, flags, take_flags
from treadle.launch.settings import RunSettings
from treadle.launch.toml_text import template

STOPPED_VARIABLE = "TREADLE_STOPPED_FILE"
"""Where rank 0 tells the process that started it that a stop went well."""


@click.command("train", cls=Suggesting, context_settings=CONTEXT)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option(
    "--resume", "resume", metavar="PATH", type=click.Path(path_type=Path), help="Go on from a run's folder, or from a checkpoint."
)
@click.option(
    "--auto-resume", "auto_resume", is_flag=True, help="Go on from the newest checkpoint in the output folder, where there is one."
)
@click.option("--nodes", metavar="N", type=int, help="Short for --workers.nodes.")
@click.option("--node-rank", metavar="R", type=int, help="Short for --workers.node_rank.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Short for --workers.rendezvous.")
@click.option("--steps", metavar="N", type=int, help="Short for --trainer.schedule.steps.")
@click.option("--template", "show_template", is_flag=True, help="Print a configuration file of every field with its meaning, and stop.")
@click.option("--show", "show_config", is_flag=True, help="Print the configuration that would run, resolved, and stop.")
@flags(RunSettings)
def train_command(
    config: Path | None, resume: Path | None, auto_resume: bool, show_template: bool, show_config: bool, **parameters: Any
) -> None:
    """Train a tower on shards.

    CONFIG is a TOML file; every key of it is also a flag, and flags win. With --resume the run's own configuration is read where none is
    given. One process per GPU is started; with --nodes, --node-rank and --rendezvous the same command joins other machines, one command
    per node; under torchrun or SLURM this process is a rank.
    """
    if show_template:
        click.echo(template(RunSettings))
        return
    settings, checkpoint = _settings(config, resume, parameters)
    if show_config:
        from treadle.launch.toml_text import to_tree, toml_text
        from treadle.pipeline.storage import public_urls

        # No credential is printed: whoever runs this text puts them back, or has them in the environment, where they belong.
        click.echo(public_urls(toml_text(to_tree(settings.resolved()))), nl=False)
        return
    _start(settings, checkpoint, auto_resume=auto_resume and checkpoint is None)


def _settings(config: Path | None, resume: Path | None, parameters: dict[str, Any]) -> tuple[RunSettings, Path | None]:
    from treadle.launch.training import CONFIG_NAME

    given = take_flags(RunSettings, parameters)
    by_name = {leaf.name: leaf for leaf in _leaves()}
    for short, name in _SHORT.items():
        if parameters.get(short) is not None:
            given.append((by_name[name], parameters[short]))
    checkpoint = None
    if resume is not None:
        checkpoint = _found(resume)
        if config is None:
            folder = checkpoint.parent.parent
            config = folder / CONFIG_NAME
            if not config.is_file():
                raise ConfigError(f"{config}: no configuration beside the checkpoint: name the TOML file of the run as well")
            if not any(leaf.name == "output" for leaf, _ in given):
                # Where the run lies now, which may not be where it began.
                given.append((by_name["output"], str(folder)))
    settings = configuration(RunSettings, config, given)
    if checkpoint is None and settings.trainer.resume is not None:
        checkpoint = _found(Path(settings.trainer.resume))
    check_device("trainer.device", settings.trainer.device)
    return settings, checkpoint


def _found(path: Path) -> Path:
    """The checkpoint that a path means."""
    from treadle.model.checkpoint_folder import find_checkpoint

    try:
        return find_checkpoint(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


_SHORT = {
    "nodes": "workers.nodes",
    "node_rank": "workers.node_rank",
    "rendezvous": "workers.rendezvous",
    "steps": "trainer.schedule.steps",
}


def _leaves() -> "list[Any]":
    from treadle.launch.config import leaves

    return leaves(RunSettings)


def _start(settings: RunSettings, checkpoint: Path | None, *, auto_resume: bool) -> None:
    from treadle.launch import workers
    from treadle.launch.streams import check_batch

    os.environ.update(workers.adopt_slurm(os.environ))
    role = workers.role(settings.workers, os.environ)
    check_batch(settings.trainer.batch, settings.data.max_edges or settings.trainer.contrastive.max_edges_per_device)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted or auto_resume:
        # What was saved since is newer than the checkpoint that the first start was given.
        checkpoint = _latest_of(settings.output) or checkpoint
    elif checkpoint is None:
        refuse_used(settings.output)
    else:
        refuse_older(checkpoint, settings.output)
    if role == "launcher":
        # Ranks look themselves, each time they start: a machine that comes back would else name an older checkpoint than the others.
        given = ["--auto-resume"] if auto_resume else ["--resume", str(checkpoint)] if checkpoint is not None else []
        workers.start_ranks(settings.workers, lambda folder: [*_rank_arguments(settings, folder), *given], STOPPED_VARIABLE)
        return
    train_here(settings, checkpoint)


def refuse_used(output: Path) -> None:
    """Refuses to write a new run over another.

    Raises:
        ConfigError: the folder holds a run.
    """
    from treadle.model.checkpoint_folder import FOLDER

    if any((output / FOLDER).glob("*.safetensors")):
        raise ConfigError(
            f"{output}: holds a run already: go on with `treadle train --resume {shlex.quote(str(output))}`, or choose another --output"
        )


def refuse_older(checkpoint: Path, output: Path) -> None:
    """Refuses to go on from a checkpoint into a folder with newer ones, which a restart would take for this run's own.

    Raises:
        ConfigError: the folder holds a newer checkpoint.
        StorageFileError: `checkpoint` is damaged.
    """
    from treadle.model.checkpoint_folder import saved_step

    newest = _latest_of(output)
    if newest is not None and saved_step(checkpoint) < saved_step(newest):
        raise ConfigError(
            f"{checkpoint}: is at step {saved_step(checkpoint)}, and the output folder {output} holds step {saved_step(newest)}: go on from "
            f"that with `{resume_command(output)}`, or choose another --output to go on from the older one"
        )


def _latest_of(output: Path) -> Path | None:
    from treadle.model.checkpoint_folder import find_checkpoint

    try:
        return find_checkpoint(output)
    except ValueError:
        return None  # it failed before its first checkpoint


def _rank_arguments(settings: RunSettings, folder: Path) -> list[str]:
    """The command that every rank runs: the configuration with all flags in it, in a file of `folder`."""
    from treadle.launch.files import write_text
    from treadle.launch.toml_text import to_tree, toml_text

    path = folder / "ranks.toml"
    write_text(path, toml_text(to_tree(settings)))
    verbose = ["-v"] if logging.getLogger().isEnabledFor(logging.INFO) else []
    return [*verbose, "train", str(path)]


def train_here(settings: RunSettings, checkpoint: Path | None) -> None:
    """Trains in this process and says how it ended."""
    from treadle.launch.signals import StopRequest
    from treadle.launch.training import Run

    with StopRequest() as stop:
        run = Run(settings, resume=checkpoint, stop=stop)
        result = run.run()
    if int(os.environ.get("RANK", "0")):
        return
    if result.stopped:
        click.echo(f"stopped by {result.stopped} after step {result.step}; everything is saved in {result.last}")
        click.echo(f"resume with: {resume_command(settings.output)}")
        if marker := os.environ.get(STOPPED_VARIABLE):
            Path(marker).touch()
        return
    _tell(settings, result)


def resume_command(output: Path) -> str:
    """What to type to go on with a run."""
    return f"treadle train --resume {shlex.quote(str(output))}"


def _tell(settings: RunSettings, result: "Any") -> None:
    from treadle.launch.report import recall_table

    if result.held_out is not None and result.held_out.pairs:
        recall_table(result.held_out.pairs, f"held-out recall after step {result.step}")
    output = settings.output
    click.echo(f"trained to step {result.step} in {result.seconds:.0f} s")
    click.echo(f"  checkpoint   {result.last}")
    if result.best is not None:
        click.echo(f"  best         {result.best} (step {result.best_step})")
    click.echo(f"  metrics      {output / 'metrics.jsonl'}")
    click.echo(f"  curves       tensorboard --logdir {shlex.quote(str(output / 'tensorboard'))}")
    click.echo(f"  config       {output / 'config.toml'}")
    click.echo(f"  go on with   {resume_command(output)} --steps {2 * result.step}")
