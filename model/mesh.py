"""The world of ranks that train one tower together: how it meets, and the few collectives that a step needs.

Only this file, `mesh_store.py` and `parallel.py` import torch.distributed, and only when there is more than one process. A world of one is
the identity, so that the step is written once. Device tensors travel by NCCL or gloo; what the host knows anyway (counts, flags) travels by gloo, without waiting for
the device.

Suffixes: N items of the whole world, S of this rank, D any width.
"""

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from treadle.model.config import MeshOptions
from treadle.model.device import pick_device
from treadle.model.mesh_rendezvous import arrive, meet
from treadle.model.mesh_traffic import Traffic, gather_bytes, sum_bytes
from treadle.model.mesh_watch import Watch
from treadle.shape import require_member

logger = logging.getLogger(__name__)

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in slices of this many bytes, cut at the same places in every step."""

MAX_MESSAGE_BYTES = 2**36

WATCH_GRACE_S = 30.0
"""How much longer than the watch the backend waits, which names nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshDescription:
    """What a world is made of."""

    world_size: int
    rank: int
    hosts: int
    """Machines."""
    backend: str
    """`nccl` or `gloo`; `none` for a process alone."""
    gpu_class: str
    """The architecture of this process's device, such as `sm_90`; `cpu` without one."""
    multimem_tier: str
    """`multicast` where the GPUs of a host can reduce in the switch, else `none`."""


class World:
    """A world of one process: every collective is the identity. `ProcessWorld` is the rest."""

    rank = 0
    size = 1
    after_rows: Callable[[], None] | None = None
    """Called when a backward pass has brought gathered rows' gradients back."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """What this rank has sent."""

    def close(self) -> None:
        """Ends what watches over the collectives."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since it joined."""
        return self.traffic.total

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Marks a wait that ends when all ranks have come as far, so that a rank that hangs is named."""
        return nullcontext()

    def passed(self) -> None:
        """Tells of a place, before a collective that is not this world's, that every rank passes equally often."""

    def gather(self, x_SD: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' rows in rank order, `[N, ...]`; differentiable, the backward pass sums over ranks what each took from a row.

        Args:
            sizes: rows of each rank, where the caller knows them; exchanged otherwise.
        """
        del sizes
        return x_SD

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on all; in place."""
        return x

    def sum_gradients(self, flat: Tensor) -> None:
        """Sums a flat gradient over ranks, in place, slice by slice."""

    def begin_sum(self, x: Tensor) -> object:
        """Begins to sum a part of the gradient over ranks, in place; answers what `wait_for` takes. Nothing may touch `x` until then."""
        return None

    def wait_for(self, work: object) -> None:
        """Waits for what `begin_sum` began; on CUDA only the current stream does."""

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank; all ranks give equally many. Host only."""
        return [list(values)]

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, of any lengths. Host only."""
        return [data]

    def collect_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, by rank, on rank 0 alone; None elsewhere. Host only, one rank at a time."""
        return [data]

    def share_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank. Host only."""
        return data


class ProcessWorld(World):
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        self._dist = dist
        self._watch: Watch | None = None
        # The older name warns where there is a newer one.
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        self._scatter: Callable[[Tensor, Tensor], object] = getattr(dist, name)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def watch(self, timeout_s: float) -> None:
        """From now on a rank that keeps the others waiting for longer than `timeout_s` is named, and all end with their stacks told."""
        store = self._dist.distributed_c10d._get_default_store()
        self._watch = Watch(store.clone() if hasattr(store, "clone") else store, self.rank, self.size, timeout_s)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def waiting(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.waiting(name)

    def passed(self) -> None:
        if self._watch is not None:
            self._watch.passed()

    def gather(self, x_SD: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        if sizes is None:
            sizes = [row[0] for row in self.exchange([x_SD.shape[0]])]
        gathered: Tensor = _Gather.apply(x_SD, self, list(sizes))
        return gathered

    def all_sum(self, x: Tensor) -> Tensor:
        self.traffic.sums += sum_bytes(self.size, x.nbytes)
        with self.waiting("a sum"):
            self._dist.all_reduce(x)
        return x

    def sum_gradients(self, flat: Tensor) -> None:
        step = BUCKET_BYTES // flat.element_size()
        for work in [self.begin_sum(flat[at : at + step]) for at in range(0, flat.numel(), step)]:
            self.wait_for(work)

    def begin_sum(self, x: Tensor) -> object:
        self.traffic.gradients += sum_bytes(self.size, x.nbytes)
        return self._dist.all_reduce(x, async_op=True)

    def wait_for(self, work: object) -> None:
        if isinstance(work, self._dist.Work):
            with self.waiting("a sum of gradients"):
                work.wait()

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(values), dtype=torch.int64)
        self.traffic.host += gather_bytes(self.size, mine.nbytes)
        with self.waiting("an exchange of counts"):
            # Bruck's gather: each round doubles what a rank knows, log2(W) rounds where the backend's ring takes W - 1.
            known = mine.new_empty((self.size, len(mine)))
            known[0] = mine
            count = 1
            while count < self.size:
                new = min(count, self.size - count)
                sent = self._dist.isend(known[:new], dst=(self.rank - count) % self.size)
                self._dist.recv(known[count : count + new], src=(self.rank + count) % self.size)
                assert sent is not None
                sent.wait()
                count += new
        # Row i is of the rank i places after this one.
        rows: list[list[int]] = known.roll(self.rank, 0).tolist()
        return rows

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        lengths = [row[0] for row in self.exchange([len(data)])]
        padded = _to_tensor(data, max(lengths))
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        self.traffic.host += gather_bytes(self.size, padded.nbytes)
        with self.waiting("an exchange of messages"):
            self._dist.all_gather(everyone, padded)
        return [row[:length].numpy().tobytes() for row, length in zip(everyone, lengths, strict=True)]

    def collect_bytes(self, data: bytes) -> list[bytes] | None:
        lengths = [row[0] for row in self.exchange([len(data)])]
        if self.rank:
            with self.waiting("a message to rank 0"):
                if data:
                    self.traffic.host += len(data)
                    self._dist.send(_to_tensor(data, len(data)), dst=0)
            return None
        parts = [data]
        for rank in range(1, self.size):
            part = torch.empty(lengths[rank], dtype=torch.uint8)
            if lengths[rank]:
                with self.waiting("a message to rank 0"):
                    self._dist.recv(part, src=rank)
            parts.append(part.numpy().tobytes())
        return parts

    def share_bytes(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        with self.waiting("a message of rank 0"):
            self._dist.broadcast(length, src=0)
        shared = _to_tensor(data if self.rank == 0 else b"", int(length))
        with self.waiting("a message of rank 0"):
            self._dist.broadcast(shared, src=0)
        return shared.numpy().tobytes()

    def gather_rows(self, x: Tensor, sizes: list[int]) -> Tensor:
        """`gather` without a gradient."""
        most = max(sizes)
        padded = x.contiguous()
        if x.shape[0] < most:
            padded = x.new_zeros((most, *x.shape[1:]))
            padded[: x.shape[0]] = x
        # One buffer: where all ranks hold equally many rows it is the answer, and the only copy of the world's rows.
        whole = x.new_empty((self.size, most, *x.shape[1:]))
        everyone = list(whole.unbind(0))
        with self.waiting("a gather of rows"):
            self.traffic.rows += gather_bytes(self.size, padded.nbytes)
            self._dist.all_gather(everyone, padded)
        if min(sizes) == most:
            return whole.flatten(0, 1)
        return torch.cat([rows[:size] for rows, size in zip(everyone, sizes, strict=True)])

    def scatter_rows(self, x_ND: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks of `[N, ...]`: a reduce-scatter, parts padded to the largest."""
        most = max(sizes)
        padded = x_ND.contiguous()
        if min(sizes) < most:
            padded = x_ND.new_zeros((self.size, most, *x_ND.shape[1:]))
            for part, rows in zip(padded, torch.split(x_ND, list(sizes)), strict=True):
                part[: len(rows)] = rows
            padded = padded.flatten(0, 1)
        mine = x_ND.new_empty((most, *x_ND.shape[1:]))
        if mine.numel():
            self.traffic.rows_back += gather_bytes(self.size, mine.nbytes)
            with self.waiting("a scatter of rows"):
                self._scatter(mine, padded)
        return mine[: sizes[self.rank]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", x: Tensor, world: ProcessWorld, sizes: list[int]) -> Tensor:
        ctx.place = (world, sizes)  # type: ignore[attr-defined]
        return world.gather_rows(x.detach(), sizes)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: Tensor) -> tuple[Tensor, None, None]:
        world, sizes = ctx.place  # type: ignore[attr-defined]
        mine: Tensor = world.scatter_rows(gradients[0], sizes)
        if world.after_rows is not None:
            world.after_rows()
        return mine, None, None


def joined_world() -> World:
    """The world of torch's default process group where this process has joined one, else this process alone."""
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessWorld() if joined else World()


def _to_tensor(data: bytes, length: int) -> Tensor:
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes passes the limit of {MAX_MESSAGE_BYTES}")
    array = np.zeros(length, dtype=np.uint8)
    array[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(array)


class Mesh:
    """The processes of one run and their connection; one device each. A context manager that leaves the world at its end."""

    def __init__(self, world: World, device: torch.device, hosts: int, backend: str) -> None:
        self.world = world
        self.device = device
        """This process's device: CUDA where there is one."""
        self._hosts = hosts
        self._backend = backend

    @classmethod
    def bootstrap(cls, options: MeshOptions | None = None, *, device: str | torch.device | None = None) -> "Mesh":
        """Meets the other processes: through a shared folder when the options name one, else by torchrun's environment.

        Without either, the mesh is this process alone. `device` forces a kind of device; None takes CUDA where there is one.

        Raises:
            ValueError: an argument is of another type, torchrun's environment is incomplete, or the processes contradict each other.
            PeersMissingError: not all came within the time-out; the message names them.
        """
        require_member("Mesh.bootstrap", "options", options, MeshOptions, optional=True)
        options = options or MeshOptions()
        if options.directory is not None:
            return _bootstrap_by_folder(options, device)
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            return _bootstrap_by_environment(options, device)
        return cls(World(), _pick_device(device, 0), 1, "none")

    @property
    def rank(self) -> int:
        """This process's number in the world, from 0."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Processes of the world."""
        return self.world.size

    def describe(self) -> MeshDescription:
        """What this world is made of."""
        gpu_class, multimem_tier = "cpu", "none"
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            gpu_class = f"sm_{major}{minor}"
            # Switches that reduce came with Hopper; a process alone has nobody to reduce with.
            multimem_tier = "multicast" if major >= 9 and self.world.size > self._hosts else "none"
        return MeshDescription(
            world_size=self.world.size,
            rank=self.world.rank,
            hosts=self._hosts,
            backend=self._backend,
            gpu_class=gpu_class,
            multimem_tier=multimem_tier,
        )

    def close(self) -> None:
        """Leaves the world; nothing else may use it afterwards."""
        self.world.close()
        if self.world.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
        self.world = World()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def require_same(world: World, what: Mapping[str, object]) -> None:
    """Compares a JSON-able description over ranks.

    Raises:
        ValueError: ranks differ, on every rank; the message names the rank, the field and both values.
    """
    texts = world.exchange_bytes(json.dumps(what, sort_keys=True).encode())
    first = _flatten(json.loads(texts[0]))
    differences: list[str] = []
    for rank, text in enumerate(texts):
        if text != texts[0]:
            other = _flatten(json.loads(text))
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    differences.append(f"{name} is {other.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0")
    if differences:
        raise ValueError("ranks disagree: " + "; ".join(differences[:8]) + ": start every rank with one configuration and one version")


def _flatten(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, object] = {}
    for name, part in value.items():
        flat |= _flatten(part, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _pick_device(device: str | torch.device | None, local_index: int) -> torch.device:
    picked = pick_device("Mesh.bootstrap's device", device, local_index)
    if picked.type == "cuda":
        torch.cuda.set_device(picked)
    return picked


def _backend_for(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _bootstrap_by_environment(options: MeshOptions, device: str | torch.device | None) -> Mesh:
    import torch.distributed as dist

    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
        if not text.isdigit():
            raise ValueError(f"environment variable {name} is {text!r}: torchrun sets RANK, WORLD_SIZE and LOCAL_RANK to whole numbers")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ValueError(f"environment variable RANK is {numbers['RANK']}: it must be below WORLD_SIZE, {numbers['WORLD_SIZE']}")
    picked = _pick_device(device, numbers["LOCAL_RANK"])
    if numbers["WORLD_SIZE"] == 1:
        return Mesh(World(), picked, 1, "none")
    if not dist.is_initialized():
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(f"environment variable {name} is not set: start the process with torchrun, or set it to rank 0's")
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported without saying so

        from treadle.model.mesh_store import store_of_environment

        store = store_of_environment(numbers["RANK"], options.timeout_s)
        meeting = arrive(store, numbers["RANK"], numbers["WORLD_SIZE"], options.timeout_s)
        dist.init_process_group(
            _backend_for(picked),
            # The store outlives a restart of the ranks: gloo would connect to addresses of the dead, and wait.
            store=PrefixStore(f"treadle/{meeting}", store),
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            timeout=timedelta(seconds=options.collective_timeout_s + WATCH_GRACE_S),
        )
    return _joined(picked, options)


def _bootstrap_by_folder(options: MeshOptions, device: str | torch.device | None) -> Mesh:
    if options.host_domain_count == 1:
        return Mesh(World(), _pick_device(device, 0), 1, "none")
    assert options.directory is not None
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

    from treadle.model.mesh_store import own_address

    stores: list[TCPStore] = []
    timeout = timedelta(seconds=options.collective_timeout_s + WATCH_GRACE_S)

    def open_store(hosts: list[str]) -> tuple[str, int]:
        address = "127.0.0.1" if len(set(hosts)) == 1 else own_address()
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        stores.append(store)
        return address, store.port

    index, count = options.host_domain_index, options.host_domain_count
    meeting = meet(options.directory, options.job, index, count, options.timeout_s, open_store)
    if not stores:
        stores.append(TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout))
    local_index = meeting.hosts[:index].count(meeting.hosts[index])
    picked = _pick_device(device, local_index)
    dist.init_process_group(
        _backend_for(picked), store=PrefixStore(meeting.nonce, stores[0]), rank=index, world_size=count, timeout=timeout
    )
    mesh = _joined(picked, options)
    meeting.close()
    return mesh


def _joined(device: torch.device, options: MeshOptions) -> Mesh:
    world = ProcessWorld()
    world.watch(options.collective_timeout_s)
    hosts = len(set(world.exchange_bytes(socket.gethostname().encode())))
    backend = "nccl" if device.type == "cuda" else "gloo"
    logger.info("rank %d of %d on %s, %d hosts, %s", world.rank, world.size, device, hosts, backend)
    return Mesh(world, device, hosts, backend)
