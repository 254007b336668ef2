"""The trainer: what a user holds of a training run.

Everything that reads or changes the run's state (steps, accumulation, saving) goes through one worker thread, in the order of the calls.
A blocking call waits for its turn; an interrupted wait leaves a whole step behind it, never half of one.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from treadle.model.capacity import check_batch
from treadle.model.checkpoint import (
    CheckpointContent,
    CheckpointMismatchError,
    RankState,
    fold_ranks,
    read_checkpoint,
    require_entries,
    versions,
)
from treadle.model.config import Progress, TrainerConfig
from treadle.model.config_json import geometry_differences, to_json
from treadle.model.deferred import Deferred, Worker, settled
from treadle.model.device import computes_in_bf16, keep_freed_memory, pick_device
from treadle.model.memory import check_memory, naming_memory
from treadle.model.mesh import World, require_same
from treadle.model.mesh_code import code_digest
from treadle.model.mesh_errors import raise_together
from treadle.model.network import Network
from treadle.model.progress import ProgressReports, Stopped
from treadle.model.rank_states import collect_ranks
from treadle.model.statistics import StatisticsReader, StepResult, TrainerStepStats
from treadle.model.step import PeerRefusedError, StepRunner
from treadle.pipeline import PackedBatch, Packer, StepItems, StreamState
from treadle.shape import require_count, require_member, require_path, shown

__all__ = ["Batch", "Deferred", "PeerRefusedError", "Stopped", "Trainer", "TrainerStepStats"]

logger = logging.getLogger(__name__)

Batch = PackedBatch | Sequence[PackedBatch] | StepItems | None
"""What a step takes: a packed batch, several that make one step, items to pack, or None where this rank has run out."""

INIT_GEOMETRY = ("depth", "hidden", "batch.image", "batch.video", "batch.audio")
"""What must match for weights to start another run."""

OPTIONAL_PARAMETERS = "heads.text."
"""Choices may be switched on or off between resumes, and with them a head."""


class HasState(Protocol):
    """A stream that knows its position."""

    @property
    def state(self) -> StreamState | None: ...


class Trainer:
    """A training run of one rank. A context manager that ends its thread; see `TrainerConfig` for what it trains.

    Raises:
        ValueError: the configuration contradicts itself, the checkpoint, or another rank's.
        StorageFileError: the checkpoint to resume is missing, damaged or of a newer format.
        Stopped: the progress callback stopped the resume.
        PeerRefusedError: another rank raised one of these.
    """

    def __init__(self, config: TrainerConfig) -> None:
        require_member("Trainer", "config", config, TrainerConfig)
        self.config = config
        self.world: World = config.mesh.world if config.mesh is not None else World()
        own = config.mesh.device if config.mesh is not None and config.device is None else config.device
        self.device = pick_device("TrainerConfig.device", own)
        if self.device.type == "cpu":
            keep_freed_memory()
        bf16 = computes_in_bf16(config.precision, self.device)
        shared: dict[str, object] = {"config": to_json(config), "versions": versions(), "device": self.device.type, "bf16": bf16}
        shared |= {"parallel": config.parallel, "shard_ranks": config.shard_ranks}
        if self.world.size > 1:
            shared["code"] = code_digest()
        require_same(self.world, shared)
        self._together("holds no such model", lambda: check_memory(config, self.device, self.world.size))
        with naming_memory(config):
            self.network = Network(config).to(self.device)
            self._runner = StepRunner(config, self.network, self.world, self.device, bf16=bf16)
        self._reader = StatisticsReader()
        self._stream_state: StreamState | None = None
        self._packer: Packer | None = None
        self._together("could not read its checkpoint", lambda: self._read(config))
        require_same(self.world, {"step of the checkpoint to resume": self._runner.steps})
        self._worker = Worker("treadle-trainer", self.device)
        self._writer = Worker("treadle-writer", self.device)
        self._saving: Deferred[None] | None = None

    @property
    def steps_done(self) -> int:
        """Steps taken across resumes."""
        return self._runner.steps

    @property
    def stream_state(self) -> StreamState | None:
        """What to load this rank's stream with to go on after the last step: the position after the last batch consumed.

        After a resume it is the saved one, this rank's own at the saved world size, else that of all ranks, merged.
        """
        return self._stream_state

    def step(self, batch: Batch, *, embeddings: torch.dtype | None = None) -> StepResult:
        """Takes one optimizer step over this rank's batch and every peer's (collective).

        Args:
            batch: a list makes one step of several micro-batches; None takes part with nothing.
            embeddings: a floating type answers the pooled vectors as scored, before the update.

        Raises:
            ValueError: the batch passes the trainer's capacities; nothing was done, on any rank.
            DecodeError: an item of a `StepItems` cannot be decoded; its `index` says which.
            PeerRefusedError: another rank raised one of these.
        """
        return self.submit(batch, embeddings=embeddings).result()

    def submit(self, batch: Batch, *, embeddings: torch.dtype | None = None) -> Deferred[StepResult]:
        """`step` without waiting: calls run in order, and errors come with `result()`. The batch must not change until it is done."""

        def run() -> StepResult:
            result = self._step(batch, embeddings)
            assert result is not None
            return result

        return self._worker.submit(run)

    def accumulate(self, batch: Batch) -> None:
        """Adds a micro-batch to the next step, without an update (collective; None where this rank has nothing).

        Raises:
            ValueError, DecodeError, PeerRefusedError: as `step`.
        """

        def run() -> None:
            batches, error = self._take(batch, None)
            agreement = self._runner.agree(batches, error)
            with self._runner.watched():
                self._runner.accumulate(batches, agreement)
            self._consumed(batches)

        self._worker.submit(run).result()

    def fit(self, stream: Iterable[PackedBatch], *, on_step: Callable[[StepResult], bool | None] | None = None) -> StepResult | None:
        """Steps until the schedule's last step, until every rank's stream has ended, or until some rank's `on_step` answers False.

        Ranks agree on the end by a flag in the step's first exchange; a rank whose stream ends early takes part with nothing. A batch
        that was read but not stepped on is not consumed: `stream_state` is the position before it.

        Returns:
            The last step's result, None when there was no step.

        Raises:
            ValueError, DecodeError, PeerRefusedError: as `step`; or an argument is of another type.
        """
        try:
            batches = None if isinstance(stream, str | bytes | Mapping) else iter(stream)
        except TypeError:
            batches = None
        if batches is None:
            raise ValueError(f"Trainer.fit's stream is {shown(stream)}: it must be a ShardStream, or another iterable of PackedBatch")
        if on_step is not None and not callable(on_step):
            raise ValueError(f"Trainer.fit's on_step is {shown(on_step)}: it must be called with a StepResult, or None")
        last: StepResult | None = None
        stopping = False
        while self.steps_done < self.config.schedule.steps and not (stopping and self.world.size == 1):
            batch = None if stopping else next(batches, None)

            def run(batch: PackedBatch | None = batch, stopping: bool = stopping) -> StepResult | None:
                return self._step(batch, None, ended=batch is None, stopping=stopping)

            result = self._worker.submit(run).result()
            if result is None:
                break
            last = result
            stopping = on_step is not None and on_step(result) is False
        return last

    def save(
        self,
        path: str | Path,
        *,
        stream: HasState | StreamState | None = None,
        progress: Progress | None = None,
        progress_steps: int = 0,
        wait: bool = True,
    ) -> Deferred[None]:
        """Writes a checkpoint of this moment (collective: every rank calls it at the same step; rank 0 writes).

        Args:
            stream: whose position to save; None saves the one after the last batch consumed, which every batch of a stream carries.
            progress: called on rank 0, `progress(done, total)` tensors; answering False leaves the old file.
            wait: False answers at once and writes beside further steps; the file is of the step at the call all the same.

        Raises:
            ValueError: an argument is wrong, or ranks are at different steps.
            Stopped: the progress callback answered False.
            StorageFileError: the folder or the disk refused the file; the old one is untouched. Both are raised on every rank; without
                `wait`, by rank 0's answer alone.
        """
        require_path("Trainer.save", "path", path)
        require_member("Trainer.save", "wait", wait, bool)
        progress_steps = require_count("Trainer.save", "progress_steps", progress_steps)
        if progress is not None and not callable(progress):
            raise ValueError(f"Trainer.save's progress is {shown(progress)}: it must be called with (done, total), or None")
        given = stream if stream is None or isinstance(stream, StreamState) else _position(stream)
        reports = ProgressReports(f"saving {path}", progress, progress_steps)

        def write(content: CheckpointContent) -> None:
            content.write(path, on_tensor=reports)
            logger.info("saved step %d to %s", content.step, path)

        def run() -> Deferred[None]:
            steps = [row[0] for row in self.world.exchange([self._runner.steps])]
            if len(set(steps)) > 1:
                raise ValueError(f"ranks save at steps {steps}: every rank calls save at the same step")
            ranks = collect_ranks(self.world, self._rank_state(given))
            if self._saving is not None:
                self._wait_for_saving()
            # Whole parameters of a sharded tower are gathered, with every rank's help.
            helps = ranks is not None or self._runner.parameters.is_sharded
            content = self._content(ranks or [], copied=not wait) if helps else None
            content = None if ranks is None else content
            if wait:
                error: Exception | None = None
                try:
                    if content is not None:
                        write(content)
                except Exception as caught:
                    error = caught
                raise_together(self.world, error)
                return settled(None)
            if content is None:
                return settled(None)
            self._saving = self._writer.submit(lambda: write(content))
            return self._saving

        return self._worker.submit(run).result()

    def close(self) -> None:
        """Waits for what runs, a save too, and ends the threads."""
        self._worker.close()
        if self._saving is not None:
            self._wait_for_saving()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _step(self, batch: Batch, embeddings: torch.dtype | None, *, ended: bool = False, stopping: bool = False) -> StepResult | None:
        batches, error = self._take(batch, embeddings)
        agreement = self._runner.agree(batches, error, ended=ended, stopping=stopping)
        if agreement.ended or agreement.stopping:
            return None
        with self._runner.watched():
            row, vectors = self._runner.step(batches, agreement, embeddings)
        self._consumed(batches)
        self._reader.remember(row)
        return StepResult(row, self._reader, vectors)

    def _take(self, batch: object, embeddings: object) -> tuple[list[PackedBatch], Exception | None]:
        """The packed batches of a call, or what is wrong with it: peers are told before it is raised, or they would wait."""
        try:
            if embeddings is not None and not (isinstance(embeddings, torch.dtype) and embeddings.is_floating_point):
                raise ValueError(f"embeddings is {shown(embeddings)}: it must be a floating torch type, such as torch.float32")
            if isinstance(batch, StepItems):
                batches = [self._pack(batch)]
            else:
                batches = _packed_batches(batch)
            for one in batches:
                check_batch(one, self.config)
        except Exception as error:
            return [], error
        return batches, None

    def _pack(self, items: StepItems) -> PackedBatch:
        if self._packer is None:
            late = self.config.late_interaction
            self._packer = Packer(
                self.config.batch,
                max_edges=self.config.contrastive.max_edges_per_device,
                late_interaction=late.resolved(self.config.batch.resolved()) if late.weight > 0 else None,
                seed=self.config.seed,
            )
        return self._packer.pack(items)

    def _consumed(self, batches: Sequence[PackedBatch]) -> None:
        for batch in batches:
            if batch.state is not None:
                self._stream_state = batch.state

    def _rank_state(self, given: StreamState | None) -> RankState:
        state = self._runner.window.state()
        position = given if given is not None else self._stream_state
        state.stream = b"" if position is None else position.to_bytes()
        return state

    def _content(self, ranks: list[RankState], *, copied: bool) -> CheckpointContent:
        runner = self._runner

        def of(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            return runner.parameters.whole(flat, copied=copied)

        dropped_told, skipped_told = self._reader.told
        counters = [runner.dropped, int(runner.skipped), dropped_told, skipped_told]
        return CheckpointContent(
            config=self.config,
            step=runner.steps,
            weights=of(runner.parameters.weights),
            first=of(runner.optimizer.first),
            second=of(runner.optimizer.second),
            updates=runner.optimizer.updates.cpu().clone(),
            counters=torch.tensor(counters, dtype=torch.int64),
            ranks=ranks,
        )

    def _wait_for_saving(self) -> None:
        assert self._saving is not None
        try:
            self._saving.result()
        except Exception as error:
            # Whoever asked for that save holds its answer; this one must not fail for it.
            logger.error("the save before this one failed: %s", error)
        self._saving = None

    def _together(self, fault: str, act: Callable[[], None]) -> None:
        """Does something on all ranks or on none: one that failed alone would leave its peers waiting."""
        error: Exception | None = None
        try:
            act()
        except Exception as caught:
            error = caught
        failed = [rank for rank, row in enumerate(self.world.exchange([int(error is not None)])) if row[0]]
        if error is not None:
            raise error
        if failed:
            raise PeerRefusedError(f"rank {failed[0]} {fault}, see its own error: no rank starts")

    def _read(self, config: TrainerConfig) -> None:
        """Takes over what `resume` or `init` names."""
        if config.resume is not None:
            self._resume(config.resume)
        elif config.init is not None:
            self._start_from(config.init)

    def _resume(self, path: str | Path) -> None:
        reports = ProgressReports(f"resuming {path}", self.config.progress, self.config.progress_steps)
        content = read_checkpoint(path, on_tensor=reports)
        differences = geometry_differences(content.config, self.config)
        if differences:
            raise CheckpointMismatchError(f"{path}: {'; '.join(differences)}: resume with the same, or start another run from it with init")
        runner, parameters = self._runner, self._runner.parameters
        groups = (
            ("weights", content.weights, parameters.weights),
            ("moments.first", content.first, runner.optimizer.first),
            ("moments.second", content.second, runner.optimizer.second),
        )
        for what, found, _ in groups:
            require_entries(path, what, found, parameters.shapes(), optional=OPTIONAL_PARAMETERS)
        for _, found, flat in groups:
            parameters.place(flat, found)
        parameters.publish()
        runner.optimizer.set_updates(float(content.updates))
        runner.steps = content.step
        dropped, skipped, dropped_told, skipped_told = map(int, content.counters.tolist())
        runner.dropped = dropped
        runner.skipped.fill_(skipped)
        self._reader = StatisticsReader(dropped_told, skipped_told)
        mine = fold_ranks(content.ranks, self.world.rank, self.world.size)
        runner.window.load(str(path), mine, fold_ranks(content.ranks, 0, 1) if parameters.is_sharded and mine.micro_batches else mine)
        if mine.stream:
            self._stream_state = StreamState.from_bytes(mine.stream)
        logger.info("resumed step %d from %s", runner.steps, path)

    def _start_from(self, path: str | Path) -> None:
        reports = ProgressReports(f"reading {path}", self.config.progress, self.config.progress_steps)
        content = read_checkpoint(path, on_tensor=reports)
        differences = geometry_differences(content.config, self.config, only=INIT_GEOMETRY)
        if differences:
            raise CheckpointMismatchError(f"{path}: {'; '.join(differences)}: a tower's geometry cannot change")
        fresh: list[str] = []
        parameters, taken = self._runner.parameters, dict[str, torch.Tensor]()
        for name, parameter in parameters.shapes():
            found = content.weights.get(name)
            if found is not None and found.shape == parameter.shape:
                taken[name] = found
            else:
                fresh.append(name)
        parameters.place(parameters.weights, taken)
        parameters.publish()
        logger.info("started from the weights of %s; fresh: %s", path, ", ".join(fresh) or "none")


def _position(stream: object) -> StreamState | None:
    state = getattr(stream, "state", stream)
    if state is not None and not isinstance(state, StreamState):
        raise ValueError(f"Trainer.save's stream is {shown(stream)}: it must be a stream with a StreamState, or a StreamState itself")
    return state


def _packed_batches(batch: object) -> list[PackedBatch]:
    if batch is None or isinstance(batch, PackedBatch):
        return [] if batch is None else [batch]
    batches: list[PackedBatch] = []
    for one in batch if isinstance(batch, Sequence) else (batch,):
        if not isinstance(one, PackedBatch):
            raise ValueError(f"batch is {shown(batch)}: a step takes a PackedBatch, a list of them, a StepItems or None")
        batches.append(one)
    return batches
