"""Nested Python values as JSON and tensors, with every type preserved and nothing executed on the way back.

Held are None, bool, int, float, complex, str, bytes, list, tuple, dict (also OrderedDict and Counter), numpy arrays and scalars, and
tensors. Anything else is refused by its place and type. A value becomes a JSON list whose first entry names its type.
"""

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 100
"""Nesting of lists, tuples and dicts; JSON readers and this one recurse."""

_ARRAY_TYPE = re.compile(r"[<>|=][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,8}\])?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": lambda pairs: Counter(dict(pairs))}
_DICT_TYPES: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}

MAX_LISTED = 12
"""Differences that a refusal lists."""

Copy = Callable[[Tensor], Tensor]
"""Takes a tensor's value at this moment."""


def refuse(what: str, differences: list[str]) -> None:
    """Raises a `ValueError` that lists the differences, if there are any."""
    if differences:
        more = f" (and {len(differences) - MAX_LISTED} more)" if len(differences) > MAX_LISTED else ""
        raise ValueError(f"{what}: " + "; ".join(differences[:MAX_LISTED]) + more)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The type of that name.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is no tensor type")
    return dtype


class ValueWriter:
    """Turns values into JSON nodes, and puts their tensors beside, under `<prefix>.<number>`."""

    def __init__(self, prefix: str, tensors: dict[str, Tensor], copy: Copy) -> None:
        self._prefix, self._tensors, self._copy = prefix, tensors, copy
        self._open: list[int] = []
        self._count = 0

    def write(self, value: object, place: str) -> list[Any]:
        """The node of `value`; `place` names it in refusals.

        Raises:
            ValueError: `value`, or something in it, is of a type that a record does not hold, or contains itself.
        """
        kind = type(value)
        if value is None:
            return ["none"]
        if isinstance(value, bool):
            return ["bool", value]
        if isinstance(value, int) and kind is int:
            return ["int", f"{value:x}"]
        if isinstance(value, float) and kind is float:
            return ["float", _float_text(value)]
        if isinstance(value, complex) and kind is complex:
            return ["complex", _float_text(value.real), _float_text(value.imag)]
        if isinstance(value, str) and kind is str:
            # JSON readers join a pair of surrogates into one character.
            return ["str", value] if value.isascii() or not _SURROGATE.search(value) else ["utf-32", _utf32(value)]
        if isinstance(value, bytes) and kind is bytes:
            return ["bytes", self._put(_raw(value))]
        if isinstance(value, np.generic):
            described = self._array_type(value.dtype, place)
            if isinstance(value, str | bytes):
                # As its content: an array strips the zeros at its end, and holds none of no length.
                return ["scalar", *described, _utf32(value) if isinstance(value, str) else value.hex()]
            return ["scalar", *described, np.asarray(value).tobytes().hex()]
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            described = self._array_type(value.dtype, place)
            return ["array", *described, list(value.shape), self._put(_raw(value.tobytes()))]
        if isinstance(value, Tensor) and kind in (Tensor, nn.Parameter):
            return self._tensor(value, place)
        return self._container(value, place)

    def _tensor(self, value: Tensor, place: str) -> list[Any]:
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.device.type == "meta":
            named = {"quantized": value.is_quantized, "nested": value.is_nested, "meta": value.device.type == "meta"}
            what = next((name for name, is_so in named.items() if is_so), str(value.layout))
            raise ValueError(f"{place} is a {what} tensor: a record holds dense ones that have values, such as to_dense() makes")
        flags = [isinstance(value, nn.Parameter), value.requires_grad, value.device.type == "cpu"]
        return ["tensor", self._put(self._copy(value.detach().resolve_conj().resolve_neg())), flags]

    def _container(self, value: object, place: str) -> list[Any]:
        if not isinstance(value, list | tuple | dict) or type(value) not in (list, tuple, *_DICT_TYPES):
            raise ValueError(
                f"{place} is a {type(value).__module__}.{type(value).__qualname__}: a record holds None, numbers, strings, bytes, lists, "
                "tuples, dicts, numpy arrays and tensors"
            )
        if id(value) in self._open:
            raise ValueError(f"{place} contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise ValueError(f"{place} is nested deeper than {MAX_DEPTH}")
        self._open.append(id(value))
        try:
            if isinstance(value, dict):
                pairs = [[self._key(k, place), self.write(v, f"{place}[{k!r}]")] for k, v in value.items()]
                return [_DICT_TYPES[type(value)], pairs]
            return [type(value).__name__, [self.write(v, f"{place}[{i}]") for i, v in enumerate(value)]]
        finally:
            self._open.pop()

    def _key(self, key: object, place: str) -> list[Any]:
        if not isinstance(key, str | int | float | bytes | tuple | None):
            raise ValueError(f"{place} has the key {key!r}: keys are strings, numbers, bytes or tuples of them")
        return self.write(key, f"a key of {place}")

    def _array_type(self, dtype: np.dtype[Any], place: str) -> list[str]:
        if not _ARRAY_TYPE.fullmatch(dtype.str) or dtype.fields is not None:
            raise ValueError(f"{place} is a numpy value of type {dtype}: a record holds plain types, no objects or structures")
        return [dtype.str]

    def _put(self, tensor: Tensor) -> str:
        name = f"{self._prefix}.{self._count}"
        self._count += 1
        self._tensors[name] = tensor
        return name


class ValueReader:
    """Turns nodes back into values; every node is checked, since a file may hold anything.

    Args:
        tensors: what nodes name.
        device: where tensors that were not on the CPU go; those that were stay there (generator states must).
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        self._tensors, self._device = tensors, device

    def read(self, node: object, depth: int = 0) -> Any:
        """The value of a node, sharing no memory with the record.

        Raises:
            ValueError: the node is none that `ValueWriter` writes.
        """
        if not isinstance(node, list) or not node or not isinstance(node[0], str) or depth > MAX_DEPTH + 1:
            raise ValueError("a recorded value is malformed")
        kind, rest = node[0], node[1:]
        try:
            if kind in ("list", "tuple"):
                items = [self.read(n, depth + 1) for n in _list(rest[0])]
                return items if kind == "list" else tuple(items)
            if kind in _DICTS:
                return _DICTS[kind]([(self.read(k, depth + 1), self.read(v, depth + 1)) for k, v in map(_list, _list(rest[0]))])
            return self._leaf(kind, rest)
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a recorded value of kind {kind[:20]!r} is malformed ({error})") from error

    def _leaf(self, kind: str, rest: list[Any]) -> object:
        if kind == "none":
            return None
        if kind == "bool":
            return rest[0] is True
        if kind == "int":
            return int(rest[0], 16)
        if kind == "float":
            return _float_of(rest[0])
        if kind == "complex":
            return complex(_float_of(rest[0]), _float_of(rest[1]))
        if kind == "str":
            return str(rest[0])
        if kind == "utf-32":
            return _of_utf32(rest[0])
        if kind == "bytes":
            return _bytes(self._take(rest[0]))
        if kind == "scalar":
            plain = self._array_type(rest[0]).kind
            if plain in "SU":
                return np.bytes_(bytes.fromhex(rest[1])) if plain == "S" else np.str_(_of_utf32(rest[1]))
            return np.frombuffer(bytes.fromhex(rest[1]), self._array_type(rest[0]))[0]
        if kind == "array":
            return np.frombuffer(_bytes(self._take(rest[2])), self._array_type(rest[0])).reshape(rest[1]).copy()
        if kind == "tensor":
            return self._tensor(self._take(rest[0]), _list(rest[1]))
        raise ValueError("no such kind")

    def _tensor(self, tensor: Tensor, flags: list[Any]) -> Tensor:
        parameter, requires_grad, on_cpu = map(bool, flags)
        if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"a {tensor.dtype} tensor cannot require a gradient")
        value = tensor.to("cpu" if on_cpu else self._device, copy=True)
        return nn.Parameter(value, requires_grad=requires_grad) if parameter else value.requires_grad_(requires_grad)

    def _array_type(self, name: object) -> np.dtype[Any]:
        if not isinstance(name, str) or not _ARRAY_TYPE.fullmatch(name):
            raise ValueError("no plain numpy type")
        return np.dtype(name)

    def _take(self, name: object) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"tensor {str(name)[:80]!r} is missing")
        return self._tensors[name]


def tensors_named(node: object) -> set[str]:
    """The tensors that a node and those in it name, whatever else is wrong with them."""
    named: set[str] = set()
    nodes = [node]
    while nodes:
        match nodes.pop():
            case ["bytes" | "tensor", name, *_] | ["array", _, _, name, *_]:
                named.add(str(name))
            case ["list" | "tuple", [*items]]:
                nodes += items
            case [str(kind), [*pairs]] if kind in _DICTS:
                nodes += [part for pair in pairs if isinstance(pair, list) for part in pair]
            case _:
                pass
    return named


def _utf32(value: str) -> str:
    """Every code point, surrogates too, in hexadecimal."""
    return value.encode("utf-32-le", "surrogatepass").hex()


def _of_utf32(text: str) -> str:
    return bytes.fromhex(text).decode("utf-32-le", "surrogatepass")


def _float_text(value: float) -> str:
    """Every bit of it: a NaN has a sign and a payload that its name does not tell."""
    return value.hex() if value == value else struct.pack(">d", value).hex()


def _float_of(text: str) -> float:
    found: float = (
        struct.unpack(">d", int(text, 16).to_bytes(8, "big"))[0] if len(text) == 16 and text[:3] in ("7ff", "fff") else float.fromhex(text)
    )
    return found


def _raw(data: bytes) -> Tensor:
    # On the CPU, whatever torch.set_default_device says.
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _bytes(tensor: Tensor) -> bytes:
    if tensor.dtype != torch.uint8:
        raise ValueError("bytes are kept in another type")
    return tensor.cpu().numpy().tobytes()


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is needed")
    return value
