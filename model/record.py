"""Training records: everything that a foreign training loop needs to go on, captured and restored together.

For any `torch.nn.Module`, optimizer and scheduler. A record holds the model's parameters and buffers, the optimizer's and the scheduler's
state, the gradients pending in an accumulator, and a state of the caller's own (counters, generator states, a data position), all of one
moment. Capturing consumes and clears nothing; restoring steps nothing and resets nothing. A file is one safetensors file, without pickle.
"""

from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import nn

from treadle.model.accumulate import (
    AccumulatedGradients,
    GradientsAccumulator,
    WeightedAccumulationState,
    WeightedGradientsAccumulator,
)
from treadle.model.device import pick_device
from treadle.model.mesh import World, joined_world
from treadle.model.record_contract import TrainableParameterContract
from treadle.model.record_core import (
    Accumulator,
    Chosen,
    Kind,
    Merge,
    Place,
    check_dtypes,
    form_of,
    gather,
    put_back,
    read_states,
    rounding,
    structure_dtypes,
    take,
)
from treadle.model.record_file import Form, Snapshot, land, read_snapshot, write_snapshot
from treadle.model.record_parts import Scheduler
from treadle.model.storage_errors import DamagedFileError

__all__ = [
    "AccumulatedGradients",
    "GradientsAccumulator",
    "ModelStateTrainingRecord",
    "RestoredTraining",
    "RestoredWeightedTraining",
    "TrainableParameterContract",
    "TrainingRecord",
    "WeightedAccumulationState",
    "WeightedGradientsAccumulator",
]

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)
S = TypeVar("S", bound=Scheduler | None)

_FORM = form_of("treadle.training_record")
_MODEL_STATE_FORM = form_of("treadle.model_state_training_record")


@dataclass(frozen=True, slots=True)
class RestoredTraining(Generic[M, O, S]):
    """Components restored together."""

    model: M
    """The module given, with the recorded values."""
    optimizer: O
    scheduler: S
    accumulator: GradientsAccumulator
    """Pending gradients, as they were."""
    state: Any
    """The caller's own."""


@dataclass(frozen=True, slots=True)
class RestoredWeightedTraining(Generic[M, O, S]):
    """Components restored together, with a window of weighted gradients."""

    model: M
    """The module given, with the recorded values."""
    optimizer: O
    scheduler: S
    accumulator: WeightedGradientsAccumulator
    """Pending gradients, weight, micro-batches and loss scale, as they were."""
    state: Any
    """The caller's own."""


class _Record:
    """A snapshot of one moment, however much of the model it takes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @property
    def kind(self) -> Kind:
        """What made the record: `capture` ("plain") or `capture_<kind>`."""
        kind: Kind = self._snapshot.structure["kind"]
        return kind

    @property
    def world_size(self) -> int:
        """Ranks whose parts it holds: one, until `gather`."""
        return len(self._snapshot.structure["ranks"])

    @property
    def states(self) -> list[Any]:
        """The caller's states of all ranks, by rank, their tensors on the host."""
        return read_states(self._snapshot)

    def gather(self, world: World | None = None) -> Self | None:
        """Brings every rank's pending gradients and state together, apart (collective): the whole record on rank 0, None on the others.

        Args:
            world: whose ranks; None takes torch's default process group where there is one, else this process alone.

        Raises:
            ValueError: ranks captured by different forms, or different models, optimizers or windows; on every rank.
        """
        whole = gather(self._snapshot, joined_world() if world is None else world)
        return None if whole is None else type(self)(whole)

    @classmethod
    async def _landed(cls, snapshot: Snapshot) -> Self:
        return cls(await land(snapshot))

    def _require(self, kind: Kind) -> None:
        if self.kind != kind:
            suffix = "" if self.kind == "plain" else f"_{self.kind}"
            raise ValueError(f"this record was made by capture{suffix}: restore it with restore{suffix}")

    def _put_back(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, place: Place
    ) -> tuple[Accumulator, Any]:
        return put_back(self._snapshot, model, optimizer, scheduler, place)

    def _restored(self, model: M, optimizer: O, scheduler: S, place: Place) -> RestoredTraining[M, O, S]:
        accumulator, state = self._put_back(model, optimizer, scheduler, place)
        return RestoredTraining(model, optimizer, scheduler, cast(GradientsAccumulator, accumulator), state)

    def _restored_weighted(self, model: M, optimizer: O, scheduler: S, place: Place) -> RestoredWeightedTraining[M, O, S]:
        accumulator, state = self._put_back(model, optimizer, scheduler, place)
        return RestoredWeightedTraining(model, optimizer, scheduler, cast(WeightedGradientsAccumulator, accumulator), state)


class TrainingRecord(_Record):
    """A whole model, its optimizer and scheduler, pending gradients and the caller's state, of one moment."""

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        state: object,
    ) -> Self:
        """Captures a loop with plain accumulation.

        Args:
            scheduler: anything with `state_dict` and `load_state_dict`, or None.
            state: nested dicts, lists and tuples of None, numbers, strings, bytes, numpy arrays and tensors.

        Raises:
            ValueError: the accumulator is a weighted one or belongs to another model, or a value is of a type that a record does not hold.
        """
        return cls(take("plain", model, optimizer, scheduler, accumulator, state))

    @classmethod
    def capture_weighted(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        state: object,
    ) -> Self:
        """Captures a loop with weighted accumulation: also the window's weight, count, type and loss scale. Otherwise as `capture`."""
        return cls(take("weighted", model, optimizer, scheduler, accumulator, state))

    @classmethod
    def capture_with_dtypes(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        state: object,
    ) -> Self:
        """Captures the parameters' types too, which `restore_with_dtypes` gives the target first. Otherwise as `capture`."""
        return cls(take("with_dtypes", model, optimizer, scheduler, accumulator, state))

    @classmethod
    def capture_weighted_with_dtypes(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        state: object,
    ) -> Self:
        """`capture_weighted` and `capture_with_dtypes` together."""
        return cls(take("weighted_with_dtypes", model, optimizer, scheduler, accumulator, state))

    @classmethod
    def capture_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture`, as a coroutine. The state is that of this call, whenever it is awaited; device copies are fetched by then."""
        return cls._landed(take("plain", model, optimizer, scheduler, accumulator, state, blocking=False))

    @classmethod
    def capture_weighted_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture_weighted`, as a coroutine whose value is the state at this call."""
        return cls._landed(take("weighted", model, optimizer, scheduler, accumulator, state, blocking=False))

    @classmethod
    def capture_with_dtypes_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture_with_dtypes`, as a coroutine whose value is the state at this call."""
        return cls._landed(take("with_dtypes", model, optimizer, scheduler, accumulator, state, blocking=False))

    @classmethod
    def capture_weighted_with_dtypes_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture_weighted_with_dtypes`, as a coroutine whose value is the state at this call."""
        return cls._landed(take("weighted_with_dtypes", model, optimizer, scheduler, accumulator, state, blocking=False))

    def save(self, path: str | Path, precision: torch.dtype | None = None) -> None:
        """Writes the record as one safetensors file, whole or not at all.

        Args:
            precision: floating type that model, optimizer and gradients are rounded to in the file; None keeps every bit.

        Raises:
            ValueError: `precision` is no floating type, or the file cannot be written; what was at `path` is untouched.
        """
        write_snapshot(self._snapshot, path, _FORM, rounded=rounding(precision))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """Reads a saved record.

        Args:
            device: where its model, optimizer and gradients are kept; a restore puts them where it is told.

        Raises:
            ValueError: the file is missing, damaged, newer or of another kind, or there is no such device; the message says which.
        """
        return cls(_read(path, _FORM, device))

    def restore(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredTraining[M, O, S]:
        """Copies everything into the objects given, which keep their types, and hands them back with the accumulator and the state.

        Args:
            model, optimizer, scheduler: built as the captured ones were; their values do not matter.
            device: where the model goes; None leaves it where it is.
            rank, world_size: this process's place. At the recorded world size it gets its own pending gradients and state back. At another
                one it takes the gradients of recorded ranks r, r + W, ..., so that their sum over the world stays the same.
            merge: from the states of all recorded ranks to this rank's; needed at another world size.

        Raises:
            ValueError: the record was made by another capture, or does not fit; every difference is listed and nothing was changed.
        """
        self._require("plain")
        return self._restored(model, optimizer, scheduler, Place(device, rank, world_size, merge))

    def restore_weighted(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredWeightedTraining[M, O, S]:
        """`restore` of a `capture_weighted`."""
        self._require("weighted")
        return self._restored_weighted(model, optimizer, scheduler, Place(device, rank, world_size, merge))

    def restore_with_dtypes(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredTraining[M, O, S]:
        """`restore` of a `capture_with_dtypes`: every parameter and buffer gets its recorded type first."""
        self._require("with_dtypes")
        return self._restored(model, optimizer, scheduler, Place(device, rank, world_size, merge))

    def restore_weighted_with_dtypes(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredWeightedTraining[M, O, S]:
        """`restore_weighted` of a `capture_weighted_with_dtypes`: every parameter and buffer gets its recorded type first."""
        self._require("weighted_with_dtypes")
        return self._restored_weighted(model, optimizer, scheduler, Place(device, rank, world_size, merge))


class ModelStateTrainingRecord(_Record):
    """As `TrainingRecord`, of the part of a model that trains: an adapter over a frozen base, which the file does not hold."""

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        contract: TrainableParameterContract,
        state: object,
    ) -> Self:
        """Captures the parameters that `contract` names, and everything else as `TrainingRecord.capture`; buffers are the base's.

        Raises:
            ValueError: the model does not fit the contract, a pending gradient is a frozen parameter's, or as `TrainingRecord.capture`.
        """
        return cls(cls._take("plain", model, optimizer, scheduler, accumulator, contract, state))

    @classmethod
    def capture_weighted(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        contract: TrainableParameterContract,
        state: object,
    ) -> Self:
        """`capture` of a loop with weighted accumulation."""
        return cls(cls._take("weighted", model, optimizer, scheduler, accumulator, contract, state))

    @classmethod
    def capture_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: GradientsAccumulator,
        contract: TrainableParameterContract,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture`, as a coroutine whose value is the state at this call."""
        return cls._landed(cls._take("plain", model, optimizer, scheduler, accumulator, contract, state, blocking=False))

    @classmethod
    def capture_weighted_async(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: WeightedGradientsAccumulator,
        contract: TrainableParameterContract,
        state: object,
    ) -> Coroutine[Any, Any, Self]:
        """`capture_weighted`, as a coroutine whose value is the state at this call."""
        return cls._landed(cls._take("weighted", model, optimizer, scheduler, accumulator, contract, state, blocking=False))

    @staticmethod
    def _take(
        kind: Kind,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        accumulator: Accumulator,
        contract: TrainableParameterContract,
        state: object,
        blocking: bool = True,
    ) -> Snapshot:
        if not isinstance(cast(object, contract), TrainableParameterContract):
            raise ValueError(f"contract is a {type(contract).__name__}: TrainableParameterContract.capture(model) makes one")
        contract.validate(model)
        snapshot = take(kind, model, optimizer, scheduler, accumulator, state, chosen=_chosen(contract), blocking=blocking)
        snapshot.structure["contract"] = contract.to_json()
        return snapshot

    @property
    def contract(self) -> TrainableParameterContract:
        """What the record was captured under."""
        return TrainableParameterContract.from_json(self._snapshot.structure.get("contract"))

    def save(self, path: str | Path, precision: torch.dtype | None = None) -> None:
        """As `TrainingRecord.save`."""
        write_snapshot(self._snapshot, path, _MODEL_STATE_FORM, rounded=rounding(precision))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """As `TrainingRecord.load`."""
        record = cls(_read(path, _MODEL_STATE_FORM, device))
        contract = record.contract
        if {*contract.shapes, *contract.buffers} != structure_dtypes(record._snapshot).keys():
            raise DamagedFileError(path, "holds other parameters than its contract names")
        return record

    def restore(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredTraining[M, O, S]:
        """As `TrainingRecord.restore`, into a model that fits the recorded contract; its frozen part is left alone.

        Whether that part is the one that was trained on, `contract.check_base(model)` tells.
        """
        self._require("plain")
        return self._restored(model, optimizer, scheduler, Place(device, rank, world_size, merge))

    def restore_weighted(
        self,
        model: M,
        optimizer: O,
        scheduler: S,
        device: torch.device | str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        merge: Merge | None = None,
    ) -> RestoredWeightedTraining[M, O, S]:
        """`restore` of a `capture_weighted`."""
        self._require("weighted")
        return self._restored_weighted(model, optimizer, scheduler, Place(device, rank, world_size, merge))

    def _put_back(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, place: Place
    ) -> tuple[Accumulator, Any]:
        contract = self.contract
        contract.validate(model)
        return put_back(self._snapshot, model, optimizer, scheduler, place, chosen=_chosen(contract))


def _chosen(contract: TrainableParameterContract) -> Chosen:
    return Chosen(frozenset(contract.shapes), frozenset(contract.buffers))


def _read(path: str | Path, form: Form, device: torch.device | str) -> Snapshot:
    where = pick_device("device", device)
    snapshot = read_snapshot(path, form)
    try:
        check_dtypes(snapshot)
    except ValueError as error:
        raise DamagedFileError(path, f"is no whole record: {error}") from error
    if where.type != "cpu":
        snapshot.tensors = {name: t if ".state." in name else t.to(where) for name, t in snapshot.tensors.items()}
    return snapshot
