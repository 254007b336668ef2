"""Machines that are network namespaces train one run: one loses power and comes back, a cable delays, drops, and is cut.

Needs root and `ip`, else the tests are skipped; `make netns` runs all of them, the suite the first. Namespaces are joined by veth pairs, directly or through a
third one where `slow_link.py` passes the frames on. Their machines find each other by address: names lead elsewhere.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from treadle.model.mesh_watch import EXIT_CODE

STEPS = 20
WAIT_S = 280
MORE = pytest.mark.skipif(not os.environ.get("TREADLE_NETNS"), reason="takes a minute: make netns")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def namespaces_refused() -> str:
    """Why this machine makes no network namespaces; empty where it does."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root and ip"
    name = f"treadle-{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return tried.stderr.strip() and f"this kernel or container makes no network namespaces: {tried.stderr.strip()}"


@dataclass
class Machine:
    """A namespace with one network device."""

    namespace: str
    device: str
    address: str
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start(self, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": self.device}
        # As docs/scaling.md tells those to do who call torchrun themselves.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def plug(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", self.device, state)

    def lose_power(self) -> None:
        """Every process ends, and no connection is closed."""
        self.plug("down")
        self.kill()

    def kill(self) -> None:
        for number in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=60)


@dataclass
class Network:
    machines: list[Machine]
    cable: "subprocess.Popen[str] | None" = None
    switch: str = ""


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Two machines and what joins them: a veth pair, or a program of these arguments."""
    if reason := namespaces_refused():
        pytest.skip(reason)
    cable: list[float] | None = getattr(request, "param", None)
    tag = uuid.uuid4().hex[:6]
    found = Network([Machine(f"treadle-{tag}-{i}", f"t{tag}{i}", f"10.77.0.{i + 1}") for i in range(2)], switch=f"treadle-{tag}-s")
    names = [*(machine.namespace for machine in found.machines), *([found.switch] if cable else [])]
    try:
        for name in names:
            ip("netns", "add", name)
        one, two = found.machines
        if cable is None:
            ip("link", "add", one.device, "netns", one.namespace, "type", "veth", "peer", "name", two.device, "netns", two.namespace)
        else:
            for machine in found.machines:
                far = f"far{machine.device}"
                ip("link", "add", machine.device, "netns", machine.namespace, "type", "veth", "peer", "name", far, "netns", found.switch)
                # One frame is one packet, as on a real cable.
                ip("-n", machine.namespace, "link", "set", machine.device, "gso_max_segs", "1")
                ip("-n", found.switch, "link", "set", far, "up")
            program = [sys.executable, str(Path(__file__).with_name("slow_link.py")), *(f"far{m.device}" for m in found.machines)]
            found.cable = subprocess.Popen(
                ["ip", "netns", "exec", found.switch, *program, *map(str, cable)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert found.cable.stdout is not None and found.cable.stdout.readline() == "ready\n"
        for machine in found.machines:
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            ip("-n", machine.namespace, "link", "set", "lo", "up")
            machine.plug("up")
        yield found
    finally:
        for machine in found.machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                machine.kill()
        if found.cable is not None and found.cable.poll() is None:
            found.cable.communicate(timeout=60)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def config(text_run: Callable[[Path, int, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_run(tmp_path_factory.mktemp("network"), STEPS, "[mesh]\ntimeout_s = 120\ncollective_timeout_s = 8\n")


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of this machine train, whom nothing disturbs."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*treadle_train(config, output), "--workers.processes", "2", "--mesh.collective_timeout_s", str(WAIT_S)],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return output


def treadle_train(config: Path, output: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "treadle.launch", "train", str(config), "--output", str(output), "--auto-resume"]


def treadle_node(number: int, config: Path, output: Path, *, timeout_s: int) -> list[str]:
    """Treadle's own launcher, on one of two machines."""
    command = [*treadle_train(config, output), "--nodes", "2", "--node-rank", str(number), "--rendezvous", "10.77.0.1:29411"]
    return [*command, "--workers.processes", "1", "--workers.max_restarts", "0", "--mesh.collective_timeout_s", str(timeout_s)]


def torchrun_node(machine: Machine, number: int, config: Path, output: Path) -> list[str]:
    """PyTorch's launcher, on one of two machines."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "5"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29411", "--rdzv-id", "run", "--local-addr", machine.address]
    command += ["--rdzv-conf", f"is_host={int(number == 0)},keep_alive_interval=1"]
    return [*command, *treadle_train(config, output)[2:]]


def wait_for_save(output: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and not (output / "checkpoints/LATEST").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def codes(machines: list[Machine]) -> list[int]:
    return [machine.processes[-1].wait(timeout=WAIT_S) for machine in machines]


def test_a_machine_that_loses_power_and_comes_back_joins_the_run(
    network: Network, config: Path, undisturbed: Path, check_same_end: Callable[[Path, Path, int], None], tmp_path: Path
) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    one, two = network.machines
    for number, machine in enumerate(network.machines):
        machine.start(torchrun_node(machine, number, config, output), log)
    wait_for_save(output, one.processes[0])
    two.lose_power()
    two.plug("up")
    two.start(torchrun_node(two, 1, config, output), log)
    assert codes([one, two]) == [0, 0], log.read_text()
    assert "going on after step" in log.read_text()
    check_same_end(output, undisturbed, STEPS)


@MORE
@pytest.mark.parametrize("network", [[0.005, 0.002, 0.01, 3]], indirect=True)
def test_a_cable_that_delays_and_drops_changes_no_bit(
    network: Network, config: Path, undisturbed: Path, check_same_end: Callable[[Path, Path, int], None], tmp_path: Path
) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    for number, machine in enumerate(network.machines):
        machine.start(treadle_node(number, config, output, timeout_s=120), log)
    assert codes(network.machines) == [0, 0], log.read_text()
    check_same_end(output, undisturbed, STEPS)
    assert network.cable is not None
    counts = json.loads(network.cable.communicate(timeout=60)[0])
    assert counts["passed"] > 1000 and counts["dropped"] > 5, counts


@MORE
@pytest.mark.parametrize("network", [[0.001, 0.0, 0.0, 3]], indirect=True)
def test_a_cable_that_is_cut_ends_the_run_with_a_name(network: Network, config: Path, tmp_path: Path) -> None:
    logs, output = [tmp_path / "one", tmp_path / "two"], tmp_path / "run"
    for number, machine in enumerate(network.machines):
        machine.start(treadle_node(number, config, output, timeout_s=8), logs[number])
    wait_for_save(output, network.machines[0].processes[0])
    assert network.cable is not None and network.cable.stdin is not None
    network.cable.stdin.write("1\n")
    network.cable.stdin.flush()
    found = codes(network.machines)
    texts = [log.read_text() for log in logs]
    assert all(code != 0 for code in found), texts
    assert all(f"rank {rank} has waited 8 s in" in text for rank, text in enumerate(texts)), texts
    # Rank 0 holds the store and knows who is behind; rank 1 only knows that nobody answers, and so does its launcher.
    assert "hanging: rank 1;" in texts[0] and f"rank 0 failed with exit code {EXIT_CODE}" in texts[0], texts[0]
    assert "rank 0's store does not answer" in texts[1] and "10.77.0.1:29411, where launchers meet, does not answer" in texts[1], texts[1]
