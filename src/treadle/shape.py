"""Shapes and enumerations: the capacities that everything else is sized by; and the checks that all arguments share.

A field left at zero is derived; `resolved()` returns the shape with nothing left to derive.
"""

import math
import operator
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, Self

ALIGNMENT_BYTES = 16
"""Every payload on a batch's tape starts at a multiple of this."""

MAX_TAPE_BYTES = 2**31 - 1
"""Kernels address the tape with 32-bit offsets."""

MAX_CHOICES_PER_ITEM = 256
"""A choice is one byte, and the bytes of one item are distinct."""

MAX_NUMBER = 3.4028234e38
"""Weights, losses and temperatures are fp32: a number beyond its range would be infinite there."""

_MAX_SHOWN = 200
"""Characters of a refused value that a message shows."""


class _NamedEnum(IntEnum):
    """An integer enumeration that prints, and parses, as its lower-case name."""

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if isinstance(value, str):
            for member in cls:
                if member.name.lower() == value.strip().lower():
                    return member
        return None

    @classmethod
    def parse(cls, name: str) -> Self:
        """The member of that name, whatever its case.

        Raises:
            ValueError: no member has that name.
        """
        member = cls._missing_(name)
        if member is None:
            known = ", ".join(str(m) for m in cls)
            raise ValueError(f"{cls.__name__}: {name!r} is not one of {known}")
        return member

    @classmethod
    def given(cls, owner: str, name: str, value: object) -> Self:
        """The member that an argument says: itself, its number or its name.

        Raises:
            ValueError: it says none.
        """
        if isinstance(value, cls):
            return value
        try:
            return cls(cls.parse(value) if isinstance(value, str) else require_count(owner, name, value))
        except ValueError:
            known = ", ".join(str(member) for member in cls)
            raise ValueError(f"{owner}.{name} is {shown(value)}: it must be one of {known}") from None


class Modality(_NamedEnum):
    """What the bytes of one item hold."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class Objective(_NamedEnum):
    """Which losses a step relaxes."""

    MASKED = 0
    CONTRASTIVE = 1
    JOINT = 2


class Negatives(_NamedEnum):
    """Which pairs the contrastive loss pushes apart."""

    AMBIENT = 0
    NAMED = 1


class PairLossForm(_NamedEnum):
    """How a contrastive term turns a row of scores into a loss."""

    DERIVED = 0
    BALANCED = 1
    RANKED = 2
    SIGMOID = 3


class LateInteractionSide(_NamedEnum):
    """An item's role in late interaction."""

    NONE = 0
    QUERY = 1
    DOCUMENT = 2
    QUERY_AND_DOCUMENT = 3


def shown(value: object) -> str:
    """A refused value for a message: on one line, and not at any length."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        # Python prints no integer of more than 4,300 digits.
        return "a number of no use"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def plain_number(value: Any) -> Any:
    """Python's own number for one of numpy's or torch's, an array of no dimensions too; any other value as it is."""
    return value.item() if type(value) is not int and getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def require_count(owner: str, name: str, value: object, least: int = 0, most: int = 2**31 - 1) -> int:
    """Checks an integer argument, numpy's and torch's too, and answers it as Python's own.

    Raises:
        ValueError: `value` is not an integer between `least` and `most`.
    """
    count = plain_number(value)
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise ValueError(f"{owner}.{name} is {shown(value)}: it must be an integer from {least} to {most}")
    count = operator.index(count)
    if not least <= count <= most:
        raise ValueError(f"{owner}.{name} is {shown(count)}: it must lie between {least} and {most}")
    return count


def require_number(owner: str, name: str, value: object, least: float = -MAX_NUMBER, most: float = MAX_NUMBER) -> None:
    """Checks a real argument.

    Raises:
        ValueError: `value` is not a finite number between `least` and `most`.
    """
    # Compared before it is printed or converted: an integer may have more digits than a float, or than Python prints.
    given: object = plain_number(value)
    number: Any = given
    if isinstance(given, bool) or not isinstance(given, Real) or number != number or abs(number) == math.inf:
        raise ValueError(f"{owner}.{name} is {shown(value)}: it must be a finite number")
    if not least <= number <= most:
        raise ValueError(f"{owner}.{name} is {shown(value)}: it must lie between {least} and {most}")


def require_member(owner: str, name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Checks an argument that holds an enumeration, a configuration or another object; with `optional` it may be None.

    Raises:
        ValueError: `value` is no `kind`.
    """
    if isinstance(value, kind) or (optional and value is None) or (kind is bool and isinstance(plain_number(value), bool)):
        return
    what = "True or False" if kind is bool else f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    raise ValueError(f"{owner}.{name} is {shown(value)}: it must be {what}{', or None' if optional else ''}")


def require_choice(owner: str, name: str, value: object, choices: Collection[str]) -> None:
    """Checks an argument that is one of a few words.

    Raises:
        ValueError: `value` is none of `choices`.
    """
    if not isinstance(value, str) or value not in choices:
        *others, last = [repr(choice) for choice in choices]
        raise ValueError(f"{owner}.{name} is {shown(value)}: it must be {', '.join(others)} or {last}")


def require_path(owner: str, name: str, value: object) -> str:
    """Checks the path of a file or folder, and answers it as text. A number is none: `open` would take it for an open file's.

    Raises:
        ValueError: `value` is neither text nor a path, or empty.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ValueError(f"{owner}.{name} is {shown(value)}: it must be the path of a file or folder, as text or a Path")
    return path


def entries_of(value: Any) -> list[Any] | None:
    """The entries of a list, or of anything else that gives some one by one; None where it is none, as text, bytes and a mapping are."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    try:
        entries = iter(value)
    except TypeError:
        return None
    return list(entries)


def settle_numbers(configuration: Any) -> None:
    """Makes Python's own numbers of numpy's and torch's in the fields of a frozen configuration: they never overflow and have a JSON form."""
    for entry in fields(configuration):
        given = getattr(configuration, entry.name)
        value: object = plain_number(given)
        if isinstance(value, Integral) and not isinstance(value, int):
            value = operator.index(value)
        elif isinstance(value, Real) and not isinstance(value, Integral):
            value = float(value)
        if value is not given:
            object.__setattr__(configuration, entry.name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShape:
    """The image slice of a batch.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    patch_side: int = 0
    """Side of a square patch, pixels; 0 leaves images out."""
    channels: int = 0
    """Channels of a pixel: 1 (luma), 3 (RGB) or 4 (RGBA); 0 derives 4."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("ImageShape", "patch_side", self.patch_side, 0, 1024)
        require_count("ImageShape", "channels", self.channels, 0, 4)
        if self.channels == 2:
            raise ValueError("ImageShape.channels is 2: it must be 1, 3 or 4 (0 derives 4)")

    @property
    def live(self) -> bool:
        """Whether images take part."""
        return self.patch_side > 0

    def resolved(self) -> "ImageShape":
        """This slice with nothing left to derive."""
        return replace(self, channels=self.channels or 4)

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one full patch (uint8)."""
        return self.patch_side**2 * (self.channels or 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoShape:
    """The video slice of a batch.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    patch_side: int = 0
    """Side of a tube's square patch, pixels; 0 leaves video out."""
    tube_frames: int = 0
    """Frames that one tube folds; 0 derives 2."""
    frame_stride: int = 0
    """Every how many source frames one is taken; 0 derives 1, every frame."""
    channels: int = 0
    """Channels of a pixel: 1, 3 or 4; 0 derives 3."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("VideoShape", "patch_side", self.patch_side, 0, 1024)
        require_count("VideoShape", "tube_frames", self.tube_frames, 0, 64)
        require_count("VideoShape", "frame_stride", self.frame_stride, 0, 10_000)
        require_count("VideoShape", "channels", self.channels, 0, 4)
        if self.channels == 2:
            raise ValueError("VideoShape.channels is 2: it must be 1, 3 or 4 (0 derives 3)")

    @property
    def live(self) -> bool:
        """Whether video takes part."""
        return self.patch_side > 0

    def resolved(self) -> "VideoShape":
        """This slice with nothing left to derive."""
        return replace(
            self,
            tube_frames=self.tube_frames or 2,
            frame_stride=self.frame_stride or 1,
            channels=self.channels or 3,
        )

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one full tube (uint8)."""
        return (self.tube_frames or 2) * self.patch_side**2 * (self.channels or 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioShape:
    """The audio slice of a batch; recordings are mono.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    chunk_samples: int = 0
    """Samples of one chunk, a token; 0 leaves audio out."""
    sample_rate: int = 0
    """Rate that every recording is resampled to, Hz; 0 derives 16000."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("AudioShape", "chunk_samples", self.chunk_samples, 0, 1_000_000)
        require_count("AudioShape", "sample_rate", self.sample_rate, 0, 768_000)

    @property
    def live(self) -> bool:
        """Whether audio takes part."""
        return self.chunk_samples > 0

    def resolved(self) -> "AudioShape":
        """This slice with nothing left to derive."""
        return replace(self, sample_rate=self.sample_rate or 16_000)

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one full chunk (float32)."""
        return 4 * self.chunk_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What one device's step carries at most, whatever the mix of modalities: capacity, fixed at creation.

    Raises:
        ValueError: a field is out of range or of another type; the message names it.
    """

    max_rows_per_device: int
    """Rows of a batch."""
    max_segments_per_device: int
    """Items that a batch carries across all its rows."""
    max_columns_per_row: int
    """Positions of a row, the sequence length."""
    max_bags_per_device: int = 0
    """Bags that a batch carries; 0 derives `max_segments_per_device`."""
    max_choices_per_item: int = 0
    """Legal bytes that one item may offer; 0 makes no choices."""
    image: ImageShape = field(default_factory=ImageShape)
    video: VideoShape = field(default_factory=VideoShape)
    audio: AudioShape = field(default_factory=AudioShape)

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_count("BatchShape", "max_rows_per_device", self.max_rows_per_device, 1, 2**20)
        require_count("BatchShape", "max_segments_per_device", self.max_segments_per_device, 1, 2**24)
        require_count("BatchShape", "max_columns_per_row", self.max_columns_per_row, 2, 2**20)
        require_count("BatchShape", "max_bags_per_device", self.max_bags_per_device, 0, 2**24)
        require_count("BatchShape", "max_choices_per_item", self.max_choices_per_item, 0, MAX_CHOICES_PER_ITEM)
        for name, kind in (("image", ImageShape), ("video", VideoShape), ("audio", AudioShape)):
            require_member("BatchShape", name, getattr(self, name), kind)
        if self.max_choices_per_item and self.max_columns_per_row < 3:
            raise ValueError(
                f"BatchShape.max_columns_per_row is {self.max_columns_per_row}: with choices a row needs at least 3 "
                "positions (prefix, one token, mask)"
            )
        if self.tape_bytes > MAX_TAPE_BYTES:
            raise ValueError(
                f"BatchShape: {self.max_rows_per_device} rows x {self.max_columns_per_row} columns x "
                f"{self.bytes_per_position} bytes a position make a tape of {self.tape_bytes} bytes: it must stay below "
                f"{MAX_TAPE_BYTES}; lower the rows, the columns or the patch side"
            )

    def resolved(self) -> "BatchShape":
        """This shape with nothing left to derive."""
        return replace(
            self,
            max_bags_per_device=self.max_bags_per_device or self.max_segments_per_device,
            image=self.image.resolved(),
            video=self.video.resolved(),
            audio=self.audio.resolved(),
        )

    def is_live(self, modality: Modality) -> bool:
        """Whether items of `modality` take part; text always does.

        Raises:
            ValueError: `modality` is none.
        """
        if modality is Modality.TEXT:
            return True
        slices: dict[Modality, ImageShape | VideoShape | AudioShape] = {
            Modality.IMAGE: self.image,
            Modality.VIDEO: self.video,
            Modality.AUDIO: self.audio,
        }
        own = slices.get(Modality.given("BatchShape.is_live", "modality", modality))
        return own is None or own.live

    @property
    def positions(self) -> int:
        """Positions of a batch: rows times columns."""
        return self.max_rows_per_device * self.max_columns_per_row

    @property
    def bytes_per_position(self) -> int:
        """Largest payload bytes of one position over the live modalities."""
        return max(1, self.image.token_bytes, self.video.token_bytes, self.audio.token_bytes)

    @property
    def tape_bytes(self) -> int:
        """Bytes of a batch's tape: no mix of whole items that fits the rows can pass it."""
        slack = ALIGNMENT_BYTES * (self.max_segments_per_device + 1)
        return self.positions * self.bytes_per_position + slack

    def token_capacity(self, *, choices: bool = False) -> int:
        """Tokens that one item may hold: a row less the prefix, and less the mask position where it offers choices.

        Raises:
            ValueError: `choices` is neither True nor False.
        """
        require_member("BatchShape.token_capacity", "choices", choices, bool)
        return self.max_columns_per_row - (2 if choices else 1)
