"""Packed batches written by hand, so that what reads them is tested without the packer or a codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.pipeline.batch import PackedBatch
from treadle.shape import AudioShape, BatchShape, ImageShape, Modality, VideoShape


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment to place: its payload as decoded, its row, its id."""

    modality: Modality
    payload: NDArray[Any]
    row: int = 0
    id: int | None = None
    choices: bytes = b""
    targets: tuple[float, ...] = ()
    group: int = 0
    temperature_group: int = 0
    side: int = 0


class Handmade:
    """Writes batches out of payloads, field by field from the definitions of the contract."""

    shape = BatchShape(
        max_rows_per_device=6,
        max_segments_per_device=40,
        max_columns_per_row=96,
        max_choices_per_item=4,
        image=ImageShape(patch_side=5, channels=3),
        video=VideoShape(patch_side=4, channels=1),
        audio=AudioShape(chunk_samples=7),
    )
    """Every modality, small and odd: 5 px RGB patches, tubes of 2 frames of 4 px luma, chunks of 7 samples."""

    @staticmethod
    def text(content: bytes, **given: Any) -> Segment:
        return Segment(modality=Modality.TEXT, payload=np.frombuffer(content, np.uint8), **given)

    @staticmethod
    def image(pixels: NDArray[np.uint8], **given: Any) -> Segment:
        return Segment(modality=Modality.IMAGE, payload=pixels, **given)

    @staticmethod
    def video(pixels: NDArray[np.uint8], **given: Any) -> Segment:
        return Segment(modality=Modality.VIDEO, payload=pixels, **given)

    @staticmethod
    def audio(samples: NDArray[Any], **given: Any) -> Segment:
        return Segment(modality=Modality.AUDIO, payload=samples.astype(np.float32), **given)

    def mixed(self) -> list[Segment]:
        """Texts, pictures, clips and recordings whose sizes are no multiples of anything; one text makes a choice."""
        rng = np.random.default_rng(7)

        def pixels(*size: int) -> NDArray[np.uint8]:
            return rng.integers(0, 256, size, dtype=np.uint8)

        return [
            self.text(b"a small text of no particular length", row=0, id=11),
            self.image(pixels(13, 8, 3), row=1, id=12),
            self.video(pixels(6, 9, 5, 1), row=2, id=13),
            self.audio(rng.standard_normal(101), row=3, id=14),
            self.text(b"x", row=0, id=15),
            self.image(pixels(1, 1, 3), row=0, id=16),
            self.image(pixels(10, 20, 3), row=1, id=17),
            self.text(b"choose: yes or no?", row=1, id=18, choices=b"yn", targets=(0.25, 0.75)),
            self.video(pixels(2, 4, 4, 1), row=3, id=2**63 + 19),
            self.audio(rng.standard_normal(7), row=4, id=20),
            self.audio(rng.standard_normal(1), row=4, id=21),
            self.text(bytes(range(80)), row=5, id=22),
        ]

    @staticmethod
    def form(shape: BatchShape, segment: Segment) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and extent of a payload."""
        size = segment.payload.shape
        if segment.modality is Modality.TEXT:
            return (size[0], 1, 1), (1, 1, size[0])
        if segment.modality is Modality.AUDIO:
            return (-(-size[0] // shape.audio.chunk_samples), 1, 1), (1, 1, size[0])
        if segment.modality is Modality.IMAGE:
            side = shape.image.patch_side
            return (1, -(-size[0] // side), -(-size[1] // side)), (1, size[0], size[1])
        side = shape.video.patch_side
        return (size[0] // shape.video.tube_frames, -(-size[1] // side), -(-size[2] // side)), (size[0], size[1], size[2])

    def batch(self, segments: Sequence[Segment], shape: BatchShape | None = None) -> PackedBatch:
        """A packed batch of `segments` in order, each at the end of its row, each its own bag."""
        batch = PackedBatch(shape or self.shape)
        shape = batch.shape
        taken = [0] * shape.max_rows_per_device
        at = tokens = choices = 0
        for s, segment in enumerate(segments):
            grid, extent = self.form(shape, segment)
            count = int(np.prod(grid))
            length = 1 + count + bool(segment.choices)
            first, past = taken[segment.row], taken[segment.row] + length
            assert past <= shape.max_columns_per_row
            taken[segment.row] = past
            batch.modality[s], batch.grid[s], batch.extent[s] = segment.modality, grid, extent
            batch.row[s], batch.start[s], batch.length[s] = segment.row, first, length
            batch.position_segment[segment.row, first:past] = s
            batch.item[s] = batch.bag[s] = s
            batch.id[s] = s if segment.id is None else segment.id
            batch.group[s], batch.temperature_group[s], batch.side[s] = segment.group, segment.temperature_group, segment.side
            data = np.ascontiguousarray(segment.payload).reshape(-1).view(np.uint8)
            batch.tape_offsets[s] = at
            batch.tape[at : at + len(data)] = data
            at += -(-len(data) // 16) * 16
            offered = slice(choices, choices + len(segment.choices))
            batch.array("choice_offsets")[s] = choices
            batch.array("choice_data")[offered] = np.frombuffer(segment.choices, np.uint8)
            batch.array("choice_target_data")[offered] = segment.targets
            choices += len(segment.choices)
            tokens += count
        used = len(segments)
        batch.tape_offsets[used:] = at
        batch.array("choice_offsets")[used:] = choices
        defaulted = int(all(segment.id is None for segment in segments))
        # segments, bags, tokens, truncated, dropped, dropped edges, items, ids defaulted, tape bytes, positions
        batch.array("counts")[:10] = [used, used, tokens, 0, 0, 0, used, defaulted, at, sum(taken)]
        return batch


@pytest.fixture
def handmade() -> Handmade:
    return Handmade()
