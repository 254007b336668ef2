"""MaxSim, byte cross-entropy and payload error: Triton versions against the float64 references, forward and every gradient."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from treadle.kernels.byte_cross_entropy import byte_cross_entropy
from treadle.kernels.maxsim import maxsim
from treadle.kernels.payload_error import payload_error
from treadle.kernels.tape_reference import Chunks, Patches, locate_chunks, locate_patches

pytestmark = pytest.mark.usefixtures("guarded")

Compare = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)


def check_maxsim(compare: Compare, queries: list[int], documents: list[int], width: int, dtype: torch.dtype, padding: int = 0) -> None:
    """Documents hold the same vector at places 2, 5 and 17, in one tile and across tiles, so that ties occur."""
    q, d = offsets(queries), offsets(documents)
    u, v = (normalize(draw(int(o[-1]) + padding, width, seed=k), dim=1).to(dtype) for k, o in enumerate((q, d)))
    for low, length in zip(d.tolist(), documents, strict=False):
        if length > 70:
            v[low + 5] = v[low + 17] = v[low + 69] = v[low + 2]

    def op(u: Tensor, v: Tensor, impl: Any) -> Tensor:
        return maxsim(u, v, q.to(u.device), d.to(u.device), impl=impl)

    compare(op, u, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "documents", "width"), [([5, 0, 16, 1], [20, 71, 0, 1, 33], 32), ([70], [63], 24), ([1], [127], 8), ([0, 0], [3], 16)]
)
def test_maxsim(compare: Compare, queries: list[int], documents: list[int], width: int, dtype: torch.dtype) -> None:
    check_maxsim(compare, queries, documents, width, dtype, padding=3)


@pytest.mark.thorough
def test_maxsim_at_length(compare: Compare) -> None:
    check_maxsim(compare, [64, 127, 1, 0, 63], [1023, 1, 127, 64] + [3] * 20, 128, torch.bfloat16)


def test_the_lowest_of_equal_tokens_takes_the_gradient(device: torch.device) -> None:
    u = torch.eye(16, device=device)[:1]
    v = torch.zeros(80, 16, device=device)
    v[torch.tensor([3, 7, 40, 79], device=device), 0] = 0.5
    v.requires_grad_()
    one, all_ = offsets([1]).to(device), offsets([80]).to(device)
    torch.autograd.backward(maxsim(u, v, one, all_, impl="triton").sum())
    assert v.grad is not None and v.grad.nonzero().tolist() == [[3, 0]]


def test_maxsim_without_queries_or_documents(device: torch.device) -> None:
    for queries, documents in (([], [3]), ([2], []), ([], []), ([0], [0])):
        q, d = offsets(queries).to(device), offsets(documents).to(device)
        u, v = (torch.ones((int(o[-1]), 16), device=device, requires_grad=True) for o in (q, d))
        scores = maxsim(u, v, q, d, impl="triton")
        assert scores.shape == (len(queries), len(documents)) and not scores.any()
        torch.autograd.backward(scores.sum())
        assert u.grad is not None and v.grad is not None and not u.grad.any() and not v.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "classes"), [(0, 256), (1, 256), (63, 256), (12, 5)])
def test_byte_cross_entropy(compare: Compare, count: int, classes: int, dtype: torch.dtype) -> None:
    """Every third target is negative, which is not scored."""
    target = torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(1))
    target[::3] = -1

    def op(logits: Tensor, impl: Any) -> Tensor:
        return byte_cross_entropy(logits, target.to(logits.device), impl=impl)

    compare(op, (3 * draw(count, classes)).to(dtype))


@pytest.mark.thorough
def test_byte_cross_entropy_at_length(compare: Compare) -> None:
    target = torch.randint(0, 256, (1023,), generator=torch.Generator().manual_seed(1))
    compare(lambda logits, impl: byte_cross_entropy(logits, target.to(logits.device), impl=impl), 5 * draw(1023, 256))


def test_logits_far_apart(device: torch.device) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 3.0], [-3e4, -3e4, -3e4, -3e4]], device=device)
    found = byte_cross_entropy(logits, torch.tensor([1, 2], device=device), impl="triton")
    # The first row's softmax is one at 1e4: 2e4 nats off. The second is uniform over four.
    assert float(found) == pytest.approx(2e4 + 1.3862944, rel=1e-6)


def of_columns(places: Patches, columns: list[Tensor]) -> Patches:
    offset, row_pitch, frame_pitch, rows, inside = columns
    return Patches(offset, row_pitch, frame_pitch, rows, inside, places.frames, places.side, places.channels)


def pictures(frames: int, side: int, channels: int) -> tuple[Tensor, Patches]:
    """Every patch of a picture whose edges cut patches, and one place with nothing inside, on a tape that ends with its last pixel."""
    deep, high, wide = 2 * frames, 2 * side - 3, 3 * side - side // 2
    grid = (2, 2, 3)
    token = torch.arange(grid[0] * grid[1] * grid[2])
    many = len(token)
    extent, grids = torch.tensor([[deep, high, wide]]).expand(many, 3), torch.tensor([grid]).expand(many, 3)
    tape = torch.randint(0, 256, (16 + deep * high * wide * channels,), dtype=torch.uint8, generator=torch.Generator().manual_seed(side))
    places = locate_patches(torch.full((many,), 16), extent, grids, token, frames, side, channels)
    nothing = torch.zeros(1, dtype=torch.int64)
    return tape, of_columns(places, [torch.cat([column, nothing]) for column in places[:5]])


def moved(places: Patches | Chunks, device: torch.device) -> Patches | Chunks:
    if isinstance(places, Chunks):
        return Chunks(places.offset_N.to(device), places.samples_N.to(device), places.size)
    return of_columns(places, [column.to(device) for column in places[:5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("frames", "side", "channels"), [(1, 16, 4), (2, 16, 3), (1, 5, 3), (2, 4, 1)])
def test_patches_and_tubes(compare: Compare, frames: int, side: int, channels: int, dtype: torch.dtype) -> None:
    """RGBA patches by whole words, RGB tubes whose rows start between words, and sides that no word divides."""
    tape, places = pictures(frames, side, channels)

    def op(prediction: Tensor, impl: Any) -> Tensor:
        return payload_error(prediction, tape.to(prediction.device), moved(places, prediction.device), impl=impl)

    compare(op, draw(len(places.offset_N), places.values).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 320])
def test_chunks(compare: Compare, size: int, dtype: torch.dtype) -> None:
    """The last chunk is cut, what lies past it is no number, and one place has no sample."""
    samples = torch.cat([torch.full((4,), torch.nan), draw(3 * size + 5), torch.full((size,), torch.nan)])
    places = locate_chunks(torch.full((4,), 16), torch.tensor([[1, 1, 3 * size + 5]]).expand(4, 3), torch.arange(4), size)
    places = Chunks(torch.cat([places.offset_N, torch.tensor([0])]), torch.cat([places.samples_N, torch.tensor([0])]), size)
    tape = samples.view(torch.uint8)

    def op(prediction: Tensor, impl: Any) -> Tensor:
        return payload_error(prediction, tape.to(prediction.device), moved(places, prediction.device), impl=impl)

    compare(op, draw(5, size).to(dtype))
