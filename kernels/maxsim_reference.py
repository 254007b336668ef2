"""MaxSim in plain torch: tiles of queries x documents, recomputed backwards, so that no similarity of two tokens outlives its tile.

Documents of like length share a tile, padded to its longest. Backwards a tile's winners become a matrix of coefficients, so that both
gradients are products in a fixed order.

On ties the lowest token wins. A product may give equal columns other last bits, so a tie is what lies within its rounding, `TIE_ULPS`.

Shape suffixes: T query tokens, K document tokens, W width, Q queries, N documents; B query tokens of a slab, C documents of a tile,
L tokens of its longest, X places of a tile in all (C * L).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TIE_ULPS = 4
SLAB_TOKENS = 256
TILE_ELEMENTS = 2**20


class _Tile(NamedTuple):
    document_C: Tensor
    token_CL: Tensor
    """Document tokens, the document's first where it is shorter."""
    padding_CL: Tensor


def _document_tiles(offsets_N1: Tensor) -> list[_Tile]:
    length_N = torch.diff(offsets_N1)
    order = torch.sort(length_N, stable=True).indices
    lengths = length_N[order].tolist()
    tiles: list[_Tile] = []
    first = sum(1 for length in lengths if not length)
    while first < len(lengths):
        end = first + 1
        while end < len(lengths) and lengths[end] * (end + 1 - first) * SLAB_TOKENS <= TILE_ELEMENTS:
            end += 1
        document_C = order[first:end]
        place_L = torch.arange(lengths[end - 1], device=order.device)
        padding_CL = place_L >= length_N[document_C, None]
        token_CL = offsets_N1[document_C, None] + place_L.where(~padding_CL, torch.zeros_like(place_L))
        tiles.append(_Tile(document_C, token_CL, padding_CL))
        first = end
    return tiles


def _query_slabs(offsets_Q1: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, their tokens, and the query (counted from the slab's first) of every token; a query is never cut."""
    offsets: list[int] = offsets_Q1.tolist()
    first = 0
    while first < len(offsets) - 1:
        end = first + 1
        while end < len(offsets) - 1 and offsets[end + 1] - offsets[first] <= SLAB_TOKENS:
            end += 1
        counts = torch.diff(offsets_Q1[first : end + 1])
        query_B = torch.repeat_interleave(torch.arange(end - first, device=counts.device), counts)
        if len(query_B):
            yield slice(first, end), slice(offsets[first], offsets[end]), query_B
        first = end


def _similarities(u_BW: Tensor, v_KW: Tensor, tile: _Tile) -> tuple[Tensor, Tensor]:
    """The tile's tokens [C * L, W], and their similarities [B, C, L], minus infinity at padding."""
    v_XW = v_KW[tile.token_CL.reshape(-1)]
    similarity_BCL = (u_BW @ v_XW.T).view(len(u_BW), *tile.token_CL.shape)
    return v_XW, similarity_BCL.masked_fill_(tile.padding_CL, -torch.inf)


def _winners(u_BW: Tensor, v_XW: Tensor, similarity_BCL: Tensor) -> Tensor:
    """The lowest token [B, C] of each document whose similarity is the largest, as far as rounding tells."""
    length_C = torch.linalg.vector_norm(v_XW, dim=1).view(similarity_BCL.shape[1:]).amax(1)
    rounding_BC = TIE_ULPS * torch.finfo(u_BW.dtype).eps * torch.linalg.vector_norm(u_BW, dim=1)[:, None] * length_C
    reach_BC = similarity_BCL.amax(2) - rounding_BC
    winner_BC: Tensor = (similarity_BCL >= reach_BC[:, :, None]).to(torch.uint8).max(2).indices
    return winner_BC


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_TW: Tensor, v_KW: Tensor, query_offsets_Q1: Tensor, document_offsets_N1: Tensor) -> Tensor:
        ctx.save_for_backward(u_TW, v_KW, query_offsets_Q1, document_offsets_N1)
        u_TW, v_KW = u_TW.detach(), v_KW.detach()
        scores_QN = u_TW.new_zeros(len(query_offsets_Q1) - 1, len(document_offsets_N1) - 1)
        tiles = _document_tiles(document_offsets_N1)
        for queries, tokens, query_B in _query_slabs(query_offsets_Q1):
            for tile in tiles:
                largest_BC = _similarities(u_TW[tokens], v_KW, tile)[1].amax(2)
                sums = largest_BC.new_zeros(queries.stop - queries.start, len(tile.document_C)).index_add_(0, query_B, largest_BC)
                scores_QN[queries, tile.document_C] = sums
        return scores_QN

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        u_TW, v_KW, query_offsets_Q1, document_offsets_N1 = ctx.saved_tensors
        by_score_QN = grad_outputs[0].to(u_TW.dtype)
        by_u_TW, by_v_KW = torch.zeros_like(u_TW), torch.zeros_like(v_KW)
        tiles = _document_tiles(document_offsets_N1)
        for queries, tokens, query_B in _query_slabs(query_offsets_Q1):
            for tile in tiles:
                by_score_BC = by_score_QN[queries][:, tile.document_C][query_B]
                v_XW, similarity_BCL = _similarities(u_TW[tokens], v_KW, tile)
                winner_BC = _winners(u_TW[tokens], v_XW, similarity_BCL)
                coefficient_BCL = u_TW.new_zeros(*winner_BC.shape, tile.token_CL.shape[1])
                coefficient_BCL.scatter_(2, winner_BC[:, :, None], by_score_BC[:, :, None])
                coefficient_BX = coefficient_BCL.view(len(query_B), -1)
                by_u_TW[tokens] += coefficient_BX @ v_XW
                by_tile_XW = coefficient_BX.T @ u_TW[tokens]
                real_X = (~tile.padding_CL).reshape(-1).nonzero()[:, 0]
                # A tile holds a token once, so nothing is added twice in an order that could change.
                by_v_KW[tile.token_CL.reshape(-1)[real_X]] += by_tile_XW[real_X]
        return by_u_TW, by_v_KW, None, None


def maxsim_reference(u_TW: Tensor, v_KW: Tensor, query_offsets_Q1: Tensor, document_offsets_N1: Tensor) -> Tensor:
    """Scores `[Q, N]` of every query against every document; 0 where either has no token. In fp32, or float64 for float64 vectors."""
    dtype = torch.float64 if torch.float64 in (u_TW.dtype, v_KW.dtype) else torch.float32
    with torch.autocast(u_TW.device.type, enabled=False):
        return cast(Tensor, _MaxSim.apply(u_TW.to(dtype), v_KW.to(dtype), query_offsets_Q1, document_offsets_N1))
