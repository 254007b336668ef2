"""The caller's state: every value and type comes back to the bit, through memory and a file; anything else is refused by name."""

import collections
import enum
import pathlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from treadle.model.accumulate import GradientsAccumulator
from treadle.model.record import TrainingRecord
from treadle.model.record_file import Form, Snapshot, read_snapshot, write_snapshot
from treadle.model.record_values import ValueReader, ValueWriter, tensors_named

# torch warns when a half complex tensor is first made; that it is held all the same is what is shown here.
pytestmark = pytest.mark.filterwarnings("ignore:.*support is experimental:UserWarning")

DTYPES = [
    d
    for d in (getattr(torch, name) for name in sorted(dir(torch)))
    if isinstance(d, torch.dtype) and d.itemsize and not str(d).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
]


def byte_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """A tensor of any bits; None where torch cannot make one."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = (
        torch.frombuffer(bytearray(np.random.default_rng(seed).bytes(count)), dtype=torch.uint8)
        if count
        else torch.zeros(0, dtype=torch.uint8)
    )
    if dtype is torch.bool:
        raw = raw % 2
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*support is experimental")
            made = raw.view(dtype).reshape(shape)
            return made.clone()
    except RuntimeError:
        return None


HELD = [d for d in DTYPES if byte_tensor(d, (2,), 0) is not None]


def bits(value: Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b) and a.requires_grad == b.requires_grad
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, complex):
        return np.complex128(a).tobytes() == np.complex128(b).tobytes()
    return bool(a == b)


tensors = st.builds(byte_tensor, st.sampled_from(HELD), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 99))
arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape),
    st.sampled_from(["u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16", "<M8[ns]", "<m8[us]", "S3"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 99),
)  # fmt: skip
scalars = st.sampled_from(
    [np.float32(-0.0), np.int8(-3), np.bool_(True), np.float64("nan"), np.uint64(2**64 - 1), np.complex64(1j), np.str_("x")]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.complex_numbers(allow_nan=True)
    | st.text()
    | st.binary(max_size=20)
    | arrays
    | scalars
    | tensors
)
keys = (
    st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.binary(max_size=3) | st.tuples(st.integers(), st.text(max_size=2))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)
FORM = Form("test.values", 1, lambda structure: tensors_named(structure["value"]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(value=values)
def test_values_come_back_to_the_bit(tmp_path: Path, value: Any) -> None:
    found: dict[str, Tensor] = {}
    node = ValueWriter("state", found, torch.clone).write(value, "state")
    assert tensors_named(node) == found.keys()
    assert same(ValueReader(found).read(node), value)
    write_snapshot(Snapshot({"value": node}, found), tmp_path / "values", FORM)
    read = read_snapshot(tmp_path / "values", FORM)
    assert same(ValueReader(read.tensors).read(read.structure["value"]), value)


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_tensors_of_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """In the caller's state and among a model's buffers."""
    state: list[Any] = [byte_tensor(dtype, shape, 3) for shape in ((), (0,), (2, 3), (1, 0, 4))]
    model = nn.Linear(1, 1)
    model.register_buffer("kept", state[2])
    optimizer = torch.optim.SGD(model.parameters())
    TrainingRecord.capture(model, optimizer, None, GradientsAccumulator(), state).save(tmp_path / "r")
    other = nn.Linear(1, 1)
    other.register_buffer("kept", torch.zeros(2, 3, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.empty_like(state[2]))
    restored = TrainingRecord.load(tmp_path / "r").restore(other, torch.optim.SGD(other.parameters()), None)
    assert same(restored.state, state)
    assert bits(other.get_buffer("kept")) == bits(model.get_buffer("kept"))


def test_every_type_of_the_published_field_is_among_them() -> None:
    names = {str(d).removeprefix("torch.") for d in HELD}
    assert {"bool", "uint8", "int64", "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"} <= names
    assert {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "complex32"} <= names


def test_views_conjugates_and_negations_are_their_values() -> None:
    base = torch.arange(6.0).reshape(2, 3) + 1j
    for value in (base.T, base.conj(), base.conj().imag, base[:, 1], torch.ones(1).expand(4)):
        found: dict[str, Tensor] = {}
        node = ValueWriter("state", found, torch.clone).write(value, "state")
        assert torch.equal(ValueReader(found).read(node), value)


def test_nan_keeps_its_sign_and_payload() -> None:
    odd = float(np.array(0xFFF8000000000123, np.uint64).view(np.float64))
    for value in (odd, complex(odd, -0.0), [float("nan"), float("-inf"), -0.0]):
        node = ValueWriter("state", {}, torch.clone).write(value, "state")
        assert same(ValueReader({}).read(node), value)


class Colour(enum.IntEnum):
    RED = 1


class Mine(dict[str, int]):
    pass


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Colour.RED, "Colour"),
        (Mine(), "Mine"),
        (Point(1, 2), "Point"),
        (pathlib.Path("x"), "PosixPath"),
        (bytearray(b"x"), "bytearray"),
        (collections.defaultdict(int), "defaultdict"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (frozenset(), "frozenset"),
        (range(3), "range"),
        (torch.float32, "dtype"),
        (torch.device("cpu"), "device"),
        (torch.Size([1]), "Size"),
        (nn.Linear(1, 1), "Linear"),
        (torch.Generator(), "Generator"),
        (int, "type"),
    ],
)
def test_other_types_are_refused_by_place_and_name(value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"state\['deep'\]\[1\] is a [\w.]*{name}: a record holds None, numbers, strings"):
        ValueWriter("state", {}, torch.clone).write({"deep": [0, value]}, "state")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "type object: a record holds plain types"),
        (np.zeros(1, [("a", "<i4")]), "a record holds plain types"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo tensor: a record holds dense ones"),
        (torch.ones(2, device="meta"), "a meta tensor: a record holds dense ones that have values"),
        ({frozenset(): 1}, "keys are strings, numbers, bytes or tuples of them"),
    ],
)
def test_values_without_plain_content_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueWriter("state", {}, torch.clone).write(value, "state")
