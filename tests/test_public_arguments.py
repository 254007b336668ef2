"""Every argument of every public callable, given values that it must not take: an error that names the argument, or its value as it is.

What fits is read off the annotations: a value of another type, a negative count and a number that is no number must be refused with a
`ValueError` or a `TypeError` whose text names the argument; a value of the right type may also be taken, or refused by one of the library's
own errors. Nothing else may come out: no `AttributeError`, no text of numpy's.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch

import treadle
import treadle.decoders
import treadle.kernels
import treadle.model
import treadle.pipeline
from treadle import (
    BatchShape,
    Contrastive,
    Edges,
    Encoder,
    ImageShape,
    LateInteraction,
    Mesh,
    Modality,
    PackedBatch,
    Packer,
    Relations,
    Schedule,
    ShardStream,
    StepItems,
    Trainer,
    TrainerConfig,
    TrainingRecord,
)
from treadle.decoders import DecodeOptions, decode, probe
from treadle.model import (
    CheckpointFolder,
    GradientsAccumulator,
    ModelStateTrainingRecord,
    Tower,
    TrainableParameterContract,
    WeightedGradientsAccumulator,
)
from treadle.pipeline import (
    PackedReader,
    PackedWriter,
    Quarantine,
    Schema,
    ShardCache,
    Source,
    StreamState,
    TorchStream,
    bag_of_arrays,
    from_webdataset,
)

SHAPE: Final = BatchShape(max_rows_per_device=2, max_segments_per_device=8, max_columns_per_row=32)
CONFIG: Final = TrainerConfig(
    depth=1, hidden=128, batch=SHAPE, schedule=Schedule(steps=5), late_interaction=LateInteraction(weight=1), device="cpu"
)
ITEMS: Final = StepItems([Modality.TEXT], [b"a text"])

WRONG: Final[Mapping[str, object]] = {
    "none": None,
    "zero": 0,
    "whole": 3,
    "negative": -1,
    "huge": 2**80,
    "truth": True,
    "fraction": 0.5,
    "negative_fraction": -0.5,
    "nan": math.nan,
    "infinity": math.inf,
    "text": "no such thing",
    "bytes": b"bytes",
    "list": [object()],
    "mapping": {"key": object()},
    "object": object(),
}

MADE_BY_THE_LIBRARY: Final = {
    "AccumulatedGradients", "Deferred", "MeshDescription", "Payload", "Probe", "RestoredTraining", "RestoredWeightedTraining", "StepResult",
    "TrainerStepStats", "WeightedAccumulationState",
}  # fmt: skip
"""Answers, which check nothing: nobody else makes them."""

NOT_CALLED: Final = {"DecodeError", "Impl", "NoSamplesError", "QuarantineFullError", "Stopped", "__version__", "choose", "register"}
"""Errors, a type, and what kernels use to register themselves."""

PLAIN: Final = (
    treadle.AudioShape, ImageShape, treadle.VideoShape, treadle.Choices, treadle.Masking, treadle.model.OptimizerConfig, treadle.MeshOptions, Edges, Relations, Schema, Quarantine, treadle.pipeline.RetryPolicy,
    WeightedGradientsAccumulator,
)  # fmt: skip
"""What can be made of nothing."""

ENUMERATIONS: Final = (Modality, treadle.Objective, treadle.Negatives, treadle.PairLossForm, treadle.LateInteractionSide)

BETWEEN_PARTS: Final = {
    "Encoder", "GradientsAccumulator.holding", "Mesh", "ModelStateTrainingRecord", "PackedBatch.over", "PackedWriter.close",
    "PackedWriter.expect", "Packer.add_late", "Packer.add_texts", "Packer.load", "Quarantine.check", "Quarantine.check_end",
    "RetryPolicy.delay_s", "Schema.bag", "ShardCache.note", "ShardCache.open", "ShardCache.reserve", "StreamState", "StreamState.of_rank",
    "Tower.forward", "Tower.pool", "Tower.run", "Tower.turn", "TrainableParameterContract", "TrainableParameterContract.from_json",
    "TrainingRecord", "WeightedGradientsAccumulator.holding",
}  # fmt: skip
"""What the library's parts call on each other with values that are checked already; users have what stands before it."""


@dataclass(frozen=True, kw_only=True)
class Called:
    """One callable and arguments that it takes."""

    call: Callable[..., Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values, by argument, that are right though their type or sign says otherwise."""
    hints_of: Callable[..., Any] | None = None
    """Whose annotations count where `call` only stands before it."""
    raises: tuple[type[Exception], ...] = ()
    """What else it says that it raises."""


_ANY_SIGN: Final = ("negative", "negative_fraction")
_MEMBERS: Final = ("zero", "whole")
"""A modality may be given as its number."""


@cache
def _module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@cache
def _trainer() -> Trainer:
    return Trainer(CONFIG)


@cache
def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(_module().parameters())


@cache
def _checkpoint(folder: Path) -> Path:
    path = folder / "checkpoint.safetensors"
    _trainer().save(path)
    return path


@cache
def _shard(folder: Path) -> str:
    import io
    import tarfile

    path = folder / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(3):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = 6
            tar.addfile(entry, io.BytesIO(b"a text"))
    return str(path)


def _stream(folder: Path) -> ShardStream:
    return ShardStream(_shard(folder), SHAPE, epochs=1, threads=1, processes=0)


def _packed(folder: Path) -> str:
    where = folder / "packed"
    if not where.exists():
        with PackedWriter(where) as writer:
            writer.write(Packer(SHAPE).pack(ITEMS))
    return str(where)


_SECONDS: Final = {"max_audio_s": ("infinity",), "max_wall_s": ("infinity",)}


def _records() -> Iterator[tuple[str, Called]]:
    """Captures and restores, every kind of them."""
    plain, weighted = GradientsAccumulator(), WeightedGradientsAccumulator()
    given: dict[str, Any] = {"model": _module(), "optimizer": _optimizer(), "scheduler": None, "state": {}}
    contract = TrainableParameterContract.capture(_module())
    # Any plain value is a state.
    takes = {"state": tuple(WRONG)}
    for kind in ("", "_weighted", "_with_dtypes", "_weighted_with_dtypes"):
        accumulator = weighted if "weighted" in kind else plain
        for suffix in ("", "_async"):
            yield (
                f"TrainingRecord.capture{kind}{suffix}",
                Called(call=getattr(TrainingRecord, f"capture{kind}{suffix}"), given={**given, "accumulator": accumulator}, takes=takes),
            )
            if not kind.endswith("dtypes"):
                yield (
                    f"ModelStateTrainingRecord.capture{kind}{suffix}",
                    Called(
                        call=getattr(ModelStateTrainingRecord, f"capture{kind}{suffix}"),
                        given={**given, "accumulator": accumulator, "contract": contract},
                        takes=takes,
                    ),
                )
        record = getattr(TrainingRecord, f"capture{kind}")(**given, accumulator=accumulator)
        target = {"model": _module(), "optimizer": _optimizer(), "scheduler": None, "device": None, "merge": None}
        yield f"TrainingRecord.restore{kind}", Called(call=getattr(record, f"restore{kind}"), given={**target, "rank": 0, "world_size": 1})
        if not kind.endswith("dtypes"):
            part = getattr(ModelStateTrainingRecord, f"capture{kind}")(**given, accumulator=accumulator, contract=contract)
            yield (
                f"ModelStateTrainingRecord.restore{kind}",
                Called(call=getattr(part, f"restore{kind}"), given={**target, "rank": 0, "world_size": 1}),
            )


def _called(folder: Path) -> dict[str, Called]:
    """Every public callable by name."""
    shard, checkpoint, packed = _shard(folder), _checkpoint(folder), _packed(folder)
    trainer, stream = _trainer(), _stream(folder)
    encoder = Encoder.load(checkpoint, "cpu")
    batch = Packer(SHAPE).pack(ITEMS)
    items: dict[str, Any] = {"modalities": [Modality.TEXT], "contents": [b"a text"]}
    number = iter(range(10**6))
    module, contract = {"module": _module()}, TrainableParameterContract.capture(_module())

    def writer(**given: Any) -> PackedWriter:
        return PackedWriter(given.pop("folder", folder / f"written-{next(number)}"), **given)

    text = {"modality": Modality.TEXT, "data": b"a text", "shape": SHAPE}
    encoded = {"modality": Modality.TEXT, "contents": [b"a text"]}
    return {
        **{kind.__name__: Called(call=kind) for kind in PLAIN},
        "BatchShape": Called(
            call=BatchShape, given={"max_rows_per_device": 2, "max_segments_per_device": 8, "max_columns_per_row": 32}
        ),
        "BatchShape.is_live": Called(call=SHAPE.is_live, given={"modality": Modality.TEXT}, takes={"modality": _MEMBERS}),
        "BatchShape.token_capacity": Called(call=SHAPE.token_capacity),
        "Contrastive": Called(call=Contrastive, takes={"bias": _ANY_SIGN}),
        "Contrastive.resolved": Called(call=Contrastive().resolved, given={"hidden": 128}),
        "LateInteraction": Called(call=LateInteraction, takes={"bias": _ANY_SIGN}),
        "LateInteraction.resolved": Called(call=LateInteraction().resolved, given={"batch": SHAPE}),
        "Schedule": Called(call=Schedule, given={"steps": 5}),
        "Schedule.learning_rate_at": Called(call=Schedule(steps=5).learning_rate_at, given={"step": 1}, takes={"step": ("huge",)}),
        "Mesh.bootstrap": Called(call=Mesh.bootstrap),
        "TrainerConfig": Called(
            call=TrainerConfig, given={name: getattr(CONFIG, name) for name in ("depth", "hidden", "batch", "schedule")}
        ),
        "Edges.check": Called(
            call=Edges().check, given={"num_items": 1, "name": "attract"}, takes={"name": tuple(WRONG), "num_items": ("huge",)}
        ),
        "Relations.check": Called(call=Relations().check, given={"num_items": 1}, takes={"num_items": ("huge",)}),
        "StepItems": Called(call=StepItems, given=items),
        "StepItems.content": Called(call=ITEMS.content, given={"item": 0}),
        "StepItems.check": Called(call=ITEMS.check, given={"shape": SHAPE}),
        "bag_of_arrays": Called(
            call=bag_of_arrays, given={"modalities": [Modality.TEXT], "arrays": [np.zeros(3, np.uint8)], "shape": SHAPE}
        ),
        "Packer": Called(call=Packer, given={"shape": SHAPE}),
        "Packer.pack": Called(call=Packer(SHAPE).pack, given={"items": ITEMS}),
        "Packer.add": Called(call=Packer(SHAPE).add, given={"bag": ITEMS}, takes={"token": tuple(WRONG)}),
        "Packer.add_decoded": Called(
            call=Packer(SHAPE).add_decoded,
            given={"bag": bag_of_arrays([Modality.TEXT], [np.zeros(3, np.uint8)], SHAPE)},
            takes={"token": tuple(WRONG)},
        ),
        "PackedBatch": Called(call=PackedBatch, given={"shape": SHAPE}),
        "PackedBatch.array": Called(call=batch.array, given={"name": "item"}),
        "PackedBatch.payload": Called(call=batch.payload, given={"segment": 0}, raises=(IndexError,)),
        "PackedBatch.to": Called(call=batch.to, given={"device": "cpu"}),
        "PackedBatch.draw": Called(call=batch.draw, given={"path": folder / "batch.png"}),
        "PackedBatch.save": Called(call=batch.save, given={"path": folder / "batch.safetensors"}),
        "PackedBatch.load": Called(call=PackedBatch.load, given={"path": folder / "batch.safetensors"}),
        "ShardStream": Called(
            call=ShardStream, given={"sources": shard, "shape": SHAPE, "processes": 0, "threads": 1}, takes={"max_quarantined": ("huge",)}
        ),
        "ShardStream.load_state": Called(call=stream.load_state, given={"state": stream.state}),
        "ShardStream.split": Called(call=stream.split, given={"number": 0, "count": 1}),
        "TorchStream": Called(call=TorchStream, given={"stream": stream}),
        "TorchStream.observe": Called(call=TorchStream(stream).observe, given={"batch": next(_stream(folder))}),
        "TorchStream.loader": Called(call=lambda **given: list(TorchStream(_stream(folder)).loader(**given)), hints_of=TorchStream.loader),
        "TorchStream.load_state_dict": Called(
            call=TorchStream(stream).load_state_dict, given={"state_dict": TorchStream(stream).state_dict()}
        ),
        "TorchStream.merge": Called(call=TorchStream.merge, given={"state_dicts": [TorchStream(stream).state_dict()]}),
        "from_webdataset": Called(
            call=lambda **given: list(from_webdataset(**given)), hints_of=from_webdataset, given={"dataset": [{"__key__": "1", "txt": b"a"}], "shape": SHAPE}
        ),
        "Source": Called(call=Source, given={"urls": shard}),
        "Quarantine.record": Called(call=Quarantine().record, given={"kind": "corrupt", "reason": "it is"}, takes={"offset": ("negative", "huge")}),
        "ShardCache": Called(call=ShardCache, given={"folder": folder / "cache"}),
        "StreamState.from_bytes": Called(call=StreamState.from_bytes, given={"data": stream.state.to_bytes()}),
        "StreamState.merge": Called(call=StreamState.merge, given={"states": [stream.state]}),
        "StreamState.deal": Called(call=stream.state.deal, given={"rank": 0, "world_size": 1}),
        "PackedReader": Called(call=PackedReader, given={"urls": packed}),
        "PackedReader.load_state": Called(call=PackedReader(packed).load_state, given={"state": PackedReader(packed).state}),
        "PackedWriter": Called(call=writer, given={}, hints_of=PackedWriter),
        "PackedWriter.write": Called(call=writer().write, given={"batch": batch}),
        "DecodeOptions": Called(call=DecodeOptions, takes=_SECONDS),
        "decode": Called(call=decode, given=text, takes={"modality": _MEMBERS}),
        "probe": Called(call=probe, given=text, takes={"modality": _MEMBERS}),
        "Trainer": Called(call=Trainer, given={"config": CONFIG}),
        "Trainer.step": Called(call=trainer.step, given={"batch": None}),
        "Trainer.submit": Called(call=lambda **given: trainer.submit(**given).result(), given={"batch": None}, hints_of=Trainer.submit),
        "Trainer.accumulate": Called(call=trainer.accumulate, given={"batch": None}),
        "Trainer.fit": Called(call=trainer.fit, given={"stream": []}, takes={"stream": ("list",)}, raises=(ValueError,)),
        "Trainer.save": Called(call=trainer.save, given={"path": folder / "saved.safetensors"}),
        "Encoder.load": Called(call=Encoder.load, given={"checkpoint": checkpoint, "device": "cpu"}),
        "Encoder.encode": Called(call=encoder.encode, given=encoded, takes={"modality": _MEMBERS}),
        "Encoder.encode_tokens": Called(call=encoder.encode_tokens, given=encoded, takes={"modality": _MEMBERS}),
        "Encoder.choose": Called(call=encoder.choose, given={"states": [b"a text"], "choices": [b"ab"]}),
        "Tower": Called(call=Tower, given={"depth": 1, "hidden": 128, "shape": SHAPE, "seed": 0}),
        "CheckpointFolder": Called(call=CheckpointFolder, given={"folder": folder / "checkpoints"}),
        "CheckpointFolder.save": Called(call=CheckpointFolder(folder / "checkpoints").save, given={"trainer": trainer}),
        "CheckpointFolder.offer": Called(
            call=CheckpointFolder(folder / "checkpoints").offer, given={"trainer": trainer, "value": 1.0}, takes={"value": (*_ANY_SIGN, "nan", "infinity")}
        ),
        "CheckpointFolder.forget_after": Called(call=CheckpointFolder(folder / "checkpoints").forget_after, given={"step": 1}, takes={"step": ("huge",)}),
        "GradientsAccumulator.accumulate": Called(call=GradientsAccumulator().accumulate, given=module),
        "GradientsAccumulator.finish": Called(call=GradientsAccumulator().finish),
        **{
            f"WeightedGradientsAccumulator.{name}": Called(
                call=getattr(WeightedGradientsAccumulator(), name), given={**module, "weight": 1.0}
            )
            for name in ("accumulate_sum", "accumulate_mean")
        },
        "WeightedGradientsAccumulator.finish_sums": Called(call=WeightedGradientsAccumulator().finish_sums),
        "TrainableParameterContract.capture": Called(call=TrainableParameterContract.capture, given={"model": _module()}),
        **{
            f"TrainableParameterContract.{name}": Called(call=getattr(contract, name), given={"model": _module()})
            for name in ("validate", "check_base")
        },
        **dict(_records()),
    }  # fmt: skip


def _fits(name: str, value: object, hint: Any, takes: Sequence[str]) -> bool:
    """Whether a value is what an annotation says, or is named as right all the same."""
    if name in takes:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint in (Any, object):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(name, value, one, takes) for one in inner)
    if origin is typing.Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if origin is typing.Annotated:
        return _fits(name, value, inner[0], takes)
    if hint is int:
        return type(value) is int and 0 <= value < 2**63
    if hint is float:
        return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]  # it is a number
    if hint is bool:
        return type(value) is bool
    kind = origin if isinstance(origin, type) else hint
    if not isinstance(kind, type):
        return True
    try:
        return isinstance(value, kind) and not (isinstance(value, str | bytes | list | dict) and kind not in (str, bytes))
    except TypeError:
        # A protocol that says what a value can do.
        return value is not None and not isinstance(value, int | float | str | bytes | list | dict) and type(value) is not object


def _hints(called: Called) -> dict[str, Any]:
    """Every argument's annotation, with the names that modules import for checkers alone."""
    what: Any = called.hints_of or called.call
    names = {"torch": torch, "Mesh": Mesh, "StreamState": StreamState, "PathLike": __import__("os").PathLike}
    if inspect.isclass(what):
        source = what.__init__ if not typing.is_typeddict(what) else what
        found = typing.get_type_hints(source, localns=names)
    else:
        found = typing.get_type_hints(getattr(what, "__func__", what), localns=names)
    parameters = inspect.signature(what).parameters
    return {
        name: found.get(name, Any)
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _closed(answer: Any) -> Any:
    """What a call answered, its threads and files given back."""
    if hasattr(answer, "close"):
        answer.close()
    return answer


def _refused(title: str, called: Called, name: str, hint: Any, label: str) -> str:
    """What is wrong with the answer to one value; nothing where it is right."""
    value = WRONG[label]
    fits = _fits(label, value, hint, called.takes.get(name, ()))
    what = f"{title}({name}={value!r})"
    try:
        answer = called.call(**{**called.given, name: value})
    except called.raises:
        return ""
    except (ValueError, TypeError) as error:
        return "" if fits or name in str(error) else f"{what}: {type(error).__name__} that does not name it: {error}"
    except Exception as error:
        return "" if fits and type(error).__module__.startswith("treadle.") else f"{what}: {type(error).__name__}: {error}"
    _closed(answer)
    return "" if fits else f"{what}: is taken"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Called]]:
    """Every public callable, and arguments that it takes."""
    called = _called(tmp_path_factory.mktemp("api"))
    yield called
    owners: list[Any] = [getattr(each.call, "__self__", None) for each in called.values()]
    for owner in (*owners, _trainer()):
        if hasattr(owner, "close") and not inspect.isclass(owner):
            owner.close()


@pytest.mark.filterwarnings("ignore:world_size=3 does not divide", "ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("label", WRONG)
def test_no_argument_takes_it(label: str, api: dict[str, Called], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A word is the name of a file, too.
    monkeypatch.chdir(tmp_path)
    found = [
        _refused(title, called, name, hint, label) for title, called in api.items() for name, hint in _hints(called).items()
    ]  # fmt: skip
    assert len(found) > 250
    assert "\n".join(filter(None, found)) == ""


def test_every_callable_takes_what_it_should(api: dict[str, Called]) -> None:
    for called in api.values():
        _closed(called.call(**called.given))


def test_numbers_of_numpy_are_numbers(api: dict[str, Called]) -> None:
    tried = 0
    for title, called in api.items():
        what: Any = called.hints_of or called.call
        for name, hint in _hints(called).items():
            given = called.given.get(name, inspect.signature(what).parameters[name].default)
            kind: Any = {int: np.int64, float: np.float64}.get(hint)
            if kind is None or not isinstance(given, int | float):
                continue
            tried += 1
            answer = _closed(called.call(**{**called.given, name: kind(given)}))
            if hasattr(answer, name):
                assert type(getattr(answer, name)) is hint, f"{title}.{name}"
    assert tried > 80


def test_the_walk_misses_no_public_name(api: dict[str, Called]) -> None:
    known = {*api, *BETWEEN_PARTS}
    missed: list[str] = []
    for package in (treadle, treadle.pipeline, treadle.decoders, treadle.model, treadle.kernels):
        for name in package.__all__:
            thing = getattr(package, name)
            if name in MADE_BY_THE_LIBRARY | NOT_CALLED or thing in ENUMERATIONS:
                continue
            if name not in known and not any(title.startswith(f"{name}.") for title in known):
                missed.append(name)
            for method, function in vars(thing).items() if inspect.isclass(thing) else ():
                plain = getattr(function, "__func__", function)
                if method.startswith("_") or not inspect.isfunction(plain):
                    continue
                takes = [one for one in inspect.signature(plain).parameters if one not in ("self", "cls")]
                if takes and f"{name}.{method}" not in known and not method.startswith(("save", "load")) and method != "finish_mean":
                    missed.append(f"{name}.{method}")
    assert missed == []


@pytest.mark.parametrize("kind", ENUMERATIONS)
def test_enumerations_name_their_members(kind: Any) -> None:
    for value in WRONG.values():
        with pytest.raises(ValueError, match=f"{kind.__name__}: .* is not one of {kind(0)}, {kind(1)}"):
            kind.parse(value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Packer(cast(Any, None)), "Packer.shape is None: it must be a BatchShape"),
        (lambda: Packer(SHAPE, late_interaction=cast(Any, 3)), "late_interaction is 3: it must be a LateInteraction, or None; it has no max_query_span"),
        (lambda: Packer(SHAPE, seed=-1), "Packer.seed is -1: it must lie between 0 and 18446744073709551615"),
        (lambda: Trainer(cast(Any, 3)), "Trainer.config is 3: it must be a TrainerConfig"),
        (lambda: ShardStream("x.tar", SHAPE, seed=10**5000), "ShardStream.seed is a number of no use: it must lie between"),
        (lambda: Packer(cast(Any, np.zeros((300, 300)))), r"Packer.shape is array\(\[\[0., .*\.\.\.: it must be a BatchShape$"),
    ],
)  # fmt: skip
def test_messages(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
