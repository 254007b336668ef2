"""The tower against a plain reading of its definition in float64, and what it must not depend on."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.model.config import Masking
from treadle.model.corruption import Corruption, corrupt
from treadle.model.embedding import payload_values
from treadle.model.initial import keyed_normal, name_id
from treadle.model.layout import BatchLayout
from treadle.model.tower import Tower, inner_width
from treadle.pipeline.draws import philox
from treadle.shape import BatchShape, Modality


def layout_of(handmade: Any, segments: Any = None) -> BatchLayout:
    return BatchLayout.from_batch(handmade.batch(handmade.mixed() if segments is None else segments), "cpu")


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain


def turned(x: Tensor, coord: Tensor) -> Tensor:
    """Rotary as two-by-two rotations: pairs 0-15 by t, 16-23 by h, 24-31 by w."""
    angle = torch.empty(x.shape[0], 32, dtype=x.dtype)
    for i in range(16):
        angle[:, i] = coord[:, 0] * 10_000.0 ** (-i / 16)
    for i in range(8):
        angle[:, 16 + i] = coord[:, 1] * 100.0 ** (-i / 8)
        angle[:, 24 + i] = coord[:, 2] * 100.0 ** (-i / 8)
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


def embedded(tower: Tower, handmade: Any, segments: Any, hidden: dict[int, set[int]], shown: dict[int, dict[int, int]]) -> list[Tensor]:
    """The input of every segment, a position at a time."""
    p = dict(tower.embedding.named_parameters())
    shape = handmade.shape.resolved()
    inputs: list[Tensor] = []
    for s, segment in enumerate(segments):
        rows = [p["prefix"][segment.modality]]
        grid, _ = handmade.form(shape, segment)
        content = torch.from_numpy(segment.payload.copy()).double()
        if segment.modality is Modality.TEXT:
            rows += [p["byte"][shown.get(s, {}).get(i, int(byte))] for i, byte in enumerate(segment.payload)]
            rows += [p["byte"][256]] * bool(segment.choices)
        else:
            if segment.modality is Modality.AUDIO:
                chunk = shape.audio.chunk_samples
                values = torch.zeros(grid[0] * chunk, dtype=torch.float64)
                values[: len(content)] = content
                pieces = list(values.view(-1, chunk))
            else:
                image = segment.modality is Modality.IMAGE
                frames, side = (1, shape.image.patch_side) if image else (shape.video.tube_frames, shape.video.patch_side)
                clip = content[None] if image else content
                canvas = torch.zeros(clip.shape[0], grid[1] * side, grid[2] * side, clip.shape[3], dtype=torch.float64)
                canvas[:, : clip.shape[1], : clip.shape[2]] = 2 * clip / 255 - 1
                pieces = [
                    canvas[t * frames : (t + 1) * frames, h * side : (h + 1) * side, w * side : (w + 1) * side].reshape(-1)
                    for t in range(grid[0])
                    for h in range(grid[1])
                    for w in range(grid[2])
                ]
            name = str(segment.modality)
            rows += [p[f"{name}_mask"] if i in hidden.get(s, set()) else p[name] @ piece for i, piece in enumerate(pieces)]
        inputs.append(torch.stack(rows))
    return inputs


def states_of(tower: Tower, x: Tensor, coord: Tensor) -> Tensor:
    """One segment through the blocks and the final norm."""
    coord = coord.double()
    for block in tower.blocks:
        p = dict(block.named_parameters())
        q, k, v = (norm(x, p["norm1"]) @ p["qkv"].T).view(len(x), 3, -1, 64).unbind(1)
        q, k = turned(norm(q, p["q_gain"]), coord), turned(norm(k, p["k_gain"]), coord)
        weights = torch.softmax(torch.einsum("qhk,phk->hqp", q, k) / 8, -1)
        x = x + torch.einsum("hqp,phk->qhk", weights, v).flatten(1) @ p["out"].T
        gate, up = (norm(x, p["norm2"]) @ p["gate_up"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ p["down"].T
    return norm(x, tower.norm)


def hidden_by_segment(layout: BatchLayout, corruption: Corruption) -> tuple[dict[int, set[int]], dict[int, dict[int, int]]]:
    hidden: dict[int, set[int]] = {}
    for positions in (corruption.masked_image, corruption.masked_video, corruption.masked_audio):
        for s, t in zip(*(x.tolist() for x in layout.token_of(positions)), strict=True):
            hidden.setdefault(s, set()).add(t)
    shown: dict[int, dict[int, int]] = {}
    segment, token = layout.token_of(corruption.covered_T)
    for s, t, byte in zip(segment.tolist(), token.tolist(), corruption.shown_T.tolist(), strict=True):
        shown.setdefault(s, {})[t] = byte
    return hidden, shown


@pytest.mark.parametrize("corrupted", [False, True])
def test_forward_and_every_gradient_equal_the_definition(handmade: Any, corrupted: bool) -> None:
    segments = handmade.mixed()
    layout = layout_of(handmade)
    corruption = corrupt(layout, Masking(), 1, 1) if corrupted else None
    tower = Tower(2, 128, handmade.shape, 3).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if parameter.dim() == 1 and "mask" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    states = tower(layout, corruption)
    pooled = tower.pool(states, layout)
    hidden, shown = hidden_by_segment(layout, corruption) if corruption else ({}, {})
    expected = torch.empty_like(states)
    expected_pooled: list[Tensor] = []
    for s, x in enumerate(embedded(tower, handmade, segments, hidden, shown)):
        place = slice(int(layout.start_S[s]), int(layout.start_S[s] + layout.length_S[s]))
        segment_states = states_of(tower, x, layout.coord_P3[place])
        expected[place] = segment_states
        expected_pooled.append(segment_states[1 : 1 + int(layout.tokens_S[s])].mean(0))
    # The tower's turns are rounded to fp32: 2^-24 of each channel.
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled, torch.stack(expected_pooled), rtol=1e-5, atol=1e-5)
    along = torch.randn(states.shape, generator=generator, dtype=torch.float64)
    names, parameters = zip(*tower.named_parameters(), strict=True)
    got = torch.autograd.grad((states * along).sum() + pooled.square().sum(), parameters, retain_graph=True, materialize_grads=True)
    want = torch.autograd.grad((expected * along).sum() + torch.stack(expected_pooled).square().sum(), parameters, materialize_grads=True)
    for name, mine, other in zip(names, got, want, strict=True):
        largest = max(1.0, float(other.abs().max()))
        assert float((mine - other).abs().max()) < 1e-5 * largest, name


def test_a_segments_states_do_not_depend_on_the_rest_of_the_batch(handmade: Any) -> None:
    segments = handmade.mixed()
    tower = Tower(2, 128, handmade.shape, 0)
    layout = layout_of(handmade)
    with torch.no_grad():
        together = tower(layout)
        for s, segment in enumerate(segments):
            alone = tower(layout_of(handmade, [segment]))
            place = slice(int(layout.start_S[s]), int(layout.start_S[s] + layout.length_S[s]))
            # fp32 products of other sizes sum in another order: 128 products of order one, 2^-24 each.
            torch.testing.assert_close(alone, together[place], rtol=0, atol=1e-5)


def test_states_of_one_batch_repeat_bit_for_bit(handmade: Any) -> None:
    tower, layout = Tower(2, 128, handmade.shape, 0), layout_of(handmade)
    assert torch.equal(tower(layout), tower(layout))


def test_no_items_give_zero_gradients_to_every_parameter(handmade: Any) -> None:
    tower = Tower(1, 128, handmade.shape, 0)
    layout = BatchLayout.empty(handmade.shape, "cpu")
    states = tower(layout, corrupt(layout, Masking(), 0, 1))
    assert states.shape == (0, 128)
    (states.sum() + tower.pool(states, layout).sum()).backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


def test_a_batch_of_text_alone_gives_every_parameter_a_gradient(handmade: Any) -> None:
    tower = Tower(1, 128, handmade.shape, 0)
    tower(layout_of(handmade, [handmade.text(b"only text")])).sum().backward()
    assert [name for name, p in tower.named_parameters() if p.grad is None] == []


def test_checkpointing_changes_no_bit(handmade: Any) -> None:
    layout = layout_of(handmade)
    gradients: list[dict[str, Tensor]] = []
    for checkpoint in (False, True):
        tower = Tower(2, 128, handmade.shape, 0, checkpoint=checkpoint)
        tower(layout).square().sum().backward()
        gradients.append({name: p.grad for name, p in tower.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == set(dict(tower.named_parameters()))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_bf16_autocast_stays_near_fp32(handmade: Any) -> None:
    layout = layout_of(handmade)
    tower = Tower(2, 128, handmade.shape, 0)
    plain = tower(layout)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = tower(layout)
    assert rounded.dtype == torch.float32
    # States have mean square one; two blocks round their inputs and products to 8 bits a handful of times.
    assert float((rounded - plain).square().mean().sqrt().detach()) < 4 * 2**-8
    rounded.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in tower.parameters())


def test_initial_values_depend_on_seed_and_name_alone(handmade: Any) -> None:
    shape = handmade.shape
    first, again, other = Tower(2, 128, shape, 5), Tower(2, 128, shape, 5), Tower(2, 128, shape, 6)
    deeper = Tower(3, 128, shape, 5)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        if parameter.detach().std() > 0:
            assert not torch.equal(parameter, other.get_parameter(name)), name
    # Only the products onto the residual stream know of the depth, as a scale.
    assert torch.equal(first.get_parameter("blocks.1.qkv"), deeper.get_parameter("blocks.1.qkv"))
    torch.testing.assert_close(first.get_parameter("blocks.1.out") * math.sqrt(4), deeper.get_parameter("blocks.1.out") * math.sqrt(6))
    assert not torch.equal(first.get_parameter("blocks.0.qkv"), first.get_parameter("blocks.1.qkv"))
    text_alone = Tower(2, 128, BatchShape(max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=8), 5)
    assert torch.equal(first.get_parameter("embedding.byte"), text_alone.get_parameter("embedding.byte"))


def test_initial_deviations(handmade: Any) -> None:
    tower = Tower(4, 256, handmade.shape, 0)
    # A deviation from n values is off by 1 / sqrt(2 n) of itself; five times that for the smallest, 257 * 256 values.
    for name, deviation in {
        "embedding.byte": 0.5,
        "embedding.image": 1 / math.sqrt(payload_values(handmade.shape.resolved(), Modality.IMAGE)),
        "blocks.0.qkv": 1 / math.sqrt(256),
        "blocks.3.out": 1 / math.sqrt(256 * 8),
        "blocks.3.down": 1 / math.sqrt(inner_width(256) * 8),
    }.items():
        values = tower.get_parameter(name).detach()
        margin = 5 / math.sqrt(2 * values.numel())
        assert float(values.std()) == pytest.approx(deviation, rel=margin), name
        assert abs(float(values.mean())) < 5 * deviation / math.sqrt(values.numel()), name


def test_keyed_normal_equals_box_and_muller_of_the_streams_generator() -> None:
    seed = 2**40 + 3
    values = keyed_normal("some.name", 7, seed)
    identity = name_id("some.name")
    for n in range(7):
        block = philox((seed & 0xFFFFFFFF, seed >> 32), n // 4, identity & 0xFFFFFFFF, identity >> 32, 3)
        first, second = (int(w) for w in block[n % 4 // 2 * 2 : n % 4 // 2 * 2 + 2])
        radius = math.sqrt(-2 * math.log((first + 0.5) / 2**32))
        angle = 2 * math.pi * second / 2**32
        assert float(values[n]) == pytest.approx(radius * (math.sin if n % 2 else math.cos)(angle), rel=1e-12, abs=1e-12)


def test_parameter_names_are_fixed(handmade: Any) -> None:
    # They are the keys of checkpoints.
    media = [f"embedding.{m}{suffix}" for m in ("image", "video", "audio") for suffix in ("", "_mask")]
    block = ["norm1", "qkv", "q_gain", "k_gain", "out", "norm2", "gate_up", "down"]
    names = ["norm", "embedding.prefix", "embedding.byte", *media, *(f"blocks.0.{name}" for name in block)]
    tower = Tower(1, 128, handmade.shape, 0)
    assert list(dict(tower.named_parameters())) == names
    assert set(tower.state_dict()) == set(names)


def test_inner_width() -> None:
    # 8/3 of the width, up to a multiple of 128: 341.3, 682.7, 1024, 1365.3, 2730.7
    assert [inner_width(h) for h in (128, 256, 384, 512, 1024)] == [384, 768, 1024, 1408, 2816]


@pytest.mark.parametrize(
    ("depth", "hidden", "message"),
    [
        (0, 128, "Tower.depth is 0: it must lie between 1 and 1024"),
        (1, 192, "Tower.hidden is 192: it must be a multiple of 128"),
        (1, 64, "Tower.hidden is 64: it must lie between 128 and 65536"),
    ],
)
def test_refusals(handmade: Any, depth: int, hidden: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tower(depth, hidden, handmade.shape, 0)
