"""Whether a device can hold a run's weights: counted before anything is allocated, so that a refusal names fields and not an allocator."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from treadle.model.config import TrainerConfig
from treadle.model.network import Network
from treadle.pipeline.memory import gib, host_bytes

BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and two moments."""


def device_bytes(device: torch.device) -> int:
    """Memory of the device that trains."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes()


def check_memory(config: TrainerConfig, device: torch.device, ranks: int = 1) -> None:
    """Checks that the device can hold this rank's weights, gradients and moments, and the host the network that its first values are drawn in.

    Args:
        ranks: of the world, which share the blocks where the configuration says so.

    Raises:
        ValueError: it cannot; the message names the fields, the bytes and the memory there is.
    """
    with torch.device("meta"):
        parameters = dict(Network(config).named_parameters())
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    whole = sum(sizes.values())
    blocks = sum(size for name, size in sizes.items() if name.startswith("tower.blocks."))
    shards = {"replicate": 1, "shard": ranks, "hybrid": config.shard_ranks or ranks}[config.parallel]
    own = whole - blocks + blocks // shards
    for place, needed, there in (
        (f"device {device}", own * BYTES_PER_PARAMETER, device_bytes(device)),
        ("host", whole * 4, host_bytes()),
    ):
        if needed > there:
            widest = max(sizes, key=lambda name: sizes[name])
            also = "" if widest.startswith("tower.blocks.") else f", or what makes {widest} wide"
            raise ValueError(
                f"TrainerConfig.hidden is {config.hidden} and depth {config.depth}: {whole:,} parameters (the largest, {widest}, is "
                f"{list(parameters[widest].shape)}) take {gib(needed)} of the {place}, which has {gib(there)}: lower hidden or depth{also}"
            )


@contextmanager
def naming_memory(config: TrainerConfig) -> Generator[None]:
    """Turns an allocation that failed all the same, because others use the memory, into an error that names the fields.

    Raises:
        ValueError: memory ran out within.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ValueError(
            f"TrainerConfig.hidden is {config.hidden} and depth {config.depth}: memory ran out while the model was made; lower them, or free "
            "what other processes hold"
        ) from error
