"""Models that no device here could hold: refused before anything is allocated, by the fields that made them so large."""

from collections.abc import Callable

import pytest
import torch

from treadle.model import LateInteraction, Trainer, TrainerConfig
from treadle.model.memory import BYTES_PER_PARAMETER, check_memory, naming_memory
from treadle.model.network import Network
from treadle.shape import AudioShape, BatchShape

CPU = torch.device("cpu")


def test_a_model_larger_than_the_memory_is_refused_by_its_fields(tiny: Callable[..., TrainerConfig]) -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.hidden is 65536 and depth 1024: .* parameters .* GiB: lower hidden or depth$"):
        Trainer(tiny(hidden=65536, depth=1024))


@pytest.mark.parametrize(
    ("changes", "widest"),
    [
        (
            {
                "batch": BatchShape(
                    max_rows_per_device=1, max_segments_per_device=1, max_columns_per_row=2, audio=AudioShape(chunk_samples=10**6)
                )
            },
            "tower.embedding.audio",
        ),
        ({"late_interaction": LateInteraction(weight=1, width=2**31 - 8)}, "token_head.weight"),
    ],
)
def test_what_widens_a_model_beside_its_blocks_is_named(
    tiny: Callable[..., TrainerConfig], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], widest: str
) -> None:
    monkeypatch.setattr("treadle.model.memory.host_bytes", lambda: 2**30)
    with pytest.raises(ValueError, match=f"the largest, {widest}, is .*: lower hidden or depth, or what makes {widest} wide$"):
        check_memory(tiny(**changes), CPU)


def test_every_byte_of_the_state_counts_and_shared_blocks_count_once(
    tiny: Callable[..., TrainerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    sizes = {name: p.numel() for name, p in Network(config).named_parameters()}
    whole = sum(sizes.values())
    monkeypatch.setattr("treadle.model.memory.host_bytes", lambda: BYTES_PER_PARAMETER * whole)
    check_memory(config, CPU)
    monkeypatch.setattr("treadle.model.memory.host_bytes", lambda: BYTES_PER_PARAMETER * whole - 1)
    with pytest.raises(ValueError, match=f"{whole:,} parameters"):
        check_memory(config, CPU, 4)
    check_memory(tiny(parallel="shard"), CPU, 4)
    blocks = sum(size for name, size in sizes.items() if name.startswith("tower.blocks."))
    monkeypatch.setattr("treadle.model.memory.host_bytes", lambda: BYTES_PER_PARAMETER * (whole - blocks + blocks // 4) - 1)
    with pytest.raises(ValueError, match="lower hidden or depth"):
        check_memory(tiny(parallel="shard"), CPU, 4)


def test_memory_that_ran_out_is_named_and_other_errors_pass(tiny: Callable[..., TrainerConfig]) -> None:
    ran_out = (MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    for error in ran_out:
        with pytest.raises(ValueError, match=r"TrainerConfig\.hidden is 128 and depth \d+: memory ran out"), naming_memory(tiny()):
            raise error
    with pytest.raises(RuntimeError, match="another"), naming_memory(tiny()):
        raise RuntimeError("another")
