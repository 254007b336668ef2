"""A packed batch as the ops read it, against loops over its fields."""

from typing import Any

import numpy as np
import torch

from treadle.model.layout import BatchLayout
from treadle.shape import Modality


def test_every_position_is_what_its_segment_says(handmade: Any) -> None:
    batch = handmade.batch(handmade.mixed())
    layout = BatchLayout.from_batch(batch, "cpu")
    kinds: list[int] = []
    at = 0
    for row, column in np.argwhere(batch.position_segment >= 0):
        s = int(batch.position_segment[row, column])
        token = int(column) - int(batch.start[s]) - 1
        _, down, across = batch.grid[s].tolist()
        if token < 0:
            kind, coord = 0, (0, 0, 0)
        elif token == int(batch.grid[s].prod()):
            kind, coord = 5, (token, 0, 0)
        else:
            kind, coord = 1 + int(batch.modality[s]), (token // (down * across), token // across % down, token % across)
        assert int(layout.segment_P[at]) == s
        kinds.append(kind)
        assert tuple(layout.coord_P3[at].tolist()) == coord
        assert (token < 0) == (int(layout.start_S[s]) == at)
        at += 1
    assert layout.num_positions == at == batch.positions
    for kind, positions in enumerate(layout.positions):
        assert positions.tolist() == [p for p in range(at) if kinds[p] == kind]


def test_columns(handmade: Any) -> None:
    segments = handmade.mixed()
    batch = handmade.batch(segments)
    layout = BatchLayout.from_batch(batch, "cpu")
    assert layout.num_segments == layout.num_items == len(segments)
    assert layout.modality_S.tolist() == [int(s.modality) for s in segments]
    assert layout.length_S.tolist() == batch.length[: len(segments)].tolist()
    # One prefix each, one mask for the item that makes a choice.
    assert layout.tokens_S.tolist() == [n - 1 - bool(s.choices) for n, s in zip(layout.length_S.tolist(), segments, strict=True)]
    assert [i % 2**64 for i in layout.id_S.tolist()] == [s.id for s in segments]
    assert layout.choice_offsets_S1.tolist() == [0] * 8 + [2] * 5
    assert layout.choice_bytes.tolist() == list(b"yn")
    assert layout.choice_targets.tolist() == [0.25, 0.75]
    for s, segment in enumerate(segments):
        begin = int(layout.tape_offsets_S1[s])
        data = segment.payload.reshape(-1).view(np.uint8)
        assert np.array_equal(layout.tape[begin : begin + len(data)].numpy(), data)
    for edges in (layout.attract, layout.repel, layout.ignore):
        assert edges.offsets_S1.tolist() == [0] * (len(segments) + 1)
        assert edges.ids.numel() == edges.weights.numel() == 0


def test_edges(handmade: Any) -> None:
    batch = handmade.batch([handmade.text(b"ab"), handmade.text(b"cd"), handmade.text(b"ef")])
    batch.array("attract_offsets")[:] = 3
    batch.array("attract_offsets")[:4] = [0, 2, 2, 3]
    batch.array("attract_ids")[:3] = [1, 2, 0]
    batch.array("attract_weights")[:3] = [1.0, 0.0, 0.5]
    layout = BatchLayout.from_batch(batch, "cpu")
    assert layout.attract.offsets_S1.tolist() == [0, 2, 2, 3]
    assert layout.attract.ids.tolist() == [1, 2, 0]
    assert layout.attract.weights.tolist() == [1.0, 0.0, 0.5]


def test_defaulted_ids_tell_ranks_and_micro_batches_apart(handmade: Any) -> None:
    defaulted = handmade.batch([handmade.text(b"ab"), handmade.text(b"cd")])
    given = handmade.batch([handmade.text(b"ab", id=5), handmade.text(b"cd", id=2**63)])
    shift = (3 << 40) + (2 << 32)
    assert BatchLayout.from_batch(defaulted, "cpu", rank=3, micro_batch=2).id_S.tolist() == [shift, shift + 1]
    assert BatchLayout.from_batch(given, "cpu", rank=3, micro_batch=2).id_S.tolist() == [5, -(2**63)]


def test_the_tape_is_not_copied_on_the_cpu(handmade: Any) -> None:
    batch = handmade.batch(handmade.mixed())
    assert BatchLayout.from_batch(batch, "cpu").tape.data_ptr() == batch.tape.ctypes.data


def test_no_items(handmade: Any) -> None:
    layout = BatchLayout.empty(handmade.shape, "cpu")
    assert (layout.num_segments, layout.num_positions, layout.num_items) == (0, 0, 0)
    assert layout.coord_P3.shape == (0, 3)
    assert layout.choice_offsets_S1.tolist() == [0]


def test_token_of(handmade: Any) -> None:
    layout = BatchLayout.from_batch(handmade.batch(handmade.mixed()), "cpu")
    segment, token = layout.token_of(layout.positions[Modality.AUDIO + 1])
    # 101, 7 and 1 samples in chunks of 7
    assert segment.tolist() == [3] * 15 + [9, 10]
    assert token.tolist() == [*range(15), 0, 0]
    assert token.dtype == torch.int64
