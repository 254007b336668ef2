"""Byte embedding: 256 bytes and MASK, which stands at covered positions and where an item makes its choice.

Bytes moved: an index and 2 D elements a position. Bandwidth bounds it.
Legend: N positions that show a byte, V rows of the table, D width.
"""

from torch import Tensor

from treadle.kernels.byte_embed_reference import byte_embed_reference
from treadle.kernels.dispatch import Impl, choose


def byte_embed(table_VD: Tensor, shown_N: Tensor, *, impl: Impl = "auto") -> Tensor:
    """The table's row for each of `shown_N` (int64, below V), `[N, D]`."""
    choose("byte_embed", impl, table_VD.device)
    return byte_embed_reference(table_VD, shown_N)
