"""Towers that outgrow a device: blocks whose weights are shared out over ranks, by PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every rank holds a slice of each block's parameters, gathers a block's whole weights for as long as it runs, and receives its slice of the
summed gradient. What is no block (embeddings, heads, temperatures) stays replicated: it is little. The optimizer sees one flat buffer as ever,
here of this rank's slices and of what is replicated, so that the step is written once. Checkpoints hold whole parameters whatever the
layout: a run saved under one `parallel` and world size goes on under any other.

`shard` slices over the whole world; `hybrid` over groups of ranks, those of one machine as a rule, and sums between groups.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from treadle.model.config import TrainerConfig
from treadle.model.mesh import World
from treadle.model.network import Network
from treadle.model.optimizer import ALIGNMENT, FlatParameters, euclidean_norm, is_decayed


def shard_ranks(config: TrainerConfig, world: World, hosts: int) -> int:
    """Ranks that share one copy of the blocks.

    Raises:
        ValueError: the world cannot be cut into groups of that many.
    """
    if config.parallel != "hybrid":
        return world.size
    ranks = config.shard_ranks or max(1, world.size // max(1, hosts))
    if world.size % ranks:
        raise ValueError(
            f"TrainerConfig.shard_ranks is {ranks}{'' if config.shard_ranks else ' (derived: the ranks of a machine)'}: it must divide "
            f"the world's {world.size} ranks"
        )
    return ranks


def flat_parameters(config: TrainerConfig, network: Network, world: World, device: torch.device) -> FlatParameters:
    """The parameters of a run in one buffer, sharded where the configuration says so and there is more than one rank (collective)."""
    if config.parallel == "replicate" or world.size == 1:
        return FlatParameters(network)
    hosts = config.mesh.describe().hosts if config.mesh is not None else 1
    return ShardedParameters(network, world, shard_ranks(config, world, hosts), device)


class ShardedParameters(FlatParameters):
    """This rank's slices of the blocks' parameters, and whole the rest, in one buffer: decayed ones first, replicated at both ends.

    Args:
        shards: ranks that share one copy of the blocks.
    """

    is_sharded = True

    def __init__(self, network: Network, world: World, shards: int, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._world, self._network = world, network
        self._shards, self._replicas = shards, world.size // shards
        sizes, names = ((world.size,), ("shard",)) if self._replicas == 1 else ((self._replicas, shards), ("replicate", "shard"))
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        blocks = list(network.tower.blocks)
        inside = {id(p) for block in blocks for p in block.parameters()}
        for block in blocks:
            sharded: Any = fully_shard(block, mesh=mesh)
            # Ranks' losses are divided by the world's counts already: gradients are summed. Gloo cannot scale within a collective.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # Before the block is gathered, so that the watch knows who has not come to it.
            block.register_forward_pre_hook(lambda *_: world.passed(), prepend=True)
        fully_shard(network.tower, mesh=mesh, ignored_params={p for p in network.tower.parameters() if id(p) not in inside})
        # Collectives run within the blocks, so that ranks without items run them too.
        network.runs_when_empty = True
        self._sharded: dict[str, nn.Parameter] = {name: p for name, p in network.named_parameters() if name.startswith("tower.blocks.")}
        named = list(network.named_parameters())
        parts = [
            [(n, p) for n, p in named if is_decayed(p) and n not in self._sharded],
            [(n, p) for n, p in named if is_decayed(p) and n in self._sharded],
            [(n, p) for n, p in named if not is_decayed(p) and n in self._sharded],
            [(n, p) for n, p in named if not is_decayed(p) and n not in self._sharded],
        ]
        self._spans = {}
        at, ends = 0, list[int]()
        for part in parts:
            for name, parameter in part:
                local = _local(parameter)
                self._spans[name] = (at, at + local.numel(), local.shape)
                at += -(-local.numel() // ALIGNMENT) * ALIGNMENT
            ends.append(at)
        self._first_sharded, self.num_decayed, self._end_sharded = ends[0], ends[1], ends[2]
        self.weights = torch.zeros(at, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(at, dtype=torch.float32, device=device)
        with torch.no_grad():
            for name, parameter in named:
                view = self.view(self.weights, name)
                view.copy_(_local(parameter))
                if name not in self._sharded:
                    parameter.data = view
                    parameter.grad = self.view(self.gradients, name)

    def regions(self) -> list[tuple[int, int]]:
        """The replicated ends; slices were summed when they were scattered."""
        return [(0, self._first_sharded), (self._end_sharded, self.gradients.numel())]

    @torch.no_grad()
    def absorb(self) -> None:
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                self.view(self.gradients, name).add_(_local(parameter.grad))
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for name, parameter in self._sharded.items():
            _local(parameter).copy_(self.view(self.weights, name))

    def norm(self) -> Tensor:
        sharded = self.gradients[self._first_sharded : self._end_sharded]
        squares = self._world.all_sum(euclidean_norm(sharded).square()) / self._replicas
        for begin, end in self.regions():
            squares = squares + euclidean_norm(self.gradients[begin:end]).square()
        return squares.sqrt().float()

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._network.named_parameters()

    def whole(self, flat: Tensor, *, copied: bool) -> dict[str, Tensor]:
        """Every whole parameter on rank 0's host, one after the other; nothing on the others (collective)."""
        del copied  # a gathered parameter is a copy
        found = self.own(flat)
        return found if self._world.rank == 0 else {}

    def own(self, flat: Tensor) -> dict[str, Tensor]:
        """Whole blocks, which are alike on all ranks, on rank 0 alone; of the rest every rank's own (collective)."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._network.named_parameters():
            part = self.view(flat, name)
            if name in self._sharded:
                sizes = [end - begin for begin, end in (self._rows(parameter, rank) for rank in range(self._world.size))]
                part = self._world.gather(part.detach(), sizes)[: parameter.shape[0]]
            if self._world.rank == 0 or name not in self._sharded:
                found[name] = part.detach().to("cpu", copy=True)
        return found

    def comes_summed(self, name: str) -> bool:
        return name in self._sharded

    @torch.no_grad()
    def place(self, flat: Tensor, found: Mapping[str, Tensor]) -> None:
        for name, parameter in self._network.named_parameters():
            if name in found:
                value = found[name]
                if name in self._sharded:
                    begin, end = self._rows(parameter, self._world.rank)
                    value = value[begin:end]
                self.view(flat, name).copy_(value)

    def _rows(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Which rows of a parameter a rank holds: chunks of equal size along the first dimension, the last ones shorter or empty."""
        rows = parameter.shape[0]
        chunk = -(-rows // self._shards)
        begin = min(rows, (rank % self._shards) * chunk)
        return begin, min(rows, begin + chunk)


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 has distributed, the tensor itself where it has not."""
    to_local = getattr(parameter, "to_local", None)
    local: Tensor = parameter.detach() if to_local is None else to_local().detach()
    return local
