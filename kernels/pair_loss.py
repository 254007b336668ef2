"""Pair losses: every anchor's scores against the world's candidates, named edges apart, in one of three forms.

Bytes moved: the vectors once forwards; a slab of scores never leaves the cache (on a GPU: the tile never leaves registers). One product of
`2 M N D` operations forwards and two backwards, so the products bound it at every width from 128 up.

Shape suffixes: M anchors, N candidates, D width, G temperature groups.
"""

from torch import Tensor

from treadle.kernels.dispatch import Impl, choose
from treadle.kernels.pair_loss_reference import NamedPairs, PairForm, PairRows, pair_loss_reference, row_loss_reference

__all__ = ["NamedPairs", "PairForm", "PairRows", "pair_loss", "row_loss"]


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

    Returns:
        A scalar, fp32 or wider.
    """
    choose("pair_loss", impl, x_MD.device)
    return pair_loss_reference(x_MD, y_ND, log_scale_G, bias_G, temperature_group_M, pairs, form=form, widths=widths)


def row_loss(scores_MN: Tensor, pairs: PairRows, *, form: PairForm, impl: Impl = "auto") -> Tensor:
    """The sum over anchors of the pair loss of a matrix of scores, in the forms of `pair_loss`.

    Args:
        scores_MN: finite scores of this rank's anchors against its own candidates.
        pairs: which pairs attract and repel, and how much.
        form: the loss of a row of scores.

    Returns:
        A scalar, fp32 or wider.
    """
    choose("row_loss", impl, scores_MN.device)
    return row_loss_reference(scores_MN, pairs, form=form)
