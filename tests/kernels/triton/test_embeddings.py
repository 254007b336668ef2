"""Byte, patch, tube and chunk embeddings: Triton versions against the float64 references, forward and every gradient."""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.kernels.byte_embed import byte_embed
from treadle.kernels.chunk_embed import chunk_embed
from treadle.kernels.patch_embed import patch_embed
from treadle.kernels.payload_error import payload_error
from treadle.kernels.tape_reference import Chunks, Patches, locate_chunks, locate_patches

pytestmark = pytest.mark.usefixtures("guarded")

Compare = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 1), (63, 127), (127, 63), (1023, 24)])
def test_byte_embed(compare: Compare, count: int, width: int, dtype: torch.dtype) -> None:
    """A third of the bytes is MASK and a third one letter, as in texts under corruption."""
    shown = torch.randint(0, 257, (count,), generator=torch.Generator().manual_seed(count))
    shown[::3], shown[1::3] = 256, 101

    def op(table: Tensor, impl: Any) -> Tensor:
        return byte_embed(table, shown.to(table.device), impl=impl)

    # Up to 341 gradients of one byte are added up and rounded once.
    compare(op, draw(257, width, dtype=dtype))


def patches_of(sizes: list[tuple[int, int, int]], frames: int, side: int, channels: int) -> tuple[Tensor, Patches]:
    """A tape of pictures or clips back to back, each at a multiple of 16 bytes and poison up to the next, and all their patches."""
    columns: dict[str, list[Any]] = {"offset": [], "extent": [], "grid": [], "token": []}
    at = end = 0
    for deep, high, wide in sizes:
        grid = (deep // frames, -(-high // side), -(-wide // side))
        count = grid[0] * grid[1] * grid[2]
        columns["offset"] += [at] * count
        columns["extent"] += [(deep, high, wide)] * count
        columns["grid"] += [grid] * count
        columns["token"] += range(count)
        end = at + deep * high * wide * channels
        at = -(-end // 16) * 16
    shape = (-1, 3)
    places = locate_patches(
        torch.tensor(columns["offset"], dtype=torch.int64),
        torch.tensor(columns["extent"], dtype=torch.int32).view(shape),
        torch.tensor(columns["grid"], dtype=torch.int32).view(shape),
        torch.tensor(columns["token"], dtype=torch.int64),
        frames,
        side,
        channels,
    )
    # The tape ends with the last pixel: nothing may be read past it.
    return bytes_of(end), places


def on(device: torch.device, patches: Patches) -> Patches:
    """The same places as tensors on `device`."""
    offset, row_pitch, frame_pitch, rows, columns = (column.to(device) for column in patches[:5])
    return Patches(offset, row_pitch, frame_pitch, rows, columns, patches.frames, patches.side, patches.channels)


FORMS = {
    "RGBA patches of 16": (1, 16, 4, [(1, 1, 1), (1, 16, 16), (1, 5, 3), (1, 33, 20)]),
    "RGB tubes of 16": (2, 16, 3, [(2, 17, 5), (4, 16, 16)]),
    "RGB tubes of 5": (2, 5, 3, [(2, 9, 7), (4, 5, 11), (2, 1, 1)]),
    "luma patches of 4": (1, 4, 1, [(1, 13, 8), (1, 63, 3)]),
    "two channels, side 3": (3, 3, 2, [(3, 7, 8)]),
    "no pictures": (1, 4, 3, []),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_patch_embed(compare: Compare, name: str, dtype: torch.dtype) -> None:
    frames, side, channels, sizes = FORMS[name]
    tape, patches = patches_of(sizes, frames, side, channels)

    def op(weight: Tensor, impl: Any) -> Tensor:
        return patch_embed(tape.to(weight.device), on(weight.device, patches), weight, impl=impl)

    compare(op, draw(63, patches.values, dtype=dtype) / patches.values**0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_patch_embed_of_many_patches(compare: Compare, dtype: torch.dtype) -> None:
    """1023 patches: more than one block in every split of the weight's gradient."""
    tape, patches = patches_of([(1, 16 * 31 - 3, 16 * 33 - 5)], 1, 16, 4)

    def op(weight: Tensor, impl: Any) -> Tensor:
        return patch_embed(tape.to(weight.device), on(weight.device, patches), weight, impl=impl)

    compare(op, draw(127, patches.values, dtype=dtype) / patches.values**0.5)


def test_patches_of_no_rows_answer_zeros(device: torch.device) -> None:
    """What a fixed capacity leaves over: such entries lie anywhere, and neither answer nor weigh."""
    tape, patches = patches_of([(1, 9, 9)], 1, 4, 3)
    rows = patches.rows_N.clone()
    rows[1::2] = 0
    padded = on(device, patches._replace(rows_N=rows))
    weight = draw(24, patches.values, dtype=torch.float32).to(device).requires_grad_()
    out = patch_embed(tape.to(device), padded, weight, impl="triton")
    kept = torch.arange(0, rows.numel(), 2)
    want = patch_embed(tape.to(device), on(device, patches.select(kept)), weight, impl="triton")
    assert (out[1::2] == 0).all()
    torch.testing.assert_close(out[::2], want, rtol=1e-5, atol=1e-6)
    got, expected = (torch.autograd.grad(x.square().sum(), weight)[0] for x in (out, want))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [(2, 16, 3, (2, 17, 16)), (1, 16, 4, (1, 17, 20)), (1, 16, 3, (1, 9, 16))], ids=str)
def test_nothing_is_read_past_the_tape(form: tuple[int, int, int, tuple[int, int, int]], device: torch.device) -> None:
    """The tape ends where a page ends that nobody may read: a child process that reads on dies by a signal."""
    if device.type != "cpu":
        pytest.skip("compute-sanitizer sees this on a GPU")
    frames, side, channels, size = form
    tape, patches = patches_of([size], frames, side, channels)
    count, page = tape.numel(), mmap.PAGESIZE
    assert count % 16 == 0 and count <= page, "a tape of another length is copied"
    memory = mmap.mmap(-1, 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    last = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=page - count)
    last.copy_(tape)
    weight = draw(8, patches.values, dtype=torch.float32).requires_grad_()
    child = os.fork()
    if child == 0:
        try:
            patch_embed(last, patches, weight, impl="triton").sum().backward()  # type: ignore[no-untyped-call]
            payload_error(torch.ones(len(patches.rows_N), patches.values), last, patches, impl="triton")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def chunks_of(lengths: list[int], size: int) -> tuple[Tensor, Chunks]:
    """A tape of recordings, each at a multiple of 16 bytes, NaN between them."""
    offset: list[int] = []
    extent: list[tuple[int, int, int]] = []
    token: list[int] = []
    at = 0
    samples = torch.full((sum(-(-n // 4) * 4 for n in lengths),), float("nan"))
    for i, n in enumerate(lengths):
        samples[at // 4 : at // 4 + n] = draw(n, dtype=torch.float32, seed=i)
        count = -(-n // size)
        offset += [at] * count
        extent += [(1, 1, n)] * count
        token += range(count)
        at += -(-n // 4) * 16
    places = locate_chunks(torch.tensor(offset), torch.tensor(extent, dtype=torch.int32).view(-1, 3), torch.tensor(token), size)
    return samples[: (at - 16) // 4 + (lengths[-1] - 1) % 4 + 1].view(torch.uint8) if lengths else samples.view(torch.uint8), places


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "lengths"), [(7, [38, 1, 7]), (320, [1603, 1, 320]), (64, [64 * 63 + 2]), (5, [])])
def test_chunk_embed(compare: Compare, size: int, lengths: list[int], dtype: torch.dtype) -> None:
    tape, chunks = chunks_of(lengths, size)

    def op(weight: Tensor, impl: Any) -> Tensor:
        at = Chunks(chunks.offset_N.to(weight.device).long(), chunks.samples_N.to(weight.device).long(), size)
        return chunk_embed(tape.to(weight.device), at, weight, impl=impl)

    compare(op, draw(63, size, dtype=dtype) / size**0.5)


def test_autocast_sets_the_products_dtype(device: torch.device) -> None:
    """fp32 masters under autocast: bf16 products and outputs, fp32 gradients."""
    tape, patches = patches_of([(1, 9, 9)], 1, 4, 3)
    weight = draw(24, patches.values, dtype=torch.float32).to(device).requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = patch_embed(tape.to(device), on(device, patches), weight, impl="triton")
    assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.float().sum(), weight)
    want = patch_embed(tape.to(device), on(device, patches), weight.detach().bfloat16(), impl="triton")
    assert torch.equal(out, want)
    assert gradient.dtype == torch.float32
