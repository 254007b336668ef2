"""A training run of one rank: stream, trainer, checkpoints, evaluations and logs, from the first step or from where it stopped.

shards -> ShardStream -> Trainer.fit -> on_step: metrics, checkpoints, held-out evaluations, stop requests
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from treadle.launch.files import make_folder, write_text
from treadle.launch.held_out import HeldOut, HeldOutResult, take_part
from treadle.launch.report import STAGE_NAMES, Bar, Number, RunLog, input_stats
from treadle.launch.settings import RunSettings
from treadle.launch.signals import StopRequest
from treadle.launch.streams import open_stream, quarantine_path, stream_sources, with_listed_sources
from treadle.launch.toml_text import to_tree, toml_text
from treadle.model import Mesh, StepResult, Trainer
from treadle.model.checkpoint import read_checkpoint, versions
from treadle.model.checkpoint_folder import FOLDER, CheckpointFolder
from treadle.model.device import computes_in_bf16
from treadle.model.mesh import World, require_same
from treadle.model.objectives import TERMS, term_weights
from treadle.pipeline import PackedBatch, PackedReader, Quarantine, ShardStream
from treadle.pipeline.storage import public_urls
from treadle.shape import Objective

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.toml"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    step: int
    stopped: str
    """What stopped it, a signal as a rule; empty where it ran to its end."""
    interrupted: bool
    """Whether that was a signal, so that whoever sent it waits for this process."""
    last: Path
    best: Path | None
    best_step: int | None
    held_out: HeldOutResult | None
    """The evaluation of the last step."""
    seconds: float


@dataclass(slots=True)
class _Meter:
    """What went into the steps since the last row of metrics."""

    began_s: float
    steps: int = 0
    tokens: int = 0
    bags: int = 0
    fill: float = 0.0
    wait_s: float = 0.0
    """Waited for batches."""

    def rates(self) -> dict[str, Number]:
        elapsed_s = max(time.monotonic() - self.began_s, 1e-9)
        steps = max(self.steps, 1)
        return {
            "step_s": elapsed_s / steps,
            "tokens_per_s": self.tokens / elapsed_s,
            "samples_per_s": self.bags / elapsed_s,
            "fill": self.fill / steps,
            "input_wait_share": min(1.0, self.wait_s / elapsed_s),
        }


class Run:
    """One rank's run. Make it, then `run()`."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        resume: Path | None = None,
        stop: StopRequest | None = None,
        stop_after_s: float | None = None,
        quiet: bool = False,
    ) -> None:
        """
        Args:
            resume: checkpoint to go on from.
            stop: who asks to stop early.
            stop_after_s: in place of the settings' own, where it is no part of what the run is.
            quiet: print nothing.
        """
        self.settings = settings
        self._resume = resume
        self._stop = stop if stop is not None else StopRequest()
        self._stop_after_s = settings.stop_after_s if stop_after_s is None else stop_after_s
        self._quiet = quiet
        self._stream: ShardStream | PackedReader | None = None

    def run(self) -> RunResult:
        """Trains until the schedule ends, the data end or somebody asks to stop; saves in every case.

        Raises:
            ValueError: the configuration does not fit the data, the checkpoint or the other ranks; or no batch came from the data.
            StorageFileError: a checkpoint could not be read or written.
        """
        settings = self.settings
        with ExitStack() as stack:
            mesh = stack.enter_context(Mesh.bootstrap(settings.mesh, device=settings.trainer.device))
            world = mesh.world
            require_same(world, _shared(settings))
            first = world.rank == 0
            self._held_out: HeldOut | None = None
            if first:
                # Held-out shards that are missing are told now, not hours later.
                if settings.held_out.sources:
                    self._held_out = HeldOut.read(settings.held_out, settings.trainer)
                make_folder(settings.output)
                make_folder(settings.output / FOLDER)
            resume = self._resume or settings.trainer.resume
            config = replace(settings.trainer, mesh=mesh, resume=resume, init=None if resume else settings.trainer.init, progress=None)
            stream = _opened(settings, world)
            stack.enter_context(stream)
            self._trainer = trainer = stack.enter_context(Trainer(config))
            if trainer.stream_state is not None:
                stream.load_state(trainer.stream_state)
            self._checkpoints = CheckpointFolder(settings.output / FOLDER, keep=settings.keep)
            self._log: RunLog | None = None
            if first:
                text = toml_text(to_tree(settings.resolved()))
                # URLs with credentials are needed to go on with the run, and are nobody else's business.
                write_text(settings.output / CONFIG_NAME, text, private=public_urls(text) != text)
                self._log = stack.enter_context(RunLog(settings.output, after_step=trainer.steps_done))
            if trainer.steps_done:
                self._checkpoints.forget_after(trainer.steps_done)
            total = settings.trainer.schedule.steps
            self._bar = stack.enter_context(Bar("training", total, quiet=self._quiet or not first))
            self._bar.at(trainer.steps_done)
            if trainer.steps_done >= total:
                self._bar.say(
                    f"{resume} is at step {trainer.steps_done}: the run of {total} steps is finished already; to go on, ask for more than "
                    f"that, as with --steps {2 * trainer.steps_done}"
                )
            elif resume is not None:
                self._bar.say(f"going on after step {trainer.steps_done} of {total}, from {resume}")
            return self._train(stream)

    def _train(self, stream: ShardStream | PackedReader) -> RunResult:
        trainer = self._trainer
        self._began_s = began_s = time.monotonic()
        self._meter = _Meter(began_s)
        self._result: HeldOutResult | None = None
        self._evaluated_step = -1
        trainer.fit(self._metered(stream), on_step=self._on_step)
        if not trainer.steps_done and not self._stop:
            quarantine = stream.quarantine
            left_out = quarantine.summary() if isinstance(quarantine, Quarantine) else "nothing was quarantined"
            raise ValueError(f"no batch came from the data, so nothing was trained ({left_out}): check data.sources and data.schema")
        if not self._stop.urgent:
            self._evaluate()
        self._checkpoints.save(trainer)
        unfinished = trainer.steps_done < self.settings.trainer.schedule.steps
        return RunResult(
            step=trainer.steps_done,
            stopped=self._stop.name if self._stop and unfinished else "",
            interrupted=self._stop.urgent and unfinished,
            last=self._checkpoints.last,
            best=self._checkpoints.best,
            best_step=self._checkpoints.best_step,
            held_out=self._result,
            seconds=time.monotonic() - began_s,
        )

    def _metered(self, stream: ShardStream | PackedReader) -> Iterator[PackedBatch]:
        batches = iter(stream)
        self._stream = stream
        while not self._stop:
            asked_s = time.monotonic()
            batch = next(batches, None)
            self._meter.wait_s += time.monotonic() - asked_s
            if batch is None:
                return
            self._meter.tokens += batch.tokens
            self._meter.bags += batch.bags
            self._meter.fill += max(batch.fill.values(), default=0.0)
            yield batch

    def _on_step(self, result: StepResult) -> bool:
        settings, trainer = self.settings, self._trainer
        step = trainer.steps_done
        self._meter.steps += 1
        if step % settings.log_every == 0:
            self._write_row(result)
        else:
            self._bar.at(step)
        if settings.evaluate_every and step % settings.evaluate_every == 0:
            self._evaluate()
        if step % settings.save_every == 0:
            self._checkpoints.save(trainer, wait=False)
        if self._stop_after_s and time.monotonic() - self._began_s > self._stop_after_s:
            self._stop.ask(f"stop_after_s {self._stop_after_s:g}")
        return not self._stop

    def _write_row(self, result: StepResult) -> None:
        stats = result.stats
        rates = self._meter.rates()
        weights = term_weights(self.settings.trainer)
        losses = [_LOSSES[term] for term, weight in zip(TERMS, weights, strict=True) if weight]
        values: dict[str, Number] = {name: getattr(stats, name) for name in (*_STATISTICS, *losses)}
        for name, temperatures in (("", self._trainer.network.temperatures), ("token_", self._trainer.network.token_temperatures)):
            if temperatures is not None:
                values[f"{name}inverse_temperature"] = float(temperatures.log_scale_G.detach()[0].exp())
                values[f"{name}bias"] = float(temperatures.bias_G.detach()[0])
        limits = ""
        if isinstance(self._stream, ShardStream):
            read, limits = input_stats(self._stream)
            rates |= read
        if self._log is not None:
            self._log.row(stats.step, "train", values | rates | ({"limiting_stage": limits} if limits else {}))
        logger.info("step %d: loss %.6g, %.0f tokens/s", stats.step, stats.loss, rates["tokens_per_s"])
        for refusal in stats.refusals:
            self._bar.say(f"step {stats.step}: an update was refused: {refusal}")
        waits = f", {STAGE_NAMES[limits]} limits" if limits else ""
        self._bar.at(stats.step, f"loss {stats.loss:.4g}, {rates['tokens_per_s']:,.0f} tokens/s{waits}")
        self._meter = _Meter(time.monotonic())

    def _evaluate(self) -> None:
        """Evaluates on rank 0 while the others wait, and keeps the checkpoint where it is the best yet (collective)."""
        trainer, settings = self._trainer, self.settings
        step = trainer.steps_done
        if not settings.held_out.sources or step == self._evaluated_step:
            return
        self._evaluated_step = step
        began_s, value = time.monotonic(), None
        if trainer.network.runs_when_empty:
            passes = trainer.world.exchange([self._held_out.forward_passes if self._held_out is not None else 0])[0][0]
            if trainer.world.rank:
                with trainer.world.waiting("an evaluation"):
                    take_part(trainer.network, settings.trainer, trainer.device, passes)
        if trainer.world.rank == 0:
            assert self._held_out is not None
            bf16 = computes_in_bf16(settings.trainer.precision, trainer.device)
            result = self._held_out.evaluate(trainer.network, trainer.device, bf16=bf16)
            self._result = result
            value = result.value(settings.held_out.best_by, settings.trainer.objective)
            if self._log is not None:
                self._log.row(step, "held_out", result.record() | {"evaluation_s": time.monotonic() - began_s})
            self._bar.say(f"step {step}: {summary(result, settings.trainer.objective)}")
        better = value is not None and (self._checkpoints.best_value is None or value > self._checkpoints.best_value)
        if trainer.world.exchange([int(better)])[0][0]:
            # Every rank takes part in a save; only rank 0 knows the value.
            self._checkpoints.offer(trainer, value if value is not None else float("inf"))
        # What evaluation took is no step's time.
        self._meter.began_s += time.monotonic() - began_s


_LOSSES = {
    "text": "masked_text_loss",
    "image": "masked_image_loss",
    "video": "masked_video_loss",
    "audio": "masked_audio_loss",
    "contrastive": "contrastive_loss",
    "late_interaction": "late_interaction_loss",
    "choices": "choices_loss",
}
"""The statistic that tells each term."""

_STATISTICS = ("loss", "learning_rate", "gradient_norm", "truncated", "dropped", "skipped")


def summary(result: HeldOutResult, objective: Objective) -> str:
    """An evaluation in one line."""
    text = f"held-out loss {result.loss:.4g}"
    if objective is not Objective.MASKED and result.pairs:
        # Of the kind that asks most, which is captions as a rule; the table at the end has all.
        most = max(result.pairs, key=lambda pair: result.pairs[pair].queries)[0]
        shown = ", ".join(f"{found} {100 * pair.recall[1]:.0f}" for (query, found), pair in result.pairs.items() if query == most)
        text += f"; recall@1 in percent, {most} to {shown}; {100 * (result.mean_recall or 0):.1f} over all pairs"
    return text


_OF_A_MACHINE = ("threads", "processes", "cache", "cache_bytes", "quarantine")
"""Settings of the data that machines need not have in common."""


def _shared(settings: RunSettings) -> dict[str, object]:
    """What every rank must have alike, beside what the trainer compares: the order of the data, and when ranks save and evaluate together."""
    names = ("log_every", "save_every", "keep", "stop_after_s", "evaluate_every")
    data = {name: value for name, value in to_tree(settings.data).items() if name not in _OF_A_MACHINE}
    return {
        "versions": versions(),
        "data": data,
        "held_out": to_tree(settings.held_out),
        **{name: getattr(settings, name) for name in names},
    }


def _opened(settings: RunSettings, world: World) -> ShardStream | PackedReader:
    data, trainer = settings.data, settings.trainer
    rank, world_size = world.rank, world.size
    if data.packed:
        quarantine = Quarantine(quarantine_path(data, rank, world_size))
        return PackedReader(
            data.packed, rank=rank, world_size=world_size, epochs=data.epochs, on_error=data.on_error, quarantine=quarantine
        )
    late = trainer.late_interaction.resolved(trainer.batch.resolved()) if trainer.late_interaction.weight > 0 else None
    data = with_listed_sources(data, world)
    return open_stream(data, trainer.batch, late, max_edges=trainer.contrastive.max_edges_per_device, rank=rank, world_size=world_size)


def check_resume(path: Path) -> int:
    """The step of a checkpoint that is to be resumed, read whole, so that a damaged one is told before anything is made.

    Raises:
        StorageFileError: it is damaged or no checkpoint.
    """
    return read_checkpoint(path).step


__all__ = ["CONFIG_NAME", "Run", "RunResult", "check_resume", "stream_sources", "summary"]
