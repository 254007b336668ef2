"""Audio chunk embedding straight from the tape's float32 samples.

Operations: `2 N V D` forward and again for the weight's gradient; bytes moved: `4 N V` and `N D` elements out.
Legend: N chunks, V samples of a chunk, D width.
"""

from torch import Tensor

from treadle.kernels.chunk_embed_reference import chunk_embed_reference
from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.tape_reference import Chunks


def chunk_embed(tape: Tensor, chunks: Chunks, weight_DV: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`samples @ weight.T`, `[N, D]`.

    Args:
        tape: uint8, the batch's payloads; recordings are float32, each 16-byte aligned.
        chunks: where the chunks lie, from `locate_chunks`.
    """
    choose("chunk_embed", impl, weight_DV.device)
    return chunk_embed_reference(tape, chunks, weight_DV)
