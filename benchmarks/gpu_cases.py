"""What `make gpu` compares: each case holds the op of ours and what a user would write without it, on one device, at given sizes.

Every case runs on the CPU too, at small sizes, where tests check that both sides answer the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from treadle.kernels.dispatch import Impl
from treadle.kernels.maxsim import maxsim
from treadle.kernels.pair_loss import NamedPairs, PairRows, pair_loss
from treadle.kernels.patch_embed import patch_embed
from treadle.kernels.segment_attention import segment_attention
from treadle.kernels.segment_attention_reference import segment_attention_reference, segment_groups
from treadle.kernels.tape_reference import Patches, locate_patches

Work = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    ours: Work
    baseline: Work | None
    baseline_name: str
    operations: float = 0
    """Of the matrix products that the case needs."""
    bytes: float = 0
    """That it must move."""
    target: str = ""
    """What the ratio of times, baseline over ours, or the share of the bound should be."""
    sizes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 3e-2
    """Of both sides' answers against each other, relative to the largest value: bf16 on both."""

    def difference(self) -> float:
        """Largest difference of the two sides' answers, relative to the largest value of each."""
        if self.baseline is None:
            return 0.0
        return max(
            float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))
            for a, b in zip(self.ours(), self.baseline(), strict=True)
            if a.numel()
        )


def segment_lengths(positions: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Lengths between `low` and `high`, filled up with a last one."""
    rng, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < positions:
        lengths.append(min(int(rng.integers(low, high + 1)), positions - sum(lengths)))
    return lengths


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Callable[[], Tensor]:
    """torch's own flash attention over sequences of many lengths; the reference where there is no CUDA."""
    if q.device.type != "cuda":
        length = torch.tensor(lengths, device=q.device)
        groups = segment_groups(length.cumsum(0) - length, length, len(q), q.shape[1])
        return lambda: segment_attention_reference(q, k, v, groups)
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)
    return lambda: varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths))


def attention(device: torch.device, *, positions: int, heads: int, low: int, high: int, backward: bool, impl: Impl = "auto") -> Case:
    """Segment attention against torch's flash attention, forward or backward, segments of `low` to `high` positions."""
    lengths = segment_lengths(positions, low, high)
    generator = torch.Generator().manual_seed(1)
    q, k, v, along = (torch.randn(positions, heads, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(backward)
    length = torch.tensor(lengths, device=device)
    start = length.cumsum(0) - length
    flash = _flash(q, k, v, lengths)

    def of(out: Tensor) -> Work:
        return lambda: torch.autograd.grad(out, (q, k, v), along, retain_graph=True)

    # Ours is timed with its spans, which a tower makes once for all layers.
    def run() -> Tensor:
        return segment_attention(q, k, v, start, length, impl=impl)

    squares = float(sum(n * n for n in lengths))
    return Case(
        name=f"attention {'backward' if backward else 'forward'}",
        ours=of(run()) if backward else lambda: (run(),),
        baseline=of(flash()) if backward else lambda: (flash(),),
        baseline_name="torch flash varlen",
        operations=squares * heads * 64 * (10 if backward else 4),
        bytes=positions * heads * 64 * 2 * (8 if backward else 4),
        target=f"at least {0.7 if backward else 0.8} of its speed",
        sizes={"positions": positions, "heads": heads, "lengths": [low, high]},
    )


def patches(device: torch.device, *, pictures: int, grid: int, side: int, hidden: int, impl: Impl = "auto") -> Case:
    """Patch embedding of whole RGBA pictures against unfold and matmul, both from bytes on the device."""
    edge = grid * side
    tape = torch.randint(0, 256, (pictures * edge * edge * 4 + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).to(
        device
    )
    token = torch.arange(grid * grid, device=device).repeat(pictures)
    offset = torch.arange(pictures, device=device).repeat_interleave(grid * grid) * (edge * edge * 4)
    many = len(token)
    extent, grids = (torch.tensor([values], device=device).expand(many, 3) for values in ([1, edge, edge], [1, grid, grid]))
    places: Patches = locate_patches(offset, extent, grids, token, 1, side, 4)
    values = side * side * 4
    weight = (torch.randn(hidden, values, generator=torch.Generator().manual_seed(3)) / values**0.5).to(device, torch.bfloat16)
    pixels = tape[: pictures * edge * edge * 4].view(pictures, grid, side, grid, side * 4)

    def unfold() -> tuple[Tensor]:
        rows = pixels.permute(0, 1, 3, 2, 4).reshape(many, values)
        return (((rows.to(torch.bfloat16) * 2 - 255) / 255) @ weight.T,)

    return Case(
        name="patch embedding",
        ours=lambda: (patch_embed(tape, places, weight, impl=impl),),
        baseline=unfold,
        baseline_name="unfold and matmul",
        operations=2.0 * many * values * hidden,
        bytes=many * (values + 2.0 * hidden),
        target="at least 70 % of its bound, and ahead",
        sizes={"patches": many, "values": values, "hidden": hidden},
    )


def pairs(device: torch.device, *, count: int, width: int, impl: Impl = "auto") -> Case:
    """SIGMOID over all pairs, each anchor with one attracting candidate, forward and backward, against a torch version in chunks."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(count, width, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(2))
    partner = (torch.arange(count, device=device) + 1) % count
    ones = torch.ones(count, device=device)
    named = NamedPairs(torch.arange(count + 1, device=device), partner, ones, 0 * ones)
    groups = torch.zeros(count, dtype=torch.int64, device=device)
    rows = PairRows(torch.arange(count, device=device), groups, groups, named, 1.0)
    scale, bias = torch.full((1,), 2.3, device=device), torch.full((1,), -10.0, device=device)

    def ours() -> Sequence[Tensor]:
        loss = pair_loss(x, y, scale, bias, groups, rows, form="sigmoid", widths=(width,), impl=impl)
        return (loss.detach(), *torch.autograd.grad(loss, (x, y)))

    def chunked() -> Sequence[Tensor]:
        """Chunks of 2,048 anchors, each scored again in the backward pass."""
        u, v = x.detach().float().requires_grad_(), y.detach().float().requires_grad_()
        total = torch.zeros((), device=device)
        by_u, by_v = torch.zeros_like(u), torch.zeros_like(v)
        for low in range(0, count, 2048):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                anchors = normalize(u[low : low + 2048], dim=1)
                scores = scale.exp() * (anchors @ normalize(v, dim=1).T).float() + bias
            own = torch.arange(low, min(low + 2048, count), device=device)
            signs = torch.ones_like(scores)
            signs[torch.arange(len(own), device=device), partner[own]] = -1
            losses = softplus(signs * scores).scatter(1, own[:, None], 0.0)
            loss = losses.sum()
            one, other = torch.autograd.grad(loss, (u, v))
            by_u += one
            by_v += other
            total += loss.detach()
        return total, by_u, by_v

    return Case(
        name="pair loss",
        ours=ours,
        baseline=chunked,
        baseline_name="torch in chunks",
        operations=6.0 * count * count * width,
        bytes=12.0 * count * width,
        target="under 1 GiB, and ahead",
        sizes={"anchors": count, "candidates": count, "width": width},
    )


def token_scores(device: torch.device, *, queries: int, tokens: int, documents: int, length: int, width: int, impl: Impl = "auto") -> Case:
    """MaxSim forward and backward against an einsum, a maximum and a sum."""
    generator = torch.Generator().manual_seed(5)
    u, v = (
        normalize(torch.randn(n, width, generator=generator), dim=1).to(device, torch.bfloat16).requires_grad_()
        for n in (queries * tokens, documents * length)
    )
    q = torch.arange(queries + 1, device=device) * tokens
    d = torch.arange(documents + 1, device=device) * length
    along = torch.randn(queries, documents, generator=generator).to(device)

    def ours() -> Sequence[Tensor]:
        scores = maxsim(u, v, q, d, impl=impl)
        return (scores.detach(), *torch.autograd.grad(scores, (u, v), along))

    def eager() -> Sequence[Tensor]:
        every = torch.einsum("qtw,dlw->qdtl", u.view(queries, tokens, width), v.view(documents, length, width))
        scores = every.amax(3).float().sum(2)
        return (scores.detach(), *torch.autograd.grad(scores, (u, v), along))

    return Case(
        name="MaxSim",
        ours=ours,
        baseline=eager,
        baseline_name="einsum, amax, sum",
        operations=2.0 * queries * tokens * documents * length * width,
        bytes=2.0 * width * (queries * tokens + documents * length),
        target="at least 5 times its speed",
        sizes={"queries": queries, "tokens": tokens, "documents": documents, "length": length, "width": width},
        # The eager version's scores are rounded to bf16 before the maximum, which may pick another of two near ones.
        tolerance=5e-1,
    )


def cases(device: torch.device, *, small: bool = False, impl: Impl = "auto") -> list[Callable[[], Case]]:
    """Every case at the sizes of the report, or at sizes that the CPU runs in a moment; made one at a time, so that memory is one's own."""
    p, h = (192, 1) if small else (64 * 1024, 16)
    low, high = (8, 64) if small else (64, 1024)
    return [
        lambda: attention(device, positions=p, heads=h, low=low, high=high, backward=False, impl=impl),
        lambda: attention(device, positions=p, heads=h, low=low, high=high, backward=True, impl=impl),
        lambda: patches(device, pictures=1 if small else 64, grid=2 if small else 16, side=16, hidden=128 if small else 1024, impl=impl),
        lambda: pairs(device, count=40 if small else 32 * 1024, width=32 if small else 512, impl=impl),
        lambda: token_scores(
            device,
            queries=3 if small else 64,
            tokens=5 if small else 32,
            documents=4 if small else 256,
            length=20 if small else 256,
            width=32 if small else 128,
            impl=impl,
        ),
    ]
