"""The tower: one transformer over bytes, patches, tubes and chunks, each segment attending to itself alone.

A block is `x += attention(norm(x)); x += swiglu(norm(x))`, RMSNorm before each half and after the last block, no biases. The 32 channel
pairs of a head turn by the position's coordinates, alike in every modality: pairs 0-15 by t at frequencies `10000 ** (-i / 16)`, pairs
16-23 by h and 24-31 by w at `100 ** (-i / 8)`. Coordinates restart in each segment, so a segment's states do not depend on where it lies.

Suffixes: P positions, S segments, D hidden, H heads, K head width, A channel pairs, F inner width, C columns of a row.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint as checkpointed

from treadle.kernels.dispatch import choose, compute_dtype
from treadle.kernels.mean_pool import mean_pool
from treadle.kernels.rms_norm import rms_norm
from treadle.kernels.rotary import rotary
from treadle.kernels.segment_attention import segment_attention, segment_spans
from treadle.kernels.segment_attention_reference import SegmentGroups, segment_groups
from treadle.kernels.swiglu import swiglu
from treadle.model.config import HEAD_WIDTH
from treadle.model.corruption import Corruption
from treadle.model.embedding import Embedding, permute_rows
from treadle.model.initial import draw_parameter_
from treadle.model.layout import BatchLayout
from treadle.shape import BatchShape, require_count, require_member

TIME_PAIRS, HEIGHT_PAIRS, WIDTH_PAIRS = 16, 8, 8
TIME_BASE, PLACE_BASE = 10_000.0, 100.0

INNER_MULTIPLE = 128


def inner_width(hidden: int) -> int:
    """Width between SwiGLU's products: 8/3 of `hidden` up to a multiple of 128, so that a block weighs what 4 x with two products would."""
    return -(-8 * hidden // (3 * INNER_MULTIPLE)) * INNER_MULTIPLE


class Block(nn.Module):
    """One pre-norm block. Parameters: `norm1 [D]`, `qkv [3 D, D]`, `q_gain [K]`, `k_gain [K]`, `out [D, D]`, `norm2 [D]`, `gate_up [2 F, D]`,
    `down [D, F]`; `qkv` and `gate_up` hold their products one after the other."""

    def __init__(self, hidden: int, depth: int, seed: int, name: str) -> None:
        super().__init__()
        inner = inner_width(hidden)
        self._heads = hidden // HEAD_WIDTH
        self.norm1 = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.q_gain = nn.Parameter(torch.ones(HEAD_WIDTH))
        self.k_gain = nn.Parameter(torch.ones(HEAD_WIDTH))
        self.out = nn.Parameter(torch.empty(hidden, hidden))
        self.norm2 = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(hidden, inner))
        # Products onto the residual stream start smaller, so that its variance does not grow with depth.
        for key, shrink in (("qkv", 1.0), ("out", 2.0 * depth), ("gate_up", 1.0), ("down", 2.0 * depth)):
            weight = self.get_parameter(key)
            draw_parameter_(weight, f"{name}.{key}", seed, 1 / math.sqrt(weight.shape[1] * shrink))

    def forward(
        self,
        x_PD: Tensor,
        change_PD: Tensor | None,
        start_S: Tensor,
        length_S: Tensor,
        turn_PA: Tensor,
        groups: SegmentGroups | None,
        spans_2P: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before the block's last addition, and what is to be added: the next norm does it in one pass.

        Args:
            x_PD: the residual stream, fp32 or wider.
            change_PD: what the block before left to add.
        """
        compute = compute_dtype(x_PD)
        y_PD, x_PD = _add_norm(x_PD, change_PD, self.norm1, compute)
        qkv_P3HK = linear(y_PD, self.qkv).view(-1, 3, self._heads, HEAD_WIDTH)
        q_PHK, k_PHK, v_PHK = rotary(qkv_P3HK, self.q_gain, self.k_gain, turn_PA)
        mixed_PHK = segment_attention(q_PHK, k_PHK, v_PHK, start_S, length_S, groups=groups, spans_2P=spans_2P)
        y_PD, x_PD = _add_norm(x_PD, linear(mixed_PHK.flatten(1), self.out), self.norm2, compute)
        return x_PD, linear(swiglu(linear(y_PD, self.gate_up)), self.down)


def _add_norm(x_PD: Tensor, change_PD: Tensor | None, gain_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if change_PD is None:
        return rms_norm(x_PD, gain_D, out_dtype=dtype)
    return rms_norm(change_PD, gain_D, x_PD, out_dtype=dtype)


class Tower(nn.Module):
    """The transformer. Parameter names: `embedding.*`, `blocks.<i>.*`, `norm`; initial values are drawn under `<name>.` and these.

    Args:
        shape: decides which modalities have an embedding.
        checkpoint: recompute each block in the backward pass: memory of one block instead of all, a third more work.
        name: what the parameters' checkpoint keys begin with.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(self, depth: int, hidden: int, shape: BatchShape, seed: int, *, checkpoint: bool = False, name: str = "tower") -> None:
        super().__init__()
        depth = require_count("Tower", "depth", depth, 1, 1024)
        hidden = require_count("Tower", "hidden", hidden, 128, 2**16)
        if hidden % 128:
            raise ValueError(f"Tower.hidden is {hidden}: it must be a multiple of 128")
        seed = require_count("Tower", "seed", seed, 0, 2**64 - 1)
        for what, value, kind in (("shape", shape, BatchShape), ("checkpoint", checkpoint, bool), ("name", name, str)):
            require_member("Tower", what, value, kind)
        shape = shape.resolved()
        self.hidden = hidden
        self.checkpoint = checkpoint
        self.embedding = Embedding(hidden, shape, seed, f"{name}.embedding")
        self.blocks = nn.ModuleList(Block(hidden, depth, seed, f"{name}.blocks.{i}") for i in range(depth))
        self.norm = nn.Parameter(torch.ones(hidden))
        turn_CA = _turns(shape.max_columns_per_row)
        self.register_buffer("cosine_CA", turn_CA.real.float(), persistent=False)
        self.register_buffer("sine_CA", turn_CA.imag.float(), persistent=False)

    def forward(self, layout: BatchLayout, corruption: Corruption | None = None) -> Tensor:
        """States after the final norm, `[P, D]` in fp32 or wider, positions in the layout's order."""
        start_S, length_S = layout.start_S, layout.length_S
        if choose("segment_attention", "auto", length_S.device, compute_dtype(self.norm)) == "triton":
            # The kernels skip other segments' blocks themselves; sorting segments would read the device.
            spans_2P = segment_spans(start_S, length_S, layout.num_positions)
            return self.run(self.embedding(layout, corruption, None), start_S, length_S, self.turn(layout.coord_P3), None, spans_2P)
        groups = segment_groups(start_S, length_S, layout.num_positions, self.hidden // HEAD_WIDTH)
        order_P, inverse_P = groups.order_P, groups.inverse_P
        start_S = start_S if inverse_P is None else _moved(start_S, inverse_P)
        turn_PA = self.turn(layout.coord_P3 if order_P is None else layout.coord_P3.index_select(0, order_P))
        x_PD = self.embedding(layout, corruption, order_P)
        states_PD = self.run(x_PD, start_S, length_S, turn_PA, groups.in_order(), None)
        return states_PD if inverse_P is None else permute_rows(states_PD, inverse_P)

    def run(
        self, x_PD: Tensor, start_S: Tensor, length_S: Tensor, turn_PA: Tensor, groups: SegmentGroups | None, spans_2P: Tensor | None
    ) -> Tensor:
        """The blocks and the final norm, `[P, D]`, positions in the order given.

        Args:
            x_PD: what the embedding answers.
            groups, spans_2P: as `segment_attention` takes them.
        """
        change_PD: Tensor | None = None
        for block in self.blocks:
            arguments = (x_PD, change_PD, start_S, length_S, turn_PA, groups, spans_2P)
            if self.checkpoint and torch.is_grad_enabled():
                x_PD, change_PD = checkpointed(block, *arguments, use_reentrant=False)
            else:
                x_PD, change_PD = block(*arguments)
        states_PD, _ = _add_norm(x_PD, change_PD, self.norm, x_PD.dtype)
        return states_PD

    def pool(self, states_PD: Tensor, layout: BatchLayout) -> Tensor:
        """The mean of each segment's states past its prefix and before its mask, `[S, D]` in fp32 or wider."""
        return mean_pool(states_PD, layout.start_S, layout.tokens_S)

    def turn(self, coord_P3: Tensor) -> Tensor:
        """`e^{i angle}` of each channel pair at each position, `[P, A]`."""
        turn_CA = torch.complex(cast(Tensor, self.cosine_CA), cast(Tensor, self.sine_CA))
        parts = torch.split(turn_CA, [TIME_PAIRS, HEIGHT_PAIRS, WIDTH_PAIRS], dim=1)
        return torch.cat([part.index_select(0, coord_P) for part, coord_P in zip(parts, coord_P3.unbind(1), strict=True)], dim=1)


def _moved(start_S: Tensor, place_P: Tensor) -> Tensor:
    """Where each segment starts once positions have moved to `place`; a segment's positions stay together."""
    return place_P.index_select(0, start_S) if start_S.numel() else start_S


def _turns(columns: int) -> Tensor:
    """`e^{i angle}` of every coordinate below `columns` for each channel pair, complex128 `[C, A]`."""
    time = TIME_BASE ** (-torch.arange(TIME_PAIRS, dtype=torch.float64) / TIME_PAIRS)
    height = PLACE_BASE ** (-torch.arange(HEIGHT_PAIRS, dtype=torch.float64) / HEIGHT_PAIRS)
    width = PLACE_BASE ** (-torch.arange(WIDTH_PAIRS, dtype=torch.float64) / WIDTH_PAIRS)
    angle_CA = torch.arange(columns, dtype=torch.float64)[:, None] * torch.cat([time, height, width])
    return torch.polar(torch.ones_like(angle_CA), angle_CA)
