"""Patch and tube embedding in Triton, straight from raw pixels on the tape, and the weight's gradient.

`2 x - 255` is an odd integer of 8 bits that bf16 holds exactly, so the product runs on it and is divided by 255 afterwards: no rounding of
pixels, no mean, and zeros outside the picture are exact. The tape is read in words of 4 bytes, the widest that unpadded rows allow;
where rows are not aligned to words, two neighbours are shifted into one. A patch's runs count as whole words: those bytes of a word that
no pixel has meet a weight of zero.

Operations: `2 N V D` forward and again for the gradient. Bytes moved: `N V` pixels, `2 N D` out and `2 V D` of weights forward; pixels, `2 N D`
and `8 * 4 V D` of partial sums for the gradient. At V = D = 1024 that is 1,000 operations a byte: tensor cores bound both.
Legend: N patches, V values of a patch, D width, M patches and W words of a tile, G splits.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import dot, narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's annotations are those of its host side.


@triton.jit
def _pixels(
    tape_words: "Any",
    words: "Any",
    offset_M: "Any",
    row_pitch_M: "Any",
    frame_pitch_M: "Any",
    rows_M: "Any",
    bytes_M: "Any",
    word_W: "Any",
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    FRAMES: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    dtype: tl.constexpr,
) -> "Any":
    """`2 x - 255` of `[M, 4 W]` bytes in (frame, row, byte of the padded run) order, zeros where no pixel is."""
    RUN_WORDS: tl.constexpr = (SIDE * CHANNELS + 3) // 4
    run_W = word_W // RUN_WORDS
    byte_W = (word_W % RUN_WORDS) * 4
    row_W = run_W % SIDE
    if FRAMES == 1:
        ahead = row_W[None, :] * row_pitch_M[:, None] + byte_W[None, :]
        inside = (row_W[None, :] < rows_M[:, None]) & (byte_W[None, :] < bytes_M[:, None])
    else:
        frame_W = run_W // SIDE
        ahead = frame_W[None, :] * frame_pitch_M[:, None] + row_W[None, :] * row_pitch_M[:, None] + byte_W[None, :]
        inside = (frame_W < FRAMES)[None, :] & (row_W[None, :] < rows_M[:, None]) & (byte_W[None, :] < bytes_M[:, None])
    inside &= (run_W < FRAMES * SIDE)[None, :]
    first_M = offset_M >> 2
    p_M = tape_words + first_M
    if CHANNELS % 4 == 0:
        b_w = tl.load(p_M[:, None] + (ahead >> 2), mask=inside, other=0)
    else:
        ahead += (offset_M & 3).to(tl.int32)[:, None]
        b_w = tl.load(p_M[:, None] + (ahead >> 2), mask=inside, other=0)
        # The last word of the tape has no neighbour, and nothing of one is needed there.
        has_next = inside & ((ahead >> 2) + 1 < (words - first_M).to(tl.int32)[:, None])
        b_next = tl.load(p_M[:, None] + (ahead >> 2) + 1, mask=has_next, other=0)
        shift = ((ahead & 3) * 8).to(tl.uint32)
        b_w = (b_w.to(tl.uint32) >> shift) | ((b_next.to(tl.uint32) << 1) << (31 - shift))
        b_w = b_w.to(tl.int32, bitcast=True)
    left = tl.where(inside, bytes_M[:, None] - byte_W[None, :], 0)
    j = tl.arange(0, 4)
    x = (b_w[:, :, None] >> (8 * j)[None, None, :]) & 255
    # The bits of 2^23 + x: subtracting 2^23 leaves x without a conversion of integers.
    x = ((x | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * 2.0 - 255.0
    x = tl.where(left[:, :, None] > j[None, None, :], x, 0.0)
    # Exact in every dtype.
    return tl.reshape(x.to(dtype), [M, 4 * W])


@triton.jit
def _weight_columns(byte_B: "Any", SIDE: tl.constexpr, CHANNELS: tl.constexpr, FRAMES: tl.constexpr) -> "Any":
    """The weight's column of each byte of padded runs, and whether there is one."""
    RUN: tl.constexpr = SIDE * CHANNELS
    PADDED: tl.constexpr = (RUN + 3) // 4 * 4
    if RUN == PADDED:
        return byte_B, byte_B < FRAMES * SIDE * RUN
    else:
        return byte_B // PADDED * RUN + byte_B % PADDED, (byte_B % PADDED < RUN) & (byte_B < FRAMES * SIDE * PADDED)


@triton.jit
def _patch_embed_fwd_kernel(
    tape_words: "Any",
    offset_N: "Any",
    row_pitch_N: "Any",
    frame_pitch_N: "Any",
    rows_N: "Any",
    columns_N: "Any",
    weight_DV: "Any",
    out_ND: "Any",
    N: "Any",
    words: "Any",
    all_words: "Any",
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    FRAMES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """`words`: of the tape. `all_words`: of a patch, at run time so that the loop is not unrolled."""
    V: tl.constexpr = FRAMES * SIDE * SIDE * CHANNELS
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    # Column tiles run fastest: the pixels of a block are read again from the second-level cache.
    o_m = (tl.program_id(0) // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = (tl.program_id(0) % TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_m = o_m < N
    m_d = o_d < D
    offset_M = tl.load(offset_N + o_m, mask=m_m, other=0)
    row_pitch_M = tl.load(row_pitch_N + o_m, mask=m_m, other=0).to(tl.int32)
    frame_pitch_M = tl.load(frame_pitch_N + o_m, mask=m_m, other=0).to(tl.int32)
    rows_M = tl.load(rows_N + o_m, mask=m_m, other=0).to(tl.int32)
    bytes_M = tl.load(columns_N + o_m, mask=m_m, other=0).to(tl.int32) * CHANNELS
    # A block of padding alone has no rows, and nothing to multiply.
    high = tl.where(tl.max(rows_M) > 0, all_words, 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for w in range(0, high, BLOCK_W):
        b_x = _pixels(
            tape_words,
            words,
            offset_M,
            row_pitch_M,
            frame_pitch_M,
            rows_M,
            bytes_M,
            w + tl.arange(0, BLOCK_W),
            SIDE,
            CHANNELS,
            FRAMES,
            BLOCK_M,
            BLOCK_W,
            weight_DV.dtype.element_ty,
        )
        column_B, m_B = _weight_columns(4 * w + tl.arange(0, 4 * BLOCK_W), SIDE, CHANNELS, FRAMES)
        p_weight = weight_DV + o_d[:, None] * V + column_B[None, :]
        b_weight = tl.load(p_weight, mask=m_d[:, None] & m_B[None, :], other=0.0)
        # [M, B] x [B, D]
        acc = dot(b_x, tl.trans(b_weight), acc)
    mask = m_m[:, None] & m_d[None, :]
    tl.store(out_ND + o_m[:, None] * D + o_d[None, :], narrow(acc / 255.0, out_ND.dtype.element_ty), mask=mask)


@triton.jit
def _patch_embed_dw_kernel(
    tape_words: "Any",
    offset_N: "Any",
    row_pitch_N: "Any",
    frame_pitch_N: "Any",
    rows_N: "Any",
    columns_N: "Any",
    dout_ND: "Any",
    partials_GDV: "Any",
    N: "Any",
    p_end: "Any",
    words: "Any",
    stride_n: "Any",
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    FRAMES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Patches are dealt to splits; each leaves its partial sums. `p_end`: how many there are up to the last that has rows."""
    V: tl.constexpr = FRAMES * SIDE * SIDE * CHANNELS
    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i_g = tl.program_id(2).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_d = o_d < D
    # In blocks, so that the compiler knows what divides the bounds.
    blocks = tl.cdiv(tl.load(p_end).to(tl.int32), BLOCK_M)
    share = tl.cdiv(blocks, SPLITS)
    low = tl.program_id(2) * share
    high = tl.minimum(low + share, blocks) * BLOCK_M
    low *= BLOCK_M
    acc = tl.zeros([BLOCK_D, 4 * BLOCK_W], tl.float32)
    for n in range(low, high, BLOCK_M):
        i_n = n + tl.zeros([], tl.int64) + o_m
        m_m = n + o_m < N
        b_x = _pixels(
            tape_words,
            words,
            tl.load(offset_N + i_n, mask=m_m, other=0),
            tl.load(row_pitch_N + i_n, mask=m_m, other=0).to(tl.int32),
            tl.load(frame_pitch_N + i_n, mask=m_m, other=0).to(tl.int32),
            tl.load(rows_N + i_n, mask=m_m, other=0).to(tl.int32),
            tl.load(columns_N + i_n, mask=m_m, other=0).to(tl.int32) * CHANNELS,
            o_w,
            SIDE,
            CHANNELS,
            FRAMES,
            BLOCK_M,
            BLOCK_W,
            dout_ND.dtype.element_ty,
        )
        b_dout = tl.load(dout_ND + i_n[:, None] * stride_n + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        # [D, M] x [M, B]
        acc = dot(tl.trans(b_dout), b_x, acc)
    column_B, m_B = _weight_columns(tl.program_id(0) * (4 * BLOCK_W) + tl.arange(0, 4 * BLOCK_W), SIDE, CHANNELS, FRAMES)
    p_out = partials_GDV + i_g * (D * V) + o_d[:, None] * V + column_B[None, :]
    tl.store(p_out, acc / 255.0, mask=m_d[:, None] & m_B[None, :])


def _fwd_cost(work: Workload) -> Cost:
    """The mean of two launches, pictures and clips: blocks of padding multiply nothing."""
    images, tubes, hidden = work.visible_share * work.image_patches, work.visible_share * work.video_tubes, work.hidden
    pixels = images * work.image_values + tubes * work.video_values
    size = pixels + 2.0 * (images + tubes + work.image_values + work.video_values) * hidden
    return Cost(bytes=size / 2, matrix_operations=pixels * hidden, launches=2)


def _dw_cost(work: Workload) -> Cost:
    """The mean of two launches, pictures and clips: what is padded past the last patch is neither read nor multiplied."""
    images, tubes, hidden = work.visible_share * work.image_patches, work.visible_share * work.video_tubes, work.hidden
    pixels = images * work.image_values + tubes * work.video_values
    size = pixels + 2.0 * (images + tubes) * hidden + 8 * 4.0 * (work.image_values + work.video_values) * hidden
    return Cost(bytes=size / 2, matrix_operations=pixels * hidden, launches=2)


_PLACES = {name: "*i64" for name in ("offset_N", "row_pitch_N", "frame_pitch_N", "rows_N", "columns_N")} | {
    "tape_words": "*i32",
    "words": "i32",
}
_FORMS = (("image", {"SIDE": 16, "CHANNELS": 4, "FRAMES": 1, "D": 1024}), ("tube", {"SIDE": 16, "CHANNELS": 3, "FRAMES": 2, "D": 1024}))

PATCH_EMBED_FWD = declare(
    name="patch_embed_fwd",
    function=_patch_embed_fwd_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_W": 16}, warps=8, stages=3),
        90: Settings({"BLOCK_M": 64, "BLOCK_D": 256, "BLOCK_W": 16}, warps=8, stages=3),
        100: Settings({"BLOCK_M": 128, "BLOCK_D": 128, "BLOCK_W": 16}, warps=8, stages=3),
    },
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_W": 8}, warps=4, stages=2),
    interpreter_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_W": 64}),
    builds=tuple(
        Build(
            signature=_PLACES | {"weight_DV": "*bf16", "out_ND": "*bf16", "N": "i32", "all_words": "i32"},
            constants=constants,
            divisible=("N", "words", "all_words"),
            label=label,
        )
        for label, constants in _FORMS
    ),
    cost=_fwd_cost,
)
PATCH_EMBED_DW = declare(
    name="patch_embed_dw",
    function=_patch_embed_dw_kernel,
    kind="matrix",
    settings={
        80: Settings({"BLOCK_M": 32, "BLOCK_D": 128, "BLOCK_W": 32, "SPLITS": 8}, warps=8, stages=3),
        90: Settings({"BLOCK_M": 32, "BLOCK_D": 128, "BLOCK_W": 32, "SPLITS": 8}, warps=8, stages=3),
        100: Settings({"BLOCK_M": 32, "BLOCK_D": 128, "BLOCK_W": 32, "SPLITS": 8}, warps=8, stages=3),
    },
    wide_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_W": 8, "SPLITS": 8}, warps=4, stages=2),
    interpreter_settings=Settings({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_W": 64, "SPLITS": 3}),
    builds=tuple(
        Build(
            signature=_PLACES | {"dout_ND": "*bf16", "partials_GDV": "*fp32", "N": "i32", "p_end": "*i64", "stride_n": "i32"},
            constants=constants,
            divisible=("N", "words", "stride_n"),
            label=label,
        )
        for label, constants in _FORMS
    ),
    cost=_dw_cost,
)
