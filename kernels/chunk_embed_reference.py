"""Audio chunk embedding in plain torch.

Legend: N chunks, V samples of a chunk, D width.
"""

from torch import Tensor
from torch.nn.functional import linear

from treadle.kernels.tape_reference import Chunks, chunk_samples


def chunk_embed_reference(tape: Tensor, chunks: Chunks, weight_DV: Tensor) -> Tensor:
    """`samples @ weight.T`, `[N, D]`, zeros for samples past the recording's end; no bias."""
    return linear(chunk_samples(tape, chunks).to(weight_DV.dtype), weight_DV)
