"""Ops of the step: a torch reference beside each, and the dispatcher that picks an implementation.

Each op is imported from its own module, `from treadle.kernels.segment_attention import segment_attention`; README.md lists them.
"""

from treadle.kernels.dispatch import Impl, choose, register

__all__ = ["Impl", "choose", "register"]
