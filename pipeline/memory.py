"""Whether the host can hold one batch: counted before anything is allocated, so that a refusal names fields and not an allocator."""

import os
import sys
from pathlib import Path
from typing import Final

from treadle.pipeline.layout import Capacities, Layout
from treadle.shape import BatchShape

_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

MAX_UNCHECKED_BYTES: Final = 2**26
"""Any machine has this; asking for what it has takes as long as making a small batch."""


def host_bytes() -> int:
    """Memory that this process can have at most: the machine's, or what its container or `ulimit -v` leaves of it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else [2**63]
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        limits += [int(text)] if text.strip().isdigit() else []
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [soft] if soft != resource.RLIM_INFINITY else []
    return min(limits)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.1f} GiB"


def check_memory(shape: BatchShape, capacities: Capacities, layout: Layout) -> None:
    """Checks that the host can hold one batch.

    Raises:
        ValueError: it cannot; the message names the fields that make it large, its bytes and the memory there is.
    """
    if layout.total_bytes <= MAX_UNCHECKED_BYTES or layout.total_bytes <= (there := host_bytes()):
        return
    edges = 3 * 8 * capacities.edges
    choices = sum(layout.fields[name].nbytes for name in ("choice_data", "choice_target_data"))
    positions = layout.fields["position_segment"].nbytes + shape.tape_bytes
    parts = {
        f"max_edges, {capacities.edges}": edges,
        f"BatchShape.max_choices_per_item, {shape.max_choices_per_item}": choices,
        f"BatchShape.max_rows_per_device x max_columns_per_row, {shape.max_rows_per_device} x {shape.max_columns_per_row}": positions,
        f"BatchShape.max_segments_per_device, {capacities.segments}": layout.total_bytes - edges - choices - positions,
    }
    widest = max(parts, key=lambda name: parts[name])
    raise ValueError(
        f"a batch takes {gib(layout.total_bytes)} ({layout.total_bytes:,} bytes), the host has {gib(there)}: most of it, "
        f"{gib(parts[widest])}, is for {widest}; lower it"
    )
