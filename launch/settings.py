"""What a run is: the frozen configuration of `treadle train`, `pack` and `evaluate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from treadle.decoders.limits import DecodeOptions
from treadle.model.config import LateInteraction, MeshOptions, TrainerConfig
from treadle.pipeline.packer import MAX_WINDOW
from treadle.pipeline.quarantine import Budget
from treadle.pipeline.samples import Schema
from treadle.pipeline.storage import public_url
from treadle.shape import BatchShape, require_count, require_number, settle_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSettings:
    """Shards that are drawn from together."""

    urls: tuple[str, ...]
    """URLs, globs and brace ranges of tar shards; a list of plain patterns is one source."""
    weight: float = 1.0
    """Share of the blend, against the other sources'."""
    repeat: bool = False
    """Whether the source starts over at its end, for as long as another source lasts."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if not self.urls:
            raise ValueError("urls is empty: name at least one shard")
        require_number("SourceSettings", "weight", self.weight, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """What a stream of shards reads and how."""

    sources: tuple[SourceSettings, ...] = ()
    """URL patterns, or tables of `urls`, `weight` and `repeat` to blend."""
    packed: str = ""
    """Folder or URL of packed batches, from `treadle pack`, in place of `sources`."""
    seed: int = 0
    """Keys the order. 64 bits."""
    lanes: int = 0
    """Sample sequences that are the order; 0 derives 64."""
    shuffle: int = 1000
    """Samples held back to shuffle, over all lanes; 0 keeps each lane's order."""
    shuffle_bytes: int = 0
    """Bytes past which lanes hold back no more, over all lanes; 0 derives 512 MiB."""
    epochs: int | None = None
    """Passes over the sources; none goes on until the schedule ends."""
    threads: int | None = None
    """Decoding threads; none derives one per CPU."""
    processes: int | None = None
    """Decoding processes in place of threads; none derives one per CPU of the rank's share for audio or video, else 0."""
    on_error: Literal["quarantine", "raise"] = "quarantine"
    """Whether an unreadable item is counted and skipped, or ends the run."""
    quarantine: Path | None = None
    """File that a JSON line is written to for each thing skipped."""
    max_quarantined: int | float | None = None
    """Things skipped, per rank, past which the run stops: how many, or which share of the samples (0.01); none sets no bound."""
    quarantine_probation: int = 1000
    """Samples read before a share is judged."""
    cache: Path | None = None
    """Folder on a local disk in which whole remote shards are kept; the ranks of a machine share it. None keeps none."""
    cache_bytes: int = 2**36
    """Most bytes of shards in that folder; those not used for longest give way."""
    window: int = 4
    """Batches of look-ahead of the packer."""
    max_edges: int = 0
    """Edges per edge set of a batch; 0 derives 8 per segment."""
    schema: Schema = field(default_factory=Schema)
    decode: DecodeOptions = field(default_factory=DecodeOptions)

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("DataSettings", "seed", self.seed, 0, 2**64 - 1)
        require_count("DataSettings", "lanes", self.lanes, 0, 2**16)
        require_count("DataSettings", "shuffle", self.shuffle, 0, 2**40)
        require_count("DataSettings", "shuffle_bytes", self.shuffle_bytes, 0, 2**63 - 1)
        Budget(max_quarantined=self.max_quarantined, quarantine_probation=self.quarantine_probation)
        require_count("DataSettings", "cache_bytes", self.cache_bytes, 1, 2**62)
        require_count("DataSettings", "window", self.window, 1, MAX_WINDOW)
        require_count("DataSettings", "max_edges", self.max_edges, 0)
        for name, least, most in (("epochs", 1, 2**31 - 1), ("threads", 1, 4096), ("processes", 0, 4096)):
            if getattr(self, name) is not None:
                require_count("DataSettings", name, getattr(self, name), least, most)
        if self.sources and self.packed:
            raise ValueError(
                f"sources and packed are both set (packed is {public_url(self.packed)!r}), and a run reads one of them: take data.sources out of the "
                "configuration to read packed batches (with the flag --data.packed, too), or leave data.packed out to read samples"
            )


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
    """Batches to write at most, for each rank; 0 goes on to the data's end."""
    ranks: int = 1
    """Ranks that will train: as many streams are packed, which makes the same batches. Any other number can share them, too."""
    workers: int = 0
    """Ranks that are packed at the same time, each by a process; 0 derives one per CPU."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("PackSettings", "batches_per_shard", self.batches_per_shard, 1)
        require_count("PackSettings", "max_batches", self.max_batches, 0)
        require_count("PackSettings", "ranks", self.ranks, 1, 2**16)
        require_count("PackSettings", "workers", self.workers, 0, 1024)
        if self.data.packed:
            raise ValueError(f"data.packed is {public_url(self.data.packed)!r}: that is packed already; name shards of samples as sources")
        if self.data.sources and not self.max_batches and self.data.epochs is None:
            raise ValueError("data.epochs is none and max_batches is 0: packing would never end; give --data.epochs 1 or --max_batches N")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSettings:
    """Samples never trained on, and how they are scored."""

    sources: tuple[SourceSettings, ...] = ()
    """Shards to evaluate on; empty evaluates nothing."""
    max_samples: int = 1000
    """Samples that are read, the first ones of the shards."""
    schema: Schema = field(default_factory=Schema)
    """Which fields of a sample are scored; recall is told per pair of modalities."""
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Names for fields in the table of recall (`{txt = "caption"}`); a field without one goes by its modality."""
    best_by: Literal["derived", "recall", "loss"] = "derived"
    """What makes a checkpoint the best: the mean of recall@1 over pairs, or the held-out loss; derived takes recall where pairs are scored."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("HeldOutSettings", "max_samples", self.max_samples, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """How many processes a run starts, and where they meet; under torchrun or SLURM none of it is read."""

    nodes: int = 1
    """Machines that take part; the same command runs once on each."""
    node_rank: int = 0
    """This machine's number among them."""
    rendezvous: str = ""
    """HOST:PORT of machine 0, for more than one."""
    processes: int = 0
    """Processes on this machine; 0 derives one per GPU, or one."""
    max_restarts: int = 0
    """Times that all processes are started again, from the latest checkpoint, when one fails."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("WorkerSettings", "nodes", self.nodes, 1, 2**16)
        require_count("WorkerSettings", "node_rank", self.node_rank, 0)
        require_count("WorkerSettings", "processes", self.processes, 0, 1024)
        require_count("WorkerSettings", "max_restarts", self.max_restarts, 0, 10_000)
        if self.node_rank >= self.nodes:
            raise ValueError(f"WorkerSettings.node_rank is {self.node_rank}: it must be below nodes, {self.nodes}")
        host, _, port = self.rendezvous.rpartition(":")
        if self.rendezvous and not (host and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"WorkerSettings.rendezvous is {self.rendezvous!r}: it must be HOST:PORT")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(f"WorkerSettings.nodes is {self.nodes} but rendezvous is empty: give HOST:PORT of machine 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """A training run."""

    output: Path
    """Folder of the run: checkpoints, metrics, logs and this configuration."""
    trainer: TrainerConfig
    data: DataSettings = field(default_factory=DataSettings)
    held_out: HeldOutSettings = field(default_factory=HeldOutSettings)
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    log_every: int = 10
    """Steps between rows of metrics."""
    save_every: int = 1000
    """Steps between checkpoints; the end of a run always makes one."""
    keep: int = 2
    """Checkpoints that are kept, the newest; the best one is kept besides."""
    stop_after_s: float = 0.0
    """Seconds after which the run saves and ends, as on SIGTERM; 0 is no limit. For machines that are lent for a time."""
    evaluate_every: int = 0
    """Steps between evaluations on the held-out samples; 0 evaluates at the end alone."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("RunSettings", "log_every", self.log_every, 1)
        require_count("RunSettings", "save_every", self.save_every, 1)
        require_count("RunSettings", "keep", self.keep, 1)
        require_count("RunSettings", "evaluate_every", self.evaluate_every, 0)
        require_number("RunSettings", "stop_after_s", self.stop_after_s, 0)
        if not self.data.sources and not self.data.packed:
            raise ValueError("data.sources is empty: name the tar shards to train on, or packed batches as data.packed")
        if self.evaluate_every and not self.held_out.sources:
            raise ValueError(f"evaluate_every is {self.evaluate_every} but held_out.sources is empty: name shards to evaluate on")

    def resolved(self) -> "RunSettings":
        """This run with every derived value of its trainer written out."""
        trainer = self.trainer
        batch = trainer.batch.resolved()
        return replace(
            self,
            trainer=replace(
                trainer,
                batch=batch,
                schedule=trainer.schedule.resolved(),
                masking=trainer.masking.resolved(),
                contrastive=trainer.contrastive.resolved(trainer.hidden),
                late_interaction=trainer.late_interaction.resolved(batch),
            ),
        )
