"""A bag of a user's own arrays: what decoders give, without a file to decode."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.decoders import Payload
from treadle.pipeline.bag import DecodedBag, assemble_bag
from treadle.pipeline.columns import members
from treadle.pipeline.items import Relations, StepItems
from treadle.shape import BatchShape, Modality, require_member, shown

_FORMS = {
    Modality.TEXT: ("uint8 [bytes]", np.uint8, 1),
    Modality.IMAGE: ("uint8 [height, width, channels]", np.uint8, 3),
    Modality.VIDEO: ("uint8 [frames, height, width, channels]", np.uint8, 4),
    Modality.AUDIO: ("float32 [samples]", np.float32, 1),
}


def bag_of_arrays(
    modalities: Iterable[object],
    arrays: Sequence[NDArray[Any]],
    shape: BatchShape,
    *,
    ids: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    temperature_groups: ArrayLike | None = None,
    sides: Iterable[object] | None = None,
    choices: Sequence[bytes | None] | None = None,
    choice_targets: Sequence[ArrayLike | None] | None = None,
    relations: Relations | None = None,
) -> DecodedBag:
    """One bag for `Packer.add_decoded`, of arrays in place of encoded bytes; they are copied when the bag is packed.

    Args:
        modalities: what each array holds.
        arrays: text uint8 `[bytes]`, image uint8 `[height, width, channels]`, video uint8 `[frames, height, width, channels]`, audio
            float32 `[samples]` at the shape's sample rate, within [-1, 1]. None is cut or scaled: each must fit a row.
        shape: the packer's.
        ids: as in `StepItems`, like all that follows.

    Raises:
        ValueError: an array is not what its modality takes, does not fit a row, or a column breaks a rule of `StepItems`.
    """
    require_member("bag_of_arrays", "shape", shape, BatchShape)
    kinds = members("modalities", modalities, Modality)
    if not isinstance(cast(object, arrays), Sequence | np.ndarray):
        raise ValueError(f"arrays is {shown(arrays)}: it must be a list with one array per item")
    if len(kinds) != len(arrays):
        raise ValueError(f"arrays has {len(arrays)} entries for {len(kinds)} modalities: there must be one per item")
    items = StepItems(
        kinds,
        [b""] * len(kinds),
        temperature_groups=temperature_groups,
        sides=sides,
        groups=groups,
        ids=ids,
        choices=choices,
        choice_targets=choice_targets,
        relations=relations,
    )
    items.check(shape)
    resolved = shape.resolved()
    offers = [False] * len(kinds) if items.choices is None else (np.diff(items.choices.offsets) > 0).tolist()
    payloads = [
        _payload(item, Modality(kind), arrays[item], resolved, choices=offers[item]) for item, kind in enumerate(items.modalities.tolist())
    ]
    bag = assemble_bag(items, payloads)
    bag.made_for = shape
    return bag


def _payload(item: int, kind: Modality, array: NDArray[Any], shape: BatchShape, *, choices: bool) -> Payload:
    form, dtype, dimensions = _FORMS[kind]
    if not isinstance(cast(object, array), np.ndarray):
        raise ValueError(f"arrays: item {item} is {kind} and has {type(array).__name__}: it must be {form}")
    found = f"{array.dtype} {list(array.shape)}"
    if array.dtype != dtype or array.ndim != dimensions or not array.size:
        raise ValueError(f"arrays: item {item} is {kind} and has {found}: it must be {form}, not empty")
    if kind is Modality.TEXT or kind is Modality.AUDIO:
        tokens = array.size if kind is Modality.TEXT else -(-array.size // shape.audio.chunk_samples)
        grid, extent = (tokens, 1, 1), (1, 1, array.size)
        if kind is Modality.AUDIO and not np.abs(array).max() <= 1:
            raise ValueError(f"arrays: item {item} has samples from {array.min()} to {array.max()}: they must lie within [-1, 1]")
    else:
        frames = array.shape[0] if kind is Modality.VIDEO else 1
        high, wide, channels = array.shape[-3:]
        side, wanted = (
            (shape.image.patch_side, shape.image.channels) if kind is Modality.IMAGE else (shape.video.patch_side, shape.video.channels)
        )
        if channels != wanted:
            raise ValueError(f"arrays: item {item} has {channels} channels: BatchShape.{kind}.channels is {wanted}")
        tube = shape.video.tube_frames if kind is Modality.VIDEO else 1
        if frames % tube:
            raise ValueError(f"arrays: item {item} has {frames} frames: they must be a multiple of BatchShape.video.tube_frames, {tube}")
        grid, extent = (frames // tube, -(-high // side), -(-wide // side)), (frames, high, wide)
    tokens, most = grid[0] * grid[1] * grid[2], shape.token_capacity(choices=choices)
    if tokens > most:
        raise ValueError(f"arrays: item {item} takes {tokens} tokens ({found}): a row holds {most}; cut it, or use wider rows")
    return Payload(np.ascontiguousarray(array), grid, extent)
