"""`treadle demo`: writes a small four-modality dataset, trains on it, and tells what the tower learned about combinations it never saw.

scenes -> encoded files -> tar shards -> ShardStream -> Trainer -> checkpoint -> recall, questions answered, what to type next
"""

import shlex
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.launch.demo_captions import LANGUAGES, SECOND_LANGUAGES, Kind
from treadle.launch.demo_data import DatasetPlan, write_dataset
from treadle.launch.flags import CONTEXT, Suggesting, configuration, flags, take_flags

if TYPE_CHECKING:
    from treadle.launch.settings import RunSettings
    from treadle.launch.training import RunResult

TRAINING_S = 150.0
"""What the steps of an unhurried demo may take; how many that is depends on the machine."""

LIMIT_S = 245.0
"""When an unhurried demo stops training whatever its plan was: a machine may get busier than it was when a step was timed."""

LEAST_STEPS, MOST_STEPS = 200, 800
TIMED_STEPS = 5

KINDS = {"txt": "caption", **{f"{code}.txt": "other script" for code in SECOND_LANGUAGES}}


@click.command("demo", cls=Suggesting, context_settings=CONTEXT)
@click.option("--out", type=click.Path(path_type=Path), default=Path("treadle-demo"), show_default=True, help="Folder to write to.")
@click.option("--steps", type=click.IntRange(min=1), help=f"Steps to train; as many as fit {TRAINING_S:.0f} s when not given.")
@click.option("--device", help="Device to train on; CUDA where there is one when not given.")
@click.option("--again", is_flag=True, help="Write over what an earlier demo left in the folder.")
@flags(DatasetPlan)
def demo_command(out: Path, steps: int | None, device: str | None, again: bool, **parameters: Any) -> None:
    """Write a small dataset of captioned pictures, clips and sounds and train on it.

    Nothing is downloaded. On two cores it takes about four minutes.
    """
    plan = configuration(DatasetPlan, None, take_flags(DatasetPlan, parameters))
    run_demo(out, plan, steps=steps, device=device, again=again)


def demo_settings(out: Path, steps: int, device: str | None = None) -> "RunSettings":
    """The run that the demo trains: a tower of 1.8 million parameters, and batches of about sixty samples."""
    from treadle.launch.settings import DataSettings, HeldOutSettings, RunSettings, SourceSettings
    from treadle.model.config import Schedule, TrainerConfig
    from treadle.shape import AudioShape, BatchShape, ImageShape, Objective, VideoShape

    batch = BatchShape(
        max_rows_per_device=28,
        max_segments_per_device=192,
        max_columns_per_row=128,
        image=ImageShape(patch_side=16, channels=3),
        video=VideoShape(patch_side=16, tube_frames=8),
        audio=AudioShape(chunk_samples=320, sample_rate=8000),
    )
    trainer = TrainerConfig(
        depth=4,
        hidden=128,
        batch=batch,
        objective=Objective.CONTRASTIVE,
        schedule=Schedule(steps=steps, learning_rate=1.5e-3, warmup_steps=max(1, steps // 10)),
        device=device,
    )
    return RunSettings(
        output=out / "run",
        trainer=trainer,
        data=DataSettings(
            sources=(SourceSettings(urls=(str(out / "shards" / "train-*.tar"),)),), quarantine=out / "run" / "quarantine.jsonl"
        ),
        held_out=HeldOutSettings(sources=(SourceSettings(urls=(str(out / "shards" / "held-out-*.tar"),)),), kinds=KINDS),
        log_every=10,
        save_every=-(-steps // 2),
        evaluate_every=-(-steps // 4),
    )


def run_demo(out: Path, plan: DatasetPlan, *, steps: int | None, device: str | None, again: bool) -> None:
    """The whole demo.

    Raises:
        ValueError: the folder cannot be written to, or holds a run.
    """
    from treadle.launch.files import make_folder
    from treadle.launch.train import refuse_used

    began_s = time.monotonic()
    make_folder(out)
    if again:
        _forget(out)
    refuse_used(out / "run")
    _write(out, plan)
    settings = demo_settings(out, steps or MOST_STEPS, device)
    picture, step_s = _try_out(settings, out)
    limit_s = 0.0
    if steps is None:
        steps = max(LEAST_STEPS, min(MOST_STEPS, int(TRAINING_S / step_s) // 20 * 20))
        click.echo(f"A step takes {step_s:.2f} s here: training {steps} of them, about {steps * step_s:.0f} s.")
        limit_s = max(30.0, LIMIT_S - (time.monotonic() - began_s))
    settings = demo_settings(out, steps, device)
    result = _train(settings, limit_s)
    if result is None:
        return
    _tell(out, settings, result, picture, time.monotonic() - began_s)


def _forget(out: Path) -> None:
    """Removes what an earlier demo wrote, and nothing else."""
    import shutil

    shutil.rmtree(out / "run", ignore_errors=True)
    for path in (out / "shards").glob("*.tar"):
        path.unlink()


def _write(out: Path, plan: DatasetPlan) -> None:
    from treadle.launch.report import Bar, console

    began_s = time.monotonic()
    with Bar("writing samples", plan.samples) as bar:
        train, held_out = write_dataset(out / "shards", plan, lambda done, total: bar.at(done))
    size_mb = sum(path.stat().st_size for path in (*train, *held_out)) / 1e6
    from rich.table import Table

    table = Table(title="The dataset: every picture, clip and sound with a caption of what it shows", title_justify="left")
    for column in ("", "to train on", "held out", "files", "a caption"):
        table.add_column(column)
    from treadle.launch.demo_captions import AXES, caption
    from treadle.launch.demo_encode import FORMATS

    for kind in Kind:
        example = caption(kind, tuple(size - 1 for size in AXES[kind].values()))
        counts = [str(getattr(plan, f"{prefix}{kind.value}s")) for prefix in ("", "held_out_")]
        table.add_row(f"{kind.value}s", *counts, ", ".join(FORMATS[kind]), example)
    console().print(table)
    click.echo(
        f"{len(train)} + {len(held_out)} tar shards, {size_mb:.0f} MB, in {out / 'shards'} after {time.monotonic() - began_s:.0f} s. "
        f"Captions come in {len(LANGUAGES)} scripts; held-out samples show combinations never trained on."
    )


def _try_out(settings: "RunSettings", out: Path) -> tuple[Path, float]:
    """Draws the first packed batch, and times a few steps of a trainer that is thrown away."""
    from treadle.launch.training import stream_sources
    from treadle.model import Trainer
    from treadle.pipeline import ShardStream

    trainer_config = settings.trainer
    picture = out / "packed_batch.png"
    with ShardStream(stream_sources(settings.data), trainer_config.batch, seed=settings.data.seed) as stream:
        batches = iter(stream)
        first = next(batches)
        first.draw(picture)
        with Trainer(replace(trainer_config, mesh=None)) as trainer:
            trainer.step(first).stats  # noqa: B018  # reading the statistics waits for the device
            took_s: list[float] = []
            for _ in range(TIMED_STEPS):
                began_s = time.monotonic()
                batch = next(batches, None)
                trainer.step(batch if batch is not None and batch.segments else first).stats  # noqa: B018
                took_s.append(time.monotonic() - began_s)
            return picture, statistics.median(took_s)


def _train(settings: "RunSettings", limit_s: float) -> "RunResult | None":
    from treadle.launch.signals import StopRequest
    from treadle.launch.train import resume_command
    from treadle.launch.training import Run

    with StopRequest() as stop:
        result = Run(settings, stop=stop, stop_after_s=limit_s).run()
    if result.interrupted:
        click.echo(f"stopped by {result.stopped} after step {result.step}; everything is saved in {result.last}")
        click.echo(f"resume with: {resume_command(settings.output)}")
        return None
    return result


def _tell(out: Path, settings: "RunSettings", result: "RunResult", picture: Path, seconds: float) -> None:
    from treadle.launch.demo_questions import ask
    from treadle.launch.report import recall_table

    assert result.held_out is not None
    recall_table(result.held_out.pairs, f"Held-out combinations after step {result.step}: which one is it?")
    ask(result.last, settings)
    run, shards = settings.output, out / "shards"
    held_out = shlex.quote(str(shards / "held-out-*.tar"))
    best = result.best or result.last
    click.echo(f"\nDone in {seconds:.0f} s, {peak_memory_gib():.2f} GiB at most. What there is now:")
    for what, where in (
        ("last checkpoint", result.last),
        (f"best checkpoint (step {result.best_step})", best),
        ("metrics", run / "metrics.jsonl"),
        ("TensorBoard logs", run / "tensorboard"),
        ("a packed batch", picture),
        ("the run's settings", run / "config.toml"),
    ):
        click.echo(f"  {what:<28} {where}")
    click.echo("What to type next:")
    for line in (
        f"treadle encode {shlex.quote(str(best))} --text 'large blue star, top left' --out {shlex.quote(str(out / 'query.npy'))}",
        f"treadle evaluate {shlex.quote(str(best))} {held_out}",
        f"treadle inspect {shlex.quote(str(shards / 'train-*.tar'))} --config {shlex.quote(str(run / 'config.toml'))}"
        f" --html {shlex.quote(str(out / 'shards.html'))}",
        f"treadle train --resume {shlex.quote(str(run))} --steps {2 * result.step}",
        f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}",
    ):
        click.echo(f"  {line}")


def peak_memory_gib() -> float:
    """The most memory that this process has held, GiB."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


__all__ = ["demo_command", "demo_settings", "peak_memory_gib", "run_demo"]
