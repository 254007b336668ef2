"""Attention within segments, in plain torch: segments of like length are batched and attend together, so that no mask of rows
exists and no score between two segments is ever computed.

Segments are sorted by length and cut into groups. A group of one length needs no mask; where lengths are few and scattered,
neighbours share a group, padded to the longest under a key mask, as long as the padding costs less than another call would.

Legend: P positions, S segments, H heads, K head width, B segments of a group, L the longest of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CALL_US, MOVE_US, SCORE_US = 150.0, 0.6, 0.015
"""What padding trades, forward and backward on one core: a call; moving one head of a position in and out of a padded group; a score."""


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments that attend in one call; they lie back to back in the groups' order."""

    first: int
    """First position."""
    end: int
    """One past the last position."""
    count: int
    """Segments, B."""
    longest: int
    """Positions of the longest, L."""
    gather: Tensor | None
    """int64 `[B * L]`: the position, less `first`, that each padded place reads; None where all lengths are equal."""
    places: Tensor | None
    """int64 `[end - first]`: the padded place that holds each position."""
    key_mask: Tensor | None
    """bool `[B, 1, 1, L]`: which padded places are real."""


@dataclass(frozen=True, slots=True)
class SegmentGroups:
    """How a batch's segments attend on the reference path."""

    groups: tuple[SegmentGroup, ...]
    order_P: Tensor | None
    """Position at each place of the groups' order; None where the positions already lie in that order."""
    inverse_P: Tensor | None
    """Place of each position in the groups' order."""

    def in_order(self) -> "SegmentGroups":
        """These groups for positions that the caller has already put in their order."""
        return SegmentGroups(self.groups, None, None)


def segment_groups(start_S: Tensor, length_S: Tensor, num_positions: int, heads: int) -> SegmentGroups:
    """Groups the segments of a batch; empty segments belong to none, positions of no segment come last in the order.

    Reads the lengths on the host: call it once per batch, not once per layer.
    """
    device = start_S.device
    starts, lengths = start_S.cpu().numpy().astype(np.int64), length_S.cpu().numpy().astype(np.int64)
    longest_first = np.lexsort((starts, -lengths))
    longest_first = longest_first[: int((lengths > 0).sum())]
    starts, lengths = starts[longest_first], lengths[longest_first]
    firsts = np.concatenate([[0], np.cumsum(lengths)])
    covered = int(firsts[-1])
    groups = tuple(_group(lengths[a:b], int(firsts[a]), int(firsts[b]), device) for a, b in _cut(lengths, heads))
    order = np.arange(covered) + np.repeat(starts - firsts[:-1], lengths)
    if covered < num_positions:
        free = np.ones(num_positions, bool)
        free[order] = False
        order = np.concatenate([order, np.flatnonzero(free)])
    if np.array_equal(order, np.arange(num_positions)):
        return SegmentGroups(groups, None, None)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(num_positions)
    return SegmentGroups(groups, torch.from_numpy(order).to(device), torch.from_numpy(inverse).to(device))


def _cut(lengths: NDArray[np.int64], heads: int) -> list[tuple[int, int]]:
    """Runs of descending lengths that share a group: a length joins the longer ones before it where that costs less than a call."""
    distinct, counts = np.unique(-lengths, return_counts=True)
    cuts: list[tuple[int, int]] = []
    first = end = longest = 0
    for length, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        padding_us = count * heads * (MOVE_US * length + SCORE_US * (longest * longest - length * length))
        if end > first and padding_us > CALL_US:
            cuts.append((first, end))
            first = end
        if first == end:
            longest = length
        end += count
    if end > first:
        cuts.append((first, end))
    return cuts


def _group(lengths: NDArray[np.int64], first: int, end: int, device: torch.device) -> SegmentGroup:
    longest, count = int(lengths[0]), len(lengths)
    if int(lengths[-1]) == longest:
        return SegmentGroup(first, end, count, longest, None, None, None)
    local = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    column = np.arange(longest)
    gather = local[:, None] + np.minimum(column[None, :], lengths[:, None] - 1)
    real = column[None, :] < lengths[:, None]
    mask = torch.from_numpy(real).to(device)[:, None, None, :]
    return SegmentGroup(
        first,
        end,
        count,
        longest,
        torch.from_numpy(gather.reshape(-1)).to(device),
        torch.from_numpy(np.flatnonzero(real.reshape(-1))).to(device),
        mask,
    )


def segment_attention_reference(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, groups: SegmentGroups) -> Tensor:
    """Softmax attention of every position over the positions of its own segment, scores scaled by `K ** -0.5`; `[P, H, K]`.

    Positions of no segment answer zeros.
    """
    if groups.order_P is not None:
        q_PHK, k_PHK, v_PHK = (x.index_select(0, groups.order_P) for x in (q_PHK, k_PHK, v_PHK))
    if q_PHK.device.type == "cpu":
        out_PHK: Tensor = _GroupedAttention.apply(q_PHK, k_PHK, v_PHK, groups.groups)
    else:
        out_PHK = attend_by_autograd(q_PHK, k_PHK, v_PHK, groups.groups)
    return out_PHK if groups.inverse_P is None else out_PHK.index_select(0, groups.inverse_P)


def _padded(x_PHK: Tensor, group: SegmentGroup) -> Tensor:
    """A group's positions as `[B, H, L, K]`, a view where it can be."""
    count, longest = group.count, group.longest
    if group.gather is not None:
        x = x_PHK[group.first : group.end].index_select(0, group.gather)
        return x.view(count, longest, *x.shape[1:]).transpose(1, 2)
    # One call for slice, view and transposition: a layer makes hundreds of these.
    (heads, width), (step, by_head, by_channel) = x_PHK.shape[1:], x_PHK.stride()
    offset = x_PHK.storage_offset() + group.first * step
    return x_PHK.as_strided((count, heads, longest, width), (longest * step, by_head, step, by_channel), offset)


def _flat(x_BHLK: Tensor, group: SegmentGroup) -> Tensor:
    """The inverse of `_padded`: `[positions of the group, H, K]`."""
    x = x_BHLK.transpose(1, 2).flatten(0, 1)
    return x if group.places is None else x.index_select(0, group.places)


def attend_by_autograd(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, groups: tuple[SegmentGroup, ...]) -> Tensor:
    """The same for positions in the groups' order, on devices that lack the CPU's own pair of ops."""
    parts: list[Tensor] = []
    for group in groups:
        q, k, v = (_padded(x, group) for x in (q_PHK, k_PHK, v_PHK))
        parts.append(_flat(scaled_dot_product_attention(q, k, v, attn_mask=group.key_mask), group))
    end = groups[-1].end if groups else 0
    # The empty slices keep all three in the graph where no segment does.
    return torch.cat([*parts, torch.zeros_like(q_PHK[end:]), q_PHK[:0], k_PHK[:0], v_PHK[:0]])


class _GroupedAttention(torch.autograd.Function):
    """Groups one after another into one output. Autograd alone would add a gradient of the whole batch per group."""

    @staticmethod
    def forward(ctx: Any, q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, groups: tuple[SegmentGroup, ...]) -> Tensor:
        out_PHK = _uncovered_zero(q_PHK, groups)
        logsumexps: list[Tensor] = []
        for group in groups:
            q, k, v = (_padded(x, group) for x in (q_PHK, k_PHK, v_PHK))
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, attn_mask=_additive(group.key_mask, q)
            )
            out_PHK[group.first : group.end] = _flat(out, group)
            logsumexps.append(logsumexp)
        ctx.save_for_backward(q_PHK, k_PHK, v_PHK, out_PHK, *logsumexps)
        ctx.groups = groups
        return out_PHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dout_PHK,) = gradients
        q_PHK, k_PHK, v_PHK, out_PHK, *logsumexps = ctx.saved_tensors
        groups: tuple[SegmentGroup, ...] = ctx.groups
        slopes = tuple(_uncovered_zero(q_PHK, groups) for _ in range(3))
        # torch's backward in bf16 takes three to ten times as long as in fp32 (CPU, 17 to 257 positions). Types change in one pass over all
        # positions: in each group's own, they took as long as the kernel.
        work = torch.float32 if q_PHK.dtype in (torch.bfloat16, torch.float16) else q_PHK.dtype
        inputs = tuple(x.to(work) for x in (dout_PHK, q_PHK, k_PHK, v_PHK, out_PHK))
        for group, logsumexp in zip(groups, logsumexps, strict=True):
            dout, q, k, v, out = (_padded(x, group) for x in inputs)
            if group.key_mask is not None:
                # Padded queries repeat a real one: their gradient must not count again.
                dout = dout * group.key_mask.transpose(2, 3)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, logsumexp, 0.0, False, attn_mask=_additive(group.key_mask, q)
            )
            for slope, part in zip(slopes, parts, strict=True):
                slope[group.first : group.end] = _flat(part, group)
        return *slopes, None


def _uncovered_zero(like_PHK: Tensor, groups: tuple[SegmentGroup, ...]) -> Tensor:
    """A buffer whose places past the last group are zero."""
    buffer = torch.empty_like(like_PHK, memory_format=torch.contiguous_format)
    buffer[groups[-1].end if groups else 0 :] = 0
    return buffer


def _additive(key_mask: Tensor | None, q_BHLK: Tensor) -> Tensor | None:
    if key_mask is None:
        return None
    return torch.zeros(key_mask.shape, dtype=q_BHLK.dtype).masked_fill_(~key_mask, -torch.inf)
