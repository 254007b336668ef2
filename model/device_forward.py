"""The numerators of every term at fixed sizes: the same ops as the path of free sizes, on lists padded to capacity.

Nothing here reads the device, and every gradient is added up in one order: a list's positions are distinct, so that what goes back to them
is a copy, and padding goes to a row past the last position that is thrown away.

Suffixes: P positions, S segments, D hidden, N entries of a list, W token width.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from treadle.kernels.byte_cross_entropy import byte_cross_entropy
from treadle.kernels.byte_embed import byte_embed
from treadle.kernels.chunk_embed import chunk_embed
from treadle.kernels.dispatch import choose
from treadle.kernels.maxsim import maxsim
from treadle.kernels.mean_pool import mean_pool
from treadle.kernels.pair_loss import pair_loss, row_loss
from treadle.kernels.patch_embed import patch_embed
from treadle.kernels.payload_error import payload_error
from treadle.kernels.segment_attention import segment_spans
from treadle.kernels.tape_reference import Patches
from treadle.model.device_batch import DeviceBatch
from treadle.model.device_corruption import Hidden
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.objectives import CHOICES, TERMS, TermSums, tied
from treadle.model.relations import pair_form
from treadle.shape import Modality


class _Take(torch.autograd.Function):
    """Rows at distinct positions; an index of P is padding."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.positions = len(x_PD)
        return x_PD.index_select(0, index_N.clamp(max=len(x_PD) - 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        (by_rows_ND,) = gradients
        return _placed(by_rows_ND, index_N, ctx.positions), None


class _Place(torch.autograd.Function):
    """The inverse of taking: rows at distinct positions among zeros."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, index_N: Tensor, positions: int) -> Tensor:
        ctx.save_for_backward(index_N)
        return _placed(rows_ND, index_N, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        (by_x_PD,) = gradients
        rows_ND = by_x_PD.index_select(0, index_N.clamp(max=len(by_x_PD) - 1))
        return rows_ND.mul_((index_N < len(by_x_PD))[:, None]), None, None


def _placed(rows_ND: Tensor, index_N: Tensor, positions: int) -> Tensor:
    placed = torch.zeros((positions + 1, rows_ND.shape[1]), dtype=rows_ND.dtype, device=rows_ND.device)
    return placed.index_copy_(0, index_N, rows_ND)[:-1]


def _take(x_PD: Tensor, index_N: Tensor) -> Tensor:
    return cast(Tensor, _Take.apply(x_PD, index_N))


def fixed_sums(network: Network, batch: DeviceBatch, hidden: Hidden, world: World, *, bf16: bool) -> TermSums:
    """This rank's numerators, with their graph (collective where pairs are scored).

    Args:
        hidden: what this step hides of the batch.
        bf16: products of the tower and of the pair terms run in bf16.
    """
    plan, device = batch.plan, batch.buffer.device
    product = torch.bfloat16 if bf16 else torch.float32
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        states_PD = tower_states(network, batch, hidden)
        pooled_SD = mean_pool(states_PD, batch["start"], batch["tokens"])
        numerators = _masked(network, batch, hidden, states_PD) if plan.masks else {}
    if network.temperatures is not None:
        pooled_ND = world.gather(pooled_SD, [plan.segments] * world.size)
        value = pair_loss(
            pooled_SD,
            pooled_ND,
            network.temperatures.log_scale_G,
            network.temperatures.bias_G,
            batch["pair_temperature"],
            batch.pairs("pair"),
            form=pair_form(plan.contrastive.pair_loss),
            widths=plan.contrastive.matryoshka_dimensions,
            product_dtype=product,
        )
        numerators["contrastive"] = tied(value, pooled_ND) if world.size > 1 else value
    if network.token_head is not None and network.token_temperatures is not None:
        numerators["late_interaction"] = _late(network, batch, states_PD, product)
    if plan.weights_K[CHOICES]:
        numerators["choices"] = _choices(network, batch, states_PD)
    return TermSums(numerators, pooled_SD.detach())


def tower_states(network: Network, batch: DeviceBatch, hidden: Hidden) -> Tensor:
    """States after the final norm, `[P, D]`."""
    tower, start_S, length_S = network.tower, batch["start"], batch["length"]
    x_PD, turn_PA, positions = _embedded(network, batch, hidden), tower.turn(batch["coord"]), batch.plan.positions
    if choose("segment_attention", "auto", x_PD.device) == "triton":
        return tower.run(x_PD, start_S, length_S, turn_PA, None, segment_spans(start_S, length_S, positions))
    # Without Triton the op sorts segments by length in every layer: right, and slower than the path of free sizes.
    return tower.run(x_PD, start_S, length_S, turn_PA, None, None)


def _embedded(network: Network, batch: DeviceBatch, hidden: Hidden) -> Tensor:
    embedding, media = network.tower.embedding, batch.plan.media
    masks = [embedding.get_parameter(f"{modality}_mask")[None] for modality in media]
    nothing = torch.zeros_like(embedding.byte[:1])
    x_PD = byte_embed(torch.cat([embedding.byte, embedding.prefix, *masks, nothing]), hidden.row_P)
    for modality in media:
        shown_N = hidden.shown[modality]
        places, weight = batch.places(modality, shown_N), embedding.get_parameter(str(modality))
        rows_ND = patch_embed(batch.tape, places, weight) if isinstance(places, Patches) else chunk_embed(batch.tape, places, weight)
        x_PD = x_PD + cast(Tensor, _Place.apply(rows_ND.to(x_PD.dtype), shown_N, batch.plan.positions))
    return x_PD


def _masked(network: Network, batch: DeviceBatch, hidden: Hidden, states_PD: Tensor) -> dict[str, Tensor]:
    numerators: dict[str, Tensor] = {}
    for name, weight, modality in zip(TERMS, batch.plan.weights_K, Modality, strict=False):
        head = network.heads.of(modality)
        if head is None or not weight:
            continue
        if modality is Modality.TEXT:
            # Logits in full precision, as on the path of free sizes.
            with torch.autocast(states_PD.device.type, enabled=False):
                logits_TV = head(_take(states_PD, hidden.covered_N))
            numerators[name] = byte_cross_entropy(logits_TV, hidden.target_N)
        else:
            hidden_N = hidden.hidden[modality]
            prediction_NV = head(_take(states_PD, hidden_N))
            numerators[name] = payload_error(prediction_NV, batch.tape, batch.places(modality, hidden_N))
    return numerators


def _late(network: Network, batch: DeviceBatch, states_PD: Tensor, product: torch.dtype) -> Tensor:
    head, temperatures = network.token_head, network.token_temperatures
    assert head is not None and temperatures is not None
    u_TW, v_KW = (head(_take(states_PD, batch[f"{name}_token"])) for name in ("query", "document"))
    scores_QN = maxsim(u_TW, v_KW, batch["query_offsets"], batch["document_offsets"], product_dtype=product)
    group_Q = batch["late_temperature"]
    form = pair_form(batch.plan.late.pair_loss)
    scores_QN = scores_QN * _of_group(temperatures.log_scale_G.exp(), group_Q)[:, None]
    if form != "ranked":  # which no bias changes, see `late_interaction_sum`
        scores_QN = scores_QN + _of_group(temperatures.bias_G, group_Q)[:, None]
    return row_loss(scores_QN, batch.pairs("late"), form=form)


def _of_group(values_G: Tensor, group_Q: Tensor) -> Tensor:
    """`values[group]` as a product with ones and zeros, whose gradient adds up in one order."""
    one_hot_QG = (group_Q[:, None] == torch.arange(len(values_G), device=group_Q.device)).to(values_G.dtype)
    return (one_hot_QG * values_G).sum(1)


def _choices(network: Network, batch: DeviceBatch, states_PD: Tensor) -> Tensor:
    logits_SV = network.heads.text(_take(states_PD, batch["choice_position"])).float()
    shown_SV = logits_SV.masked_fill(batch["choice_legal"] == 0, -1e30)
    # A row without a legal byte has equal logits and no targets.
    return -(batch["choice_target"] * log_softmax(shown_SV, dim=1)).sum()
