"""MaxSim: the late-interaction score of every query against every document.

One product of `2 T K W` operations forwards, whose result never leaves its tile, so it bounds the op; backwards it is made again
beside two products of the same size, rather than keeping a winner for each of `T x N` pairs.

Shape suffixes: T query tokens, K document tokens, W width, Q queries, N documents.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.maxsim_reference import maxsim_reference


def maxsim(u_TW: Tensor, v_KW: Tensor, query_offsets_Q1: Tensor, document_offsets_N1: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`score(q, d) = sum_{i in q} max_{j in d} <u_i, v_j>`; on ties the lowest j takes the gradient.

    Args:
        u_TW: token vectors of the queries, one query after the other.
        v_KW: token vectors of the documents.
        query_offsets_Q1: int64; query `q` holds tokens `query_offsets_Q1[q]` up to `query_offsets_Q1[q + 1]`.
        document_offsets_N1: int64, likewise.

    Returns:
        `[Q, N]`, fp32 or wider; 0 where the query or the document has no token.
    """
    choose("maxsim", impl, u_TW.device)
    return maxsim_reference(u_TW, v_KW, query_offsets_Q1, document_offsets_N1)
