"""Builds kernels ahead of time, without a GPU, and reads what the compiler made of them.

Each build runs in a process of its own, since a failed assertion of the compiler ends its process. Registers, spills and instructions
come from the assembled code by the tools that triton brings along. No build needs a driver.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from treadle.kernels.registry import ARCHES, Arch, Build, Kernel, all_kernels

SHARED_LIMIT_BYTES: dict[Arch, int] = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may take."""

TENSOR_COLUMNS = 512
"""Columns of an sm_100 multiprocessor's tensor memory; code that asks for more is assembled to a trap."""

_TENSOR_CORE: dict[Arch, str] = {80: r"HMMA", 90: r"HGMMA", 100: r"UTC\w*MMA"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# Shared and tensor memory have instructions of like names (ATOMS, UTCATOMSWS, REDUX): those are no global atomics.
_ATOMIC = re.compile(r"(ATOMG|ATOM(\.|$)|RED(\.|G|$))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one kernel takes on one architecture."""

    kernel: str
    arch: str
    registers: int
    """A thread's."""
    spill_bytes: int
    """Local memory, a thread's: what did not fit its registers, and arrays that no register holds, which are as slow."""
    shared_bytes: int
    """A program's."""
    tensor_core_instructions: int
    """HMMA on sm_80, HGMMA on sm_90, UTCHMMA on sm_100, in the assembled code."""
    atomics: int
    """Global atomics and reductions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What the checks need beside the row."""

    kind: str
    fallback_instructions: int
    """HMMA in code of an architecture that has something better."""
    tensor_columns: int
    """Of sm_100's tensor memory."""
    wide_loads: int
    """Global loads of 16 bytes or more, those into shared memory included."""
    loads: int
    wide_stores: int
    stores: int
    instructions: int
    triton: str
    source: str
    """Hash of all that the build depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One build: its row and details, or why there is none."""

    kernel: str
    arch: str
    row: Row | None = None
    details: Details | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Result":
        """The inverse of `to_json`."""
        row, details = value["row"], value["details"]
        return cls(
            kernel=value["kernel"],
            arch=value["arch"],
            row=Row(**row) if row else None,
            details=Details(**details) if details else None,
            error=value["error"],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One kernel in one form for one architecture."""

    kernel: Kernel
    build: Build
    arch: Arch

    @property
    def name(self) -> str:
        """As the report names it."""
        return f"{self.kernel.name}[{self.build.label}]" if self.build.label else self.kernel.name

    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return self.kernel.settings[self.arch].options()

    def constants(self) -> dict[str, Any]:
        """Every compile-time constant."""
        return {**self.build.constants, **self.kernel.settings[self.arch].blocks}

    def source(self) -> str:
        """Hash of the kernel's code, what it calls, its constants and settings."""
        parts: list[Any] = [sorted(_sources(self.kernel.function).items()), self.arch, self.kernel.kind]
        parts += [sorted(d.items()) for d in (self.build.signature, self.constants(), self.options())] + [sorted(self.build.divisible)]
        return sha256(repr(parts).encode()).hexdigest()[:16]


def _sources(function: Any) -> dict[str, str]:
    """The code of a kernel and of all that it calls, and the constants that it reads. Triton's own key also holds line numbers."""
    found: dict[str, str] = {}
    waiting = [function]
    while waiting:
        at = waiting.pop()
        name = f"{at.fn.__module__}.{at.fn.__name__}"
        if name in found:
            continue
        found[name] = at.src
        for read in (at.fn.__globals__.get(read) for read in at.fn.__code__.co_names):
            if hasattr(read, "src") and hasattr(read, "fn"):
                waiting.append(read)
            elif type(read).__name__ == "constexpr":
                found[name] += repr(read.value)
    return found


def all_jobs(arches: Iterable[Arch] = ARCHES) -> list[Job]:
    """Every form of every kernel on every architecture."""
    return [Job(kernel, build, arch) for kernel in all_kernels() for build in kernel.builds for arch in arches]


def compile_job(job: Job) -> tuple[Row, Details]:
    """Builds one kernel here; a failed assertion of the compiler ends the process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = job.kernel.function
    constants = job.constants()
    names: list[str] = list(function.arg_names)
    unknown = [name for name in names if name not in constants and name not in job.build.signature]
    if unknown or len(constants) + len(job.build.signature) != len(names):
        given = [*constants, *job.build.signature]
        raise ValueError(f"parameters {unknown} have no type, {[name for name in given if name not in names]} are no parameters")
    signature = {name: "constexpr" if name in constants else job.build.signature[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*") or name in job.build.divisible
    }
    with tempfile.TemporaryDirectory(prefix="treadle-kernel-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        built = triton.compile(
            ASTSource(function, signature, constants, aligned), target=GPUTarget("cuda", job.arch, 32), options=job.options()
        )
        return _read(job, built, Path(folder), Path(triton.__file__).parent / "backends" / "nvidia" / "bin", triton.__version__)


def _read(job: Job, built: Any, folder: Path, tools: Path, version: str) -> tuple[Row, Details]:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = _tool(tools / "cuobjdump", "--dump-resource-usage", cubin)
    code = Counter(_INSTRUCTION.findall(_tool(tools / "cuobjdump", "--dump-sass", cubin)))

    def count(pattern: str) -> int:
        return sum(n for name, n in code.items() if re.match(pattern, name))

    row = Row(
        kernel=job.name,
        arch=f"sm_{job.arch}",
        registers=_field("REG", usage),
        spill_bytes=_field("STACK", usage),
        shared_bytes=int(built.metadata.shared),
        tensor_core_instructions=count(_TENSOR_CORE[job.arch]),
        atomics=sum(n for name, n in code.items() if _ATOMIC.match(name)),
    )
    details = Details(
        kind=job.kernel.kind,
        fallback_instructions=count("HMMA") if job.arch >= 90 else 0,
        tensor_columns=int(getattr(built.metadata, "tmem_size", None) or 0),
        wide_loads=count(r"(LDG|LDGSTS)\..*(128|256)|UBLKCP|UTMALDG"),
        loads=count(r"LDG|UBLKCP|UTMALDG"),
        wide_stores=count(r"STG\..*(128|256)|UTMASTG"),
        stores=count(r"STG|UTMASTG"),
        instructions=sum(code.values()),
        triton=version,
        source=job.source(),
    )
    return row, details


def _tool(*arguments: str | Path) -> str:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(arguments[0]).name} exited {done.returncode}: {done.stderr.strip()[:2000]}")
    return done.stdout + done.stderr


def _field(name: str, usage: str) -> int:
    found = re.search(rf"{name}:(\d+)", usage)
    assert found is not None, f"cuobjdump names no {name}"
    return int(found.group(1))


def run_jobs(jobs: list[Job], processes: int) -> Iterator[Result]:
    """Builds `jobs`, each in a forked process, `processes` at a time; results in the order of the jobs."""
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, Any]] = {}
    done: dict[int, Result] = {}
    handed_out = 0
    while handed_out < len(jobs):
        while waiting and len(running) < max(1, processes):
            index, job = waiting.pop()
            # A file, not a pipe: nobody needs to read while the child writes.
            answer = tempfile.TemporaryFile()
            child = os.fork()
            if child == 0:
                _answer_and_exit(job, answer)
            running[child] = (index, answer)
        child, status = os.wait()
        if child not in running:
            continue
        index, answer = running.pop(child)
        answer.seek(0)
        text = answer.read().decode()
        answer.close()
        job = jobs[index]
        if text:
            done[index] = Result.from_json(json.loads(text))
        else:
            done[index] = Result(kernel=job.name, arch=f"sm_{job.arch}", error=f"the compiler ended its process (status {status})")
        while handed_out in done:
            yield done.pop(handed_out)
            handed_out += 1


def _answer_and_exit(job: Job, answer: Any) -> None:
    """The child's whole life: one build, its result as JSON, and out without the parent's clean-up."""
    name, arch = job.name, f"sm_{job.arch}"
    try:
        row, details = compile_job(job)
        result = Result(kernel=name, arch=arch, row=row, details=details)
    except BaseException as error:  # whatever it is, the parent reports it
        result = Result(kernel=name, arch=arch, error=f"{type(error).__name__}: {error}"[:4000])
    answer.write(json.dumps(result.to_json()).encode())
    answer.flush()
    os._exit(0)


def faults(result: Result) -> list[str]:
    """What is wrong with a build, in words."""
    row, details = result.row, result.details
    if row is None or details is None:
        return [f"does not compile: {result.error}"]
    arch: Arch = next(a for a in ARCHES if f"sm_{a}" == row.arch)
    found: list[str] = []
    if row.spill_bytes:
        found.append(f"spills {row.spill_bytes} bytes: take smaller tiles, more warps or fewer stages")
    if row.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        found.append(
            f"takes {row.shared_bytes} bytes of shared memory, {row.arch} has {SHARED_LIMIT_BYTES[arch]}: take smaller tiles or fewer stages"
        )
    if row.atomics:
        found.append(f"has {row.atomics} global atomics: their order of addition changes from run to run")
    if details.tensor_columns > TENSOR_COLUMNS:
        found.append(f"takes {details.tensor_columns} columns of tensor memory, {row.arch} has {TENSOR_COLUMNS}: take one dot per loop")
    if details.kind == "matrix":
        if not row.tensor_core_instructions:
            found.append(f"has no {_TENSOR_CORE[arch]} instruction: its products do not run on {row.arch}'s tensor cores")
        if details.fallback_instructions:
            found.append(f"has {details.fallback_instructions} HMMA instructions: a tile has fewer than 64 rows")
    if details.kind == "streaming":
        found += [
            f"has {what} but none of 16 bytes: rows or tiles are not aligned"
            for what, any_, wide in (("loads", details.loads, details.wide_loads), ("stores", details.stores, details.wide_stores))
            if any_ and not wide
        ]
    return found


ROW_FIELDS = tuple(f.name for f in fields(Row))
