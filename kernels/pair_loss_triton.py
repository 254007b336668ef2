"""Pair losses through Triton: integers settled once, then slabs of anchors, each scored, closed and multiplied out.

Every shape follows from the shapes of the arguments, nothing is read back, and every sum has one order: a call can be captured in a CUDA
graph and repeats to the last bit. Loss and gradients come out of one pass; backward scales them. A slab's coefficients `H` take
`W slab N` values, and slabs are as many as keep them within `SLAB_BYTES`, so memory is O(N D).

Suffixes: M anchors, N candidates, D width, G temperature groups, W widths, A attracting edges, C runs of candidates, B anchors of a slab.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.kernels.pair_loss_reference import PairForm, PairRows

SLAB_BYTES = 2**26
"""Bytes of one slab's coefficients, and of its moments: 64 MiB."""
MOST_SLAB_ROWS = 1024
MOST_NODES = 256
PLAN_ROWS = 64
RANKED_RUN = 128
"""As in `pair_tiles_kernels.py`; the last: candidates of one program under RANKED, at the smallest of its tiles."""

DIRECT_COST, NODE_COST = 24, 3
"""Operations per pair of one attracting edge, and of one Chebyshev node."""


@dataclass(frozen=True, slots=True)
class Integers:
    """What `PairRows` say, as the kernels read it: int32, attracting edges apart."""

    self_M: Tensor
    group_M: Tensor
    """Dense numbers; -2 for none, so that nothing equals it."""
    group_N: Tensor
    """Dense numbers; -1 for none."""
    weight_N: Tensor
    """fp32: repelling weight of an unnamed pair, 0 for a candidate that takes no part."""
    offsets_M1: Tensor
    ids_E: Tensor
    repel_E: Tensor
    attract_offsets_M1: Tensor
    columns_A: Tensor
    rows_A: Tensor
    attract_A: Tensor
    live_M: Tensor
    """fp32: 1 for an anchor that takes part, else 0."""

    @property
    def count(self) -> Tensor:
        """int32 `[1]`: attracting edges."""
        return self.attract_offsets_M1[-1:]


def integers(pairs: PairRows) -> Integers:
    """Fixed shapes throughout: sorts, searches and gathers."""
    named, device = pairs.named, pairs.group_N.device
    anchors, candidates = len(pairs.self_M), len(pairs.group_N)
    order_N = torch.sort(pairs.group_N).values
    place_N = torch.searchsorted(order_N, pairs.group_N)
    place_M = torch.searchsorted(order_N, pairs.group_M).clamp_(max=max(0, candidates - 1))
    found_M = order_N.index_select(0, place_M) == pairs.group_M if candidates else torch.zeros_like(pairs.group_M, dtype=torch.bool)
    weight_N = torch.full((candidates,), pairs.ambient_weight, dtype=torch.float32, device=device)
    if pairs.candidate_N is not None:
        weight_N = weight_N * pairs.candidate_N
    live_M = torch.ones(anchors, device=device) if pairs.anchor_M is None else pairs.anchor_M.to(torch.float32)

    edges = named.ids_E
    if not len(edges):
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        zeros_M1 = torch.zeros(anchors + 1, dtype=torch.int32, device=device)
        offsets_M1, ids_E, repel_E = zeros_M1, nothing, nothing.float()
        attract_offsets_M1, columns_A, rows_A, attract_A = zeros_M1, nothing, nothing, nothing.float()
    else:
        offsets_M1, ids_E, repel_E = named.offsets_M1.int(), edges.int(), named.repel_E.float()
        place_E = torch.arange(len(edges), device=device)
        attracts_E = (named.attract_E > 0) & (place_E < named.offsets_M1[-1])
        before_E1 = torch.nn.functional.pad(torch.cumsum(attracts_E, 0), (1, 0))
        attract_offsets_M1 = before_E1.index_select(0, named.offsets_M1.clamp(max=len(edges))).int()
        order_E = torch.sort((~attracts_E).to(torch.uint8), stable=True).indices
        columns_A, attract_A = ids_E.index_select(0, order_E), named.attract_E.float().index_select(0, order_E)
        rows_A = (torch.searchsorted(attract_offsets_M1, place_E.int(), right=True) - 1).clamp_(max=max(0, anchors - 1)).int()
    return Integers(
        self_M=pairs.self_M.int(),
        group_M=torch.where((pairs.group_M != 0) & found_M, place_M, -2).int(),
        group_N=torch.where(pairs.group_N != 0, place_N, -1).int(),
        weight_N=weight_N,
        offsets_M1=offsets_M1,
        ids_E=ids_E,
        repel_E=repel_E,
        attract_offsets_M1=attract_offsets_M1,
        columns_A=columns_A,
        rows_A=rows_A,
        attract_A=attract_A,
        live_M=live_M,
    )


def coefficients(rows: Integers, form: PairForm, share: float) -> tuple[Tensor, Tensor]:
    """What multiplies each anchor's attracting and repelling sums, `[M]` each, and `share` of both."""
    from treadle.kernels.pair_tiles_kernels import PAIR_WEIGHTS

    live_M = rows.live_M * share
    if form == "sigmoid":
        return live_M, live_M
    anchors, candidates = len(rows.self_M), len(rows.group_N)
    su_M, sv_M = torch.zeros_like(live_M), torch.zeros_like(live_M)
    PAIR_WEIGHTS.launch(
        live_M.device,
        lambda b: (-(-anchors // b["BLOCK_M"]),),
        *(rows.self_M, rows.group_M, rows.group_N, rows.weight_N, rows.offsets_M1, rows.ids_E, rows.repel_E),
        *(rows.attract_offsets_M1, rows.attract_A, su_M, sv_M, anchors, candidates),
    )
    up_M, down_M = _reciprocal(su_M) * live_M, _reciprocal(sv_M) * live_M
    if form == "balanced":
        return 0.5 * up_M, 0.5 * down_M
    return torch.zeros_like(up_M), up_M * _reciprocal(sv_M)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp_min(torch.finfo(x.dtype).tiny).reciprocal(), 0.0)


def planned_nodes(rows: Integers, scale_M: Tensor) -> Tensor:
    """int32, one per `PLAN_ROWS` anchors: Chebyshev nodes under RANKED, 0 where walking the edges costs less.

    A function with its nearest pole at `i pi / t` is a polynomial to within `e^(-n asinh(pi / t))`: 1e-6 for inverse temperatures up to 22,
    4e-5 on single slopes at 30 and above (whose sums over candidates are some ten times closer), where nodes would cost more than they save.
    """
    blocks = -(-len(scale_M) // PLAN_ROWS)
    pad = (0, blocks * PLAN_ROWS - len(scale_M))
    scale_R = torch.nn.functional.pad(scale_M, pad).view(blocks, PLAN_ROWS).amax(1).clamp_(min=1e-3)
    most_R = torch.nn.functional.pad(torch.diff(rows.attract_offsets_M1), pad).view(blocks, PLAN_ROWS).amax(1)
    rate_R = torch.asinh(math.pi / scale_R)
    nodes_R = torch.minimum(13.8 / rate_R, (10.0 / rate_R).clamp_(min=96.0)).clamp_(min=8.0, max=float(MOST_NODES))
    even_R = 2 * torch.ceil(nodes_R / 2)
    return torch.where(DIRECT_COST * most_R > NODE_COST * even_R, even_R, 0.0).int()


@lru_cache(maxsize=16)
def _widths(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Bounds of the bands between widths, in units of 8."""
    return torch.tensor([0, *(w // 8 for w in widths)], dtype=torch.int32, device=device)


def slab_rows(anchors: int, candidates: int, widths: int, ranked: bool, item_bytes: int) -> int:
    """Anchors of a slab, a multiple of `PLAN_ROWS`: what it keeps of every candidate, and its moments, stay within `SLAB_BYTES`."""
    a_row = widths * candidates * item_bytes
    if ranked:
        a_row = max(a_row, 4 * widths * MOST_NODES * -(-candidates // RANKED_RUN))
    most = min(MOST_SLAB_ROWS, SLAB_BYTES // max(1, a_row), -(-anchors // PLAN_ROWS) * PLAN_ROWS)
    return max(PLAN_ROWS, most // PLAN_ROWS * PLAN_ROWS)


@dataclass(slots=True)
class _Answer:
    loss: Tensor
    by_x_MD: Tensor | None = None
    by_y_ND: Tensor | None = None
    by_log_scale_G: Tensor | None = None
    by_bias_G: Tensor | None = None


class _Pass:
    """One call: arguments, and the kernels in their order."""

    def __init__(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        log_scale_G: Tensor,
        bias_G: Tensor,
        group_M: Tensor,
        pairs: PairRows,
        form: PairForm,
        widths: tuple[int, ...],
        product_dtype: torch.dtype,
    ) -> None:
        self.device, self.form, self.num_widths, self.depth = x_MD.device, form, len(widths), widths[-1]
        self.ranked = form == "ranked"
        self.anchors, self.candidates = len(x_MD), len(y_ND)
        self.wide = product_dtype == torch.float32
        self.widths = _widths(widths, x_MD.device)
        self.group_M = group_M.int()
        self.num_groups = len(log_scale_G)
        self.scale_M = log_scale_G.float().exp().index_select(0, group_M)
        # RANKED scores differences, which a bias does not change: added, it would only round them.
        self.bias_M = (torch.zeros_like(bias_G) if self.ranked else bias_G).float().index_select(0, group_M)
        self.rows = integers(pairs)
        self.cu_M, self.cv_M = coefficients(self.rows, form, 1.0 / len(widths))
        self.x, self.nx = self._directions(x_MD, product_dtype)
        self.y, self.ny = self._directions(y_ND, product_dtype)

    def _directions(self, x_MD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        from treadle.kernels.pair_edges_kernels import DIRECTIONS

        x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
        rows = len(x_MD)
        copy = torch.empty((rows, self.depth), dtype=dtype, device=self.device)
        inverse_WM = torch.empty((self.num_widths, rows), device=self.device)
        DIRECTIONS.launch(
            self.device,
            lambda b: (-(-rows // b["BLOCK_M"]),),
            *(x_MD, copy, inverse_WM, self.widths, rows, self.depth, x_MD.stride(0)),
            W=self.num_widths,
        )
        return copy, inverse_WM

    def run(self, gradient: bool) -> _Answer:
        """Loss, and gradients if wanted."""
        from treadle.kernels.pair_edges_kernels import EDGE_SCORES

        rows, width, edges = self.rows, self.num_widths, len(self.rows.columns_A)
        self.scores_WA = torch.zeros((width, edges), device=self.device)
        EDGE_SCORES.launch(
            self.device,
            lambda b: (-(-edges // b["BLOCK_A"]),),
            *(self.x, self.y, self.nx, self.ny, self.scale_M, self.bias_M, rows.rows_A, rows.columns_A, self.scores_WA, self.widths),
            *(rows.count, self.anchors, self.candidates, self.depth, edges),
            W=width,
        )
        slab = slab_rows(self.anchors, self.candidates, width, self.ranked, self.x.element_size())
        self.nodes_R = self.rows.count
        if self.ranked:
            # The last slab's blocks past the last anchor read a number of nodes too.
            planned_R = planned_nodes(rows, self.scale_M)
            self.nodes_R = torch.nn.functional.pad(planned_R, (0, -(-self.anchors // slab) * slab // PLAN_ROWS - len(planned_R)))
        per_anchor = torch.zeros((3, self.anchors), device=self.device)
        per_edge = torch.zeros((3, width, edges), device=self.device)
        by_x_MD = torch.zeros((self.anchors, self.depth), device=self.device) if gradient else None
        by_y_ND = torch.zeros((self.candidates, self.depth), device=self.device) if gradient else None
        buffers = _Slab(self, slab, gradient)
        for first in range(0, self.anchors if self.candidates else 0, slab):
            buffers.score(first)
            buffers.close(first, per_anchor, per_edge)
            if by_x_MD is not None and by_y_ND is not None:
                buffers.multiply(first, per_edge, by_x_MD, by_y_ND)
        loss = per_anchor[0].double().sum().float()
        if by_x_MD is None or by_y_ND is None:
            return _Answer(loss)
        self._edges_to_candidates(per_edge, by_y_ND)
        by_log_scale_G, by_bias_G = self._by_group(per_anchor)
        return _Answer(loss, by_x_MD, by_y_ND, by_log_scale_G, torch.zeros_like(by_bias_G) if self.ranked else by_bias_G)

    def _edges_to_candidates(self, per_edge: Tensor, by_y_ND: Tensor) -> None:
        from treadle.kernels.pair_products_kernels import PAIR_DY_EDGES

        rows, edges = self.rows, len(self.rows.columns_A)
        real_A = torch.arange(edges, device=self.device) < rows.count
        key_A, order_A = torch.sort(torch.where(real_A, rows.columns_A, self.candidates), stable=True)
        into_N1 = torch.searchsorted(key_A, torch.arange(self.candidates + 1, dtype=key_A.dtype, device=self.device)).int()
        PAIR_DY_EDGES.launch(
            self.device,
            lambda b: (-(-self.candidates // b["BLOCK_N"]), -(-self.depth // b["BLOCK_K"])),
            *(self.x, self.y, self.ny, into_N1, order_A.int(), rows.rows_A, per_edge[1], per_edge[2], by_y_ND, self.widths),
            *(self.candidates, self.depth, edges),
            W=self.num_widths,
        )

    def _by_group(self, per_anchor: Tensor) -> tuple[Tensor, Tensor]:
        from treadle.kernels.pair_edges_kernels import GROUP_SUMS

        sums = torch.empty((2, self.num_groups), device=self.device)
        GROUP_SUMS.launch(
            self.device, lambda b: (self.num_groups,), self.group_M, per_anchor[1], per_anchor[2], sums[0], sums[1], self.anchors
        )
        return sums[0], sums[1]


class _Slab:
    """The buffers of one slab of anchors, used again for the next."""

    def __init__(self, call: _Pass, slab: int, gradient: bool) -> None:
        from treadle.kernels.pair_tiles_kernels import PAIR_TILES, PAIR_TILES_RANKED, RUN_TILES

        self.call, self.slab, self.gradient, self.tiles = call, slab, gradient, RUN_TILES
        self.kernel = PAIR_TILES_RANKED if call.ranked else PAIR_TILES
        blocks = self.kernel.settings_on(call.device, wide=call.wide).blocks
        run = blocks["BLOCK_N"] * self.tiles
        self.runs = -(-call.candidates // run)
        self.pitch = self.runs * run
        width, edges, device = call.num_widths, len(call.rows.columns_A), call.device
        assert PLAN_ROWS % blocks["BLOCK_M"] == 0 and slab % blocks["BLOCK_M"] == 0
        self.sums = torch.zeros((3, self.runs, width, slab), device=device)
        nothing = torch.zeros(1, device=device)
        self.pulled, self.slopes, self.moments = nothing, nothing, nothing
        if call.ranked:
            self.pulled = torch.zeros((self.runs, width, edges), device=device)
            self.slopes = torch.empty((width, MOST_NODES, slab), device=device)
            self.moments = torch.empty((self.runs, width, MOST_NODES, slab), device=device)
        self.columns, self.h = nothing, nothing
        if gradient:
            self.columns = torch.zeros((slab // blocks["BLOCK_M"], width, self.pitch), device=device)
            self.h = torch.empty((width, slab, self.pitch), dtype=call.x.dtype, device=device)

    def score(self, first: int) -> None:
        """Runs the tiles."""
        from treadle.kernels.pair_edges_kernels import RANKED_SLOPES

        call, rows = self.call, self.call.rows
        width, edges = call.num_widths, len(rows.columns_A)
        if call.ranked and self.gradient:
            RANKED_SLOPES.launch(
                call.device,
                lambda b: (-(-self.slab // b["BLOCK_M"]), width),
                *(call.scale_M, call.bias_M, rows.attract_offsets_M1, rows.attract_A, call.scores_WA, call.nodes_R, self.slopes),
                *(call.anchors, edges, first, self.slab),
                W=width,
                K=MOST_NODES,
            )
        self.kernel.launch(
            call.device,
            lambda b: (self.slab // b["BLOCK_M"], self.runs),
            *(call.x, call.y, call.nx, call.ny, call.scale_M, call.bias_M, rows.self_M, rows.group_M, rows.group_N, rows.weight_N),
            *(rows.offsets_M1, rows.ids_E, rows.repel_E, call.cv_M, rows.attract_offsets_M1, rows.attract_A, call.scores_WA),
            *(call.nodes_R, self.slopes, self.sums[0], self.sums[1], self.sums[2], self.columns, self.h, self.pulled, self.moments),
            *(call.widths, call.anchors, call.candidates, call.depth, edges, first, self.slab, self.pitch),
            wide=call.wide,
            W=width,
            K=MOST_NODES,
            TILES=self.tiles,
            RANKED=call.ranked,
            GRADIENT=self.gradient,
        )

    def close(self, first: int, per_anchor: Tensor, per_edge: Tensor) -> None:
        """Sums over candidates, and what edges add to them."""
        from treadle.kernels.pair_edges_kernels import ANCHORS, RANKED_NODES

        call, rows = self.call, self.call.rows
        width, edges = call.num_widths, len(rows.columns_A)
        self.totals = self.sums.sum(1)
        pulled_WA = self.pulled.sum(0) if call.ranked else self.pulled
        if call.ranked:
            RANKED_NODES.launch(
                call.device,
                lambda b: (-(-self.slab // b["BLOCK_M"]), width),
                *(call.scale_M, call.bias_M, rows.attract_offsets_M1, rows.attract_A, call.scores_WA, call.nodes_R, self.moments),
                *(self.totals[0], pulled_WA, call.anchors, edges, first, self.slab, self.runs),
                W=width,
                K=MOST_NODES,
            )
        ANCHORS.launch(
            call.device,
            lambda b: (-(-self.slab // b["BLOCK_M"]),),
            *(call.cu_M, call.cv_M, call.scale_M, call.bias_M, call.nx, call.ny, rows.attract_offsets_M1, rows.columns_A, rows.attract_A),
            *(call.scores_WA, self.totals[0], self.totals[1], self.totals[2], pulled_WA, per_anchor[0], per_edge[0], per_anchor[1]),
            *(per_anchor[2], per_edge[1], per_edge[2], call.anchors, call.candidates, edges, first, self.slab),
            W=width,
            RANKED=call.ranked,
            GRADIENT=self.gradient,
        )

    def multiply(self, first: int, per_edge: Tensor, by_x_MD: Tensor, by_y_ND: Tensor) -> None:
        """The slab's part of both gradients."""
        from treadle.kernels.pair_products_kernels import PAIR_DX, PAIR_DY

        call, rows = self.call, self.call.rows
        width, edges, depth = call.num_widths, len(rows.columns_A), call.depth
        PAIR_DX.launch(
            call.device,
            lambda b: (-(-self.slab // b["BLOCK_M"]), -(-depth // b["BLOCK_K"])),
            *(self.h, call.x, call.y, call.nx, self.totals[1], rows.attract_offsets_M1, rows.columns_A, per_edge[1], by_x_MD, call.widths),
            *(call.anchors, call.candidates, depth, edges, first, self.slab, self.pitch),
            wide=call.wide,
            W=width,
        )
        PAIR_DY.launch(
            call.device,
            lambda b: (-(-call.candidates // b["BLOCK_N"]), -(-depth // b["BLOCK_K"])),
            *(self.h, call.x, call.y, call.ny, self.columns.sum(0), by_y_ND, call.widths, call.anchors, call.candidates, depth),
            *(first, self.slab, self.pitch),
            wide=call.wide,
            W=width,
            FRESH=first == 0,
        )


class TritonPairLoss(torch.autograd.Function):
    """Gradients are made with the loss, from the same tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        y_ND: Tensor,
        log_scale_G: Tensor,
        bias_G: Tensor,
        group_M: Tensor,
        pairs: PairRows,
        form: PairForm,
        widths: tuple[int, ...],
        product_dtype: torch.dtype,
    ) -> Tensor:
        inputs = (x_MD, y_ND, log_scale_G, bias_G)
        x, y, log_scale, bias = (t.detach() for t in inputs)
        call = _Pass(x, y, log_scale, bias, group_M, pairs, form, widths, product_dtype)
        answer = call.run(any(ctx.needs_input_grad))
        gradients = (answer.by_x_MD, answer.by_y_ND, answer.by_log_scale_G, answer.by_bias_G)
        ctx.save_for_backward(*(g for g in gradients if g is not None))
        ctx.likes = [(t.shape, t.dtype) for t in inputs]
        return answer.loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (by_loss,) = grad_outputs
        answers: list[Tensor] = []
        for gradient, (shape, dtype) in zip(ctx.saved_tensors, ctx.likes, strict=True):
            scaled = (gradient * by_loss).to(dtype)
            beyond = shape[-1] - scaled.shape[-1]
            # Columns past the widest width are not scored.
            answers.append(torch.nn.functional.pad(scaled, (0, beyond)) if beyond else scaled)
        return (*answers, None, None, None, None, None)


class TritonRowLoss(torch.autograd.Function):
    """The loss of a matrix of scores; its gradient is made with it."""

    @staticmethod
    def forward(ctx: Any, scores_MN: Tensor, pairs: PairRows, form: PairForm) -> Tensor:
        from treadle.kernels.pair_edges_kernels import ANCHORS
        from treadle.kernels.pair_tiles_kernels import ROW_TILES, RUN_TILES

        scores_MN = scores_MN.detach()
        scores_MN = scores_MN if scores_MN.stride(1) == 1 else scores_MN.contiguous()
        (anchors, candidates), device = scores_MN.shape, scores_MN.device
        rows, ranked = integers(pairs), form == "ranked"
        cu_M, cv_M = coefficients(rows, form, 1.0)
        edges = len(rows.columns_A)
        real_A = torch.arange(edges, device=device) < rows.count
        row_A, column_A = rows.rows_A.long(), rows.columns_A.long().clamp(max=max(0, candidates - 1))
        scores_A = scores_MN[row_A, column_A].float() if scores_MN.numel() else torch.zeros(edges, device=device)
        by_score_MN = torch.zeros((anchors, candidates), device=device)
        run = ROW_TILES.settings_on(device).blocks["BLOCK_N"] * RUN_TILES
        runs = -(-candidates // run)
        sums = torch.zeros((runs, anchors), device=device)
        pulled = torch.zeros((runs, edges), device=device)
        ROW_TILES.launch(
            device,
            lambda b: (-(-anchors // b["BLOCK_M"]), runs),
            *(scores_MN, rows.self_M, rows.group_M, rows.group_N, rows.weight_N, rows.offsets_M1, rows.ids_E, rows.repel_E, cv_M),
            *(
                rows.attract_offsets_M1,
                rows.attract_A,
                scores_A,
                sums,
                by_score_MN,
                pulled,
                anchors,
                candidates,
                edges,
                scores_MN.stride(0),
            ),
            TILES=RUN_TILES,
            RANKED=ranked,
        )
        per_anchor, per_edge = torch.zeros((5, anchors), device=device), torch.zeros((3, edges), device=device)
        ones = torch.ones(max(anchors, candidates), device=device)
        ANCHORS.launch(
            device,
            lambda b: (-(-anchors // b["BLOCK_M"]),),
            *(cu_M, cv_M, ones, torch.zeros_like(ones), ones, ones, rows.attract_offsets_M1, rows.columns_A, rows.attract_A, scores_A),
            *(sums.sum(0), per_anchor[3], per_anchor[4], pulled.sum(0), per_anchor[0], per_edge[0], per_anchor[1], per_anchor[2]),
            *(per_edge[1], per_edge[2], anchors, candidates, edges, 0, anchors),
            W=1,
            RANKED=ranked,
            GRADIENT=True,
        )
        if scores_MN.numel():
            # Every real edge has a place of its own; padding goes past the end.
            place_A = torch.where(real_A, row_A * candidates + column_A, anchors * candidates)
            flat = torch.nn.functional.pad(by_score_MN.view(-1), (0, 1))
            by_score_MN = flat.scatter_(0, place_A, per_edge[0])[:-1].view(anchors, candidates)
        ctx.save_for_backward(by_score_MN.to(scores_MN.dtype))
        return per_anchor[0].double().sum().float()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides that ctx may be named
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (by_score_MN,) = ctx.saved_tensors
        return (by_score_MN * grad_outputs[0]).to(by_score_MN.dtype), None, None
