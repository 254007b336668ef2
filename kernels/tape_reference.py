"""Where patches, tubes and chunks lie on a batch's tape, and reading them in plain torch.

A patch (or tube: the same with more frames) is `frames x side` runs of `side * channels` bytes; runs and pixels past the picture's
edge are not its own and read as zeros. Values of a patch are in (frame, row, column, channel) order.
Legend: N patches or chunks, S segments, Y runs of a patch, B bytes of a run, V values of a patch or chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Patches(NamedTuple):
    """Patches or tubes of one modality: where each starts on the tape and how much of it lies inside its picture."""

    offset_N: Tensor
    """int64: byte of the first pixel."""
    row_pitch_N: Tensor
    """int64: bytes from one row of the picture to the next."""
    frame_pitch_N: Tensor
    """int64: bytes from one frame to the next."""
    rows_N: Tensor
    """int64: rows inside the picture, 1 to `side`."""
    columns_N: Tensor
    """int64: columns inside the picture, 1 to `side`."""
    frames: int
    """Frames of one patch: 1 for an image."""
    side: int
    """Rows and columns of one patch, pixels."""
    channels: int

    @property
    def values(self) -> int:
        """Values of one whole patch, V."""
        return self.frames * self.side * self.side * self.channels

    def select(self, index_M: Tensor) -> "Patches":
        """The patches at `index_M`."""
        offset, row_pitch, frame_pitch, rows, columns = (column.index_select(0, index_M) for column in self[:5])
        return Patches(offset, row_pitch, frame_pitch, rows, columns, self.frames, self.side, self.channels)


class Chunks(NamedTuple):
    """Chunks of recordings: where each starts on the tape and how many of its samples exist."""

    offset_N: Tensor
    """int64: byte of the first sample, a multiple of 4."""
    samples_N: Tensor
    """int64: samples inside the recording, 1 to `size`."""
    size: int
    """Samples of one whole chunk, V."""

    def select(self, index_M: Tensor) -> "Chunks":
        """The chunks at `index_M`."""
        return Chunks(self.offset_N.index_select(0, index_M), self.samples_N.index_select(0, index_M), self.size)


def locate_patches(offset_N: Tensor, extent_N3: Tensor, grid_N3: Tensor, token_N: Tensor, frames: int, side: int, channels: int) -> Patches:
    """The patches with numbers `token_N` in (t, h, w) order, of pictures that start at byte `offset_N` of the tape."""
    height, width = extent_N3[:, 1].long(), extent_N3[:, 2].long()
    across, down = grid_N3[:, 2].long(), grid_N3[:, 1].long()
    column = token_N % across
    row = torch.div(token_N, across, rounding_mode="floor") % down
    tube = torch.div(token_N, across * down, rounding_mode="floor")
    row_pitch = width * channels
    frame_pitch = height * row_pitch
    first = offset_N + tube * frames * frame_pitch + row * side * row_pitch + column * (side * channels)
    return Patches(
        first,
        row_pitch,
        frame_pitch,
        (height - row * side).clamp(max=side),
        (width - column * side).clamp(max=side),
        frames,
        side,
        channels,
    )


def locate_chunks(offset_N: Tensor, extent_N3: Tensor, token_N: Tensor, size: int) -> Chunks:
    """The chunks with numbers `token_N`, of recordings that start at byte `offset_N` of the tape."""
    return Chunks(offset_N + 4 * size * token_N, (extent_N3[:, 2].long() - size * token_N).clamp(max=size), size)


def patch_inside(patches: Patches) -> Tensor | None:
    """bool `[N, V]`: which values lie inside the picture; None where all do."""
    side = patches.side
    if not bool(((patches.rows_N < side) | (patches.columns_N < side)).any()):
        return None
    step = torch.arange(side, device=patches.offset_N.device)
    down = step < patches.rows_N[:, None]
    across = step < patches.columns_N[:, None]
    inside = (down[:, None, :, None, None] & across[:, None, None, :, None]).expand(-1, patches.frames, side, side, patches.channels)
    return inside.flatten(1)


def patch_bytes(tape: Tensor, patches: Patches) -> Tensor:
    """uint8 `[N, V]`: the bytes where each patch lies; those that `patch_inside` denies are others' or anything."""
    device = patches.offset_N.device
    frame, row = (torch.arange(n, device=device) for n in (patches.frames, patches.side))
    # A run below the picture may lie past the tape: read the first row instead, it is masked anyway.
    row_N1Y = torch.where(row < patches.rows_N[:, None], row, 0)[:, None, :]
    start_NFY = (
        patches.offset_N[:, None, None]
        + frame[None, :, None] * patches.frame_pitch_N[:, None, None]
        + row_N1Y * patches.row_pitch_N[:, None, None]
    )
    return _runs(tape, start_NFY.reshape(-1), patches.side * patches.channels).view(-1, patches.values)


def chunk_inside(chunks: Chunks) -> Tensor | None:
    """bool `[N, V]`: which samples exist; None where all do."""
    if not bool((chunks.samples_N < chunks.size).any()):
        return None
    return torch.arange(chunks.size, device=chunks.samples_N.device) < chunks.samples_N[:, None]


def chunk_samples(tape: Tensor, chunks: Chunks) -> Tensor:
    """float32 `[N, V]`: the samples of each chunk, zeros past the recording's end."""
    words = tape[: tape.numel() // 4 * 4].view(torch.float32)
    samples = _runs(words, torch.div(chunks.offset_N, 4, rounding_mode="floor"), chunks.size)
    inside = chunk_inside(chunks)
    # What lies past the end may be no number at all, so it is replaced and not multiplied away.
    return samples if inside is None else torch.where(inside, samples, 0.0)


def _runs(flat: Tensor, start_M: Tensor, width: int) -> Tensor:
    """`[M, width]`: the `width` consecutive values from each start on, zeros past the end of `flat`."""
    if start_M.numel() == 0:
        return flat.new_zeros((0, width))
    past = int(start_M.max()) + width - flat.numel()
    if past > 0:
        flat = torch.nn.functional.pad(flat, (0, past))
    windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, start_M)
