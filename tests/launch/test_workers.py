"""Which process a command is, and what SLURM's variables say; requests to stop."""

import signal
import threading

import pytest

from treadle.launch.settings import WorkerSettings
from treadle.launch.signals import StopRequest
from treadle.launch.workers import address_towards, adopt_slurm, first_host, processes_here, role

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-006]",
    "SLURM_JOB_ID": "123456",
}


def test_a_slurm_task_is_a_rank() -> None:
    # 20000 + 123456 % 20000
    assert adopt_slurm(TASK) == {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu003", "MASTER_PORT": "23456"}


def test_what_the_user_set_stays() -> None:
    found = adopt_slurm(TASK | {"MASTER_ADDR": "here", "MASTER_PORT": "1"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("here", "1")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TASK | {"RANK": "0"},  # torchrun inside an allocation
        TASK | {"SLURM_NTASKS": "1"},  # one task that starts its own ranks
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # a batch script, no srun
    ],
)
def test_anything_else_is_no_slurm_task(environment: dict[str, str]) -> None:
    assert adopt_slurm(environment) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-007,9],cpu1", "gpu003"), ("gpu7", "gpu7"), ("a,b", "a"), ("n-1-[2,5]", "n-1-2"), ("localhost", "localhost")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_the_address_towards_a_machine() -> None:
    assert address_towards("127.0.0.1", 29400) == "127.0.0.1"
    assert address_towards("no.such.machine.invalid", 29400) is None


def test_roles() -> None:
    assert role(WorkerSettings(), {"RANK": "0", "WORLD_SIZE": "2"}) == "rank"
    assert role(WorkerSettings(processes=2), {}) == "launcher"
    assert role(WorkerSettings(nodes=2, rendezvous="a:1"), {}) == "launcher"
    assert role(WorkerSettings(processes=1), {}) == "alone"


def test_one_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert processes_here(WorkerSettings()) == 8
    assert processes_here(WorkerSettings(processes=3)) == 3
    assert role(WorkerSettings(), {}) == "launcher"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert processes_here(WorkerSettings()) == 1


class TestStopRequest:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_is_a_request(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        with StopRequest() as stop:
            assert not stop
            signal.raise_signal(number)
            assert stop and stop.name == number.name
        assert signal.getsignal(number) is before

    def test_a_second_interrupt_is_meant(self) -> None:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert stop

    def test_a_second_termination_waits(self) -> None:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert stop.name == "SIGTERM"

    def test_other_threads_listen_to_nothing(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        seen: list[bool] = []

        def enter() -> None:
            with StopRequest() as stop:
                seen.append(bool(stop))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert seen == [False]
        assert signal.getsignal(signal.SIGTERM) is before
