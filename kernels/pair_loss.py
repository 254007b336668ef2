"""Pair losses: every anchor's scores against the world's candidates, named edges apart, in one of three forms.

Bytes moved: the vectors once forwards; a slab of scores never leaves the cache (on a GPU: the tile never leaves registers). One product of
`2 M N D` operations forwards and two backwards, so the products bound it at every width from 128 up.

Shape suffixes: M anchors, N candidates, D width, G temperature groups.
"""

from typing import cast

import torch
from torch import Tensor

from treadle.kernels.dispatch import Impl, choose, register
from treadle.kernels.pair_loss_reference import NamedPairs, PairForm, PairRows, pair_loss_reference, row_loss_reference

__all__ = ["NamedPairs", "PairForm", "PairRows", "pair_loss", "row_loss"]

register("pair_loss")
register("row_loss")


def pair_loss(
    x_MD: Tensor,
    y_ND: Tensor,
    log_scale_G: Tensor,
    bias_G: Tensor,
    temperature_group_M: Tensor,
    pairs: PairRows,
    *,
    form: PairForm,
    widths: tuple[int, ...],
    product_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The numerator of a pooled pair term: the sum over anchors of the pair loss, averaged over matryoshka widths.

    With `s_ij = t_i <e_i, e_j> + b_i`, attracting weights `u` and repelling weights `v` of anchor i:

    - sigmoid: `sum u softplus(-s) + sum v softplus(s)`
    - balanced: `1/2 sum u softplus(-s) / sum u + 1/2 sum v softplus(s) / sum v`, an empty half counting 0
    - ranked: `sum_p sum_n u_p v_n softplus(s_n - s_p) / (sum u  sum v)`, 0 for an anchor without both

    Args:
        x_MD: this rank's pooled vectors, as they are; each width's prefix is normalised on its own.
        y_ND: the candidates' pooled vectors. Their gradient is this rank's anchors' share alone: a gather sums the shares.
        log_scale_G: logarithm of the inverse temperatures.
        bias_G: biases.
        temperature_group_M: int64 temperature group of each anchor.
        pairs: which pairs attract and repel, and how much.
        form: the loss of a row of scores.
        widths: ascending prefixes scored.
        product_dtype: what Triton multiplies in, fp32 or bf16; None takes the vectors' type. Sums and scores are fp32 throughout, and the
            reference multiplies in fp32 or wider.

    Returns:
        A scalar, fp32 or wider.

    Raises:
        ValueError: Triton is asked for, and a width is no multiple of 8.
    """
    odd = [width for width in widths if width % 8]
    if odd and impl == "triton":
        raise ValueError(f"pair_loss: width {odd[0]} is no multiple of 8, which Triton's tiles need: use impl='reference' or impl='auto'")
    if choose("pair_loss", impl, x_MD.device, x_MD.dtype, y_ND.dtype) == "reference" or odd:
        return pair_loss_reference(x_MD, y_ND, log_scale_G, bias_G, temperature_group_M, pairs, form=form, widths=widths)
    from treadle.kernels.pair_loss_triton import TritonPairLoss

    if product_dtype is None:
        product_dtype = torch.bfloat16 if x_MD.dtype == y_ND.dtype == torch.bfloat16 else torch.float32
    arguments = (x_MD, y_ND, log_scale_G, bias_G, temperature_group_M, pairs, form, widths, product_dtype)
    with torch.autocast(x_MD.device.type, enabled=False):
        return cast(Tensor, TritonPairLoss.apply(*arguments))


def row_loss(scores_MN: Tensor, pairs: PairRows, *, form: PairForm, impl: Impl = "auto") -> Tensor:
    """The sum over anchors of the pair loss of a matrix of scores, in the forms of `pair_loss`.

    Args:
        scores_MN: finite scores of this rank's anchors against its own candidates.
        pairs: which pairs attract and repel, and how much.
        form: the loss of a row of scores.

    Returns:
        A scalar, fp32 or wider.
    """
    if choose("row_loss", impl, scores_MN.device, scores_MN.dtype) == "reference":
        return row_loss_reference(scores_MN, pairs, form=form)
    from treadle.kernels.pair_loss_triton import TritonRowLoss

    return cast(Tensor, TritonRowLoss.apply(scores_MN, pairs, form))
