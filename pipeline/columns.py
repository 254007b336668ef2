"""Coercion of the columns that users give to arrays of a fixed type, each refusal naming the column and the entry."""

from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.shape import LateInteractionSide, Modality, entries_of, shown

Content = bytes | bytearray | memoryview
Scalar = TypeVar("Scalar", bound=np.generic)

_EMPTY_FLOAT32 = np.zeros(0, np.float32)
_BOUNDS = {dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in (np.uint8, np.int32, np.uint32, np.int64, np.uint64)}


class Tape(NamedTuple, Generic[Scalar]):
    """Entries of any length back to back: entry `i` is `data[offsets[i]:offsets[i + 1]]`."""

    data: NDArray[Scalar]
    offsets: NDArray[np.int64]


def integer_column(name: str, values: ArrayLike | Iterable[int], dtype: type[Scalar]) -> NDArray[Scalar]:
    """`values` as a one-dimensional array of `dtype`; one that is such an array already is not copied.

    Raises:
        ValueError: a value is no integer, or does not fit `dtype`.
    """
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.ndim == 1:
        return values
    least, most = _BOUNDS[dtype]  # type: ignore[index]  # Scalar is one of its keys
    if type(values) is list and all(type(value) is int for value in values):
        # Short lists are what a stream of samples gives: this is a tenth of the general way.
        if not values or (least <= min(values) and max(values) <= most):
            return np.array(values, dtype)
    array: NDArray[Any] = np.asarray(values)
    if array.ndim == 0 and array.dtype == object:
        # An iterator, say: one thing to numpy.
        values = entries_of(values) or values
        array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: it must be one-dimensional")
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype.kind not in "iu":
        # Integers past 63 bits beside negative ones reach numpy as floats or objects: look at the values themselves.
        given: list[Any] = list(values) if isinstance(values, Sequence) else array.tolist()
        for place, value in enumerate(given):
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name}[{place}] is {value!r}: it must be an integer")
        array = np.array([int(value) for value in given], dtype=object)
    low, high = int(array.min()), int(array.max())
    if low < least or high > most:
        place = int(array.argmin() if low < least else array.argmax())
        raise ValueError(f"{name}[{place}] is {int(array[place])}: it must lie between {least} and {most}")
    return array.astype(dtype)


def float_column(name: str, values: ArrayLike) -> NDArray[np.float32]:
    """`values` as a one-dimensional float32 array.

    Raises:
        ValueError: a value is no number.
    """
    try:
        array: NDArray[Any] = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not a flat sequence of numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: it must be one-dimensional")
    if array.size and array.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds {array.dtype}: it must hold numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def sized(name: str, array: NDArray[Scalar], count: int) -> NDArray[Scalar]:
    """`array`, which must have one entry per item.

    Raises:
        ValueError: it has not.
    """
    if len(array) != count:
        raise ValueError(f"{name} has {len(array)} entries for {count} items: there must be one per item")
    return array


def item_column(name: str, values: ArrayLike, dtype: type[Scalar], count: int) -> NDArray[Scalar]:
    """An integer column with one entry per item.

    Raises:
        ValueError: as `integer_column` and `sized`.
    """
    return sized(name, integer_column(name, values, dtype), count)


def members(name: str, values: Iterable[Any], kind: type[Modality] | type[LateInteractionSide]) -> NDArray[np.uint8]:
    """Members of an enumeration, given as such, as numbers or as names.

    Raises:
        ValueError: an entry is none of them.
    """
    given = values.tolist() if isinstance(values, np.ndarray) and values.ndim else _listed(name, values)
    try:
        plain = bytes(given)
    except (TypeError, ValueError):
        plain = b"\xff"
    if not plain or max(plain) < len(kind):
        return np.frombuffer(plain, np.uint8)
    found: list[int] = []
    for item, value in enumerate(given):
        try:
            found.append(int(kind(value)))
        except ValueError:
            known = ", ".join(f"{member.value} {member}" for member in kind)
            raise ValueError(f"{name}: item {item} has {value!r}: it must be one of {known}") from None
    return np.array(found, np.uint8)


def temperature_group_column(values: ArrayLike, count: int) -> NDArray[np.int32]:
    """Temperature groups, which are not negative.

    Raises:
        ValueError: one is, or as `item_column`.
    """
    groups = item_column("temperature_groups", values, np.int32, count)
    if count and int(groups.min()) < 0:
        item = int(groups.argmin())
        raise ValueError(f"temperature_groups: item {item} has group {groups[item]}: it must not be negative")
    return groups


def group_column(values: ArrayLike, count: int) -> NDArray[np.int64]:
    """Groups are 64 bits, signed or not: what matters is which are equal and which are zero.

    Raises:
        ValueError: one needs more bits, or as `item_column`.
    """
    try:
        return item_column("groups", values, np.int64, count)
    except ValueError as error:
        try:
            return item_column("groups", values, np.uint64, count).view(np.int64)
        except ValueError:
            raise error from None


def content_list(values: Any, count: int, name: str = "contents") -> list[Content] | Tape[np.uint8]:
    """Contents: a tape, or a list of bytes; `name` is the argument in messages.

    Raises:
        ValueError: the tape is malformed, or an entry is no bytes.
    """
    if _is_tape(values):
        data = _bytes_array(name, values[0])
        return Tape(data, _tape_offsets(name, values[1], data.size, count))
    entries = _listed(name, values)
    if len(entries) != count:
        raise ValueError(f"{name} has {len(entries)} entries for {count} items: there must be one per item")
    for item, entry in enumerate(entries):
        if isinstance(entry, bytes | bytearray | memoryview):
            if isinstance(entry, memoryview) and not entry.c_contiguous:
                entries[item] = entry.tobytes()
            continue
        if isinstance(entry, np.ndarray) and entry.dtype == np.uint8 and entry.ndim == 1:
            entries[item] = np.ascontiguousarray(entry).data
            continue
        if isinstance(entry, mmap):
            entries[item] = memoryview(entry)
            continue
        fix = "; encode the text first" if isinstance(entry, str) else ""
        raise ValueError(f"{name}: item {item} is {type(entry).__name__}: it must be bytes{fix}")
    return entries


def byte_tape(name: str, values: Any, count: int) -> Tape[np.uint8]:
    """A tape of bytes, given as one or as a list with None or nothing where an item has no entry.

    Raises:
        ValueError: the tape is malformed, or an entry is no bytes.
    """
    if _is_tape(values):
        data = _bytes_array(name, values[0])
        return Tape(data, _tape_offsets(name, values[1], data.size, count))
    entries: list[bytes] = []
    for item, entry in enumerate(_listed(name, values)):
        if entry is not None and not isinstance(entry, bytes | bytearray | memoryview | np.ndarray):
            raise ValueError(f"{name}: item {item} is {type(entry).__name__}: it must be bytes, or None")
        entries.append(b"" if entry is None else bytes(entry))
    return Tape(np.frombuffer(b"".join(entries), np.uint8), _offsets_of(name, [len(entry) for entry in entries], count))


def float_tape(name: str, values: Any, count: int) -> Tape[np.float32]:
    """A tape of numbers, given as one or as a list of sequences with None or nothing where an item has no entry.

    Raises:
        ValueError: the tape is malformed, or an entry is no sequence of numbers.
    """
    # A tuple of two could also be the entries of two items: only a tape's second part counts the items.
    if _is_tape(values) and (count != 2 or (np.ndim(values[1]) == 1 and len(values[1]) == count + 1)):
        data = float_column(name, values[0])
        return Tape(data, _tape_offsets(name, values[1], data.size, count))
    given = enumerate(_listed(name, values))
    entries = [_EMPTY_FLOAT32 if entry is None else float_column(f"{name}: item {item}", entry) for item, entry in given]
    offsets = _offsets_of(name, [len(entry) for entry in entries], count)
    return Tape(np.concatenate(entries) if entries else _EMPTY_FLOAT32, offsets)


def _listed(name: str, values: Any) -> list[Any]:
    """The entries of a column, one per item.

    Raises:
        ValueError: it has none.
    """
    try:
        entries = iter(values)
    except TypeError:
        raise ValueError(f"{name} is {shown(values)}: it must be a list with one entry per item") from None
    return list(entries)


def _is_tape(values: object) -> bool:
    return isinstance(values, tuple) and len(values) == 2 and not isinstance(values[1], bytes | bytearray | memoryview | str | None)


def _offsets_of(name: str, lengths: list[int], count: int) -> NDArray[np.int64]:
    if len(lengths) != count:
        raise ValueError(f"{name} has {len(lengths)} entries for {count} items: there must be one per item, empty where it makes no choice")
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _bytes_array(name: str, data: object) -> NDArray[np.uint8]:
    if isinstance(data, bytes | bytearray | memoryview):
        return np.frombuffer(data if not isinstance(data, memoryview) or data.c_contiguous else data.tobytes(), np.uint8)
    if isinstance(data, list | tuple):
        return integer_column(f"{name} data", data, np.uint8)
    array: NDArray[Any] = np.asarray(data)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"{name}: a tape's data is {array.dtype} of shape {array.shape}: it must be bytes or a flat uint8 array")
    return np.ascontiguousarray(array)


def _tape_offsets(name: str, values: ArrayLike, size: int, count: int) -> NDArray[np.int64]:
    offsets = integer_column(f"{name} offsets", values, np.int64)
    if not count and not len(offsets):
        return np.zeros(1, np.int64)
    if len(offsets) != count + 1:
        raise ValueError(f"{name}: a tape of {len(offsets)} offsets for {count} items: there must be {count + 1}")
    if offsets[0] < 0:
        raise ValueError(f"{name}: offsets[0] is {offsets[0]}: it must not be negative")
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        item = int(falls[0])
        raise ValueError(f"{name}: offsets fall from {offsets[item]} to {offsets[item + 1]} at item {item}: they must never decrease")
    if offsets[-1] > size:
        raise ValueError(f"{name}: offsets end at {offsets[-1]} but the tape's data has {size} entries")
    return offsets
