"""MaxSim: the late-interaction score of every query against every document.

One product of `2 T K W` operations forwards, whose result never leaves its tile, so it bounds the op. Backwards the reference makes it again
beside two products of the same size; the Triton version keeps a winner of 2 bytes for each of `T N` pairs and gathers.

Suffixes: T query tokens, K document tokens, W width, Q queries, N documents.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.kernels.dispatch import Impl, choose, register
from treadle.kernels.maxsim_reference import maxsim_reference

register("maxsim")


def maxsim(
    u_TW: Tensor,
    v_KW: Tensor,
    query_offsets_Q1: Tensor,
    document_offsets_N1: Tensor,
    *,
    product_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`score(q, d) = sum_{i in q} max_{j in d} <u_i, v_j>`; on ties the lowest j takes the gradient.

    Args:
        u_TW: token vectors of the queries, one query after the other; rows past the last query's count for nothing.
        v_KW: token vectors of the documents, likewise.
        query_offsets_Q1: int64; query `q` holds tokens `query_offsets_Q1[q]` up to `query_offsets_Q1[q + 1]`.
        document_offsets_N1: int64, likewise.
        product_dtype: what Triton multiplies in, fp32 or bf16; None takes the vectors' type. Sums are fp32; the reference multiplies in fp32
            or wider.

    Returns:
        `[Q, N]`, fp32 or wider; 0 where the query or the document has no token.
    """
    if choose("maxsim", impl, u_TW.device, u_TW.dtype, v_KW.dtype) == "reference":
        return maxsim_reference(u_TW, v_KW, query_offsets_Q1, document_offsets_N1)
    if product_dtype is None:
        product_dtype = torch.bfloat16 if u_TW.dtype == v_KW.dtype == torch.bfloat16 else torch.float32
    with torch.autocast(u_TW.device.type, enabled=False):
        return cast(Tensor, _TritonMaxSim.apply(u_TW, v_KW, query_offsets_Q1, document_offsets_N1, product_dtype))


class _TritonMaxSim(torch.autograd.Function):
    """Keeps the vectors as multiplied, and the winners."""

    @staticmethod
    def forward(ctx: Any, u_TW: Tensor, v_KW: Tensor, query_offsets_Q1: Tensor, document_offsets_N1: Tensor, dtype: torch.dtype) -> Tensor:
        from treadle.kernels.maxsim_kernels import MAXSIM_FWD

        ctx.dtypes = (u_TW.dtype, v_KW.dtype)
        u_TW, v_KW = (x.detach().to(dtype).contiguous() for x in (u_TW, v_KW))
        queries_Q1, documents_N1 = query_offsets_Q1.int(), document_offsets_N1.int()
        device, width = u_TW.device, u_TW.shape[1]
        num_queries, num_documents = len(queries_Q1) - 1, len(documents_N1) - 1
        score_QN = torch.empty((num_queries, num_documents), dtype=torch.float32, device=device)
        narrow = torch.int16 if len(v_KW) <= torch.iinfo(torch.int16).max else torch.int32
        winner_NT = torch.zeros((num_documents, len(u_TW)), dtype=narrow, device=device)
        MAXSIM_FWD.launch(
            device,
            lambda b: (num_queries, -(-num_documents // b["BLOCK_D"])),
            *(u_TW, v_KW, queries_Q1, documents_N1, score_QN, winner_NT, num_documents, len(u_TW), width),
            wide=dtype == torch.float32,
            BLOCK_W=_block(width),
        )
        ctx.save_for_backward(u_TW, v_KW, queries_Q1, documents_N1, winner_NT)
        return score_QN

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        from treadle.kernels.maxsim_kernels import MAXSIM_DU, MAXSIM_DV

        u_TW, v_KW, queries_Q1, documents_N1, winner_NT = ctx.saved_tensors
        by_score_QN = grad_outputs[0].float().contiguous()
        device, width = u_TW.device, u_TW.shape[1]
        (num_documents, tokens), places = winner_NT.shape, len(v_KW)
        if not (tokens and places and num_documents and len(queries_Q1) > 1):
            empty = (torch.zeros((n, width), dtype=t, device=device) for n, t in zip((tokens, places), ctx.dtypes, strict=True))
            return (*empty, None, None, None)
        du_TW = torch.empty((tokens, width), dtype=torch.float32, device=device)
        dv_KW = torch.empty((places, width), dtype=torch.float32, device=device)
        token_T = torch.arange(tokens, dtype=torch.int32, device=device)
        query_T = torch.searchsorted(queries_Q1[1:], token_T, right=True).clamp_(max=len(queries_Q1) - 2).int()
        place_K = torch.arange(places + 1, dtype=torch.int32, device=device)
        document_K = torch.searchsorted(documents_N1[1:], place_K[:-1], right=True).clamp_(max=num_documents - 1).int()
        MAXSIM_DU.launch(
            device,
            lambda b: (-(-tokens // b["BLOCK_M"]),),
            *(v_KW, winner_NT, documents_N1, by_score_QN, query_T, queries_Q1[-1:], du_TW, num_documents, tokens, width),
            BLOCK_W=_block(width),
        )
        # Wins by document token, in the order (document, query token): what is no win sorts last.
        wins_NT = (token_T < queries_Q1[-1]) & (torch.diff(documents_N1) > 0)[:, None]
        key = torch.where(wins_NT, documents_N1[:-1, None] + winner_NT, places).view(-1)
        key, order = torch.sort(key, stable=True)
        runs_K1 = torch.searchsorted(key, place_K).int()
        MAXSIM_DV.launch(
            device,
            lambda b: (places,),
            *(u_TW, order.int(), runs_K1, by_score_QN, query_T, document_K, dv_KW, num_documents, tokens, width),
            BLOCK_W=_block(width),
        )
        return du_TW.to(ctx.dtypes[0]), dv_KW.to(ctx.dtypes[1]), None, None, None


def _block(width: int) -> int:
    """The power of two that holds a vector; a product takes 16 at least."""
    return max(16, 1 << (width - 1).bit_length())
