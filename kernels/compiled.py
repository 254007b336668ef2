"""The elementwise passes of the CPU's reference path, each fused into one by torch.compile where `TREADLE_CPU_COMPILE=1` asks for it.

torch's eager ops go over memory once each: a bf16 step on a CPU with matrix units spends more time in them than in its products. Fused, the
three ops below take 0.4 to 0.6 of their time. It is an option because the first step compiles for a minute or two with the machine's C++
compiler (Inductor keeps the results on disk) and because rounding is another: a run resumes bit for bit under the setting that it had.

The formulas are those of `rms_norm_reference.py`, `swiglu_reference.py` and `rotary_reference.py`, statistics in fp32. Rotary is here for
bf16 alone: a pair of channels is read and written as one 32-bit word, since compiled code cannot load every other channel as vectors.

Legend: P positions, D width, F inner width, H heads, A channel pairs (half the head width).
"""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6
VARIABLE = "TREADLE_CPU_COMPILE"

_NARROW = (torch.bfloat16, torch.float32)


@lru_cache(maxsize=1)
def is_asked() -> bool:
    """Whether the environment asks for compiled passes.

    Raises:
        ValueError: the variable is neither 0 nor 1, or it asks and there is no C++ compiler.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}: it must be 0 or 1")
    if value == "1" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise ValueError(f"{VARIABLE} is 1 and there is no C++ compiler: install g++, name one in CXX, or leave the variable out")
    return value == "1"


def fuses(*tensors: Tensor) -> bool:
    """Whether an op of these tensors runs compiled: on the CPU, where it was asked for, in fp32 or bf16, over two positions or more.

    Raises:
        ValueError: the variable is neither 0 nor 1, or it asks and there is no C++ compiler.
    """
    first = tensors[0]
    return first.device.type == "cpu" and is_asked() and first.shape[0] > 1 and all(x.dtype in _NARROW for x in tensors)


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function`, one of this file's, answers once it is compiled: for any number of positions it is compiled once."""
    with torch.no_grad():
        return _compiled(function)(*arguments)


def rms_norm_forward(x_PD: Tensor, residual_PD: Tensor | None, gain_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows in `dtype`, the sum, and one over each row's root mean square `[P, 1]`."""
    wide_PD = x_PD.float() if residual_PD is None else x_PD.float() + residual_PD.float()
    inverse_P1 = torch.rsqrt(wide_PD.square().mean(-1, keepdim=True) + EPS)
    total_PD = wide_PD if residual_PD is None else wide_PD.to(torch.promote_types(x_PD.dtype, residual_PD.dtype))
    return (wide_PD * inverse_P1 * gain_D).to(dtype), total_PD, inverse_P1


def rms_norm_backward(
    total_PD: Tensor, inverse_P1: Tensor, gain_D: Tensor, dy_PD: Tensor, dtotal_PD: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the sum, in its own type and in `dtype`, and of the gain."""
    normed_PD, dy_PD = total_PD.float() * inverse_P1, dy_PD.float()
    dnormed_PD = dy_PD * gain_D
    along_P1 = (dnormed_PD * normed_PD).mean(-1, keepdim=True)
    dsum_PD = (dnormed_PD - normed_PD * along_P1) * inverse_P1
    if dtotal_PD is not None:
        dsum_PD = dsum_PD + dtotal_PD.float()
    return dsum_PD.to(total_PD.dtype), dsum_PD.to(dtype), (dy_PD * normed_PD).sum(0)


def swiglu_forward(x_P2F: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    gate_PF, up_PF = x_P2F.float().chunk(2, -1)
    return (gate_PF * torch.sigmoid(gate_PF) * up_PF).to(x_P2F.dtype)


def swiglu_backward(x_P2F: Tensor, dout_PF: Tensor) -> Tensor:
    """The gradient of gate and up."""
    gate_PF, up_PF = x_P2F.float().chunk(2, -1)
    sigmoid_PF, dout_PF = torch.sigmoid(gate_PF), dout_PF.float()
    dgate_PF = dout_PF * up_PF * sigmoid_PF * (1 + gate_PF * (1 - sigmoid_PF))
    dup_PF = dout_PF * gate_PF * sigmoid_PF
    # Joined in their final type: of wider parts Inductor makes a pass of their own.
    return torch.cat([dgate_PF.to(x_P2F.dtype), dup_PF.to(x_P2F.dtype)], -1)


def words(x: Tensor) -> Tensor:
    """Pairs of bf16 channels as int32: the even one in the low half (every CPU that torch runs on stores it first)."""
    return x.contiguous().view(torch.int32)


def _even(words_A: Tensor) -> Tensor:
    return (words_A << 16).view(torch.float32)


def _odd(words_A: Tensor) -> Tensor:
    return (words_A & -65536).view(torch.float32)


def _rounded(x: Tensor) -> Tensor:
    """The bits of fp32 values, the upper half rounded to nearest, ties to even; infinities stay, and so do the NaNs that arithmetic makes."""
    bits = x.view(torch.int32)
    return bits + (32767 + ((bits >> 16) & 1))


def _packed(even_A: Tensor, odd_A: Tensor) -> Tensor:
    return ((_rounded(even_A) >> 16) & 65535) | (_rounded(odd_A) & -65536)


def rotary_forward(qk_P2HA: Tensor, gain_22A: Tensor, cosine_PA: Tensor, sine_PA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries and keys in `words`, and one over the root mean square of each head `[P, 2, H, 1]`.

    Args:
        gain_22A: gains of queries and keys, even channels and odd ones.
    """
    even, odd = _even(qk_P2HA), _odd(qk_P2HA)
    inverse_P2H1 = torch.rsqrt((even * even + odd * odd).sum(-1, keepdim=True) / (2 * qk_P2HA.shape[-1]) + EPS)
    even, odd = even * inverse_P2H1 * gain_22A[:, 0, None], odd * inverse_P2H1 * gain_22A[:, 1, None]
    cosine, sine = cosine_PA[:, None, None], sine_PA[:, None, None]
    turned_P2HA = _packed(even * cosine - odd * sine, even * sine + odd * cosine)
    return turned_P2HA[:, 0].contiguous(), turned_P2HA[:, 1].contiguous(), inverse_P2H1


def rotary_backward(
    qk_P2HA: Tensor,
    gain_22A: Tensor,
    cosine_PA: Tensor,
    sine_PA: Tensor,
    inverse_P2H1: Tensor,
    dq_PHA: Tensor,
    dk_PHA: Tensor,
    dv_PHA: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of all three projections in `words` `[P, 3, H, A]`, and of the gains `[2, 2, A]`."""
    even, odd = _even(qk_P2HA) * inverse_P2H1, _odd(qk_P2HA) * inverse_P2H1
    slope_P2HA = torch.stack([dq_PHA, dk_PHA], 1)
    cosine, sine = cosine_PA[:, None, None], sine_PA[:, None, None]
    by_even = _even(slope_P2HA) * cosine + _odd(slope_P2HA) * sine
    by_odd = _odd(slope_P2HA) * cosine - _even(slope_P2HA) * sine
    dgain_22A = torch.stack([(by_even * even).sum((0, 2)), (by_odd * odd).sum((0, 2))], 1)
    by_even, by_odd = by_even * gain_22A[:, 0, None], by_odd * gain_22A[:, 1, None]
    along_P2H1 = (by_even * even + by_odd * odd).sum(-1, keepdim=True) / (2 * qk_P2HA.shape[-1])
    by_qk_P2HA = _packed((by_even - even * along_P2H1) * inverse_P2H1, (by_odd - odd * along_P2H1) * inverse_P2H1)
    return torch.cat([by_qk_P2HA, dv_PHA[:, None]], 1), dgain_22A
