"""The key-value store in which ranks meet that find each other by torchrun's environment."""

import os
import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

from treadle.model.mesh_rendezvous import PeersMissingError, RendezvousError


def store_of_environment(rank: int, timeout_s: float) -> TCPStore:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 opens where torchrun has not; nobody is waited for yet.

    Torch's own way in waits for all ranks and names none that is missing. It also keeps starts apart by a count of restarts, which machines
    that come back begin anew.

    Raises:
        ValueError: MASTER_PORT is no port.
        RendezvousError: rank 0 cannot open it.
        PeersMissingError: rank 0 has not opened it in time.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"environment variable MASTER_PORT is {port!r}: it must be a port of rank 0's machine")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(host, int(port), is_master=serves, timeout=timedelta(seconds=timeout_s), multi_tenant=True, wait_for_workers=False)
    except DistError as error:
        if serves:
            raise RendezvousError(
                f"rank 0 cannot open MASTER_PORT {port} on {socket.gethostname()}: another process holds it, a second rank 0 perhaps; start "
                "each rank once, or name another port"
            ) from error
        raise PeersMissingError(
            f"rank {rank} found no store at {host}:{port} (MASTER_ADDR and MASTER_PORT) within {timeout_s:g} s: check that rank 0 runs there"
        ) from error


def own_address() -> str:
    """The address by which other machines reach this one, as far as the routing table tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: connecting a datagram socket only picks the route
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
