"""How processes that share only a folder find each other: files, nonces, no clocks.

Process 0 writes a call with a fresh nonce. Every other process answers every call it sees with its own fresh nonce; so an answer to this
call can only come from a process that lives now, and files that an earlier run left are never mistaken for peers. When all have answered,
process 0 writes an agreement that lists the nonces; a process accepts only an agreement, or a refusal, that lists its own.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

POLL_S = 0.02
MAX_POLL_S = 0.5
MAX_FILE_BYTES = 1 << 20
MAX_NAMED_PEERS = 16
REFUSAL_GRACE_S = 2.0
"""How much longer than process 0 the others wait, to hear from it who was missing."""

READING_S = 10.0
"""How long process 0 waits at most for the others to have read its refusal."""

BLOCKED_GRACE_S = 3.0
"""How much longer again a folder may take over what is under way."""

_JOB = re.compile(r"[A-Za-z0-9._-]{0,100}")

OpenStore = Callable[[list[str]], tuple[str, int]]
"""`open_store(hosts)` starts what the processes will connect to and answers its address and port."""


class RendezvousError(ValueError):
    """The processes cannot form one world: duplicate indices or different counts."""


class PeersMissingError(TimeoutError):
    """Some processes did not come within the time-out; the message names them."""


class FolderRefusedError(OSError):
    """The folder to meet in cannot be written: it is full, read-only, gone or blocked."""


class Store(Protocol):
    """What meeting by torchrun's environment needs of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


def arrive(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Meets the other ranks in the world's store, before any of them waits in a backend that names nobody.

    The store may hold what an earlier start of the same ranks left there, so the protocol is that of folders: rank 0 calls with a nonce, the
    others answer with theirs, and each accepts only an agreement or a refusal that lists its own.

    Returns:
        The nonce of this meeting, the same on all ranks and never used before: what the ranks keep in the store from here on goes under it.

    Raises:
        RendezvousError: a rank came twice, or with another world size; raised by all that wait.
        PeersMissingError: not all came within `timeout_s`; the message names the missing.
    """
    deadline = time.monotonic() + timeout_s
    mine = f"{secrets.token_hex(8)}|{size}|{socket.gethostname()}"
    wait_s = POLL_S
    if rank == 0:
        call = secrets.token_hex(8)
        _answer(store, call, rank, mine)
        store.set("treadle/call", call)
        while True:
            arrived = store.add(f"treadle/{call}/arrived", 0)
            if arrived >= size or time.monotonic() > deadline:
                members, reason = _arrived(store, call, size)
                missing = not reason and len(members) < size
                if missing:
                    reason = _ranks_missing(sorted(set(range(size)) - members.keys()), size, timeout_s)
                listed = [name for names in members.values() for name in names]
                store.set(f"treadle/{call}/answer", json.dumps({"members": listed, "reason": reason, "missing": missing}))
                if reason:
                    _wait_for_readers(store, call, len(listed) - 1)
                _end(reason, missing)
                return call
            if store.get("treadle/call").decode() != call:
                raise RendezvousError(f"two processes came as rank 0, one of them on {socket.gethostname()}: start each rank once")
            time.sleep(wait_s)
            wait_s = min(MAX_POLL_S, wait_s * 1.2)
    answered: set[str] = set()
    passed_over = False
    while time.monotonic() <= deadline + REFUSAL_GRACE_S:
        if store.check(["treadle/call"]):
            call = store.get("treadle/call").decode()
            if call not in answered:
                answered.add(call)
                _answer(store, call, rank, mine)
            if store.check([f"treadle/{call}/answer"]):
                note = json.loads(store.get(f"treadle/{call}/answer"))
                if mine in note["members"]:
                    store.add(f"treadle/{call}/read", 1)
                    _end(note["reason"], note["missing"])
                    return call
                # An earlier start's, or this one's that had all it wanted: a newer call may come.
                passed_over = True
        time.sleep(wait_s)
        wait_s = min(MAX_POLL_S, wait_s * 1.2)
    if passed_over:
        raise RendezvousError(
            f"rank 0 has met its ranks without this one on {socket.gethostname()}, and has not called again within {timeout_s:g} s: another "
            f"process came as rank {rank}, or rank 0 has ended since; start each rank once"
        )
    raise PeersMissingError(_ranks_missing([0], size, timeout_s))


def _wait_for_readers(store: Store, call: str, count: int) -> None:
    """Rank 0's process may hold the store: it ends once the others know why."""
    deadline = time.monotonic() + READING_S
    while store.add(f"treadle/{call}/read", 0) < count and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _answer(store: Store, call: str, rank: int, name: str) -> None:
    place = store.add(f"treadle/{call}/{rank}", 1)
    store.set(f"treadle/{call}/{rank}/{place}", name)
    store.add(f"treadle/{call}/arrived", 1)


def _arrived(store: Store, call: str, size: int) -> tuple[dict[int, list[str]], str]:
    """Who answered a call, by rank, and what is wrong with that."""
    members: dict[int, list[str]] = {}
    problem = ""
    for rank in range(size):
        names = [store.get(f"treadle/{call}/{rank}/{1 + i}").decode() for i in range(store.add(f"treadle/{call}/{rank}", 0))]
        if names:
            members[rank] = names
        hosts = [name.split("|", 2)[2] for name in names]
        if len(names) > 1:
            problem = (
                problem or f"two processes came as rank {rank}, on {hosts[0]} and on {hosts[1]}: start each rank once, with its own RANK"
            )
        for name, host in zip(names, hosts, strict=True):
            if int(name.split("|")[1]) != size:
                problem = problem or (
                    f"rank {rank} on {host} has WORLD_SIZE {name.split('|')[1]}, rank 0 has {size}: start all with one WORLD_SIZE"
                )
    return members, problem


def _ranks_missing(missing: list[int], size: int, timeout_s: float) -> str:
    return f"{len(missing)} of {size} ranks did not come within {timeout_s:g} s: rank {first_of(missing)}; check that they run"


def first_of(numbers: Sequence[int]) -> str:
    """The first of many processes, for a message."""
    return ", ".join(map(str, numbers[:MAX_NAMED_PEERS])) + (", ..." if len(numbers) > MAX_NAMED_PEERS else "")


def _end(reason: str, missing: bool) -> None:
    if reason:
        raise PeersMissingError(reason) if missing else RendezvousError(reason)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the processes agreed on."""

    address: str
    port: int
    nonce: str
    """The call's, unique to this meeting."""
    hosts: tuple[str, ...]
    """Host name by index."""
    _written: list[Path] = field(repr=False)

    def close(self) -> None:
        """Removes this process's files; call it once every process has joined."""
        for path in self._written:
            path.unlink(missing_ok=True)


def meet(directory: str | Path, job: str, index: int, count: int, timeout_s: float, open_store: OpenStore) -> Meeting:
    """Meets the `count` processes of `job` in `directory`, as number `index`.

    Raises:
        ValueError: the job's name cannot be a folder's.
        RendezvousError: two processes came with one index, or with different counts; raised by all of them.
        PeersMissingError: not all came within `timeout_s`; the message names the missing.
        FolderRefusedError: the folder cannot be written, or does not answer.
    """
    if not _JOB.fullmatch(job) or job in (".", ".."):
        raise ValueError(f"MeshOptions.job is {job!r}: it must be letters, digits, '.', '_' and '-', at most 100")
    folder = Path(directory) / (f"treadle-{job}" if job else "treadle")
    met: list[Meeting] = []
    failed: list[BaseException] = []

    def party() -> None:
        try:
            met.append(_meet(folder, index, count, timeout_s, open_store))
        except BaseException as error:
            failed.append(error)

    # A file system that has lost its server blocks whoever asks it for anything, beyond every time-out.
    thread = threading.Thread(target=party, name="treadle-meet", daemon=True)
    thread.start()
    thread.join(timeout_s + REFUSAL_GRACE_S + BLOCKED_GRACE_S)
    if failed:
        raise failed[0]
    if not met:
        raise FolderRefusedError(
            f"{folder} has not answered process {index} within {timeout_s:g} s: the file system is blocked or far too slow; look after its "
            "server, or name another directory"
        )
    return met[0]


def _meet(folder: Path, index: int, count: int, timeout_s: float, open_store: OpenStore) -> Meeting:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, index, error) from error
    me = _Party(folder, index, count, time.monotonic() + timeout_s, timeout_s)
    try:
        return me.host(open_store) if index == 0 else me.join()
    except BaseException:
        for path in me.written:
            if not path.name.startswith("refuse."):
                path.unlink(missing_ok=True)
        raise


class _Party:
    def __init__(self, folder: Path, index: int, count: int, deadline: float, timeout_s: float) -> None:
        self.folder = folder
        self.index = index
        self.count = count
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.nonce = secrets.token_hex(8)
        self.written: list[Path] = []
        self._answered: set[str] = set()
        self._wait_s = POLL_S

    def host(self, open_store: OpenStore) -> Meeting:
        self._write(f"call.{self.nonce}.json", {"count": self.count})
        while True:
            self._answer_calls()
            answers = self._answers(self.nonce)
            members = {self.nonce: 0, **{nonce: index for nonce, (index, _, _) in answers.items()}}
            problem = self._problem(answers)
            if problem:
                self._write(f"refuse.{self.nonce}.json", {"members": list(members), "reason": problem})
                raise RendezvousError(problem)
            if len(members) == self.count:
                hosts = {0: socket.gethostname(), **{index: host for index, _, host in answers.values()}}
                ordered = [hosts[i] for i in range(self.count)]
                address, port = open_store(ordered)
                agreement = {"members": list(members), "address": address, "port": port, "hosts": ordered}
                self._write(f"agree.{self.nonce}.json", agreement)
                return Meeting(address, port, self.nonce, tuple(ordered), self.written)
            if time.monotonic() > self.deadline:
                reason = self._missing(sorted(set(range(self.count)) - set(members.values())))
                self._write(f"refuse.{self.nonce}.json", {"members": list(members), "reason": reason, "missing": True})
                raise PeersMissingError(reason)
            self._pause()

    def join(self) -> Meeting:
        while True:
            self._answer_calls()
            for path in self.folder.glob("refuse.*.json"):
                note = _read(path)
                if self._concerns_me(note):
                    reason = str(note.get("reason"))
                    raise PeersMissingError(reason) if note.get("missing") else RendezvousError(reason)
            for path in self.folder.glob("agree.*.json"):
                note = _read(path)
                if self._concerns_me(note):
                    return self._accept(path, note)
            if time.monotonic() > self.deadline + REFUSAL_GRACE_S:
                raise PeersMissingError(self._missing([0]))
            self._pause()

    def _accept(self, path: Path, note: dict[str, object]) -> Meeting:
        address, port, hosts = note.get("address"), note.get("port"), note.get("hosts")
        if not isinstance(address, str) or not isinstance(port, int) or not isinstance(hosts, list):
            raise RendezvousError(f"{path}: the agreement is broken; use another directory or job name")
        return Meeting(address, port, path.name.split(".")[1], tuple(map(str, hosts)), self.written)

    def _concerns_me(self, note: dict[str, object]) -> bool:
        members = note.get("members")
        return isinstance(members, list) and self.nonce in members

    def _answer_calls(self) -> None:
        for path in self.folder.glob("call.*.json"):
            caller = path.name.split(".")[1]
            if caller != self.nonce and caller not in self._answered:
                self._answered.add(caller)
                reply = {"index": self.index, "count": self.count, "host": socket.gethostname()}
                self._write(f"reply.{caller}.{self.nonce}.json", reply)

    def _answers(self, call: str) -> dict[str, tuple[int, int, str]]:
        found: dict[str, tuple[int, int, str]] = {}
        for path in self.folder.glob(f"reply.{call}.*.json"):
            note = _read(path)
            index, count, host = note.get("index"), note.get("count"), note.get("host")
            if isinstance(index, int) and isinstance(count, int) and isinstance(host, str):
                found[path.name.split(".")[2]] = (index, count, host)
        return found

    def _problem(self, answers: dict[str, tuple[int, int, str]]) -> str:
        taken = {0: socket.gethostname()}
        for index, count, host in answers.values():
            if count != self.count:
                return f"process {index} on {host} expects {count} processes, process 0 expects {self.count}: start all with one count"
            if index in taken:
                return f"two processes came as number {index}, on {taken[index]} and on {host}: give each its own host_domain_index"
            taken[index] = host
        return ""

    def _missing(self, indices: list[int]) -> str:
        return (
            f"{len(indices)} of {self.count} processes did not come to {self.folder} within {self.timeout_s:g} s: "
            f"host_domain_index {first_of(indices)}; check that they run, with this directory and job name"
        )

    def _write(self, name: str, note: Mapping[str, object]) -> None:
        target = self.folder / name
        beside = self.folder / f".{name}.{self.nonce}"
        try:
            beside.write_text(json.dumps(note))
            os.replace(beside, target)
        except OSError as error:
            raise _refused(self.folder, self.index, error) from error
        self.written.append(target)

    def _pause(self) -> None:
        time.sleep(self._wait_s)
        self._wait_s = min(MAX_POLL_S, self._wait_s * 1.2)


def _refused(folder: Path, index: int, error: OSError) -> FolderRefusedError:
    return FolderRefusedError(
        f"process {index} cannot write {folder} to meet the others ({error.strerror or error}): free space in it, or name another directory"
    )


def _read(path: Path) -> dict[str, object]:
    """A note's fields; a file that vanished or holds something else has none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= MAX_FILE_BYTES:
            note = json.loads(path.read_bytes())
            if isinstance(note, dict):
                return note
    return {}
