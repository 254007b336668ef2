"""The world: meeting through a folder or torchrun's environment, collectives against one process, refusals.

Ranks are processes that run this file as a script, so that nothing of the test runner is shared with them.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from treadle.model import mesh_code
from treadle.model.config import MeshOptions
from treadle.model.mesh import Mesh, ProcessWorld, World, require_same
from treadle.model.mesh_rendezvous import Meeting, PeersMissingError, RendezvousError, meet

SIZES = [3, 0, 2]


def _rows(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 2, dtype=torch.float64).view(-1, 2) + 100 * rank


def _rank(directory: str, rank: int) -> None:
    """What one rank of three does; answers JSON."""
    torch.set_num_threads(1)
    out: dict[str, object] = {}
    options = MeshOptions(directory=directory, host_domain_index=rank, host_domain_count=3, job="test-1", timeout_s=60)
    with Mesh.bootstrap(options, device="cpu") as mesh:
        world = mesh.world
        description = mesh.describe()
        out["description"] = [description.world_size, description.rank, description.hosts, description.backend, description.gpu_class]
        out["exchange"] = world.exchange([rank, 7])
        out["bytes"] = [part.decode() for part in world.exchange_bytes(b"x" * rank)]
        collected = world.collect_bytes(f"rank {rank}".encode() * rank)
        out["collected"] = None if collected is None else [part.decode() for part in collected]
        out["sum"] = world.all_sum(torch.tensor([1.0, float(rank)])).tolist()
        rows = _rows(rank).requires_grad_()
        gathered = world.gather(rows)
        # Every rank weighs every row by its own rank + 1 and the row's place: the gradient of a row is the sum over ranks.
        weights = torch.arange(1.0, len(gathered) + 1, dtype=torch.float64)[:, None] * (rank + 1)
        (gathered * weights).sum().backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        out["gathered"], out["gradient"] = gathered.tolist(), rows.grad.tolist()
        out["integers"] = world.gather(torch.full((rank,), rank), [0, 1, 2]).tolist()
        flat = torch.full((5,), float(rank))
        world.sum_gradients(flat)
        out["flat"] = flat.tolist()
        try:
            require_same(world, {"config": {"hidden": 128 if rank < 2 else 256}, "seed": 1})
        except ValueError as error:
            out["refused"] = str(error)
        require_same(world, {"config": {"hidden": 128}})
        world.exchange([0])  # nobody leaves before all are done
    (Path(directory) / f"out-{rank}.json").write_text(json.dumps(out))


def _rank_by_environment(directory: str) -> None:
    with Mesh.bootstrap(device="cpu") as mesh:
        total = mesh.world.all_sum(torch.tensor([1.0 + mesh.rank]))
        (Path(directory) / f"env-{mesh.rank}.json").write_text(json.dumps([mesh.world_size, float(total)]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(arguments: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output


def test_the_code_s_digest_is_of_all_folders_and_imports_none(tmp_path: Path) -> None:
    for package in ("treadle", "treadle/model", "treadle/launch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "treadle/launch/__init__.py").write_text("raise RuntimeError")

    def digest() -> str:
        program = (
            f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); print(runpy.run_path({mesh_code.__file__!r})['code_digest']())"
        )
        return subprocess.run([sys.executable, "-P", "-S", "-c", program], capture_output=True, text=True, check=True).stdout

    first = digest()
    assert len(first.strip()) == 16 and digest() == first
    (tmp_path / "treadle/model/one.py").write_text("x = 1")
    assert digest() != first


def test_three_ranks_through_a_folder(tmp_path: Path) -> None:
    # A run that was killed left its files: a call, answers to it, an agreement.
    folder = tmp_path / "treadle-test-1"
    folder.mkdir()
    (folder / "call.00.json").write_text('{"count": 3}')
    (folder / "reply.00.11.json").write_text('{"index": 1, "count": 3, "host": "gone"}')
    (folder / "agree.00.json").write_text('{"members": ["00", "11", "22"], "address": "192.0.2.1", "port": 1, "hosts": ["a", "b", "c"]}')
    (folder / "refuse.01.json").write_text('{"members": ["01"], "reason": "long ago"}')
    (folder / "call.broken.json").write_text("{")
    _finish([_launch([str(tmp_path), str(rank)]) for rank in range(3)])
    everyone = torch.cat([_rows(rank) for rank in range(3)])
    first = 0
    for rank in range(3):
        out = json.loads((tmp_path / f"out-{rank}.json").read_text())
        assert out["description"] == [3, rank, 1, "gloo", "cpu"]
        assert out["exchange"] == [[0, 7], [1, 7], [2, 7]]
        assert out["bytes"] == ["", "x", "xx"]
        assert out["collected"] == (["", "rank 1", "rank 2rank 2"] if rank == 0 else None)
        assert out["sum"] == [3.0, 3.0]
        assert out["gathered"] == everyone.tolist()
        # 1 + 2 + 3 ranks, times the row's place.
        assert out["gradient"] == [[6.0 * (first + i + 1)] * 2 for i in range(SIZES[rank])]
        assert out["integers"] == [1, 2, 2]
        assert out["flat"] == [3.0] * 5
        assert "config.hidden is 256 on rank 2 and 128 on rank 0" in out["refused"]
        first += SIZES[rank]


def test_two_ranks_by_torchrun_s_environment(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    _finish([_launch([str(tmp_path)], {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)])
    # 1 + 2, on both.
    assert [json.loads((tmp_path / f"env-{rank}.json").read_text()) for rank in range(2)] == [[2, 3.0]] * 2


def test_alone_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with Mesh.bootstrap(device="cpu") as mesh:
        description = mesh.describe()
        assert (description.world_size, description.rank, description.hosts, description.backend) == (1, 0, 1, "none")
        rows = torch.ones(2, 3, requires_grad=True)
        assert mesh.world.gather(rows) is rows
        assert mesh.world.exchange([1, 2]) == [[1, 2]]
        assert mesh.world.collect_bytes(b"a") == [b"a"]
        require_same(mesh.world, {"a": 1})
        assert not isinstance(mesh.world, ProcessWorld)


def test_one_rank_of_one_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Mesh.bootstrap(device="cpu") as mesh:
        assert mesh.world_size == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is ''"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK is 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2: it must be below WORLD_SIZE, 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_incomplete_environment_is_refused(environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Mesh.bootstrap(device="cpu")


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_domain_index is 2: it must be below host_domain_count, 2"):
        MeshOptions(host_domain_index=2, host_domain_count=2, directory=tmp_path)
    with pytest.raises(ValueError, match="directory is None"):
        MeshOptions(host_domain_count=2)
    with pytest.raises(ValueError, match="directory is 3: it must be the path of a file or folder"):
        MeshOptions(directory=3)  # type: ignore[arg-type]  # what a user may try
    with pytest.raises(ValueError, match="job is 3: it must be a str"):
        MeshOptions(job=3)  # type: ignore[arg-type]  # what a user may try
    with pytest.raises(ValueError, match="collective_timeout_s is 1e\\+20: it must lie between"):
        MeshOptions(collective_timeout_s=1e20)
    with pytest.raises(ValueError, match=r"job is '\.\./other'"):
        Mesh.bootstrap(MeshOptions(host_domain_count=2, directory=tmp_path, job="../other"))


def _meet_all(directory: Path, parties: list[tuple[int, int]], timeout_s: float = 20.0) -> list[Meeting | Exception]:
    """Meets in threads; a list of (index, count)."""
    answers: list[Meeting | Exception] = [RuntimeError("not run")] * len(parties)

    def party(place: int, index: int, count: int) -> None:
        try:
            answers[place] = meet(directory, "job", index, count, timeout_s, lambda hosts: ("here", 1234))
        except (ValueError, TimeoutError) as error:
            answers[place] = error

    threads = [threading.Thread(target=party, args=(place, *who)) for place, who in enumerate(parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_processes_meet_twice_in_one_folder(tmp_path: Path) -> None:
    nonces: set[str] = set()
    for _ in range(2):
        answers = _meet_all(tmp_path, [(2, 3), (0, 3), (1, 3)])
        for answer in answers:
            assert isinstance(answer, Meeting)
            assert (answer.address, answer.port, answer.hosts) == ("here", 1234, (socket.gethostname(),) * 3)
            nonces.add(answer.nonce)
        # The files of the first meeting stay: they must not disturb the second.
    assert len(nonces) == 2


def test_a_closed_meeting_leaves_no_files(tmp_path: Path) -> None:
    for answer in _meet_all(tmp_path, [(0, 2), (1, 2)]):
        assert isinstance(answer, Meeting)
        answer.close()
    assert list((tmp_path / "treadle-job").iterdir()) == []


def test_missing_peers_are_named_to_all(tmp_path: Path) -> None:
    for answer in _meet_all(tmp_path, [(0, 4), (2, 4)], timeout_s=2.0):
        assert isinstance(answer, PeersMissingError)
        assert "2 of 4 processes did not come" in str(answer)
        assert "host_domain_index 1, 3" in str(answer)


def test_a_missing_first_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.model.mesh_rendezvous.REFUSAL_GRACE_S", 0.0)
    [answer] = _meet_all(tmp_path, [(1, 2)], timeout_s=0.1)
    assert isinstance(answer, PeersMissingError) and "host_domain_index 0" in str(answer)


def test_one_index_twice_is_refused_by_all(tmp_path: Path) -> None:
    for answer in _meet_all(tmp_path, [(0, 4), (1, 4), (1, 4)]):
        assert isinstance(answer, RendezvousError) and "two processes came as number 1" in str(answer)


def test_another_count_is_refused_by_all(tmp_path: Path) -> None:
    for answer in _meet_all(tmp_path, [(0, 3), (1, 2)]):
        assert isinstance(answer, RendezvousError) and "process 1" in str(answer) and "expects 2 processes" in str(answer)


def test_a_world_is_a_world() -> None:
    assert (World().rank, World().size) == (0, 1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _rank_by_environment(sys.argv[1])
    else:
        _rank(sys.argv[1], int(sys.argv[2]))
