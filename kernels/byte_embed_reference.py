"""Byte embedding in plain torch: the row of each shown byte.

Legend: N positions that show a byte, V rows of the table, D width.
"""

from torch import Tensor
from torch.nn.functional import embedding


def byte_embed_reference(table_VD: Tensor, shown_N: Tensor) -> Tensor:
    """`table[shown]`, `[N, D]`; the table's gradient sums the rows of each byte in a fixed order."""
    return embedding(shown_N, table_VD)
