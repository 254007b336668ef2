"""Every Triton kernel with the settings it ships with: what launches read, what the compile report builds, what docs tabulate.

A file `<name>_kernels.py` imports triton, holds the kernels, and enters each with `declare`. Callers import it on first use, so that
nothing else needs triton. Settings are fixed per architecture: nothing is tuned at run time.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

Arch = Literal[80, 90, 100]
ARCHES: tuple[Arch, ...] = (80, 90, 100)
"""Compute capabilities that settings and the compile report know: A100, H100 and H200, B200."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one kernel runs on one architecture."""

    blocks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tile sizes, by the kernel's parameter names."""
    warps: int = 4
    stages: int = 2
    """Depth of the software pipeline of the kernel's loop."""
    max_registers: int = 0
    """Registers that the compiler may give a thread; 0 leaves it to the compiler."""

    def options(self) -> dict[str, Any]:
        """What Triton calls these."""
        # Triton 3.10 turns fusion off where nothing is said.
        chosen = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return chosen | ({"maxnreg": self.max_registers} if self.max_registers else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The reference step that costs are counted for."""

    positions: int = 64 * 1024
    hidden: int = 1024
    depth: int = 24
    inner: int = 2816
    """Width between SwiGLU's products."""
    segment_length: int = 256
    """Positions of a segment, alike for all."""
    text_positions: int = 16 * 1024
    image_patches: int = 24 * 1024
    video_tubes: int = 16 * 1024
    audio_chunks: int = 8 * 1024
    visible_share: float = 0.25
    """Share of patches, tubes and chunks that show their payload."""
    image_values: int = 16 * 16 * 4
    video_values: int = 2 * 16 * 16 * 3
    audio_values: int = 320

    @property
    def segments(self) -> int:
        """Segments of a batch."""
        return self.positions // self.segment_length

    @property
    def heads(self) -> int:
        """Heads of 64 channels."""
        return self.hidden // 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one launch of a kernel moves and computes."""

    bytes: float
    """Read from and written to global memory, each value once."""
    matrix_operations: float = 0
    """Multiplications and additions on tensor cores, bf16."""
    launches: int = 1
    """Launches of it in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One form of a kernel that the compile report builds."""

    signature: Mapping[str, str]
    """Triton type of each parameter that is no constant: `*bf16`, `i32`, `fp32`, ..."""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Compile-time constants beside the settings' tile sizes."""
    divisible: tuple[str, ...] = ()
    """Integer parameters that 16 divides; pointers always count as aligned to 16 bytes."""
    label: str = ""
    """Told apart in the report as `kernel[label]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel, its settings and how it is reported."""

    name: str
    function: Any
    """What `triton.jit` made."""
    kind: Literal["matrix", "streaming", "other"]
    """`matrix`: needs the architecture's tensor-core instructions. `streaming`: bandwidth bounds it, so it needs 16-byte accesses."""
    settings: Mapping[Arch, Settings]
    wide_settings: Settings | None = None
    """For fp32 operands of matrix kernels, whose tiles take twice the shared memory, and for rows too long for `settings`."""
    interpreter_settings: Settings | None = None
    """In Triton's interpreter, where a program costs milliseconds whatever it does; by default those of sm_90."""
    builds: tuple[Build, ...]
    cost: Callable[[Workload], Cost]

    def settings_on(self, device: torch.device, *, wide: bool = False) -> Settings:
        """The settings of a launch on `device`; the interpreter has no shared memory to run out of."""
        if device.type != "cuda":
            return self.interpreter_settings or self.settings[90]
        if wide and self.wide_settings is not None:
            return self.wide_settings
        return self.settings[architecture(device)]

    def launch(
        self, device: torch.device, grid: Callable[[Mapping[str, int]], tuple[int, ...]], *args: Any, wide: bool = False, **constants: Any
    ) -> None:
        """Runs the kernel.

        Args:
            grid: the programs, from the tile sizes by name; nothing runs where one of them is 0.
            args: parameters that are no constants, in order.
            wide: take `wide_settings` where there are any.
            constants: compile-time constants beside the tile sizes.
        """
        settings = self.settings_on(device, wide=wide)
        programs = grid(settings.blocks)
        if 0 in programs:
            return
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.function[programs](*args, **constants, **settings.blocks, **settings.options())
        else:
            self.function[programs](*args, **constants, **settings.blocks)


_declared: dict[str, Kernel] = {}


def declare(
    *,
    name: str,
    function: Any,
    kind: Literal["matrix", "streaming", "other"],
    settings: Settings | Mapping[Arch, Settings],
    builds: tuple[Build, ...],
    cost: Callable[[Workload], Cost],
    wide_settings: Settings | None = None,
    interpreter_settings: Settings | None = None,
) -> Kernel:
    """Enters a kernel; one `Settings` stands for all architectures."""
    by_arch: Mapping[Arch, Settings] = dict.fromkeys(ARCHES, settings) if isinstance(settings, Settings) else settings
    assert name not in _declared, f"kernel {name} is declared twice"
    assert set(by_arch) == set(ARCHES), f"kernel {name} has settings for {sorted(by_arch)}"
    kernel = Kernel(
        name=name,
        function=function,
        kind=kind,
        settings=by_arch,
        wide_settings=wide_settings,
        interpreter_settings=interpreter_settings,
        builds=builds,
        cost=cost,
    )
    _declared[name] = kernel
    return kernel


def all_kernels() -> Iterator[Kernel]:
    """Every kernel, by name; imports the files that declare them, and so triton."""
    for file in sorted(Path(__file__).parent.glob("*_kernels.py")):
        importlib.import_module(f"treadle.kernels.{file.stem}")
    yield from (_declared[name] for name in sorted(_declared))


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> Arch:
    """Whose settings a CUDA device takes: the newest architecture that is not newer than its own."""
    major, _ = torch.cuda.get_device_capability(device)
    return 100 if major >= 10 else 90 if major == 9 else 80


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
