"""Two machines that are network namespaces joined by a cable train one run, found by the address and not by a name.

Needs root and `ip`; `make netns` runs it, with a link that delays and drops where the kernel has netem.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

STEPS = 12
CONFIG = """
save_every = 1
log_every = 1
[trainer]
depth = 1
hidden = 128
device = "cpu"
batch = {{ max_rows_per_device = 2, max_segments_per_device = 8, max_columns_per_row = 64 }}
schedule = {{ steps = {steps} }}
[data]
sources = "{folder}/shard.tar"
lanes = 4
threads = 1
processes = 0
[mesh]
timeout_s = 120
"""


@dataclass(frozen=True)
class Machine:
    namespace: str
    device: str
    address: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    if not os.environ.get("TREADLE_NETNS"):
        pytest.skip("takes minutes and root: make netns")
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and ip")
    tag = uuid.uuid4().hex[:6]
    pair = [Machine(f"treadle-{tag}-{i}", f"t{tag}{i}", f"10.77.0.{i + 1}") for i in range(2)]
    try:
        for machine in pair:
            ip("netns", "add", machine.namespace)
        one, two = pair
        ip("link", "add", one.device, "netns", one.namespace, "type", "veth", "peer", "name", two.device, "netns", two.namespace)
        for machine in pair:
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            for device in (machine.device, "lo"):
                ip("-n", machine.namespace, "link", "set", device, "up")
            netem = ["netem", "delay", "5ms", "2ms", "loss", "1%"]
            subprocess.run(
                ["tc", "-n", machine.namespace, "qdisc", "add", "dev", machine.device, "root", *netem], capture_output=True, check=False
            )
        yield pair
    finally:
        for machine in pair:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True, check=False)


def start(machine: Machine, node: int, config: Path, output: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "treadle.launch", "train", str(config), "--output", str(output), "--auto-resume"]
    command += ["--nodes", "2", "--node-rank", str(node), "--rendezvous", "10.77.0.1:29411"]
    command += ["--workers.processes", "1", "--workers.max_restarts", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": machine.device}
    with log.open("ab") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", machine.namespace, *command],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(process: "subprocess.Popen[bytes]") -> None:
    """The launcher and its ranks, as when a machine loses power."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {process.pid}
    # Children, and theirs: ranks begin sessions of their own.
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait(timeout=60)


def test_two_machines_train_one_run(machines: list[Machine], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for sample in range(200):
            data = f"sample {sample}".encode()
            info = tarfile.TarInfo(f"{sample:03d}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(steps=STEPS, folder=tmp_path))
    log, output = tmp_path / "log", tmp_path / "run"
    nodes = [start(machine, node, config, output, log) for node, machine in enumerate(machines)]
    try:
        codes = [node.wait(timeout=280) for node in nodes]
        assert codes == [0, 0], log.read_text()
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)
    with safe_open(output / "checkpoints/last.safetensors", "np") as file:
        assert file.metadata()["step"] == str(STEPS) and file.metadata()["world_size"] == "2"
