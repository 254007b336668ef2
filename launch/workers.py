"""How a command becomes the processes of a run: one per GPU, on one machine or several, or a rank that somebody else started."""

import contextlib
import logging
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from treadle.launch.settings import WorkerSettings

logger = logging.getLogger(__name__)

SAVING_S = 600
"""How long a rank that was asked to stop may take to save before it is killed, seconds."""

SILENCE_S = 30
"""How long the machine where launchers meet may not answer, seconds; it takes a launcher for lost after 15."""


class RankFailedError(RuntimeError):
    """A rank ended badly."""


def adopt_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from SLURM's, for a task of `srun`; empty where there is no such task or torchrun's are set already."""
    tasks = environment.get("SLURM_NTASKS", environment.get("SLURM_NPROCS", "1"))
    if "RANK" in environment or "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment or tasks == "1":
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "localhost"))
    # Jobs of one user on one machine must not meet: the port follows the job's number.
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + int(job) % 20_000)),
    }


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: `gpu[003-007,9],cpu1` begins with `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    return f"{match.group(1)}{match.group(2) or ''}" if match else "localhost"


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to another: what its name resolves to may be one that others cannot reach. None where there is no way."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent: connecting a datagram socket only picks the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def bound_waits(port: int, silence_s: float, ended: threading.Event) -> None:
    """Gives up this process's connections to `port` of another machine when it leaves them unanswered for `silence_s`, until `ended`.

    PyTorch's launcher asks the machine where launchers meet, and waits for an answer as long as the kernel does: a quarter of an hour.
    """
    while not ended.wait(1.0):
        for name in os.listdir("/proc/self/fd") if hasattr(socket, "TCP_USER_TIMEOUT") else ():
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))


def count_gpus() -> int:
    """CUDA devices of this machine that PyTorch can use."""
    import torch

    return torch.cuda.device_count()


def role(settings: WorkerSettings, environment: Mapping[str, str]) -> Literal["rank", "launcher", "alone"]:
    """What this process is: a rank that somebody started, the one that starts the ranks, or the whole run."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return "rank"
    return "launcher" if settings.nodes > 1 or processes_here(settings) > 1 else "alone"


def processes_here(settings: WorkerSettings) -> int:
    """Processes to start on this machine."""
    return settings.processes or max(1, count_gpus())


def start_ranks(settings: WorkerSettings, arguments: Callable[[Path], Sequence[str]], stopped_variable: str) -> None:
    """Runs `treadle ARGUMENTS` once per process through PyTorch's elastic launcher, and waits for all of them.

    The launcher passes SIGINT and SIGTERM on to every rank and waits for it to save. Ranks tell a stop that went well by a file, whose
    name `stopped_variable` holds for them: the launcher itself only knows that it was interrupted.

    Args:
        arguments: given a folder that lasts as long as the ranks, what they are called with.

    Raises:
        RankFailedError: a rank failed; its own message stands above.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    host, _, port = settings.rendezvous.rpartition(":")
    config = LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=processes_here(settings),
        run_id=f"treadle-{port}" if settings.nodes > 1 else f"treadle-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}" if settings.nodes > 1 else "127.0.0.1:0",
        rdzv_configs={"is_host": settings.node_rank == 0},
        max_restarts=settings.max_restarts,
        local_addr=address_towards(host, int(port)) if settings.nodes > 1 else None,
    )
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        marker = Path(folder) / "stopped"
        # PYTHONSAFEPATH keeps the current folder off the ranks' import path.
        os.environ |= {stopped_variable: str(marker), "PYTHONSAFEPATH": "1"}
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
        if settings.nodes > 1:
            # A launcher that comes back waits for the address of the ranks' store, which launchers tell only once where theirs is shared.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes_here(settings))))
        ended = threading.Event()
        if settings.nodes > 1:
            threading.Thread(target=bound_waits, args=(int(port), SILENCE_S, ended), name="treadle-waits", daemon=True).start()
        try:
            elastic_launch(config, sys.executable)("-m", "treadle.launch", *arguments(Path(folder)))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailedError(f"rank {rank} failed with exit code {failure.exitcode}: its message stands above") from error
        except RendezvousConnectionError as error:
            raise RankFailedError(
                f"{settings.rendezvous}, where launchers meet, does not answer: the launcher of node 0 has ended, or the network to it is cut; "
                "start the command again on every machine, with --auto-resume"
            ) from error
        except SignalException as error:
            if not marker.exists() and settings.node_rank == 0:
                raise RankFailedError(f"stopped by {error.sigval.name} before rank 0 had saved") from error
        finally:
            ended.set()
