"""Masked payload error in Triton: one program per patch, tube or chunk reads its payload from the tape, standardises and compares.

Bytes: predictions and payloads once forward; once more and the gradient out backward, which makes the targets again. About 20 operations
a value: bandwidth bounds both.

Eight values are two neighbouring words of the tape (three, where a row of pixels starts between words) and one access of 16 bytes of
predictions. Where runs are no multiple of 8 bytes, values are loaded one by one.
Legend: N positions, V values of a payload.
"""

from typing import Any

import triton
import triton.language as tl

from treadle.kernels.device_functions import narrow
from treadle.kernels.registry import Build, Cost, Settings, Workload, declare

EPS = tl.constexpr(1e-6)


@triton.jit
def standardised_error(x: "Any", inside: "Any", prediction: "Any", count: "Any") -> "Any":
    """Prediction less standardised value, 0 outside, for one payload in a tile."""
    values = tl.maximum(count, 1.0)
    centred = tl.where(inside, x - tl.sum(tl.where(inside, x, 0.0)) / values, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / values + EPS)
    return tl.where(inside, prediction - centred * scale, 0.0)


@triton.jit
def _patch_error_kernel(
    p_prediction: "Any", p_words: "Any", p_bytes: "Any", p_offset: "Any", p_row_pitch: "Any", p_frame_pitch: "Any", p_rows: "Any",
    p_columns: "Any", p_by_total: "Any", p_out: "Any", tape_words: "Any", stride: "Any",
    FRAMES: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr, BY_WORDS: tl.constexpr, BACKWARD: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """Error `[N]`, or its gradient by the prediction `[N, V]`, of one patch or tube, in groups of 8 values."""
    n = tl.program_id(0).to(tl.int64)
    offset = tl.load(p_offset + n)
    row_pitch, frame_pitch = tl.load(p_row_pitch + n), tl.load(p_frame_pitch + n)
    rows, columns = tl.load(p_rows + n), tl.load(p_columns + n)
    run_bytes: tl.constexpr = SIDE * CHANNELS
    values: tl.constexpr = FRAMES * SIDE * run_bytes
    o_g = tl.arange(0, GROUPS)
    o_b = tl.arange(0, 8)
    v = o_g[:, None] * 8 + o_b[None, :]
    run = v // run_bytes
    column = (v % run_bytes) // CHANNELS
    inside = (run % SIDE < rows) & (column < columns) & (v < values)
    if BY_WORDS:
        o_run = (o_g * 8) // run_bytes
        byte = offset + (o_run // SIDE) * frame_pitch + (o_run % SIDE) * row_pitch + (o_g * 8) % run_bytes
        m_g = (o_run % SIDE < rows) & (((o_g * 8) % run_bytes) // CHANNELS < columns) & (o_g * 8 < values)
        word = byte >> 2
        shift = (byte & 3) * 8
        w0 = tl.load(p_words + word, mask=m_g, other=0).to(tl.int64) & 0xFFFFFFFF
        w1 = tl.load(p_words + word + 1, mask=m_g & (word + 1 < tape_words), other=0).to(tl.int64) & 0xFFFFFFFF
        w2 = tl.load(p_words + word + 2, mask=m_g & (word + 2 < tape_words) & (shift > 0), other=0).to(tl.int64) & 0xFFFFFFFF
        low = (w0 | (w1 << 32)) >> shift
        low = tl.where(shift > 0, low & ((1 << (64 - tl.maximum(shift, 1))) - 1), low)
        eight = low | tl.where(shift > 0, w2 << (64 - tl.maximum(shift, 1)), 0)
        x = ((eight[:, None] >> (o_b[None, :] * 8)) & 255).to(tl.float32)
    else:
        place = offset + (run // SIDE) * frame_pitch + (run % SIDE) * row_pitch + v % run_bytes
        x = tl.load(p_bytes + place, mask=inside, other=0).to(tl.float32)
    m_v = v < values
    prediction = tl.load(p_prediction + n * stride + v, mask=m_v, other=0.0).to(tl.float32)
    count = (rows * columns * (FRAMES * CHANNELS)).to(tl.float32)
    difference = standardised_error(x, inside, prediction, count)
    if BACKWARD:
        slope = difference * (2.0 * tl.load(p_by_total).to(tl.float32) / tl.maximum(count, 1.0))
        tl.store(p_out + n * values + v, narrow(slope, p_out.dtype.element_ty), mask=m_v)
    else:
        tl.store(p_out + n, tl.sum(difference * difference) / tl.maximum(count, 1.0))


@triton.jit
def _chunk_error_kernel(
    p_prediction: "Any", p_samples: "Any", p_offset: "Any", p_count: "Any", p_by_total: "Any", p_out: "Any", stride: "Any",
    SIZE: tl.constexpr, ALIGNED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Error `[N]`, or its gradient by the prediction `[N, V]`, of one chunk."""
    n = tl.program_id(0).to(tl.int64)
    offset, samples = tl.load(p_offset + n), tl.load(p_count + n)
    v = tl.arange(0, BLOCK_V)
    inside = v < samples
    # Payloads start at multiples of 16 bytes, and so do chunks of a multiple of 4 samples: said this way, the compiler knows.
    first = (offset // 16) * 4 if ALIGNED else offset // 4
    x = tl.load(p_samples + first + v, mask=inside, other=0.0)
    prediction = tl.load(p_prediction + n * stride + v, mask=v < SIZE, other=0.0).to(tl.float32)
    count = samples.to(tl.float32)
    difference = standardised_error(x, inside, prediction, count)
    if BACKWARD:
        slope = difference * (2.0 * tl.load(p_by_total).to(tl.float32) / tl.maximum(count, 1.0))
        tl.store(p_out + n * SIZE + v, narrow(slope, p_out.dtype.element_ty), mask=v < SIZE)
    else:
        tl.store(p_out + n, tl.sum(difference * difference) / tl.maximum(count, 1.0))


def _patch_cost(backward: bool, work: Workload) -> Cost:
    hidden = 1 - work.visible_share
    values = hidden * (work.image_patches * work.image_values + work.video_tubes * work.video_values)
    return Cost(bytes=values * (5.0 if backward else 3.0))


def _chunk_cost(backward: bool, work: Workload) -> Cost:
    return Cost(bytes=(1 - work.visible_share) * work.audio_chunks * work.audio_values * (8.0 if backward else 6.0))


_patch_types = {
    "p_prediction": "*bf16", "p_words": "*i32", "p_bytes": "*u8", "p_offset": "*i64", "p_row_pitch": "*i64", "p_frame_pitch": "*i64",
    "p_rows": "*i64", "p_columns": "*i64", "p_by_total": "*fp32", "tape_words": "i32", "stride": "i32",
}  # fmt: skip
_chunk_types = {
    "p_prediction": "*bf16", "p_samples": "*fp32", "p_offset": "*i64", "p_count": "*i64", "p_by_total": "*fp32", "stride": "i32",
}  # fmt: skip
_images = {"FRAMES": 1, "SIDE": 16, "CHANNELS": 4, "BY_WORDS": True, "GROUPS": 128}
_tubes = {"FRAMES": 2, "SIDE": 16, "CHANNELS": 3, "BY_WORDS": True, "GROUPS": 256}


def _patch_builds(backward: bool) -> tuple[Build, ...]:
    types = _patch_types | {"p_out": "*bf16" if backward else "*fp32"}
    return tuple(
        Build(signature=types, constants=form | {"BACKWARD": backward}, divisible=("stride",), label=label)
        for label, form in (("", _images), ("tubes", _tubes))
    )


PATCH_ERROR_FWD = declare(
    name="patch_error_fwd",
    function=_patch_error_kernel,
    kind="other",
    settings=Settings(warps=4),
    builds=_patch_builds(False),
    cost=lambda work: _patch_cost(False, work),
)
PATCH_ERROR_BWD = declare(
    name="patch_error_bwd",
    function=_patch_error_kernel,
    kind="streaming",
    settings=Settings(warps=4),
    builds=_patch_builds(True),
    cost=lambda work: _patch_cost(True, work),
)
CHUNK_ERROR_FWD = declare(
    name="chunk_error_fwd",
    function=_chunk_error_kernel,
    kind="other",
    settings=Settings(warps=2),
    builds=(
        Build(
            signature=_chunk_types | {"p_out": "*fp32"},
            constants={"SIZE": 320, "ALIGNED": True, "BACKWARD": False, "BLOCK_V": 512},
            divisible=("stride",),
        ),
    ),
    cost=lambda work: _chunk_cost(False, work),
)
CHUNK_ERROR_BWD = declare(
    name="chunk_error_bwd",
    function=_chunk_error_kernel,
    kind="streaming",
    settings=Settings(warps=2),
    builds=(
        Build(
            signature=_chunk_types | {"p_out": "*bf16"},
            constants={"SIZE": 320, "ALIGNED": True, "BACKWARD": True, "BLOCK_V": 512},
            divisible=("stride",),
        ),
    ),
    cost=lambda work: _chunk_cost(True, work),
)
