"""Dots and roundings inside kernels that are right on the device and in Triton's interpreter.

The interpreter computes on the bits of bf16 values as if they were integers, and truncates where the device rounds to nearest even.
Kernels therefore load, convert to fp32, compute, and convert back with `narrow`; products go through `dot`.
"""

import os
from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a: "Any", b: "Any", acc: "Any") -> "Any":
    """`acc + a @ b` in fp32: tensor cores for bf16, plain fp32 products for fp32."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x: "Any", dtype: tl.constexpr) -> "Any":
    """fp32 to `dtype`, rounded to nearest even."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            rounded = tl.where(x != x, bits, rounded)
            return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)
        else:
            return x.to(dtype)
    else:
        return x.to(dtype)
